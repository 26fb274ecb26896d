/*
 * Files and block devices through io_uring: one ring per queue pair, one io_uring_enter per batch
 * submitted, the file registered, and buffers too if the caller announced their range.
 *
 * Threads. A ring may move between threads, one at a time. This excludes
 * IORING_SETUP_SINGLE_ISSUER, and DEFER_TASKRUN which needs it: the kernel would refuse the second
 * thread. With COOP_TASKRUN the kernel finishes requests when the thread that submitted them next
 * enters the kernel, without interrupting it, which saves 0.5 us of CPU a read. TASKRUN_FLAG marks
 * in the ring that there is work to enter the kernel for. If one thread computes while another one
 * polls, a completion is delayed until the next clock tick at worst.
 *
 * An operation occupies an entry until its completion is returned. If the kernel transfers less
 * than requested, the entry requests the remainder. If it transfers nothing (the end of the file),
 * the result is DLFS_E_TRUNCATED.
 *
 * Source: io_uring(7), io_uring_setup(2), io_uring_enter(2).
 */
#include "device/file.h"
#include "platform/clock.h"

#include <errno.h>

#ifdef DLFS_HAVE_URING

#include <liburing.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define REAP_BATCH 64u
#define RING_FLAGS (IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG)
/*
 * Pause before the next submission when the kernel is short of memory and no request is in flight.
 */
#define PAUSE_NS UINT64_C(1000000)
/* The kernel's limit for one registered buffer; a longer range is registered as several buffers. */
#define REGISTERED_BYTES_MAX (UINT64_C(1) << 30)
#define REGISTERED_COUNT_MAX 1024u

struct uring_entry {
    uint8_t *buffer; /* address of the remaining bytes */
    uint64_t offset_bytes;
    uint64_t tag;
    uint32_t left_bytes;
    uint32_t length_bytes;
    uint32_t kind;
    uint32_t interrupted;
    uint32_t next_free;
};

struct uring_queue {
    dlfs_queue base;
    struct io_uring ring;
    int descriptor;
    bool file_registered;
    uintptr_t range_base; /* registered range; range_bytes 0: none */
    size_t range_bytes;
    uint32_t first_free;
    struct uring_entry entries[]; /* [depth] */
};

/* ---- requests -------------------------------------------------------------------------------- */

/* Returns the number of the registered buffer that contains a whole request, or -1. */
static int registered_index(const struct uring_queue *queue, const uint8_t *buffer,
                            uint32_t length_bytes)
{
    uintptr_t start = (uintptr_t)buffer;
    if (start < queue->range_base || length_bytes > queue->range_bytes ||
        start - queue->range_base > queue->range_bytes - length_bytes) {
        return -1;
    }
    uint64_t first = (start - queue->range_base) / REGISTERED_BYTES_MAX;
    uint64_t last = (start - queue->range_base + length_bytes - 1) / REGISTERED_BYTES_MAX;
    return first == last ? (int)first : -1;
}

/*
 * Fills a request for the remainder of an entry. The ring always has room, because an entry has at
 * most one request.
 */
static void entry_prepare(struct uring_queue *queue, uint32_t number)
{
    struct uring_entry *entry = &queue->entries[number];
    struct io_uring_sqe *request = io_uring_get_sqe(&queue->ring);
    uint32_t length = entry->left_bytes;
    if (length > DLFS_REQUEST_BYTES_MAX) {
        length = DLFS_REQUEST_BYTES_MAX;
    }
    int index = registered_index(queue, entry->buffer, length);
    bool fixed = index >= 0;
    uint8_t opcode = entry->kind == DLFS_OP_WRITE
                         ? (fixed ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE)
                         : (fixed ? IORING_OP_READ_FIXED : IORING_OP_READ);
    int file = queue->file_registered ? 0 : queue->descriptor;
    io_uring_prep_rw(opcode, request, file, entry->buffer, length, entry->offset_bytes);
    if (fixed) {
        request->buf_index = (uint16_t)index;
    }
    if (queue->file_registered) {
        request->flags |= IOSQE_FIXED_FILE;
    }
    io_uring_sqe_set_data64(request, number);
}

static bool is_transient(int error)
{
    return error == -EAGAIN || error == -EBUSY || error == -ENOMEM || error == -EINTR;
}

/*
 * Submits prepared requests to the kernel. Those that it refuses for now stay prepared, and poll
 * submits them again.
 */
static int ring_flush(struct uring_queue *queue)
{
    while (io_uring_sq_ready(&queue->ring) > 0) {
        int submitted = io_uring_submit(&queue->ring);
        if (submitted == -EINTR) {
            continue;
        }
        if (submitted < 0) {
            return submitted;
        }
        if (submitted == 0) {
            return -EAGAIN;
        }
    }
    return 0;
}

