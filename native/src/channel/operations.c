/*
 * The operations that a channel's thread performs for its client.
 *
 * The client can write the request area at any time. So every function here copies its input once
 * and then checks the copy. The service never reads back what it wrote to the channel's memory.
 *
 * Threads: the channel's thread, except operation_count_resident_reads: any at once.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "channel/channel.h"

#define REQUEST_RETAINED_BYTES (UINT64_C(1) << 20) /* pages of the request area that stay */
#define NEXT_WAIT_MS 100 /* longest wait for the stream; then the client repeats its request */
#define AHEAD_SHARE 2u   /* divisor of what a client may pin: bytes read ahead for it */
#define REPORTED_MAX (UINT64_C(1) << 52) /* largest plausible count of a client */

/* Copies memory that the client can write. The barrier keeps the compiler from reading it again. */
static void copy_once(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
    __asm__ volatile("" ::: "memory");
}

/*
 * Returns by how much a count of the client has grown. An implausible count is ignored, since the
 * sums that it is added to would overflow.
 */
static uint64_t take_increase(const _Atomic uint64_t *reported, _Atomic uint64_t *counted)
{
    uint64_t now = atomic_load_explicit(reported, memory_order_relaxed);
    uint64_t before = atomic_load_explicit(counted, memory_order_relaxed);
    do {
        if (now <= before || now > REPORTED_MAX) {
            return 0;
        }
    } while (!atomic_compare_exchange_weak_explicit(counted, &before, now, memory_order_relaxed,
                                                    memory_order_relaxed));
    return now - before;
}

void operation_count_resident_reads(dlfs_channel *channel)
{
    const struct resident_counts *reported = &channel->memory.header->resident;
    dlfs_channel_stats *counters = &channel->counters;
    uint64_t samples = take_increase(&reported->samples, &channel->resident_samples);
    uint64_t bytes = take_increase(&reported->sample_bytes, &channel->resident_bytes);
    uint64_t batches = take_increase(&reported->batches, &channel->resident_batches);
    reader_count_hits(channel->reader, samples, bytes);
    counter_add(&counters->samples, samples);
    counter_add(&counters->sample_bytes, bytes);
    counter_add(&counters->batches, batches);
}

/* ---- operations: each returns a code, PROTOCOL_BROKEN, or its result ------------------------- */

/* Copies indices from the request area and frees its pages if they are many. */
static void take_indices(dlfs_channel *channel, uint64_t *to, uint64_t count)
{
    uint64_t bytes = count * sizeof(uint64_t);
    if (count == 0) {
        return;
    }
    copy_once(to, channel->memory.request, bytes);
    if (bytes > REQUEST_RETAINED_BYTES) {
        (void)madvise(channel->memory.request, bytes, MADV_REMOVE);
    }
}

/* Returns the bound on memory for batches outside the arena. */
static struct read_limit limit_of(const dlfs_channel *channel)
{
    return (struct read_limit){channel->memory.copied_bytes, channel->memory_share};
}

/*
 * Adjusts the charge for a read to the arrays of the batch. Returns false if they exceed the
 * client's bound.
 */
static bool charge_batch(dlfs_channel *channel, const struct batch *batch, uint64_t *charged)
{
    uint64_t bytes = batch_bytes(batch);
    if (bytes > *charged && !charge(channel, bytes - *charged)) {
        return false;
    }
    if (bytes < *charged) {
        discharge(channel, *charged - bytes);
    }
    *charged = bytes;
    return true;
}

static int64_t serve_read(dlfs_channel *channel, const struct submission *request,
                          struct completion *answer)
{
    uint64_t count = request->value;
    uint64_t charged = count * (BATCH_BYTES_PER_SAMPLE + PLAN_BYTES_PER_SAMPLE);
    if (count > channel->memory.samples_max) {
        return PROTOCOL_BROKEN;
    }
    if (!delivery_possible(channel) || !area_reserve(channel, count, 0) ||
        !charge(channel, charged)) {
        return DLFS_E_LIMIT;
    }
    take_indices(channel, channel->indices, count);
    struct read_terms terms = {.limit = limit_of(channel), .stop = &channel->stop};
    dlfs_batch *batch = NULL;
    int code = reader_read(channel->reader, channel->indices, count, &terms, &batch);
    if (code == 0 && !charge_batch(channel, (struct batch *)batch, &charged)) {
        code = DLFS_E_LIMIT;
    }
    if (code == 0) {
        code = deliver_batch(channel, (struct batch *)batch, charged, false, answer);
    }
    if (code == 0) {
        return 0;
    }
    dlfs_batch_release(batch);
    discharge(channel, charged);
    return code;
}

