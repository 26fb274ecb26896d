/* Lost and new connections of a queue pair, and its deadlines; see nvme/recovery.h. */
#include <errno.h>
#include <sys/epoll.h>

#include "nvme/recovery.h"
#include "nvme/transfer.h"
#include "platform/clock.h"

/* Connections that may break under one operation by the target's protocol or digest errors. */
#define BROKEN_CONNECTIONS_MAX 8u

/* ---- connections ----------------------------------------------------------------------------- */

void nvme_watch(struct nvme_queue *queue, int action, uint32_t events)
{
    struct epoll_event event = {.events = events};
    if (queue->epoll >= 0) {
        (void)epoll_ctl(queue->epoll, action, queue->connection->descriptor, &event);
        queue->watches_room = (events & EPOLLOUT) != 0;
    }
}

void nvme_watch_room(struct nvme_queue *queue)
{
    if (queue->connection != NULL && nvme_queue_needs_room(queue) != queue->watches_room) {
        nvme_watch(queue, EPOLL_CTL_MOD,
                   nvme_queue_needs_room(queue) ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
}

/* Starts to use a connection that the association's thread made. */
static void use_connection(struct nvme_queue *queue, struct nvme_connection *connection)
{
    queue->connection = connection;
    queue->quiesce_ns = connection->quiesce_ms * NVME_NANOSECONDS_PER_MS;
    connection->receiver.sink = &nvme_queue_sink;
    connection->receiver.context = queue;
    queue->command_count = connection->command_count < queue->commands_max
                               ? connection->command_count
                               : queue->commands_max;
    queue->free_command = NVME_NONE;
    queue->in_flight_count = 0;
    queue->small_count = 0;
    queue->write_count = 0;
    for (uint32_t number = queue->command_count; number-- > 0;) {
        queue->commands[number].in_flight = false;
        queue->commands[number].next = queue->free_command;
        queue->free_command = number;
    }
    nvme_list_clear(&queue->sendable);
    nvme_output_clear(queue);
    nvme_watch(queue, EPOLL_CTL_ADD, EPOLLIN);
}

/* Returns 0 if a write may start again once the controller has quiesced, else its final code. */
static int write_restart_code(struct nvme_queue *queue, struct nvme_operation *operation, int code)
{
    uint64_t end_ns = operation->submitted_ns + queue->budget_ns;
    uint64_t now_ns = nvme_queue_now(queue);
    int end =
        nvme_unanswered_write_code(code, end_ns > now_ns ? end_ns - now_ns : 0, queue->quiesce_ns);
    operation->not_before_ns = end == 0 ? monotonic_ns() + queue->quiesce_ns : 0;
    return end;
}

/* Returns true if a command may be sent again although the controller may have executed it. */
static bool is_idempotent(const struct nvme_exchange *exchange)
{
    return exchange->entry[0] == NVME_OPCODE_FLUSH || exchange->direction == DLFS_NVME_DATA_IN;
}

/*
 * Returns 0 if an operation that had commands in flight may start again after its connection ended
 * with code, else the code with which it ends.
 */
static int restart_code(struct nvme_queue *queue, struct nvme_operation *operation, int code)
{
    bool at_fault = code == DLFS_E_PROTOCOL || code == DLFS_E_DIGEST || code == DLFS_E_AUTH;
    if (at_fault && ++operation->broken_connections > BROKEN_CONNECTIONS_MAX) {
        return code;
    }
    if (operation->kind == NVME_OP_PASSTHROUGH && !is_idempotent(queue->passthrough)) {
        return code == DLFS_E_TIMEOUT ? DLFS_E_TIMEOUT : DLFS_E_LOST;
    }
    return operation->kind == DLFS_OP_WRITE ? write_restart_code(queue, operation, code) : 0;
}

/*
 * Closes the connection and then ends or restarts the operations on it: after the close, nothing
 * can write to their buffers.
 */
static void abandon_connection(struct nvme_queue *queue, int code)
{
    if (queue->epoll >= 0) {
        /* Before closing: a copy of the descriptor in a forked child keeps the socket in the set.
         */
        nvme_watch(queue, EPOLL_CTL_DEL, 0);
    }
    nvme_connection_drop(&queue->connection);
    nvme_output_clear(queue);
    nvme_list_clear(&queue->sendable);
    for (uint32_t i = 0; i < queue->command_count; i++) {
        if (!queue->commands[i].in_flight) {
            continue;
        }
        queue->commands[i].in_flight = false;
        uint32_t number = queue->commands[i].operation;
        struct nvme_operation *operation = &queue->operations[number];
        if (operation->commands_in_flight == 0) {
            continue; /* another command of it was handled before */
        }
        operation->commands_in_flight = 0;
        operation->issued_bytes = 0;
        int end = operation->code < 0 ? operation->code : restart_code(queue, operation, code);
        operation->retryable_code = 0;
        if (end < 0) {
            operation->code = end;
            if (!operation->waiting) {
                nvme_operation_end(queue, number);
            }
            continue;
        }
        atomic_fetch_add(&queue->association->counters.retries, 1);
        if (!operation->waiting) {
            nvme_operation_enqueue(queue, number);
        }
    }
    /* A partly completed write starts from its beginning too: the completed commands may have been
     * in the volatile cache of the lost controller. */
    for (uint32_t number = queue->waiting.first; number != NVME_NONE;
         number = queue->operations[number].next) {
        queue->operations[number].issued_bytes = 0;
    }
    queue->in_flight_count = 0;
    queue->small_count = 0;
    queue->write_count = 0;
    nvme_note_changes_ended(queue, queue->change_count);
    nvme_drop_failed(queue);
}

void nvme_queue_fail(struct nvme_queue *queue, int code, const char *reason)
{
    uint64_t incarnation = queue->connection->incarnation;
    if (code == DLFS_E_DIGEST) {
        nvme_link_report(queue->association, queue->link, incarnation, code, reason);
    } else {
        nvme_association_report(queue->association, incarnation, code, reason);
    }
    abandon_connection(queue, code);
}

void nvme_end_waiting(struct nvme_queue *queue, int code)
{
    struct nvme_list *lists[2] = {&queue->waiting, &queue->delayed};
    for (int i = 0; i < 2; i++) {
        while (lists[i]->first != NVME_NONE) {
            uint32_t number = lists[i]->first;
            struct nvme_operation *operation = &queue->operations[number];
            lists[i]->first = operation->next;
            operation->waiting = false;
            nvme_operation_complete(queue, number, operation->code < 0 ? operation->code : code);
        }
    }
}

void nvme_queue_take_update(struct nvme_queue *queue)
{
    uint64_t incarnation = queue->connection != NULL ? queue->connection->incarnation : 0;
    struct nvme_link_update update =
        nvme_link_take_update(queue->association, queue->link, incarnation);
    if (queue->connection != NULL && update.is_over) {
        abandon_connection(queue, update.timed_out ? DLFS_E_TIMEOUT : DLFS_E_LOST);
    }
    if (update.connection != NULL) {
        use_connection(queue, update.connection);
    }
    queue->lost_code = update.code;
    if (update.code < 0) {
        nvme_end_waiting(queue, update.code);
    }
}

void nvme_queue_send(struct nvme_queue *queue)
{
    const char *reason = "";
    int code = nvme_send_pending(queue, &reason);
    if (code < 0) {
        nvme_queue_fail(queue, code, reason);
    }
}

/* ---- time ------------------------------------------------------------------------------------ */

/* Returns true if a command in flight or its operation exceeded its time limit; else notes the next
 * deadline. */
static bool has_late_command(struct nvme_queue *queue, uint64_t now_ns)
{
    for (uint32_t i = 0; i < queue->command_count && queue->in_flight_count > 0; i++) {
        const struct nvme_command *command = &queue->commands[i];
        if (!command->in_flight) {
            continue;
        }
        uint64_t command_ns = command->sent_ns + queue->timeout_ns;
        uint64_t whole_ns = queue->operations[command->operation].submitted_ns + queue->budget_ns;
        uint64_t at_ns = command_ns < whole_ns ? command_ns : whole_ns;
        if (at_ns <= now_ns) {
            return true;
        }
        nvme_queue_note_deadline(queue, at_ns);
    }
    return false;
}

/* Ends operations of a list that exceeded their time limit and have no commands in flight. */
static void end_late(struct nvme_queue *queue, struct nvme_list *list, uint64_t now_ns)
{
    struct nvme_list remaining = {NVME_NONE, NVME_NONE};
    while (list->first != NVME_NONE) {
        uint32_t number = list->first;
        struct nvme_operation *operation = &queue->operations[number];
        list->first = operation->next;
        uint64_t at_ns = operation->submitted_ns + queue->budget_ns;
        if (at_ns <= now_ns && operation->commands_in_flight == 0) {
            operation->waiting = false;
            nvme_operation_complete(queue, number,
                                    operation->code < 0 ? operation->code : DLFS_E_TIMEOUT);
            continue;
        }
        uint64_t issue_at_ns = nvme_issue_time(queue, operation, now_ns);
        nvme_queue_note_deadline(queue,
                                 issue_at_ns > 0 && issue_at_ns < at_ns ? issue_at_ns : at_ns);
        nvme_list_append(queue, &remaining, number);
    }
    *list = remaining;
}

void nvme_check_deadlines(struct nvme_queue *queue)
{
    uint64_t now_ns = nvme_queue_now(queue);
    if (nvme_requeue_delayed(queue, now_ns) && queue->connection != NULL) {
        nvme_queue_send(queue);
    }
    if (now_ns < queue->deadline_ns) {
        return;
    }
    queue->deadline_ns = UINT64_MAX;
    if (queue->connection != NULL && has_late_command(queue, now_ns)) {
        nvme_queue_fail(queue, DLFS_E_TIMEOUT, "no answer to a command in time");
    }
    end_late(queue, &queue->waiting, now_ns);
    end_late(queue, &queue->delayed, now_ns);
}
