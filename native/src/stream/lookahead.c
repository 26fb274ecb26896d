/*
 * Planning the look-ahead of a stream, and taking in what has landed. Three plans:
 *
 * - direct: each sample is read where it will be used, or copied to the cache; a window of the
 *   look-ahead is sorted and neighbours are merged;
 * - chunks: whole chunks, cached or evicted when idle for longest;
 * - harvest: whole chunks, of which the samples needed soonest are copied out (stream/harvest.c).
 *
 * A larger read that fails, or that brings a bad sample, is followed by reads of its samples one by
 * one, so that one bad block costs one sample.
 */
#include <errno.h>
#include <stdlib.h>

#include "stream/stream.h"

#define WINDOW_SHARE_SHIFT 4u /* a window takes at most a sixteenth of the memory */
#define EXPECTED_AHEAD 16u    /* positions from a prefetch to the use of what it brings */

/* ---- entries --------------------------------------------------------------------------------- */

void entry_ready(struct entry *entry, uint64_t offset, uint64_t length)
{
    entry->offset = offset;
    entry->length = length;
    entry->state = ENTRY_READY;
    entry->in_bucket = false;
    entry->cached = false;
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
            return; /* take() reports a failure without details */
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
    if (position < stream->planned) {
        stream->planned = position;
    }
}

void entry_wait(dlfs_stream *stream, uint64_t position, uint32_t slot)
{
    struct entry *entry = entry_at(stream, position);
    entry->state = ENTRY_WAITING;
    entry->next = stream->reader->slots[slot].waiters;
    stream->reader->slots[slot].waiters = (uint32_t)(position & stream->mask);
}

void entry_read_alone(dlfs_stream *stream, uint32_t ring_index, const struct span *span)
{
    uint64_t position = entry_position(stream, ring_index);
    if (span->code == DLFS_E_TIMEOUT && !stream_tries_again(stream, position, span)) {
        entry_fail(stream, position, span->code, 0, span->bad_address);
    } else {
        entry_again(stream, position, true);
    }
}

/* ---- room in the cache for samples under way ------------------------------------------------- */

/* Whether the cache may take a sample in, as far as is known without asking it. */
static bool cache_may_admit(const dlfs_stream *stream, uint64_t address)
{
    const struct cache *cache = &stream->reader->cache;
    return stream->plan != DLFS_PLAN_CHUNKS && !cache->full &&
           cache_spread(address >> stream->reader->chunk_shift) < stream->cached_share;
}

/* False when the entry has to be planned again, or wait for memory that reads under way have. */
static bool entry_reserve(dlfs_stream *stream, struct entry *entry, uint64_t address,
                          uint64_t length)
{
    if (!cache_may_admit(stream, address)) {
        return true;
    }
    enum reservation taken = cache_reserve(stream->reader, entry->index, length, &entry->offset);
    entry->cached = taken == RESERVE_DONE;
    if (stream->reader->cache.full) {
        return false; /* found out only now: it needs other memory */
    }
    return taken != RESERVE_BLOCKED || fetch_is_idle(stream->fetch);
}

/* Slots that reads may take whose samples are not cached: the cache's own are left to it. */
static uint32_t uncached_slots(const dlfs_stream *stream)
{
    const struct cache *cache = &stream->reader->cache;
    uint32_t available = arena_available(stream->reader);
    if (stream->plan != DLFS_PLAN_DIRECT || cache->slots >= cache->slots_max) {
        return available;
    }
    uint32_t left = cache->slots_max - cache->slots;
    return available > left ? available - left : 0;
}

/* Bytes that may be read for the cache now. */
static uint64_t to_cache_room(const dlfs_stream *stream)
{
    uint64_t most = stream->to_cache_bytes_max;
    return most > stream->to_cache_bytes ? most - stream->to_cache_bytes : 0;
}

/* Gives the room up: the entry is not read now, or its bytes are wrong. */
static void entry_unreserve(dlfs_stream *stream, struct entry *entry)
{
    if (entry->cached) {
        cache_abandon(stream->reader, entry->index, entry->offset);
    }
    entry->cached = false;
}

