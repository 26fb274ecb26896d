/*
 * The slots of an arena.
 *
 * A slot is free, holds samples for a batch or a read under way (TRANSIENT), holds a chunk of a
 * dataset (LOADING, CHUNK), or holds copies of single samples (PACKED). References are counted. A
 * chunk without references is idle. When memory is needed, the chunk that was idle for longest is
 * evicted first: all that the look-ahead needs holds a reference, so idle chunks are needed later.
 * Idle slots of the cache stay for the next epoch; arena/cache.c decides which of them may go.
 *
 * A reader holds no more slots than its share. If no slot is free that it may take, another reader
 * holds more than its share, which has shrunk, and loses idle slots.
 *
 * A resident chunk has one more reference, by which it stays in its slot (reader/residents.c).
 *
 * Threads: all functions are called with the arena's lock held.
 */
#include <stdlib.h>

#include "reader/state.h"

/* ---- lists of slots -------------------------------------------------------------------------- */

/* Returns the link to what follows a slot in a list, or precedes it. */
static uint32_t *link_behind(dlfs_arena *arena, struct slot_list *list, uint32_t number)
{
    return number == SLOT_NONE ? &list->first : &arena->slots[number].next;
}

static uint32_t *link_before(dlfs_arena *arena, struct slot_list *list, uint32_t number)
{
    return number == SLOT_NONE ? &list->last : &arena->slots[number].previous;
}

/* Inserts a slot between two neighbours; SLOT_NONE is either end. */
static void list_insert(dlfs_arena *arena, struct slot_list *list, uint32_t number,
                        uint32_t previous, uint32_t next)
{
    arena->slots[number].previous = previous;
    arena->slots[number].next = next;
    *link_behind(arena, list, previous) = number;
    *link_before(arena, list, next) = number;
    list->count++;
}

static void list_push(dlfs_arena *arena, struct slot_list *list, uint32_t number)
{
    list_insert(arena, list, number, list->last, SLOT_NONE);
}

static void list_remove(dlfs_arena *arena, struct slot_list *list, uint32_t number)
{
    const struct slot *slot = &arena->slots[number];
    *link_behind(arena, list, slot->previous) = slot->next;
    *link_before(arena, list, slot->next) = slot->previous;
    list->count--;
}

void slots_init(dlfs_arena *arena)
{
    arena->free_slots = (struct slot_list){SLOT_NONE, SLOT_NONE, 0};
    for (uint32_t slot = 0; slot < arena->slot_count; slot++) {
        arena->slots[slot].run = 1;
        arena->slots[slot].waiters = SLOT_NONE;
        list_push(arena, &arena->free_slots, slot);
    }
}

/* ---- wakes ----------------------------------------------------------------------------------- */

void arena_wake_all(dlfs_arena *arena)
{
    for (dlfs_reader *reader = arena->readers; reader != NULL; reader = reader->share.next) {
        pthread_cond_broadcast(&reader->released);
    }
}

/* Wakes the readers that lacked a slot. */
static void wake_waiting(dlfs_arena *arena)
{
    for (dlfs_reader *reader = arena->readers; arena->waiting > 0 && reader != NULL;
         reader = reader->share.next) {
        if (reader->share.waiting) {
            reader->share.waiting = false;
            arena->waiting--;
            pthread_cond_broadcast(&reader->released);
        }
    }
}

/* ---- eviction -------------------------------------------------------------------------------- */

/* Frees every slot of a run. They are the next to be taken, since their memory is in the caches. */
static void run_free(dlfs_arena *arena, uint32_t first)
{
    uint32_t run = arena->slots[first].run;
    arena->slots[first].reader->share.slots_used -= run;
    for (uint32_t slot = first + run; slot-- > first;) {
        arena->slots[slot].state = SLOT_FREE;
        arena->slots[slot].run = 1;
        arena->slots[slot].cached = false;
        free(arena->slots[slot].bad);
        arena->slots[slot].bad = NULL;
        list_insert(arena, &arena->free_slots, slot, SLOT_NONE, arena->free_slots.first);
    }
    wake_waiting(arena);
}

static struct slot_list *idle_list(dlfs_reader *reader, const struct slot *slot)
{
    return slot->cached ? &reader->cache.idle : &reader->idle_slots;
}

/* Counts a run as one of chunks, or no longer. */
static void count_chunks(dlfs_reader *reader, const struct slot *slot, bool more)
{
    reader->arena->chunk_slot_count += more ? slot->run : -slot->run;
    reader->share.chunks += more ? slot->run : -slot->run;
}

void arena_release_empty_map(dlfs_reader *reader)
{
    struct cache *cache = &reader->cache;
    if (cache->map == NULL || cache->count > 0 || cache->map_in_use) {
        return;
    }
    cache->map = NULL;
    cache->map_capacity = 0;
    arena_release(reader, cache->map_slot);
}

