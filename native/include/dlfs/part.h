/*
 * Parts of large samples, copied into a buffer of the caller: for programs that have no memory for
 * the whole sample. The conventions are those of dlfs.h.
 */
#ifndef DLFS_PART_H
#define DLFS_PART_H

#include <dlfs/dlfs.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_MEMBER_ANY UINT32_MAX

/* A byte range of one sample. */
typedef struct dlfs_part {
    uint64_t index;
    uint64_t offset_bytes; /* offset of the part in the sample */
    uint64_t length_bytes;
    uint32_t
        avoided_member; /* member not to read from if another copy exists, or DLFS_MEMBER_ANY */
    uint32_t reserved;  /* 0 */
} dlfs_part;

/*
 * Copies a part of a sample into buffer, of part->length_bytes. The bytes are not verified, because
 * the checksum covers the whole sample. A caller that reads all parts in order can compute it with
 * dlfs_crc32c; if it is wrong, avoided_member selects another copy. Takes 8 MiB of memory in
 * addition to the buffer. Blocks, for each 8 MiB within the reader's timeout. Any threads at once.
 *
 * *failure gets the location of the sample and its checksum. Errors: -EINVAL (no such sample, not
 * within it, no such member), -ENOMEM, or the code of a failed read. *failure then has the code
 * too, and the location of the bytes that could not be read; otherwise its code is 0. After an
 * error the content of the buffer is undefined.
 */
DLFS_API int dlfs_reader_read_part(dlfs_reader *reader, const dlfs_part *part, void *buffer,
                                   dlfs_failure *failure);

#ifdef __cplusplus
}
#endif

#endif
