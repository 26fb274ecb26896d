/*
 * The sample memory: one mapping, cut into slots of a chunk each.
 *
 * A slot is free, holds samples for a batch or a read under way (TRANSIENT), holds a chunk of the
 * dataset (LOADING, CHUNK), or holds copies of single samples (PACKED). References are counted. A
 * chunk without references is idle. When memory is needed, the chunk that was idle for longest is
 * evicted first: all that the look-ahead needs holds a reference, so idle chunks are needed later.
 * Idle slots of the cache stay for the next epoch; reader/cache.c decides which of them may go.
 *
 * Resident chunks. Where other processes share the memory and the whole dataset fits in it, a sound
 * chunk stays in its slot as long as the reader lives. It has a reference of its own, and an entry
 * in an index behind the slots, which the other processes read by themselves
 * (channel/resident.c). The remaining slots are enough for all chunks that are not in memory yet,
 * and for SLOTS_MIN more.
 * Datasets with a sample that spans two chunks have no resident chunks: they could separate the
 * neighbouring slots that such a sample needs.
 *
 * Threads: all functions but arena_map and arena_free are called with the reader's lock held.
 */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "platform/memory.h"
#include "reader/state.h"

#define PAGE_BYTES_MIN 4096u
#define LARGE_BYTES ((size_t)2 << 20) /* dlfs_memory_map aligns larger mappings to this */

/* ---- lists of slots -------------------------------------------------------------------------- */

static void list_push(dlfs_reader *reader, struct slot_list *list, uint32_t number)
{
    struct slot *slot = &reader->slots[number];
    slot->next = SLOT_NONE;
    slot->previous = list->last;
    if (list->last == SLOT_NONE) {
        list->first = number;
    } else {
        reader->slots[list->last].next = number;
    }
    list->last = number;
    list->count++;
}

static void list_push_first(dlfs_reader *reader, struct slot_list *list, uint32_t number)
{
    struct slot *slot = &reader->slots[number];
    slot->next = list->first;
    slot->previous = SLOT_NONE;
    if (list->first == SLOT_NONE) {
        list->last = number;
    } else {
        reader->slots[list->first].previous = number;
    }
    list->first = number;
    list->count++;
}

static void list_remove(dlfs_reader *reader, struct slot_list *list, uint32_t number)
{
    struct slot *slot = &reader->slots[number];
    if (slot->previous == SLOT_NONE) {
        list->first = slot->next;
    } else {
        reader->slots[slot->previous].next = slot->next;
    }
    if (slot->next == SLOT_NONE) {
        list->last = slot->previous;
    } else {
        reader->slots[slot->next].previous = slot->previous;
    }
    list->count--;
}

/* ---- the mapping ----------------------------------------------------------------------------- */

/* Maps private memory, or memory that other processes can map too. */
static int map_memory(dlfs_reader *reader, size_t *bytes, void **base)
{
    if ((reader->config.flags & DLFS_READER_SHARED) == 0) {
        return dlfs_memory_map(*bytes, base, NULL);
    }
    size_t length = memory_length(*bytes);
    int code = length > 0 ? memory_create_shared("dlfs-arena", length, true, MEMORY_OWNER_WRITES,
                                                 base, &reader->arena_descriptor)
                          : -ENOMEM;
    *bytes = code < 0 ? *bytes : length; /* other processes map whole pages */
    return code;
}

/*
 * Finds how many bytes of each chunk hold samples. The directory's order would say it sooner, but
 * all that is looked up in a chunk must have been read, so it is found from the same locations.
 * Returns true if every sample lies in one chunk.
 */
static bool measure_chunks(const dlfs_reader *reader, uint32_t *chunk_data)
{
    uint64_t blocks = reader->config.block_bytes - 1;
    bool in_one_chunk = true;
    for (uint64_t index = 0; index < reader->sample_count; index++) {
        struct location location;
        if (!reader_locate(reader, index, &location) || location.length == 0) {
            continue;
        }
        uint64_t last = location.address + location.length - 1;
        uint64_t chunk = last >> reader->chunk_shift;
        uint32_t end = (uint32_t)(((last & (reader->config.chunk_bytes - 1)) | blocks) + 1);
        chunk_data[chunk] = end > chunk_data[chunk] ? end : chunk_data[chunk];
        for (uint64_t full = location.chunk; full < chunk; full++) {
            chunk_data[full] = reader->config.chunk_bytes;
            in_one_chunk = false;
        }
    }
    return in_one_chunk;
}

