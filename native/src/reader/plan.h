/*
 * Planning of a read: sorts the samples to read by address and merges neighbours into spans. Knows
 * addresses and sizes only; it does no I/O and takes no lock.
 *
 * Source: the opportunistic batching of the DLFS paper.
 */
#ifndef DLFS_PLAN_H
#define DLFS_PLAN_H

#include <stdbool.h>
#include <stdint.h>

struct dlfs_reader;

/* A sample that is not in memory and has to be read. */
struct miss {
    uint64_t address;  /* of its first byte, in the dataset's data space */
    uint64_t length;   /* in bytes, > 0 */
    uint64_t position; /* the caller's own number of it */
    uint32_t crc32c;   /* expected checksum */
    uint32_t reserved;
};

/* A byte range of the data space, aligned to blocks, that one read brings. It holds the misses
 * first_miss..first_miss+miss_count-1. */
struct plan_span {
    uint64_t address;
    uint64_t length;
    uint64_t memory_offset; /* from the base of the arena or of the private memory */
    uint32_t first_miss;
    uint32_t miss_count;
    uint32_t slot;     /* the arena's slot where it lands, or SLOT_NONE */
    bool whole_chunks; /* it covers all samples of its chunks, which are to stay in the arena */
};

/* Sorts misses by address. The scratch array has room for as many. */
void plan_sort(struct miss *misses, struct miss *scratch, uint64_t count);
/*
 * Merges sorted misses into spans. Neighbours in one chunk join when the gap between their blocks
 * is at most the reader's gap_bytes. Returns the number of spans, at most count.
 */
uint64_t plan_merge(const struct dlfs_reader *reader, const struct miss *misses, uint64_t count,
                    struct plan_span *spans);
/*
 * Widens sorted misses to all samples of their chunks, or of the run of chunks that a larger sample
 * lies in.
 * Returns the number of spans, at most count. Adds the chunks of all spans to *slots.
 */
uint64_t plan_widen(const struct dlfs_reader *reader, const struct miss *misses, uint64_t count,
                    struct plan_span *spans, uint64_t *slots);
/*
 * Keeps the first of the widened spans, as many as have room in slots_max slots, and merges the
 * other misses instead. Returns the number of spans, at most count.
 */
uint64_t plan_narrow(const struct dlfs_reader *reader, const struct miss *misses, uint64_t count,
                     struct plan_span *spans, uint64_t span_count, uint64_t slots_max);

#endif
