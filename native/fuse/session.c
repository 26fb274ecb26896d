/*
 * The functions of dlfs_fuse.h: mounting, the loop of threads, and the owner's side of a mount.
 *
 * The loop is libfuse's, with one descriptor of /dev/fuse for each thread. Where the kernel offers
 * io_uring, other threads answer its requests (uring.c), and the loop has one thread with little to
 * do. The loop waits for its threads in sem_wait, so dlfs_fuse_stop interrupts it with a signal; it
 * repeats the signal because the first may arrive just before sem_wait begins.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "mount.h"
#include "operations.h"
#include "platform/clock.h"
#include "read.h"
#include "root.h"
#include "uring.h"

#define WAKE_SIGNAL (SIGRTMAX - 1)
#define WAKE_NS UINT64_C(5000000) /* time between two signals */
#define WAKE_TRIES 20u
#define THREADS_MAX 256u
#define BUSY_POLL_US_MAX 10000u
#define NOTIFY_RESEND 7 /* FUSE_NOTIFY_RESEND, of protocol 7.40 */

/* ---- receiving and replying ------------------------------------------------------------------ */

/* libfuse 3.13 and newer let a program receive requests and send replies itself. */
#define CUSTOM_IO FUSE_VERSION >= FUSE_MAKE_VERSION(3, 13)

#if CUSTOM_IO

#define OVER_IO_URING (UINT64_C(1) << 41) /* FUSE_OVER_IO_URING of INIT's 64 flags */
#define PAYLOAD_BYTES_MIN 8192u           /* FUSE_MIN_READ_BUFFER */
#define PAGES_DEFAULT 32u                 /* pages of a request unless INIT's reply says more */

static struct rings *rings_of(struct dlfs_fuse *fuse)
{
    return atomic_load_explicit(&fuse->rings, memory_order_acquire);
}

/*
 * Prepares for io_uring if a request is INIT and the kernel offers it. Once the reply has accepted
 * the offer, the kernel sends nothing until the queues are registered or it has refused one; so
 * nothing but the registration itself may fail by then.
 */
static void note_init(struct dlfs_fuse *fuse, const struct fuse_in_header *header,
                      const uint8_t *request, size_t bytes)
{
    struct fuse_init_in init = {0};
    size_t init_bytes = bytes - sizeof *header;
    memcpy(&init, request + sizeof *header, init_bytes < sizeof init ? init_bytes : sizeof init);
    bool offered = (init.flags & FUSE_INIT_EXT) != 0 && (init.flags2 & OVER_IO_URING >> 32) != 0;
    bool refused = (fuse->config.flags & DLFS_FUSE_NO_URING) != 0;
    struct rings *rings = NULL;
    int code = !offered  ? -EOPNOTSUPP
               : refused ? -ECANCELED
                         : rings_start(fuse, dlfs_fuse_stop, &rings);
    atomic_store(&fuse->uring, code);
    fuse->init = header->unique;
    atomic_store_explicit(&fuse->rings, rings, memory_order_release);
}

static uint64_t payload_bytes_of(const struct fuse_init_out *init)
{
    uint64_t pages = (init->flags & FUSE_MAX_PAGES) != 0 ? init->max_pages : PAGES_DEFAULT;
    uint64_t bytes = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    bytes = bytes < init->max_write ? init->max_write : bytes;
    return bytes < PAYLOAD_BYTES_MIN ? PAYLOAD_BYTES_MIN : bytes;
}

/* Sends the reply to INIT, accepting io_uring, and registers the queues. */
static ssize_t accept_rings(struct dlfs_fuse *fuse, int kernel, struct iovec *parts)
{
    struct rings *rings = rings_of(fuse);
    struct fuse_init_out init;
    memcpy(&init, parts[1].iov_base, sizeof init);
    int queues = rings_allocate(rings, payload_bytes_of(&init));
    if (queues < 0) {
        atomic_store(&fuse->uring, queues);
        atomic_store(&fuse->rings, NULL);
        rings_destroy(rings);
        return writev(kernel, parts, 2);
    }
    init.flags |= FUSE_INIT_EXT;
    init.flags2 |= OVER_IO_URING >> 32;
    struct iovec changed[] = {parts[0], {.iov_base = &init, .iov_len = sizeof init}};
    ssize_t sent = writev(kernel, changed, 2);
    int error = errno;
    if (sent >= 0) {
        /* Before the first request, which may be answered while this thread still waits. */
        atomic_store(&fuse->uring, queues);
        int code = rings_register(rings);
        if (code < 0) {
            atomic_store(&fuse->uring, code);
        }
    }
    errno = error;
    return sent;
}

