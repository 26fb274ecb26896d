/*
 * The queue pairs of a device, shared by all threads that read from it. A thread acquires one while
 * it has operations in flight, and releases it afterwards. The target and QUEUES_MAX limit their
 * number. A thread that finds none waits in line, first come, first served. Threads that have
 * acquired a queue pair check now and then whether others wait, and release it if so.
 *
 * One lock, for short critical sections, protects the queue pairs of all devices: no queue pair is
 * created or destroyed under it. After a fork, the child finds the lock free and no waiters, and
 * destroys the queue pairs that it inherited.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "device/device.h"
#include "platform/clock.h"

#define QUEUES_MAX 128u
#define FULL_NS UINT64_C(1000000000)      /* pause after a target refused a queue pair */
#define IDLE_NS_MAX UINT64_C(10000000000) /* a queue pair idle for longer is destroyed */
#define RETRY_NS UINT64_C(20000000)       /* time between two attempts of a waiter */
#define WAIT_MS 5000                      /* longest wait of dlfs_queue_create */
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

/* Wakes all waiters: a device has room for another queue pair. */
static void wake_waiters(dlfs_device *device)
{
    if (atomic_load(&device->queues.waiting) == 0) {
        return;
    }
    (void)pthread_mutex_lock(&lock);
    device->queues.full_until_ns = 0;
    (void)pthread_cond_broadcast(&changed);
    (void)pthread_mutex_unlock(&lock);
}