/* Its bytes are at `offset`, or copied to the cache. */
static void entry_landed(dlfs_stream *stream, struct entry *entry, uint64_t offset, uint64_t length)
{
    if (entry->cached) {
        cache_publish(stream->reader, entry->index);
    }
    entry_ready(entry, entry->cached ? entry->offset : offset, length);
}

/* ---- loads ----------------------------------------------------------------------------------- */

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
    if (run > reader->slot_count || stream->fetch->unused_spans == SLOT_NONE) {
        return false;
    }
    struct entry *entry = entry_at(stream, position);
    bool to_cache = cache_may_admit(stream, location->address);
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
    entry->alone = true; /* a chunk that lands before it leaves it alone */
    stream_start(stream, span, KIND_ALONE, slot, 0);
    return true;
}

static bool load_chunk(dlfs_stream *stream, uint64_t position, const struct location *location)
{
    dlfs_reader *reader = stream->reader;
    uint64_t mask = reader->config.chunk_bytes - 1;
    uint64_t end = (location->address + location->length + mask) & ~mask;
    uint64_t address = location->chunk << reader->chunk_shift;
    uint64_t run = (end - address) >> reader->chunk_shift;
    if (run > reader->slot_count || stream->fetch->unused_spans == SLOT_NONE) {
        return false;
    }
    uint32_t slot = arena_take(reader, (uint32_t)run, false);
    if (slot == SLOT_NONE) {
        return false;
    }
    stream->prefault.wanted = !prefault_covers(stream, slot, run);
    if (stream->prefault.wanted) {
        arena_release(reader, slot);
        return false;
    }
    struct span *span = span_take(stream->fetch);
    span->address = address;
    span->length = end - address;
    arena_begin_load(reader, slot, location->chunk, stream);
    entry_wait(stream, position, slot);
    arena_reference(reader, slot); /* the entry's own, beside the load's */
    stream_start(stream, span, KIND_CHUNK, slot, 0);
    return true;
}

/* Whether memory has the sample already. */
static bool look_up(dlfs_stream *stream, struct entry *entry, const struct location *location)
{
    dlfs_reader *reader = stream->reader;
    uint64_t offset;
    if (!arena_look_up(reader, entry->index, location, &offset)) {
        return false;
    }
    struct slot *slot = &reader->slots[arena_head(reader, slot_of(reader, offset))];
    bool by_chunk = stream->plan != DLFS_PLAN_DIRECT && location_in_one_chunk(reader, location);
    slot->uses -= by_chunk && slot->state == SLOT_PACKED; /* its neighbours need its chunk anyway */
    entry_ready(entry, offset, location->length);
    stream->fetch->stats.cache_hits++;
    return true;
}

