/*
 * The direct plan: reads just the samples, each where it will be used, or to be copied to the
 * cache.
 *
 * Entries are planned in windows: the samples of a window are sorted by address and neighbours are
 * merged. A span that fails, or that brings a corrupt sample, is followed by reads of its samples
 * one by one, so that a bad block fails one sample.
 */
#include "stream/state.h"

#define WINDOW_SHARE_SHIFT 4u  /* a window takes at most a sixteenth of the memory */
#define PREFETCH_POSITIONS 16u /* from the prefetch of a location to its use */
#define DIRECT_BYTES_PER_NS 2u /* assumed of a device; a request costs gap_bytes */
#define SOON_FACTOR 2u         /* of a batch, or of what the queues take: positions needed soon */

/*
 * Finds room for a span of at most a chunk, with a reference for the caller. Returns SLOT_NONE if
 * there is none.
 */
static uint32_t land(dlfs_stream *stream, struct partial_slot *target, uint64_t length,
                     uint64_t *slot_offset)
{
    dlfs_reader *reader = stream->reader;
    if (target->slot == SLOT_NONE || length > reader->config.chunk_bytes - target->used) {
        bool allowed = target == &stream->to_cache || uncached_slots(stream) > 0;
        uint32_t slot = allowed ? arena_take(reader, 1, false) : SLOT_NONE;
        if (slot == SLOT_NONE) {
            return SLOT_NONE;
        }
        if (target->slot != SLOT_NONE) {
            arena_release(reader, target->slot);
        }
        target->slot = slot;
        target->used = 0;
    }
    *slot_offset = target->used;
    target->used += length;
    arena_reference(reader, target->slot);
    return target->slot;
}

static struct entry *miss_entry(dlfs_stream *stream, const struct miss *miss)
{
    return entry_at(stream, miss->position);
}

/* Gives up the cache's room for misses, the last one first, so that no gaps remain. */
static void misses_unreserve(dlfs_stream *stream, const struct miss *misses, uint32_t count)
{
    while (count-- > 0) {
        entry_unreserve(stream, miss_entry(stream, &misses[count]));
    }
}

/* Reserves room in the cache for the misses of a span. Returns false if they have to wait for it.
 */
static bool misses_reserve(dlfs_stream *stream, const struct miss *misses, uint32_t count,
                           bool *all_cached)
{
    *all_cached = true;
    for (uint32_t i = 0; i < count; i++) {
        struct entry *entry = miss_entry(stream, &misses[i]);
        if (!entry_reserve(stream, entry, misses[i].address, misses[i].length)) {
            misses_unreserve(stream, misses, i);
            return false;
        }
        *all_cached &= entry->cached;
    }
    return true;
}

/* Starts the read of one span of a window. Returns false if there is no memory. */
static bool start_window_span(dlfs_stream *stream, const struct plan_span *planned)
{
    const struct miss *misses = &stream->fetch->misses[planned->first_miss];
    bool cached;
    if (!misses_reserve(stream, misses, planned->miss_count, &cached)) {
        return false;
    }
    uint64_t slot_offset;
    uint32_t slot = land(stream, cached ? &stream->to_cache : &stream->partial_slot,
                         planned->length, &slot_offset);
    if (slot == SLOT_NONE) {
        misses_unreserve(stream, misses, planned->miss_count);
        return false;
    }
    struct span *span = span_take(stream->fetch);
    span->address = planned->address;
    span->length = planned->length;
    span->tag = RING_NONE;
    for (uint32_t i = 0; i < planned->miss_count; i++) {
        struct entry *entry = miss_entry(stream, &misses[i]);
        entry->state = ENTRY_WAITING;
        entry->next = span->tag;
        span->tag = (uint32_t)(misses[i].position & stream->mask);
    }
    span->sample = misses[planned->miss_count - 1];
    stream->to_cache_bytes += cached ? planned->length : 0;
    stream_start(stream, span, cached ? KIND_TO_CACHE : KIND_WINDOW, slot, slot_offset);
    return true;
}