void dlfs_queue_destroy(dlfs_queue *queue)
{
    if (queue == NULL) {
        return;
    }
    dlfs_device *device = queue->device;
    dlfs_queue_close(queue);
    wake_waiters(device);
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

static void waiter_add(struct dlfs_queues *queues, struct dlfs_queue_waiter *waiter)
{
    if (waiter->state != DLFS_WAITER_NONE) {
        return;
    }
    waiter->state = DLFS_WAITER_QUEUED;
    waiter->next = NULL;
    struct dlfs_queue_waiter **place = &queues->waiters;
    while (*place != NULL) {
        place = &(*place)->next;
    }
    *place = waiter;
    atomic_fetch_add(&queues->waiting, 1);
}

/* Takes a waiter out of the line. Its state stays: the waiting thread reads it without the lock. */
static void line_remove(struct dlfs_queues *queues, const struct dlfs_queue_waiter *waiter)
{
    struct dlfs_queue_waiter **place = &queues->waiters;
    while (*place != NULL && *place != waiter) {
        place = &(*place)->next;
    }
    if (*place == waiter) {
        *place = waiter->next;
        atomic_fetch_sub(&queues->waiting, 1);
    }
}

static void waiter_remove(struct dlfs_queues *queues, struct dlfs_queue_waiter *waiter)
{
    if (waiter->state == DLFS_WAITER_QUEUED) {
        line_remove(queues, waiter);
        waiter->state = DLFS_WAITER_NONE;
    }
}

static void waiter_serve(struct dlfs_queues *queues, struct dlfs_queue_waiter *waiter,
                         dlfs_queue *queue)
{
    line_remove(queues, waiter);
    waiter->queue = queue;
    waiter->state = DLFS_WAITER_SERVED;
    (void)pthread_cond_broadcast(&changed);
}

/*
 * In a forked child, removes all queue pairs and waiters of the parent; returns its idle queue
 * pairs.
 */
static dlfs_queue *forget_parents(struct dlfs_queues *queues)
{
    uint32_t process = dlfs_process();
    if (queues->process == process) {
        return NULL;
    }
    dlfs_queue *idle = queues->idle;
    queues->process = process;
    queues->idle = NULL;
    queues->waiters = NULL;
    queues->full_until_ns = 0;
    atomic_store(&queues->waiting, 0);
    atomic_store(&queues->creating, 0);
    return idle;
}

static dlfs_queue *take_idle(struct dlfs_queues *queues, uint32_t depth)
{
    for (dlfs_queue **place = &queues->idle; *place != NULL; place = &(*place)->next) {
        dlfs_queue *queue = *place;
        if (queue->depth == depth) {
            *place = queue->next;
            queue->next = NULL;
            return queue;
        }
    }
    return NULL;
}

/* Removes the queue pairs that were idle for too long, which are the last of the list. Others may
 * have been released after now_ns. */
static dlfs_queue *take_expired(struct dlfs_queues *queues, uint64_t now_ns)
{
    dlfs_queue **place = &queues->idle;
    while (*place != NULL && now_ns < (*place)->idle_since_ns + IDLE_NS_MAX) {
        place = &(*place)->next;
    }
    dlfs_queue *expired = *place;
    *place = NULL;
    return expired;
}

/* ---- acquiring and releasing ----------------------------------------------------------------- */

/* Returns true if this process has no queue pair of a device. */
static bool has_none(const dlfs_device *device)
{
    return atomic_load(&device->queue_count) == 0;
}

/*
 * Creates a queue pair for the first waiter. -EAGAIN: the target has no more. DLFS_E_LIMIT: it has
 * none at all. That is so if this process had none before the refusal and has none after it: those
 * for which the target refused may be destroyed meanwhile.
 */
static int create_for(dlfs_device *device, uint32_t depth, struct dlfs_queue_waiter *waiter,
                      dlfs_queue **out)
{
    struct dlfs_queues *queues = &device->queues;
    bool alone = atomic_fetch_add(&queues->creating, 1) == 0 && has_none(device);
    int code = dlfs_queue_make(device, depth, &waiter->limit, out);
    alone = atomic_fetch_sub(&queues->creating, 1) == 1 && alone && has_none(device);
    if (code != DLFS_E_LIMIT || alone) {
        dlfs_queue_waiter_leave(device,
                                waiter); /* another thread may have handed over one meanwhile */
        return code;
    }
    (void)pthread_mutex_lock(&lock);
    queues->full_until_ns = monotonic_ns() + FULL_NS;
    waiter_add(queues, waiter);
    (void)pthread_mutex_unlock(&lock);
    return -EAGAIN;
}

int dlfs_queue_acquire(dlfs_device *device, uint32_t depth, struct dlfs_queue_waiter *waiter,
                       dlfs_queue **out)
{
    struct dlfs_queues *queues = &device->queues;
    uint64_t now_ns = monotonic_ns();
    dlfs_queue *spare =
        NULL; /* idle queue pair of another depth, to be destroyed in favour of a new one */
    bool may_create = false;
    (void)pthread_mutex_lock(&lock);
    dlfs_queue *inherited = forget_parents(queues);
    dlfs_queue *queue = waiter->queue;
    waiter->queue = NULL;
    waiter->tried_ns = now_ns;
    waiter->depth = depth;
    if (queue != NULL) {
        waiter->state = DLFS_WAITER_NONE;
    } else if (queues->waiters == NULL || queues->waiters == waiter) {
        bool full =
            now_ns < queues->full_until_ns || atomic_load(&device->queue_count) >= QUEUES_MAX;
        queue = take_idle(queues, depth);
        if (queue == NULL && full && queues->idle != NULL) {
            spare = queues->idle;
            queues->idle = spare->next;
            spare->next = NULL;
        }
        may_create = queue == NULL && (!full || spare != NULL);
    }
    if (queue != NULL) {
        waiter_remove(queues, waiter);
    } else if (!may_create) {
        waiter_add(queues, waiter);
    }
    (void)pthread_mutex_unlock(&lock);
    destroy_all(inherited);
    destroy_all(spare);
    if (queue != NULL) {
        *out = queue;
        return 0;
    }
    return may_create ? create_for(device, depth, waiter, out) : -EAGAIN;
}

void dlfs_queue_release(dlfs_queue *queue)
{
    struct dlfs_queues *queues = &queue->device->queues;
    uint64_t now_ns = monotonic_ns();
    (void)pthread_mutex_lock(&lock);
    dlfs_queue *unused = forget_parents(queues);
    struct dlfs_queue_waiter *first = queues->waiters;
    bool reusable =
        queue->process == queues->process && (first == NULL || first->depth == queue->depth);
    if (reusable && first != NULL) {
        waiter_serve(queues, first, queue);
    } else if (reusable) {
        queue->idle_since_ns = now_ns;
        queue->next = queues->idle;
        queues->idle = queue;
        unused = unused != NULL ? unused : take_expired(queues, now_ns);
    }
    (void)pthread_mutex_unlock(&lock);
    destroy_all(unused);
    if (!reusable) {
        dlfs_queue_destroy(queue);
    }
}

void dlfs_queue_waiter_leave(dlfs_device *device, struct dlfs_queue_waiter *waiter)
{
    (void)pthread_mutex_lock(&lock);
    dlfs_queue *inherited = forget_parents(&device->queues);
    waiter_remove(&device->queues, waiter);
    dlfs_queue *queue = waiter->queue;
    waiter->queue = NULL;
    waiter->state = DLFS_WAITER_NONE;
    (void)pthread_mutex_unlock(&lock);
    destroy_all(inherited);
    if (queue != NULL) {
        dlfs_queue_release(queue);
    }
}

bool dlfs_queue_waiter_is_due(const struct dlfs_queue_waiter *waiter, uint64_t now_ns)
{
    return waiter->state != DLFS_WAITER_QUEUED || now_ns >= waiter->tried_ns + RETRY_NS;
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

void dlfs_queues_close(dlfs_device *device)
{
    (void)pthread_mutex_lock(&lock);
    dlfs_queue *idle = device->queues.idle;
    device->queues.idle = NULL;
    (void)pthread_mutex_unlock(&lock);
    destroy_all(idle);
}

uint32_t dlfs_queues_idle(const dlfs_device *device)
{
    uint32_t count = 0;
    (void)pthread_mutex_lock(&lock);
    for (const dlfs_queue *queue = device->queues.idle; queue != NULL; queue = queue->next) {
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

int dlfs_queue_create_until(dlfs_device *device, uint32_t depth, uint64_t until_ns,
                            dlfs_queue **out)
{
    if (device == NULL || out == NULL || depth == 0 || depth > DLFS_DEPTH_MAX) {
        return -EINVAL;
    }
    struct dlfs_queue_waiter waiter = {.limit.until_ns = until_ns};
    struct deadline deadline = deadline_after(WAIT_MS);
    int code;
    while ((code = dlfs_queue_acquire(device, depth, &waiter, out)) == -EAGAIN) {
        if (deadline_left_ns(&deadline) == 0) {
            dlfs_queue_waiter_leave(device, &waiter);
            return DLFS_E_LIMIT;
        }
        dlfs_queue_waiter_wait(&waiter, WAIT_STEP_MS);
    }
    return code;
}

int dlfs_queue_create(dlfs_device *device, uint32_t depth, dlfs_queue **out)
{
    return dlfs_queue_create_until(device, depth, 0, out);
}
