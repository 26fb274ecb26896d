/*
 * A stream: an epoch read ahead for one consumer.
 *
 * One thread keeps a ring of the samples to come, plans their reads and makes them ready in memory
 * (stream/lookahead.c). The consumer takes them in order. The reader's memory bounds the
 * look-ahead: samples that are ready or being read hold references in the arena, and without free
 * slots nothing more is planned.
 *
 * If the consumer has pinned all the memory, its next batch is read on demand into private memory.
 * So a stream never waits for a batch to be released.
 */
#include "stream/stream.h"

#include <errno.h>
#include <stdlib.h>

#include "platform/clock.h"
#include "platform/thread.h"
#include "sequence/sequence.h"
#include "stream/state.h"

#define RING_MIN 1024u
#define RING_MAX (UINT64_C(1) << 18) /* positions */
#define IDLE_WAIT_NS UINT64_C(200000000)
#define BLOCKED_POLL_MS 2
#define STOP_NS UINT64_C(100000000) /* that reads under way get when the stream ends */

/* ---- the thread ------------------------------------------------------------------------------ */

/* Returns true if all entries that the consumer waits for are ready or failed. The lock is held. */
static bool all_ended(dlfs_stream *stream)
{
    if (stream->head + stream->awaited > stream->filled) {
        return false;
    }
    for (; stream->awaited_ended < stream->awaited; stream->awaited_ended++) {
        uint8_t state = entry_at(stream, stream->head + stream->awaited_ended)->state;
        if (state != ENTRY_READY && state != ENTRY_FAILED) {
            return false;
        }
    }
    return true;
}

/* Wakes the consumer if all that it waits for has ended. The lock is held. */
static void wake_consumer(dlfs_stream *stream)
{
    if (stream->awaited > 0 && all_ended(stream)) {
        pthread_cond_broadcast(&stream->ready);
    }
}

/*
 * Gives the next entries their indices. The lock is held, and released while the sequence computes
 * them.
 */
static void fill_entries(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    const dlfs_stream_config *config = &stream->config;
    uint64_t end = stream->head + stream->lookahead;
    end = end < config->count ? end : config->count;
    uint64_t first = stream->filled;
    if (first >= end) {
        return;
    }
    uint64_t count = end - first < FILL_MAX ? end - first : FILL_MAX;
    pthread_mutex_unlock(&reader->arena->lock);
    int code = stream_indices(config, first, count, stream->indices);
    for (uint64_t i = 0; code == 0 && i < count; i++) {
        __builtin_prefetch(&reader->locations[stream->indices[i]]);
    }
    pthread_mutex_lock(&reader->arena->lock);
    if (stream->filled != first) {
        return; /* the consumer has skipped them meanwhile */
    }
    for (uint64_t i = 0; i < count; i++) {
        uint64_t position = first + i;
        if (stream->plan == DLFS_PLAN_CHUNK_COPY) {
            chunk_copy_remove_entry(stream, position);
        }
        *entry_at(stream, position) = (struct entry){.index = code < 0 ? 0 : stream->indices[i]};
        if (code < 0) {
            entry_fail(stream, position, code, 0, 0);
        } else if (stream->plan == DLFS_PLAN_CHUNK_COPY) {
            chunk_copy_add_entry(stream, position);
        }
    }
    stream->filled = first + count;
}

/*
 * Waits for memory, for the consumer, or for the end: nothing can be planned, and nothing is under
 * way. The lock is held.
 */
static void wait_for_work(dlfs_stream *stream)
{
    stream->blocked = stream->paused || stream->planned < stream->filled;
    if (stream->blocked) {
        (void)arena_starve(stream->reader);
        pthread_cond_broadcast(&stream->ready);
    }
    if (!stream->stop) {
        uint64_t before = monotonic_ns();
        condition_wait_until(&stream->reader->released, &stream->reader->arena->lock,
                             before + IDLE_WAIT_NS);
        if (stream->head < stream->config.count) { /* at the end there is nothing to wait for */
            stream->reader->stats.rest_ns += monotonic_ns() - before;
        }
    }
    stream->blocked = false;
}

