/*
 * Operations of a queue pair as requests to SPDK; see queue.h.
 *
 * SPDK splits a request further if it exceeds what the controller transfers at once. Operations for
 * which SPDK has no room wait in order.
 *
 * When a lost connection aborts a read, it is issued again at once; a write, once the controller
 * has quiesced, as dlfs/nvme.h says. An operation without an answer in time ends with
 * DLFS_E_TIMEOUT when its connection is closed. Every operation ends within timeout_ms +
 * reconnect_ms while its queue pair is polled.
 *
 * A write is issued only while the writer's lease allows it (dlfs_device_limit_writes). queue.c
 * checks the lease again before SPDK may send issued requests.
 *
 * Source: NVM Express Base Specification 2.0, section 3.3.3.2.1 (status codes).
 */
#include "nvme/protocol/command.h"
#include "platform/clock.h"
#include "queue.h"

#include <errno.h>
#include <string.h>

#include <spdk/likely.h>

/* ---- operations ------------------------------------------------------------------------------ */

static void append(struct queue *queue, struct list *list, uint32_t number)
{
    queue->operations[number].next = NONE;
    if (list->first == NONE) {
        list->first = number;
    } else {
        queue->operations[list->last].next = number;
    }
    list->last = number;
}

static uint32_t take(struct queue *queue, struct list *list)
{
    uint32_t number = list->first;
    list->first = queue->operations[number].next;
    return number;
}

static bool issued_all(const struct operation *operation)
{
    return operation->issued_bytes >= operation->given.length_bytes || operation->code < 0;
}

static void finish(struct queue *queue, uint32_t number)
{
    append(queue, &queue->finished, number);
    queue->finished_count++;
}

static void set_deadline(const struct queue *queue, struct operation *operation, uint64_t now)
{
    uint64_t deadline_ns = now + queue->device->timeout_ms * NS_PER_MS;
    operation->deadline_ns = deadline_ns < operation->end_ns ? deadline_ns : operation->end_ns;
}

/* Starts an operation again, now or when its controller has quiesced. Returns 0, or its final code.
 */
static int start_again(struct queue *queue, uint32_t number)
{
    struct operation *operation = &queue->operations[number];
    uint64_t now = monotonic_ns();
    uint64_t left_ns = operation->end_ns > now ? operation->end_ns - now : 0;
    operation->not_before_ns = 0;
    if (operation->given.kind == DLFS_OP_WRITE && operation->unanswered) {
        uint64_t quiesce_ns = atomic_load(&queue->controller->quiesce_ns);
        int code = nvme_unanswered_write_code(DLFS_E_LOST, left_ns, quiesce_ns);
        if (code < 0) {
            return code;
        }
        operation->not_before_ns = now + quiesce_ns;
    }
    if (left_ns == 0) {
        return DLFS_E_LOST;
    }
    set_deadline(queue, operation, now);
    operation->retry = false;
    operation->unanswered = false;
    operation->issued_bytes = 0;
    operation->waiting = true;
    append(queue, &queue->waiting, number);
    return 0;
}

/* Finishes an operation that is not waiting and has no requests in flight, or starts it again. */
static void finish_or_retry(struct queue *queue, uint32_t number)
{
    struct operation *operation = &queue->operations[number];
    if (operation->requests_in_flight > 0 || operation->waiting) {
        return;
    }
    if (operation->code == 0 && operation->retry) {
        operation->code = start_again(queue, number);
    }
    if (!operation->waiting) {
        finish(queue, number);
    }
}

void operations_fail_waiting(struct queue *queue, int code)
{
    while (queue->waiting.first != NONE) {
        uint32_t number = take(queue, &queue->waiting);
        struct operation *operation = &queue->operations[number];
        operation->waiting = false;
        if (operation->code == 0) {
            operation->code = code;
        }
        finish_or_retry(queue, number);
    }
}

