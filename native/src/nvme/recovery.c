/*
 * What a queue pair does about connections that come and go, and about time that runs out. See
 * nvme/queue.h.
 */
#include <errno.h>
#include <sys/epoll.h>

#include "nvme/queue.h"
#include "platform/clock.h"

/* How many broken connections an operation survives that closed for the target's own mistakes. */
#define FAULTS_MAX 8u

/* ---- connections ----------------------------------------------------------------------------- */

void nvme_watch(struct nvme_queue *queue, int action, uint32_t events)
{
    struct epoll_event event = {.events = events};
    if (queue->epoll >= 0) {
        (void)epoll_ctl(queue->epoll, action, queue->connection->descriptor, &event);
        queue->watched_out = (events & EPOLLOUT) != 0;
    }
}

/* Has the epoll set wait for room in the socket exactly while there is none. */
void nvme_watch_room(struct nvme_queue *queue)
{
    if (queue->connection != NULL && queue->blocked != queue->watched_out) {
        nvme_watch(queue, EPOLL_CTL_MOD, queue->blocked ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
}

static void adopt(struct nvme_queue *queue, struct nvme_connection *connection)
{
    queue->connection = connection;
    queue->quiesce_ns = connection->quiesce_ms * NVME_NANOSECONDS_PER_MS;
    connection->receiver.sink = &nvme_queue_sink;
    connection->receiver.context = queue;
    queue->slot_count =
        connection->command_count < queue->slots_max ? connection->command_count : queue->slots_max;
    queue->free_slot = NVME_NONE;
    queue->busy_count = 0;
    queue->small_count = 0;
    queue->write_count = 0;
    for (uint32_t number = queue->slot_count; number-- > 0;) {
        queue->slots[number].busy = false;
        queue->slots[number].next = queue->free_slot;
        queue->free_slot = number;
    }
    nvme_list_clear(&queue->ready);
    nvme_out_clear(queue);
    nvme_watch(queue, EPOLL_CTL_ADD, EPOLLIN);
}

/* See nvme_write_fate. */
static int fate_of_write(struct nvme_queue *queue, struct nvme_operation *operation, int code)
{
    uint64_t end_ns = operation->born_ns + queue->budget_ns;
    uint64_t now_ns = nvme_queue_tick(queue);
    int end = nvme_write_fate(code, end_ns > now_ns ? end_ns - now_ns : 0, queue->quiesce_ns);
    operation->after_ns = end == 0 ? monotonic_ns() + queue->quiesce_ns : 0;
    return end;
}

/*
 * What becomes of an operation whose connection ended with code while parts of it were under way: 0
 * to start again, else how it ends.
 */
static int fate(struct nvme_queue *queue, struct nvme_operation *operation, int code)
{
    bool at_fault = code == DLFS_E_PROTOCOL || code == DLFS_E_DIGEST;
    if (at_fault && ++operation->faults > FAULTS_MAX) {
        return code;
    }
    if (operation->kind == NVME_OP_GENERIC && !queue->generic.harmless) {
        return code == DLFS_E_TIMEOUT ? DLFS_E_TIMEOUT : DLFS_E_LOST;
    }
    return operation->kind == DLFS_OP_WRITE ? fate_of_write(queue, operation, code) : 0;
}

/* Ends the connection, and only then the operations on it: nothing can reach their memory. */
static void give_up(struct nvme_queue *queue, int code)
{
    if (queue->epoll >= 0) {
        /* Before closing: a forked child's copy would keep the socket in the set. */
        nvme_watch(queue, EPOLL_CTL_DEL, 0);
    }
    nvme_connection_drop(&queue->connection);
    nvme_out_clear(queue);
    nvme_list_clear(&queue->ready);
    for (uint32_t i = 0; i < queue->slot_count; i++) {
        if (!queue->slots[i].busy) {
            continue;
        }
        queue->slots[i].busy = false;
        uint32_t number = queue->slots[i].operation;
        struct nvme_operation *operation = &queue->operations[number];
        if (operation->parts == 0) {
            continue; /* seen by another slot */
        }
        operation->parts = 0;
        operation->issued_bytes = 0;
        int end = operation->code < 0 ? operation->code : fate(queue, operation, code);
        operation->passing_code = 0;
        if (end < 0) {
            operation->code = end;
            if (!operation->waiting) {
                nvme_operation_end(queue, number);
            }
            continue;
        }
        atomic_fetch_add(&queue->association->counters.retries, 1);
        if (!operation->waiting) {
            nvme_wait_again(queue, number);
        }
    }
    /* Also those of which only parts have ended: what was written may be gone with its controller.
     */
    for (uint32_t number = queue->waiting.first; number != NVME_NONE;
         number = queue->operations[number].next) {
        queue->operations[number].issued_bytes = 0;
    }
    queue->busy_count = 0;
    queue->small_count = 0;
    queue->write_count = 0;
    nvme_pop_failed(queue);
}

void nvme_queue_fail(struct nvme_queue *queue, int code, const char *reason)
{
    uint64_t generation = queue->connection->generation;
    if (code == DLFS_E_DIGEST) {
        nvme_link_report(queue->association, queue->link, generation, code, reason);
    } else {
        nvme_association_report(queue->association, generation, code, reason);
    }
    give_up(queue, code);
}

/* Ends everything that waits. There is no connection. */
void nvme_end_all(struct nvme_queue *queue, int code)
{
    struct nvme_list *lists[2] = {&queue->waiting, &queue->held};
    for (int i = 0; i < 2; i++) {
        while (lists[i]->first != NVME_NONE) {
            uint32_t number = lists[i]->first;
            struct nvme_operation *operation = &queue->operations[number];
            lists[i]->first = operation->next;
            operation->waiting = false;
            nvme_operation_done(queue, number, operation->code < 0 ? operation->code : code);
        }
    }
}

void nvme_take_news(struct nvme_queue *queue)
{
    uint64_t generation = queue->connection != NULL ? queue->connection->generation : 0;
    struct nvme_news news = nvme_link_news(queue->association, queue->link, generation);
    if (queue->connection != NULL && news.ended) {
        give_up(queue, news.silent ? DLFS_E_TIMEOUT : DLFS_E_LOST);
    }
    if (news.connection != NULL) {
        adopt(queue, news.connection);
    }
    queue->lost_code = news.code;
    if (news.code < 0) {
        nvme_end_all(queue, news.code);
    }
}

void nvme_queue_pump(struct nvme_queue *queue)
{
    const char *reason = "";
    int code = nvme_pump(queue, &reason);
    if (code < 0) {
        nvme_queue_fail(queue, code, reason);
    }
}

/* ---- time ------------------------------------------------------------------------------------ */

void nvme_expect_by(struct nvme_queue *queue, uint64_t at_ns)
{
    queue->due_ns = at_ns < queue->due_ns ? at_ns : queue->due_ns;
}

/* Whether a command has been under way for too long, or an operation as a whole; else when the next
 * one will have been. */
static bool commands_are_late(struct nvme_queue *queue, uint64_t now_ns)
{
    for (uint32_t i = 0; i < queue->slot_count && queue->busy_count > 0; i++) {
        const struct nvme_slot *slot = &queue->slots[i];
        if (!slot->busy) {
            continue;
        }
        uint64_t command_ns = slot->sent_ns + queue->timeout_ns;
        uint64_t whole_ns = queue->operations[slot->operation].born_ns + queue->budget_ns;
        uint64_t at_ns = command_ns < whole_ns ? command_ns : whole_ns;
        if (at_ns <= now_ns) {
            return true;
        }
        nvme_expect_by(queue, at_ns);
    }
    return false;
}

/* Ends the operations of a list whose time is over; none of their parts is under way. */
static void end_late(struct nvme_queue *queue, struct nvme_list *list, uint64_t now_ns)
{
    struct nvme_list kept = {NVME_NONE, NVME_NONE};
    while (list->first != NVME_NONE) {
        uint32_t number = list->first;
        struct nvme_operation *operation = &queue->operations[number];
        list->first = operation->next;
        uint64_t at_ns = operation->born_ns + queue->budget_ns;
        if (at_ns <= now_ns && operation->parts == 0) {
            operation->waiting = false;
            nvme_operation_done(queue, number,
                                operation->code < 0 ? operation->code : DLFS_E_TIMEOUT);
            continue;
        }
        uint64_t held_ns = nvme_held_until(queue, operation, now_ns);
        nvme_expect_by(queue, held_ns > 0 && held_ns < at_ns ? held_ns : at_ns);
        nvme_list_append(queue, &kept, number);
    }
    *list = kept;
}

static void release_held(struct nvme_queue *queue, uint64_t now_ns)
{
    if (queue->held.first == NVME_NONE || now_ns < queue->held_until_ns) {
        return;
    }
    uint32_t number = queue->held.first;
    nvme_list_clear(&queue->held);
    while (number != NVME_NONE) {
        uint32_t next = queue->operations[number].next;
        nvme_wait_again(queue, number);
        number = next;
    }
    if (queue->connection != NULL) {
        nvme_queue_pump(queue);
    }
}

void nvme_check_time(struct nvme_queue *queue)
{
    uint64_t now_ns = nvme_queue_tick(queue);
    release_held(queue, now_ns);
    if (now_ns < queue->due_ns) {
        return;
    }
    queue->due_ns = UINT64_MAX;
    if (queue->connection != NULL && commands_are_late(queue, now_ns)) {
        nvme_queue_fail(queue, DLFS_E_TIMEOUT, "no answer to a command in time");
    }
    end_late(queue, &queue->waiting, now_ns);
    end_late(queue, &queue->held, now_ns);
}
