/*
 * The entries of the look-ahead, their room in the sample cache, and reads of single samples: what
 * the three plans have in common.
 */
#include <errno.h>
#include <stdlib.h>

#include "platform/crc32c.h"
#include "stream/state.h"

/* ---- states ---------------------------------------------------------------------------------- */

void entry_ready(struct entry *entry, uint64_t offset, uint64_t length)
{
    entry->offset = offset;
    entry->length = length;
    entry->state = ENTRY_READY;
    entry->in_bucket = false;
    entry->cached = false;
}

void entry_give_up(dlfs_stream *stream, uint64_t position)
{
    const struct entry *entry = entry_at(stream, position);
    arena_release(stream->reader, slot_of(stream->reader, entry->offset));
    entry_again(stream, position, entry->alone);
}

void entry_fail(dlfs_stream *stream, uint64_t position, int code, uint32_t crc_got,
                uint64_t bad_address)
{
    struct entry *entry = entry_at(stream, position);
    entry->state = ENTRY_FAILED;
    if (stream->failure_count == stream->failure_capacity) {
        uint64_t capacity = stream->failure_capacity ? 2 * stream->failure_capacity : 8;
        dlfs_failure *failures = realloc(stream->failures, capacity * sizeof(*failures));
        if (failures == NULL) {
            return; /* its batch reports a failure without details */
        }
        stream->failures = failures;
        stream->failure_capacity = capacity;
    }
    dlfs_failure failure = reader_failure(stream->reader, entry->index, code, crc_got, bad_address);
    failure.position = position;
    stream->failures[stream->failure_count++] = failure;
}

void entry_again(dlfs_stream *stream, uint64_t position, bool alone)
{
    struct entry *entry = entry_at(stream, position);
    entry->state = ENTRY_NEW;
    entry->alone = alone;
    entry->cached = false;
    entry->given_up = false;
    if (position < stream->planned) {
        stream->planned = position;
    }
}

void entry_wait(dlfs_stream *stream, uint64_t position, uint32_t slot)
{
    struct entry *entry = entry_at(stream, position);
    entry->state = ENTRY_WAITING;
    entry->next = stream->reader->arena->slots[slot].waiters;
    stream->reader->arena->slots[slot].waiters = (uint32_t)(position & stream->mask);
}

void entry_read_alone(dlfs_stream *stream, uint32_t ring_index, const struct span *span)
{
    uint64_t position = entry_position(stream, ring_index);
    if (span->code == DLFS_E_TIMEOUT && !stream_retries(stream, position, span)) {
        entry_fail(stream, position, span->code, 0, span->bad_address);
    } else {
        entry_again(stream, position, true);
    }
}

bool entry_look_up(dlfs_stream *stream, struct entry *entry, const struct location *location)
{
    dlfs_reader *reader = stream->reader;
    uint64_t offset;
    if (!arena_look_up(reader, entry->index, location, &offset)) {
        return false;
    }
    struct slot *slot = &reader->arena->slots[arena_head(reader, slot_of(reader, offset))];
    bool by_chunk = stream->plan != DLFS_PLAN_DIRECT && location_in_one_chunk(reader, location);
    slot->uses -= by_chunk && slot->state == SLOT_PACKED; /* not a use: the chunk is read anyway */
    entry_ready(entry, offset, location->length);
    stream->fetch->stats.cache_hits++;
    return true;
}

bool stream_retries(const dlfs_stream *stream, uint64_t position, const struct span *span)
{
    if (stream->overdue) {
        return position >= stream->head + stream->awaited;
    }
    return span->redirected;
}

/* ---- room in the cache ----------------------------------------------------------------------- */

bool entry_may_be_cached(const dlfs_stream *stream, uint64_t address)
{
    const struct cache *cache = &stream->reader->cache;
    return stream->plan != DLFS_PLAN_CHUNKS && !cache->full &&
           cache_spread(address >> stream->reader->chunk_shift) < stream->cached_share;
}

bool entry_reserve(dlfs_stream *stream, struct entry *entry, uint64_t address, uint64_t length)
{
    if (!entry_may_be_cached(stream, address)) {
        return true;
    }
    enum reservation taken = cache_reserve(stream->reader, entry->index, length, &entry->offset);
    entry->cached = taken == RESERVE_DONE;
    if (stream->reader->cache.full) {
        return false; /* it became full just now: the sample needs other memory */
    }
    return taken != RESERVE_BLOCKED || fetch_is_idle(stream->fetch);
}

uint32_t uncached_slots(const dlfs_stream *stream)
{
    const struct cache *cache = &stream->reader->cache;
    uint32_t available = arena_available(stream->reader);
    if (stream->plan != DLFS_PLAN_DIRECT || cache->slots >= cache->slots_max) {
        return available;
    }
    uint32_t left = cache->slots_max - cache->slots;
    return available > left ? available - left : 0;
}

uint64_t to_cache_room(const dlfs_stream *stream)
{
    uint64_t most = stream->to_cache_bytes_max;
    return most > stream->to_cache_bytes ? most - stream->to_cache_bytes : 0;
}

void entry_unreserve(dlfs_stream *stream, struct entry *entry)
{
    if (entry->cached) {
        cache_abandon(stream->reader, entry->index, entry->offset);
    }
    entry->cached = false;
}

