/*
 * Reads a batch on demand.
 *
 * The samples are looked up in the sample memory first. Those that are missing are sorted by
 * address and merged into spans. If the whole dataset fits in memory, spans are widened to whole
 * chunks, which stay, as far as memory was touched for them. Each sample is verified. Samples stay
 * where they landed: a batch points into the arena and holds references to its slots. If other
 * batches pin the arena, it gets private memory, so that a read never waits for a release.
 *
 * A span that cannot be read as a whole is read sample by sample, so that a bad block fails only
 * the samples that have it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dlfs/channel.h"
#include "platform/clock.h"
#include "reader/fetch_queues.h"
#include "reader/reader.h"

#define MISSING (-1)      /* the offset of a sample that is not in memory yet */
#define LOOK_UP_MAX 1024u /* samples that are looked up under one hold of the lock */

/* A read under way. */
struct read {
    dlfs_reader *reader;
    struct fetch *fetch;
    struct batch *batch;
    struct miss *misses; /* [miss_count] samples that are not in memory */
    uint64_t miss_count;
    struct plan_span *spans; /* [span_count] */
    uint64_t span_count;
    uint64_t hit_bytes; /* of the samples that were in memory */
    bool whole_chunks;  /* there is memory for whole chunks to stay */
    struct read_terms *terms;
};

static int fail(struct read *read, uint64_t position, int code, uint32_t crc_got,
                uint64_t bad_address)
{
    dlfs_failure failure =
        reader_failure(read->reader, read->batch->indices[position], code, crc_got, bad_address);
    failure.position = position;
    return batch_fail(read->batch, &failure);
}

/* ---- look up --------------------------------------------------------------------------------- */

/* Finds the locations of samples, and takes all of them as misses for now. */
static int locate(struct read *read, uint64_t first, uint64_t end)
{
    struct batch *batch = read->batch;
    for (uint64_t i = first; i < end; i++) {
        __builtin_prefetch(&read->reader->locations[batch->indices[i]]);
    }
    for (uint64_t i = first; i < end; i++) {
        struct location location;
        batch->offsets[i] = 0;
        batch->lengths[i] = 0;
        if (reader_locate(read->reader, batch->indices[i], &location)) {
            batch->lengths[i] = (int64_t)location.length;
            read->misses[i] =
                (struct miss){location.address, location.length, i, location.crc32c, 0};
        } else if (fail(read, i, DLFS_E_FORMAT, 0, 0) < 0) {
            return -ENOMEM;
        }
    }
    return 0;
}

/*
 * Divides located samples into hits, which are referenced, and misses. The lock is held; locate()
 * has loaded the locations into the processor's caches before.
 */
static void look_up(struct read *read, uint64_t first, uint64_t end)
{
    dlfs_reader *reader = read->reader;
    struct batch *batch = read->batch;
    const struct cache *cache = &reader->cache;
    uint64_t cached = cache->slots < cache->slots_max ? cache->slots : cache->slots_max;
    read->whole_chunks = reader->dataset_fits && cached + reader->chunk_count <= reader->slot_count;
    for (uint64_t i = first; i < end; i++) {
        if (batch->lengths[i] <= 0) {
            continue;
        }
        struct miss miss = read->misses[i];
        struct location location = {miss.address, miss.length, miss.address >> reader->chunk_shift,
                                    miss.crc32c};
        uint64_t offset;
        if (arena_look_up(reader, batch->indices[i], &location, &offset)) {
            batch->offsets[i] = (int64_t)offset;
            read->hit_bytes += location.length;
            read->fetch->stats.cache_hits++;
        } else {
            batch->offsets[i] = MISSING;
            read->misses[read->miss_count++] = miss;
        }
    }
}