/* Busy-polls for the next request, which is likely to come at once. */
static void poll_for_request(struct receivers *receivers, int kernel)
{
    struct pollfd request = {.fd = kernel, .events = POLLIN};
    if (!busy_poll_pays(&receivers->kernel)) {
        return;
    }
    uint64_t until_ns = monotonic_ns() + receivers->busy_poll_us * UINT64_C(1000);
    int ready = 0;
    while (ready == 0 && monotonic_ns() < until_ns) {
        ready = poll(&request, 1, 0);
    }
    busy_poll_note(&receivers->kernel, ready > 0);
}

static ssize_t receive(int kernel, void *request, size_t bytes, void *userdata)
{
    struct dlfs_fuse *fuse = userdata;
    struct receivers *receivers = &fuse->receivers;
    bool rings = atomic_load_explicit(&fuse->uring, memory_order_relaxed) > 0;
    if (!rings && receivers_wait(receivers)) {
        poll_for_request(receivers, kernel);
    }
    ssize_t got = read(kernel, request, bytes);
    struct fuse_in_header header;
    if (got >= (ssize_t)sizeof header) {
        memcpy(&header, request, sizeof header);
        if (header.opcode == FUSE_INIT) {
            note_init(fuse, &header, request, (size_t)got);
        }
        if (!rings && header.pid != 0) { /* 0: the kernel sent it, and no program waits */
            receivers_note_request(receivers, header.pid);
        }
    }
    return got;
}

static ssize_t send_reply(int kernel, struct iovec *parts, int part_count, void *userdata)
{
    struct dlfs_fuse *fuse = userdata;
    if (fuse->drops_replies) {
        return (ssize_t)((struct fuse_out_header *)parts[0].iov_base)->len;
    }
    struct rings *rings = rings_of(fuse);
    struct fuse_out_header header;
    memcpy(&header, parts[0].iov_base, sizeof header);
    if (rings != NULL && header.unique == fuse->init && header.error == 0 && part_count == 2 &&
        parts[1].iov_len == sizeof(struct fuse_init_out)) {
        return accept_rings(fuse, kernel, parts);
    }
    if (rings != NULL && rings_take_reply(rings, parts, part_count)) {
        return (ssize_t)header.len;
    }
    return writev(kernel, parts, part_count);
}

static int use_custom_io(struct fuse_session *session, int kernel)
{
    static const struct fuse_custom_io io = {.writev = send_reply, .read = receive};
    return fuse_session_custom_io(session, &io, kernel);
}

/*
 * Takes a mount of the owner: processes the INIT request that the owner has read, and has the
 * kernel send again what an earlier server left unanswered. All requests only read, so one that was
 * answered twice does no harm.
 */
static int take_session(struct dlfs_fuse *fuse, const dlfs_fuse_config *config)
{
    struct fuse_out_header resend = {.len = sizeof resend, .error = NOTIFY_RESEND};
    bool resumes = (config->flags & DLFS_FUSE_RESUME) != 0;
    int kernel = fcntl(config->kernel, F_DUPFD_CLOEXEC, 0); /* libfuse closes it */
    if (kernel < 0) {
        return -errno;
    }
    int code = use_custom_io(fuse->session, kernel);
    if (code != 0) {
        (void)close(kernel);
        return code;
    }
    uint8_t *request = malloc(config->init_bytes);
    if (request == NULL) {
        return -ENOMEM;
    }
    memcpy(request, config->init, config->init_bytes);
    const struct fuse_buf init = {.mem = request, .size = config->init_bytes};
    struct fuse_in_header header;
    memcpy(&header, request, sizeof header);
    note_init(fuse, &header, request, config->init_bytes);
    fuse->drops_replies = resumes;
    fuse_session_process_buf(fuse->session, &init);
    fuse->drops_replies = false;
    free(request);
    return resumes && write(kernel, &resend, sizeof resend) < 0 ? -errno : 0;
}

#else

static int use_custom_io(struct fuse_session *session, int kernel)
{
    (void)session, (void)kernel; /* all threads receive, as libfuse does it */
    return 0;
}

