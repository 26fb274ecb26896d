/* The functions of a stream (an epoch that is read ahead) for other parts of the library. */
#ifndef DLFS_STREAM_H
#define DLFS_STREAM_H

#include <stdbool.h>

#include "reader/reader.h"

/* stream/positions.c */
/* Returns true if all samples of the stream's part lie below `total` positions. */
bool stream_fits(const dlfs_stream_config *config, uint64_t total);
/* Computes the indices of the consumer's samples ordinal..ordinal+count-1. */
int stream_indices(const dlfs_stream_config *config, uint64_t ordinal, uint64_t count,
                   uint64_t *out);
/* stream/stream.c */
/* Bounds on the memory that a stream uses for its consumer. */
struct stream_bounds {
    struct read_limit limit; /* of a batch that is read on demand */
    uint64_t
        ahead_bytes_max; /* of samples read ahead, but for those that are needed soon. The chunks
                            plan and the chunk copy plan, whose samples stay, have no bound */
    const _Atomic bool *stop; /* creating the stream ends soon after this is set; or NULL */
};
/* Creates a stream as dlfs_stream_create, with bounds. */
int stream_create(dlfs_reader *reader, const dlfs_stream_config *config,
                  const struct stream_bounds *bounds, dlfs_stream **out);
/* Returns the memory of the stream in bytes, in addition to the reader's. */
uint64_t stream_memory_bytes(const dlfs_stream *stream);

#endif