static int64_t serve_get(dlfs_channel *channel, const struct submission *request)
{
    uint64_t room = channel->memory.result_bytes;
    room = room < GET_BYTES_MAX ? room : GET_BYTES_MAX;
    uint64_t bytes = request->limit < room ? request->limit : room;
    if (!area_reserve(channel, 0, bytes)) {
        return DLFS_E_LIMIT;
    }
    dlfs_failure failure;
    int64_t length = reader_get(channel->reader, request->value, channel->memory.result, bytes,
                                request->flags, &channel->stop, &failure);
    if (length >= 0) {
        counter_add(&channel->counters.samples, 1);
        counter_add(&channel->counters.sample_bytes, (uint64_t)length);
    }
    return length;
}

static int64_t serve_part(dlfs_channel *channel, struct completion *answer)
{
    dlfs_part part;
    dlfs_failure failure;
    copy_once(&part, channel->memory.request, sizeof(part));
    uint64_t bytes = part.length_bytes;
    if (bytes > channel->memory.result_bytes || bytes > PART_BYTES_MAX) {
        return PROTOCOL_BROKEN;
    }
    if (!area_reserve(channel, 0, bytes) || !charge(channel, bytes)) {
        return DLFS_E_LIMIT;
    }
    uint8_t *result = channel->memory.result;
    int code =
        reader_read_part(channel->reader, &part, part_copy, &result, &channel->stop, &failure);
    discharge(channel, bytes);
    answer->failure_count = failure.code < 0;
    if (failure.code < 0) {
        memcpy(channel->memory.result, &failure, sizeof(failure));
    }
    if (code == 0) {
        counter_add(&channel->counters.sample_bytes, part.length_bytes);
    }
    return code;
}

void operation_close_stream(dlfs_channel *channel)
{
    if (channel->pending != NULL) {
        dlfs_batch_release(&channel->pending->public);
        discharge(channel, channel->pending_bytes);
    }
    dlfs_stream_destroy(channel->stream);
    dlfs_sequence_destroy(channel->sequence);
    free(channel->chosen);
    discharge(channel, channel->stream_bytes + channel->chosen_count * sizeof(uint64_t));
    channel->stream_bytes = 0;
    channel->pending = NULL;
    channel->stream = NULL;
    channel->sequence = NULL;
    channel->chosen = NULL;
    channel->chosen_count = 0;
}

/* Adds indices to the chosen order, up to the dataset's samples or DLFS_CHANNEL_SAMPLES_MAX. */
static int64_t serve_choose(dlfs_channel *channel, uint64_t count)
{
    uint64_t most = channel->geometry.sample_count;
    if (most < DLFS_CHANNEL_SAMPLES_MAX) {
        most = DLFS_CHANNEL_SAMPLES_MAX; /* small datasets are sampled with replacement */
    }
    if (channel->stream != NULL) {
        return -EBUSY;
    }
    if (count > channel->memory.samples_max) {
        return PROTOCOL_BROKEN;
    }
    if (count > most - channel->chosen_count) {
        return DLFS_E_LIMIT;
    }
    if (channel->chosen == NULL) {
        channel->chosen = malloc(most * sizeof(uint64_t)); /* untouched pages take no memory */
    }
    if (channel->chosen == NULL) {
        return -ENOMEM;
    }
    if (!charge(channel, count * sizeof(uint64_t))) {
        return DLFS_E_LIMIT;
    }
    take_indices(channel, channel->chosen + channel->chosen_count, count);
    channel->chosen_count += count;
    return 0;
}

static int make_sequence(dlfs_channel *channel, const struct sequence_parameters *wanted)
{
    const struct reader_geometry *geometry = &channel->geometry;
    if (wanted->kind == DLFS_ORDER_LIST && wanted->count == channel->chosen_count) {
        dlfs_choice choice = {
            .kind = DLFS_ORDER_LIST, .indices = channel->chosen, .count = channel->chosen_count};
        return dlfs_sequence_choose(geometry->directory, &choice, &channel->sequence);
    }
    if (wanted->count != geometry->sample_count || wanted->chunk_bytes != geometry->chunk_bytes) {
        return -EINVAL;
    }
    return dlfs_sequence_create(geometry->directory, wanted->chunk_bytes, wanted->kind,
                                wanted->seed, wanted->epoch, wanted->window_chunks,
                                &channel->sequence);
}

/* Charges the memory of a stream and its sequence outside the arena. */
static bool charge_stream(dlfs_channel *channel)
{
    uint64_t bytes =
        stream_memory_bytes(channel->stream) + sequence_memory_bytes(channel->sequence);
    if (!charge(channel, bytes)) {
        return false;
    }
    channel->stream_bytes = bytes;
    return true;
}

