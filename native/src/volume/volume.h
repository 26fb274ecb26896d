/*
 * A volume inside the library: its superblock and catalog, decoded (FORMAT.md, sections 2 to 4),
 * and reading of the chunks of catalogs and directories.
 *
 * Decoding trusts no bytes, whether or not checksums are right: every count is compared with a
 * limit and every range with the available bytes before it is used. It does no I/O.
 */
#ifndef DLFS_VOLUME_H
#define DLFS_VOLUME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "dlfs/api.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is read in place");
_Static_assert(sizeof(dlfs_extent) == 16, "a run, as in FORMAT.md");

#define VOLUME_DRAFT 8u /* state of development of the format, until the first release */
#define VOLUME_SUPERBLOCK_BYTES 4096u
#define VOLUME_SUPERBLOCK_B_OFFSET_BYTES 65536u
#define VOLUME_LOCATIONS_OFFSET_BYTES 262144u
#define VOLUME_LOCATIONS_BYTES_MAX 65536u
#define VOLUME_DATA_OFFSET_BYTES_MIN (UINT64_C(1) << 20)
#define VOLUME_MEMBER_BYTES_MAX (UINT64_C(1) << 62)
#define VOLUME_BLOCK_BYTES_MIN 512u
#define VOLUME_BLOCK_BYTES_MAX 65536u
#define VOLUME_CHUNKS_MIN 4u
#define VOLUME_CHUNK_END_MAX (UINT64_C(1) << 63)
#define VOLUME_LABEL_BYTES_MAX 64u
#define VOLUME_CATALOG_RUNS_MAX 16u
#define VOLUME_CATALOG_HEADER_BYTES 64u
#define VOLUME_CATALOG_BYTES_MAX (UINT64_C(16) << 20)
#define VOLUME_DATASETS_MAX 65536u
#define VOLUME_RUNS_MAX 262144u
#define VOLUME_RECORD_BYTES 168u /* without runs, name and tagged values */
#define VOLUME_NAME_BYTES 320u   /* longest name of a member in messages, NUL included */
#define VOLUME_UUID_BYTES 16u
#define VOLUME_NUMBER_MAX ((UINT64_C(1) << 63) - 1) /* largest generation or time */

/* An entry of a superblock's table of groups. */
struct volume_group_entry {
    uint64_t first_chunk;
    uint64_t row_count;
    uint32_t member_count;
    uint16_t state;
    uint16_t reserved;
};

struct volume_superblock {
    /* The fields on media, in their order. */
    uint8_t magic[8];
    uint16_t version_major;
    uint16_t version_minor;
    uint32_t superblock_bytes;
    uint64_t incompat;
    uint64_t ro_compat;
    uint8_t volume_uuid[16];
    uint8_t member_uuid[16];
    uint32_t member_number;
    uint32_t member_count;
    uint32_t chunk_bytes;
    uint32_t block_bytes;
    uint64_t data_offset_bytes;
    uint32_t group_count; /* at least 1 */
    uint32_t draft;
    uint64_t member_bytes;
    uint64_t generation;
    uint64_t created;
    uint32_t replicas;
    uint32_t catalog_run_count;
    uint64_t catalog_bytes;
    uint32_t catalog_crc32c;
    uint32_t label_bytes;
    uint8_t label[64];
    uint8_t reserved[48];
    dlfs_extent catalog_runs[VOLUME_CATALOG_RUNS_MAX];
    uint8_t member_uuids[DLFS_MEMBERS_MAX][16];
    uint32_t removed[512];
    struct volume_group_entry group_entries[DLFS_GROUPS_MAX];
    uint8_t reserved_last[28];
    uint32_t crc32c;
    /* What follows from the table of groups. */
    dlfs_chunk_group groups[DLFS_GROUPS_MAX]; /* in order of their chunks and members */
    uint64_t chunk_end;                       /* number of the chunk after the last one */
};

_Static_assert(offsetof(struct volume_superblock, groups) == VOLUME_SUPERBLOCK_BYTES,
               "as in FORMAT.md");
_Static_assert(offsetof(struct volume_superblock, member_uuids) == 512, "as in FORMAT.md");

/* A row of the catalog's table (FORMAT.md, section 4.2). */
struct volume_row {
    uint8_t uuid[16];
    uint32_t version;
    uint16_t state;
    uint16_t layout;
    uint64_t created;
    uint64_t sample_count;
    uint64_t sample_bytes;
    uint64_t seed;
    uint64_t data_bytes;
    uint64_t entries_bytes;
    uint64_t names_bytes;
    uint64_t attributes_address;
    uint64_t attributes_bytes;
    uint64_t attributes_head_bytes;
    uint32_t data_run_count;
    uint32_t directory_run_count;
    uint32_t journal_run_count;
    uint16_t name_bytes;
    uint16_t tags_bytes;
    uint64_t journal_bytes;
    uint8_t content_digest[16];
    uint8_t packing_digest[16];
    uint32_t granted_run_count;
    uint32_t reserved;
};

_Static_assert(sizeof(struct volume_row) == VOLUME_RECORD_BYTES, "as in FORMAT.md");

/* One version of one dataset; pointers are into the catalog's bytes. */
struct volume_record {
    const struct volume_row *row;
    const uint8_t *name; /* of row->name_bytes */
    const dlfs_extent *data_runs;
    const dlfs_extent *directory_runs;
};

