/* The order of an epoch, as streams and channels see it: its kind, parameters and memory. */
#ifndef DLFS_SEQUENCE_H
#define DLFS_SEQUENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "dlfs/sequence.h"

/* The parameters from which another process can make the same sequence. */
struct sequence_parameters {
    uint64_t count; /* samples */
    uint64_t seed;
    uint64_t epoch;
    uint32_t kind; /* DLFS_ORDER_* */
    uint32_t window_chunks;
    uint32_t chunk_bytes;
    uint32_t reserved;
};
void sequence_describe(const dlfs_sequence *sequence, struct sequence_parameters *parameters);

/* DLFS_ORDER_*. */
uint32_t sequence_kind(const dlfs_sequence *sequence);
/* Number of positions in the order. */
uint64_t sequence_count(const dlfs_sequence *sequence);
/* Returns the chosen samples, as [count] indices, or NULL if the order is over all samples. */
const uint64_t *sequence_chosen(const dlfs_sequence *sequence, uint64_t *count);
/* Returns true if the order is random and contains no sample twice. */
bool sequence_permutes(const dlfs_sequence *sequence);
/* Number of chunks whose samples DLFS_ORDER_CHUNK mixes. */
uint32_t sequence_window(const dlfs_sequence *sequence);
/* Memory that the sequence owns, in bytes; borrowed arrays are not counted. */
uint64_t sequence_memory_bytes(const dlfs_sequence *sequence);

#endif