void operations_expire_waiting(struct queue *queue, uint64_t now)
{
    struct list all = queue->waiting;
    queue->waiting.first = NONE;
    while (all.first != NONE) {
        uint32_t number = take(queue, &all);
        struct operation *operation = &queue->operations[number];
        if (operation->requests_in_flight == 0 && now >= operation->end_ns) {
            operation->waiting = false;
            operation->code = operation->code < 0 ? operation->code : DLFS_E_TIMEOUT;
            finish(queue, number);
        } else {
            append(queue, &queue->waiting, number);
        }
    }
}

/* ---- completions ----------------------------------------------------------------------------- */

static bool is_generic(const struct spdk_nvme_cpl *completion, unsigned code)
{
    return completion->status.sct == SPDK_NVME_SCT_GENERIC && completion->status.sc == code;
}

static bool was_aborted(const struct spdk_nvme_cpl *completion)
{
    return is_generic(completion, SPDK_NVME_SC_ABORTED_SQ_DELETION) ||
           is_generic(completion, SPDK_NVME_SC_ABORTED_BY_REQUEST);
}

static int code_of(const struct spdk_nvme_cpl *completion)
{
    return is_generic(completion, SPDK_NVME_SC_LBA_OUT_OF_RANGE)
               ? DLFS_E_TRUNCATED
               : nvme_status_code((uint16_t)command_result(completion).status);
}

static void request_free(struct queue *queue, struct request *request)
{
    uint32_t *list = request->bounce != NULL ? &queue->free_bounced : &queue->free_request;
    request->next = *list;
    *list = (uint32_t)(request - queue->requests);
}

static void request_succeeded(const struct request *request, struct operation *operation)
{
    struct queue *queue = request->queue;
    if (request->bounced && operation->given.kind == DLFS_OP_READ) {
        memcpy((uint8_t *)operation->given.buffer + request->start, request->bounce,
               request->bytes);
    }
    if (operation->given.kind == DLFS_OP_WRITE) {
        nvme_durability_note(&queue->device->durability, queue->incarnation);
    }
}

/* Notes a request that the controller may have executed or not. */
static void request_aborted(const struct request *request, struct operation *operation)
{
    operation->retry = true;
    operation->unanswered = true;
    if (operation->given.kind == DLFS_OP_WRITE) {
        request->queue->write_lost = true;
    }
}

static void request_end(struct queue *queue, struct request *request)
{
    struct operation *operation = &queue->operations[request->operation];
    queue->writes_in_flight -= operation->given.kind == DLFS_OP_WRITE;
    operation->requests_in_flight--;
    request_free(queue, request);
}

/* SPDK's callback, in the thread that polls or disconnects. */
static void request_done(void *argument, const struct spdk_nvme_cpl *completion)
{
    struct request *request = argument;
    struct queue *queue = request->queue;
    struct operation *operation = &queue->operations[request->operation];
    uint32_t number = request->operation;
    if (operation->given.kind == OP_COMMAND) {
        struct raw_command *raw = operation->given.buffer;
        *raw->result = command_result(completion);
        operation->code =
            was_aborted(completion) && operation->code == 0 ? DLFS_E_LOST : operation->code;
    } else if (spdk_likely(!spdk_nvme_cpl_is_error(completion))) {
        request_succeeded(request, operation);
    } else if (was_aborted(completion)) {
        request_aborted(request, operation);
    } else if (is_generic(completion, SPDK_NVME_SC_COMMAND_TRANSIENT_TRANSPORT_ERROR)) {
        operation->retry = true;
    } else if (operation->code == 0) {
        operation->code = code_of(completion);
    }
    request_end(queue, request);
    finish_or_retry(queue, number);
}

/* ---- issuing --------------------------------------------------------------------------------- */

/* Takes a free request, with bounce memory if bounced; NULL if there is none. */
static struct request *request_take(struct queue *queue, bool bounced)
{
    uint32_t *list =
        bounced || queue->free_request == NONE ? &queue->free_bounced : &queue->free_request;
    if (*list == NONE) {
        return NULL;
    }
    struct request *request = &queue->requests[*list];
    *list = request->next;
    return request;
}

