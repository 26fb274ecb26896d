/*
 * The sample cache: which samples and chunks stay in the arena from one epoch to the next
 * (reader/cache.c), and the map that finds packed samples by their index (reader/cache_map.c). All
 * functions are called with the reader's lock held.
 */
#ifndef DLFS_CACHE_H
#define DLFS_CACHE_H

#include "reader/arena.h"

/* 2^32 times the fraction of the square root of 2. Its multiples are spread evenly. */
#define CACHE_SPREAD UINT32_C(0x6A09E667)
#define CACHE_BATCHES_PINNED_MIN 2 /* one that the consumer has, and the next one */
#define CACHE_PENDING (UINT64_C(1) << 63)

/* An entry of the map: a sample that lies in PACKED slots. */
struct cached_sample {
    uint64_t key;    /* index + 1; 0 if the entry is empty */
    uint64_t offset; /* in the arena; CACHE_PENDING is set while its bytes are being copied */
};

struct cache {
    struct cached_sample
        *map; /* [map_capacity] hash table, open addressing; in the arena, or NULL */
    uint64_t map_capacity;
    uint32_t map_slot;         /* first slot of the map */
    bool map_in_use;           /* a stream that packs samples is open */
    uint64_t count;            /* samples in the map */
    uint32_t open;             /* the PACKED run that takes the next sample, or SLOT_NONE */
    uint32_t slots;            /* number of cached slots */
    uint32_t slots_max;        /* bound of `slots` while the present streams read */
    uint32_t packed_run_slots; /* slots of a PACKED run */
    struct slot_list idle;     /* cached slots without references, the longest idle first */
    uint64_t clock;            /* samples that streams have given */
    uint64_t reviewed_at;      /* value of `clock` at the last review of the slots' uses */
    uint64_t review_period;    /* samples of the largest epoch that began since then */
    double batches_pinned;     /* estimate of the batches that consumers hold at a time */
    bool full;                 /* no sample fits for now */
    bool lacked_room;          /* a sample was refused since the last review */
};

void cache_init(struct cache *cache);
/* Returns the bytes of a map for so many samples. */
uint64_t cache_map_bytes(uint64_t samples);
/* Makes the map large enough for so many samples, if there are slots for it. */
void cache_reserve_map(dlfs_reader *reader, uint64_t samples);
/* Returns true if the map has room for so many samples: a quarter of it stays empty. */
bool cache_map_has_room(const struct cache *cache, uint64_t samples);
/* Finds the map's entry of a sample, or the empty entry where it belongs. */
struct cached_sample *cache_map_find(const struct cache *cache, uint64_t index);
/* Empties an entry of the map. */
void cache_map_remove(struct cache *cache, struct cached_sample *sample);
/* Returns true if the sample is cached, and its offset in the arena. */
bool cache_find(const dlfs_reader *reader, uint64_t index, uint64_t *offset);
/* Removes the samples of a PACKED run from the map, since the run is evicted. */
void cache_unmap_run(dlfs_reader *reader, uint32_t slot);
/* Returns the bytes of a packed sample: its index and its bytes, aligned. */
uint64_t cache_packed_bytes(uint64_t length);
/* Returns the index stored before the packed sample at an offset of the arena, or its HOLE mark. */
uint64_t *cache_packed_index(const dlfs_reader *reader, uint64_t offset);
#define CACHE_INDEX_BYTES 8u
/* Instead of an index: marks bytes that hold no sample. The lower bits are their number. */
#define CACHE_HOLE (UINT64_C(1) << 63)

/* Returns where the search for an index begins in the map. */
static inline uint64_t cache_home(const struct cache *cache, uint64_t index)
{
    return (index * UINT64_C(0x9E3779B97F4A7C15) >> 32) * cache->map_capacity >> 32;
}

/* Prefetches the map's entry of a sample. */
static inline void cache_prefetch(const struct cache *cache, uint64_t index)
{
    if (cache->count > 0) {
        __builtin_prefetch(&cache->map[cache_home(cache, index)]);
    }
}

/* Returns the cached slot to evict first if the cache has more slots than it may, else SLOT_NONE.
 */
static inline uint32_t cache_victim(const struct cache *cache)
{
    return cache->slots > cache->slots_max ? cache->idle.first : SLOT_NONE;
}

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
/* Begins an epoch of so many samples, and reviews the uses of the cached slots if that is due. */
void cache_begin_epoch(dlfs_reader *reader, uint64_t samples);
/* Sets the most slots that are cached, the slots of a PACKED run, and whether a stream that packs
 * samples is open. */
void cache_set_limits(dlfs_reader *reader, uint32_t slots_max, uint32_t packed_run_slots,
                      bool map_in_use);

#endif
