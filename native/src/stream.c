/*
 * An epoch read ahead. One thread keeps a ring of the samples to come, plans their reads and makes
 * them ready in memory; the consumer takes them in order. How far it looks ahead is bounded by the
 * reader's memory: what is ready or on its way holds references in the arena, and without free
 * slots nothing more is planned. Three plans:
 *
 *   direct    each sample is read where it will be used; a window of the look-ahead is sorted,
 * neighbours merged chunks    whole chunks, kept while the look-ahead refers to them, evicted when
 * idle for longest harvest   whole chunks, of which the samples needed soonest are copied out
 * (harvest.c)
 *
 * A larger read that fails, or that brings a bad sample, is followed by reads of its samples one by
 * one, so that one bad block costs one sample. When the consumer has borrowed all the memory, its
 * next batch is read on demand into memory of its own: a stream never waits for a batch to be
 * released.
 */
#include "stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FILL_MAX 1024u  /* positions filled, or planned, between looks at the device */
#define WINDOW_MAX 512u /* positions of one direct plan */
#define RING_MIN 1024u
/* Positions, for the plans that keep chunks or land in place. */
#define RING_MAX (UINT64_C(1) << 18)
#define IDLE_WAIT_NS UINT64_C(200000000)
#define BLOCKED_POLL_MS 2

/* ---- entries --------------------------------------------------------------------------------- */

void entry_ready(struct entry *entry, uint64_t offset, uint64_t length)
{
    entry->offset = offset;
    entry->length = length;
    entry->state = ENTRY_READY;
    entry->harvested = false;
}

void entry_fail(dlfs_stream *stream, uint64_t position, int code, uint32_t crc_got)
{
    struct entry *entry = entry_at(stream, position);
    entry->state = ENTRY_FAILED;
    if (stream->failure_count == stream->failure_capacity) {
        uint64_t capacity = stream->failure_capacity ? 2 * stream->failure_capacity : 8;
        dlfs_failure *failures = realloc(stream->failures, capacity * sizeof(*failures));
        if (!failures)
            return; /* take() reports a failure without details */
        stream->failures = failures;
        stream->failure_capacity = capacity;
    }
    dlfs_failure failure = reader_failure(stream->reader, entry->index, code, crc_got);
    failure.position = position;
    stream->failures[stream->failure_count++] = failure;
}

void entry_again(dlfs_stream *stream, uint64_t position, bool alone)
{
    struct entry *entry = entry_at(stream, position);
    entry->state = ENTRY_NEW;
    entry->alone = alone;
    if (position < stream->planned)
        stream->planned = position;
}

/* ---- loads ----------------------------------------------------------------------------------- */

void stream_start(dlfs_stream *stream, struct span *span, enum span_kind kind, uint32_t slot,
                  uint64_t slot_offset)
{
    span->kind = (uint8_t)kind;
    span->slot = slot;
    span->memory = slot_memory(stream->reader, slot) + slot_offset;
    fetch_start(stream->fetch, span);
}

bool load_alone(dlfs_stream *stream, uint64_t position, const struct place *place)
{
    dlfs_reader *reader = stream->reader;
    uint64_t mask = reader->config.block_bytes - 1;
    uint64_t address = place->address & ~mask;
    uint64_t length = ((place->address + place->length + mask) & ~mask) - address;
    uint64_t run = (length + reader->config.chunk_bytes - 1) >> reader->chunk_shift;
    if (run > reader->slot_count || stream->fetch->unused == SLOT_NONE)
        return false;
    uint32_t slot = arena_take(reader, (uint32_t)run);
    if (slot == SLOT_NONE)
        return false;
    struct span *span = fetch_span(stream->fetch);
    span->address = address;
    span->length = length;
    span->tag = (uint32_t)(position & stream->mask);
    entry_at(stream, position)->state = ENTRY_WAITING;
    stream_start(stream, span, KIND_ALONE, slot, 0);
    return true;
}