/* Plans an entry of the chunks plan; false when there is no memory for it. */
static bool chunks_plan(dlfs_stream *stream, uint64_t position, const struct location *location)
{
    dlfs_reader *reader = stream->reader;
    uint32_t number = arena_find(reader, location->chunk);
    if (number == SLOT_NONE) {
        return load_chunk(stream, position, location);
    }
    const struct slot *slot = &reader->slots[number];
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

/* Plans entries that need no window; false when one has to wait. */
static bool plan_one(dlfs_stream *stream, uint64_t position)
{
    struct entry *entry = entry_at(stream, position);
    struct location location;
    if (entry->state != ENTRY_NEW) {
        return true;
    }
    if (!reader_locate(stream->reader, entry->index, &location)) {
        entry_fail(stream, position, DLFS_E_FORMAT, 0, 0);
        return true;
    }
    if (location.length == 0) {
        entry_ready(entry, 0, 0);
        return true;
    }
    if (!entry->alone && look_up(stream, entry, &location)) {
        return true;
    }
    if (entry->alone ||
        (stream->plan != DLFS_PLAN_CHUNKS && !location_in_one_chunk(stream->reader, &location))) {
        return load_alone(stream, position, &location);
    }
    if (stream->plan == DLFS_PLAN_CHUNKS) {
        return chunks_plan(stream, position, &location);
    }
    return chunk_copy_plan(stream, position, &location);
}

/* ---- the direct plan ------------------------------------------------------------------------- */

/*
 * Finds room for a span of at most a chunk; SLOT_NONE when there is none. The reference is the
 * caller's.
 */
static uint32_t land(dlfs_stream *stream, struct landing *landing, uint64_t length,
                     uint64_t *slot_offset)
{
    dlfs_reader *reader = stream->reader;
    if (landing->slot == SLOT_NONE || length > reader->config.chunk_bytes - landing->used) {
        bool allowed = landing == &stream->to_cache || uncached_slots(stream) > 0;
        uint32_t slot = allowed ? arena_take(reader, 1, false) : SLOT_NONE;
        if (slot == SLOT_NONE) {
            return SLOT_NONE;
        }
        if (landing->slot != SLOT_NONE) {
            arena_release(reader, landing->slot);
        }
        landing->slot = slot;
        landing->used = 0;
    }
    *slot_offset = landing->used;
    landing->used += length;
    arena_reference(reader, landing->slot);
    return landing->slot;
}

static struct entry *miss_entry(dlfs_stream *stream, const struct miss *miss)
{
    return entry_at(stream, miss->position);
}

/* Gives up the cache's room for wants, the last one first: so none of it is lost. */
static void misses_leave(dlfs_stream *stream, const struct miss *misses, uint32_t count)
{
    while (count-- > 0) {
        entry_unreserve(stream, miss_entry(stream, &misses[count]));
    }
}

/* Finds room in the cache for the wants of a span; false when they have to wait for it. */
static bool misses_reserve(dlfs_stream *stream, const struct miss *misses, uint32_t count,
                           bool *all_cached)
{
    *all_cached = true;
    for (uint32_t i = 0; i < count; i++) {
        struct entry *entry = miss_entry(stream, &misses[i]);
        if (!entry_reserve(stream, entry, misses[i].address, misses[i].length)) {
            misses_leave(stream, misses, i);
            return false;
        }
        *all_cached &= entry->cached;
    }
    return true;
}

/* Starts one span of a window; false when there is no memory. */
static bool start_window_span(dlfs_stream *stream, const struct plan_span *planned)
{
    const struct miss *misses = &stream->fetch->misses[planned->first_miss];
    bool cached;
    if (!misses_reserve(stream, misses, planned->miss_count, &cached)) {
        return false;
    }
    uint64_t slot_offset;
    uint32_t slot =
        land(stream, cached ? &stream->to_cache : &stream->landing, planned->length, &slot_offset);
    if (slot == SLOT_NONE) {
        misses_leave(stream, misses, planned->miss_count);
        return false;
    }
    struct span *span = span_take(stream->fetch);
    span->address = planned->address;
    span->length = planned->length;
    span->tag = SLOT_NONE;
    for (uint32_t i = 0; i < planned->miss_count; i++) {
        struct entry *entry = miss_entry(stream, &misses[i]);
        entry->state = ENTRY_WAITING;
        entry->next = span->tag;
        span->tag = (uint32_t)(misses[i].position & stream->mask);
    }
    stream->to_cache_bytes += cached ? planned->length : 0;
    stream_start(stream, span, cached ? KIND_TO_CACHE : KIND_WINDOW, slot, slot_offset);
    return true;
}

/* Prefetches a location: waiting for one takes as long as the checksum of its sample. */
static void expect_location(const dlfs_stream *stream, uint64_t index)
{
    __builtin_prefetch(&stream->reader->locations[index]);
}

/*
 * Bytes that spans of a window may land in now. A slot is free again when all that landed in it was
 * used; a window that took most of the memory would mix in each slot what is needed next with what
 * is needed last.
 */
static uint64_t window_room(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    uint64_t slots = uncached_slots(stream);
    slots -= slots > 1; /* for what lies between samples, and at the ends of slots */
    uint64_t room = slots << reader->chunk_shift;
    if (stream->landing.slot != SLOT_NONE) {
        room += reader->config.chunk_bytes - stream->landing.used;
    }
    uint64_t most = (uint64_t)reader->slot_count << reader->chunk_shift >> WINDOW_SHARE_SHIFT;
    most = most > reader->config.chunk_bytes ? most : reader->config.chunk_bytes;
    return room < most ? room : most;
}

/* Bytes of its slot that a sample takes: its blocks, and its share of what is left at the end. */
static uint64_t landing_taken(const dlfs_reader *reader, const struct location *location)
{
    uint64_t mask = reader->config.block_bytes - 1;
    uint64_t blocks =
        ((location->address + location->length + mask) & ~mask) - (location->address & ~mask);
    return reader->config.chunk_bytes / (reader->config.chunk_bytes / blocks);
}

/*
 * The wants of the next window; what needs no window is planned at once. It ends where memory does:
 * a window is read in the order of the device, so in a wider one samples that are needed late would
 * take the memory of those that are needed next. Returns how many there are.
 */
static uint64_t collect_window(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    uint64_t spans = stream->fetch->unused_span_count;
    uint64_t end = stream->planned + (spans < WINDOW_MAX ? spans : WINDOW_MAX);
    uint64_t landing_room = window_room(stream);
    uint64_t to_cache = to_cache_room(stream);
    uint64_t count = 0;
    for (; stream->planned < stream->filled && stream->planned < end; stream->planned++) {
        struct entry *entry = entry_at(stream, stream->planned);
        struct location location;
        if (stream->planned + EXPECTED_AHEAD < stream->filled) {
            uint64_t index = entry_at(stream, stream->planned + EXPECTED_AHEAD)->index;
            expect_location(stream, index);
            cache_prefetch(&reader->cache, index);
        }
        bool window = entry->state == ENTRY_NEW && !entry->alone &&
                      reader_locate(reader, entry->index, &location) && location.length > 0 &&
                      location_in_one_chunk(reader, &location);
        if (!window) {
            if (!plan_one(stream, stream->planned)) {
                break;
            }
        } else if (!look_up(stream, entry, &location)) {
            uint64_t *room = cache_may_admit(stream, location.address) ? &to_cache : &landing_room;
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

/* Plans a window; returns whether anything was planned. */
static bool direct_plan(dlfs_stream *stream)
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

/* ---- what has landed ------------------------------------------------------------------------- */

/* The place of an entry whose location was good when it was planned. */
static struct location entry_location(const dlfs_stream *stream, const struct entry *entry)
{
    struct location location;
    (void)reader_locate(stream->reader, entry->index, &location);
    return location;
}

/* Checks the bytes of a sample where they landed, and copies them if the cache has room. */
static uint32_t check(const dlfs_reader *reader, const struct entry *entry, const uint8_t *bytes,
                      const struct location *location)
{
    return entry->cached
               ? dlfs_crc32c_copy(0, reader->arena + entry->offset, bytes, location->length)
               : dlfs_crc32c(0, bytes, location->length);
}

static void finish_alone(dlfs_stream *stream, struct span *span, bool *again)
{
    dlfs_reader *reader = stream->reader;
    struct entry *entry = &stream->ring[span->tag];
    struct location location = entry_location(stream, entry);
    uint64_t start = location.address - span->address;
    uint32_t crc = span->code < 0 ? 0 : check(reader, entry, span->memory + start, &location);
    bool bad = span->code == 0 && crc != location.crc32c;
    stream->fetch->stats.checksum_errors += bad;
    *again = bad && span_retry(stream->fetch, span);
    if (*again) {
        return;
    }
    pthread_mutex_lock(&reader->lock);
    uint64_t position = entry_position(stream, span->tag);
    bool cached = entry->cached;
    stream->to_cache_bytes -= cached ? span->length : 0;
    if (span->code < 0 || bad) {
        entry_unreserve(stream, entry);
    }
    if (span->code == DLFS_E_TIMEOUT && stream_tries_again(stream, position, span)) {
        entry_again(stream, position, true);
    } else if (span->code < 0 || bad) {
        entry_fail(stream, position, bad ? DLFS_E_CHECKSUM : span->code, crc, span->bad_address);
    } else {
        entry_landed(stream, entry, (uint64_t)(span->memory - reader->arena) + start,
                     location.length);
    }
    if (span->code < 0 || bad || cached) {
        arena_release(reader, span->slot);
    }
    pthread_mutex_unlock(&reader->lock);
}

static void finish_window(dlfs_stream *stream, struct span *span)
{
    dlfs_reader *reader = stream->reader;
    uint32_t next;
    uint32_t good = SLOT_NONE; /* two chains, by entry->next */
    uint32_t bad = SLOT_NONE;
    for (uint32_t at = span->tag; at != SLOT_NONE; at = next) {
        struct entry *entry = &stream->ring[at];
        struct location location = entry_location(stream, entry);
        next = entry->next;
        uint8_t *bytes = span->memory + (location.address - span->address);
        bool sound = span->code == 0 && check(reader, entry, bytes, &location) == location.crc32c;
        stream->fetch->stats.checksum_errors += span->code == 0 && !sound;
        entry->next = sound ? good : bad;
        *(sound ? &good : &bad) = at;
    }
    pthread_mutex_lock(&reader->lock);
    stream->to_cache_bytes -= span->kind == KIND_TO_CACHE ? span->length : 0;
    for (uint32_t at = good; at != SLOT_NONE; at = stream->ring[at].next) {
        struct entry *entry = &stream->ring[at];
        struct location location = entry_location(stream, entry);
        uint64_t start = location.address - span->address;
        if (!entry->cached) {
            arena_reference(reader, span->slot);
        }
        entry_landed(stream, entry, (uint64_t)(span->memory - reader->arena) + start,
                     location.length);
    }
    for (uint32_t at = bad; at != SLOT_NONE; at = next) {
        next = stream->ring[at].next;
        entry_unreserve(stream, &stream->ring[at]);
        entry_read_alone(stream, at, span);
    }
    arena_release(reader, span->slot);
    pthread_mutex_unlock(&reader->lock);
}

static void finish_chunk(dlfs_stream *stream, struct span *span)
{
    dlfs_reader *reader = stream->reader;
    struct bad_samples *bad = NULL;
    bool kept = span->code == 0 && reader_verify_span(reader, span, &bad) == 0;
    pthread_mutex_lock(&reader->lock);
    uint32_t waiters = reader->slots[span->slot].waiters;
    arena_end_load(reader, span->slot, kept, bad);
    uint32_t next;
    for (uint32_t at = waiters; at != SLOT_NONE; at = next) {
        struct entry *entry = &stream->ring[at];
        struct location location = entry_location(stream, entry);
        uint64_t offset;
        next = entry->next;
        if (span->code == 0 && arena_gives(reader, span->slot, &location, &offset)) {
            entry_ready(entry, offset, location.length);
            continue;
        }
        stream->fetch->stats.checksum_errors += span->code == 0;
        entry_read_alone(stream, at, span);
        arena_release(reader, span->slot);
    }
    arena_release(reader, span->slot);
    pthread_mutex_unlock(&reader->lock);
}

/* The locations that the next span's samples will be checked by. */
static void expect_next(const dlfs_stream *stream)
{
    const struct span *next = fetch_peek_done(stream->fetch);
    if (next != NULL && (next->kind == KIND_WINDOW || next->kind == KIND_TO_CACHE)) {
        expect_location(stream, stream->ring[next->tag].index);
    }
}

void lookahead_finish(dlfs_stream *stream, struct span *span)
{
    bool again = false;
    expect_next(stream);
    switch ((enum span_kind)span->kind) {
    case KIND_ALONE:
        finish_alone(stream, span, &again);
        break;
    case KIND_WINDOW:
    case KIND_TO_CACHE:
        finish_window(stream, span);
        break;
    case KIND_CHUNK:
        finish_chunk(stream, span);
        break;
    case KIND_COPY:
        chunk_copy_finish(stream, span);
        break;
    }
    if (!again) {
        span_recycle(stream->fetch, span);
    }
}

/* ---- the next step --------------------------------------------------------------------------- */

bool lookahead_plan(dlfs_stream *stream)
{
    if (stream->planned < stream->head) {
        stream->planned = stream->head;
    }
    if (stream->plan == DLFS_PLAN_HARVEST) {
        chunk_copy_release_passed(stream);
    }
    if (stream->planned == stream->filled) {
        return false;
    }
    if (stream->plan == DLFS_PLAN_DIRECT) {
        return direct_plan(stream);
    }
    uint64_t before = stream->planned;
    uint64_t end = before + FILL_MAX < stream->filled ? before + FILL_MAX : stream->filled;
    while (stream->planned < end && plan_one(stream, stream->planned)) {
        stream->planned++;
    }
    return stream->planned > before;
}
