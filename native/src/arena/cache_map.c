/*
 * The map of the sample cache: a hash table from the index of a packed sample to its offset in the
 * arena. It lies in slots of the arena itself.
 *
 * A run of PACKED slots holds [index, bytes] [index, bytes] ..., each aligned to 8 bytes. So the
 * eviction of a run knows which samples it removes from the map.
 */
#include "arena/cache_map.h"

#include "reader/state.h"

#define MAP_ENTRIES_MIN UINT64_C(64)

void cache_init(struct cache *cache)
{
    *cache = (struct cache){
        .open = SLOT_NONE,
        .map_slot = SLOT_NONE,
        .packed_run_slots = 1,
        .batches_pinned = CACHE_BATCHES_PINNED_MIN,
        .idle = {SLOT_NONE, SLOT_NONE, 0},
    };
}

static uint64_t map_next(const struct cache *cache, uint64_t at)
{
    return at + 1 < cache->map_capacity ? at + 1 : 0;
}

/* Returns the entries from one to another, forwards and around the end. */
static uint64_t map_distance(const struct cache *cache, uint64_t from, uint64_t to)
{
    return to >= from ? to - from : to + cache->map_capacity - from;
}

struct cached_sample *cache_map_find(const struct cache *cache, uint64_t index)
{
    uint64_t at = cache_home(cache, index);
    while (cache->map[at].key != 0 && cache->map[at].key != index + 1) {
        at = map_next(cache, at);
    }
    return &cache->map[at];
}

/* Moves later entries of the chain into the gap, so that a search finds them without it. */
void cache_map_remove(struct cache *cache, struct cached_sample *sample)
{
    uint64_t gap = (uint64_t)(sample - cache->map);
    uint64_t at = gap;
    for (;;) {
        at = map_next(cache, at);
        if (cache->map[at].key == 0) {
            break;
        }
        uint64_t home = cache_home(cache, cache->map[at].key - 1);
        if (map_distance(cache, home, at) >= map_distance(cache, gap, at)) {
            cache->map[gap] = cache->map[at];
            gap = at;
        }
    }
    cache->map[gap].key = 0;
    cache->count--;
}

bool cache_map_has_room(const struct cache *cache, uint64_t samples)
{
    return samples <= cache->map_capacity / 4 * 3;
}

uint64_t cache_map_bytes(uint64_t samples)
{
    uint64_t capacity = samples / 3 * 4 + 8;
    return (capacity > MAP_ENTRIES_MIN ? capacity : MAP_ENTRIES_MIN) * sizeof(struct cached_sample);
}

bool cache_find(const dlfs_reader *reader, uint64_t index, uint64_t *offset)
{
    const struct cache *cache = &reader->cache;
    if (cache->count == 0) {
        return false;
    }
    const struct cached_sample *sample = cache_map_find(cache, index);
    if (sample->key == 0 || (sample->offset & CACHE_PENDING)) {
        return false;
    }
    *offset = sample->offset;
    return true;
}

uint64_t cache_packed_bytes(uint64_t length)
{
    return CACHE_INDEX_BYTES + ((length + 7) & ~UINT64_C(7));
}

uint64_t *cache_packed_index(const dlfs_reader *reader, uint64_t offset)
{
    return (uint64_t *)(void *)(reader->arena->memory + offset - CACHE_INDEX_BYTES);
}

void cache_unmap_run(dlfs_reader *reader, uint32_t number)
{
    uint64_t start = (uint64_t)number << reader->chunk_shift;
    uint64_t end = start + reader->arena->slots[number].chunk;
    for (uint64_t at = start; reader->cache.map != NULL && at < end;) {
        uint64_t index = *cache_packed_index(reader, at + CACHE_INDEX_BYTES);
        struct location location;
        if (index & CACHE_HOLE) {
            at += index & ~CACHE_HOLE;
            continue;
        }
        (void)reader_locate(reader, index, &location);
        cache_map_remove(&reader->cache, cache_map_find(&reader->cache, index));
        at += cache_packed_bytes(location.length);
    }
    if (reader->cache.open == number) {
        reader->cache.open = SLOT_NONE;
    }
    reader->cache.full = false;
}
