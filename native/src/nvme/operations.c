/* Operations and commands of a queue pair, and its clock; see nvme/operations.h. */
#include "nvme/operations.h"

#include "platform/clock.h"

/* Time between two polls from which on the queue pair's clock stops, in nanoseconds. */
#define POLL_GAP_NS UINT64_C(1000000000)
/* Attempts after a retryable status. The pause before the first is 1 ms, and doubles each time. */
#define RETRIES_MAX 12u
#define RETRY_SHIFT_MAX 8u /* the pause stays at 2^8 ms */

/* ---- the clock ------------------------------------------------------------------------------- */

uint64_t nvme_queue_now(struct nvme_queue *queue)
{
    uint64_t now = monotonic_coarse_ns();
    uint64_t gap = now > queue->polled_ns ? now - queue->polled_ns : 0;
    if (gap > POLL_GAP_NS) {
        queue->paused_ns += gap - POLL_GAP_NS;
    }
    queue->polled_ns = now > queue->polled_ns ? now : queue->polled_ns;
    return queue->polled_ns - queue->paused_ns;
}

void nvme_queue_note_poll(struct nvme_queue *queue)
{
    uint64_t now = monotonic_coarse_ns();
    queue->polled_ns = now > queue->polled_ns ? now : queue->polled_ns;
}

void nvme_queue_note_deadline(struct nvme_queue *queue, uint64_t at_ns)
{
    queue->deadline_ns = at_ns < queue->deadline_ns ? at_ns : queue->deadline_ns;
}

/* ---- waiting operations ---------------------------------------------------------------------- */

void nvme_operation_enqueue(struct nvme_queue *queue, uint32_t number)
{
    queue->operations[number].waiting = true;
    nvme_list_append(queue, &queue->waiting, number);
}

uint32_t nvme_waiting_pop(struct nvme_queue *queue)
{
    uint32_t number = queue->waiting.first;
    struct nvme_operation *operation = &queue->operations[number];
    queue->waiting.first = operation->next;
    operation->waiting = false;
    return number;
}

void nvme_drop_failed(struct nvme_queue *queue)
{
    while (queue->waiting.first != NVME_NONE) {
        const struct nvme_operation *operation = &queue->operations[queue->waiting.first];
        if (operation->code == 0 && operation->retryable_code == 0) {
            return;
        }
        uint32_t number = nvme_waiting_pop(queue);
        if (operation->commands_in_flight == 0) {
            nvme_operation_end(queue, number);
        }
    }
}

bool nvme_requeue_delayed(struct nvme_queue *queue, uint64_t now_ns)
{
    if (queue->delayed.first == NVME_NONE || now_ns < queue->delayed_until_ns) {
        return false;
    }
    uint32_t number = queue->delayed.first;
    nvme_list_clear(&queue->delayed);
    while (number != NVME_NONE) {
        uint32_t next = queue->operations[number].next;
        nvme_operation_enqueue(queue, number);
        number = next;
    }
    return true;
}

/* ---- completing operations and commands ------------------------------------------------------ */

void nvme_operation_complete(struct nvme_queue *queue, uint32_t number, int64_t result)
{
    struct nvme_operation *operation = &queue->operations[number];
    uint32_t position = queue->done_first + queue->done_count;
    position = position < queue->base.depth ? position : position - queue->base.depth;
    queue->done[position] = (dlfs_completion){.tag = operation->tag, .result = result};
    queue->done_count++;
    queue->done_bytes += operation->length_bytes;
    queue->unfinished_changes -= operation->kind != DLFS_OP_READ;
    operation->next = queue->free_operation;
    queue->free_operation = number;
}

/* Delays an operation for another attempt; returns false after RETRIES_MAX attempts. */
static bool delay_operation(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_operation *operation = &queue->operations[number];
    if (operation->retries >= RETRIES_MAX) {
        return false;
    }
    uint32_t shift = operation->retries < RETRY_SHIFT_MAX ? operation->retries : RETRY_SHIFT_MAX;
    uint64_t until_ns = nvme_queue_now(queue) + (NVME_NANOSECONDS_PER_MS << shift);
    operation->retries++;
    operation->retryable_code = 0;
    operation->issued_bytes = 0;
    if (queue->delayed.first == NVME_NONE || until_ns < queue->delayed_until_ns) {
        queue->delayed_until_ns = until_ns;
    }
    nvme_list_append(queue, &queue->delayed, number);
    atomic_fetch_add(&queue->association->counters.retries, 1);
    return true;
}

void nvme_operation_end(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_operation *operation = &queue->operations[number];
    int code = operation->code;
    if (code == 0 && operation->retryable_code < 0) {
        code = operation->retryable_code;
        if (delay_operation(queue, number)) {
            return;
        }
    }
    if (code == 0 && operation->kind == DLFS_OP_WRITE) {
        nvme_durability_note(&queue->association->durability, queue->connection->incarnation);
    }
    nvme_operation_complete(queue, number, code < 0 ? code : (int64_t)operation->length_bytes);
}

/* Returns a command to the free list. */
static void free_command_entry(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_command *command = &queue->commands[number];
    queue->small_count -= nvme_command_is_small(command);
    queue->write_count -= command->kind == DLFS_OP_WRITE;
    command->in_flight = false;
    command->next = queue->free_command;
    queue->free_command = number;
    queue->in_flight_count--;
}

void nvme_command_end(struct nvme_queue *queue, uint32_t number, uint16_t status)
{
    uint32_t operation_number = queue->commands[number].operation;
    struct nvme_operation *operation = &queue->operations[operation_number];
    bool changes = queue->commands[number].kind != DLFS_OP_READ;
    free_command_entry(queue, number);
    operation->commands_in_flight--;
    if (operation->kind == NVME_OP_PASSTHROUGH) {
        queue->passthrough_incarnation = queue->connection->incarnation;
    } else if (status != 0) {
        int code = nvme_status_code(status);
        if (code < 0 && nvme_status_is_retryable(status)) {
            operation->retryable_code = code;
            if (nvme_status_is_ana(status)) {
                nvme_association_check_ana(queue->association, queue->connection->incarnation);
            }
        } else if (code < 0 && operation->code == 0) {
            operation->code = code;
        }
    }
    if (operation->commands_in_flight == 0 && !operation->waiting) {
        nvme_operation_end(queue, operation_number);
    }
    /* Last: a move to another path begins when no change is in flight, and then must see that this
     * write is not flushed yet. Otherwise the next flush would report it as lost. */
    nvme_note_changes_ended(queue, changes);
}

void nvme_sendable_append(struct nvme_queue *queue, uint32_t number)
{
    queue->commands[number].sends_pending++;
    queue->commands[number].next = NVME_NONE;
    if (queue->sendable.first == NVME_NONE) {
        queue->sendable.first = number;
    } else {
        queue->commands[queue->sendable.last].next = number;
    }
    queue->sendable.last = number;
}
