/*
 * The service's end of a channel: one thread that takes requests from the ring and answers them.
 *
 * What the client writes is copied once and then checked: entries by ring_take, indices and the
 * parameters of a stream here. Nothing is ever read back from the channel's memory that the service
 * wrote there. A request that no client of this library makes ends the channel.
 *
 * A release wakes nobody, so that it costs no system call: while the client has batches, the
 * sleeping thread looks for releases RELEASE_LOOK_MS after it fell asleep, and again.
 *
 * At its end, whichever it is, the thread itself gives back all that the client had: the stream,
 * the batches, what was pinned. Then it hangs up.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "channel/channel.h"
#include "platform/clock.h"
#include "platform/thread.h"
#include "sequence/sequence.h"

#define RELEASE_LOOK_MS 10
#define IDLE_NS UINT64_C(1000000000) /* after which the pages of large answers are given back */
#define REQUEST_KEPT_BYTES (UINT64_C(1) << 20) /* of the request area */
#define NEXT_WAIT_MS 100                       /* in the stream, at most; the client asks again */

#define SAID_MAX (UINT64_C(1) << 52) /* of a client's own counts */

#define BROKEN INT64_MIN /* the client does not keep to the protocol */

/* Copies what the client wrote, once: the copy is what is checked and used from here on. */
static void copy_once(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
    __asm__ volatile("" ::: "memory");
}

static void count_refusal(dlfs_channel *channel)
{
    atomic_fetch_add_explicit(&channel->counters.refusals, 1, memory_order_relaxed);
}

/* What is more than any client can read is no count: the sums that it goes into would wrap. */
static uint64_t grown(const _Atomic uint64_t *said, uint64_t *counted)
{
    uint64_t now = atomic_load_explicit(said, memory_order_relaxed);
    uint64_t more = now > *counted && now <= SAID_MAX ? now - *counted : 0;
    *counted += more;
    return more;
}

/* Adds what the client read without asking, which it says itself, to what was counted here. */
static void count_kept(dlfs_channel *channel)
{
    const struct kept_counts *said = &channel->memory.header->kept;
    struct channel_counters *counters = &channel->counters;
    dlfs_reader *reader = channel->reader;
    pthread_mutex_lock(&reader->lock);
    uint64_t samples = grown(&said->samples, &channel->kept_samples);
    uint64_t bytes = grown(&said->sample_bytes, &channel->kept_bytes);
    uint64_t batches = grown(&said->batches, &channel->kept_batches);
    reader->stats.samples += samples;
    reader->stats.cache_hits += samples;
    reader->stats.sample_bytes += bytes;
    pthread_mutex_unlock(&reader->lock);
    atomic_fetch_add_explicit(&counters->samples, samples, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->sample_bytes, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->batches, batches, memory_order_relaxed);
}

/* ---- operations: each returns a code, BROKEN, or what it gives ------------------------------- */

/* Takes indices from the request area, which the client leaves alone until it has an answer. */
static void take_indices(dlfs_channel *channel, uint64_t *to, uint64_t count)
{
    uint64_t bytes = count * sizeof(uint64_t);
    if (count == 0) {
        return;
    }
    copy_once(to, channel->memory.request, bytes);
    if (bytes > REQUEST_KEPT_BYTES) {
        (void)madvise(channel->memory.request, bytes, MADV_REMOVE);
    }
}

/* What batches of a channel may have beside the arena. */
static struct read_limit limit_of(const dlfs_channel *channel)
{
    return (struct read_limit){channel->memory.copied_bytes, channel->memory_share};
}