/* Collects completions of abandoned reads, and so their memory. Releases the lock meanwhile. */
static void collect_abandoned(dlfs_stream *stream)
{
    if (stream->fetch->abandoned_requests == 0 && stream->reader->draining_fetches == NULL) {
        return;
    }
    pthread_mutex_unlock(&stream->reader->arena->lock);
    if (stream->fetch->abandoned_requests > 0) {
        fetch_step(stream->fetch, 0);
    }
    reader_drain_fetches(stream->reader);
    pthread_mutex_lock(&stream->reader->arena->lock);
}

/* Moves the consumer's deadline for bytes that have arrived. The lock is held. */
static void credit_arrived(dlfs_stream *stream)
{
    uint64_t bytes = stream->fetch->arrived_bytes - stream->arrived_bytes;
    stream->arrived_bytes = stream->fetch->arrived_bytes;
    if (stream->awaited > 0) {
        bytes = bytes < stream->slow_bytes ? bytes : stream->slow_bytes;
        stream->slow_bytes -= bytes;
        stream->deadline_ns += reader_slow_ns(bytes);
    }
}

/*
 * Fails what the consumer has waited for beyond its deadline, with all reads under way, since one
 * read may serve several batches. Entries of later batches are read again. The lock is held.
 */
static void fail_overdue(dlfs_stream *stream)
{
    struct fetch *fetch = stream->fetch;
    stream->overdue = stream->awaited > 0 && fetch->now_ns >= stream->deadline_ns;
    if (!stream->stop) {
        fetch->deadline_ns = stream->overdue ? 0 : UINT64_MAX;
    } else if (fetch->deadline_ns == UINT64_MAX) {
        fetch->deadline_ns = fetch->now_ns + STOP_NS;
    }
    for (uint64_t i = 0; stream->overdue && i < stream->awaited; i++) {
        uint64_t position = stream->head + i;
        if (position < stream->filled && entry_at(stream, position)->state == ENTRY_NEW) {
            entry_fail(stream, position, DLFS_E_TIMEOUT, 0, 0);
        }
    }
}

static void *stream_thread(void *argument)
{
    dlfs_stream *stream = argument;
    dlfs_reader *reader = stream->reader;
    pthread_mutex_lock(&reader->arena->lock);
    while (!stream->stop || !fetch_is_idle(stream->fetch)) {
        bool planned = false;
        stream->fetch->now_ns = monotonic_ns();
        credit_arrived(stream);
        fail_overdue(stream);
        if (plan_lags(stream)) {
            plan_follow_share(stream);
        }
        if (!stream->stop && !stream->paused) {
            fill_entries(stream);
        }
        if (!stream->stop && !stream->paused) {
            planned = lookahead_plan(stream);
        }
        wake_consumer(stream);
        fetch_add_time(stream->fetch, &stream->fetch->stats.plan_ns);
        bool help =
            stream->helps_fill && !stream_is_filling(stream) && fill_needs_help(reader->arena);
        if (!planned && !help && fetch_is_idle(stream->fetch)) {
            if (fetch_has_idle_queues(stream->fetch)) {
                pthread_mutex_unlock(&reader->arena->lock);
                fetch_release_queues(stream->fetch);
                pthread_mutex_lock(&reader->arena->lock);
                continue; /* plans again: the lock was released */
            }
            wait_for_work(stream);
            collect_abandoned(stream);
            continue;
        }
        bool short_of_memory = stream->planned < stream->filled;
        reader_fold_stats(reader, stream->fetch);
        pthread_mutex_unlock(&reader->arena->lock);
        fetch_step(stream->fetch, planned || help ? 0 : short_of_memory ? BLOCKED_POLL_MS : -1);
        lookahead_finish(stream);
        prober_begin(reader);
        fetch_add_time(stream->fetch, &stream->fetch->stats.verify_ns);
        pthread_mutex_lock(&reader->arena->lock);
        if (help) {
            stream->helps_fill = false;
            fill_help(reader->arena);
        }
        wake_consumer(stream);
    }
    pthread_mutex_unlock(&reader->arena->lock);
    return NULL;
}

/* ---- the consumer ---------------------------------------------------------------------------- */

static bool any_waiting(dlfs_stream *stream, uint64_t count)
{
    for (uint64_t i = 0; i < count && stream->head + i < stream->filled; i++) {
        if (entry_at(stream, stream->head + i)->state == ENTRY_WAITING) {
            return true;
        }
    }
    return false;
}