static int take_session(struct dlfs_fuse *fuse, const dlfs_fuse_config *config)
{
    (void)fuse, (void)config;
    return -ENOTSUP;
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

DLFS_API int dlfs_fuse_takes_connections(void)
{
    return CUSTOM_IO;
}

static int initialise(struct dlfs_fuse *fuse, const dlfs_fuse_config *config)
{
    fuse->config = *config;
    fuse->config.mountpoint = fuse->config.options = NULL;
    fuse->config.init = NULL;
    fuse->config.incoming_link = NULL;
    fuse->started_ns = (int64_t)clock_read_ns(CLOCK_REALTIME);
    atomic_init(&fuse->uring, CUSTOM_IO ? -EINPROGRESS : -ENOSYS);
    (void)pthread_mutex_init(&fuse->lock, NULL);
    (void)pthread_mutex_init(&fuse->listings_lock, NULL);
    (void)condition_init(&fuse->ended);
    file_cache_init(&fuse->cache);
    readahead_init(&fuse->readahead);
    readahead_thread_init(&fuse->readahead_thread);
    receivers_init(&fuse->receivers, config->busy_poll_us);
    upcall_queue_init(&fuse->upcalls, &fuse->receivers);
    dataset_table_init(&fuse->datasets, &fuse->upcalls);
    early_read_init(&fuse->early_read, &fuse->datasets);
    if (config->incoming_link != NULL) {
        fuse->incoming_link = strdup(config->incoming_link);
        if (fuse->incoming_link == NULL) {
            return -ENOMEM;
        }
    }
    return 0;
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
    if (code == 0 && config->kernel >= 0) {
        return take_session(fuse, config);
    }
    if (code == 0 && fuse_session_mount(fuse->session, config->mountpoint) != 0) {
        code = -EIO;
    }
    fuse->mounted = code == 0;
    if (code == 0) {
        code = use_custom_io(fuse->session, fuse_session_fd(fuse->session));
    }
    return code;
}

static bool is_valid(const dlfs_fuse_config *config)
{
    if (config->kernel >= 0 && (config->init_bytes < sizeof(struct fuse_in_header) ||
                                (config->flags & DLFS_FUSE_NO_URING) == 0)) {
        return false;
    }
    return config->mountpoint != NULL && config->options != NULL && config->threads_max > 0 &&
           config->threads_max <= THREADS_MAX && config->busy_poll_us <= BUSY_POLL_US_MAX &&
           (config->file_mode & ~0777u) == 0;
}

DLFS_API int dlfs_fuse_mount(const dlfs_fuse_config *config, dlfs_fuse **out)
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
    rings_destroy(atomic_load(&fuse->rings));
    readahead_thread_stop(&fuse->readahead_thread);
    readahead_thread_destroy(&fuse->readahead_thread);
    if (fuse->mounted) {
        fuse_session_unmount(fuse->session);
    }
    if (fuse->session != NULL) {
        fuse_session_destroy(fuse->session);
    }
    root_free_all_listings(fuse);
    free(fuse->incoming_link);
    file_cache_destroy(&fuse->cache);
    early_read_destroy(&fuse->early_read);
    dataset_table_destroy(&fuse->datasets);
    upcall_queue_destroy(&fuse->upcalls);
    receivers_destroy(&fuse->receivers);
    readahead_destroy(&fuse->readahead);
    (void)pthread_cond_destroy(&fuse->ended);
    (void)pthread_mutex_destroy(&fuse->listings_lock);
    (void)pthread_mutex_destroy(&fuse->lock);
    free(fuse);
}

/* ---- the loop -------------------------------------------------------------------------------- */

/* Handles the wake-up signal: to interrupt a system call is its only effect. */
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
    /* The kernel aborts what it has sent to a clone when that is closed, instead of resending. */
    fuse_loop_cfg_set_clone_fd(config, fuse->mounted);
    fuse_loop_cfg_set_max_threads(config, fuse->config.threads_max);
    fuse_loop_cfg_set_idle_threads(config, fuse->config.threads_max);
    int code = fuse_session_loop_mt(fuse->session, config);
    fuse_loop_cfg_destroy(config);
    return code;
}

/* Ends upcalls; the caller has the lock. */
static void begin_end(struct dlfs_fuse *fuse)
{
    fuse->stopping = true;
    upcall_queue_close(&fuse->upcalls);
}

