/*
 * The sample cache: decides which samples and chunks stay in the arena from one epoch to the next.
 * All functions are called with the arena's lock held.
 */
#ifndef DLFS_CACHE_H
#define DLFS_CACHE_H

#include "arena/cache_map.h"

/* 2^32 times the fraction of the square root of 2. Its multiples are spread evenly. */
#define CACHE_SPREAD UINT32_C(0x6A09E667)

/* Makes the map large enough for this many samples, if there are slots for it. */
void cache_reserve_map(dlfs_reader *reader, uint64_t samples);
/* Returns a number below 2^32 for each chunk. A share of these numbers is the same share of every
 * range of chunks. */
static inline uint64_t cache_spread(uint64_t chunk)
{
    return chunk * CACHE_SPREAD & UINT32_MAX;
}

enum reservation {
    RESERVE_DONE,
    RESERVE_REFUSED, /* the cache is full, or has the sample */
    RESERVE_BLOCKED, /* reads under way occupy the memory that the cache may take */
};

/*
 * Reserves room for a sample, with a reference for the caller. Look-ups find the sample after
 * cache_publish; cache_abandon gives the room up.
 */
enum reservation cache_reserve(dlfs_reader *reader, uint64_t index, uint64_t length,
                               uint64_t *offset);
/* Makes a reserved sample visible: its bytes are copied and verified. */
void cache_publish(dlfs_reader *reader, uint64_t index);
/* Gives up the room of a reserved sample. */
void cache_abandon(dlfs_reader *reader, uint64_t index, uint64_t offset);
/* Returns true if a chunk that was read into a run of slots is to be cached. */
bool cache_admits_chunk(dlfs_reader *reader, uint64_t chunk, uint32_t run);
/* Ends the load of a chunk as arena_end_load, and caches the chunk if there is room for it. */
void cache_end_load(dlfs_reader *reader, uint32_t slot, bool valid, struct bad_samples *bad);
/* Counts samples that streams have given. */
void cache_count_given(dlfs_reader *reader, uint64_t samples);
/* Begins an epoch of this many samples, and reviews the uses of the cached slots if that is due. */
void cache_begin_epoch(dlfs_reader *reader, uint64_t samples);
/* Sets the most slots that are cached, the slots of a PACKED run, and whether a stream that packs
 * samples is open. */
void cache_set_limits(dlfs_reader *reader, uint32_t slots_max, uint32_t packed_run_slots,
                      bool map_in_use);
/* Evicts all cached slots that no batch has pinned. */
void cache_evict_idle(dlfs_reader *reader);
/* Ends the look-ups: what batches have pinned is evicted later, without the directory, which may be
 * gone then. */
void cache_close(dlfs_reader *reader);

#endif
