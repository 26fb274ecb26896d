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
/* Sets the bound on the private memory of batches that are read on demand. */
void stream_limit(dlfs_stream *stream, const struct read_limit *limit);
/* Returns the memory of the stream in bytes, in addition to the reader's. */
uint64_t stream_memory_bytes(const dlfs_stream *stream);

#endif
