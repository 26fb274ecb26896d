/*
 * The life of operations on an I/O queue pair: submitting, ending, trying again. See nvme/queue.h.
 *
 * Time is the queue pair's own: it stands still while nobody polls (but for POLL_GAP_NS), so that
 * answers which wait in the socket are not called late by someone who did not look.
 */
#include "nvme/queue.h"
#include "platform/clock.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define POLL_GAP_NS UINT64_C(1000000000)
/* Slots beyond the depth, so that one large operation keeps several commands under way. */
#define SLOTS_MIN 8u
#define SLOTS_MAX 4096u
/* How often a passing status is met with another try, and the pauses before: 1 ms, doubled. */
#define ATTEMPTS_MAX 12u
#define ATTEMPT_SHIFT_MAX 8u

/* Looks at the clock: the queue pair's own time. */
uint64_t nvme_queue_tick(struct nvme_queue *queue)
{
    uint64_t now = monotonic_coarse_ns();
    uint64_t gap = now > queue->seen_ns ? now - queue->seen_ns : 0;
    if (gap > POLL_GAP_NS) {
        queue->paused_ns += gap - POLL_GAP_NS;
    }
    queue->seen_ns = now > queue->seen_ns ? now : queue->seen_ns;
    return queue->seen_ns - queue->paused_ns;
}

void nvme_wait_again(struct nvme_queue *queue, uint32_t number)
{
    queue->operations[number].waiting = true;
    nvme_list_append(queue, &queue->waiting, number);
}

/* ---- the end of parts and operations --------------------------------------------------------- */

void nvme_operation_done(struct nvme_queue *queue, uint32_t number, int64_t result)
{
    struct nvme_operation *operation = &queue->operations[number];
    uint32_t place = queue->done_first + queue->done_count;
    place = place < queue->base.depth ? place : place - queue->base.depth;
    queue->done[place] = (dlfs_completion){.tag = operation->tag, .result = result};
    queue->done_count++;
    operation->next = queue->free_operation;
    queue->free_operation = number;
}

/* Puts an operation aside for a moment; false when it has had its tries. */
static bool operation_hold(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_operation *operation = &queue->operations[number];
    if (operation->attempts >= ATTEMPTS_MAX) {
        return false;
    }
    uint32_t shift =
        operation->attempts < ATTEMPT_SHIFT_MAX ? operation->attempts : ATTEMPT_SHIFT_MAX;
    uint64_t until_ns = nvme_queue_tick(queue) + (NVME_NANOSECONDS_PER_MS << shift);
    operation->attempts++;
    operation->passing_code = 0;
    operation->issued_bytes = 0;
    if (queue->held.first == NVME_NONE || until_ns < queue->held_until_ns) {
        queue->held_until_ns = until_ns;
    }
    nvme_list_append(queue, &queue->held, number);
    atomic_fetch_add(&queue->association->counters.retries, 1);
    return true;
}

void nvme_operation_end(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_operation *operation = &queue->operations[number];
    int code = operation->code;
    if (code == 0 && operation->passing_code < 0) {
        code = operation->passing_code;
        if (operation_hold(queue, number)) {
            return;
        }
    }
    if (code == 0 && operation->kind == DLFS_OP_WRITE) {
        nvme_durability_note(&queue->association->durability, queue->connection->generation);
    }
    nvme_operation_done(queue, number, code < 0 ? code : (int64_t)operation->length_bytes);
}

static void slot_free(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_slot *slot = &queue->slots[number];
    queue->small_count -= nvme_slot_is_small(slot);
    queue->write_count -= slot->kind == DLFS_OP_WRITE;
    slot->busy = false;
    slot->next = queue->free_slot;
    queue->free_slot = number;
    queue->busy_count--;
}

void nvme_part_end(struct nvme_queue *queue, uint32_t number, uint16_t status)
{
    uint32_t operation_number = queue->slots[number].operation;
    struct nvme_operation *operation = &queue->operations[operation_number];
    slot_free(queue, number);
    operation->parts--;
    if (operation->kind == NVME_OP_GENERIC) {
        queue->generic.generation = queue->connection->generation;
    } else if (status != 0) {
        int code = nvme_status_code(status);
        if (code < 0 && nvme_status_is_passing(status)) {
            operation->passing_code = code;
        } else if (code < 0 && operation->code == 0) {
            operation->code = code;
        }
    }
    if (operation->parts == 0 && !operation->waiting) {
        nvme_operation_end(queue, operation_number);
    }
}

/* ---- submitting ------------------------------------------------------------------------------ */

static void operation_begin(struct nvme_queue *queue, const dlfs_operation *given, uint64_t now_ns)
{
    uint32_t number = queue->free_operation;
    struct nvme_operation *operation = &queue->operations[number];
    queue->free_operation = operation->next;
    *operation = (struct nvme_operation){.buffer = given->buffer,
                                         .offset_bytes = given->offset_bytes,
                                         .tag = given->tag,
                                         .born_ns = now_ns,
                                         .length_bytes = given->length_bytes,
                                         .kind = (uint8_t)given->kind};
    nvme_wait_again(queue, number);
}