struct volume_catalog {
    struct volume_record *records; /* of sealed datasets; allocated with malloc */
    uint32_t count;
};

struct dlfs_volume {
    struct volume_superblock superblock;      /* the one in force */
    dlfs_device *devices[DLFS_MEMBERS_MAX];   /* by member number; NULL: not used */
    dlfs_device *owned[2 * DLFS_MEMBERS_MAX]; /* the devices opened by dlfs_mount */
    uint32_t owned_count;
    /*
     * Names of the members in messages, by number: the URI, cut to fit. Empty: the member was not
     * given.
     */
    char names[DLFS_MEMBERS_MAX][VOLUME_NAME_BYTES];
    uint32_t dataset_count; /* number of open datasets; atomic */
    void *catalog_memory;
    size_t catalog_memory_bytes;
    struct volume_catalog catalog;
};

static inline uint16_t volume_u16(const uint8_t *bytes)
{
    uint16_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static inline uint32_t volume_u32(const uint8_t *bytes)
{
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static inline uint64_t volume_u64(const uint8_t *bytes)
{
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/*
 * Returns the offset of the tail superblock of a member of this size; 0 if there is no room for
 * one.
 */
static inline uint64_t volume_tail_offset(uint64_t member_bytes)
{
    uint64_t blocks = member_bytes / VOLUME_SUPERBLOCK_BYTES;
    return blocks ? (blocks - 1) * VOLUME_SUPERBLOCK_BYTES : 0;
}

/*
 * Decodes VOLUME_SUPERBLOCK_BYTES. Errors: DLFS_E_FORMAT, DLFS_E_CHECKSUM, -EPROTONOSUPPORT (a
 * major version, a draft or a feature that this code does not know).
 */
int volume_superblock_decode(const uint8_t *block, struct volume_superblock *out);
/* Location of a member; the pointers lead into the record's bytes. */
struct volume_member_location {
    const uint8_t *uuid;
    const char *uri; /* without a final NUL */
    uint32_t uri_bytes;
};

struct volume_locations {
    const uint8_t *volume_uuid;
    uint64_t generation;
    uint32_t count;
    struct volume_member_location members[DLFS_MEMBERS_MAX];
};

/* Decodes VOLUME_LOCATIONS_BYTES_MAX bytes. Returns false if they are no location record. */
bool volume_locations_decode(const uint8_t *bytes, struct volume_locations *out);
/* Returns the group that has a chunk; NULL if no group has it. */
const dlfs_chunk_group *volume_group_of(const struct volume_superblock *superblock, uint64_t chunk);
/* Returns true if one group has all chunks of a run, of which there is at least one. */
bool volume_has_run(const struct volume_superblock *superblock, const dlfs_extent *run);
/* Returns true if a block begins with the magic of superblocks. */
bool volume_superblock_has_magic(const uint8_t *block);
/*
 * Returns true if a block is an intact superblock that another state of development of the format
 * wrote, and its draft.
 */
bool volume_superblock_is_other_draft(const uint8_t *block, uint32_t *draft);
/*
 * Returns true if a block is an intact superblock with features unknown to this code, and its
 * generation and its volume's UUID (16 bytes).
 */
bool volume_superblock_is_unknown(const uint8_t *block, uint64_t *generation, uint8_t *uuid);

/*
 * Decodes the catalog_bytes of a superblock's catalog, at an address that is a multiple of 8. The
 * records point into these bytes. Errors: DLFS_E_CHECKSUM, DLFS_E_FORMAT, -ENOMEM.
 */
int volume_catalog_decode(const uint8_t *bytes, const struct volume_superblock *superblock,
                          struct volume_catalog *out);
void volume_catalog_free(struct volume_catalog *catalog);

/*
 * Returns the number of ways to read a space. Callers try them in turn while the bytes are wrong:
 * first beginning with each copy, then avoiding each member.
 */
uint32_t volume_choice_count(const struct volume_superblock *superblock);
/* The chunks of a volume that hold a catalog or a directory. */
struct volume_space {
    const dlfs_extent *runs;
    uint32_t run_count;
    uint64_t chunk_count; /* chunks of the runs that are in use */
};

/* The location of a byte on a member. */
struct volume_location {
    uint32_t member;
    uint64_t offset_bytes;
};

/*
 * Reads a space into memory aligned to blocks. A chunk that cannot be read from one copy is read
 * from the next. choice: 0..volume_choice_count-1. A member that does not answer within its part of
 * the limit is not asked again. Errors: those of the last copy's device, with its location in *bad.
 */
struct volume_limit;
int volume_read_space(const dlfs_volume *volume, struct volume_limit *limit,
                      const struct volume_space *space, uint32_t choice, void *memory,
                      struct volume_location *bad);
/*
 * Returns the location of the first copy of a byte of a space; position < the bytes of its chunks.
 */
struct volume_location volume_locate(const dlfs_volume *volume, const struct volume_space *space,
                                     uint64_t position);

/* The name of a member in messages; "member N" if the member was not given. */
struct volume_name {
    char text[VOLUME_NAME_BYTES];
};
struct volume_name volume_member_name(const dlfs_volume *volume, uint32_t member);

/* Formats a message for the caller, cut to message_bytes, and returns the code. */
__attribute__((format(printf, 4, 5))) int volume_fail(char *message, uint32_t message_bytes,
                                                      int code, const char *form, ...);

#endif
