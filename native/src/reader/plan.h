/* Planning: from the samples that are wanted to the spans that bring them. */
#ifndef DLFS_PLAN_H
#define DLFS_PLAN_H

#include <stdbool.h>
#include <stdint.h>

struct dlfs_reader;

/* A sample to be brought into memory. */
struct miss {
    uint64_t address;
    uint64_t length;   /* > 0 */
    uint64_t position; /* the caller's own */
    uint32_t crc32c;
    uint32_t reserved;
};

/*
 * A block-aligned run of the data space that holds the wants first_want..first_want+want_count-1.
 */
struct plan_span {
    uint64_t address;
    uint64_t length;
    uint64_t memory_offset; /* from the arena's or the block's base, once there is memory */
    uint32_t first_miss;
    uint32_t miss_count;
    uint32_t slot; /* the arena's slot, or SLOT_NONE */
    bool whole;    /* a chunk, or a run of them, to be kept */
};

/* Sorts by address; scratch has room for as many. */
void plan_sort(struct miss *misses, struct miss *scratch, uint64_t count);
/*
 * Merges sorted wants into spans: neighbours within one chunk join when the gap between their
 * blocks is at most the reader's gap_bytes. Returns the number of spans, at most count.
 */
uint64_t plan_merge(const struct dlfs_reader *reader, const struct miss *misses, uint64_t count,
                    struct plan_span *spans);
/* Widens sorted wants to whole chunks, or to the run of chunks that a larger sample lies in. */
uint64_t plan_widen(const struct dlfs_reader *reader, const struct miss *misses, uint64_t count,
                    struct plan_span *spans);

#endif