/*
 * Returns the bytes that spans of a window may occupy now. A slot is free again when all samples in
 * it were used. A window that took most of the memory would mix in each slot samples that are
 * needed next with samples that are needed last.
 */
static uint64_t window_room(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    uint64_t slots = uncached_slots(stream);
    slots -= slots > 1; /* for gaps between samples, and at the ends of slots */
    uint64_t room = slots << reader->chunk_shift;
    if (stream->partial_slot.slot != SLOT_NONE) {
        room += reader->config.chunk_bytes - stream->partial_slot.used;
    }
    uint64_t most = (uint64_t)reader->slots_max << reader->chunk_shift >> WINDOW_SHARE_SHIFT;
    most = most > reader->config.chunk_bytes ? most : reader->config.chunk_bytes;
    return room < most ? room : most;
}

/* Returns the bytes of a slot that a sample takes: its blocks, and its share of the slot's unused
 * end. */
static uint64_t landing_taken(const dlfs_reader *reader, const struct location *location)
{
    uint64_t mask = reader->config.block_bytes - 1;
    uint64_t blocks =
        ((location->address + location->length + mask) & ~mask) - (location->address & ~mask);
    return reader->config.chunk_bytes / (reader->config.chunk_bytes / blocks);
}

bool stream_is_filling(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    bool empty = reader->chunk_count == 0;
    if (stream->plan != DLFS_PLAN_CHUNKS || empty || !fill_bounds_chunks(reader)) {
        return false;
    }
    uint64_t bytes = stream->need.read_bytes + reader->config.gap_bytes;
    uint64_t samples = stream->need.samples * fill_step_slots(reader->arena) / reader->chunk_count;
    return reader->arena->fill.step_ns > samples * bytes / DIRECT_BYTES_PER_NS;
}

/* Returns the end of the positions that are needed soon. While memory is being touched, later ones
 * wait for their chunks. A sample larger than a chunk takes a place in a queue for each chunk. */
static uint64_t soon_end(const dlfs_stream *stream)
{
    const dlfs_reader_config *config = &stream->reader->config;
    uint64_t requests = 1 + (stream->need.read_bytes - 1) / config->chunk_bytes;
    uint64_t queues = (uint64_t)config->depth * config->member_count / requests;
    uint64_t soon = stream->awaited_max > queues ? stream->awaited_max : queues;
    return stream->head + SOON_FACTOR * soon;
}

/* Returns the end of the positions that the consumer's share of the memory has room for. */
static uint64_t share_end(const dlfs_stream *stream)
{
    uint64_t positions = stream->bounds.ahead_bytes_max / stream->need.read_bytes;
    uint64_t left = stream->config.count - stream->head;
    uint64_t end = stream->head + (positions < left ? positions : left);
    uint64_t soon = soon_end(stream);
    return end > soon ? end : soon;
}

/* Plans an entry that is no part of a window. Returns false if it has to wait. */
static bool plan_outside_window(dlfs_stream *stream, uint64_t position)
{
    struct location location;
    enum entry_plan planned = entry_plan_alone(stream, position, &location);
    if (planned != ENTRY_NEEDS_CHUNK) {
        return planned == ENTRY_PLANNED;
    }
    return chunks_plan(stream, position, &location) ||
           (position < soon_end(stream) && load_alone(stream, position, &location));
}

/*
 * Collects the misses of the next window, and returns their number. Entries that need no window are
 * planned at once. The window ends where the memory does: it is read in the order of addresses, so
 * in a wider one samples that are needed late would take the memory of those that are needed next.
 */
