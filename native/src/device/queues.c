/*
 * The queue pairs of a device, shared by all threads that read from it. A thread borrows one while
 * it has operations under way, and gives it back. Their number is limited, by the target and by
 * QUEUES_MAX: a thread that finds none free waits in a line, first come, first served; the threads
 * that hold one look now and then whether the line is empty, and give way if it is not.
 *
 * One lock for all devices, held for moments: nothing is made or destroyed under it. A child that
 * is forked meanwhile finds it free, the line empty, and destroys what it inherited.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "device/device.h"
#include "platform/clock.h"

#define QUEUES_MAX 128u
#define FULL_NS UINT64_C(1000000000)  /* after a target refused one: until the next try */
#define REST_NS UINT64_C(10000000000) /* one that rests for so long is closed */
#define LOOK_NS UINT64_C(20000000)    /* between two looks at its waiter of a thread that waits */
#define WAIT_MS 5000                  /* in dlfs_queue_create, for a queue pair */
#define WAIT_STEP_MS 100

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;

static void before_fork(void)
{
    (void)pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    (void)pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void)
{
    (void)condition_init(&changed);
    (void)pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void prepare(void)
{
    (void)condition_init(&changed);
    (void)pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

static void destroy_all(dlfs_queue *queue)
{
    while (queue != NULL) {
        dlfs_queue *next = queue->next;
        dlfs_queue_destroy(queue);
        queue = next;
    }
}

/* ---- the line; with the lock held ------------------------------------------------------------ */

static void line_up(struct dlfs_queues *queues, struct dlfs_queue_waiter *waiter)
{
    if (waiter->state != DLFS_WAITER_NONE) {
        return;
    }
    waiter->state = DLFS_WAITER_QUEUED;
    waiter->next = NULL;
    struct dlfs_queue_waiter **place = &queues->line;
    while (*place != NULL) {
        place = &(*place)->next;
    }
    *place = waiter;
    atomic_fetch_add(&queues->waiting, 1);
}

static void leave_line(struct dlfs_queues *queues, struct dlfs_queue_waiter *waiter)
{
    if (waiter->state != DLFS_WAITER_QUEUED) {
        return;
    }
    struct dlfs_queue_waiter **place = &queues->line;
    while (*place != NULL && *place != waiter) {
        place = &(*place)->next;
    }
    if (*place == waiter) {
        *place = waiter->next;
        atomic_fetch_sub(&queues->waiting, 1);
    }
    waiter->state = DLFS_WAITER_NONE;
}

/* In a forked child, empties what is the parent's; returns its queue pairs at rest. */
static dlfs_queue *disown(struct dlfs_queues *queues)
{
    uint32_t generation = dlfs_generation();
    if (queues->generation == generation) {
        return NULL;
    }
    dlfs_queue *resting = queues->resting;
    queues->generation = generation;
    queues->resting = NULL;
    queues->line = NULL;
    queues->full_until_ns = 0;
    atomic_store(&queues->waiting, 0);
    return resting;
}

static dlfs_queue *take_resting(struct dlfs_queues *queues, uint32_t depth)
{
    for (dlfs_queue **place = &queues->resting; *place != NULL; place = &(*place)->next) {
        dlfs_queue *queue = *place;
        if (queue->depth == depth) {
            *place = queue->next;
            queue->next = NULL;
            return queue;
        }
    }
    return NULL;
}

/* Takes those out that have rested for too long, which lie behind the others. */
static dlfs_queue *take_expired(struct dlfs_queues *queues, uint64_t now_ns)
{
    dlfs_queue **place = &queues->resting;
    while (*place != NULL && now_ns - (*place)->rested_ns < REST_NS) {
        place = &(*place)->next;
    }
    dlfs_queue *expired = *place;
    *place = NULL;
    return expired;
}

/* ---- borrowing ------------------------------------------------------------------------------- */

/* Makes a queue pair for the first in line; -EAGAIN: the target has no more. */
static int make(dlfs_device *device, uint32_t depth, struct dlfs_queue_waiter *waiter,
                dlfs_queue **out)
{
    struct dlfs_queues *queues = &device->queues;
    int code = dlfs_queue_make(device, depth, out);
    if (code != DLFS_E_LIMIT || atomic_load(&device->queue_count) == 0) {
        dlfs_queue_waiter_leave(device, waiter); /* which may have been handed one meanwhile */
        return code;
    }
    (void)pthread_mutex_lock(&lock);
    queues->full_until_ns = monotonic_ns() + FULL_NS;
    line_up(queues, waiter);
    (void)pthread_mutex_unlock(&lock);
    return -EAGAIN;
}

int dlfs_queue_borrow(dlfs_device *device, uint32_t depth, struct dlfs_queue_waiter *waiter,
                      dlfs_queue **out)
{
    struct dlfs_queues *queues = &device->queues;
    uint64_t now_ns = monotonic_ns();
    dlfs_queue *spare = NULL; /* of another depth, where there may be no more of them */
    bool may_make = false;
    (void)pthread_mutex_lock(&lock);
    dlfs_queue *foreign = disown(queues);
    dlfs_queue *queue = waiter->queue;
    waiter->queue = NULL;
    waiter->looked_ns = now_ns;
    waiter->depth = depth;
    if (queue != NULL) {
        waiter->state = DLFS_WAITER_NONE;
    } else if (queues->line == NULL || queues->line == waiter) {
        bool full =
            now_ns < queues->full_until_ns || atomic_load(&device->queue_count) >= QUEUES_MAX;
        queue = take_resting(queues, depth);
        if (queue == NULL && full && queues->resting != NULL) {
            spare = queues->resting;
            queues->resting = spare->next;
            spare->next = NULL;
        }
        may_make = queue == NULL && (!full || spare != NULL);
    }
    if (queue != NULL) {
        leave_line(queues, waiter);
    } else if (!may_make) {
        line_up(queues, waiter);
    }
    (void)pthread_mutex_unlock(&lock);
    destroy_all(foreign);
    destroy_all(spare);
    if (queue != NULL) {
        *out = queue;
        return 0;
    }
    return may_make ? make(device, depth, waiter, out) : -EAGAIN;
}

void dlfs_queue_give_back(dlfs_queue *queue)
{
    struct dlfs_queues *queues = &queue->device->queues;
    uint64_t now_ns = monotonic_ns();
    (void)pthread_mutex_lock(&lock);
    dlfs_queue *ended = disown(queues);
    struct dlfs_queue_waiter *first = queues->line;
    bool kept =
        queue->generation == queues->generation && (first == NULL || first->depth == queue->depth);
    if (kept && first != NULL) {
        leave_line(queues, first);
        first->queue = queue;
        first->state = DLFS_WAITER_SERVED;
        (void)pthread_cond_broadcast(&changed);
    } else if (kept) {
        queue->rested_ns = now_ns;
        queue->next = queues->resting;
        queues->resting = queue;
        ended = ended != NULL ? ended : take_expired(queues, now_ns);
    }
    (void)pthread_mutex_unlock(&lock);
    destroy_all(ended);
    if (!kept) {
        dlfs_queue_destroy(queue);
    }
}

void dlfs_queue_waiter_leave(dlfs_device *device, struct dlfs_queue_waiter *waiter)
{
    (void)pthread_mutex_lock(&lock);
    dlfs_queue *foreign = disown(&device->queues);
    leave_line(&device->queues, waiter);
    dlfs_queue *queue = waiter->queue;
    waiter->queue = NULL;
    waiter->state = DLFS_WAITER_NONE;
    (void)pthread_mutex_unlock(&lock);
    destroy_all(foreign);
    if (queue != NULL) {
        dlfs_queue_give_back(queue);
    }
}

bool dlfs_queue_waiter_is_due(const struct dlfs_queue_waiter *waiter, uint64_t now_ns)
{
    return waiter->state != DLFS_WAITER_QUEUED || now_ns - waiter->looked_ns >= LOOK_NS;
}

void dlfs_queue_waiter_wait(struct dlfs_queue_waiter *waiter, int timeout_ms)
{
    uint64_t until_ns = monotonic_ns() + (uint64_t)timeout_ms * UINT64_C(1000000);
    (void)pthread_mutex_lock(&lock);
    if (waiter->state == DLFS_WAITER_QUEUED) {
        condition_wait_until(&changed, &lock, until_ns);
    }
    (void)pthread_mutex_unlock(&lock);
}

void dlfs_queues_changed(dlfs_device *device)
{
    if (atomic_load(&device->queues.waiting) == 0) {
        return;
    }
    (void)pthread_mutex_lock(&lock);
    device->queues.full_until_ns = 0;
    (void)pthread_cond_broadcast(&changed);
    (void)pthread_mutex_unlock(&lock);
}

void dlfs_queues_close(dlfs_device *device)
{
    (void)pthread_mutex_lock(&lock);
    dlfs_queue *resting = device->queues.resting;
    device->queues.resting = NULL;
    (void)pthread_mutex_unlock(&lock);
    destroy_all(resting);
}

uint32_t dlfs_queues_resting(const dlfs_device *device)
{
    uint32_t count = 0;
    (void)pthread_mutex_lock(&lock);
    for (const dlfs_queue *queue = device->queues.resting; queue != NULL; queue = queue->next) {
        count++;
    }
    (void)pthread_mutex_unlock(&lock);
    return count;
}

uint32_t dlfs_queues_max(dlfs_device *device)
{
    uint32_t most = device->ops->queues_max == NULL ? 0 : device->ops->queues_max(device);
    return most > 0 && most < QUEUES_MAX ? most : QUEUES_MAX;
}

/* ---- creating ------------------------------------------------------------------------------- */

int dlfs_queue_create(dlfs_device *device, uint32_t depth, dlfs_queue **out)
{
    if (device == NULL || out == NULL || depth == 0 || depth > DLFS_DEPTH_MAX) {
        return -EINVAL;
    }
    struct dlfs_queue_waiter waiter = {.queue = NULL};
    struct deadline deadline = deadline_after(WAIT_MS);
    int code;
    while ((code = dlfs_queue_borrow(device, depth, &waiter, out)) == -EAGAIN) {
        if (deadline_left_ns(&deadline) == 0) {
            dlfs_queue_waiter_leave(device, &waiter);
            return DLFS_E_LIMIT;
        }
        dlfs_queue_waiter_wait(&waiter, WAIT_STEP_MS);
    }
    return code;
}