static bool load_chunk(dlfs_stream *stream, uint64_t position, const struct place *place)
{
    dlfs_reader *reader = stream->reader;
    uint64_t mask = reader->config.chunk_bytes - 1;
    uint64_t end = (place->address + place->length + mask) & ~mask;
    uint64_t address = place->chunk << reader->chunk_shift;
    uint64_t run = (end - address) >> reader->chunk_shift;
    if (run > reader->slot_count || stream->fetch->unused == SLOT_NONE)
        return false;
    uint32_t slot = arena_take(reader, (uint32_t)run);
    if (slot == SLOT_NONE)
        return false;
    struct span *span = fetch_span(stream->fetch);
    span->address = address;
    span->length = end - address;
    arena_begin_load(reader, slot, place->chunk, stream);
    struct entry *entry = entry_at(stream, position);
    entry->state = ENTRY_WAITING;
    entry->next = SLOT_NONE;
    reader->slots[slot].waiters = (uint32_t)(position & stream->mask);
    arena_reference(reader, slot); /* the entry's own, beside the load's */
    stream_start(stream, span, KIND_CHUNK, slot, 0);
    return true;
}

/* Whether memory has the sample already. */
static bool look_up(dlfs_stream *stream, struct entry *entry, const struct place *place)
{
    dlfs_reader *reader = stream->reader;
    uint64_t offset;
    uint32_t slot = arena_find(reader, place->chunk);
    if (slot == SLOT_NONE || !arena_gives(reader, slot, place, &offset))
        return false;
    arena_reference(reader, slot);
    entry_ready(entry, offset, place->length);
    stream->fetch->stats.cache_hits++;
    return true;
}

/* Plans an entry of the chunks plan; false when there is no memory for it. */
static bool chunks_plan(dlfs_stream *stream, uint64_t position, const struct place *place)
{
    dlfs_reader *reader = stream->reader;
    struct entry *entry = entry_at(stream, position);
    uint32_t number = arena_find(reader, place->chunk);
    if (number == SLOT_NONE)
        return load_chunk(stream, position, place);
    struct slot *slot = &reader->slots[number];
    uint64_t end = (slot->chunk + slot->run) << reader->chunk_shift;
    bool ours = slot->state == SLOT_LOADING && slot->owner == stream &&
                place->address + place->length <= end;
    if (!ours)
        return load_alone(stream, position, place);
    entry->state = ENTRY_WAITING;
    entry->next = slot->waiters;
    slot->waiters = (uint32_t)(position & stream->mask);
    arena_reference(reader, number);
    return true;
}

/* Plans entries that need no window; false when one has to wait. */
static bool plan_one(dlfs_stream *stream, uint64_t position)
{
    struct entry *entry = entry_at(stream, position);
    struct place place;
    if (entry->state != ENTRY_NEW)
        return true;
    if (!reader_place(stream->reader, entry->index, &place)) {
        entry_fail(stream, position, DLFS_E_FORMAT, 0);
        return true;
    }
    if (place.length == 0) {
        entry_ready(entry, 0, 0);
        return true;
    }
    if (!entry->alone && look_up(stream, entry, &place))
        return true;
    if (entry->alone ||
        (stream->plan != DLFS_PLAN_CHUNKS && !place_in_chunk(stream->reader, &place)))
        return load_alone(stream, position, &place);
    if (stream->plan == DLFS_PLAN_CHUNKS)
        return chunks_plan(stream, position, &place);
    return harvest_plan(stream, position, &place);
}

/* ---- the direct plan ------------------------------------------------------------------------- */

/*
 * Finds room for a span of at most a chunk; SLOT_NONE when there is none. The reference is the
 * caller's.
 */
static uint32_t land(dlfs_stream *stream, uint64_t length, uint64_t *slot_offset)
{
    dlfs_reader *reader = stream->reader;
    if (stream->landing_slot == SLOT_NONE ||
        length > reader->config.chunk_bytes - stream->landing_used) {
        uint32_t slot = arena_take(reader, 1);
        if (slot == SLOT_NONE)
            return SLOT_NONE;
        if (stream->landing_slot != SLOT_NONE)
            arena_release(reader, stream->landing_slot);
        stream->landing_slot = slot;
        stream->landing_used = 0;
    }
    *slot_offset = stream->landing_used;
    stream->landing_used += length;
    arena_reference(reader, stream->landing_slot);
    return stream->landing_slot;
}

