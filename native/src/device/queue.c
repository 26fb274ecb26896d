/*
 * Queue pairs: they check every call, count operations in flight, and call the functions of the
 * kind. queues.c lends them to threads.
 *
 * A queue pair belongs to the process that created it. In a forked child it can only be destroyed,
 * which frees the child's copy and leaves the parent's alone. Every submit and poll checks this by
 * a count of forks, because getpid is a system call.
 */
#include <errno.h>
#include <pthread.h>

#include "device/device.h"
#include "platform/clock.h"

/* Silence after which reads in flight are dropped when their queue pair is destroyed. */
#define DROP_AFTER_MS 100
/* Silence after which operations in flight are taken to hang when their queue pair is to end. */
#define HANG_AFTER_MS 1000
#define TRANSFER_BATCH 64u

static _Atomic uint32_t process_number;

uint32_t dlfs_process(void)
{
    return atomic_load_explicit(&process_number, memory_order_relaxed);
}

static void count_fork(void)
{
    atomic_fetch_add_explicit(&process_number, 1, memory_order_relaxed);
}

__attribute__((constructor)) static void watch_forks(void)
{
    (void)pthread_atfork(NULL, NULL, count_fork);
}

int dlfs_queue_make(dlfs_device *device, uint32_t depth, const struct dlfs_connect_limit *limit,
                    dlfs_queue **out)
{
    dlfs_queue *queue;
    int code = device->ops->queue_create(device, depth, limit, &queue);
    if (code < 0) {
        return code;
    }
    queue->device = device;
    queue->depth = depth;
    queue->in_flight = 0;
    queue->process = dlfs_process();
    queue->next = NULL;
    atomic_fetch_add(&device->queue_count, 1);
    *out = queue;
    return 0;
}

static bool queue_is_foreign(const dlfs_queue *queue)
{
    return queue->process != dlfs_process();
}

/* Waits for the operations in flight: for reads that the kind can drop, as long as any answer
 * comes. */
static void queue_drain(dlfs_queue *queue)
{
    dlfs_completion completions[TRANSFER_BATCH];
    while (queue->in_flight > 0) {
        bool drops = queue->ops->drops_operations != NULL && queue->ops->drops_operations(queue);
        int got = dlfs_queue_poll(queue, completions, TRANSFER_BATCH, drops ? DROP_AFTER_MS : -1);
        if (got < 0 || (got == 0 && drops)) {
            return; /* the kind can complete no more operations, or ends them */
        }
    }
}

bool dlfs_queue_ends(dlfs_queue *queue)
{
    dlfs_completion completions[TRANSFER_BATCH];
    int got = 1;
    while (!queue_is_foreign(queue) && queue->in_flight > 0 && got > 0) {
        if (queue->ops->drops_operations != NULL && queue->ops->drops_operations(queue)) {
            return true;
        }
        got = dlfs_queue_poll(queue, completions, TRANSFER_BATCH, HANG_AFTER_MS);
    }
    return got != 0;
}

void dlfs_queue_close(dlfs_queue *queue)
{
    dlfs_device *device = queue->device;
    if (queue_is_foreign(queue)) {
        queue->ops->abandon(queue);
    } else {
        queue_drain(queue);
        queue->ops->destroy(queue);
    }
    atomic_fetch_sub(&device->queue_count, 1);
}

uint32_t dlfs_queue_depth(const dlfs_queue *queue)
{
    return queue->depth;
}

uint32_t dlfs_queue_in_flight(const dlfs_queue *queue)
{
    return queue->in_flight;
}

int dlfs_queue_register(dlfs_queue *queue, void *base, size_t bytes)
{
    if (queue_is_foreign(queue)) {
        return DLFS_E_CLOSED;
    }
    if (queue->in_flight > 0) {
        return -EBUSY;
    }
    if (base != NULL && (bytes == 0 || (uintptr_t)base > UINTPTR_MAX - bytes)) {
        return -EINVAL;
    }
    if (queue->ops->register_range == NULL) {
        return 0;
    }
    return queue->ops->register_range(queue, base, base == NULL ? 0 : bytes);
}

static int check_operation(const dlfs_device *device, const dlfs_operation *operation)
{
    uint64_t mask = device->block_bytes - 1u;
    uint64_t bits =
        (uint64_t)(uintptr_t)operation->buffer | operation->offset_bytes | operation->length_bytes;
    if (operation->buffer == NULL || operation->length_bytes == 0 || (bits & mask) != 0) {
        return -EINVAL;
    }
    if (operation->length_bytes > device->size_bytes ||
        operation->offset_bytes > device->size_bytes - operation->length_bytes) {
        return -EINVAL;
    }
    if (operation->kind == DLFS_OP_WRITE) {
        return device->writable ? 0 : -EROFS;
    }
    return operation->kind == DLFS_OP_READ ? 0 : -EINVAL;
}