void entry_landed(dlfs_stream *stream, struct entry *entry, uint64_t offset, uint64_t length)
{
    if (entry->cached) {
        cache_publish(stream->reader, entry->index);
    }
    entry_ready(entry, entry->cached ? entry->offset : offset, length);
    if (entry->given_up) {
        entry_give_up(stream, entry_position(stream, (uint32_t)(entry - stream->ring)));
    }
}

uint32_t entry_checksum(const dlfs_stream *stream, const struct entry *entry, const uint8_t *bytes,
                        const struct location *location)
{
    const struct span *next = fetch_peek_done(stream->fetch);
    uint8_t *copy = entry->cached ? stream->reader->arena->memory + entry->offset : NULL;
    return crc32c_sample(copy, bytes, location->length, next != NULL ? next->memory : NULL);
}

/* ---- single samples -------------------------------------------------------------------------- */

void stream_start(dlfs_stream *stream, struct span *span, enum span_kind kind, uint32_t slot,
                  uint64_t slot_offset)
{
    span->kind = (uint8_t)kind;
    span->slot = slot;
    span->memory = slot_memory(stream->reader, slot) + slot_offset;
    span_start(stream->fetch, span);
}

bool load_alone(dlfs_stream *stream, uint64_t position, const struct location *location)
{
    dlfs_reader *reader = stream->reader;
    uint64_t mask = reader->config.block_bytes - 1;
    uint64_t address = location->address & ~mask;
    uint64_t length = ((location->address + location->length + mask) & ~mask) - address;
    uint64_t run = (length + reader->config.chunk_bytes - 1) >> reader->chunk_shift;
    if (run > reader->slots_max || stream->fetch->unused_spans == SLOT_NONE) {
        return false;
    }
    struct entry *entry = entry_at(stream, position);
    bool to_cache = entry_may_be_cached(stream, location->address);
    if (to_cache && stream->to_cache_bytes > 0 && length > to_cache_room(stream)) {
        return false;
    }
    if (!entry_reserve(stream, entry, location->address, location->length)) {
        return false;
    }
    uint32_t slot = SLOT_NONE;
    if (entry->cached || run <= uncached_slots(stream)) {
        slot = arena_take(reader, (uint32_t)run, false);
    }
    if (slot == SLOT_NONE) {
        entry_unreserve(stream, entry);
        return false;
    }
    stream->to_cache_bytes += entry->cached ? length : 0;
    struct span *span = span_take(stream->fetch);
    span->address = address;
    span->length = length;
    span->tag = (uint32_t)(position & stream->mask);
    entry->state = ENTRY_WAITING;
    entry->alone = true; /* a chunk that lands earlier does not change it */
    stream_start(stream, span, KIND_ALONE, slot, 0);
    return true;
}

enum entry_plan entry_plan_alone(dlfs_stream *stream, uint64_t position, struct location *location)
{
    struct entry *entry = entry_at(stream, position);
    if (entry->state != ENTRY_NEW) {
        return ENTRY_PLANNED;
    }
    if (!reader_locate(stream->reader, entry->index, location)) {
        entry_fail(stream, position, DLFS_E_FORMAT, 0, 0);
        return ENTRY_PLANNED;
    }
    if (location->length == 0) {
        entry_ready(entry, 0, 0);
        return ENTRY_PLANNED;
    }
    if (!entry->alone && entry_look_up(stream, entry, location)) {
        return ENTRY_PLANNED;
    }
    bool alone = entry->alone || (stream->plan != DLFS_PLAN_CHUNKS &&
                                  !location_in_one_chunk(stream->reader, location));
    if (!alone) {
        return ENTRY_NEEDS_CHUNK;
    }
    return load_alone(stream, position, location) ? ENTRY_PLANNED : ENTRY_WAITS;
}

void finish_alone(dlfs_stream *stream, struct span *span, bool *again)
{
    dlfs_reader *reader = stream->reader;
    struct entry *entry = &stream->ring[span->tag];
    struct location location = entry_location(stream, entry);
    uint64_t start = location.address - span->address;
    uint32_t crc =
        span->code < 0 ? 0 : entry_checksum(stream, entry, span->memory + start, &location);
    bool bad = span->code == 0 && crc != location.crc32c;
    stream->fetch->stats.checksum_errors += bad;
    *again = bad && span_retry(stream->fetch, span);
    if (*again) {
        return;
    }
    uint64_t bad_address =
        bad ? reader_bad_part(reader, &location, span->memory + start, &crc) : span->bad_address;
    pthread_mutex_lock(&reader->arena->lock);
    uint64_t position = entry_position(stream, span->tag);
    bool cached = entry->cached;
    stream->to_cache_bytes -= cached ? span->length : 0;
    if (span->code < 0 || bad) {
        entry_unreserve(stream, entry);
    }
    if (span->code == DLFS_E_TIMEOUT && stream_retries(stream, position, span)) {
        entry_again(stream, position, true);
    } else if (span->code < 0 || bad) {
        entry_fail(stream, position, bad ? DLFS_E_CHECKSUM : span->code, crc, bad_address);
    } else {
        entry_landed(stream, entry, (uint64_t)(span->memory - reader->arena->memory) + start,
                     location.length);
    }
    if (span->code < 0 || bad || cached) {
        arena_release(reader, span->slot);
    }
    pthread_mutex_unlock(&reader->arena->lock);
}
