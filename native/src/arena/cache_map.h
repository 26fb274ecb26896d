/*
 * The state of the sample cache, and the map that finds packed samples by their index. All
 * functions are called with the arena's lock held.
 */
#ifndef DLFS_CACHE_MAP_H
#define DLFS_CACHE_MAP_H

#include "arena/arena.h"

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
/* Returns the bytes of a map for this many samples. */
uint64_t cache_map_bytes(uint64_t samples);
/* Returns true if the map has room for this many samples: a quarter of it stays empty. */
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

#endif