static void take_failure(dlfs_stream *stream, struct batch *batch, uint64_t offset)
{
    uint64_t position = stream->head + offset;
    uint64_t index = entry_at(stream, position)->index;
    dlfs_failure failure = {.position = offset, .index = index, .code = -ENOMEM};
    for (uint64_t i = 0; i < stream->failure_count; i++) {
        if (stream->failures[i].position == position) {
            failure = stream->failures[i];
            stream->failures[i] = stream->failures[--stream->failure_count];
            break;
        }
    }
    failure.position = offset;
    (void)batch_fail(batch, &failure); /* without memory only the length -1 tells of the failure */
}

/* Moves the next entries into a batch, with their references. The lock is held. */
static void fill_batch(dlfs_stream *stream, struct batch *batch, uint64_t count)
{
    dlfs_reader *reader = stream->reader;
    for (uint64_t i = 0; i < count; i++) {
        const struct entry *entry = entry_at(stream, stream->head + i);
        batch->indices[i] = entry->index;
        batch->offsets[i] = (int64_t)entry->offset;
        batch->lengths[i] = (int64_t)entry->length;
        if (entry->state == ENTRY_FAILED) {
            batch->lengths[i] = -1;
            take_failure(stream, batch, i);
        } else {
            reader->stats.sample_bytes += entry->length;
        }
    }
    batch->public.count = count;
    batch->public.base = reader->arena->memory;
    batch->public.base_bytes = reader->arena->bytes;
    batch->public.lost_members = dlfs_reader_lost_members(reader);
    reader->stats.samples += count - batch->public.failure_count;
    stream->head += count;
    cache_count_given(reader, count);
    pthread_cond_broadcast(&reader->released);
}

/* Releases the memory of an entry that the consumer does not take. The lock is held. */
static void drop_entry(dlfs_stream *stream, uint64_t position)
{
    const struct entry *entry = entry_at(stream, position);
    if (entry->state == ENTRY_READY && entry->length > 0) {
        arena_release(stream->reader, slot_of(stream->reader, entry->offset));
    }
}

/* Drops entries that were read on demand instead. The lock is held. */
static void skip_entries(dlfs_stream *stream, uint64_t count)
{
    cache_count_given(stream->reader, count);
    uint64_t end = stream->head + count;
    for (; stream->head < end; stream->head++) {
        if (stream->head < stream->filled) {
            drop_entry(stream, stream->head);
        }
    }
    for (uint64_t i = 0; i < stream->failure_count;) {
        if (stream->failures[i].position < end) {
            stream->failures[i] = stream->failures[--stream->failure_count];
        } else {
            i++;
        }
    }
    if (stream->filled < end) {
        stream->filled = end;
    }
    pthread_cond_broadcast(&stream->reader->released);
}

static int read_on_demand(dlfs_stream *stream, uint64_t count, const struct read_terms *terms,
                          dlfs_batch **out)
{
    uint64_t *indices = malloc(count * sizeof(*indices));
    if (indices == NULL) {
        return -ENOMEM;
    }
    int code = stream_indices(&stream->config, stream->head, count, indices);
    if (code == 0) {
        code = reader_read(stream->reader, indices, count, terms, out);
    }
    free(indices);
    return code;
}

/* Returns true if the awaited samples can be in the arena all at once. Each different one is taken
 * as long as the mean. */
static bool awaited_fit(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    uint64_t different =
        stream->awaited < stream->need.samples ? stream->awaited : stream->need.samples;
    uint64_t arena_bytes = (uint64_t)reader->slots_max << reader->chunk_shift;
    return stream->awaited <= stream->lookahead &&
           different <= arena_bytes / stream->need.mean_bytes;
}

/*
 * Waits until the awaited entries have ended, and returns 0. Returns DLFS_E_LIMIT if they have to
 * be read on demand, because there is no memory for them and the thread is blocked; -EAGAIN after
 * the timeout.
 */
static int wait_for_entries(dlfs_stream *stream, int timeout_ms)
{
    uint64_t until = timeout_ms < 0 ? UINT64_MAX : monotonic_ns() + (uint64_t)timeout_ms * 1000000;
    bool possible = awaited_fit(stream);
    stream->paused = !possible;
    stream->blocked = false; /* memory may have been released since then */
    for (;;) {
        if (possible && all_ended(stream)) {
            return 0;
        }
        if (stream->blocked && !any_waiting(stream, stream->awaited)) {
            stream->paused = true;
            return DLFS_E_LIMIT;
        }
        uint64_t before = monotonic_ns();
        if (before >= until) {
            return -EAGAIN;
        }
        pthread_cond_broadcast(&stream->reader->released);
        uint64_t then = before + IDLE_WAIT_NS < until ? before + IDLE_WAIT_NS : until;
        condition_wait_until(&stream->ready, &stream->reader->arena->lock, then);
        stream->reader->stats.wait_ns += monotonic_ns() - before;
    }
}

