/*
 * Upcalls: requests that a thread of the mount hands to the owner, and waits for.
 *
 * A handler posts an upcall and blocks; the owner fetches it, does the work and replies. When the
 * mount ends, every upcall fails with ENOTCONN, so that no thread waits for an owner that is gone.
 *
 * Threads: any at once; one lock protects the queue.
 */
#ifndef DLFS_FUSE_UPCALL_H
#define DLFS_FUSE_UPCALL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "dlfs_fuse.h"
#include "request.h"
#include "threads/receivers.h"

/* An upcall; lies on the stack of the thread that waits for the reply. */
struct upcall {
    dlfs_fuse_upcall request;
    const struct reply_path *kernel; /* where the owner's data goes; NULL: it has none */
    int error;                       /* of the reply */
    bool fetched;
    bool replied;
    struct upcall *next;
};

struct upcall_queue {
    pthread_mutex_t lock;
    pthread_cond_t posted;
    pthread_cond_t replied;
    struct upcall *first; /* in the order of posting, until the reply has come */
    uint64_t last_id;
    bool closed;
    struct receivers *receivers; /* the receiver gives way before it waits for a reply */
};

void upcall_queue_init(struct upcall_queue *queue, struct receivers *receivers);
void upcall_queue_destroy(struct upcall_queue *queue);
/* Fails all upcalls, and later ones, with ENOTCONN. */
void upcall_queue_close(struct upcall_queue *queue);

/* Functions return 0 or an errno > 0. */

/* Posts an upcall and waits for the reply. Returns the reply's error; ENOTCONN if the mount ends.
 */
int upcall_send(struct upcall_queue *queue, struct upcall *upcall);
/* Has the owner answer a request of the kernel, and waits until it has. */
void upcall_forward(struct upcall_queue *queue, const struct kernel_request *request);
/*
 * Has the owner log a failure of a dataset or of one sample, which a reader of the dataset reported
 * (or DLFS_FUSE_NO_READER). Returns the errno of the request; EAGAIN: read again.
 */
int upcall_report_failure(struct upcall_queue *queue, uint32_t dataset, uint32_t reader,
                          const dlfs_failure *failure);
/* Converts an error code of libdlfs into an errno; reports codes that programs do not expect. */
int upcall_errno(struct upcall_queue *queue, uint32_t dataset, int code);

#endif
