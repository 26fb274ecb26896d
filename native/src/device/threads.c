/*
 * Files and block devices through a pool of threads, for systems that forbid io_uring: one pool per
 * queue pair. Its threads are started as operations need them and end with the queue pair.
 *
 * One mutex protects the queue pair's two lists of entries: waiting (for a thread) and finished
 * (for poll). The threads block all signals, so that the program's own threads handle them.
 */
#include "device/file.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "platform/clock.h"
#include "platform/thread.h"

/* More threads only wait for the device; glibc's own AIO stops at 20. */
#define THREADS_MAX 32u
#define THREAD_STACK_BYTES (256u << 10)
#define NO_ENTRY UINT32_MAX

struct threads_entry {
    dlfs_operation operation;
    int64_t result;
    uint32_t next;
};

/* A first-in, first-out list of entries. */
struct entry_list {
    uint32_t first;
    uint32_t last;
};

struct threads_queue {
    dlfs_queue base;
    int descriptor;
    uint32_t block_bytes;
    pthread_mutex_t mutex;
    pthread_cond_t work; /* signalled when waiting grows, or stopping is set */
    pthread_cond_t done; /* signalled when finished grows */
    struct entry_list waiting;
    struct entry_list finished;
    uint32_t first_free;
    uint32_t waiting_count;
    uint32_t idle_count;
    uint32_t thread_count;
    bool stopping;
    pthread_t threads[THREADS_MAX];
    struct threads_entry entries[]; /* [depth] */
};

static void list_append(struct threads_queue *queue, struct entry_list *list, uint32_t number)
{
    queue->entries[number].next = NO_ENTRY;
    if (list->first == NO_ENTRY) {
        list->first = number;
    } else {
        queue->entries[list->last].next = number;
    }
    list->last = number;
}

static uint32_t list_take(struct threads_queue *queue, struct entry_list *list)
{
    uint32_t number = list->first;
    list->first = queue->entries[number].next;
    return number;
}

/* ---- the threads ----------------------------------------------------------------------------- */

static ssize_t transfer_some(int descriptor, const dlfs_operation *operation, uint32_t done)
{
    size_t length = operation->length_bytes - done;
    if (length > DLFS_REQUEST_BYTES_MAX) {
        length = DLFS_REQUEST_BYTES_MAX;
    }
    uint8_t *buffer = (uint8_t *)operation->buffer + done;
    off_t offset = (off_t)(operation->offset_bytes + done);
    if (operation->kind == DLFS_OP_WRITE) {
        return pwrite(descriptor, buffer, length, offset);
    }
    return pread(descriptor, buffer, length, offset);
}

static int64_t transfer_whole(const struct threads_queue *queue, const dlfs_operation *operation)
{
    uint32_t done = 0;
    uint32_t interrupted = 0;
    while (done < operation->length_bytes) {
        ssize_t got = transfer_some(queue->descriptor, operation, done);
        if (got < 0 && (errno == EINTR || errno == EAGAIN) && interrupted < DLFS_INTERRUPTED_MAX) {
            interrupted++;
            continue;
        }
        if (got < 0) {
            return file_result(-errno);
        }
        if (got == 0 || got % (ssize_t)queue->block_bytes != 0) {
            return DLFS_E_TRUNCATED; /* the end of the file */
        }
        done += (uint32_t)got;
    }
    return (int64_t)done;
}

static void *thread_main(void *argument)
{
    struct threads_queue *queue = argument;
    (void)pthread_mutex_lock(&queue->mutex);
    for (;;) {
        while (queue->waiting.first == NO_ENTRY && !queue->stopping) {
            queue->idle_count++;
            (void)pthread_cond_wait(&queue->work, &queue->mutex);
            queue->idle_count--;
        }
        if (queue->waiting.first == NO_ENTRY) {
            break;
        }
        uint32_t number = list_take(queue, &queue->waiting);
        queue->waiting_count--;
        (void)pthread_mutex_unlock(&queue->mutex);
        int64_t result = transfer_whole(queue, &queue->entries[number].operation);
        (void)pthread_mutex_lock(&queue->mutex);
        queue->entries[number].result = result;
        list_append(queue, &queue->finished, number);
        (void)pthread_cond_signal(&queue->done);
    }
    (void)pthread_mutex_unlock(&queue->mutex);
    return NULL;
}

/* Starts one more thread. The caller holds the mutex. */
static int thread_add(struct threads_queue *queue)
{
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error != 0) {
        return -error;
    }
    (void)pthread_attr_setstacksize(&attributes, THREAD_STACK_BYTES);
    int code = thread_start(&queue->threads[queue->thread_count], &attributes, thread_main, queue);
    (void)pthread_attr_destroy(&attributes);
    if (code == 0) {
        queue->thread_count++;
    }
    return code;
}

/*
 * Starts as many threads as the waiting operations can use. Returns an error only if the pool has
 * no thread at all.
 */