int dlfs_queue_submit(dlfs_queue *queue, const dlfs_operation *operations, uint32_t count)
{
    if (queue_is_foreign(queue)) {
        return DLFS_E_CLOSED;
    }
    if (operations == NULL && count > 0) {
        return -EINVAL;
    }
    for (uint32_t i = 0; i < count; i++) {
        int error = check_operation(queue->device, &operations[i]);
        if (error < 0) {
            return error;
        }
    }
    uint32_t room = queue->depth - queue->in_flight;
    if (count > room) {
        count = room;
    }
    if (count == 0) {
        return 0;
    }
    int accepted = queue->ops->submit(queue, operations, count);
    if (accepted > 0) {
        queue->in_flight += (uint32_t)accepted;
    }
    return accepted;
}

int dlfs_queue_poll(dlfs_queue *queue, dlfs_completion *completions, uint32_t count, int timeout_ms)
{
    if (queue_is_foreign(queue)) {
        return DLFS_E_CLOSED;
    }
    if (completions == NULL && count > 0) {
        return -EINVAL;
    }
    if (queue->in_flight == 0 || count == 0) {
        return 0;
    }
    int got = queue->ops->poll(queue, completions, count, timeout_ms);
    if (got > 0) {
        queue->in_flight -= (uint32_t)got;
    }
    return got;
}

int dlfs_queue_descriptor(dlfs_queue *queue)
{
    if (queue_is_foreign(queue)) {
        return DLFS_E_CLOSED;
    }
    return queue->ops->descriptor == NULL ? -ENOTSUP : queue->ops->descriptor(queue);
}

/*
 * Waits for at least one completion; *result gets the first error of one. Returns an error only if
 * the queue pair itself failed, or the time is over.
 */
static int transfer_poll(dlfs_queue *queue, const struct deadline *deadline, int *result)
{
    dlfs_completion completions[TRANSFER_BATCH];
    int timeout_ms = -1;
    if (!deadline->never) {
        uint64_t left_ms = deadline_left_ns(deadline) / 1000000 + 1;
        timeout_ms = left_ms < INT32_MAX ? (int)left_ms : INT32_MAX;
    }
    int got = dlfs_queue_poll(queue, completions, TRANSFER_BATCH, timeout_ms);
    if (got == 0 && deadline_left_ns(deadline) == 0) {
        return DLFS_E_TIMEOUT;
    }
    for (int i = 0; i < got; i++) {
        if (completions[i].result < 0 && *result == 0) {
            *result = (int)completions[i].result;
        }
    }
    return got < 0 ? got : 0;
}

/* Checks a transfer. first: its first operation. */
static int transfer_check(const dlfs_queue *queue, const dlfs_operation *first,
                          uint64_t length_bytes)
{
    uint32_t block_bytes = queue->device->block_bytes;
    uint64_t size_bytes = queue->device->size_bytes;
    if (queue_is_foreign(queue)) {
        return DLFS_E_CLOSED;
    }
    if (queue->in_flight > 0) {
        return -EBUSY;
    }
    if (length_bytes == 0) {
        return 0;
    }
    if (length_bytes % block_bytes != 0 || length_bytes > size_bytes ||
        first->offset_bytes > size_bytes - length_bytes || first->length_bytes == 0) {
        return -EINVAL;
    }
    return check_operation(queue->device, first);
}

/* Transfers a whole range. next: the first operation, without its length. */
static int transfer_run(dlfs_queue *queue, dlfs_operation next, uint64_t left_bytes,
                        uint32_t piece_bytes, struct deadline deadline)
{
    next.length_bytes = left_bytes < piece_bytes ? (uint32_t)left_bytes : piece_bytes;
    int result = transfer_check(queue, &next, left_bytes);
    if (result < 0) {
        return result;
    }
    for (;;) {
        while (result == 0 && left_bytes > 0 && queue->in_flight < queue->depth) {
            int accepted = dlfs_queue_submit(queue, &next, 1);
            if (accepted <= 0) {
                result = accepted;
                break;
            }
            next.buffer = (uint8_t *)next.buffer + next.length_bytes;
            next.offset_bytes += next.length_bytes;
            left_bytes -= next.length_bytes;
            next.length_bytes = left_bytes < piece_bytes ? (uint32_t)left_bytes : piece_bytes;
        }
        if (queue->in_flight == 0 && (result != 0 || left_bytes == 0)) {
            return result;
        }
        int error = transfer_poll(queue, &deadline, &result);
        if (error < 0) {
            return error;
        }
    }
}

int dlfs_queue_transfer(dlfs_queue *queue, uint32_t kind, void *buffer, uint64_t offset_bytes,
                        uint64_t length_bytes, uint32_t piece_bytes)
{
    dlfs_operation first = {.buffer = buffer, .offset_bytes = offset_bytes, .kind = kind};
    return transfer_run(queue, first, length_bytes, piece_bytes, deadline_after(-1));
}

int dlfs_queue_read_until(dlfs_queue *queue, void *buffer, uint64_t offset_bytes,
                          uint64_t length_bytes, uint32_t piece_bytes, uint64_t until_ns)
{
    dlfs_operation first = {.buffer = buffer, .offset_bytes = offset_bytes, .kind = DLFS_OP_READ};
    return transfer_run(queue, first, length_bytes, piece_bytes,
                        (struct deadline){.at_ns = until_ns});
}
