/*
 * The sample cache: what stays in the arena from one epoch to the next.
 *
 * Two kinds of slots are cached. A stream that reads whole chunks leaves chunks there as they are;
 * a stream that reads single samples copies each, when it lands, behind the one before in a PACKED
 * run of slots, where the map finds it by its index. So memory holds what an epoch takes, and none
 * of the neighbours of a selected sample.
 *
 * What is cached stays, and what comes when the cache is full is not cached. In a random order each
 * sample is needed as soon as any other, so that a fixed set saves its share of every epoch; in
 * storage order it does too, where evicting what was not used for longest saves nothing. What is
 * cached is a share of the chunks, or the samples of a share of the chunks, that is spread evenly
 * over the dataset: so each window of an order has its share, in the first epoch as well.
 *
 * Another selection makes that set useless. When an epoch begins and those since the last look have
 * given out as many samples as the largest of them has, the cache looks: a slot that had less than
 * three uses for four of its samples, IDLE_LOOKS times in a row, is evicted if others lacked room.
 * Twice, for epochs of training and of validation take turns.
 *
 * The cache has all slots but a reserve for what is on its way or lent (stream/choose.c). It gives
 * slots back when that reserve grows, and to a read that would have no memory otherwise.
 *
 * The map takes slots of the arena when a stream that packs samples begins, and gives them back
 * when it is empty and no such stream is left. A run is packed as [index, bytes] [index, bytes]
 * ..., each aligned to 8 bytes, so that an eviction knows what it takes out of the map.
 */
#include <string.h>

#include "reader/reader.h"

#define HEAD_BYTES 8u
/* In place of an index: bytes that no sample came to use, with their number. */
#define HOLE (UINT64_C(1) << 63)
#define MAP_MIN UINT64_C(64)
#define IDLE_REVIEWS_MAX 2u /* so often in a row too little used: the slot may be evicted */

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

/* ---- the map --------------------------------------------------------------------------------- */

static uint64_t map_next(const struct cache *cache, uint64_t at)
{
    return at + 1 < cache->map_capacity ? at + 1 : 0;
}

/* Places from one to another, forwards and around the end. */
static uint64_t map_distance(const struct cache *cache, uint64_t from, uint64_t to)
{
    return to >= from ? to - from : to + cache->map_capacity - from;
}

/* The place of an index in the map, or the empty place where it would be. */
static struct cached_sample *map_find(const struct cache *cache, uint64_t index)
{
    uint64_t at = cache_home(cache, index);
    while (cache->map[at].key != 0 && cache->map[at].key != index + 1) {
        at = map_next(cache, at);
    }
    return &cache->map[at];
}

/* Empties a place of the map, closing the gap. */
static void map_remove(struct cache *cache, struct cached_sample *sample)
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

/* A quarter of the map stays empty. */
static bool map_has_room(const struct cache *cache, uint64_t samples)
{
    return samples <= cache->map_capacity / 4 * 3;
}

static uint64_t map_capacity_for(uint64_t samples)
{
    uint64_t capacity = samples / 3 * 4 + 8;
    return capacity > MAP_MIN ? capacity : MAP_MIN;
}

uint64_t cache_map_bytes(uint64_t samples)
{
    return map_capacity_for(samples) * sizeof(struct cached_sample);
}

void cache_reserve_map(dlfs_reader *reader, uint64_t samples)
{
    struct cache *cache = &reader->cache;
    uint64_t capacity = map_capacity_for(samples);
    uint64_t run =
        (cache_map_bytes(samples) + reader->config.chunk_bytes - 1) >> reader->chunk_shift;
    if (map_has_room(cache, samples) || capacity > UINT32_MAX || run >= reader->slot_count) {
        return;
    }
    uint32_t slot = arena_take(reader, (uint32_t)run, true);
    if (slot == SLOT_NONE) {
        return;
    }
    struct cache grown = *cache;
    grown.map = (struct cached_sample *)(void *)slot_memory(reader, slot);
    grown.map_capacity = capacity;
    memset(grown.map, 0, capacity * sizeof(*grown.map));
    for (uint64_t at = 0; at < cache->map_capacity; at++) {
        if (cache->map[at].key != 0) {
            *map_find(&grown, cache->map[at].key - 1) = cache->map[at];
        }
    }
    if (cache->map != NULL) {
        arena_release(reader, cache->map_slot);
    }
    cache->map = grown.map;
    cache->map_capacity = capacity;
    cache->map_slot = slot;
}

