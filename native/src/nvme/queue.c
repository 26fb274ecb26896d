/* Submitting to and polling a queue pair, its descriptor, creating and freeing it; see
 * nvme/queue.h. */
#include "nvme/queue.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "nvme/recovery.h"
#include "platform/clock.h"
#include "platform/thread.h"

/* Commands of a queue pair. A shallow one has more than its depth, so that one large operation
 * keeps several commands in flight. */
#define COMMANDS_MIN 8u
#define COMMANDS_MAX 4096u
/*
 * Bytes of large reads after which a poll returns those that are complete: these are in the
 * processor's cache when the caller computes their checksums, and the target gets the next commands
 * before it has answered the others.
 */
#define POLL_BYTES_MAX (UINT64_C(128) << 10)
/* Rounds of busy polling between two looks at the clock and at the whole queue pair, and pauses of
 * the processor in each: together some 30 us. */
#define BUSY_ROUNDS 16u
#define BUSY_PAUSES 50u

/* ---- submitting ------------------------------------------------------------------------------ */

/* Puts a caller's operation into a free entry and enqueues it. */
static void operation_begin(struct nvme_queue *queue, const dlfs_operation *given, uint64_t now_ns)
{
    uint32_t number = queue->free_operation;
    struct nvme_operation *operation = &queue->operations[number];
    queue->free_operation = operation->next;
    *operation = (struct nvme_operation){.buffer = given->buffer,
                                         .offset_bytes = given->offset_bytes,
                                         .tag = given->tag,
                                         .submitted_ns = now_ns,
                                         .length_bytes = given->length_bytes,
                                         .kind = (uint8_t)given->kind};
    queue->unfinished_changes += given->kind != DLFS_OP_READ;
    nvme_operation_enqueue(queue, number);
}

/* Makes the descriptor readable if a poll would find something that the socket does not report:
 * completions, or bytes in the TLS session. */
static void announce_done(struct nvme_queue *queue)
{
    if (queue->epoll >= 0 &&
        (queue->done_count > 0 ||
         (queue->connection != NULL && nvme_connection_has_buffered(queue->connection)))) {
        nvme_link_signal(queue->link);
    }
}

static int queue_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct nvme_queue *queue = (struct nvme_queue *)base;
    uint64_t now_ns = nvme_queue_now(queue);
    if (queue->lost_code < 0) {
        int code = queue->lost_code;
        queue->lost_code = nvme_link_retry_lost(queue->association, queue->link, &code) ? 0 : code;
    }
    for (uint32_t i = 0; i < count; i++) {
        operation_begin(queue, &operations[i], now_ns);
    }
    nvme_queue_note_deadline(queue, now_ns + queue->timeout_ns);
    if (queue->lost_code < 0) {
        nvme_end_waiting(queue, queue->lost_code);
        announce_done(queue);
    } else if (queue->connection != NULL && !queue->socket_full) {
        nvme_queue_send(queue);
        nvme_watch_room(queue);
    }
    return (int)count;
}

/* ---- polling --------------------------------------------------------------------------------- */

/* Moves up to count completions to the caller; returns their number. */
static uint32_t take_done(struct nvme_queue *queue, dlfs_completion *completions, uint32_t count)
{
    uint32_t given = queue->done_count < count ? queue->done_count : count;
    for (uint32_t i = 0; i < given; i++) {
        completions[i] = queue->done[queue->done_first++];
        queue->done_first = queue->done_first < queue->base.depth ? queue->done_first : 0;
    }
    queue->done_count -= given;
    return given;
}

/* Returns true if all data to come is received directly. */
static bool expects_large(const struct nvme_queue *queue)
{
    return queue->small_count == 0 && queue->in_flight_count > 0;
}

/* Receives and sends what the socket allows; returns true if anything was received. */
static bool receive_and_send(struct nvme_queue *queue)
{
    if (atomic_load_explicit(&queue->link->signal, memory_order_acquire) != 0) {
        nvme_queue_take_update(queue);
    }
    if (queue->connection == NULL) {
        return false;
    }
    const char *reason = "";
    uint32_t stage_bytes =
        expects_large(queue) ? NVME_STAGE_HEADS_BYTES : queue->connection->receiver.staging_bytes;
    ssize_t got = nvme_connection_receive(queue->connection, stage_bytes, &reason);
    if (got < 0) {
        nvme_queue_fail(queue, (int)got, reason);
        return true;
    }
    if (queue->waiting.first != NVME_NONE || queue->sendable.first != NVME_NONE ||
        queue->out.count > 0) {
        nvme_queue_send(queue);
    }
    return got > 0;
}

/* Waits until the socket or the link needs attention, at most left_ns. Returns true if one does. */
static bool poll_descriptors(struct nvme_queue *queue, uint64_t left_ns)
{
    struct pollfd watched[2] = {{.fd = queue->link->wake, .events = POLLIN}};
    nfds_t count = 1;
    if (queue->connection != NULL) {
        watched[count++] =
            (struct pollfd){.fd = queue->connection->descriptor,
                            .events = nvme_queue_needs_room(queue) ? POLLIN | POLLOUT : POLLIN};
    }
    struct timespec limit = clock_timespec(left_ns);
    return ppoll(watched, count, left_ns == UINT64_MAX ? NULL : &limit, NULL) > 0;
}

