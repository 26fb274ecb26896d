/*
 * The service's end of a channel: its thread takes requests from the ring, has channel/operations.c
 * perform them, and answers.
 *
 * A client that sends a request that this library never sends loses its channel.
 *
 * The release of a batch does not wake the thread, so that it costs no system call. While the
 * client has batches, the sleeping thread polls for releases every RELEASE_POLL_MS.
 *
 * When the channel ends, the thread itself releases the stream, the batches and the pinned memory.
 * Then it closes its end of the sockets. The thread of a channel that is revoked first closes its
 * end for sending, which the client takes for the end of the service, and waits until the client
 * has closed the other end.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "channel/channel.h"
#include "platform/clock.h"
#include "platform/thread.h"

#define RELEASE_POLL_MS 10
#define IDLE_NS \
    UINT64_C(1000000000) /* idle time after which the pages of large answers are freed */

/* ---- the thread ------------------------------------------------------------------------------ */

/* Answers one request. Returns false if the client broke the protocol. */
static bool serve(dlfs_channel *channel, const struct submission *request)
{
    if (request->operation == OPERATION_RELEASE) {
        return delivery_release(channel, request->value);
    }
    dlfs_channel_stats *counters = &channel->counters;
    struct completion answer = {.tag = request->tag, .memory = BATCH_NONE};
    uint64_t start = monotonic_ns();
    channel->requested_ns = start;
    __atomic_store_n(&counters->under_way, 1, __ATOMIC_RELAXED);
    int64_t result = operation_perform(channel, request, &answer);
    __atomic_store_n(&counters->under_way, 0, __ATOMIC_RELAXED);
    counter_add(&counters->busy_ns, monotonic_ns() - start);
    if (result == PROTOCOL_BROKEN) {
        return false;
    }
    if (result == DLFS_E_LIMIT) {
        counter_add(&counters->refusals, 1);
    }
    answer.result = answer.memory == BATCH_NONE ? result : answer.result;
    answer.lost_members = dlfs_reader_lost_members(channel->reader);
    channel->answered_tag = request->tag;
    if (!ring_put(&channel->completions, &answer)) {
        return false;
    }
    ring_wake(&channel->completions, &channel->waiter);
    return true;
}

/* Serves all requests in the ring. Returns 0, or the code with which the channel ends. */
static int serve_all(dlfs_channel *channel)
{
    struct submission request;
    int taken;
    while (!atomic_load_explicit(&channel->stop, memory_order_relaxed)) {
        taken = ring_take(&channel->submissions, &request);
        if (taken == 0) {
            return 0;
        }
        if (taken < 0 || !serve(channel, &request)) {
            return DLFS_E_PROTOCOL;
        }
    }
    return DLFS_E_CLOSED;
}

/* Frees the memory of large answers if the client has sent no request for IDLE_NS. */
static void trim_idle(dlfs_channel *channel)
{
    uint64_t taken =
        atomic_load_explicit(&channel->memory.header->resident.taken, memory_order_acquire);
    if (monotonic_ns() - channel->requested_ns < IDLE_NS) {
        return;
    }
    delivery_trim(channel);
    if (taken == channel->answered_tag) {
        area_trim(channel);
    }
}

/* Returns the longest time that the thread may sleep, in milliseconds; -1: without limit. */
static int sleep_ms(const dlfs_channel *channel)
{
    if (__atomic_load_n(&channel->counters.batches_out, __ATOMIC_RELAXED) > 0) {
        return RELEASE_POLL_MS;
    }
    uint64_t idle_ns = monotonic_ns() - channel->requested_ns;
    bool trimmed = channel->area_samples == 0 && channel->copied_retained == 0;
    return trimmed || idle_ns > 2 * IDLE_NS ? -1 : (int)(IDLE_NS / 1000000);
}

/* Waits until the client has closed its end, or dlfs_channel_destroy was called. */
static void await_client_end(const dlfs_channel *channel)
{
    struct pollfd files[] = {
        {.fd = channel->waiter.socket, .events = POLLRDHUP},
        {.fd = channel->waiter.stop, .events = POLLIN},
    };
    while (!atomic_load(&channel->released)) {
        uint64_t writes; /* of dlfs_channel_revoke: a later one wakes the thread again */
        (void)!read(channel->waiter.stop, &writes, sizeof(writes));
        if (!atomic_load(&channel->released) && poll(files, 2, -1) > 0 && files[0].revents != 0) {
            return;
        }
    }
}