/* Fills or reads the batch of the awaited samples. The lock is held, and released to read. */
static int next_batch(dlfs_stream *stream, struct batch **batch, int timeout_ms)
{
    dlfs_reader *reader = stream->reader;
    uint64_t count = stream->awaited;
    int code = wait_for_entries(stream, timeout_ms);
    if (code == 0) {
        fill_batch(stream, *batch, count);
        return 0;
    }
    if (code == DLFS_E_LIMIT) {
        plan_memory_ran_out(stream);
    }
    struct read_terms terms = {.limit = stream->bounds.limit, .deadline_ns = stream->deadline_ns};
    pthread_mutex_unlock(&reader->arena->lock);
    batch_recycle(*batch);
    if (code == DLFS_E_LIMIT) {
        dlfs_batch *read;
        code = read_on_demand(stream, count, &terms, &read);
        *batch = code == 0 ? (struct batch *)read : NULL;
    }
    pthread_mutex_lock(&reader->arena->lock);
    if (code == 0) {
        skip_entries(stream, count);
    }
    return code;
}

/* Begins to wait for the batch at the head. An earlier call may have waited for it already. */
static void begin_wait(dlfs_stream *stream, uint64_t count)
{
    if (stream->time_left_ns == 0) {
        uint64_t mean = stream->need.mean_bytes;
        stream->slow_bytes = count < UINT32_MAX / mean ? count * mean : UINT32_MAX;
        stream->slow_bytes += stream->need.largest_bytes;
        stream->time_left_ns = reader_timeout_ns(stream->reader);
    }
    stream->deadline_ns = monotonic_ns() + stream->time_left_ns;
    stream->awaited = count;
    stream->awaited_ended = 0;
}

/*
 * Ends the wait, and keeps the remaining time if the batch is still to come. The look-ahead stays
 * paused after a batch that cannot fit in the arena: the next one hardly will either, and what is
 * read ahead for it would be read twice.
 */
static void end_wait(dlfs_stream *stream, int code)
{
    uint64_t now = monotonic_ns();
    uint64_t left = stream->deadline_ns > now ? stream->deadline_ns - now : 1;
    stream->time_left_ns = code == -EAGAIN ? left : 0;
    stream->paused = !awaited_fit(stream);
    stream->awaited = 0;
}

DLFS_API int dlfs_stream_next(dlfs_stream *stream, uint64_t count, int timeout_ms, dlfs_batch **out)
{
    dlfs_reader *reader = stream->reader;
    if (count == 0) {
        return -EINVAL;
    }
    if (stream->head == stream->config.count) {
        return DLFS_E_END;
    }
    if (count > stream->config.count - stream->head) {
        count = stream->config.count - stream->head;
    }
    struct batch *batch = batch_take(reader, count);
    if (batch == NULL) {
        return -ENOMEM;
    }
    batch->public.count = 0;
    pthread_mutex_lock(&reader->arena->lock);
    begin_wait(stream, count);
    plan_batch_grew(stream);
    int code = next_batch(stream, &batch, timeout_ms);
    end_wait(stream, code);
    pthread_mutex_unlock(&reader->arena->lock);
    if (code == 0) {
        *out = &batch->public;
    }
    return code;
}

/* ---- create, destroy ------------------------------------------------------------------------- */

/* Returns the positions of look-ahead: twice as many as there is memory for, at most. */
static uint64_t lookahead_max(const dlfs_stream *stream)
{
    uint64_t bytes = (uint64_t)stream->reader->slots_max << stream->reader->chunk_shift;
    uint64_t most = 2 * (bytes / stream->need.mean_bytes);
    most = most > RING_MIN ? most : RING_MIN;
    return most < RING_MAX ? most : RING_MAX;
}