static uint64_t collect_window(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    uint64_t spans = stream->fetch->unused_span_count;
    uint64_t end = stream->planned + (spans < WINDOW_MAX ? spans : WINDOW_MAX);
    uint64_t share = share_end(stream);
    end = end < share ? end : share;
    uint64_t landing_room = window_room(stream);
    uint64_t to_cache = to_cache_room(stream);
    bool filling = stream_is_filling(stream);
    uint64_t count = 0;
    for (; stream->planned < stream->filled && stream->planned < end; stream->planned++) {
        struct entry *entry = entry_at(stream, stream->planned);
        struct location location;
        if (stream->planned + PREFETCH_POSITIONS < stream->filled) {
            uint64_t index = entry_at(stream, stream->planned + PREFETCH_POSITIONS)->index;
            prefetch_location(stream, index);
            cache_prefetch(&reader->cache, index);
        }
        bool window = entry->state == ENTRY_NEW && !entry->alone &&
                      reader_locate(reader, entry->index, &location) && location.length > 0 &&
                      location_in_one_chunk(reader, &location);
        if (!window) {
            if (!plan_outside_window(stream, stream->planned)) {
                break;
            }
        } else if (!entry_look_up(stream, entry, &location) &&
                   !(filling && chunks_plan(stream, stream->planned, &location))) {
            if (filling && stream->planned >= soon_end(stream)) {
                break;
            }
            uint64_t *room =
                entry_may_be_cached(stream, location.address) ? &to_cache : &landing_room;
            uint64_t taken = landing_taken(reader, &location);
            if (taken > *room) {
                break;
            }
            *room -= taken;
            stream->fetch->misses[count++] = (struct miss){location.address, location.length,
                                                           stream->planned, location.crc32c, 0};
        }
    }
    return count;
}

bool direct_plan(dlfs_stream *stream)
{
    struct fetch *fetch = stream->fetch;
    uint64_t before = stream->planned;
    bool full = stream->reader->cache.full;
    if (fetch->unused_span_count < WINDOW_MAX / 2) {
        return false;
    }
    uint64_t count = collect_window(stream);
    plan_sort(fetch->misses, fetch->sort_scratch, count);
    uint64_t spans = plan_merge(stream->reader, fetch->misses, count, fetch->plan);
    uint64_t started = 0;
    while (started < spans && start_window_span(stream, &fetch->plan[started])) {
        started++;
    }
    uint64_t first = started < spans ? fetch->plan[started].first_miss : count;
    for (uint64_t i = first; i < count; i++) {
        entry_again(stream, fetch->misses[i].position, false);
    }
    return started > 0 || stream->planned > before || stream->reader->cache.full != full;
}

/* Returns the location of a sample of a span of a window. */
static struct location sample_location(const dlfs_stream *stream, const struct span *span,
                                       uint32_t ring_index)
{
    if (ring_index != span->tag) {
        return entry_location(stream, &stream->ring[ring_index]);
    }
    return (struct location){.address = span->sample.address,
                             .length = span->sample.length,
                             .crc32c = span->sample.crc32c};
}

void direct_verify(dlfs_stream *stream, const struct span *span)
{
    for (uint32_t at = span->tag; at != RING_NONE; at = stream->ring[at].next) {
        struct entry *entry = &stream->ring[at];
        struct location location = sample_location(stream, span, at);
        const uint8_t *bytes = span->memory + (location.address - span->address);
        bool sound =
            span->code == 0 && entry_checksum(stream, entry, bytes, &location) == location.crc32c;
        stream->fetch->stats.checksum_errors += span->code == 0 && !sound;
        entry->alone = !sound;
    }
}

void direct_finish(dlfs_stream *stream, const struct span *span)
{
    dlfs_reader *reader = stream->reader;
    uint32_t next;
    stream->to_cache_bytes -= span->kind == KIND_TO_CACHE ? span->length : 0;
    for (uint32_t at = span->tag; at != RING_NONE; at = next) {
        struct entry *entry = &stream->ring[at];
        next = entry->next;
        if (entry->alone) {
            entry_unreserve(stream, entry);
            entry_read_alone(stream, at, span);
            continue;
        }
        struct location location = sample_location(stream, span, at);
        uint64_t start = location.address - span->address;
        if (!entry->cached) {
            arena_reference(reader, span->slot);
        }
        entry_landed(stream, entry, (uint64_t)(span->memory - reader->arena->memory) + start,
                     location.length);
    }
    arena_release(reader, span->slot);
}
