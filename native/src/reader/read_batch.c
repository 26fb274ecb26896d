/*
 * Reads a batch on demand.
 *
 * The samples are looked up in the sample memory first (reader/read_place.c). Those that are
 * missing are sorted by address and merged into spans. Each sample is verified. Samples stay where
 * they landed: a batch points into the arena and holds references to its slots.
 *
 * A span that cannot be read as a whole is read sample by sample, so that a bad block fails only
 * the samples that have it. Each is read into private memory and copied to its place once it is
 * verified: it shares blocks with its neighbours, and what was verified is never written again.
 */
#include "reader/read_batch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "arena/private_memory.h"
#include "device/device.h"
#include "platform/clock.h"
#include "platform/crc32c.h"
#include "reader/fetch_queues.h"

/* ---- fetch ----------------------------------------------------------------------------------- */

static void start_span(struct read *read, struct span *span, uint64_t number)
{
    const struct plan_span *planned = &read->spans[number];
    struct private_memory *private_memory = read->batch->private_memory;
    span->address = planned->address;
    span->length = planned->length;
    span->memory = (private_memory != NULL ? private_memory->base : read->reader->arena->memory) +
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

/* Takes memory that has room for any one sample of a span, with the blocks that it begins and ends
 * in. Returns false if there is none. */
static bool take_single_memory(struct read *read, struct span *span)
{
    const struct plan_span *planned = &read->spans[span->tag];
    uint64_t longest = 0;
    for (uint32_t i = 0; i < planned->miss_count; i++) {
        uint64_t length = read->misses[planned->first_miss + i].length;
        longest = length > longest ? length : longest;
    }
    size_t bytes = (size_t)longest + 2 * (size_t)read->reader->config.block_bytes;
    return private_memory_take(read->reader, bytes, NULL, &span->private_memory) == 0;
}

/* Starts the read of the sample that span->single numbers. */
static void start_single(struct read *read, struct span *span)
{
    const struct plan_span *planned = &read->spans[span->tag];
    const struct miss *miss = &read->misses[planned->first_miss + span->single - 1];
    uint64_t mask = read->reader->config.block_bytes - 1;
    span->address = miss->address & ~mask;
    span->length = ((miss->address + miss->length + mask) & ~mask) - span->address;
    span->memory = span->private_memory->base;
    span->was_corrupt = false;
    span->avoided_member = MEMBER_NONE;
    span_start(read->fetch, span);
}

/* Starts the read of the next single sample of a span that failed. Returns false if none is left,
 * or if there is no memory for it.
 */
static bool start_next_single(struct read *read, struct span *span)
{
    const struct plan_span *planned = &read->spans[span->tag];
    bool single = !planned->whole_chunks && planned->miss_count == 1;
    bool begins = span->single == 0 && span->code < 0 && !single;
    bool goes_on = span->single > 0 && span->single < planned->miss_count;
    if ((!begins && !goes_on) || is_gone(span->code) ||
        (begins && !take_single_memory(read, span))) {
        return false;
    }
    span->single++;
    start_single(read, span);
    return true;
}

/* Enters where a verified sample lies. One that was read by itself is copied there. */
static void enter_sample(struct read *read, const struct span *span, const struct miss *miss)
{
    const struct plan_span *planned = &read->spans[span->tag];
    struct batch *batch = read->batch;
    uint8_t *base =
        batch->private_memory != NULL ? batch->private_memory->base : read->reader->arena->memory;
    uint64_t offset = planned->memory_offset + (miss->address - planned->address);
    if (span->single > 0) {
        memcpy(base + offset, span->memory + (miss->address - span->address), miss->length);
    }
    batch->offsets[miss->position] = (int64_t)offset;
}

/*
 * Verifies the samples of a span that landed, or its single one, and enters their offsets. Returns
 * how many fail, or a negative code. If a member is gone, the remaining samples fail too.
 */
static int verify_samples(struct read *read, const struct span *span, bool last_try)
{
    const struct plan_span *planned = &read->spans[span->tag];
    uint32_t first = span->single > 0 ? span->single - 1 : 0;
    uint32_t end = span->single > 0 && !is_gone(span->code) ? span->single : planned->miss_count;
    const struct span *next = fetch_peek_done(read->fetch);
    const uint8_t *next_bytes = next != NULL ? next->memory : NULL;
    int bad = 0;
    int code = 0;
    for (uint32_t i = first; code == 0 && i < end; i++) {
        const struct miss *miss = &read->misses[planned->first_miss + i];
        const uint8_t *bytes = span->memory + (miss->address - span->address);
        uint32_t crc = span->code < 0 ? 0 : crc32c_sample(NULL, bytes, miss->length, next_bytes);
        if (span->code == 0 && crc == miss->crc32c) {
            enter_sample(read, span, miss);
            continue;
        }
        bad++;
        if (!last_try) {
            read->fetch->stats.checksum_errors++;
        } else if (span->code < 0) {
            code = read_fail(read, miss->position, span->code, 0, span->bad_address);
        } else {
            struct location location = {miss->address, miss->length, 0, miss->crc32c};
            uint64_t bad_address = reader_bad_part(read->reader, &location, bytes, &crc);
            code = read_fail(read, miss->position, DLFS_E_CHECKSUM, crc, bad_address);
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
    if (span->single > 0) {
        private_memory_release(span->private_memory); /* an abandoned span has its own reference */
    }
    struct bad_samples *bad_samples = NULL;
    struct known_misses sound = {read->misses + planned->first_miss, planned->miss_count};
    bool valid = planned->whole_chunks && span->single == 0 && span->code == 0 &&
                 reader_verify_span(reader, span, bad == 0 ? &sound : NULL, &bad_samples) == 0;
    bool all_valid = bad == 0 && span->single == 0;
    uint32_t given = all_valid ? planned->miss_count : count_valid(read, planned);
    bad = bad < 0 ? bad : 0;
    if (planned->slot == SLOT_NONE || (given == 1 && !planned->whole_chunks)) {
        return bad;
    }
    pthread_mutex_lock(&reader->arena->lock);
    if (planned->whole_chunks) {
        cache_end_load(reader, planned->slot, valid, bad_samples);
    }
    for (uint32_t i = 0; i < given; i++) {
        arena_reference(reader, planned->slot);
    }
    arena_release(reader, planned->slot);
    pthread_mutex_unlock(&reader->arena->lock);
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
    reader_wait(fetch);
}

/* Starts as many spans as may be under way at once. */
static void start_spans(struct read *read)
{
    struct span *span;
    while (read->started < read->span_count && (span = span_take(read->fetch)) != NULL) {
        start_span(read, span, read->started++);
    }
}

static int fetch_all(struct read *read)
{
    int code = 0;
    while (read->finished < read->span_count) {
        struct span *span;
        start_spans(read);
        wait_for_spans(read);
        while ((span = fetch_take_done(read->fetch)) != NULL) {
            bool again = false;
            int ended = finish_span(read, span, &again);
            code = code < 0 ? code : ended;
            if (again) {
                continue;
            }
            span_recycle(read->fetch, span);
            read->finished++;
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
    fetch->slow_bytes = 0;
    for (uint64_t i = 0; i < read->miss_count; i++) {
        fetch->slow_bytes += read->misses[i].length;
    }
    if (terms->deadline_ns == 0) {
        terms->deadline_ns = fetch->now_ns + reader_timeout_ns(read->reader);
    }
    fetch->deadline_ns = terms->deadline_ns;
    fetch->stop = terms->stop;
    fetch->redirect_rounds = terms->redirect_rounds;
    fetch->redirected_ns = fetch->now_ns;
}

/* Finds the samples, and plans how to read the missing ones. */
static int prepare(struct read *read)
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
    code = read_find(read);
    bool all_found = code < 0 || read->miss_count == 0;
    if (!all_found) {
        set_deadline(read);
        uint64_t spans = 2 * (uint64_t)reader->config.depth * reader->config.member_count;
        code = fetch_prepare(read->fetch, (uint32_t)(spans < count ? spans : count),
                             &read->terms->busy_wait);
        if (code == 0) {
            code = read_place(read);
        }
    }
    fetch_add_time(read->fetch, &read->fetch->stats.plan_ns);
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
        batch->private_memory != NULL ? batch->private_memory->base : reader->arena->memory;
    batch->public.base_bytes =
        batch->private_memory != NULL ? batch->private_memory->bytes : reader->arena->bytes;
    for (uint64_t i = 0; i < batch->public.count; i++) {
        fetch->stats.sample_bytes += batch->lengths[i] > 0 ? (uint64_t)batch->lengths[i] : 0;
    }
    fetch->stats.samples += batch->public.count - batch->public.failure_count;
    batch->public.lost_members = dlfs_reader_lost_members(reader);
}

/*
 * Ends a read with its code: *out gets the batch. Returns -EAGAIN if members were silent and other
 * copies may be read.
 */
static int complete(struct read *read, int code, dlfs_batch **out)
{
    dlfs_reader *reader = read->reader;
    struct fetch *fetch = read->fetch;
    struct batch *batch = read->batch;
    if (code < 0) {
        forget_missing(batch);
    } else if (may_read_copies(read)) {
        code = -EAGAIN;
    }
    read->terms->redirect_rounds = fetch->redirect_rounds;
    if (read->terms->deadline_ns > 0) {
        read->terms->deadline_ns = fetch->deadline_ns; /* for further attempts */
    }
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

/* Begins a read: sends no request yet. After an error there is nothing to complete. */
static int begin(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                 struct read_terms *terms, struct read *read)
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
    *read = (struct read){.reader = reader, .fetch = fetch, .batch = batch, .terms = terms};
    if (count > 0) {
        memcpy(batch->indices, indices, count * sizeof(*indices));
    }
    code = prepare(read);
    if (code < 0) {
        (void)complete(read, code, NULL);
    }
    return code;
}

/* Reads the batch once. Returns -EAGAIN if members were silent and other copies may be read. */
static int read_once(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                     struct read_terms *terms, dlfs_batch **out)
{
    struct read read;
    int code = begin(reader, indices, count, terms, &read);
    return code < 0 ? code : complete(&read, fetch_all(&read), out);
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

DLFS_API int dlfs_reader_read_polling(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                                      uint32_t poll_us, void (*sleeps)(void *argument),
                                      void *argument, dlfs_batch **out)
{
    struct read_terms terms = READ_TERMS_PLAIN;
    terms.busy_wait = (struct busy_wait){.on_sleep = sleeps, .argument = argument};
    if (poll_us > 0) {
        terms.busy_wait.until_ns = monotonic_ns() + (uint64_t)poll_us * 1000;
    }
    return reader_read(reader, indices, count, &terms, out);
}

DLFS_API int dlfs_reader_read(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                              dlfs_batch **out)
{
    return reader_read(reader, indices, count, &READ_TERMS_PLAIN, out);
}

/* ---- a read that is begun by one call and finished by another -------------------------------- */

/* Nothing is begun on members that may have fewer queue pairs: a read holds one until it ends. */
#define PENDING_QUEUES_MIN 16u

struct dlfs_pending_read {
    struct read read;
    struct read_terms terms;
    _Atomic bool stopped; /* terms.stop points to it */
    uint64_t index;
};

/* Returns true if no member has to be connected, and other threads find queue pairs meanwhile. */
static bool may_begin(const dlfs_reader *reader)
{
    bool may = dlfs_reader_lost_members(reader) == 0; /* a lost one may be connected to probe it */
    for (uint32_t member = 0; may && member < reader->config.member_count; member++) {
        dlfs_device *device = reader->devices[member];
        may = device != NULL && dlfs_queues_max(device) >= PENDING_QUEUES_MIN &&
              !dlfs_queues_wanted(device);
    }
    return may;
}

DLFS_API int dlfs_reader_begin(dlfs_reader *reader, uint64_t index, dlfs_pending_read **out)
{
    if (reader == NULL || index >= reader->sample_count) {
        return -EINVAL;
    }
    if (!may_begin(reader)) {
        return -EAGAIN;
    }
    dlfs_pending_read *pending = malloc(sizeof(*pending));
    if (pending == NULL) {
        return -ENOMEM;
    }
    *pending = (dlfs_pending_read){.terms = READ_TERMS_PLAIN, .index = index};
    /* To connect a device may take long: then nothing is begun. */
    pending->terms.stop = &pending->stopped;
    pending->terms.busy_wait =
        (struct busy_wait){.on_sleep = busy_wait_stop, .argument = &pending->stopped};
    int code = begin(reader, &index, 1, &pending->terms, &pending->read);
    if (code < 0) {
        code = atomic_load(&pending->stopped) ? -EAGAIN : code;
        free(pending);
        return code;
    }
    start_spans(&pending->read);
    fetch_step(pending->read.fetch, 0);
    if (fetch_queue_waiter(pending->read.fetch) != NULL) {
        dlfs_pending_read_cancel(pending);
        return -EAGAIN;
    }
    *out = pending;
    return 0;
}

DLFS_API int dlfs_pending_read_finish(dlfs_pending_read *pending, uint32_t poll_us,
                                      void (*sleeps)(void *argument), void *argument,
                                      dlfs_batch **out)
{
    struct read *read = &pending->read;
    dlfs_reader *reader = read->reader;
    fetch_resume(read->fetch);
    if (pending->terms.deadline_ns > 0) {
        pending->terms.deadline_ns = read->fetch->deadline_ns; /* for further attempts */
    }
    pending->terms.busy_wait = (struct busy_wait){.on_sleep = sleeps, .argument = argument};
    if (poll_us > 0) {
        pending->terms.busy_wait.until_ns = read->fetch->now_ns + (uint64_t)poll_us * 1000;
    }
    int code = complete(read, fetch_all(read), out);
    while (code == -EAGAIN) {
        code = read_once(reader, &pending->index, 1, &pending->terms, out);
    }
    free(pending);
    return code;
}

DLFS_API void dlfs_pending_read_cancel(dlfs_pending_read *pending)
{
    dlfs_batch *batch;
    if (pending == NULL) {
        return;
    }
    atomic_store(&pending->stopped, true);
    if (dlfs_pending_read_finish(pending, 0, NULL, NULL, &batch) == 0) {
        dlfs_batch_release(batch);
    }
}