/*
 * Charges for a batch that was read: its arrays alone from now on, whatever was charged to read it.
 * False: they are more than the client may have.
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

static int64_t serve_read(dlfs_channel *channel, const struct submission *asked,
                          struct completion *answer)
{
    uint64_t count = asked->value;
    uint64_t charged = count * (BATCH_BYTES_PER_SAMPLE + PLAN_BYTES_PER_SAMPLE);
    if (count > channel->memory.samples_max) {
        return BROKEN;
    }
    if (!lend_possible(channel) || !area_reserve(channel, count, 0) || !charge(channel, charged)) {
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
        code = lend_batch(channel, (struct batch *)batch, charged, false, answer);
    }
    if (code == 0) {
        return 0;
    }
    dlfs_batch_release(batch);
    discharge(channel, charged);
    return code;
}

static int64_t serve_get(dlfs_channel *channel, const struct submission *asked)
{
    uint64_t room = channel->memory.result_bytes;
    room = room < GET_BYTES_MAX ? room : GET_BYTES_MAX;
    uint64_t bytes = asked->limit < room ? asked->limit : room;
    if (!area_reserve(channel, 0, bytes)) {
        return DLFS_E_LIMIT;
    }
    dlfs_failure failure;
    int64_t length = reader_get(channel->reader, asked->value, channel->memory.result, bytes,
                                asked->flags, &channel->stop, &failure);
    if (length >= 0) {
        struct channel_counters *counters = &channel->counters;
        atomic_fetch_add_explicit(&counters->samples, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&counters->sample_bytes, (uint64_t)length, memory_order_relaxed);
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
        return BROKEN;
    }
    if (!area_reserve(channel, 0, bytes) || !charge(channel, bytes)) {
        return DLFS_E_LIMIT;
    }
    int code = dlfs_reader_read_part(channel->reader, &part, channel->memory.result, &failure);
    discharge(channel, bytes);
    answer->number = failure.member;
    answer->base_offset = failure.offset_bytes;
    answer->base_bytes = failure.crc_expected;
    answer->failure_count = failure.code < 0;
    if (code == 0) {
        atomic_fetch_add_explicit(&channel->counters.sample_bytes, part.length_bytes,
                                  memory_order_relaxed);
    }
    return code;
}

static void close_stream(dlfs_channel *channel)
{
    if (channel->withheld != NULL) {
        dlfs_batch_release(&channel->withheld->public);
        discharge(channel, channel->withheld_bytes);
    }
    dlfs_stream_destroy(channel->stream);
    dlfs_sequence_destroy(channel->sequence);
    free(channel->chosen);
    discharge(channel, channel->stream_bytes + channel->chosen_count * sizeof(uint64_t));
    channel->stream_bytes = 0;
    channel->withheld = NULL;
    channel->stream = NULL;
    channel->sequence = NULL;
    channel->chosen = NULL;
    channel->chosen_count = 0;
}

/* Takes more indices of a chosen order: as many as the dataset has samples, or a batch may have. */
static int64_t serve_choose(dlfs_channel *channel, uint64_t count)
{
    uint64_t most = channel->reader->sample_count;
    if (most < DLFS_CHANNEL_SAMPLES_MAX) {
        most = DLFS_CHANNEL_SAMPLES_MAX; /* draws from a few samples */
    }
    if (channel->stream != NULL) {
        return -EBUSY;
    }
    if (count > channel->memory.samples_max) {
        return BROKEN;
    }
    if (count > most - channel->chosen_count) {
        return DLFS_E_LIMIT;
    }
    if (channel->chosen == NULL) {
        channel->chosen = malloc(most * sizeof(uint64_t)); /* pages come as they are used */
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

static int make_sequence(dlfs_channel *channel, const struct sequence_parameters *asked)
{
    const dlfs_reader_config *config = &channel->reader->config;
    if (asked->kind == DLFS_ORDER_LIST && asked->count == channel->chosen_count) {
        dlfs_choice choice = {
            .kind = DLFS_ORDER_LIST, .indices = channel->chosen, .count = channel->chosen_count};
        return dlfs_sequence_choose(config->directory, &choice, &channel->sequence);
    }
    if (asked->count != channel->reader->sample_count ||
        asked->chunk_bytes != config->chunk_bytes) {
        return -EINVAL;
    }
    return dlfs_sequence_create(config->directory, asked->chunk_bytes, asked->kind, asked->seed,
                                asked->epoch, asked->window_chunks, &channel->sequence);
}

/* Charges for what a stream and its sequence have beside the arena. */
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
    dlfs_stream_config config = {
        .sequence = channel->sequence,
        .first = request.first,
        .stride = request.stride,
        .count = request.count,
        .group = request.group,
        .group_stride = request.group_stride,
        .plan = request.plan,
    };
    code = dlfs_stream_create(channel->reader, &config, &channel->stream);
    if (code == 0 && !charge_stream(channel)) {
        code = DLFS_E_LIMIT;
    }
    if (code < 0) {
        close_stream(channel);
        return code;
    }
    struct read_limit limit = limit_of(channel);
    stream_limit(channel->stream, &limit);
    return dlfs_stream_plan(channel->stream);
}

/* Takes the next batch from the stream, to be lent. */
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
    /* It has left the stream, so that it is kept whatever its failures take. */
    (void)charge_batch(channel, (struct batch *)batch, &charged);
    channel->withheld = (struct batch *)batch;
    channel->withheld_count = count;
    channel->withheld_bytes = charged;
    return 0;
}

