/* A device that may be a member of a volume, and what its superblocks say. */
#ifndef DLFS_VOLUME_CANDIDATE_H
#define DLFS_VOLUME_CANDIDATE_H

#include "volume/source.h"

#define READ_MEMORY_BYTES (1u << 18)
#define REASON_BYTES 900u /* longest reason of one device; a message adds text around it */

/* A device that is a possible member, and the content of its superblock. */
struct candidate {
    dlfs_device *device;
    int code;                  /* why the device is not used; 0: it is used */
    bool has_magic;            /* one superblock copy, valid or not, begins with the magic */
    char reason[REASON_BYTES]; /* the reason for code, in words */
    char name[VOLUME_NAME_BYTES];
    /* The newest copy with features unknown to this code; generation 0: there is none. */
    uint64_t unknown_generation;
    uint64_t unknown_offset_bytes;
    uint8_t unknown_volume_uuid[VOLUME_UUID_BYTES];
    struct volume_superblock superblock;
};

/*
 * Reads a device's superblocks; sets code if it has none. The device gets one of `shares` equal
 * shares of the time left for each; if it does not answer, its code is DLFS_E_TIMEOUT.
 */
void candidate_identify(struct candidate *candidate, struct volume_limit *limit, uint32_t shares);

/* Sets why a device is not used. */
__attribute__((format(printf, 3, 4))) void candidate_refuse(struct candidate *candidate, int code,
                                                            const char *form, ...);

static inline unsigned long long wide(uint64_t value)
{
    return value;
}

#endif
