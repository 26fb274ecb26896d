/*
 * Parts of samples, copied into a caller's buffer: for samples that are larger than the memory that
 * a program has for them. The conventions are those of dlfs.h.
 */
#ifndef DLFS_PART_H
#define DLFS_PART_H

#include <dlfs/dlfs.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_MEMBER_ANY UINT32_MAX

/* A part of one sample. */
typedef struct dlfs_part {
    uint64_t index;
    uint64_t offset_bytes; /* in the sample */
    uint64_t length_bytes;
    uint32_t avoided_member; /* read from other copies where there are any; or DLFS_MEMBER_ANY */
    uint32_t reserved;       /* 0 */
} dlfs_part;

/*
 * Copies a part of a sample into buffer, of part->length_bytes. The bytes are not verified: the
 * checksum is that of the whole sample, and dlfs_crc32c computes it over parts in a row. Where it
 * proves wrong, another copy's bytes come with avoided_member. Takes 8 MiB of memory beside the
 * buffer. Blocks, for each 8 MiB within the reader's timeout.
 *
 * *failure says where the sample lies and what its checksum should be. Errors: -EINVAL (no such
 * sample, not within it, no such member), -ENOMEM, or the code of a read that failed, which
 * *failure has too, with the place of the bytes that were not had; its code is 0 otherwise. What
 * was copied to the buffer is of no use then. Any threads at once.
 */
DLFS_API int dlfs_reader_read_part(dlfs_reader *reader, const dlfs_part *part, void *buffer,
                                   dlfs_failure *failure);

#ifdef __cplusplus
}
#endif

#endif
