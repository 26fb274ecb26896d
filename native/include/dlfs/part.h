/*
 * Ranges of samples, for programs that have no memory for a whole large sample. The conventions are
 * those of dlfs.h.
 */
#ifndef DLFS_PART_H
#define DLFS_PART_H

#include <dlfs/dlfs.h>
#include <stdbool.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A byte range of one sample. */
typedef struct dlfs_part {
    uint64_t index;
    uint64_t offset_bytes; /* offset of the range in the sample */
    uint64_t length_bytes;
} dlfs_part;

/*
 * Copies a range of a sample, verified, into buffer, of part->length_bytes. Of a sample larger than
 * a chunk, the chunks that the range touches are read and verified, and stay in the reader's memory
 * as it has room; of any other, the whole sample. Blocks, within the reader's timeout. Any threads
 * at once.
 *
 * Errors: -EINVAL (no such sample, or the range is not within it), -ENOMEM, or the code of a failed
 * read. *failure then has the code too, and the location of the bytes that could not be read or are
 * damaged, with their checksums; otherwise its code is 0. After an error the content of the buffer
 * is undefined.
 */
DLFS_API int dlfs_reader_read_part(dlfs_reader *reader, const dlfs_part *part, void *buffer,
                                   dlfs_failure *failure);

/* Takes the next bytes of a range, which lie in these pieces until it returns. */
typedef void dlfs_part_sink(void *argument, const struct iovec *pieces, uint32_t piece_count);

/*
 * Reads a range of a sample like dlfs_reader_read_part, but gives its bytes to a function, from
 * where they lie in the reader's memory: in one call if they fit there together, else in several
 * calls in order, of which an error is the end. The function must not call the reader.
 */
DLFS_API int dlfs_reader_send_part(dlfs_reader *reader, const dlfs_part *part, dlfs_part_sink *sink,
                                   void *argument, dlfs_failure *failure);

/*
 * Brings a range of a sample into the reader's memory, for one that is needed soon, as
 * dlfs_reader_read_part. Ends soon, with DLFS_E_TIMEOUT, after another thread has set *stop by an
 * atomic store; stop may be NULL.
 */
DLFS_API int dlfs_reader_load_part(dlfs_reader *reader, const dlfs_part *part, const bool *stop,
                                   dlfs_failure *failure);

#ifdef __cplusplus
}
#endif

#endif