int arena_map(dlfs_reader *reader)
{
    if (reader->arena != NULL) {
        return 0;
    }
    struct slot *slots = calloc(reader->slot_count, sizeof(*slots));
    uint32_t *chunk_slots = calloc(reader->chunk_count + 1, sizeof(*chunk_slots));
    uint32_t *chunk_data = calloc(reader->chunk_count + 1, sizeof(*chunk_data));
    void *base = NULL;
    size_t bytes = (size_t)reader->slot_count << reader->chunk_shift;
    size_t slots_bytes = bytes;
    bool in_one_chunk = chunk_data != NULL && measure_chunks(reader, chunk_data);
    bool resident =
        (reader->config.flags & DLFS_READER_SHARED) && reader->dataset_fits && in_one_chunk;
    if (resident) {
        bytes += reader->chunk_count * sizeof(*reader->resident_slots);
    }
    /* A small mapping is only aligned to pages, which is not enough for larger blocks. */
    if (reader->config.block_bytes > PAGE_BYTES_MIN && bytes < LARGE_BYTES) {
        bytes = LARGE_BYTES;
    }
    bool allocated = slots != NULL && chunk_slots != NULL && chunk_data != NULL;
    int code = allocated ? map_memory(reader, &bytes, &base) : -ENOMEM;
    if (code < 0) {
        free(slots);
        free(chunk_slots);
        free(chunk_data);
        return code;
    }
    reader->slots = slots;
    reader->chunk_slots = chunk_slots;
    reader->chunk_data = chunk_data;
    reader->arena = base;
    reader->arena_bytes = bytes;
    reader->resident_offset = slots_bytes;
    reader->resident_slots =
        resident ? (_Atomic uint32_t *)(void *)(reader->arena + slots_bytes) : NULL;
    reader->stats.memory_bytes = bytes;
    reader->free_slots = (struct slot_list){SLOT_NONE, SLOT_NONE, 0};
    reader->idle_slots = (struct slot_list){SLOT_NONE, SLOT_NONE, 0};
    for (uint32_t slot = 0; slot < reader->slot_count; slot++) {
        slots[slot].run = 1;
        slots[slot].waiters = SLOT_NONE;
        list_push(reader, &reader->free_slots, slot);
    }
    fill_begin(reader);
    return 0;
}

void arena_free(dlfs_reader *reader)
{
    dlfs_memory_unmap(reader->arena, reader->arena_bytes);
    if (reader->arena_descriptor >= 0) {
        close(reader->arena_descriptor);
    }
    for (uint32_t slot = 0; reader->slots != NULL && slot < reader->slot_count; slot++) {
        free(reader->slots[slot].bad);
    }
    free(reader->slots);
    free(reader->chunk_slots);
    free(reader->chunk_data);
}

/* ---- runs of slots --------------------------------------------------------------------------- */

/* Frees every slot of a run. They are the next to be taken, since their memory is in the caches. */
static void run_free(dlfs_reader *reader, uint32_t first)
{
    uint32_t run = reader->slots[first].run;
    for (uint32_t slot = first + run; slot-- > first;) {
        reader->slots[slot].state = SLOT_FREE;
        reader->slots[slot].run = 1;
        free(reader->slots[slot].bad);
        reader->slots[slot].bad = NULL;
        list_push_first(reader, &reader->free_slots, slot);
    }
}

