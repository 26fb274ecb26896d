/*
 * Resident chunks: those that clients of a service read by themselves (channel/resident.c).
 *
 * While clients have channels to a reader, the reader may have a reservation: slots for all of its
 * chunks, and for an index of them that lies in slots of the arena as well. A sound chunk then
 * stays in its slot, by a reference of its own, and the index says in which. Clients look it up
 * without a request and without a pin.
 *
 * The rule: a slot that the index has named keeps its bytes until the last channel of the reader is
 * gone, and so does the index. A channel is gone when its client has closed its end of it, which it
 * does after the last of its batches. Each channel has a reference to the reader, so the reader may
 * be closed meanwhile: when the dataset is moved, removed or evicted.
 *
 * A reservation is granted to the first channel for which all reservations together leave an eighth
 * of the arena to the other readers. Without it, clients read through the service. It ends with the
 * last channel; the chunks are then evicted like others.
 *
 * Datasets with a sample that spans two chunks have no resident chunks: they could separate the
 * neighbouring slots that such a sample needs. The reserved slots beyond the index are enough for
 * all chunks that are not in memory yet, and for twice SLOTS_MIN more.
 *
 * Threads: any; the arena's lock guards all of it, and is not held by the caller of residents_enter
 * and residents_leave.
 */
#include "reader/residents.h"

#include "reader/internal.h"

static void reserve(dlfs_reader *reader, uint32_t slots)
{
    dlfs_arena *arena = reader->arena;
    arena->reserved += slots - reader->share.reserved;
    reader->share.reserved = slots;
    arena_divide(arena);
}

/* Reserves the slots and makes the index, with the chunks that are in memory. */
static void grant(dlfs_reader *reader)
{
    dlfs_arena *arena = reader->arena;
    uint64_t bytes = reader->chunk_count * sizeof(uint32_t);
    uint64_t index = (bytes + reader->config.chunk_bytes - 1) >> reader->chunk_shift; /* slots */
    uint64_t slots = reader->chunk_count + index + 2 * (uint64_t)SLOTS_MIN;
    uint64_t most = arena->slot_count - arena->slot_count / OTHERS_SHARE;
    if (!reader->in_one_chunk || reader->chunk_count == 0 || slots > most - arena->reserved) {
        return;
    }
    reserve(reader, (uint32_t)slots);
    uint32_t first = arena_take(reader, (uint32_t)index, true);
    if (first == SLOT_NONE) { /* batches pin the memory: a later channel tries again */
        reserve(reader, 0);
        return;
    }
    reader->resident_slots = (_Atomic uint32_t *)(void *)slot_memory(reader, first);
    reader->resident_offset = (uint64_t)first << reader->chunk_shift;
    for (uint64_t chunk = 0; chunk < reader->chunk_count; chunk++) {
        atomic_store_explicit(&reader->resident_slots[chunk], 0, memory_order_relaxed);
    }
    for (uint64_t chunk = 0; chunk < reader->chunk_count; chunk++) {
        uint32_t number = arena_find(reader, chunk);
        if (number != SLOT_NONE && arena->slots[number].state == SLOT_CHUNK) {
            arena_make_resident(reader, number);
        }
    }
    cache_evict_idle(reader); /* a copy of a sample would be found instead of its chunk */
}

static void end(dlfs_reader *reader)
{
    for (uint64_t chunk = 0; chunk < reader->chunk_count; chunk++) {
        uint32_t number = arena_find(reader, chunk);
        if (number != SLOT_NONE && atomic_exchange_explicit(&reader->arena->slots[number].resident,
                                                            false, memory_order_relaxed)) {
            arena_release(reader, number);
        }
    }
    reader->resident_slots = NULL;
    arena_release(reader, slot_of(reader, reader->resident_offset));
    reserve(reader, 0);
}

struct residents residents_enter(dlfs_reader *reader)
{
    pthread_mutex_lock(&reader->arena->lock);
    reader->references++;
    reader->channels++;
    if (reader->resident_slots == NULL) {
        grant(reader);
    }
    bool granted = reader->resident_slots != NULL;
    struct residents found = {reader->resident_offset, granted ? reader->chunk_count : 0};
    pthread_mutex_unlock(&reader->arena->lock);
    return found;
}

void residents_leave(dlfs_reader *reader)
{
    pthread_mutex_lock(&reader->arena->lock);
    if (--reader->channels == 0 && reader->resident_slots != NULL) {
        end(reader);
    }
    reader_unlock_release(reader);
}
