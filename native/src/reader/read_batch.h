/* A read of samples as a batch while it is under way: its state, which its two files share. */
#ifndef DLFS_READ_BATCH_H
#define DLFS_READ_BATCH_H

#include "reader/internal.h"

#define MISSING (-1) /* the offset of a sample that is not in memory yet */

struct read {
    dlfs_reader *reader;
    struct fetch *fetch;
    struct batch *batch;
    struct miss *misses; /* [miss_count] samples that are not in memory */
    uint64_t miss_count;
    struct plan_span *spans; /* [span_count] */
    uint64_t span_count;
    uint64_t started;   /* of the spans */
    uint64_t finished;  /* of the spans */
    uint64_t hit_bytes; /* of the samples that were in memory */
    bool whole_chunks;  /* there is memory for whole chunks to stay */
    struct read_terms *terms;
};

/* Adds a sample that cannot be read to the batch's failures. */
int read_fail(struct read *read, uint64_t position, int code, uint32_t crc_got,
              uint64_t bad_address);
/* Finds the samples of the batch that are in memory; read->misses gets the others. */
int read_find(struct read *read);
/* Plans the spans of the misses, and takes memory for them. */
int read_place(struct read *read);

#endif
