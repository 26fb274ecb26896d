/* There are at most as many upcalls as threads, so a linked list is fast enough. */
#include "upcall.h"

#include <errno.h>
#include <time.h>

#include "platform/clock.h"

void upcall_queue_init(struct upcall_queue *queue, struct receivers *receivers)
{
    (void)pthread_mutex_init(&queue->lock, NULL);
    (void)condition_init(&queue->posted);
    (void)condition_init(&queue->replied);
    queue->receivers = receivers;
}

void upcall_queue_destroy(struct upcall_queue *queue)
{
    (void)pthread_cond_destroy(&queue->replied);
    (void)pthread_cond_destroy(&queue->posted);
    (void)pthread_mutex_destroy(&queue->lock);
}

void upcall_queue_close(struct upcall_queue *queue)
{
    (void)pthread_mutex_lock(&queue->lock);
    queue->closed = true;
    (void)pthread_cond_broadcast(&queue->posted);
    (void)pthread_cond_broadcast(&queue->replied);
    (void)pthread_mutex_unlock(&queue->lock);
}

/* ---- the mount's side ------------------------------------------------------------------------ */

int upcall_send(struct upcall_queue *queue, struct upcall *upcall)
{
    (void)atomic_fetch_add_explicit(&queue->count, 1, memory_order_relaxed);
    receivers_release(queue->receivers);
    upcall->fetched = upcall->replied = false;
    upcall->next = NULL;
    (void)pthread_mutex_lock(&queue->lock);
    upcall->request.id = ++queue->last_id;
    struct upcall **last = &queue->first;
    while (*last != NULL) {
        last = &(*last)->next;
    }
    *last = upcall;
    (void)pthread_cond_signal(&queue->posted);
    while (!upcall->replied && !queue->closed) {
        (void)pthread_cond_wait(&queue->replied, &queue->lock);
    }
    struct upcall **at = &queue->first;
    while (*at != upcall) {
        at = &(*at)->next;
    }
    *at = upcall->next;
    bool replied = upcall->replied;
    (void)pthread_mutex_unlock(&queue->lock);
    return replied ? upcall->reply.error : ENOTCONN;
}

int upcall_report_failure(struct upcall_queue *queue, uint32_t dataset, uint32_t reader,
                          const dlfs_failure *failure)
{
    struct upcall upcall = {.request = {.kind = DLFS_FUSE_UPCALL_REPORT_FAILURE,
                                        .dataset = dataset,
                                        .failure = *failure,
                                        .reader = reader}};
    int error = upcall_send(queue, &upcall);
    return error > 0 ? error : EIO;
}

int upcall_errno(struct upcall_queue *queue, uint32_t dataset, int code)
{
    switch (code) {
    case -ENOENT:
    case -ENOTDIR:
    case -ENOMEM:
    case -ESTALE:
        return -code;
    default: {
        dlfs_failure failure = {.code = code, .member = UINT32_MAX};
        return upcall_report_failure(queue, dataset, DLFS_FUSE_NO_READER, &failure);
    }
    }
}

/* ---- the owner's side ------------------------------------------------------------------------ */

static struct upcall *first_unfetched(struct upcall_queue *queue)
{
    struct upcall *upcall = queue->first;
    while (upcall != NULL && upcall->fetched) {
        upcall = upcall->next;
    }
    return upcall;
}

/* Waits for an upcall or the end of the mount. Returns false if the timeout has passed. */
static bool wait_for_upcall(struct upcall_queue *queue, int timeout_ms)
{
    struct deadline deadline = deadline_after(timeout_ms);
    struct timespec until = clock_timespec(deadline.at_ns);
    while (first_unfetched(queue) == NULL && !queue->closed) {
        if (deadline.never) {
            (void)pthread_cond_wait(&queue->posted, &queue->lock);
        } else if (pthread_cond_timedwait(&queue->posted, &queue->lock, &until) == ETIMEDOUT) {
            return false;
        }
    }
    return true;
}

int upcall_fetch(struct upcall_queue *queue, int timeout_ms, dlfs_fuse_upcall *out)
{
    int code = 0;
    (void)pthread_mutex_lock(&queue->lock);
    if (wait_for_upcall(queue, timeout_ms)) {
        code = queue->closed ? -ESHUTDOWN : 1;
        struct upcall *upcall = first_unfetched(queue);
        if (code == 1) {
            upcall->fetched = true;
            *out = upcall->request;
        }
    }
    (void)pthread_mutex_unlock(&queue->lock);
    return code;
}

int upcall_reply(struct upcall_queue *queue, const dlfs_fuse_reply *reply)
{
    (void)pthread_mutex_lock(&queue->lock);
    struct upcall *upcall = queue->first;
    while (upcall != NULL && upcall->request.id != reply->id) {
        upcall = upcall->next;
    }
    if (upcall != NULL) {
        upcall->reply = *reply;
        upcall->replied = true;
        (void)pthread_cond_broadcast(&queue->replied);
    }
    (void)pthread_mutex_unlock(&queue->lock);
    return upcall != NULL ? 0 : -ENOENT;
}