static int64_t serve_open(dlfs_channel *channel)
{
    struct stream_request request;
    copy_once(&request, channel->memory.request, sizeof(request));
    if (channel->stream != NULL) {
        return -EBUSY;
    }
    int code = make_sequence(channel, &request.sequence);
    if (code < 0) {
        return code;
    }
    request.config.sequence = channel->sequence;
    struct stream_bounds bounds = {limit_of(channel), share_bytes_max(channel->share) / AHEAD_SHARE,
                                   &channel->stop};
    code = stream_create(channel->reader, &request.config, &bounds, &channel->stream);
    if (code == 0 && !charge_stream(channel)) {
        code = DLFS_E_LIMIT;
    }
    if (code < 0) {
        operation_close_stream(channel);
        return code;
    }
    return dlfs_stream_plan(channel->stream);
}

/* Takes the next batch from the stream as the pending batch. */
static int take_next(dlfs_channel *channel, uint64_t count, int wait_ms)
{
    dlfs_batch *batch;
    uint64_t charged = count * (BATCH_BYTES_PER_SAMPLE + PLAN_BYTES_PER_SAMPLE + sizeof(uint64_t));
    if (!charge(channel, charged)) {
        return DLFS_E_LIMIT;
    }
    int code = dlfs_stream_next(channel->stream, count, wait_ms, &batch);
    if (code < 0) {
        discharge(channel, charged);
        return code;
    }
    /* The stream does not return the batch again, so it stays whatever memory its failures take. */
    (void)charge_batch(channel, (struct batch *)batch, &charged);
    channel->pending = (struct batch *)batch;
    channel->pending_count = count;
    channel->pending_bytes = charged;
    return 0;
}

/* Delivers the pending batch of an earlier request, or else the next batch of the stream. */
static int64_t serve_next(dlfs_channel *channel, const struct submission *request,
                          struct completion *answer)
{
    uint64_t count = request->value;
    if (channel->stream == NULL) {
        return -EINVAL;
    }
    if (count > channel->memory.samples_max || !delivery_possible(channel)) {
        return DLFS_E_LIMIT;
    }
    if (channel->pending != NULL && channel->pending_count != count) {
        return -EINVAL;
    }
    int wait_ms = request->limit < NEXT_WAIT_MS ? (int)request->limit : NEXT_WAIT_MS;
    if (!area_reserve(channel, count, 0)) {
        return DLFS_E_LIMIT;
    }
    int code = channel->pending != NULL ? 0 : take_next(channel, count, wait_ms);
    if (code < 0) {
        return code;
    }
    code = deliver_batch(channel, channel->pending, channel->pending_bytes, true, answer);
    if (code == 0) {
        channel->pending = NULL;
    }
    return code;
}

static int64_t serve_stats(dlfs_channel *channel)
{
    dlfs_reader_stats stats;
    operation_count_resident_reads(channel);
    dlfs_reader_get_stats(channel->reader, &stats);
    memcpy(channel->memory.result, &stats, sizeof(stats));
    return 0;
}

static int64_t serve_member_stats(dlfs_channel *channel, uint64_t member)
{
    dlfs_member_stats stats;
    if (member >= DLFS_MEMBERS_MAX) {
        return -EINVAL;
    }
    int code = dlfs_reader_get_member_stats(channel->reader, (uint32_t)member, &stats);
    if (code == 0) {
        memcpy(channel->memory.result, &stats, sizeof(stats));
    }
    return code;
}

int64_t operation_perform(dlfs_channel *channel, const struct submission *request,
                          struct completion *answer)
{
    switch (request->operation) {
    case OPERATION_READ:
        return serve_read(channel, request, answer);
    case OPERATION_GET:
        return serve_get(channel, request);
    case OPERATION_CHOOSE:
        return serve_choose(channel, request->value);
    case OPERATION_OPEN:
        return serve_open(channel);
    case OPERATION_NEXT:
        return serve_next(channel, request, answer);
    case OPERATION_CLOSE:
        operation_close_stream(channel);
        return 0;
    case OPERATION_STATS:
        return serve_stats(channel);
    case OPERATION_MEMBER:
        return request->value < DLFS_MEMBERS_MAX
                   ? dlfs_reader_member_code(channel->reader, (uint32_t)request->value)
                   : -EINVAL;
    case OPERATION_MEMBER_STATS:
        return serve_member_stats(channel, request->value);
    case OPERATION_PART:
        return serve_part(channel, answer);
    default:
        return PROTOCOL_BROKEN;
    }
}
