/*
 * The session with the kernel: mounting, the loop of threads, and what is agreed on at the start.
 *
 * The loop is libfuse's, with one descriptor of /dev/fuse for each thread. It waits for its threads
 * in sem_wait, so who stops it interrupts that with a signal, again and again, because the first
 * may come a moment too early.
 *
 * Files are not opened: the kernel is told once that there is no open (ENOSYS), and from then on
 * opens, and closes, without a word. A kernel that does not offer that has its opens answered.
 */
#include "platform/clock.h"
#include "service.h"

#include <errno.h>
#include <linux/fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define WAKE_SIGNAL (SIGRTMAX - 1)
#define WAKE_NS 5000000L
#define WAKE_TRIES 20u
#define BACKGROUND_MAX                                                         \
    64u /* requests that no program waits for yet: the kernel's own read-ahead \
         */
#define THREADS_MAX 256u
#define BUSY_POLL_US_MAX 10000u

#define WRITE_FLAGS (O_WRONLY | O_RDWR | O_TRUNC | O_APPEND)

/* ---- at the start ---------------------------------------------------------------------------- */

static void handle_init(void *userdata, struct fuse_conn_info *connection)
{
    struct dlfs_fuse *fuse = userdata;
    bool handles = (fuse->config.flags & DLFS_FUSE_HANDLES) != 0;
    fuse->handles = handles || (connection->capable & FUSE_CAP_NO_OPEN_SUPPORT) == 0;
    fuse->directory_handles = handles || (connection->capable & FUSE_CAP_NO_OPENDIR_SUPPORT) == 0;
    /* Else a file that is opened with O_TRUNC would be empty for the kernel, which asks nobody. */
    connection->want &= ~(unsigned)FUSE_CAP_ATOMIC_O_TRUNC;
    connection->want |= connection->capable & FUSE_CAP_EXPORT_SUPPORT;
    /* Nothing changes, so the kernel need not look at every read whether something has. */
    connection->want &= ~(unsigned)FUSE_CAP_AUTO_INVAL_DATA;
    /* Every listing brings attributes: who lists a folder is about to read what is in it. */
    connection->want &= ~(unsigned)FUSE_CAP_READDIRPLUS_AUTO;
    connection->max_background = BACKGROUND_MAX;
    connection->congestion_threshold = BACKGROUND_MAX * 3 / 4;
}

static void reply_open(fuse_req_t request, struct fuse_file_info *info, bool handles)
{
    count(&fuse_of(request)->counters.opens, 1);
    info->keep_cache = 1;
    info->cache_readdir = 1;
    if (handles) {
        (void)fuse_reply_open(request, info);
    } else {
        (void)fuse_reply_err(request, ENOSYS);
    }
}

static void handle_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
    (void)inode;
    if (info->flags & WRITE_FLAGS) {
        (void)fuse_reply_err(request, EROFS);
    } else {
        reply_open(request, info, fuse_of(request)->handles);
    }
}

static void handle_opendir(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
    (void)inode;
    reply_open(request, info, fuse_of(request)->directory_handles);
}

/* ---- whatever would change something --------------------------------------------------------- */

/* The kernel refuses by itself, until root remounts the file system for writing. */
static void refuse(fuse_req_t request)
{
    (void)fuse_reply_err(request, EROFS);
}

static void refuse_setattr(fuse_req_t request, fuse_ino_t inode, struct stat *attributes,
                           int to_set, struct fuse_file_info *info)
{
    (void)inode, (void)attributes, (void)to_set, (void)info;
    refuse(request);
}

static void refuse_mknod(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
                         dev_t device)
{
    (void)parent, (void)name, (void)mode, (void)device;
    refuse(request);
}

static void refuse_mkdir(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode)
{
    (void)parent, (void)name, (void)mode;
    refuse(request);
}

static void refuse_removal(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    (void)parent, (void)name;
    refuse(request);
}

static void refuse_symlink(fuse_req_t request, const char *target, fuse_ino_t parent,
                           const char *name)
{
    (void)target, (void)parent, (void)name;
    refuse(request);
}

static void refuse_rename(fuse_req_t request, fuse_ino_t parent, const char *name,
                          fuse_ino_t new_parent, const char *new_name, unsigned int flags)
{
    (void)parent, (void)name, (void)new_parent, (void)new_name, (void)flags;
    refuse(request);
}

static void refuse_link(fuse_req_t request, fuse_ino_t inode, fuse_ino_t new_parent,
                        const char *new_name)
{
    (void)inode, (void)new_parent, (void)new_name;
    refuse(request);
}

static void refuse_create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
                          struct fuse_file_info *info)
{
    (void)parent, (void)name, (void)mode, (void)info;
    refuse(request);
}

static void refuse_write(fuse_req_t request, fuse_ino_t inode, const char *data, size_t bytes,
                         off_t offset, struct fuse_file_info *info)
{
    (void)inode, (void)data, (void)bytes, (void)offset, (void)info;
    refuse(request);
}