/* Gives the slots of an empty map back, if no stream is going to fill it. */
static void release_empty_map(dlfs_reader *reader)
{
    struct cache *cache = &reader->cache;
    if (cache->map == NULL || cache->count > 0 || cache->map_in_use) {
        return;
    }
    cache->map = NULL;
    cache->map_capacity = 0;
    arena_release(reader, cache->map_slot);
}

bool cache_find(const dlfs_reader *reader, uint64_t index, uint64_t *offset)
{
    const struct cache *cache = &reader->cache;
    if (cache->count == 0) {
        return false;
    }
    const struct cached_sample *sample = map_find(cache, index);
    if (sample->key == 0 || (sample->offset & CACHE_PENDING)) {
        return false;
    }
    *offset = sample->offset;
    return true;
}

/* ---- room ------------------------------------------------------------------------------------ */

static uint64_t packed_bytes(uint64_t length)
{
    return HEAD_BYTES + ((length + 7) & ~UINT64_C(7));
}

static uint64_t *packed_head(const dlfs_reader *reader, uint64_t offset)
{
    return (uint64_t *)(void *)(reader->arena + offset - HEAD_BYTES);
}

uint32_t cache_victim(const dlfs_reader *reader)
{
    const struct cache *cache = &reader->cache;
    return cache->slots > cache->slots_max ? cache->idle.first : SLOT_NONE;
}

/* Notes that the cache lacks room, for the next look. */
static enum reservation refuse(struct cache *cache)
{
    cache->lacked_room = true;
    cache->full = cache->slots >= cache->slots_max; /* else a smaller sample may fit */
    return RESERVE_REFUSED;
}

/* Opens a run that has room for so many bytes. */
static enum reservation open_run(dlfs_reader *reader, uint64_t bytes)
{
    struct cache *cache = &reader->cache;
    uint64_t least = (bytes + reader->config.chunk_bytes - 1) >> reader->chunk_shift;
    if (cache->slots + least > cache->slots_max) {
        return refuse(cache);
    }
    uint64_t most = cache->slots_max - cache->slots;
    uint64_t run = cache->packed_run_slots > least ? cache->packed_run_slots : least;
    run = run < most ? run : most;
    uint32_t slot = arena_take_packed(reader, (uint32_t)run);
    if (slot == SLOT_NONE && run > least) {
        slot = arena_take_packed(reader, (uint32_t)least);
    }
    if (slot == SLOT_NONE) {
        return RESERVE_BLOCKED;
    }
    cache->open = slot;
    arena_release(reader, slot); /* the sample's own reference holds it */
    return RESERVE_DONE;
}

/* ---- samples --------------------------------------------------------------------------------- */

enum reservation cache_reserve(dlfs_reader *reader, uint64_t index, uint64_t length,
                               uint64_t *offset)
{
    struct cache *cache = &reader->cache;
    uint64_t bytes = packed_bytes(length);
    if (cache->full || cache->slots_max == 0 || !map_has_room(cache, cache->count + 1) ||
        map_find(cache, index)->key != 0) {
        return RESERVE_REFUSED;
    }
    const struct slot *open = cache->open != SLOT_NONE ? &reader->slots[cache->open] : NULL;
    if (open == NULL || open->chunk + bytes > (uint64_t)open->run << reader->chunk_shift) {
        enum reservation opened = open_run(reader, bytes);
        if (opened != RESERVE_DONE) {
            return opened;
        }
    }
    struct slot *slot = &reader->slots[cache->open];
    *offset = ((uint64_t)cache->open << reader->chunk_shift) + slot->chunk + HEAD_BYTES;
    *packed_head(reader, *offset) = index;
    slot->chunk += bytes;
    slot->samples++;
    slot->uses++;
    *map_find(cache, index) = (struct cached_sample){index + 1, *offset | CACHE_PENDING};
    cache->count++;
    arena_reference(reader, cache->open);
    return RESERVE_DONE;
}

void cache_publish(dlfs_reader *reader, uint64_t index)
{
    map_find(&reader->cache, index)->offset &= ~CACHE_PENDING;
}