static int uring_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct uring_queue *queue = (struct uring_queue *)base;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = queue->first_free;
        struct uring_entry *entry = &queue->entries[number];
        queue->first_free = entry->next_free;
        entry->buffer = operations[i].buffer;
        entry->offset_bytes = operations[i].offset_bytes;
        entry->tag = operations[i].tag;
        entry->left_bytes = operations[i].length_bytes;
        entry->length_bytes = operations[i].length_bytes;
        entry->kind = operations[i].kind;
        entry->interrupted = 0;
        entry_prepare(queue, number);
    }
    /* The operations are accepted whatever the result: poll reports a lasting error. */
    (void)ring_flush(queue);
    return (int)count;
}

/* ---- completions ----------------------------------------------------------------------------- */

/*
 * Processes the kernel's result for an entry. Returns true if the entry is finished, false if its
 * remainder was prepared again.
 */
static bool entry_advance(struct uring_queue *queue, uint32_t number, int32_t answer,
                          int64_t *result)
{
    struct uring_entry *entry = &queue->entries[number];
    if (answer == -EINTR || answer == -EAGAIN || answer == -ECANCELED) {
        if (entry->interrupted < DLFS_INTERRUPTED_MAX) {
            entry->interrupted++;
            entry_prepare(queue, number);
            return false;
        }
    }
    if (answer < 0) {
        *result = file_result(answer);
        return true;
    }
    uint32_t done = (uint32_t)answer;
    if (done >= entry->left_bytes) {
        *result = (int64_t)entry->length_bytes;
        return true;
    }
    if (done == 0 || done % queue->base.device->block_bytes != 0) {
        *result = DLFS_E_TRUNCATED;
        return true;
    }
    entry->buffer += done;
    entry->offset_bytes += done;
    entry->left_bytes -= done;
    entry_prepare(queue, number);
    return false;
}

static uint32_t ring_reap(struct uring_queue *queue, dlfs_completion *completions, uint32_t count)
{
    struct io_uring_cqe *entries[REAP_BATCH];
    uint32_t filled = 0;
    while (filled < count) {
        uint32_t want = count - filled < REAP_BATCH ? count - filled : REAP_BATCH;
        uint32_t got = io_uring_peek_batch_cqe(&queue->ring, entries, want);
        for (uint32_t i = 0; i < got; i++) {
            uint32_t number = (uint32_t)io_uring_cqe_get_data64(entries[i]);
            int64_t result;
            if (!entry_advance(queue, number, entries[i]->res, &result)) {
                continue;
            }
            struct uring_entry *entry = &queue->entries[number];
            completions[filled++] = (dlfs_completion){.tag = entry->tag, .result = result};
            entry->next_free = queue->first_free;
            queue->first_free = number;
        }
        io_uring_cq_advance(&queue->ring, got);
        if (got < want) {
            break;
        }
    }
    return filled;
}

/* Waits for one completion, a signal or the time-out. Returns 0, or the error of a broken ring. */
static int ring_wait(struct uring_queue *queue, uint64_t left_ns)
{
    struct io_uring_cqe *entry = NULL;
    struct __kernel_timespec limit = {.tv_sec = (int64_t)(left_ns / UINT64_C(1000000000)),
                                      .tv_nsec = (long long)(left_ns % UINT64_C(1000000000))};
    bool forever = left_ns == UINT64_MAX;
    int error = io_uring_wait_cqes(&queue->ring, &entry, 1, forever ? NULL : &limit, NULL);
    if (error == -ETIME || error >= 0 || is_transient(error)) {
        return 0;
    }
    return error;
}

static int uring_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count,
                      int timeout_ms)
{
    struct uring_queue *queue = (struct uring_queue *)base;
    struct deadline deadline = deadline_after(timeout_ms);
    for (;;) {
        uint32_t filled = ring_reap(queue, completions, count);
        int error = ring_flush(queue);
        if (filled > 0) {
            return (int)filled;
        }
        if (error < 0 && !is_transient(error)) {
            return error;
        }
        uint64_t left_ns = deadline_left_ns(&deadline);
        if (left_ns == 0) {
            return 0;
        }
        if (io_uring_sq_ready(&queue->ring) >= base->in_flight) {
            struct timespec pause = clock_timespec(left_ns < PAUSE_NS ? left_ns : PAUSE_NS);
            (void)nanosleep(&pause, NULL);
            continue;
        }
        error = ring_wait(queue, left_ns);
        if (error < 0) {
            return error;
        }
    }
}

