/* The functions of dlfs_fuse.h for the owner of a running mount: upcalls, datasets, its end. */
#include <errno.h>
#include <time.h>

#include "mount.h"
#include "operations.h"
#include "platform/clock.h"

#define STOP_NS UINT64_C(100000000) /* longest wait of dlfs_fuse_stop */

/* ---- upcalls --------------------------------------------------------------------------------- */

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

DLFS_API int dlfs_fuse_next_upcall(dlfs_fuse *fuse, int timeout_ms, dlfs_fuse_upcall *out)
{
    struct upcall_queue *queue = &fuse->upcalls;
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

DLFS_API int dlfs_fuse_reply_upcall(dlfs_fuse *fuse, const dlfs_fuse_reply *reply)
{
    struct upcall_queue *queue = &fuse->upcalls;
    (void)pthread_mutex_lock(&queue->lock);
    struct upcall *upcall = queue->first;
    while (upcall != NULL && upcall->request.id != reply->id) {
        upcall = upcall->next;
    }
    if (upcall != NULL) {
        if (upcall->kernel != NULL && reply->error == 0) {
            (void)reply_data(upcall->kernel, reply->data, reply->data_bytes);
        }
        upcall->error = reply->error;
        upcall->replied = true;
        (void)pthread_cond_broadcast(&queue->replied);
    }
    (void)pthread_mutex_unlock(&queue->lock);
    return upcall != NULL ? 0 : -ENOENT;
}

/* ---- datasets -------------------------------------------------------------------------------- */

/* Unpins what the open files of a dataset have in its reader's memory, and gives up the early read.
 */
static void drop_reads(struct dlfs_fuse *fuse, struct dataset_entry *dataset)
{
    file_cache_expire(&fuse->cache, &dataset->pins, 0);
    early_read_drop(fuse);
}

DLFS_API int dlfs_fuse_add_dataset(dlfs_fuse *fuse, uint32_t number, uint32_t version,
                                   uint32_t generation, int64_t modified_ns)
{
    if (!is_dataset_number(number)) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &fuse->datasets.entries[number];
    (void)pthread_mutex_lock(&fuse->datasets.lock);
    if (atomic_load(&dataset->state) == DATASET_ABSENT) {
        dataset->number = number;
        dataset->version = version;
        dataset->generation = generation;
        dataset->modified_ns = modified_ns;
        atomic_store(&dataset->state, DATASET_REGISTERED);
    }
    (void)pthread_mutex_unlock(&fuse->datasets.lock);
    return 0;
}

DLFS_API int dlfs_fuse_open_dataset(dlfs_fuse *fuse, uint32_t number,
                                    const dlfs_directory *directory, dlfs_reader *reader)
{
    if (!is_dataset_number(number) || directory == NULL || reader == NULL) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &fuse->datasets.entries[number];
    (void)pthread_mutex_lock(&fuse->datasets.lock);
    uint32_t state = atomic_load(&dataset->state);
    if (state == DATASET_REGISTERED) {
        dataset->directory = directory;
        dataset->readers[0] = reader;
        dataset->locations = dlfs_directory_locations(directory);
        dataset->count = dlfs_directory_count(directory);
        atomic_store(&dataset->state, DATASET_OPEN);
    }
    (void)pthread_mutex_unlock(&fuse->datasets.lock);
    if (state == DATASET_WITHDRAWN) {
        return -ESTALE;
    }
    return state == DATASET_ABSENT ? -EINVAL : 0;
}

DLFS_API int dlfs_fuse_replace_reader(dlfs_fuse *fuse, uint32_t number, dlfs_reader *reader)
{
    if (!is_dataset_number(number) || reader == NULL) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &fuse->datasets.entries[number];
    (void)pthread_mutex_lock(&fuse->datasets.lock);
    uint32_t next = atomic_load(&dataset->reader_number) + 1;
    while (atomic_load(&dataset->reads[next % 2]) > 0) {
        (void)pthread_cond_wait(&fuse->datasets.unused, &fuse->datasets.lock);
    }
    bool open = atomic_load(&dataset->state) == DATASET_OPEN;
    if (open) {
        dataset->readers[next % 2] = reader;
        atomic_store(&dataset->reader_number, next);
    }
    (void)pthread_mutex_unlock(&fuse->datasets.lock);
    drop_reads(fuse, dataset); /* they may use the reader that was replaced */
    return open ? 0 : -ESTALE;
}

DLFS_API int dlfs_fuse_await_reader(dlfs_fuse *fuse, uint32_t number, int wait)
{
    if (!is_dataset_number(number)) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &fuse->datasets.entries[number];
    (void)pthread_mutex_lock(&fuse->datasets.lock);
    _Atomic uint32_t *before = &dataset->reads[(atomic_load(&dataset->reader_number) + 1) % 2];
    uint32_t reads = atomic_load(before);
    while (wait && reads > 0) {
        (void)pthread_cond_wait(&fuse->datasets.unused, &fuse->datasets.lock);
        reads = atomic_load(before);
    }
    (void)pthread_mutex_unlock(&fuse->datasets.lock);
    return reads > 0 ? 0 : 1;
}

DLFS_API int dlfs_fuse_withdraw_dataset(dlfs_fuse *fuse, uint32_t number)
{
    if (!is_dataset_number(number)) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &fuse->datasets.entries[number];
    (void)pthread_mutex_lock(&fuse->datasets.lock);
    atomic_store(&dataset->state, DATASET_WITHDRAWN);
    while (atomic_load(&dataset->users) > 0) {
        (void)pthread_cond_wait(&fuse->datasets.unused, &fuse->datasets.lock);
    }
    (void)pthread_mutex_unlock(&fuse->datasets.lock);
    drop_reads(fuse, dataset);
    return 0;
}

/* ---- memory and transport -------------------------------------------------------------------- */

DLFS_API void dlfs_fuse_expire_cache(dlfs_fuse *fuse, uint32_t age_ms)
{
    file_cache_expire(&fuse->cache, NULL, age_ms * UINT64_C(1000000));
    early_read_drop(fuse);
}

DLFS_API int dlfs_fuse_uring(dlfs_fuse *fuse)
{
    return atomic_load(&fuse->uring);
}

/* ---- the end --------------------------------------------------------------------------------- */

DLFS_API void dlfs_fuse_stop(dlfs_fuse *fuse)
{
    (void)pthread_mutex_lock(&fuse->lock);
    fuse->stopping = true;
    upcall_queue_close(&fuse->upcalls);
    loop_end(fuse);
    if (fuse->running) {
        condition_wait_until(&fuse->ended, &fuse->lock, monotonic_ns() + STOP_NS);
    }
    (void)pthread_mutex_unlock(&fuse->lock);
}