static void evict(dlfs_reader *reader, uint32_t slot)
{
    list_remove(reader, &reader->idle_slots, slot);
    reader->chunk_slot_count -= reader->slots[slot].run;
    reader->chunk_slots[reader->slots[slot].chunk] = 0;
    run_free(reader, slot);
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

void arena_evict_cached(dlfs_reader *reader, uint32_t number)
{
    struct slot *slot = &reader->slots[number];
    list_remove(reader, &reader->cache.idle, number);
    reader->cache.slots -= slot->run;
    slot->cached = false;
    if (slot->state == SLOT_PACKED) {
        cache_unmap_run(reader, number);
        arena_release_empty_map(reader);
    } else {
        reader->chunk_slot_count -= slot->run;
        reader->chunk_slots[slot->chunk] = 0;
    }
    run_free(reader, number);
}

/* Makes one run of free slots, TRANSIENT with one reference. */
static void occupy_run(dlfs_reader *reader, uint32_t first, uint32_t run)
{
    for (uint32_t slot = first; slot < first + run; slot++) {
        list_remove(reader, &reader->free_slots, slot);
        reader->slots[slot].state = SLOT_TAIL;
        reader->slots[slot].head = first;
    }
    struct slot *head = &reader->slots[first];
    head->state = SLOT_TRANSIENT;
    head->run = run;
    head->references = 1;
    head->cached = false;
    head->waiters = SLOT_NONE;
}

/* Which slots may be evicted for a run of neighbouring slots. */
enum eviction { EVICT_NONE, EVICT_IDLE, EVICT_CACHED };

static bool is_claimable(const struct slot *slot, enum eviction eviction)
{
    if (slot->state == SLOT_FREE) {
        return true;
    }
    bool idle = (slot->state == SLOT_CHUNK || slot->state == SLOT_PACKED) && slot->references == 0;
    return idle && eviction >= (slot->cached ? EVICT_CACHED : EVICT_IDLE);
}

/* Finds the first of `run` neighbouring slots that are free or may be evicted, or SLOT_NONE. */
static uint32_t find_run(const dlfs_reader *reader, uint32_t run, enum eviction eviction)
{
    uint32_t found = 0;
    for (uint32_t slot = 0; slot < reader->slot_count;) {
        const struct slot *at = &reader->slots[slot];
        found = is_claimable(at, eviction) ? found + at->run : 0;
        slot += at->run;
        if (found >= run) {
            return slot - found;
        }
    }
    return SLOT_NONE;
}

/* Evicts one slot if none is free, if there is one to evict. */
static void free_one_slot(dlfs_reader *reader, bool displace)
{
    uint32_t victim = cache_victim(&reader->cache);
    if (victim != SLOT_NONE) {
        arena_evict_cached(reader, victim);
    } else if (reader->idle_slots.count > 0) {
        evict(reader, reader->idle_slots.first);
    } else if (displace && reader->cache.idle.count > 0) {
        arena_evict_cached(reader, reader->cache.idle.first);
    }
}

/* Evicts whatever lies in a run of slots. */
static void evict_run(dlfs_reader *reader, uint32_t first, uint32_t run)
{
    for (uint32_t slot = first; slot < first + run; slot++) {
        if (reader->slots[slot].state == SLOT_FREE || reader->slots[slot].state == SLOT_TAIL) {
            continue;
        }
        if (reader->slots[slot].cached) {
            arena_evict_cached(reader, slot);
        } else {
            evict(reader, slot);
        }
    }
}

static uint32_t take_run(dlfs_reader *reader, uint32_t run, bool displace)
{
    bool cached = displace || cache_victim(&reader->cache) != SLOT_NONE;
    uint32_t first = find_run(reader, run, EVICT_NONE);
    if (first == SLOT_NONE) {
        first = find_run(reader, run, EVICT_IDLE);
    }
    if (first == SLOT_NONE && cached) {
        first = find_run(reader, run, EVICT_CACHED);
    }
    if (first == SLOT_NONE) {
        return SLOT_NONE;
    }
    evict_run(reader, first, run);
    occupy_run(reader, first, run);
    return first;
}

uint32_t arena_take(dlfs_reader *reader, uint32_t run, bool displace)
{
    if (run > 1) {
        return take_run(reader, run, displace);
    }
    if (reader->free_slots.count == 0) {
        free_one_slot(reader, displace);
    }
    uint32_t slot = reader->free_slots.first;
    if (slot != SLOT_NONE) {
        occupy_run(reader, slot, 1);
    }
    return slot;
}

/* Finds the last run of this many free slots, or SLOT_NONE. */
static uint32_t find_last_run(const dlfs_reader *reader, uint32_t run)
{
    uint32_t found = 0;
    for (uint32_t slot = reader->slot_count; slot-- > 0;) {
        found = reader->slots[slot].state == SLOT_FREE ? found + 1 : 0;
        if (found == run) {
            return slot;
        }
    }
    return SLOT_NONE;
}

uint32_t arena_take_packed(dlfs_reader *reader, uint32_t run)
{
    uint32_t first = SLOT_NONE;
    if (run == 1) { /* the slot that was free for longest: mostly it lies at the end */
        first = reader->free_slots.last;
    } else if (reader->free_slots.count >= run) {
        first = find_last_run(reader, run);
    }
    if (first == SLOT_NONE) {
        first = find_run(reader, run, EVICT_IDLE);
    }
    if (first == SLOT_NONE) {
        return SLOT_NONE;
    }
    evict_run(reader, first, run);
    occupy_run(reader, first, run);
    struct slot *slot = &reader->slots[first];
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
    const struct slot *slot = &reader->slots[number];
    return slot->state == SLOT_TAIL ? slot->head : number;
}

/* ---- references ------------------------------------------------------------------------------ */

static struct slot_list *idle_list(dlfs_reader *reader, const struct slot *slot)
{
    return slot->cached ? &reader->cache.idle : &reader->idle_slots;
}

void arena_reference(dlfs_reader *reader, uint32_t number)
{
    number = arena_head(reader, number);
    struct slot *slot = &reader->slots[number];
    if (slot->references++ == 0) {
        list_remove(reader, idle_list(reader, slot), number);
    }
}

void arena_release(dlfs_reader *reader, uint32_t number)
{
    number = arena_head(reader, number);
    struct slot *slot = &reader->slots[number];
    if (--slot->references > 0) {
        return;
    }
    if (slot->state == SLOT_CHUNK || slot->state == SLOT_PACKED) {
        list_push(reader, idle_list(reader, slot), number);
    } else {
        uint32_t others = reader->slot_count - reader->free_slots.count - reader->chunk_slot_count;
        reader->other_slots_most =
            others > reader->other_slots_most ? others : reader->other_slots_most;
        run_free(reader, number);
    }
    pthread_cond_broadcast(&reader->released);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

void arena_begin_load(dlfs_reader *reader, uint32_t number, uint64_t chunk, const void *owner)
{
    struct slot *slot = &reader->slots[number];
    slot->state = SLOT_LOADING;
    reader->chunk_slot_count += slot->run;
    slot->chunk = chunk;
    slot->owner = owner;
    reader->chunk_slots[chunk] = number + 1;
}

/* Keeps a chunk for as long as the reader lives, and publishes it to the other processes. */
static void make_resident(dlfs_reader *reader, uint32_t number)
{
    struct slot *slot = &reader->slots[number];
    slot->references++;
    atomic_store_explicit(&reader->resident_slots[slot->chunk], number + 1, memory_order_release);
}

void arena_end_load(dlfs_reader *reader, uint32_t number, bool valid, struct bad_samples *bad)
{
    struct slot *slot = &reader->slots[number];
    slot->state = valid ? SLOT_CHUNK : SLOT_TRANSIENT;
    slot->bad = bad; /* run_free frees it */
    slot->owner = NULL;
    slot->waiters = SLOT_NONE;
    if (!valid) {
        reader->chunk_slot_count -= slot->run;
        reader->chunk_slots[slot->chunk] = 0;
        return;
    }
    if (reader->resident_slots != NULL && bad == NULL) {
        make_resident(reader, number);
    }
}

uint32_t arena_find(const dlfs_reader *reader, uint64_t chunk)
{
    return reader->chunk_slots[chunk] - 1;
}

uint32_t arena_available(const dlfs_reader *reader)
{
    uint32_t victims = cache_victim(&reader->cache) != SLOT_NONE;
    return reader->free_slots.count + reader->idle_slots.count + victims;
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
    const struct slot *slot = &reader->slots[number];
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
    reader->slots[slot].uses++;
    return true;
}