void arena_evict(dlfs_reader *reader, uint32_t number)
{
    dlfs_arena *arena = reader->arena;
    const struct slot *slot = &arena->slots[number];
    list_remove(arena, idle_list(reader, slot), number);
    reader->cache.slots -= slot->cached ? slot->run : 0;
    if (slot->state == SLOT_PACKED) {
        cache_unmap_run(reader, number);
        arena_release_empty_map(reader);
    } else {
        count_chunks(reader, slot, false);
        reader->chunk_slots[slot->chunk] = 0;
    }
    run_free(arena, number);
}

/* Which slots may be evicted. */
enum eviction { EVICT_NONE, EVICT_IDLE, EVICT_CACHED };

/* Evicts one idle slot of a reader. Returns false if there is none to evict. */
static bool evict_one(dlfs_reader *reader, enum eviction eviction)
{
    uint32_t victim = cache_victim(&reader->cache);
    if (victim != SLOT_NONE) {
        arena_evict(reader, victim);
    } else if (reader->idle_slots.count > 0) {
        arena_evict(reader, reader->idle_slots.first);
    } else if (eviction == EVICT_CACHED && reader->cache.idle.count > 0) {
        arena_evict(reader, reader->cache.idle.first);
    } else {
        return false;
    }
    return true;
}

/*
 * Evicts an idle slot of a reader that holds more than its share; for one that has hardly any slot,
 * of the reader that was not read for longest. Returns false if there is none.
 */
static bool evict_other(const dlfs_reader *needy)
{
    dlfs_reader *oldest = NULL;
    for (dlfs_reader *reader = needy->arena->readers; reader != NULL; reader = reader->share.next) {
        if (share_is_exceeded(reader) && evict_one(reader, EVICT_CACHED)) {
            return true;
        }
        bool idle = reader->idle_slots.count + reader->cache.idle.count > 0;
        if (idle && (oldest == NULL || reader->share.used_at < oldest->share.used_at)) {
            oldest = reader;
        }
    }
    return needy->share.slots_used < SLOTS_MIN && oldest != NULL && evict_one(oldest, EVICT_CACHED);
}

void arena_evict_excess(dlfs_reader *reader)
{
    while (share_is_exceeded(reader) && evict_one(reader, EVICT_CACHED)) {
    }
}

/* Returns how many runs of slots readers hold beyond their shares that can be evicted. */
static uint32_t count_excess(const dlfs_arena *arena)
{
    uint32_t count = 0;
    for (const dlfs_reader *reader = arena->readers; reader != NULL; reader = reader->share.next) {
        count +=
            share_is_exceeded(reader) ? reader->idle_slots.count + reader->cache.idle.count : 0;
    }
    return count;
}

/*
 * Evicts slots of a reader until its share has room for this many more, or, if it holds more than
 * that already, as many as it takes. Returns false if there are none to evict.
 */
static bool keep_share(dlfs_reader *reader, uint32_t run, enum eviction eviction)
{
    uint32_t used = reader->share.slots_used;
    uint32_t most = used > reader->slots_max ? used : reader->slots_max;
    while (reader->share.slots_used + run > most) {
        if (!evict_one(reader, eviction)) {
            return false;
        }
    }
    return true;
}

/* ---- runs of slots --------------------------------------------------------------------------- */

/* Makes one run of free slots, TRANSIENT with one reference. */
static void occupy_run(dlfs_reader *reader, uint32_t first, uint32_t run)
{
    dlfs_arena *arena = reader->arena;
    for (uint32_t slot = first; slot < first + run; slot++) {
        list_remove(arena, &arena->free_slots, slot);
        arena->slots[slot].state = SLOT_TAIL;
        arena->slots[slot].head = first;
    }
    struct slot *head = &arena->slots[first];
    head->state = SLOT_TRANSIENT;
    head->run = run;
    head->references = 1;
    head->cached = false;
    head->waiters = SLOT_NONE;
    head->reader = reader;
    reader->share.slots_used += run;
    arena->taken += run;
    reader->share.used_at = arena->taken;
}

uint32_t arena_starve(dlfs_reader *reader)
{
    if (!reader->share.waiting && reader->share.slots_used < reader->slots_max) {
        reader->share.waiting = true;
        reader->arena->waiting++;
    }
    return SLOT_NONE;
}

static bool is_claimable(const dlfs_reader *reader, const struct slot *slot, enum eviction eviction)
{
    if (slot->state == SLOT_FREE || eviction == EVICT_NONE) {
        return slot->state == SLOT_FREE;
    }
    bool idle = (slot->state == SLOT_CHUNK || slot->state == SLOT_PACKED) && slot->references == 0;
    bool may = slot->reader == reader ? !slot->cached || eviction == EVICT_CACHED
                                      : share_is_exceeded(slot->reader);
    return idle && may;
}

