/*
 * The functions of dlfs_fuse.h. Requests come through /dev/fuse (loop.c). Where the kernel offers
 * io_uring, other threads answer most of them (uring.c).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mount.h"
#include "operations.h"
#include "platform/clock.h"
#include "threads/uring.h"

#define BUSY_POLL_US_MAX 10000u
#define NOTIFY_RESEND 7                   /* FUSE_NOTIFY_RESEND, of protocol 7.40 */
#define OVER_IO_URING (UINT64_C(1) << 41) /* FUSE_OVER_IO_URING of INIT's 64 flags */
#define PAGES_DEFAULT 32u                 /* pages of a request unless INIT's reply says more */

/* ---- INIT ------------------------------------------------------------------------------------ */

static uint64_t payload_bytes_of(const struct fuse_init_out *init)
{
    uint64_t pages = (init->flags & FUSE_MAX_PAGES) != 0 ? init->max_pages : PAGES_DEFAULT;
    uint64_t bytes = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    return bytes < init->max_write ? init->max_write : bytes;
}

/* Prepares for io_uring, if the kernel offers it. Returns the number of queues, or why there are
 * none. */
static int prepare_rings(struct dlfs_fuse *fuse, const struct fuse_init_in *init,
                         const struct fuse_init_out *reply)
{
    if ((init->flags & FUSE_INIT_EXT) == 0 || (init->flags2 & OVER_IO_URING >> 32) == 0) {
        return -EOPNOTSUPP;
    }
    if ((fuse->config.flags & DLFS_FUSE_NO_URING) != 0) {
        return -ECANCELED;
    }
    return rings_start(fuse, payload_bytes_of(reply), &fuse->rings);
}

/*
 * Answers INIT. Once the reply has accepted io_uring, the kernel sends nothing until the queues are
 * registered or it has refused one; so nothing but the registration itself may fail by then.
 */
static int answer_init(struct dlfs_fuse *fuse)
{
    struct fuse_in_header header;
    struct fuse_init_in init;
    struct fuse_init_out reply;
    memcpy(&header, fuse->init_request, sizeof header);
    const struct reply_path path = {.fuse = fuse,
                                    .unique = header.unique,
                                    .send = send_to_device,
                                    .kernel = fuse->config.kernel};
    int code = negotiate(fuse, fuse->init_request, fuse->config.init_bytes, &init, &reply);
    if (code < 0) {
        reply_error(&path, -code);
        return code;
    }
    if ((fuse->config.flags & DLFS_FUSE_RESUME) != 0) {
        /* All requests only read, so one that was answered twice does no harm. */
        const struct fuse_out_header resend = {.len = sizeof resend, .error = NOTIFY_RESEND};
        atomic_store(&fuse->uring, -ECANCELED);
        return write(fuse->config.kernel, &resend, sizeof resend) < 0 ? -errno : 0;
    }
    int queues = prepare_rings(fuse, &init, &reply);
    if (queues > 0) {
        reply.flags |= FUSE_INIT_EXT;
        reply.flags2 |= OVER_IO_URING >> 32;
    }
    /* Before the first request, which may be answered while this thread still waits. */
    atomic_store(&fuse->uring, queues);
    if (reply_data(&path, &reply, sizeof reply) && queues > 0) {
        code = rings_register(fuse->rings);
        if (code < 0) {
            atomic_store(&fuse->uring, code);
        }
    }
    return 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

DLFS_API uint32_t dlfs_fuse_version(void)
{
    return DLFS_FUSE_VERSION;
}

static int initialise(struct dlfs_fuse *fuse, const dlfs_fuse_config *config)
{
    fuse->config = *config;
    fuse->config.init = NULL;
    atomic_init(&fuse->uring, -EINPROGRESS);
    (void)pthread_mutex_init(&fuse->lock, NULL);
    (void)condition_init(&fuse->ended);
    loop_init(&fuse->loop);
    file_cache_init(&fuse->cache);
    readahead_init(&fuse->readahead);
    readahead_thread_init(&fuse->readahead_thread);
    receivers_init(&fuse->receivers, config->busy_poll_us);
    upcall_queue_init(&fuse->upcalls, &fuse->receivers);
    dataset_table_init(&fuse->datasets, &fuse->upcalls);
    (void)pthread_mutex_init(&fuse->early_lock, NULL);
    fuse->init_request = malloc(config->init_bytes);
    if (fuse->init_request == NULL) {
        return -ENOMEM;
    }
    memcpy(fuse->init_request, config->init, config->init_bytes);
    return 0;
}

static bool is_valid(const dlfs_fuse_config *config)
{
    const uint32_t kept = DLFS_FUSE_KEPT | DLFS_FUSE_NO_URING;
    bool flags_agree = (config->flags & (DLFS_FUSE_KEPT | DLFS_FUSE_RESUME)) == 0 ||
                       (config->flags & kept) == kept;
    return flags_agree && config->kernel >= 0 && config->init != NULL &&
           config->init_bytes >= sizeof(struct fuse_in_header) && config->threads_max > 0 &&
           config->threads_max <= THREADS_MAX && config->busy_poll_us <= BUSY_POLL_US_MAX &&
           (config->file_mode & ~0777u) == 0;
}

DLFS_API int dlfs_fuse_create(const dlfs_fuse_config *config, dlfs_fuse **out)
{
    if (!is_valid(config)) {
        return -EINVAL;
    }
    struct dlfs_fuse *fuse = calloc(1, sizeof *fuse);
    if (fuse == NULL) {
        return -ENOMEM;
    }
    int code = initialise(fuse, config);
    if (code == 0) {
        *out = fuse;
    } else {
        dlfs_fuse_destroy(fuse);
    }
    return code;
}

DLFS_API void dlfs_fuse_destroy(dlfs_fuse *fuse)
{
    if (fuse == NULL) {
        return;
    }
    rings_destroy(fuse->rings);
    readahead_thread_destroy(&fuse->readahead_thread);
    free(fuse->init_request);
    file_cache_destroy(&fuse->cache);
    early_read_drop(fuse);
    dataset_table_destroy(&fuse->datasets);
    upcall_queue_destroy(&fuse->upcalls);
    receivers_destroy(&fuse->receivers);
    readahead_destroy(&fuse->readahead);
    loop_destroy(&fuse->loop);
    (void)pthread_cond_destroy(&fuse->ended);
    (void)pthread_mutex_destroy(&fuse->early_lock);
    (void)pthread_mutex_destroy(&fuse->lock);
    free(fuse);
}

DLFS_API int dlfs_fuse_run(dlfs_fuse *fuse)
{
    (void)pthread_mutex_lock(&fuse->lock);
    bool again = fuse->running;
    bool start = !fuse->stopping && !again;
    fuse->running = start || again;
    (void)pthread_mutex_unlock(&fuse->lock);
    if (!start) {
        return again ? -EALREADY : 0;
    }
    int code = readahead_thread_start(&fuse->readahead_thread, read_ahead_job, fuse);
    code = code < 0 ? code : answer_init(fuse);
    code = code < 0 ? code : loop_run(fuse);
    int failure = fuse->rings != NULL ? rings_stop(fuse->rings) : 0;
    readahead_thread_stop(&fuse->readahead_thread);
    early_read_drop(fuse);
    (void)pthread_mutex_lock(&fuse->lock);
    fuse->running = false;
    fuse->stopping = true;
    upcall_queue_close(&fuse->upcalls);
    (void)pthread_cond_broadcast(&fuse->ended);
    (void)pthread_mutex_unlock(&fuse->lock);
    return failure < 0 ? failure : code;
}