/* Sleeps until the socket, the link or a deadline needs attention, at most left_ns. */
static void wait_for_events(struct nvme_queue *queue, uint64_t left_ns)
{
    uint64_t now_ns = queue->polled_ns - queue->paused_ns;
    uint64_t deadline_ns = queue->deadline_ns;
    if (queue->delayed.first != NVME_NONE && queue->delayed_until_ns < deadline_ns) {
        deadline_ns = queue->delayed_until_ns;
    }
    if (deadline_ns != UINT64_MAX) {
        /* CLOCK_MONOTONIC_COARSE advances in steps of a few milliseconds. */
        uint64_t until_deadline_ns =
            (deadline_ns > now_ns ? deadline_ns - now_ns : 0) + NVME_NANOSECONDS_PER_MS;
        left_ns = until_deadline_ns < left_ns ? until_deadline_ns : left_ns;
    }
    (void)poll_descriptors(queue, left_ns);
    nvme_queue_note_poll(queue);
}

/*
 * Waits for events without sleep, a short while. It does not try to receive meanwhile, which would
 * lock the socket: the kernel could then not deliver the next segments, and would leave that work
 * to this thread.
 */
static void spin_for_events(struct nvme_queue *queue)
{
    for (uint32_t round = 0; round < BUSY_ROUNDS && !poll_descriptors(queue, 0); round++) {
        for (uint32_t i = 0; i < BUSY_PAUSES; i++) {
            processor_pause();
        }
    }
}

/* Returns true if a deadline has passed or a delayed operation is to be tried again. */
static bool is_due(struct nvme_queue *queue)
{
    uint64_t now_ns = nvme_queue_now(queue);
    return now_ns >= queue->deadline_ns ||
           (queue->delayed.first != NVME_NONE && now_ns >= queue->delayed_until_ns);
}

/*
 * Receives until there are count completions, or some of POLL_BYTES_MAX, or the socket is empty.
 * Only large reads need several rounds: one round receives dozens of small ones.
 */
static bool receive_until(struct nvme_queue *queue, uint32_t count)
{
    uint64_t enough_bytes = queue->done_bytes + POLL_BYTES_MAX;
    bool came = receive_and_send(queue);
    bool more = came;
    while (more && queue->done_count < count && queue->done_bytes < enough_bytes &&
           expects_large(queue)) {
        more = receive_and_send(queue);
    }
    return came;
}

/*
 * Receives, sends, and checks deadlines. Does nothing if count completions are ready: this saves a
 * system call that would mostly find nothing, and the caller submits its next operations sooner.
 * Deadlines are checked when nothing was received, and also when one is due, since a slow caller
 * may find something in the socket at every poll. The socket is emptied first, so that no operation
 * times out whose answer has arrived.
 */
static bool advance(struct nvme_queue *queue, uint32_t count)
{
    if (queue->done_count >= count) {
        return true;
    }
    bool came = receive_until(queue, count);
    if (came && is_due(queue)) {
        while (receive_and_send(queue)) {
        }
        nvme_check_deadlines(queue);
    } else if (!came && queue->done_count == 0) {
        nvme_check_deadlines(queue);
    }
    return came;
}

/*
 * Returns true while less than busy_poll_us has passed since something was received. *until_ns is 0
 * right after that. A large answer arrives in many segments: a thread that slept in between would
 * be woken for each.
 */
static bool keeps_polling(const struct nvme_queue *queue, uint64_t *until_ns)
{
    uint64_t busy_poll_ns = (uint64_t)queue->association->config.busy_poll_us * 1000;
    if (busy_poll_ns == 0) {
        return false;
    }
    uint64_t now_ns = monotonic_ns();
    if (*until_ns == 0) {
        *until_ns = now_ns + busy_poll_ns;
    }
    return now_ns < *until_ns;
}

static int queue_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count,
                      int timeout_ms)
{
    struct nvme_queue *queue = (struct nvme_queue *)base;
    struct deadline deadline = {.at_ns = 0};
    uint64_t poll_until_ns = 0;
    bool started = false;
    for (;;) {
        bool came = advance(queue, count);
        poll_until_ns = came ? 0 : poll_until_ns;
        uint32_t given = take_done(queue, completions, count);
        if (given > 0 || (timeout_ms == 0 && !came)) {
            nvme_watch_room(queue);
            announce_done(queue);
            return (int)given;
        }
        if (came && timeout_ms <= 0) {
            continue;
        }
        if (!started) {
            started = true;
            deadline = deadline_after(timeout_ms);
        }
        uint64_t left_ns = deadline_left_ns(&deadline);
        if (left_ns == 0) {
            nvme_watch_room(queue);
            announce_done(queue);
            return 0;
        }
        if (!came && keeps_polling(queue, &poll_until_ns)) {
            spin_for_events(queue);
        } else if (!came) {
            wait_for_events(queue, left_ns);
        }
    }
}