static int threads_provide(struct threads_queue *queue, uint32_t more)
{
    uint32_t wanted = queue->waiting_count + more;
    uint32_t limit = queue->base.depth < THREADS_MAX ? queue->base.depth : THREADS_MAX;
    uint32_t started = 0;
    while (queue->idle_count + started < wanted && queue->thread_count < limit) {
        int error = thread_add(queue);
        if (error < 0) {
            return queue->thread_count > 0 ? 0 : error;
        }
        started++;
    }
    return 0;
}

/* ---- the queue pair -------------------------------------------------------------------------- */

static int threads_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct threads_queue *queue = (struct threads_queue *)base;
    (void)pthread_mutex_lock(&queue->mutex);
    int error = threads_provide(queue, count);
    if (error < 0) {
        (void)pthread_mutex_unlock(&queue->mutex);
        return error;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = queue->first_free;
        queue->first_free = queue->entries[number].next;
        queue->entries[number].operation = operations[i];
        list_append(queue, &queue->waiting, number);
    }
    queue->waiting_count += count;
    (void)(count == 1 ? pthread_cond_signal(&queue->work) : pthread_cond_broadcast(&queue->work));
    (void)pthread_mutex_unlock(&queue->mutex);
    return (int)count;
}

static uint32_t take_finished(struct threads_queue *queue, dlfs_completion *completions,
                              uint32_t count)
{
    uint32_t filled = 0;
    while (filled < count && queue->finished.first != NO_ENTRY) {
        uint32_t number = list_take(queue, &queue->finished);
        struct threads_entry *entry = &queue->entries[number];
        completions[filled++] =
            (dlfs_completion){.tag = entry->operation.tag, .result = entry->result};
        entry->next = queue->first_free;
        queue->first_free = number;
    }
    return filled;
}

/* Waits until an operation has finished; returns false when the time has passed. */
static bool wait_finished(struct threads_queue *queue, const struct deadline *deadline)
{
    while (queue->finished.first == NO_ENTRY) {
        if (deadline->never) {
            (void)pthread_cond_wait(&queue->done, &queue->mutex);
            continue;
        }
        if (deadline_left_ns(deadline) == 0) {
            return false;
        }
        condition_wait_until(&queue->done, &queue->mutex, deadline->at_ns);
    }
    return true;
}

static int threads_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count,
                        int timeout_ms)
{
    struct threads_queue *queue = (struct threads_queue *)base;
    struct deadline deadline = deadline_after(timeout_ms);
    uint32_t filled = 0;
    (void)pthread_mutex_lock(&queue->mutex);
    if (wait_finished(queue, &deadline)) {
        filled = take_finished(queue, completions, count);
    }
    (void)pthread_mutex_unlock(&queue->mutex);
    return (int)filled;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void threads_queue_destroy(dlfs_queue *base)
{
    struct threads_queue *queue = (struct threads_queue *)base;
    (void)pthread_mutex_lock(&queue->mutex);
    queue->stopping = true;
    (void)pthread_cond_broadcast(&queue->work);
    (void)pthread_mutex_unlock(&queue->mutex);
    for (uint32_t i = 0; i < queue->thread_count; i++) {
        (void)pthread_join(queue->threads[i], NULL);
    }
    (void)pthread_cond_destroy(&queue->done);
    (void)pthread_cond_destroy(&queue->work);
    (void)pthread_mutex_destroy(&queue->mutex);
    free(queue);
}

/*
 * Frees the memory alone: the threads are the parent's, and one of them may hold the mutex for
 * ever.
 */
static void threads_queue_abandon(dlfs_queue *base)
{
    free(base);
}

static const struct dlfs_queue_ops threads_queue_ops = {
    .submit = threads_submit,
    .poll = threads_poll,
    .register_range = NULL,
    .destroy = threads_queue_destroy,
    .abandon = threads_queue_abandon,
};

int dlfs_threads_queue_create(dlfs_device *device, uint32_t depth,
                              const struct dlfs_connect_limit *limit, dlfs_queue **out)
{
    (void)limit;
    struct threads_queue *queue = calloc(1, sizeof *queue + depth * sizeof queue->entries[0]);
    if (queue == NULL) {
        return -ENOMEM;
    }
    int error = condition_init(&queue->done);
    if (error < 0) {
        free(queue);
        return error;
    }
    (void)pthread_mutex_init(&queue->mutex, NULL);
    (void)pthread_cond_init(&queue->work, NULL);
    queue->descriptor = ((const struct dlfs_file_device *)device)->descriptor;
    queue->block_bytes = device->block_bytes;
    queue->waiting.first = NO_ENTRY;
    queue->finished.first = NO_ENTRY;
    for (uint32_t i = 0; i < depth; i++) {
        queue->entries[i].next = i + 1;
    }
    queue->base.ops = &threads_queue_ops;
    *out = &queue->base;
    return 0;
}