/* Finds the samples of the batch that are in memory; read->misses gets the others. */
static int find(struct read *read)
{
    dlfs_reader *reader = read->reader;
    uint64_t count = read->batch->public.count;
    uint64_t found = 0; /* samples that were looked up: the hits hold references */
    int code = 0;
    do {
        uint64_t end = count - found < LOOK_UP_MAX ? count : found + LOOK_UP_MAX;
        code = locate(read, found, end);
        if (code < 0) {
            break;
        }
        pthread_mutex_lock(&reader->lock);
        code = arena_map(reader);
        if (code == 0) {
            look_up(read, found, end);
            found = end;
        }
        pthread_mutex_unlock(&reader->lock);
    } while (code == 0 && found < count);
    if (code < 0) {
        read->batch->public.count = found;
    }
    return code;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Places the spans in slots of the arena. Takes no slot if there are not enough. The lock is held.
 */
static bool take_slots(struct read *read)
{
    dlfs_reader *reader = read->reader;
    uint32_t chunk_bytes = reader->config.chunk_bytes;
    uint64_t used = chunk_bytes;
    uint32_t open = SLOT_NONE;
    uint64_t taken;
    for (taken = 0; taken < read->span_count; taken++) {
        struct plan_span *span = &read->spans[taken];
        if (span->length <= chunk_bytes - used) {
            arena_reference(reader, open);
        } else {
            uint64_t run = (span->length + chunk_bytes - 1) >> reader->chunk_shift;
            open = run > reader->slot_count ? SLOT_NONE : arena_take(reader, (uint32_t)run, true);
            if (open == SLOT_NONE) {
                break;
            }
            used = 0;
        }
        span->slot = open;
        span->memory_offset = ((uint64_t)open << reader->chunk_shift) + used;
        used = span->whole_chunks || span->length > chunk_bytes ? chunk_bytes : used + span->length;
    }
    if (taken == read->span_count) {
        return true;
    }
    while (taken-- > 0) {
        arena_release(reader, read->spans[taken].slot);
    }
    return false;
}

/* Moves the hits of a batch into its private memory, from offset `at` on. */
static void move_hits(struct read *read, struct private_memory *private_memory, uint64_t at)
{
    dlfs_reader *reader = read->reader;
    struct batch *batch = read->batch;
    for (uint64_t i = 0; i < batch->public.count; i++) {
        if (batch->lengths[i] <= 0 || batch->offsets[i] == MISSING) {
            continue;
        }
        uint64_t offset = (uint64_t)batch->offsets[i];
        memcpy(private_memory->base + at, reader->arena + offset, (size_t)batch->lengths[i]);
        batch->offsets[i] = (int64_t)at;
        at += (uint64_t)batch->lengths[i];
        pthread_mutex_lock(&reader->lock);
        arena_release(reader, slot_of(reader, offset));
        pthread_mutex_unlock(&reader->lock);
    }
}

/* Gives the batch private memory for just the samples that it needs; none of it stays cached. */
static int take_private_memory(struct read *read)
{
    uint64_t bytes = 0;
    bool fits = true;
    read->span_count = plan_merge(read->reader, read->misses, read->miss_count, read->spans);
    for (uint64_t i = 0; i < read->span_count; i++) {
        read->spans[i].memory_offset = bytes;
        fits &= !__builtin_add_overflow(bytes, read->spans[i].length, &bytes);
    }
    fits &= bytes < SIZE_MAX / 2 && read->hit_bytes < SIZE_MAX / 2;
    if (!fits) {
        return -ENOMEM;
    }
    if (bytes + read->hit_bytes > read->terms->limit.private_bytes_max) {
        return DLFS_E_LIMIT;
    }
    struct private_memory *private_memory;
    int code = private_memory_take(read->reader, bytes + read->hit_bytes + 1,
                                   read->terms->limit.share, &private_memory);
    if (code < 0) {
        return code;
    }
    move_hits(read, private_memory, bytes);
    read->batch->private_memory = private_memory;
    read->fetch->stats.private_batches += !read->terms->private_only;
    return 0;
}

/* Plans the spans and finds memory for them. */
static int plan(struct read *read)
{
    dlfs_reader *reader = read->reader;
    plan_sort(read->misses, read->fetch->sort_scratch, read->miss_count);
    if (read->terms->private_only) {
        return take_private_memory(read);
    }
    if (read->whole_chunks) {
        uint64_t slots = 0;
        uint64_t all = plan_widen(reader, read->misses, read->miss_count, read->spans, &slots);
        read->span_count = plan_narrow(reader, read->misses, read->miss_count, read->spans, all,
                                       fill_admits(reader, slots));
    } else {
        read->span_count = plan_merge(reader, read->misses, read->miss_count, read->spans);
    }
    pthread_mutex_lock(&reader->lock);
    bool taken = take_slots(read);
    for (uint64_t i = 0; taken && i < read->span_count; i++) {
        struct plan_span *span = &read->spans[i];
        uint64_t chunk = span->address >> reader->chunk_shift;
        span->whole_chunks = span->whole_chunks && arena_find(reader, chunk) == SLOT_NONE;
        if (span->whole_chunks) {
            arena_begin_load(reader, span->slot, chunk, NULL);
        }
    }
    pthread_mutex_unlock(&reader->lock);
    return taken ? 0 : take_private_memory(read);
}

/* ---- fetch ----------------------------------------------------------------------------------- */

static void start_span(struct read *read, struct span *span, uint64_t number)
{
    const struct plan_span *planned = &read->spans[number];
    struct private_memory *private_memory = read->batch->private_memory;
    span->address = planned->address;
    span->length = planned->length;
    span->memory = (private_memory != NULL ? private_memory->base : read->reader->arena) +
                   planned->memory_offset;
    span->slot = planned->slot;
    span->private_memory = private_memory;
    span->tag = (uint32_t)number;
    span_start(read->fetch, span);
}

/* Returns true if reads of single samples would fail likewise: the member is gone, or silent. */
static bool is_gone(int code)
{
    return code == DLFS_E_TIMEOUT || code == DLFS_E_LOST || code == DLFS_E_AUTH ||
           code == DLFS_E_CLOSED;
}

/* Starts the read of the sample that span->single numbers, into its place in the span's memory. */
static void start_single(struct read *read, struct span *span)
{
    const struct plan_span *planned = &read->spans[span->tag];
    const struct miss *miss = &read->misses[planned->first_miss + span->single - 1];
    uint64_t mask = read->reader->config.block_bytes - 1;
    uint64_t address = miss->address & ~mask;
    span->memory = span->memory - span->address + address;
    span->address = address;
    span->length = ((miss->address + miss->length + mask) & ~mask) - address;
    span->was_corrupt = false;
    span->avoided_member = MEMBER_NONE;
    span_start(read->fetch, span);
}

/* Starts the read of the next single sample of a span that failed. Returns false if none is left.
 */
static bool start_next_single(struct read *read, struct span *span)
{
    const struct plan_span *planned = &read->spans[span->tag];
    bool single = !planned->whole_chunks && planned->miss_count == 1;
    bool begins = span->single == 0 && span->code < 0 && !single;
    bool goes_on = span->single > 0 && span->single < planned->miss_count;
    if ((!begins && !goes_on) || is_gone(span->code)) {
        return false;
    }
    span->single++;
    start_single(read, span);
    return true;
}

/*
 * Verifies the samples of a span that landed, or its single one, and enters their offsets. Returns
 * how many fail, or a negative code. If a member is gone, the remaining samples fail too.
 */
static int verify_samples(struct read *read, const struct span *span, bool last_try)
{
    const struct plan_span *planned = &read->spans[span->tag];
    const uint8_t *base = read->batch->private_memory != NULL ? read->batch->private_memory->base
                                                              : read->reader->arena;
    uint32_t first = span->single > 0 ? span->single - 1 : 0;
    uint32_t end = span->single > 0 && !is_gone(span->code) ? span->single : planned->miss_count;
    int bad = 0;
    int code = 0;
    for (uint32_t i = first; code == 0 && i < end; i++) {
        const struct miss *miss = &read->misses[planned->first_miss + i];
        uint64_t start = miss->address - span->address;
        uint32_t crc = span->code < 0 ? 0 : dlfs_crc32c(0, span->memory + start, miss->length);
        if (span->code == 0 && crc == miss->crc32c) {
            read->batch->offsets[miss->position] = span->memory + start - base;
            continue;
        }
        bad++;
        if (!last_try) {
            read->fetch->stats.checksum_errors++;
        } else if (span->code < 0) {
            code = fail(read, miss->position, span->code, 0, span->bad_address);
        } else {
            code = fail(read, miss->position, DLFS_E_CHECKSUM, crc, 0);
        }
    }
    return code < 0 ? code : bad;
}

/* Returns how many samples of a span are valid. */
static uint32_t count_valid(const struct read *read, const struct plan_span *planned)
{
    uint32_t given = 0;
    for (uint32_t i = 0; i < planned->miss_count; i++) {
        uint64_t position = read->misses[planned->first_miss + i].position;
        given += read->batch->lengths[position] > 0 && read->batch->offsets[position] != MISSING;
    }
    return given;
}

/*
 * Ends a span. It is started again if a checksum failed and attempts are left. Else each of its
 * valid samples gets a reference; a single valid sample takes over the span's own reference.
 */
static int finish_span(struct read *read, struct span *span, bool *again)
{
    dlfs_reader *reader = read->reader;
    const struct plan_span *planned = &read->spans[span->tag];
    int bad = span->code < 0 ? 1 : verify_samples(read, span, false);
    *again = span->code == 0 && bad > 0 && span_retry(read->fetch, span);
    *again = *again || (span->single == 0 && start_next_single(read, span));
    if (*again) {
        return 0;
    }
    bad = bad > 0 ? verify_samples(read, span, true) : bad;
    *again = bad >= 0 && span->single > 0 && start_next_single(read, span);
    if (*again) {
        return 0;
    }
    struct bad_samples *bad_samples = NULL;
    struct known_misses sound = {read->misses + planned->first_miss, planned->miss_count};
    bool valid = planned->whole_chunks && span->single == 0 && span->code == 0 &&
                 reader_verify_span(reader, span, bad == 0 ? &sound : NULL, &bad_samples) == 0;
    bad = bad < 0 ? bad : 0;
    uint32_t given = count_valid(read, planned);
    if (planned->slot == SLOT_NONE || (given == 1 && !planned->whole_chunks)) {
        return bad;
    }
    pthread_mutex_lock(&reader->lock);
    if (planned->whole_chunks) {
        cache_end_load(reader, planned->slot, valid, bad_samples);
    }
    for (uint32_t i = 0; i < given; i++) {
        arena_reference(reader, planned->slot);
    }
    arena_release(reader, planned->slot);
    pthread_mutex_unlock(&reader->lock);
    return bad;
}

/*
 * Waits until a span is done: polls first, then announces that the thread sleeps. The caller may
 * stop the read instead.
 */
static void wait_for_spans(struct read *read)
{
    struct fetch *fetch = read->fetch;
    while (busy_wait_goes_on(&read->terms->busy_wait)) {
        fetch_step(fetch, 0);
        if (fetch_peek_done(fetch) != NULL) {
            return;
        }
    }
    fetch_step(fetch, fetch_is_stopped(fetch) ? 0 : -1);
}

static int fetch_all(struct read *read)
{
    uint64_t started = 0;
    uint64_t finished = 0;
    int code = 0;
    while (finished < read->span_count) {
        struct span *span;
        while (started < read->span_count && (span = span_take(read->fetch)) != NULL) {
            start_span(read, span, started++);
        }
        wait_for_spans(read);
        while ((span = fetch_take_done(read->fetch)) != NULL) {
            bool again = false;
            int ended = finish_span(read, span, &again);
            code = code < 0 ? code : ended;
            if (again) {
                continue;
            }
            span_recycle(read->fetch, span);
            finished++;
        }
        fetch_add_time(read->fetch, &read->fetch->stats.verify_ns);
    }
    return code;
}

/* ---- the whole read -------------------------------------------------------------------------- */

/* Sets the one deadline of the read, which includes its retries and other copies. */
static void set_deadline(struct read *read)
{
    struct fetch *fetch = read->fetch;
    struct read_terms *terms = read->terms;
    uint64_t bytes = 0;
    for (uint64_t i = 0; terms->deadline_ns == 0 && i < read->miss_count; i++) {
        bytes += read->misses[i].length;
    }
    if (terms->deadline_ns == 0) {
        terms->deadline_ns = fetch->now_ns + reader_timeout_ns(read->reader, bytes);
    }
    fetch->deadline_ns = terms->deadline_ns;
    fetch->stop = terms->stop;
    fetch->redirect_rounds = terms->redirect_rounds;
    fetch->redirected_ns = fetch->now_ns;
}

static int read_samples(struct read *read)
{
    dlfs_reader *reader = read->reader;
    uint64_t count = read->batch->public.count;
    read->fetch->now_ns = monotonic_ns();
    int code = fetch_reserve_plan(read->fetch, count);
    if (code < 0) {
        read->batch->public.count = 0; /* no sample holds a reference */
        return code;
    }
    read->misses = read->fetch->misses;
    read->spans = read->fetch->plan;
    code = find(read);
    bool all_found = code < 0 || read->miss_count == 0;
    if (!all_found) {
        set_deadline(read);
        uint64_t spans = 2 * (uint64_t)reader->config.depth * reader->config.member_count;
        code = fetch_reserve_spans(read->fetch, (uint32_t)(spans < count ? spans : count));
        if (code == 0) {
            code = fetch_prepare(read->fetch, &read->terms->busy_wait);
        }
        if (code == 0) {
            code = plan(read);
        }
    }
    fetch_add_time(read->fetch, &read->fetch->stats.plan_ns);
    if (code == 0 && !all_found) {
        code = fetch_all(read);
    }
    return code;
}

/* Sets the lengths of samples that never landed to 0, since they hold no reference. */
static void forget_missing(struct batch *batch)
{
    for (uint64_t i = 0; i < batch->public.count; i++) {
        if (batch->offsets[i] == MISSING) {
            batch->lengths[i] = 0;
        }
    }
}

/* Returns true if spans were redirected and there is time to read other copies. */
static bool may_read_copies(const struct read *read)
{
    const struct fetch *fetch = read->fetch;
    if (fetch->redirected == 0 || fetch_is_stopped(fetch) || fetch->now_ns >= fetch->deadline_ns) {
        return false;
    }
    const struct batch *batch = read->batch;
    for (uint64_t i = 0; i < batch->public.failure_count; i++) {
        if (batch->failures[i].code == DLFS_E_TIMEOUT) {
            return true;
        }
    }
    return false;
}

/* Points the batch to its memory, and counts its samples. */
static void complete_batch(struct fetch *fetch, struct batch *batch)
{
    const dlfs_reader *reader = batch->reader;
    batch->public.base =
        batch->private_memory != NULL ? batch->private_memory->base : reader->arena;
    batch->public.base_bytes =
        batch->private_memory != NULL ? batch->private_memory->bytes : reader->arena_bytes;
    for (uint64_t i = 0; i < batch->public.count; i++) {
        fetch->stats.sample_bytes += batch->lengths[i] > 0 ? (uint64_t)batch->lengths[i] : 0;
    }
    fetch->stats.samples += batch->public.count - batch->public.failure_count;
    batch->public.lost_members = dlfs_reader_lost_members(reader);
}

/* Reads the batch once. Returns -EAGAIN if members were silent and other copies may be read. */
static int read_once(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                     struct read_terms *terms, dlfs_batch **out)
{
    struct fetch *fetch;
    int code = reader_take_fetch(reader, &fetch);
    if (code < 0) {
        return code;
    }
    struct batch *batch = batch_take(reader, count);
    if (batch == NULL) {
        reader_return_fetch(reader, fetch);
        return -ENOMEM;
    }
    struct read read = {.reader = reader, .fetch = fetch, .batch = batch, .terms = terms};
    if (count > 0) {
        memcpy(batch->indices, indices, count * sizeof(*indices));
    }
    code = read_samples(&read);
    if (code < 0) {
        forget_missing(batch);
    } else if (may_read_copies(&read)) {
        code = -EAGAIN;
    }
    terms->redirect_rounds = fetch->redirect_rounds;
    if (code == 0) {
        complete_batch(fetch, batch);
    } else {
        batch_recycle(batch);
    }
    reader_return_fetch(reader, fetch);
    if (code == 0) {
        *out = &batch->public;
    }
    return code;
}

int reader_read(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                const struct read_terms *terms, dlfs_batch **out)
{
    if (reader == NULL || (indices == NULL && count > 0) || count > UINT32_MAX) {
        return -EINVAL;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (indices[i] >= reader->sample_count) {
            return -EINVAL;
        }
    }
    /* Each attempt uses other memory: a silent member may still write to the old one. */
    struct read_terms current = *terms;
    int code;
    do {
        code = read_once(reader, indices, count, &current, out);
    } while (code == -EAGAIN);
    return code;
}

DLFS_API int dlfs_reader_read_awake(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                                    uint32_t awake_us, void (*sleeps)(void *argument),
                                    void *argument, dlfs_batch **out)
{
    struct read_terms terms = READ_TERMS_PLAIN;
    terms.busy_wait = (struct busy_wait){.on_sleep = sleeps, .argument = argument};
    if (awake_us > 0) {
        terms.busy_wait.until_ns = monotonic_ns() + (uint64_t)awake_us * 1000;
    }
    return reader_read(reader, indices, count, &terms, out);
}

DLFS_API int dlfs_reader_read(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                              dlfs_batch **out)
{
    return reader_read(reader, indices, count, &READ_TERMS_PLAIN, out);
}

DLFS_API int dlfs_reader_read_apart(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                                    dlfs_batch **out)
{
    struct read_terms terms = READ_TERMS_PLAIN;
    terms.private_only = true;
    return reader_read(reader, indices, count, &terms, out);
}