static int queue_descriptor(dlfs_queue *base)
{
    struct nvme_queue *queue = (struct nvme_queue *)base;
    if (queue->epoll >= 0) {
        return queue->epoll;
    }
    queue->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (queue->epoll < 0) {
        return -errno;
    }
    struct epoll_event event = {.events = EPOLLIN};
    if (epoll_ctl(queue->epoll, EPOLL_CTL_ADD, queue->link->wake, &event) != 0) {
        int code = -errno;
        (void)close(queue->epoll);
        queue->epoll = -1;
        return code;
    }
    if (queue->connection != NULL) {
        nvme_watch(queue, EPOLL_CTL_ADD,
                   nvme_queue_needs_room(queue) ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
    announce_done(queue);
    return queue->epoll;
}

int nvme_queue_run(struct nvme_queue *queue, struct nvme_exchange *exchange, uint64_t *incarnation)
{
    dlfs_operation operation = {.buffer = exchange->data,
                                .length_bytes = exchange->data_bytes,
                                .kind = NVME_OP_PASSTHROUGH};
    dlfs_completion completion;
    queue->passthrough = exchange;
    (void)queue_submit(&queue->base, &operation, 1);
    while (queue_poll(&queue->base, &completion, 1, -1) == 0) {
    }
    *incarnation = queue->passthrough_incarnation;
    return completion.result < 0 ? (int)completion.result : 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Allocates the tables of a queue pair and fills its free lists. */
static int queue_allocate(struct nvme_queue *queue, uint32_t depth, uint32_t commands)
{
    queue->operations = calloc(depth, sizeof *queue->operations);
    queue->commands = calloc(commands, sizeof *queue->commands);
    queue->done = calloc(depth, sizeof *queue->done);
    if (queue->operations == NULL || queue->commands == NULL || queue->done == NULL) {
        return -ENOMEM;
    }
    for (uint32_t number = 0; number < depth; number++) {
        queue->operations[number].next = number + 1 < depth ? number + 1 : NVME_NONE;
    }
    for (uint32_t number = 0; number < commands; number++) {
        queue->commands[number].cid = (uint16_t)number;
    }
    return 0;
}

int nvme_queue_make(struct nvme_association *association, uint32_t depth, uint32_t block_bytes,
                    const struct dlfs_connect_limit *limit, struct nvme_queue **out)
{
    const struct nvme_config *config = &association->config;
    uint32_t commands = depth < COMMANDS_MIN   ? COMMANDS_MIN
                        : depth > COMMANDS_MAX ? COMMANDS_MAX
                                               : depth;
    struct nvme_queue *queue = calloc(1, sizeof *queue);
    if (queue == NULL) {
        return -ENOMEM;
    }
    queue->association = association;
    queue->epoll = -1;
    queue->base.depth = depth;
    queue->commands_max = commands;
    queue->nsid = config->nsid;
    queue->block_shift = block_bytes > 0 ? (uint32_t)__builtin_ctz(block_bytes) : 0;
    queue->timeout_ns = config->timeout_ms * NVME_NANOSECONDS_PER_MS;
    queue->budget_ns = queue->timeout_ns + config->reconnect_ms * NVME_NANOSECONDS_PER_MS;
    nvme_queue_note_poll(queue);
    queue->deadline_ns = UINT64_MAX;
    nvme_list_clear(&queue->waiting);
    nvme_list_clear(&queue->delayed);
    nvme_list_clear(&queue->sendable);
    int code = queue_allocate(queue, depth, commands);
    if (code == 0) {
        code = nvme_link_create(association, commands, limit, &queue->link);
    }
    if (code < 0) {
        nvme_queue_free(queue);
        return code;
    }
    nvme_queue_take_update(queue);
    *out = queue;
    return 0;
}

void nvme_queue_free(struct nvme_queue *queue)
{
    if (queue == NULL) {
        return;
    }
    bool in_child = queue->association->owner != getpid();
    if (queue->epoll >= 0) {
        (void)close(queue->epoll);
    }
    nvme_note_changes_ended(queue, queue->change_count);
    if (in_child || queue->base.in_flight > 0) {
        nvme_connection_abort(queue->connection, in_child);
    } else {
        nvme_connection_close(queue->connection);
    }
    if (queue->link != NULL) {
        nvme_link_release(queue->association, queue->link, in_child);
    }
    free(queue->operations);
    free(queue->commands);
    free(queue->done);
    free(queue);
}

static void queue_destroy(dlfs_queue *base)
{
    nvme_queue_free((struct nvme_queue *)base);
}

/* A read whose connection is closed ends there. A write may still be executed: its end is waited
 * for, as the writer's promises demand. */
static bool queue_drops_operations(const dlfs_queue *base)
{
    return ((const struct nvme_queue *)base)->unfinished_changes == 0;
}

const struct dlfs_queue_ops nvme_queue_ops = {
    .submit = queue_submit,
    .poll = queue_poll,
    .descriptor = queue_descriptor,
    .destroy = queue_destroy,
    .drops_operations = queue_drops_operations,
    .abandon = queue_destroy,
};
