/*
 * The sample cache: what stays in the arena from one epoch to the next.
 *
 * Two kinds of slots are cached. A stream that reads whole chunks leaves them there as they are. A
 * stream that reads single samples copies each of them behind the previous one in a PACKED run of
 * slots, where a map finds it by its index (arena/cache_map.c). So memory holds the samples of a
 * selection without their neighbours.
 *
 * A cached sample stays, and a sample that comes when the cache is full is not cached. In a random
 * order each sample is needed as soon as any other, so a fixed set saves its share of every epoch.
 * In storage order it does so too, while LRU eviction would save nothing. The cache takes a share
 * of the chunks, or the samples of a share of the chunks, which is spread evenly over the dataset:
 * so each window of an order finds its share, also in the first epoch.
 *
 * Another selection makes that set useless. So the cache reviews the uses of its slots when an
 * epoch begins, after streams have given as many samples as the largest epoch since the last review
 * has. A slot is evicted if it had less than three uses for four of its samples, IDLE_REVIEWS_MAX
 * times in a row, and other samples were refused for lack of room. Two reviews are needed because
 * epochs of training and of validation alternate.
 *
 * The cache has all slots but a reserve for reads under way and pinned batches
 * (stream/cache_size.c). It releases slots when that reserve grows, and to a read that would have
 * no memory otherwise.
 *
 * The map takes slots of the arena when a stream that packs samples begins. It releases them when
 * it is empty and no such stream is left.
 *
 * Threads: all functions are called with the arena's lock held.
 */
#include "arena/cache.h"

#include <string.h>

#include "reader/state.h"

#define IDLE_REVIEWS_MAX 2u /* in a row: then a slot may be evicted */

void cache_reserve_map(dlfs_reader *reader, uint64_t samples)
{
    struct cache *cache = &reader->cache;
    uint64_t capacity = cache_map_bytes(samples) / sizeof(struct cached_sample);
    uint64_t run =
        (cache_map_bytes(samples) + reader->config.chunk_bytes - 1) >> reader->chunk_shift;
    if (cache_map_has_room(cache, samples) || capacity > UINT32_MAX || run >= reader->slots_max) {
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
            *cache_map_find(&grown, cache->map[at].key - 1) = cache->map[at];
        }
    }
    if (cache->map != NULL) {
        arena_release(reader, cache->map_slot);
    }
    cache->map = grown.map;
    cache->map_capacity = capacity;
    cache->map_slot = slot;
}

/* ---- samples --------------------------------------------------------------------------------- */

/* Notes for the next review that the cache lacks room. */
static enum reservation refuse(struct cache *cache)
{
    cache->lacked_room = true;
    cache->full = cache->slots >= cache->slots_max; /* if not, a smaller sample may fit */
    return RESERVE_REFUSED;
}

/* Opens a run that has room for this many bytes. */
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
    arena_release(reader, slot); /* the sample's own reference pins it */
    return RESERVE_DONE;
}

enum reservation cache_reserve(dlfs_reader *reader, uint64_t index, uint64_t length,
                               uint64_t *offset)
{
    struct cache *cache = &reader->cache;
    uint64_t bytes = cache_packed_bytes(length);
    if (cache->full || cache->slots_max == 0 || !cache_map_has_room(cache, cache->count + 1) ||
        cache_map_find(cache, index)->key != 0 || reader->resident_slots != NULL) {
        return RESERVE_REFUSED;
    }
    const struct slot *open = cache->open != SLOT_NONE ? &reader->arena->slots[cache->open] : NULL;
    if (open == NULL || open->chunk + bytes > (uint64_t)open->run << reader->chunk_shift) {
        enum reservation opened = open_run(reader, bytes);
        if (opened != RESERVE_DONE) {
            return opened;
        }
    }
    struct slot *slot = &reader->arena->slots[cache->open];
    *offset = ((uint64_t)cache->open << reader->chunk_shift) + slot->chunk + CACHE_INDEX_BYTES;
    *cache_packed_index(reader, *offset) = index;
    slot->chunk += bytes;
    slot->samples++;
    slot->uses++;
    *cache_map_find(cache, index) = (struct cached_sample){index + 1, *offset | CACHE_PENDING};
    cache->count++;
    arena_reference(reader, cache->open);
    return RESERVE_DONE;
}

void cache_publish(dlfs_reader *reader, uint64_t index)
{
    cache_map_find(&reader->cache, index)->offset &= ~CACHE_PENDING;
}

void cache_abandon(dlfs_reader *reader, uint64_t index, uint64_t offset)
{
    struct location location;
    (void)reader_locate(reader, index, &location); /* it was valid when the sample was read */
    uint64_t bytes = cache_packed_bytes(location.length);
    uint32_t number = arena_head(reader, slot_of(reader, offset));
    struct slot *slot = &reader->arena->slots[number];
    uint64_t end = ((uint64_t)number << reader->chunk_shift) + slot->chunk;
    if (offset - CACHE_INDEX_BYTES + bytes == end) { /* the last sample of the run */
        slot->chunk -= bytes;
        slot->samples--;
    } else { /* counts as a sample without uses, so a run with many holes is evicted */
        *cache_packed_index(reader, offset) = CACHE_HOLE | bytes;
    }
    slot->uses -= slot->uses > 0;
    cache_map_remove(&reader->cache, cache_map_find(&reader->cache, index));
    arena_release(reader, number);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

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

/* Caches a chunk that was read, if there is room for it. */
static void add_chunk(dlfs_reader *reader, uint32_t number)
{
    struct slot *slot = &reader->arena->slots[number];
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

void cache_end_load(dlfs_reader *reader, uint32_t number, bool valid, struct bad_samples *bad)
{
    arena_end_load(reader, number, valid, bad);
    if (valid && !reader->arena->slots[number].resident) {
        add_chunk(reader, number);
    }
}

/* ---- epochs ---------------------------------------------------------------------------------- */

void cache_count_given(dlfs_reader *reader, uint64_t samples)
{
    reader->cache.clock += samples;
}

/* Evicts slots that the epochs since the last reviews have hardly used, if others lack room. */
static void review_usage(dlfs_reader *reader)
{
    bool lacked_room = reader->cache.lacked_room;
    uint32_t next;
    reader->cache.lacked_room = false;
    for (uint32_t number = 0; number < reader->arena->slot_count; number = next) {
        struct slot *slot = &reader->arena->slots[number];
        next = number + slot->run;
        if (!slot->cached || slot->reader != reader) {
            continue;
        }
        bool idle = 4 * (uint64_t)slot->uses < 3 * (uint64_t)slot->samples;
        slot->idle_reviews =
            idle ? (uint8_t)(slot->idle_reviews + (slot->idle_reviews < IDLE_REVIEWS_MAX)) : 0;
        slot->uses = 0;
        if (lacked_room && slot->idle_reviews >= IDLE_REVIEWS_MAX && slot->references == 0) {
            arena_evict(reader, number);
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
    arena_release_empty_map(reader);
}

void cache_evict_idle(dlfs_reader *reader)
{
    while (reader->cache.idle.count > 0) {
        arena_evict(reader, reader->cache.idle.first);
    }
}

void cache_close(dlfs_reader *reader)
{
    struct cache *cache = &reader->cache;
    cache_evict_idle(reader);
    if (cache->map != NULL) {
        cache->map = NULL;
        cache->map_capacity = 0;
        cache->count = 0;
        arena_release(reader, cache->map_slot);
    }
}