/* Makes the descriptor readable: there are completions that nothing on the socket announces. */
static void announce_done(struct nvme_queue *queue)
{
    if (queue->epoll >= 0 && queue->done_count > 0) {
        nvme_link_signal(queue->link);
    }
}

int nvme_queue_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct nvme_queue *queue = (struct nvme_queue *)base;
    uint64_t now_ns = nvme_queue_tick(queue);
    if (queue->lost_code < 0) {
        int code = queue->lost_code;
        queue->lost_code = nvme_link_revive(queue->association, queue->link, &code) ? 0 : code;
    }
    for (uint32_t i = 0; i < count; i++) {
        operation_begin(queue, &operations[i], now_ns);
    }
    nvme_expect_by(queue, now_ns + queue->timeout_ns);
    if (queue->lost_code < 0) {
        nvme_end_all(queue, queue->lost_code);
        announce_done(queue);
    } else if (queue->connection != NULL && !queue->blocked) {
        nvme_queue_pump(queue);
        nvme_watch_room(queue);
    }
    return (int)count;
}

/* ---- polling --------------------------------------------------------------------------------- */

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

/* Takes what has come and sends what can be; whether anything came. */
static bool exchange(struct nvme_queue *queue)
{
    if (atomic_load_explicit(&queue->link->signal, memory_order_acquire) != 0) {
        nvme_take_news(queue);
    }
    if (queue->connection == NULL) {
        return false;
    }
    const char *reason = "";
    bool large = queue->small_count == 0 && queue->busy_count > 0;
    uint32_t stage_bytes =
        large ? NVME_STAGE_HEADS_BYTES : queue->connection->receiver.staging_bytes;
    ssize_t got = nvme_connection_receive(queue->connection, stage_bytes, &reason);
    if (got < 0) {
        nvme_queue_fail(queue, (int)got, reason);
        return true;
    }
    if (queue->waiting.first != NVME_NONE || queue->ready.first != NVME_NONE ||
        queue->out.count > 0) {
        nvme_queue_pump(queue);
    }
    return got > 0;
}

/* Sleeps until something can be done, at most left_ns. */
static void sleep_for(struct nvme_queue *queue, uint64_t left_ns)
{
    uint64_t now_ns = queue->seen_ns - queue->paused_ns;
    uint64_t due_ns = queue->due_ns;
    if (queue->held.first != NVME_NONE && queue->held_until_ns < due_ns) {
        due_ns = queue->held_until_ns;
    }
    if (due_ns != UINT64_MAX) {
        /* The clock that was looked at moves in steps of a few milliseconds. */
        uint64_t until_due_ns = (due_ns > now_ns ? due_ns - now_ns : 0) + NVME_NANOSECONDS_PER_MS;
        left_ns = until_due_ns < left_ns ? until_due_ns : left_ns;
    }
    struct pollfd watched[2] = {{.fd = queue->link->wake, .events = POLLIN}};
    nfds_t count = 1;
    if (queue->connection != NULL) {
        watched[count++] = (struct pollfd){.fd = queue->connection->descriptor,
                                           .events = queue->blocked ? POLLIN | POLLOUT : POLLIN};
    }
    struct timespec limit = {.tv_sec = (time_t)(left_ns / UINT64_C(1000000000)),
                             .tv_nsec = (long)(left_ns % UINT64_C(1000000000))};
    (void)ppoll(watched, count, left_ns == UINT64_MAX ? NULL : &limit, NULL);
    /* However long that took, it was time in which an answer would have been seen. */
    uint64_t now = monotonic_coarse_ns();
    queue->seen_ns = now > queue->seen_ns ? now : queue->seen_ns;
}

/* Whether something may have run out of time, or is to be tried again. */
static bool is_due(struct nvme_queue *queue)
{
    uint64_t now_ns = nvme_queue_tick(queue);
    return now_ns >= queue->due_ns ||
           (queue->held.first != NVME_NONE && now_ns >= queue->held_until_ns);
}

/*
 * Takes what has come until there are `count` completions or nothing is left: to go on by several
 * large ones at a time costs fewer calls. Small ones come by the dozen in one call.
 */
static bool exchange_up_to(struct nvme_queue *queue, uint32_t count)
{
    bool came = exchange(queue);
    bool more = came;
    while (more && queue->done_count < count && queue->small_count == 0 && queue->busy_count > 0) {
        more = exchange(queue);
    }
    return came;
}

/*
 * Exchanges what there is, and looks at the time when nothing came, or when it is due: someone slow
 * may always find an answer waiting. Nothing is called late whose answer is in the socket. Where as
 * many completions are waiting as are asked for, nothing is looked at: a call that mostly finds
 * nothing is saved, and what they make room for is asked for the sooner.
 */
