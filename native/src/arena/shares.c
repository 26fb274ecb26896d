/*
 * The shares that an arena's readers have of its slots.
 *
 * A reader is active while it has a stream, or was read since the arena's slots were taken once
 * over. Active readers have equal shares, but none has more than it can use: what one leaves is
 * divided among the others. The other readers have what is left then. Each has at least what is
 * reserved for it (reader/residents.c). Shares bound what a reader may take; what it holds beyond a
 * share that has shrunk, others take when they need it.
 *
 * Threads: all functions are called with the arena's lock held.
 */
#include "reader/state.h"

uint32_t share_needed(const dlfs_reader *reader, uint32_t most)
{
    return reader->slots_enough < most ? (uint32_t)reader->slots_enough : most;
}

/* Returns the slots of a reader's share at a level: those that it needs of so many, or that are
 * reserved for it. */
static uint32_t share_at(const dlfs_reader *reader, uint32_t level)
{
    uint32_t slots = share_needed(reader, level);
    return slots > reader->share.reserved ? slots : reader->share.reserved;
}

/* Returns the slots that the active readers, or the others, take with at most `level` for each. */
static uint64_t count_allotted(const dlfs_arena *arena, bool active, uint32_t level)
{
    uint64_t total = 0;
    for (const dlfs_reader *reader = arena->readers; reader != NULL; reader = reader->share.next) {
        total += reader->share.active == active ? share_at(reader, level) : 0;
    }
    return total;
}

/* Returns the most slots for each with which all together take no more than `slots`. */
static uint32_t find_level(const dlfs_arena *arena, bool active, uint64_t slots)
{
    uint32_t low = 0;
    uint32_t high = arena->slot_count;
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (count_allotted(arena, active, middle) <= slots) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

bool share_is_exceeded(const dlfs_reader *reader)
{
    return reader->share.slots_used > reader->slots_max;
}

bool share_is_pinned(const dlfs_reader *reader)
{
    uint32_t idle = reader->idle_slots.count + reader->cache.idle.count; /* or more: runs */
    return reader->share.slots_used > reader->slots_max + idle;
}

bool share_fits(const dlfs_reader *reader)
{
    bool parts = (reader->config.flags & DLFS_READER_PARTS) != 0;
    return !parts && reader->chunk_count + SLOTS_MIN <= reader->slots_max;
}

static void set_share(dlfs_reader *reader, uint32_t level)
{
    struct cache *cache = &reader->cache;
    uint32_t slots = share_at(reader, level > SLOTS_MIN ? level : SLOTS_MIN);
    if (slots == reader->slots_max) {
        return;
    }
    reader->slots_max = slots;
    reader->dataset_fits = share_fits(reader);
    cache->slots_max = cache->slots_max < slots ? cache->slots_max : slots;
    reader->share.changes++; /* for the streams */
    pthread_cond_broadcast(&reader->released);
}

void arena_divide(dlfs_arena *arena)
{
    arena->divided_at = arena->taken;
    for (dlfs_reader *reader = arena->readers; reader != NULL; reader = reader->share.next) {
        if (reader->owns_arena) {
            return;
        }
        reader->share.active =
            reader->open_streams > 0 || arena->taken - reader->share.used_at < arena->slot_count;
    }
    uint32_t level = find_level(arena, true, arena->slot_count - count_allotted(arena, false, 0));
    uint64_t left = arena->slot_count - count_allotted(arena, true, level);
    uint32_t idle_level = find_level(arena, false, left);
    for (dlfs_reader *reader = arena->readers; reader != NULL; reader = reader->share.next) {
        set_share(reader, reader->share.active ? level : idle_level);
    }
}

void share_use(dlfs_reader *reader)
{
    reader->share.used_at = reader->arena->taken;
    if (!reader->share.active && !reader->owns_arena) {
        arena_divide(reader->arena);
    }
}

void share_claim(dlfs_reader *reader, uint32_t run)
{
    const dlfs_arena *arena = reader->arena;
    bool lacks = reader->share.slots_used + run > reader->slots_max;
    bool stale = arena->taken - arena->divided_at >= arena->slot_count;
    if (!reader->owns_arena && (!reader->share.active || (lacks && stale))) {
        reader->share.used_at = arena->taken;
        arena_divide(reader->arena);
    }
}