/* Starts one span of a window; false when there is no memory. */
static bool start_window_span(dlfs_stream *stream, const struct plan_span *planned)
{
    uint64_t slot_offset;
    uint32_t slot = land(stream, planned->length, &slot_offset);
    if (slot == SLOT_NONE)
        return false;
    struct span *span = fetch_span(stream->fetch);
    span->address = planned->address;
    span->length = planned->length;
    span->tag = SLOT_NONE;
    for (uint32_t i = 0; i < planned->want_count; i++) {
        uint64_t position = stream->fetch->wants[planned->first_want + i].position;
        struct entry *entry = entry_at(stream, position);
        entry->state = ENTRY_WAITING;
        entry->next = span->tag;
        span->tag = (uint32_t)(position & stream->mask);
    }
    stream_start(stream, span, KIND_WINDOW, slot, slot_offset);
    return true;
}

/*
 * The wants of the next window; what needs no window is planned at once. False when one of those
 * has to wait.
 */
static bool collect_window(dlfs_stream *stream, uint64_t *count)
{
    dlfs_reader *reader = stream->reader;
    uint64_t spans = stream->fetch->unused_count;
    uint64_t end = stream->planned + (spans < WINDOW_MAX ? spans : WINDOW_MAX);
    *count = 0;
    for (; stream->planned < stream->filled && stream->planned < end; stream->planned++) {
        struct entry *entry = entry_at(stream, stream->planned);
        struct place place;
        bool window = entry->state == ENTRY_NEW && !entry->alone &&
                      reader_place(reader, entry->index, &place) && place.length > 0 &&
                      place_in_chunk(reader, &place);
        if (!window) {
            if (!plan_one(stream, stream->planned))
                return false;
        } else if (!look_up(stream, entry, &place)) {
            stream->fetch->wants[(*count)++] =
                (struct want){place.address, place.length, stream->planned, place.crc32c, 0};
        }
    }
    return true;
}

/* Plans a window; returns whether anything was planned. */
static bool direct_plan(dlfs_stream *stream)
{
    struct fetch *fetch = stream->fetch;
    uint64_t before = stream->planned;
    uint64_t count;
    if (fetch->unused_count < WINDOW_MAX / 2)
        return false;
    collect_window(stream, &count);
    plan_sort(fetch->wants, count);
    uint64_t spans = plan_merge(stream->reader, fetch->wants, count, fetch->plan);
    uint64_t started = 0;
    while (started < spans && start_window_span(stream, &fetch->plan[started]))
        started++;
    uint64_t first = started < spans ? fetch->plan[started].first_want : count;
    for (uint64_t i = first; i < count; i++)
        entry_again(stream, fetch->wants[i].position, false);
    return started > 0 || stream->planned > before;
}

/* ---- what has landed ------------------------------------------------------------------------- */

/* The place of an entry whose location was good when it was planned. */
static struct place entry_place(const dlfs_stream *stream, const struct entry *entry)
{
    struct place place;
    (void)reader_place(stream->reader, entry->index, &place);
    return place;
}

static void finish_alone(dlfs_stream *stream, struct span *span, bool *again)
{
    dlfs_reader *reader = stream->reader;
    struct entry *entry = &stream->ring[span->tag];
    struct place place = entry_place(stream, entry);
    uint64_t start = place.address - span->address;
    uint32_t crc = span->code < 0 ? 0 : dlfs_crc32c(0, span->memory + start, place.length);
    bool bad = span->code == 0 && crc != place.crc32c;
    stream->fetch->stats.checksum_errors += bad;
    if (bad && span->attempts < reader->config.retry_count) {
        span->attempts++;
        stream->fetch->stats.retries++;
        fetch_start(stream->fetch, span);
        *again = true;
        return;
    }
    pthread_mutex_lock(&reader->lock);
    uint64_t position = entry_position(stream, span->tag);
    if (span->code < 0 || bad) {
        entry_fail(stream, position, span->code < 0 ? span->code : DLFS_E_CHECKSUM, crc);
        arena_release(reader, span->slot);
    } else {
        entry_ready(entry, (uint64_t)(span->memory - reader->arena) + start, place.length);
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
        struct place place = entry_place(stream, entry);
        next = entry->next;
        uint8_t *bytes = span->memory + (place.address - span->address);
        bool sound = span->code == 0 && dlfs_crc32c(0, bytes, place.length) == place.crc32c;
        stream->fetch->stats.checksum_errors += span->code == 0 && !sound;
        entry->offset = (uint64_t)(bytes - reader->arena);
        entry->length = place.length;
        entry->next = sound ? good : bad;
        *(sound ? &good : &bad) = at;
    }
    pthread_mutex_lock(&reader->lock);
    for (uint32_t at = good; at != SLOT_NONE; at = stream->ring[at].next) {
        struct entry *entry = &stream->ring[at];
        entry_ready(entry, entry->offset, entry->length);
        arena_reference(reader, span->slot);
    }
    for (uint32_t at = bad; at != SLOT_NONE; at = next) {
        next = stream->ring[at].next;
        if (span->code == DLFS_E_TIMEOUT)
            entry_fail(stream, entry_position(stream, at), span->code, 0);
        else
            entry_again(stream, entry_position(stream, at), true);
    }
    arena_release(reader, span->slot);
    pthread_mutex_unlock(&reader->lock);
}