/*
 * Returns the ring's own descriptor, which is readable while it has completions: tasks are not
 * deferred, so the kernel posts completions by itself. An eventfd would only add a wake-up.
 */
static int uring_descriptor(dlfs_queue *base)
{
    return ((const struct uring_queue *)base)->ring.ring_fd;
}

/* ---- registered buffers ---------------------------------------------------------------------- */

static void ring_unregister(struct uring_queue *queue)
{
    if (queue->range_bytes > 0) {
        (void)io_uring_unregister_buffers(&queue->ring);
        queue->range_base = 0;
        queue->range_bytes = 0;
    }
}

static int uring_register(dlfs_queue *base, void *start, size_t bytes)
{
    struct uring_queue *queue = (struct uring_queue *)base;
    ring_unregister(queue);
    uint64_t pieces = (bytes + REGISTERED_BYTES_MAX - 1) / REGISTERED_BYTES_MAX;
    if (pieces == 0 || pieces > REGISTERED_COUNT_MAX) {
        return 0;
    }
    struct iovec *vectors = calloc(pieces, sizeof *vectors);
    if (vectors == NULL) {
        return 0;
    }
    for (uint64_t i = 0; i < pieces; i++) {
        uint64_t left = bytes - i * REGISTERED_BYTES_MAX;
        vectors[i].iov_base = (uint8_t *)start + i * REGISTERED_BYTES_MAX;
        vectors[i].iov_len = left < REGISTERED_BYTES_MAX ? left : REGISTERED_BYTES_MAX;
    }
    int error = io_uring_register_buffers(&queue->ring, vectors, (unsigned)pieces);
    free(vectors);
    if (error == 0) {
        queue->range_base = (uintptr_t)start;
        queue->range_bytes = bytes;
    }
    /*
     * Only a bad address is an error of the caller. After others (mostly RLIMIT_MEMLOCK) reads
     * without registered buffers do.
     */
    return error == -EFAULT ? error : 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void uring_queue_destroy(dlfs_queue *base)
{
    struct uring_queue *queue = (struct uring_queue *)base;
    io_uring_queue_exit(&queue->ring);
    free(queue);
}

static const struct dlfs_queue_ops uring_queue_ops = {
    .submit = uring_submit,
    .poll = uring_poll,
    .descriptor = uring_descriptor,
    .register_range = uring_register,
    .destroy = uring_queue_destroy,
    /* unmaps and closes the child's copies; the ring stays open in the parent */
    .abandon = uring_queue_destroy,
};

static int ring_create(uint32_t entries, struct io_uring *ring)
{
    int error = io_uring_queue_init(entries, ring, RING_FLAGS);
    if (error == -EINVAL) { /* kernels before 5.19 */
        error = io_uring_queue_init(entries, ring, 0);
    }
    if (error < 0) {
        return error;
    }
    if ((ring->features & IORING_FEAT_EXT_ARG) ==
        0) { /* kernels before 5.11: a wait has no timeout */
        io_uring_queue_exit(ring);
        return -ENOSYS;
    }
    return 0;
}

int dlfs_uring_probe(void)
{
    struct io_uring ring;
    int error = ring_create(1, &ring);
    if (error == 0) {
        io_uring_queue_exit(&ring);
    }
    return error;
}

int dlfs_uring_queue_create(dlfs_device *device, uint32_t depth,
                            const struct dlfs_connect_limit *limit, dlfs_queue **out)
{
    (void)limit;
    struct uring_queue *queue = calloc(1, sizeof *queue + depth * sizeof queue->entries[0]);
    if (queue == NULL) {
        return -ENOMEM;
    }
    int error = ring_create(depth, &queue->ring);
    if (error < 0) {
        free(queue);
        return error;
    }
    queue->descriptor = ((const struct dlfs_file_device *)device)->descriptor;
    /* A ring that has the file registered would keep it open, also in a forked child: the lock of a
     * writer lies on the open file, which may be replaced (dlfs_device_descriptor). */
    queue->file_registered =
        !device->writable && io_uring_register_files(&queue->ring, &queue->descriptor, 1) == 0;
    for (uint32_t i = 0; i < depth; i++) {
        queue->entries[i].next_free = i + 1;
    }
    queue->base.ops = &uring_queue_ops;
    *out = &queue->base;
    return 0;
}

#else /* built without liburing: threads do the I/O */

int dlfs_uring_probe(void)
{
    return -ENOSYS;
}

int dlfs_uring_queue_create(dlfs_device *device, uint32_t depth,
                            const struct dlfs_connect_limit *limit, dlfs_queue **out)
{
    (void)limit;
    (void)device;
    (void)depth;
    (void)out;
    return -ENOSYS;
}

#endif