static void *channel_thread(void *argument)
{
    dlfs_channel *channel = argument;
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
    operation_close_stream(channel);
    shutdown(channel->waiter.socket, SHUT_WR);
    (void)sem_post(&channel->served);
    if (atomic_load(&channel->stop)) {
        await_client_end(channel);
    }
    delivery_release_all(channel);
    delivery_trim(channel);
    area_trim(channel);
    operation_count_resident_reads(channel);
    shutdown(channel->waiter.socket, SHUT_RDWR);
    __atomic_store_n(&channel->counters.ended, code, __ATOMIC_RELEASE);
    return NULL;
}

/* ---- create, destroy ------------------------------------------------------------------------- */

static void channel_free(dlfs_channel *channel)
{
    delivery_free(channel);
    free(channel->indices);
    discharge(channel, channel->counters.memory_bytes);
    channel_memory_unmap(&channel->memory);
    if (channel->waiter.socket >= 0) {
        close(channel->waiter.socket);
    }
    if (channel->waiter.stop >= 0) {
        close(channel->waiter.stop);
    }
    if (channel->uses_residents) {
        residents_leave(channel->reader);
    }
    dlfs_share_destroy(channel->share);
    dlfs_share_destroy(channel->memory_share);
    (void)sem_destroy(&channel->served);
    free(channel);
}

/* Creates the sockets of both ends and the eventfd that ends the thread's sleep. */
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
        channel->geometry = reader_geometry(config->reader);
        code = delivery_create(channel, config->batches_max);
    }
    if (code < 0) {
        return code;
    }
    struct residents residents = residents_enter(config->reader);
    channel->uses_residents = true;
    code = channel_memory_create(&channel->memory, config, &residents, descriptor);
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
    if (config == NULL || config->reader == NULL || config->share == NULL || config->flags != 0 ||
        config->samples_max == 0 || config->samples_max > DLFS_CHANNEL_SAMPLES_MAX ||
        config->batches_max == 0 || config->batches_max > DLFS_CHANNEL_BATCHES_MAX ||
        config->copied_bytes_max > COPIED_BYTES_MAX) {
        return -EINVAL;
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
    (void)sem_init(&channel->served, 0, 0);
    share_reference(config->share);
    share_reference(config->memory);
    int descriptor = -1;
    int client_wake = -1;
    int code = channel_prepare(channel, config, &descriptor, &client_wake);
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

/* Has the thread serve no longer. */
static void stop(dlfs_channel *channel)
{
    uint64_t one = 1;
    atomic_store(&channel->stop, true);
    (void)!write(channel->waiter.stop, &one, sizeof(one));
}

DLFS_API void dlfs_channel_revoke(dlfs_channel *channel)
{
    if (channel->revoked) {
        return;
    }
    channel->revoked = true;
    stop(channel);
    while (sem_wait(&channel->served) < 0) { /* interrupted by a signal */
    }
}

DLFS_API void dlfs_channel_destroy(dlfs_channel *channel)
{
    if (channel == NULL) {
        return;
    }
    atomic_store(&channel->released, true);
    stop(channel);
    pthread_join(channel->thread, NULL);
    channel_free(channel);
}

DLFS_API void dlfs_channel_get_stats(dlfs_channel *channel, dlfs_channel_stats *stats)
{
    const uint64_t *counters = (const uint64_t *)&channel->counters;
    uint64_t *copies = (uint64_t *)stats;
    operation_count_resident_reads(channel);
    /* Read first: with ended set, the other counters include what the thread released. */
    stats->ended = __atomic_load_n(&channel->counters.ended, __ATOMIC_ACQUIRE);
    stats->under_way = __atomic_load_n(&channel->counters.under_way, __ATOMIC_RELAXED);
    for (size_t i = 0; i < offsetof(dlfs_channel_stats, ended) / sizeof(uint64_t); i++) {
        copies[i] = __atomic_load_n(&counters[i], __ATOMIC_RELAXED);
    }
    stats->wakes = atomic_load_explicit(&channel->waiter.wakes, memory_order_relaxed);
    stats->sleeps = atomic_load_explicit(&channel->waiter.sleeps, memory_order_relaxed);
}