DLFS_API int dlfs_fuse_run(dlfs_fuse *fuse)
{
    struct sigaction action = {.sa_handler = wake}; /* without SA_RESTART, so that it interrupts */
    if (sigaction(WAKE_SIGNAL, &action, NULL) != 0) {
        return -errno;
    }
    (void)pthread_mutex_lock(&fuse->lock);
    bool again = fuse->running;
    bool start = !fuse->stopping && !again;
    fuse->running = start || again;
    fuse->loop = start ? pthread_self() : fuse->loop;
    (void)pthread_mutex_unlock(&fuse->lock);
    if (!start) {
        return again ? -EALREADY : 0;
    }
    int code = readahead_thread_start(&fuse->readahead_thread, read_ahead_job, fuse);
    code = code < 0 ? code : loop(fuse);
    struct rings *rings = atomic_load(&fuse->rings);
    int failure = rings != NULL ? rings_stop(rings) : 0;
    readahead_thread_stop(&fuse->readahead_thread);
    early_read_drop(&fuse->early_read);
    code = failure < 0 ? failure : code;
    (void)pthread_mutex_lock(&fuse->lock);
    fuse->running = false;
    begin_end(fuse);
    fuse_session_exit(fuse->session);
    (void)pthread_cond_broadcast(&fuse->ended);
    (void)pthread_mutex_unlock(&fuse->lock);
    return code;
}

DLFS_API void dlfs_fuse_stop(dlfs_fuse *fuse)
{
    (void)pthread_mutex_lock(&fuse->lock);
    begin_end(fuse);
    for (uint32_t tries = 0; fuse->running && tries < WAKE_TRIES; tries++) {
        uint64_t until_ns = monotonic_ns() + WAKE_NS;
        fuse_session_exit(fuse->session);
        (void)pthread_kill(fuse->loop, WAKE_SIGNAL);
        condition_wait_until(&fuse->ended, &fuse->lock, until_ns);
    }
    (void)pthread_mutex_unlock(&fuse->lock);
}

/* ---- the owner's side ------------------------------------------------------------------------ */

DLFS_API int dlfs_fuse_next_upcall(dlfs_fuse *fuse, int timeout_ms, dlfs_fuse_upcall *upcall)
{
    return upcall_fetch(&fuse->upcalls, timeout_ms, upcall);
}

DLFS_API int dlfs_fuse_reply_upcall(dlfs_fuse *fuse, const dlfs_fuse_reply *reply)
{
    return upcall_reply(&fuse->upcalls, reply);
}

DLFS_API int dlfs_fuse_add_dataset(dlfs_fuse *fuse, const dlfs_fuse_dataset *dataset)
{
    return dataset_add(&fuse->datasets, dataset);
}

DLFS_API int dlfs_fuse_open_dataset(dlfs_fuse *fuse, uint32_t number,
                                    const dlfs_directory *directory, dlfs_reader *reader)
{
    return dataset_open(&fuse->datasets, number, directory, reader);
}

/* Unpins what the open files of a dataset have in its reader's memory. */
static void unpin_all(struct dlfs_fuse *fuse, uint32_t number)
{
    file_cache_expire(&fuse->cache, &fuse->datasets.entries[number].pins, 0);
}

DLFS_API int dlfs_fuse_replace_reader(dlfs_fuse *fuse, uint32_t number, dlfs_reader *reader)
{
    int code = dataset_replace_reader(&fuse->datasets, number, reader);
    if (code == 0) {
        unpin_all(fuse, number);
    }
    early_read_drop(&fuse->early_read); /* it may use the reader that was replaced */
    return code;
}

DLFS_API int dlfs_fuse_await_reader(dlfs_fuse *fuse, uint32_t number, int wait)
{
    return dataset_await_reader(&fuse->datasets, number, wait != 0);
}

DLFS_API int dlfs_fuse_withdraw_dataset(dlfs_fuse *fuse, uint32_t number)
{
    int code = dataset_withdraw(&fuse->datasets, number);
    if (code == 0) {
        unpin_all(fuse, number);
        early_read_drop(&fuse->early_read);
        root_free_listings(fuse, number);
    }
    return code;
}

DLFS_API int dlfs_fuse_set_listing(dlfs_fuse *fuse, uint32_t directory, const uint8_t *names,
                                   uint64_t names_bytes, const uint32_t *numbers,
                                   uint32_t entry_count)
{
    return root_set_listing(fuse, directory, names, names_bytes, numbers, entry_count);
}

DLFS_API void dlfs_fuse_expire_cache(dlfs_fuse *fuse, uint32_t age_ms)
{
    file_cache_expire(&fuse->cache, NULL, age_ms * UINT64_C(1000000));
    early_read_drop(&fuse->early_read);
}

DLFS_API int dlfs_fuse_uring(dlfs_fuse *fuse)
{
    return atomic_load(&fuse->uring);
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
        .readahead_samples = value_of(&counters->readahead_samples),
        .readahead_hits = value_of(&counters->readahead_hits),
        .upcalls = value_of(&fuse->upcalls.count),
        .cached_bytes = file_cache_bytes(&fuse->cache),
    };
}