static int stream_prepare(dlfs_stream *stream)
{
    need_measure(stream);
    plan_begin(stream);
    stream->lookahead = lookahead_max(stream);
    int code = stream->plan == DLFS_PLAN_CHUNK_COPY
                   ? chunk_copy_create(stream, stream->need.mean_bytes)
                   : 0;
    if (code < 0) {
        return code;
    }
    if (stream->lookahead > stream->config.count) {
        stream->lookahead = stream->config.count ? stream->config.count : 1;
    }
    uint64_t places = RING_MIN; /* a power of two */
    while (places < stream->lookahead) {
        places *= 2;
    }
    stream->mask = places - 1;
    stream->ring = calloc(places, sizeof(struct entry));
    stream->indices = malloc(FILL_MAX * sizeof(uint64_t));
    if (stream->ring == NULL || stream->indices == NULL) {
        return -ENOMEM;
    }
    code = fetch_prepare(stream->fetch, 2 * WINDOW_MAX, NULL);
    return code < 0 ? code : fetch_reserve_plan(stream->fetch, WINDOW_MAX);
}

static void stream_free(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    if (stream->fetch != NULL) {
        reader_return_fetch(reader, stream->fetch);
    }
    pthread_mutex_lock(&reader->arena->lock);
    for (uint64_t position = stream->head; position < stream->filled; position++) {
        drop_entry(stream, position);
    }
    if (stream->partial_slot.slot != SLOT_NONE) {
        arena_release(reader, stream->partial_slot.slot);
    }
    if (stream->to_cache.slot != SLOT_NONE) {
        arena_release(reader, stream->to_cache.slot);
    }
    chunk_copy_destroy(stream);
    plan_end(stream);
    reader->open_streams--;
    pthread_mutex_unlock(&reader->arena->lock);
    pthread_cond_destroy(&stream->ready);
    free(stream->ring);
    free(stream->indices);
    free(stream->failures);
    free(stream);
}

int stream_create(dlfs_reader *reader, const dlfs_stream_config *config,
                  const struct stream_bounds *bounds, dlfs_stream **out)
{
    if (reader == NULL || config == NULL || config->sequence == NULL || config->stride == 0 ||
        config->plan > DLFS_PLAN_CHUNK_COPY || config->reserved != 0) {
        return -EINVAL;
    }
    if (!stream_fits(config, sequence_count(config->sequence))) {
        return -EINVAL;
    }
    dlfs_stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL) {
        return -ENOMEM;
    }
    stream->reader = reader;
    stream->config = *config;
    stream->bounds = *bounds;
    stream->partial_slot.slot = SLOT_NONE;
    stream->to_cache.slot = SLOT_NONE;
    (void)condition_init(&stream->ready);
    pthread_mutex_lock(&reader->arena->lock);
    reader->open_streams++;
    int code = arena_attach(reader);
    pthread_mutex_unlock(&reader->arena->lock);
    if (code == 0) {
        code = reader_take_fetch(reader, &stream->fetch);
        if (code == 0) {
            stream->fetch->closing = bounds->stop;
            code = stream_prepare(stream);
            stream->fetch->closing = &stream->stop;
        }
    }
    if (code == 0) {
        code = thread_start(&stream->thread, NULL, stream_thread, stream);
    }
    if (code < 0) {
        stream_free(stream);
        return code;
    }
    *out = stream;
    return 0;
}

DLFS_API void dlfs_stream_destroy(dlfs_stream *stream)
{
    if (stream == NULL) {
        return;
    }
    pthread_mutex_lock(&stream->reader->arena->lock);
    stream->stop = true;
    pthread_cond_broadcast(&stream->reader->released);
    pthread_mutex_unlock(&stream->reader->arena->lock);
    pthread_join(stream->thread, NULL);
    stream_free(stream);
}

DLFS_API int dlfs_stream_create(dlfs_reader *reader, const dlfs_stream_config *config,
                                dlfs_stream **out)
{
    const struct stream_bounds none = {{.private_bytes_max = UINT64_MAX}, UINT64_MAX, NULL};
    return stream_create(reader, config, &none, out);
}

uint64_t stream_memory_bytes(const dlfs_stream *stream)
{
    const struct chunk_copy *chunk_copy = &stream->chunk_copy;
    uint64_t bytes = (stream->mask + 1) * sizeof(*stream->ring) + FILL_MAX * sizeof(uint64_t);
    return bytes +
           (chunk_copy->map != NULL ? (chunk_copy->map_mask + 1) * sizeof(*chunk_copy->map) : 0);
}

DLFS_API uint32_t dlfs_stream_plan(const dlfs_stream *stream)
{
    return stream->plan;
}