static bool needs_bounce(const struct queue *queue, const dlfs_operation *given)
{
    if (given->kind >= OP_FLUSH) {
        return false; /* no data, or data in SPDK's memory */
    }
    return queue->needs_dma && !range_holds(queue->range, given->buffer, given->length_bytes);
}

static int submit_request(struct queue *queue, const struct operation *operation,
                          struct request *request)
{
    const dlfs_operation *given = &operation->given;
    uint8_t *data = (uint8_t *)given->buffer + request->start;
    uint32_t block_bytes = queue->device->base.block_bytes;
    uint64_t first = (given->offset_bytes + request->start) / block_bytes;
    uint32_t blocks = request->bytes / block_bytes;
    if (request->bounced) {
        data = request->bounce;
    }
    if (given->kind == DLFS_OP_READ) {
        return spdk_nvme_ns_cmd_read(queue->ns, queue->spdk, data, first, blocks, request_done,
                                     request, 0);
    }
    if (given->kind == DLFS_OP_WRITE) {
        if (request->bounced) {
            memcpy(data, (uint8_t *)given->buffer + request->start, request->bytes);
        }
        return spdk_nvme_ns_cmd_write(queue->ns, queue->spdk, data, first, blocks, request_done,
                                      request, 0);
    }
    if (given->kind == OP_FLUSH) {
        return spdk_nvme_ns_cmd_flush(queue->ns, queue->spdk, request_done, request);
    }
    struct raw_command *raw = given->buffer;
    struct spdk_nvme_cmd command;
    command_encode(raw->command, &command);
    return spdk_nvme_ctrlr_cmd_io_raw(queue->controller->spdk, queue->spdk, &command, raw->data,
                                      raw->data_bytes, request_done, request);
}

/*
 * Returns 0 if a write may be issued now. Returns -EAGAIN until its controller has quiesced, its
 * queue pair is connected and the lease is confirmed; -EKEYEXPIRED if the lease has expired.
 */
static int write_permit(struct queue *queue, struct operation *operation)
{
    int permit = nvme_write_permit(&queue->device->write_limit, queue->incarnation);
    if (permit == -EKEYEXPIRED) {
        return permit;
    }
    uint64_t now = operation->not_before_ns != 0 || operation->was_delayed ? monotonic_ns() : 0;
    if (permit < 0 || queue->down_since_ns != 0 || now < operation->not_before_ns) {
        operation->was_delayed = true;
        return -EAGAIN;
    }
    if (operation->was_delayed) { /* it is issued later than it was submitted */
        set_deadline(queue, operation, now);
        operation->was_delayed = false;
    }
    return 0;
}

/* Returns the next request of an operation, counted as in flight; NULL if none is free. */
static struct request *next_request(struct queue *queue, uint32_t number)
{
    struct operation *operation = &queue->operations[number];
    bool bounced = needs_bounce(queue, &operation->given);
    struct request *request = request_take(queue, bounced);
    if (request == NULL) {
        return NULL;
    }
    uint64_t left = operation->given.length_bytes - operation->issued_bytes;
    uint32_t limit = bounced ? BOUNCE_BYTES : REQUEST_BYTES_MAX;
    request->start = operation->issued_bytes;
    request->bytes = left < limit ? (uint32_t)left : limit;
    request->operation = number;
    request->bounced = bounced;
    operation->requests_in_flight++;
    operation->issued_bytes += request->bytes;
    queue->writes_in_flight += operation->given.kind == DLFS_OP_WRITE;
    return request;
}

/* Issues the next request of an operation. Returns 0, -EAGAIN if it cannot be issued now, -ENXIO if
 * the connection is gone. Any other error becomes the operation's code. */
