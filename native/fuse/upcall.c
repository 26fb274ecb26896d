/* There are at most as many upcalls as threads, so a linked list is fast enough. */
#include "upcall.h"

#include <errno.h>
#include <string.h>
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

int upcall_send(struct upcall_queue *queue, struct upcall *upcall)
{
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
    return replied ? upcall->error : ENOTCONN;
}

void upcall_forward(struct upcall_queue *queue, const struct kernel_request *request)
{
    struct upcall upcall = {.request = {.kind = request->opcode, .inode = request->inode},
                            .kernel = &request->reply};
    if (request->name != NULL) {
        memcpy(upcall.request.name, request->name, strlen(request->name));
    } else if (request->opcode == FUSE_READDIR || request->opcode == FUSE_READDIRPLUS) {
        struct fuse_read_in read;
        memcpy(&read, request->arguments, sizeof read);
        upcall.request.offset = read.offset;
        upcall.request.size = read.size < LISTING_BYTES_MAX ? read.size : LISTING_BYTES_MAX;
    }
    int error = upcall_send(queue, &upcall);
    if (error != 0) {
        reply_error(&request->reply, error);
    }
}

int upcall_report_failure(struct upcall_queue *queue, uint32_t dataset, uint32_t reader,
                          const dlfs_failure *failure)
{
    struct upcall upcall = {.request = {.kind = DLFS_FUSE_UPCALL_REPORT_FAILURE,
                                        .dataset = dataset,
                                        .failure = *failure,
                                        .reader = reader}};
    int error = upcall_send(queue, &upcall);
    return error != 0 ? error : EAGAIN;
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