static void refuse_setxattr(fuse_req_t request, fuse_ino_t inode, const char *name,
                            const char *value, size_t bytes, int flags)
{
    (void)inode, (void)name, (void)value, (void)bytes, (void)flags;
    refuse(request);
}

static void refuse_removexattr(fuse_req_t request, fuse_ino_t inode, const char *name)
{
    (void)inode, (void)name;
    refuse(request);
}

/* Nothing is to be forgotten: inode numbers are not remembered, and libfuse says so to the kernel.
 */
static const struct fuse_lowlevel_ops OPERATIONS = {
    .init = handle_init,
    .lookup = handle_lookup,
    .getattr = handle_getattr,
    .open = handle_open,
    .read = handle_read,
    .opendir = handle_opendir,
    .readdir = handle_readdir,
    .readdirplus = handle_readdirplus,
    .statfs = handle_statfs,
    .getxattr = handle_getxattr,
    .listxattr = handle_listxattr,
    .setattr = refuse_setattr,
    .mknod = refuse_mknod,
    .mkdir = refuse_mkdir,
    .unlink = refuse_removal,
    .rmdir = refuse_removal,
    .symlink = refuse_symlink,
    .rename = refuse_rename,
    .link = refuse_link,
    .create = refuse_create,
    .write = refuse_write,
    .setxattr = refuse_setxattr,
    .removexattr = refuse_removexattr,
};

/* ---- receiving ------------------------------------------------------------------------------- */

#define RECEIVES FUSE_VERSION >= FUSE_MAKE_VERSION(3, 13) /* libfuse lets us do it ourselves */

#if RECEIVES

/* The next request is likely to come at once: looks for it before the caller sleeps. */
static void stay_awake(struct listening *listening, int kernel)
{
    struct pollfd wait = {.fd = kernel, .events = POLLIN};
    if (!wakefulness_pays(&listening->kernel)) {
        return;
    }
    uint64_t until_ns = monotonic_ns() + (uint64_t)listening->awake_us * 1000;
    int ready = 0;
    while (ready == 0 && monotonic_ns() < until_ns) {
        ready = poll(&wait, 1, 0);
    }
    wakefulness_tried(&listening->kernel, ready > 0);
}

static ssize_t receive(int kernel, void *request, size_t bytes, void *userdata)
{
    struct listening *listening = &((struct dlfs_fuse *)userdata)->listening;
    if (listen_begin(listening)) {
        stay_awake(listening, kernel);
    }
    ssize_t got = read(kernel, request, bytes);
    struct fuse_in_header header;
    if (got >= (ssize_t)sizeof header) {
        memcpy(&header, request, sizeof header);
        if (header.pid != 0) { /* else no program waits for it */
            listen_heard(listening, header.pid);
        }
    }
    return got;
}

static ssize_t answer(int kernel, struct iovec *parts, int part_count, void *userdata)
{
    (void)userdata;
    return writev(kernel, parts, part_count);
}

static int receive_in_turn(struct fuse_session *session)
{
    static const struct fuse_custom_io ours = {.writev = answer, .read = receive};
    return fuse_session_custom_io(session, &ours, fuse_session_fd(session));
}

#else

static int receive_in_turn(struct fuse_session *session)
{
    (void)session; /* all threads listen: nobody takes a turn */
    return 0;
}

#endif

/* ---- mounting -------------------------------------------------------------------------------- */

DLFS_API uint32_t dlfs_fuse_version(void)
{
    return DLFS_FUSE_VERSION;
}

DLFS_API const char *dlfs_fuse_build(void)
{
    return fuse_pkgversion();
}

static int prepare(struct dlfs_fuse *fuse, const dlfs_fuse_config *config)
{
    fuse->config = *config;
    fuse->config.mountpoint = fuse->config.options = NULL;
    (void)pthread_mutex_init(&fuse->lock, NULL);
    (void)condition_init(&fuse->asked);
    (void)condition_init(&fuse->answered);
    (void)condition_init(&fuse->left);
    ahead_init(&fuse->ahead);
    listen_init(&fuse->listening, config->busy_poll_us);
    return held_create(config->held_bytes, &fuse->held);
}

static int mount_session(struct dlfs_fuse *fuse, const dlfs_fuse_config *config)
{
    struct fuse_args arguments = FUSE_ARGS_INIT(0, NULL);
    int code = -ENOMEM;
    if (fuse_opt_add_arg(&arguments, "dlfs") == 0 && fuse_opt_add_arg(&arguments, "-o") == 0 &&
        fuse_opt_add_arg(&arguments, config->options) == 0) {
        fuse->session = fuse_session_new(&arguments, &OPERATIONS, sizeof OPERATIONS, fuse);
        code = fuse->session == NULL ? -EINVAL : 0;
    }
    fuse_opt_free_args(&arguments);
    if (code == 0 && fuse_session_mount(fuse->session, config->mountpoint) != 0) {
        code = -EIO;
    }
    fuse->mounted = code == 0;
    if (code == 0 && config->busy_poll_us > 0) {
        code = receive_in_turn(fuse->session);
    }
    return code;
}