void cache_abandon(dlfs_reader *reader, uint64_t index, uint64_t offset)
{
    struct location location;
    (void)reader_locate(reader, index, &location); /* it was good when the sample was read */
    uint64_t bytes = packed_bytes(location.length);
    uint32_t number = arena_head(reader, slot_of(reader, offset));
    struct slot *slot = &reader->slots[number];
    uint64_t end = ((uint64_t)number << reader->chunk_shift) + slot->chunk;
    if (offset - HEAD_BYTES + bytes == end) { /* the last one */
        slot->chunk -= bytes;
        slot->samples--;
    } else { /* counts as a sample without a use: a run with many of them is idle */
        *packed_head(reader, offset) = HOLE | bytes;
    }
    slot->uses -= slot->uses > 0;
    map_remove(&reader->cache, map_find(&reader->cache, index));
    arena_release(reader, number);
}

void cache_unmap_run(dlfs_reader *reader, uint32_t number)
{
    uint64_t start = (uint64_t)number << reader->chunk_shift;
    uint64_t end = start + reader->slots[number].chunk;
    for (uint64_t at = start; at < end;) {
        uint64_t index = *packed_head(reader, at + HEAD_BYTES);
        struct location location;
        if (index & HOLE) {
            at += index & ~HOLE;
            continue;
        }
        (void)reader_locate(reader, index, &location);
        map_remove(&reader->cache, map_find(&reader->cache, index));
        at += packed_bytes(location.length);
    }
    if (reader->cache.open == number) {
        reader->cache.open = SLOT_NONE;
    }
    reader->cache.full = false;
    release_empty_map(reader);
}

bool cache_admits_chunk(dlfs_reader *reader, uint64_t chunk, uint32_t run)
{
    struct cache *cache = &reader->cache;
    if (cache_spread(chunk) * reader->chunk_count >= (uint64_t)cache->slots_max << 32) {
        return false;
    }
    bool room = cache->slots + run <= cache->slots_max;
    cache->lacked_room |= !room;
    return room;
}

void cache_add_chunk(dlfs_reader *reader, uint32_t number)
{
    struct slot *slot = &reader->slots[number];
    if (!cache_admits_chunk(reader, slot->chunk, slot->run)) {
        return;
    }
    slot->cached = true;
    uint64_t mean = reader->sample_count / reader->chunk_count;
    slot->samples = mean > 0 ? (uint32_t)mean : 1;
    slot->uses = slot->samples;
    slot->idle_reviews = 0;
    reader->cache.slots += slot->run;
}

/* ---- epochs ---------------------------------------------------------------------------------- */

void cache_count_given(dlfs_reader *reader, uint64_t samples)
{
    reader->cache.clock += samples;
}

/* Evicts slots that the epochs since the last looks have hardly used, if others lack room. */
static void review_usage(dlfs_reader *reader)
{
    bool lacked_room = reader->cache.lacked_room;
    uint32_t next;
    reader->cache.lacked_room = false;
    for (uint32_t number = 0; number < reader->slot_count; number = next) {
        struct slot *slot = &reader->slots[number];
        next = number + slot->run;
        if (!slot->cached) {
            continue;
        }
        bool idle = 4 * (uint64_t)slot->uses < 3 * (uint64_t)slot->samples;
        slot->idle_reviews =
            idle ? (uint8_t)(slot->idle_reviews + (slot->idle_reviews < IDLE_REVIEWS_MAX)) : 0;
        slot->uses = 0;
        if (lacked_room && slot->idle_reviews >= IDLE_REVIEWS_MAX && slot->references == 0) {
            arena_evict_cached(reader, number);
        }
    }
}

void cache_begin_epoch(dlfs_reader *reader, uint64_t samples)
{
    struct cache *cache = &reader->cache;
    if (cache->clock - cache->reviewed_at >= cache->review_period) {
        review_usage(reader);
        cache->reviewed_at = cache->clock;
        cache->review_period = 0;
    }
    cache->review_period = samples > cache->review_period ? samples : cache->review_period;
}

void cache_set_limits(dlfs_reader *reader, uint32_t slots_max, uint32_t packed_run_slots,
                      bool map_in_use)
{
    struct cache *cache = &reader->cache;
    cache->slots_max = slots_max;
    cache->packed_run_slots = packed_run_slots;
    cache->map_in_use = map_in_use;
    cache->full = false;
    release_empty_map(reader);
}