static bool advance(struct nvme_queue *queue, uint32_t count)
{
    if (queue->done_count >= count) {
        return true;
    }
    bool came = exchange_up_to(queue, count);
    if (came && is_due(queue)) {
        while (exchange(queue)) {
        }
        nvme_check_time(queue);
    } else if (!came && queue->done_count == 0) {
        nvme_check_time(queue);
    }
    return came;
}

/*
 * Whether to look again at once: nothing has come for less than busy_poll_us. *until_ns is 0 when
 * something came last. A large answer takes longer than that to come, and comes by and by: whoever
 * slept between its parts would be woken for each.
 */
static bool looks_again(const struct nvme_queue *queue, uint64_t *until_ns)
{
    uint64_t spin_ns = (uint64_t)queue->association->config.busy_poll_us * 1000;
    if (spin_ns == 0) {
        return false;
    }
    uint64_t now_ns = monotonic_ns();
    if (*until_ns == 0) {
        *until_ns = now_ns + spin_ns;
    }
    return now_ns < *until_ns;
}

int nvme_queue_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count, int timeout_ms)
{
    struct nvme_queue *queue = (struct nvme_queue *)base;
    struct deadline deadline = {.at_ns = 0};
    uint64_t spin_until_ns = 0;
    bool started = false;
    for (;;) {
        bool came = advance(queue, count);
        spin_until_ns = came ? 0 : spin_until_ns;
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
            return 0;
        }
        if (!came && !looks_again(queue, &spin_until_ns)) {
            sleep_for(queue, left_ns);
        }
    }
}

int nvme_queue_descriptor(dlfs_queue *base)
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
        nvme_watch(queue, EPOLL_CTL_ADD, queue->blocked ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
    announce_done(queue);
    return queue->epoll;
}

int nvme_queue_run(struct nvme_queue *queue, void *data, uint32_t data_bytes)
{
    dlfs_operation operation = {
        .buffer = data, .length_bytes = data_bytes, .kind = NVME_OP_GENERIC, .tag = 0};
    dlfs_completion completion;
    (void)nvme_queue_submit(&queue->base, &operation, 1);
    while (nvme_queue_poll(&queue->base, &completion, 1, -1) == 0) {
    }
    return completion.result < 0 ? (int)completion.result : 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

static int queue_allocate(struct nvme_queue *queue, uint32_t depth, uint32_t slots)
{
    queue->operations = calloc(depth, sizeof *queue->operations);
    queue->slots = calloc(slots, sizeof *queue->slots);
    queue->done = calloc(depth, sizeof *queue->done);
    if (queue->operations == NULL || queue->slots == NULL || queue->done == NULL) {
        return -ENOMEM;
    }
    for (uint32_t number = 0; number < depth; number++) {
        queue->operations[number].next = number + 1 < depth ? number + 1 : NVME_NONE;
    }
    for (uint32_t number = 0; number < slots; number++) {
        queue->slots[number].cid = (uint16_t)number;
    }
    return 0;
}

int nvme_queue_make(struct nvme_association *association, uint32_t depth, uint32_t block_bytes,
                    struct nvme_queue **out)
{
    const struct nvme_config *config = &association->config;
    uint32_t slots = depth < SLOTS_MIN ? SLOTS_MIN : depth > SLOTS_MAX ? SLOTS_MAX : depth;
    struct nvme_queue *queue = calloc(1, sizeof *queue);
    if (queue == NULL) {
        return -ENOMEM;
    }
    queue->association = association;
    queue->epoll = -1;
    queue->base.depth = depth;
    queue->slots_max = slots;
    queue->nsid = config->nsid;
    queue->block_shift = block_bytes > 0 ? (uint32_t)__builtin_ctz(block_bytes) : 0;
    queue->timeout_ns = config->timeout_ms * NVME_NANOSECONDS_PER_MS;
    queue->budget_ns = queue->timeout_ns + config->reconnect_ms * NVME_NANOSECONDS_PER_MS;
    queue->seen_ns = monotonic_coarse_ns();
    queue->due_ns = UINT64_MAX;
    nvme_list_clear(&queue->waiting);
    nvme_list_clear(&queue->held);
    nvme_list_clear(&queue->ready);
    int code = queue_allocate(queue, depth, slots);
    if (code == 0) {
        code = nvme_link_create(association, slots, &queue->link);
    }
    if (code < 0) {
        nvme_queue_free(queue);
        return code;
    }
    nvme_take_news(queue);
    *out = queue;
    return 0;
}

void nvme_queue_free(struct nvme_queue *queue)
{
    if (queue == NULL) {
        return;
    }
    bool foreign = queue->association->owner != getpid();
    if (queue->epoll >= 0) {
        (void)close(queue->epoll);
    }
    if (foreign || queue->base.in_flight > 0) {
        nvme_connection_abort(queue->connection, foreign);
    } else {
        nvme_connection_close(queue->connection);
    }
    if (queue->link != NULL) {
        nvme_link_release(queue->association, queue->link, foreign);
    }
    free(queue->operations);
    free(queue->slots);
    free(queue->done);
    free(queue);
}