static int issue_next_request(struct queue *queue, uint32_t number)
{
    struct operation *operation = &queue->operations[number];
    int code = operation->given.kind == DLFS_OP_WRITE ? write_permit(queue, operation) : 0;
    if (code == 0) {
        struct request *request = next_request(queue, number);
        code = request != NULL ? submit_request(queue, operation, request) : -EAGAIN;
        if (request != NULL && code < 0) {
            operation->issued_bytes -= request->bytes;
            request_end(queue, request);
        }
    }
    if (code == -ENXIO) {
        return code;
    }
    if (code == -EAGAIN || code == -ENOMEM) {
        return -EAGAIN;
    }
    operation->code = operation->code < 0 ? operation->code : code;
    return 0;
}

bool operations_issue(struct queue *queue)
{
    while (queue->waiting.first != NONE) {
        uint32_t number = queue->waiting.first;
        struct operation *operation = &queue->operations[number];
        int code = issued_all(operation) ? 0 : issue_next_request(queue, number);
        if (code < 0) {
            return code != -ENXIO;
        }
        if (issued_all(operation)) {
            (void)take(queue, &queue->waiting);
            operation->waiting = false;
            finish_or_retry(queue, number);
        }
    }
    return true;
}

/* ---- adding and taking operations ------------------------------------------------------------ */

void operation_add(struct queue *queue, const dlfs_operation *given, uint64_t now)
{
    uint32_t number = queue->free_operation;
    struct operation *operation = &queue->operations[number];
    uint64_t deadline_ns = now + queue->device->timeout_ms * NS_PER_MS;
    queue->free_operation = operation->next;
    *operation = (struct operation){.given = *given,
                                    .deadline_ns = deadline_ns,
                                    .end_ns = deadline_ns + queue->device->reconnect_ms * NS_PER_MS,
                                    .waiting = true,
                                    .used = true};
    append(queue, &queue->waiting, number);
}

uint32_t operations_take_finished(struct queue *queue, dlfs_completion *completions, uint32_t count)
{
    uint32_t filled = 0;
    while (filled < count && queue->finished.first != NONE) {
        uint32_t number = take(queue, &queue->finished);
        queue->finished_count--;
        struct operation *operation = &queue->operations[number];
        int64_t result =
            operation->code < 0 ? operation->code : (int64_t)operation->given.length_bytes;
        completions[filled++] = (dlfs_completion){.tag = operation->given.tag, .result = result};
        operation->used = false;
        operation->next = queue->free_operation;
        queue->free_operation = number;
    }
    return filled;
}

static bool is_overdue(const struct operation *operation, uint64_t now)
{
    return operation->used && operation->requests_in_flight > 0 && now > operation->deadline_ns;
}

static void set_code(struct operation *operation, int code)
{
    operation->code = operation->code < 0 ? operation->code : code;
}

void operations_fail_writes(struct queue *queue, int code)
{
    for (uint32_t number = 0; number < queue->depth; number++) {
        struct operation *operation = &queue->operations[number];
        if (operation->used && operation->requests_in_flight > 0 &&
            operation->given.kind == DLFS_OP_WRITE) {
            set_code(operation, code);
        }
    }
}

bool operations_time_out(struct queue *queue, uint64_t now)
{
    bool late = false;
    for (uint32_t number = 0; number < queue->depth; number++) {
        if (is_overdue(&queue->operations[number], now)) {
            set_code(&queue->operations[number], DLFS_E_TIMEOUT);
            late = true;
        }
    }
    if (late) {
        operations_fail_writes(queue, DLFS_E_TIMEOUT);
    }
    return late;
}

void operations_init(struct queue *queue)
{
    queue->waiting.first = NONE;
    queue->finished.first = NONE;
    queue->free_request = NONE;
    queue->free_bounced = NONE;
    for (uint32_t number = 0; number < queue->depth; number++) {
        queue->operations[number].next = number + 1;
    }
    for (uint32_t number = queue->request_count; number-- > 0;) {
        struct request *request = &queue->requests[number];
        request->queue = queue;
        if (number < queue->bounce_count) {
            request->bounce = queue->bounce + (size_t)number * BOUNCE_BYTES;
        }
        request_free(queue, request);
    }
}