/* Finds the first of `run` neighbouring slots that are free or may be evicted, or SLOT_NONE. */
static uint32_t find_run(const dlfs_reader *reader, uint32_t run, enum eviction eviction)
{
    const dlfs_arena *arena = reader->arena;
    uint32_t found = 0;
    for (uint32_t slot = 0; slot < arena->slot_count;) {
        const struct slot *at = &arena->slots[slot];
        found = is_claimable(reader, at, eviction) ? found + at->run : 0;
        slot += at->run;
        if (found >= run) {
            return slot - found;
        }
    }
    return SLOT_NONE;
}

/* Evicts whatever lies in a run of slots. */
static void evict_run(dlfs_arena *arena, uint32_t first, uint32_t run)
{
    for (uint32_t number = first; number < first + run; number++) {
        const struct slot *slot = &arena->slots[number];
        if (slot->state != SLOT_FREE && slot->state != SLOT_TAIL) {
            arena_evict(slot->reader, number);
        }
    }
}

static uint32_t take_run(dlfs_reader *reader, uint32_t run, bool displace)
{
    bool cached = displace || cache_victim(&reader->cache) != SLOT_NONE;
    enum eviction eviction = cached ? EVICT_CACHED : EVICT_IDLE;
    uint32_t first = find_run(reader, run, EVICT_NONE);
    if (first == SLOT_NONE) {
        first = find_run(reader, run, EVICT_IDLE);
    }
    if (first == SLOT_NONE && cached) {
        first = find_run(reader, run, EVICT_CACHED);
    }
    if (first == SLOT_NONE) {
        return arena_starve(reader);
    }
    evict_run(reader->arena, first, run);
    if (!keep_share(reader, run, eviction)) {
        return SLOT_NONE;
    }
    occupy_run(reader, first, run);
    return first;
}

uint32_t arena_take(dlfs_reader *reader, uint32_t run, bool displace)
{
    dlfs_arena *arena = reader->arena;
    share_claim(reader, run);
    if (run > 1) {
        return take_run(reader, run, displace);
    }
    enum eviction eviction = displace ? EVICT_CACHED : EVICT_IDLE;
    if (!keep_share(reader, 1, eviction)) {
        return SLOT_NONE;
    }
    if (arena->free_slots.count == 0 && !evict_other(reader) && !evict_one(reader, eviction)) {
        return arena_starve(reader);
    }
    uint32_t slot = arena->free_slots.first;
    occupy_run(reader, slot, 1);
    return slot;
}

/* Finds the last run of this many free slots, or SLOT_NONE. */
static uint32_t find_last_run(const dlfs_arena *arena, uint32_t run)
{
    uint32_t found = 0;
    for (uint32_t slot = arena->slot_count; slot-- > 0;) {
        found = arena->slots[slot].state == SLOT_FREE ? found + 1 : 0;
        if (found == run) {
            return slot;
        }
    }
    return SLOT_NONE;
}

uint32_t arena_take_packed(dlfs_reader *reader, uint32_t run)
{
    dlfs_arena *arena = reader->arena;
    uint32_t first = SLOT_NONE;
    share_claim(reader, run);
    if (run == 1) { /* the slot that was free for longest: mostly it lies at the end */
        first = arena->free_slots.last;
    } else if (arena->free_slots.count >= run) {
        first = find_last_run(arena, run);
    }
    if (first == SLOT_NONE) {
        first = find_run(reader, run, EVICT_IDLE);
    }
    if (first == SLOT_NONE) {
        return arena_starve(reader);
    }
    evict_run(arena, first, run);
    if (!keep_share(reader, run, EVICT_IDLE)) {
        return SLOT_NONE;
    }
    occupy_run(reader, first, run);
    struct slot *slot = &arena->slots[first];
    slot->state = SLOT_PACKED;
    slot->chunk = 0;
    slot->cached = true;
    slot->samples = slot->uses = 0;
    slot->idle_reviews = 0;
    reader->cache.slots += run;
    return first;
}

uint32_t arena_head(const dlfs_reader *reader, uint32_t number)
{
    const struct slot *slot = &reader->arena->slots[number];
    return slot->state == SLOT_TAIL ? slot->head : number;
}

/* ---- references ------------------------------------------------------------------------------ */

void arena_reference(dlfs_reader *reader, uint32_t number)
{
    number = arena_head(reader, number);
    struct slot *slot = &reader->arena->slots[number];
    if (slot->references++ == 0) {
        list_remove(reader->arena, idle_list(reader, slot), number);
    }
}