static void finish_chunk(dlfs_stream *stream, struct span *span)
{
    dlfs_reader *reader = stream->reader;
    bool sound = span->code == 0 && reader_verify_span(reader, span);
    pthread_mutex_lock(&reader->lock);
    uint32_t waiters = reader->slots[span->slot].waiters;
    arena_end_load(reader, span->slot, span->code == 0, !sound);
    while (waiters != SLOT_NONE) {
        struct entry *entry = &stream->ring[waiters];
        struct place place = entry_place(stream, entry);
        uint64_t position = entry_position(stream, waiters);
        uint64_t offset;
        waiters = entry->next;
        if (span->code == 0 && arena_gives(reader, span->slot, &place, &offset)) {
            entry_ready(entry, offset, place.length);
            continue;
        }
        stream->fetch->stats.checksum_errors += span->code == 0;
        if (span->code == DLFS_E_TIMEOUT)
            entry_fail(stream, position, span->code, 0);
        else
            entry_again(stream, position, true);
        arena_release(reader, span->slot);
    }
    arena_release(reader, span->slot);
    pthread_mutex_unlock(&reader->lock);
}

static void finish(dlfs_stream *stream, struct span *span)
{
    bool again = false;
    switch ((enum span_kind)span->kind) {
    case KIND_ALONE:
        finish_alone(stream, span, &again);
        break;
    case KIND_WINDOW:
        finish_window(stream, span);
        break;
    case KIND_CHUNK:
        finish_chunk(stream, span);
        break;
    case KIND_HARVEST:
        harvest_finish(stream, span);
        break;
    }
    if (!again)
        fetch_recycle(stream->fetch, span);
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* Whether all the entries that the consumer waits for are ready or failed. The lock is held. */
static bool all_ended(dlfs_stream *stream)
{
    if (stream->head + stream->wanted > stream->filled)
        return false;
    for (; stream->checked < stream->wanted; stream->checked++) {
        uint8_t state = entry_at(stream, stream->head + stream->checked)->state;
        if (state != ENTRY_READY && state != ENTRY_FAILED)
            return false;
    }
    return true;
}

/* Wakes the consumer when all that it waits for has ended. The lock is held. */
static void announce(dlfs_stream *stream)
{
    if (stream->wanted > 0 && all_ended(stream))
        pthread_cond_broadcast(&stream->ready);
}

/*
 * Gives the next entries their indices. The lock is held, and let go of while the sequence is
 * computed.
 */
static void fill(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    const dlfs_stream_config *config = &stream->config;
    uint64_t end = stream->head + stream->ahead;
    end = end < config->count ? end : config->count;
    uint64_t first = stream->filled;
    if (first >= end)
        return;
    uint64_t count = end - first < FILL_MAX ? end - first : FILL_MAX;
    pthread_mutex_unlock(&reader->lock);
    int code = dlfs_sequence_fill(config->sequence, config->first + first * config->stride,
                                  config->stride, count, stream->indices);
    for (uint64_t i = 0; code == 0 && i < count; i++)
        __builtin_prefetch(&reader->locations[stream->indices[i]]);
    pthread_mutex_lock(&reader->lock);
    if (stream->filled != first)
        return; /* the consumer has skipped them */
    for (uint64_t i = 0; i < count; i++) {
        uint64_t position = first + i;
        if (stream->plan == DLFS_PLAN_HARVEST)
            harvest_forget(stream, position);
        *entry_at(stream, position) = (struct entry){.index = code < 0 ? 0 : stream->indices[i]};
        if (code < 0)
            entry_fail(stream, position, code, 0);
        else if (stream->plan == DLFS_PLAN_HARVEST)
            harvest_remember(stream, position);
    }
    stream->filled = first + count;
}

/* Plans for a while; returns whether anything was planned. */
static bool plan_some(dlfs_stream *stream)
{
    if (stream->planned < stream->head)
        stream->planned = stream->head;
    if (stream->plan == DLFS_PLAN_HARVEST)
        harvest_expire(stream);
    if (stream->planned == stream->filled)
        return false;
    if (stream->plan == DLFS_PLAN_DIRECT)
        return direct_plan(stream);
    uint64_t before = stream->planned;
    uint64_t end = before + FILL_MAX < stream->filled ? before + FILL_MAX : stream->filled;
    while (stream->planned < end && plan_one(stream, stream->planned))
        stream->planned++;
    return stream->planned > before;
}

/*
 * Nothing to plan and nothing under way: waits for memory, for the consumer, or for the end. The
 * lock is held.
 */
static void rest(dlfs_stream *stream)
{
    struct timespec until;
    uint64_t then = clock_ns() + IDLE_WAIT_NS;
    until.tv_sec = (time_t)(then / 1000000000);
    until.tv_nsec = (long)(then % 1000000000);
    stream->starved = stream->paused || stream->planned < stream->filled;
    if (stream->starved)
        pthread_cond_broadcast(&stream->ready);
    pthread_cond_timedwait(&stream->reader->released, &stream->reader->lock, &until);
    stream->starved = false;
}

static void *stream_thread(void *argument)
{
    dlfs_stream *stream = argument;
    dlfs_reader *reader = stream->reader;
    pthread_mutex_lock(&reader->lock);
    while (!stream->stop || !fetch_idle(stream->fetch)) {
        bool planned = false;
        if (!stream->stop && !stream->paused)
            fill(stream);
        if (!stream->stop && !stream->paused)
            planned = plan_some(stream);
        announce(stream);
        if (!planned && fetch_idle(stream->fetch)) {
            rest(stream);
            continue;
        }
        bool blocked = stream->planned < stream->filled;
        reader_fold_stats(reader, stream->fetch);
        pthread_mutex_unlock(&reader->lock);
        fetch_step(stream->fetch, planned ? 0 : blocked ? BLOCKED_POLL_MS : -1);
        struct span *span;
        while ((span = fetch_done(stream->fetch)))
            finish(stream, span);
        pthread_mutex_lock(&reader->lock);
        announce(stream);
    }
    pthread_mutex_unlock(&reader->lock);
    return NULL;
}

/* ---- the consumer ---------------------------------------------------------------------------- */

static bool any_waiting(dlfs_stream *stream, uint64_t count)
{
    for (uint64_t i = 0; i < count && stream->head + i < stream->filled; i++)
        if (entry_at(stream, stream->head + i)->state == ENTRY_WAITING)
            return true;
    return false;
}

static void wait_ready(dlfs_stream *stream)
{
    uint64_t before = clock_ns();
    pthread_cond_wait(&stream->ready, &stream->reader->lock);
    stream->reader->stats.wait_ns += clock_ns() - before;
}

static void take_failure(dlfs_stream *stream, struct batch *batch, uint64_t place)
{
    uint64_t position = stream->head + place;
    uint64_t index = entry_at(stream, position)->index;
    dlfs_failure failure = {.position = place, .index = index, .code = -ENOMEM};
    for (uint64_t i = 0; i < stream->failure_count; i++) {
        if (stream->failures[i].position == position) {
            failure = stream->failures[i];
            stream->failures[i] = stream->failures[--stream->failure_count];
            break;
        }
    }
    failure.position = place;
    (void)batch_fail(batch, &failure); /* short of memory: length -1 says that it failed */
}

/* Moves the next entries into a batch, their references with them. The lock is held. */
static void take(dlfs_stream *stream, struct batch *batch, uint64_t count)
{
    dlfs_reader *reader = stream->reader;
    for (uint64_t i = 0; i < count; i++) {
        const struct entry *entry = entry_at(stream, stream->head + i);
        batch->indices[i] = entry->index;
        batch->offsets[i] = (int64_t)entry->offset;
        batch->lengths[i] = (int64_t)entry->length;
        reader->stats.sample_bytes += entry->length;
        if (entry->state == ENTRY_FAILED) {
            batch->lengths[i] = -1;
            take_failure(stream, batch, i);
        }
    }
    batch->public.count = count;
    batch->public.base = reader->arena;
    batch->public.base_bytes = reader->arena_bytes;
    reader->stats.samples += count - batch->public.failure_count;
    stream->head += count;
    pthread_cond_broadcast(&reader->released);
}

/* Forgets entries that were read on demand instead. The lock is held. */
static void skip(dlfs_stream *stream, uint64_t count)
{
    uint64_t end = stream->head + count;
    for (; stream->head < end; stream->head++) {
        struct entry *entry = entry_at(stream, stream->head);
        if (stream->head >= stream->filled)
            continue;
        if (entry->state == ENTRY_READY && entry->length > 0)
            arena_release(stream->reader, slot_of(stream->reader, entry->offset));
    }
    for (uint64_t i = 0; i < stream->failure_count;) {
        if (stream->failures[i].position < end)
            stream->failures[i] = stream->failures[--stream->failure_count];
        else
            i++;
    }
    if (stream->filled < end)
        stream->filled = end;
    pthread_cond_broadcast(&stream->reader->released);
}

static int read_on_demand(dlfs_stream *stream, uint64_t count, dlfs_batch **out)
{
    const dlfs_stream_config *config = &stream->config;
    uint64_t *indices = malloc(count * sizeof(*indices));
    if (!indices)
        return -ENOMEM;
    int code = dlfs_sequence_fill(config->sequence, config->first + stream->head * config->stride,
                                  config->stride, count, indices);
    if (code == 0)
        code = dlfs_reader_read(stream->reader, indices, count, out);
    free(indices);
    return code;
}

/*
 * Waits until the entries that are wanted have ended; false when they must be read on demand: there
 * is no memory for them, and the thread rests.
 */
static bool await(dlfs_stream *stream)
{
    bool possible = stream->wanted <= stream->ahead;
    stream->paused = !possible;
    stream->starved = false; /* it may have been given memory since it said so */
    for (;;) {
        if (possible && all_ended(stream))
            return true;
        if (stream->starved && !any_waiting(stream, stream->wanted)) {
            stream->paused = true;
            return false;
        }
        pthread_cond_broadcast(&stream->reader->released);
        wait_ready(stream);
    }
}

DLFS_API int dlfs_stream_next(dlfs_stream *stream, uint64_t count, dlfs_batch **out)
{
    dlfs_reader *reader = stream->reader;
    if (count == 0)
        return -EINVAL;
    if (stream->head == stream->config.count)
        return DLFS_E_END;
    if (count > stream->config.count - stream->head)
        count = stream->config.count - stream->head;
    struct batch *batch = batch_take(reader, count);
    if (!batch)
        return -ENOMEM;
    batch->public.count = 0;
    int code = 0;
    pthread_mutex_lock(&reader->lock);
    stream->wanted = count;
    stream->checked = 0;
    bool ended = await(stream);
    if (ended) {
        take(stream, batch, count);
    } else {
        pthread_mutex_unlock(&reader->lock);
        batch_give_back(batch);
        code = read_on_demand(stream, count, out);
        pthread_mutex_lock(&reader->lock);
        if (code == 0)
            skip(stream, count);
        stream->paused = false;
    }
    stream->wanted = 0;
    pthread_mutex_unlock(&reader->lock);
    if (ended)
        *out = &batch->public;
    return code;
}

/* ---- create, destroy ------------------------------------------------------------------------- */

/* Bytes that must be moved, a request's own cost in bytes (gap_bytes) included, for one sample. */
static uint32_t choose_plan(const dlfs_reader *reader, const dlfs_stream_config *config,
                            uint64_t mean_bytes, bool permuted)
{
    if (config->plan != DLFS_PLAN_AUTO)
        return config->plan;
    if (reader->keeps_all || !permuted)
        return DLFS_PLAN_CHUNKS;
    double request = (double)reader->config.gap_bytes;
    double chunk = (double)reader->config.chunk_bytes;
    double direct = request + (double)mean_bytes;
    double per_chunk = (double)reader->sample_count / (double)reader->chunk_count;
    double kept =
        (double)reader->slot_count * chunk / (double)mean_bytes / (double)reader->sample_count;
    if (kept > 1.0 / (double)config->stride)
        kept = 1.0 / (double)config->stride;
    double harvest = (request + chunk) / (1 + per_chunk * kept);
    return harvest < direct ? DLFS_PLAN_HARVEST : DLFS_PLAN_DIRECT;
}

static uint64_t power_of_two(uint64_t value)
{
    uint64_t power = RING_MIN;
    while (power < value)
        power *= 2;
    return power;
}

static int stream_prepare(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    uint64_t mean_bytes = reader->sample_count ? reader->data_bytes / reader->sample_count : 1;
    mean_bytes = mean_bytes ? mean_bytes : 1;
    stream->plan = choose_plan(reader, &stream->config, mean_bytes,
                               sequence_kind(stream->config.sequence) == DLFS_ORDER_GLOBAL);
    stream->ahead = RING_MAX;
    if (stream->plan == DLFS_PLAN_HARVEST) {
        int code = harvest_create(stream, mean_bytes);
        if (code < 0)
            return code;
    }
    if (stream->ahead > stream->config.count)
        stream->ahead = stream->config.count ? stream->config.count : 1;
    stream->mask = power_of_two(stream->ahead) - 1;
    stream->ring = calloc(stream->mask + 1, sizeof(struct entry));
    stream->indices = malloc(FILL_MAX * sizeof(uint64_t));
    if (!stream->ring || !stream->indices)
        return -ENOMEM;
    int code = fetch_reserve(stream->fetch, 2 * WINDOW_MAX);
    return code < 0 ? code : fetch_reserve_plan(stream->fetch, WINDOW_MAX);
}

static void stream_free(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    if (stream->fetch)
        reader_return_fetch(reader, stream->fetch);
    pthread_mutex_lock(&reader->lock);
    for (uint64_t position = stream->head; position < stream->filled; position++) {
        const struct entry *entry = entry_at(stream, position);
        if (entry->state == ENTRY_READY && entry->length > 0)
            arena_release(reader, slot_of(reader, entry->offset));
    }
    if (stream->landing_slot != SLOT_NONE)
        arena_release(reader, stream->landing_slot);
    harvest_destroy(stream);
    reader->streams_out--;
    pthread_mutex_unlock(&reader->lock);
    pthread_cond_destroy(&stream->ready);
    free(stream->ring);
    free(stream->indices);
    free(stream->failures);
    free(stream);
}

DLFS_API int dlfs_stream_create(dlfs_reader *reader, const dlfs_stream_config *config,
                                dlfs_stream **out)
{
    if (!reader || !config || !config->sequence || config->stride == 0 ||
        config->plan > DLFS_PLAN_HARVEST)
        return -EINVAL;
    if (config->count > 0 &&
        (config->first >= reader->sample_count ||
         config->count - 1 > (reader->sample_count - 1 - config->first) / config->stride))
        return -EINVAL;
    dlfs_stream *stream = calloc(1, sizeof(*stream));
    if (!stream)
        return -ENOMEM;
    stream->reader = reader;
    stream->config = *config;
    stream->landing_slot = SLOT_NONE;
    pthread_cond_init(&stream->ready, NULL);
    pthread_mutex_lock(&reader->lock);
    reader->streams_out++;
    int code = arena_map(reader);
    pthread_mutex_unlock(&reader->lock);
    if (code == 0) {
        stream->fetch = reader_take_fetch(reader);
        code = stream->fetch ? stream_prepare(stream) : -ENOMEM;
    }
    if (code == 0)
        code = -pthread_create(&stream->thread, NULL, stream_thread, stream);
    if (code < 0) {
        stream_free(stream);
        return code;
    }
    *out = stream;
    return 0;
}

DLFS_API void dlfs_stream_destroy(dlfs_stream *stream)
{
    if (!stream)
        return;
    pthread_mutex_lock(&stream->reader->lock);
    stream->stop = true;
    pthread_cond_broadcast(&stream->reader->released);
    pthread_mutex_unlock(&stream->reader->lock);
    pthread_join(stream->thread, NULL);
    stream_free(stream);
}

DLFS_API uint32_t dlfs_stream_plan(const dlfs_stream *stream)
{
    return stream->plan;
}