/* What was withheld for want of room comes before what follows it in the stream. */
static int64_t serve_next(dlfs_channel *channel, const struct submission *asked,
                          struct completion *answer)
{
    uint64_t count = asked->value;
    if (channel->stream == NULL) {
        return -EINVAL;
    }
    if (count > channel->memory.samples_max || !lend_possible(channel)) {
        return DLFS_E_LIMIT;
    }
    if (channel->withheld != NULL && channel->withheld_count != count) {
        return -EINVAL;
    }
    int wait_ms = asked->limit < NEXT_WAIT_MS ? (int)asked->limit : NEXT_WAIT_MS;
    if (!area_reserve(channel, count, 0)) {
        return DLFS_E_LIMIT;
    }
    int code = channel->withheld != NULL ? 0 : take_next(channel, count, wait_ms);
    if (code < 0) {
        return code;
    }
    code = lend_batch(channel, channel->withheld, channel->withheld_bytes, true, answer);
    if (code == 0) {
        channel->withheld = NULL;
    }
    return code;
}

static int64_t serve_stats(dlfs_channel *channel)
{
    dlfs_reader_stats stats;
    count_kept(channel);
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

static int64_t perform(dlfs_channel *channel, const struct submission *asked,
                       struct completion *answer)
{
    switch (asked->operation) {
    case OPERATION_READ:
        return serve_read(channel, asked, answer);
    case OPERATION_GET:
        return serve_get(channel, asked);
    case OPERATION_CHOOSE:
        return serve_choose(channel, asked->value);
    case OPERATION_OPEN:
        return serve_open(channel);
    case OPERATION_NEXT:
        return serve_next(channel, asked, answer);
    case OPERATION_CLOSE:
        close_stream(channel);
        return 0;
    case OPERATION_STATS:
        return serve_stats(channel);
    case OPERATION_MEMBER:
        return asked->value < DLFS_MEMBERS_MAX
                   ? dlfs_reader_member_code(channel->reader, (uint32_t)asked->value)
                   : -EINVAL;
    case OPERATION_MEMBER_STATS:
        return serve_member_stats(channel, asked->value);
    case OPERATION_PART:
        return serve_part(channel, answer);
    default:
        return BROKEN;
    }
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* Answers one request; false when the client broke the protocol. */
static bool serve(dlfs_channel *channel, const struct submission *asked)
{
    if (asked->operation == OPERATION_RELEASE) {
        return lend_take_back(channel, asked->value);
    }
    struct channel_counters *counters = &channel->counters;
    struct completion answer = {.tag = asked->tag, .place = BATCH_NONE};
    uint64_t start = monotonic_ns();
    channel->asked_ns = start;
    atomic_store_explicit(&counters->under_way, 1, memory_order_relaxed);
    int64_t result = perform(channel, asked, &answer);
    atomic_store_explicit(&counters->under_way, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->busy_ns, monotonic_ns() - start, memory_order_relaxed);
    if (result == BROKEN) {
        return false;
    }
    if (result == DLFS_E_LIMIT) {
        count_refusal(channel);
    }
    answer.result = answer.place == BATCH_NONE ? result : answer.result;
    answer.lost_members = dlfs_reader_lost_members(channel->reader);
    channel->answered_tag = asked->tag;
    if (!ring_put(&channel->completions, &answer)) {
        return false;
    }
    ring_wake(&channel->completions, &channel->waiter);
    return true;
}

/* Serves until there is nothing to do; why it must end, or 0. */
static int serve_all(dlfs_channel *channel)
{
    struct submission asked;
    int taken;
    while (!atomic_load_explicit(&channel->stop, memory_order_relaxed)) {
        taken = ring_take(&channel->submissions, &asked);
        if (taken == 0) {
            return 0;
        }
        if (taken < 0 || !serve(channel, &asked)) {
            return DLFS_E_PROTOCOL;
        }
    }
    return DLFS_E_CLOSED;
}

/* Gives back the memory of large answers when the client has not asked for a while. */
static void trim_idle(dlfs_channel *channel)
{
    uint64_t taken =
        atomic_load_explicit(&channel->memory.header->kept.taken, memory_order_acquire);
    if (monotonic_ns() - channel->asked_ns < IDLE_NS) {
        return;
    }
    lend_trim(channel);
    if (taken == channel->answered_tag) {
        area_trim(channel);
    }
}

/* How long the thread may sleep without a look at what the client left. */
static int sleep_ms(const dlfs_channel *channel)
{
    const struct channel_counters *counters = &channel->counters;
    if (atomic_load_explicit(&counters->batches_out, memory_order_relaxed) > 0) {
        return RELEASE_LOOK_MS;
    }
    uint64_t idle_ns = monotonic_ns() - channel->asked_ns;
    bool trimmed = channel->area_samples == 0 && channel->copied_kept == 0;
    return trimmed || idle_ns > 2 * IDLE_NS ? -1 : (int)(IDLE_NS / 1000000);
}

static void *channel_thread(void *argument)
{
    dlfs_channel *channel = argument;
    struct channel_counters *counters = &channel->counters;
    int code = 0;
    while (code == 0) {
        code = serve_all(channel);
        if (code < 0) {
            break;
        }
        enum wait_end end = ring_wait(&channel->submissions, &channel->waiter, sleep_ms(channel));
        if (end == WAIT_STOPPED || end == WAIT_GONE) {
            code = DLFS_E_CLOSED;
        } else if (end == WAIT_TIME) {
            trim_idle(channel);
        }
    }
    close_stream(channel);
    lend_take_back_all(channel);
    lend_trim(channel);
    area_trim(channel);
    count_kept(channel);
    shutdown(channel->waiter.socket, SHUT_RDWR);
    atomic_store_explicit(&counters->ended, code, memory_order_release);
    return NULL;
}

/* ---- create, destroy ------------------------------------------------------------------------- */

static int config_check(const dlfs_channel_config *config)
{
    if (config == NULL || config->reader == NULL || config->share == NULL || config->flags != 0 ||
        config->samples_max == 0 || config->samples_max > DLFS_CHANNEL_SAMPLES_MAX ||
        config->batches_max == 0 || config->batches_max > DLFS_CHANNEL_BATCHES_MAX ||
        config->copied_bytes_max > COPIED_BYTES_MAX) {
        return -EINVAL;
    }
    return 0;
}

static void channel_free(dlfs_channel *channel)
{
    lend_free(channel);
    free(channel->indices);
    discharge(channel, atomic_load(&channel->counters.memory_bytes));
    channel_memory_unmap(&channel->memory);
    if (channel->waiter.socket >= 0) {
        close(channel->waiter.socket);
    }
    if (channel->waiter.stop >= 0) {
        close(channel->waiter.stop);
    }
    dlfs_share_destroy(channel->share);
    dlfs_share_destroy(channel->memory_share);
    free(channel);
}

/* Makes the two ends' sockets and what ends the thread's sleep. */
static int make_wakes(dlfs_channel *channel, int *wake)
{
    int pair[2];
    int stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (stop < 0) {
        return -errno;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0) {
        int code = -errno;
        close(stop);
        return code;
    }
    waiter_init(&channel->waiter, &channel->completions, pair[0], stop);
    *wake = pair[1];
    return 0;
}

static int channel_prepare(dlfs_channel *channel, const dlfs_channel_config *config,
                           int *descriptor, int *wake)
{
    int arena;
    uint64_t arena_bytes;
    int code = dlfs_reader_arena(config->reader, &arena, &arena_bytes);
    if (code == 0) {
        code = lend_create(channel, config->batches_max);
    }
    if (code == 0) {
        code = channel_memory_create(&channel->memory, config, arena_bytes, descriptor);
    }
    if (code < 0) {
        return code;
    }
    struct channel_memory *memory = &channel->memory;
    channel->submissions = ring_over(&memory->header->submissions, memory->submissions,
                                     sizeof(struct submission), memory->submission_count);
    channel->completions = ring_over(&memory->header->completions, memory->completions,
                                     sizeof(struct completion), COMPLETION_COUNT);
    code = make_wakes(channel, wake);
    if (code < 0) {
        return code;
    }
    code = thread_start(&channel->thread, NULL, channel_thread, channel);
    if (code < 0) {
        close(*wake);
    }
    return code;
}

DLFS_API int dlfs_channel_create(const dlfs_channel_config *config, dlfs_channel **out, int *memory,
                                 int *wake)
{
    int code = config_check(config);
    if (code < 0) {
        return code;
    }
    dlfs_channel *channel = calloc(1, sizeof(*channel));
    if (channel == NULL) {
        return -ENOMEM;
    }
    channel->reader = config->reader;
    channel->share = config->share;
    channel->memory_share = config->memory;
    channel->waiter.socket = -1;
    channel->waiter.stop = -1;
    share_reference(config->share);
    share_reference(config->memory);
    int descriptor = -1;
    int client_wake = -1;
    code = channel_prepare(channel, config, &descriptor, &client_wake);
    if (code < 0) {
        if (descriptor >= 0) {
            close(descriptor);
        }
        channel_free(channel);
        return code;
    }
    *out = channel;
    *memory = descriptor;
    *wake = client_wake;
    return 0;
}

DLFS_API void dlfs_channel_destroy(dlfs_channel *channel)
{
    if (channel == NULL) {
        return;
    }
    uint64_t one = 1;
    atomic_store_explicit(&channel->stop, true, memory_order_relaxed);
    (void)!write(channel->waiter.stop, &one, sizeof(one));
    pthread_join(channel->thread, NULL);
    channel_free(channel);
}

DLFS_API void dlfs_channel_get_stats(dlfs_channel *channel, dlfs_channel_stats *stats)
{
    const struct channel_counters *counters = &channel->counters;
    count_kept(channel);
    /* First, so that an end that is seen is seen with what it gave back. */
    int32_t ended = atomic_load_explicit(&counters->ended, memory_order_acquire);
    *stats = (dlfs_channel_stats){
        .samples = atomic_load_explicit(&counters->samples, memory_order_relaxed),
        .sample_bytes = atomic_load_explicit(&counters->sample_bytes, memory_order_relaxed),
        .batches = atomic_load_explicit(&counters->batches, memory_order_relaxed),
        .batches_out = atomic_load_explicit(&counters->batches_out, memory_order_relaxed),
        .pinned_bytes = atomic_load_explicit(&counters->pinned_bytes, memory_order_relaxed),
        .copied_bytes = atomic_load_explicit(&counters->copied_bytes, memory_order_relaxed),
        .copied_batches = atomic_load_explicit(&counters->copied_batches, memory_order_relaxed),
        .refusals = atomic_load_explicit(&counters->refusals, memory_order_relaxed),
        .failures = atomic_load_explicit(&counters->failures, memory_order_relaxed),
        .wakes = atomic_load_explicit(&channel->waiter.wakes, memory_order_relaxed),
        .sleeps = atomic_load_explicit(&channel->waiter.sleeps, memory_order_relaxed),
        .busy_ns = atomic_load_explicit(&counters->busy_ns, memory_order_relaxed),
        .memory_bytes = atomic_load_explicit(&counters->memory_bytes, memory_order_relaxed),
        .ended = ended,
        .under_way = atomic_load_explicit(&counters->under_way, memory_order_relaxed),
    };
}