DLFS_API int dlfs_fuse_mount(const dlfs_fuse_config *config, dlfs_fuse **out)
{
    if (config->mountpoint == NULL || config->options == NULL || config->threads_max == 0 ||
        config->threads_max > THREADS_MAX || config->busy_poll_us > BUSY_POLL_US_MAX ||
        (config->file_mode & ~0777u) != 0) {
        return -EINVAL;
    }
    struct dlfs_fuse *fuse = calloc(1, sizeof *fuse);
    if (fuse == NULL) {
        return -ENOMEM;
    }
    int code = prepare(fuse, config);
    if (code == 0) {
        code = mount_session(fuse, config);
    }
    if (code == 0) {
        *out = fuse;
    } else {
        dlfs_fuse_destroy(fuse);
    }
    return code;
}

DLFS_API void dlfs_fuse_abandon(dlfs_fuse *fuse)
{
    fuse->mounted = false;
}

DLFS_API void dlfs_fuse_destroy(dlfs_fuse *fuse)
{
    if (fuse == NULL) {
        return;
    }
    if (fuse->mounted) {
        fuse_session_unmount(fuse->session);
    }
    if (fuse->session != NULL) {
        fuse_session_destroy(fuse->session);
    }
    root_free_lists(fuse);
    held_destroy(fuse->held);
    ahead_destroy(&fuse->ahead);
    listen_destroy(&fuse->listening);
    (void)pthread_cond_destroy(&fuse->left);
    (void)pthread_cond_destroy(&fuse->answered);
    (void)pthread_cond_destroy(&fuse->asked);
    (void)pthread_mutex_destroy(&fuse->lock);
    free(fuse);
}

/* ---- the loop -------------------------------------------------------------------------------- */

static void wake(int number)
{
    (void)number;
}

static int loop(struct dlfs_fuse *fuse)
{
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    if (config == NULL) {
        return -ENOMEM;
    }
    fuse_loop_cfg_set_clone_fd(config, 1);
    fuse_loop_cfg_set_max_threads(config, fuse->config.threads_max);
    fuse_loop_cfg_set_idle_threads(config, fuse->config.threads_max);
    int code = fuse_session_loop_mt(fuse->session, config);
    fuse_loop_cfg_destroy(config);
    return code;
}

/* Nobody asks or answers from now on; the lock is held. */
static void end(struct dlfs_fuse *fuse)
{
    fuse->stopping = true;
    fuse_session_exit(fuse->session);
    (void)pthread_cond_broadcast(&fuse->asked);
    (void)pthread_cond_broadcast(&fuse->answered);
}

DLFS_API int dlfs_fuse_run(dlfs_fuse *fuse)
{
    struct sigaction action = {.sa_handler = wake}; /* not SA_RESTART: it is to interrupt */
    if (sigaction(WAKE_SIGNAL, &action, NULL) != 0) {
        return -errno;
    }
    (void)pthread_mutex_lock(&fuse->lock);
    bool again = fuse->running;
    bool go = !fuse->stopping && !again;
    fuse->running = go || again;
    fuse->loop = go ? pthread_self() : fuse->loop;
    (void)pthread_mutex_unlock(&fuse->lock);
    if (!go) {
        return again ? -EALREADY : 0;
    }
    int code = loop(fuse);
    (void)pthread_mutex_lock(&fuse->lock);
    fuse->running = false;
    end(fuse);
    (void)pthread_cond_broadcast(&fuse->left);
    (void)pthread_mutex_unlock(&fuse->lock);
    return code;
}

DLFS_API void dlfs_fuse_stop(dlfs_fuse *fuse)
{
    (void)pthread_mutex_lock(&fuse->lock);
    end(fuse);
    for (uint32_t tries = 0; fuse->running && tries < WAKE_TRIES; tries++) {
        uint64_t until_ns = monotonic_ns() + WAKE_NS;
        (void)pthread_kill(fuse->loop, WAKE_SIGNAL);
        condition_wait_until(&fuse->left, &fuse->lock, until_ns);
    }
    (void)pthread_mutex_unlock(&fuse->lock);
}

/* ---- memory and counters --------------------------------------------------------------------- */

DLFS_API void dlfs_fuse_expire(dlfs_fuse *fuse, uint32_t age_ms)
{
    held_expire(fuse->held, (uint64_t)age_ms * NS_PER_MS);
}

static uint64_t value_of(_Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

DLFS_API void dlfs_fuse_get_stats(dlfs_fuse *fuse, dlfs_fuse_stats *stats)
{
    struct counters *counters = &fuse->counters;
    *stats = (dlfs_fuse_stats){
        .lookups = value_of(&counters->lookups),
        .opens = value_of(&counters->opens),
        .reads = value_of(&counters->reads),
        .read_bytes = value_of(&counters->read_bytes),
        .ahead = value_of(&counters->ahead),
        .ahead_used = value_of(&counters->ahead_used),
        .questions = value_of(&counters->questions),
        .held_bytes = held_bytes(fuse->held),
    };
}