void arena_release(dlfs_reader *reader, uint32_t number)
{
    number = arena_head(reader, number);
    struct slot *slot = &reader->arena->slots[number];
    if (--slot->references > 0) {
        return;
    }
    if (slot->state == SLOT_CHUNK || slot->state == SLOT_PACKED) {
        list_push(reader->arena, idle_list(reader, slot), number);
        if (share_is_exceeded(reader)) {
            wake_waiting(reader->arena); /* which may evict it */
        }
    } else {
        dlfs_arena *arena = reader->arena;
        uint32_t others = arena->slot_count - arena->free_slots.count - arena->chunk_slot_count;
        arena->other_slots_most =
            others > arena->other_slots_most ? others : arena->other_slots_most;
        run_free(arena, number);
    }
    pthread_cond_broadcast(&reader->released);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

void arena_begin_load(dlfs_reader *reader, uint32_t number, uint64_t chunk, const void *owner)
{
    struct slot *slot = &reader->arena->slots[number];
    slot->state = SLOT_LOADING;
    count_chunks(reader, slot, true);
    slot->chunk = chunk;
    slot->owner = owner;
    reader->chunk_slots[chunk] = number + 1;
}

void arena_make_resident(dlfs_reader *reader, uint32_t number)
{
    struct slot *slot = &reader->arena->slots[number];
    if (reader->resident_slots == NULL || slot->bad != NULL || slot->run != 1) {
        return;
    }
    arena_reference(reader, number);
    if (slot->cached) {
        slot->cached = false;
        reader->cache.slots -= slot->run;
    }
    atomic_store_explicit(&slot->resident, true, memory_order_relaxed);
    atomic_store_explicit(&reader->resident_slots[slot->chunk], number + 1, memory_order_release);
}

void arena_end_load(dlfs_reader *reader, uint32_t number, bool valid, struct bad_samples *bad)
{
    struct slot *slot = &reader->arena->slots[number];
    slot->state = valid ? SLOT_CHUNK : SLOT_TRANSIENT;
    slot->bad = bad; /* run_free frees it */
    slot->owner = NULL;
    slot->waiters = SLOT_NONE;
    if (!valid) {
        count_chunks(reader, slot, false);
        reader->chunk_slots[slot->chunk] = 0;
        return;
    }
    arena_make_resident(reader, number);
}

uint32_t arena_find(const dlfs_reader *reader, uint64_t chunk)
{
    return reader->chunk_slots[chunk] - 1;
}

uint32_t arena_available(const dlfs_reader *reader)
{
    uint32_t victims = cache_victim(&reader->cache) != SLOT_NONE;
    uint32_t used = reader->share.slots_used;
    uint32_t room = reader->slots_max > used ? reader->slots_max - used : 0;
    uint32_t free = reader->arena->free_slots.count;
    free += room > free ? count_excess(reader->arena) : 0;
    return (free < room ? free : room) + reader->idle_slots.count + victims;
}

void slots_free_all(dlfs_reader *reader)
{
    dlfs_arena *arena = reader->arena;
    uint32_t next;
    for (uint32_t number = 0; reader->share.slots_used > 0; number = next) {
        const struct slot *slot = &arena->slots[number];
        next = number + slot->run;
        if (slot->state == SLOT_FREE || slot->reader != reader) {
            continue;
        }
        if (slot->state == SLOT_LOADING || slot->state == SLOT_CHUNK) {
            count_chunks(reader, slot, false);
        }
        run_free(arena, number);
    }
}

static bool is_bad(const struct bad_samples *bad, uint64_t address)
{
    uint64_t low = 0;
    uint64_t high = bad->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (bad->addresses[middle] < address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < bad->count && bad->addresses[low] == address;
}

bool arena_holds(const dlfs_reader *reader, uint32_t number, const struct location *location,
                 uint64_t *offset)
{
    const struct slot *slot = &reader->arena->slots[number];
    uint64_t start = location->address - (slot->chunk << reader->chunk_shift);
    if (slot->state != SLOT_CHUNK || start + location->length > (uint64_t)slot->run
                                                                    << reader->chunk_shift) {
        return false;
    }
    *offset = ((uint64_t)number << reader->chunk_shift) + start;
    return slot->bad == NULL || !is_bad(slot->bad, location->address);
}

bool arena_look_up(dlfs_reader *reader, uint64_t index, const struct location *location,
                   uint64_t *offset)
{
    uint32_t slot = arena_find(reader, location->chunk);
    bool found = (slot != SLOT_NONE && arena_holds(reader, slot, location, offset)) ||
                 cache_find(reader, index, offset);
    if (!found) {
        return false;
    }
    slot = arena_head(reader, slot_of(reader, *offset));
    arena_reference(reader, slot);
    reader->arena->slots[slot].uses++;
    return true;
}
