/*
 * The chunks plan: reads whole chunks into the arena, where they stay until they are evicted, for
 * orders that use the samples of a chunk soon one after the other.
 */
#include "stream/state.h"

/* Starts the read of the chunks that a sample lies in. */
static bool load_chunk(dlfs_stream *stream, uint64_t position, const struct location *location)
{
    dlfs_reader *reader = stream->reader;
    uint64_t end = reader_chunks_end(reader, location->address, location->length);
    uint64_t address = location->chunk << reader->chunk_shift;
    uint64_t run = (end - address + reader->config.chunk_bytes - 1) >> reader->chunk_shift;
    if (run > reader->slots_max || stream->fetch->unused_spans == SLOT_NONE) {
        return false;
    }
    stream->helps_fill = run > fill_room(reader);
    uint32_t slot = stream->helps_fill ? SLOT_NONE : arena_take(reader, (uint32_t)run, false);
    if (slot == SLOT_NONE) {
        return false;
    }
    struct span *span = span_take(stream->fetch);
    span->address = address;
    span->length = end - address;
    arena_begin_load(reader, slot, location->chunk, stream);
    entry_wait(stream, position, slot);
    arena_reference(reader, slot); /* the entry's own, in addition to the load's */
    stream_start(stream, span, KIND_CHUNK, slot, 0);
    return true;
}

bool chunks_plan(dlfs_stream *stream, uint64_t position, const struct location *location)
{
    dlfs_reader *reader = stream->reader;
    uint32_t number = arena_find(reader, location->chunk);
    if (number == SLOT_NONE) {
        return load_chunk(stream, position, location);
    }
    const struct slot *slot = &reader->arena->slots[number];
    uint64_t end = (slot->chunk + slot->run) << reader->chunk_shift;
    bool ours = slot->state == SLOT_LOADING && slot->owner == stream &&
                location->address + location->length <= end;
    if (!ours) {
        return load_alone(stream, position, location);
    }
    entry_wait(stream, position, number);
    arena_reference(reader, number);
    return true;
}

void chunks_end_load(dlfs_stream *stream, const struct span *span, bool valid,
                     struct bad_samples *bad)
{
    dlfs_reader *reader = stream->reader;
    uint32_t next = reader->arena->slots[span->slot].waiters;
    cache_end_load(reader, span->slot, valid, bad);
    for (uint32_t at = next; at != RING_NONE; at = next) {
        struct entry *entry = &stream->ring[at];
        struct location location = entry_location(stream, entry);
        uint64_t offset;
        next = entry->next;
        if (span->code == 0 && arena_holds(reader, span->slot, &location, &offset)) {
            entry_landed(stream, entry, offset, location.length);
            continue;
        }
        stream->fetch->stats.checksum_errors += span->code == 0;
        entry_read_alone(stream, at, span);
        arena_release(reader, span->slot);
    }
    arena_release(reader, span->slot);
}

void chunks_finish(dlfs_stream *stream, struct span *span)
{
    dlfs_reader *reader = stream->reader;
    struct bad_samples *bad = NULL;
    bool valid = span->code == 0 && reader_verify_span(reader, span, NULL, &bad) == 0;
    pthread_mutex_lock(&reader->arena->lock);
    chunks_end_load(stream, span, valid, bad);
    pthread_mutex_unlock(&reader->arena->lock);
}
