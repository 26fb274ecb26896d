/* A request that cannot be read, since it was interrupted (ENOENT), is none. */
#include "threads/loop.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "mount.h"
#include "operations.h"
#include "platform/clock.h"
#include "platform/thread.h"

#define WAKE_SIGNAL (SIGRTMAX - 1)
#define WAKE_NS UINT64_C(5000000) /* time between two signals */
#define HEAD_BYTES 4096u          /* of a request in front of its data */
#define REQUEST_BYTES (REQUEST_DATA_BYTES_MAX + HEAD_BYTES)

/* ---- receiving ------------------------------------------------------------------------------- */

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

/* Waits for a request. Returns its bytes, or 0 at the end. */
static size_t receive(struct loop_thread *thread)
{
    struct dlfs_fuse *fuse = thread->fuse;
    for (;;) {
        if (!is_over_uring(fuse) && receivers_wait(&fuse->receivers)) {
            poll_for_request(&fuse->receivers, thread->kernel);
        }
        atomic_store(&thread->receives, true);
        if (atomic_load(&fuse->loop.ending)) {
            return 0;
        }
        ssize_t got = read(thread->kernel, thread->memory, REQUEST_BYTES);
        int error = errno;
        atomic_store(&thread->receives, false);
        if (got > 0) {
            return (size_t)got;
        }
        if (got == 0 || error == ENODEV) { /* unmounted */
            return 0;
        }
        if (error != EINTR && error != EAGAIN && error != ENOENT) {
            (void)pthread_mutex_lock(&fuse->loop.lock);
            fuse->loop.failure = -error;
            (void)pthread_mutex_unlock(&fuse->loop.lock);
            return 0;
        }
    }
}

/* ---- threads --------------------------------------------------------------------------------- */

static void start_another(struct dlfs_fuse *fuse);

static void *work(void *argument)
{
    struct loop_thread *thread = argument;
    struct dlfs_fuse *fuse = thread->fuse;
    struct loop *loop = &fuse->loop;
    const struct reply_path path = {.fuse = fuse, .send = send_to_device, .kernel = thread->kernel};
    bool goes_on = true;
    sigset_t wakes;
    (void)sigemptyset(&wakes);
    (void)sigaddset(&wakes, WAKE_SIGNAL);
    (void)pthread_sigmask(SIG_UNBLOCK, &wakes, NULL);
    while (goes_on) {
        size_t bytes = receive(thread);
        bool last = atomic_fetch_sub(&loop->idle, 1) == 1;
        if (bytes > 0 && last) {
            start_another(fuse);
        }
        goes_on = bytes > 0 && serve_request(&path, thread->memory, bytes);
        (void)atomic_fetch_add(&loop->idle, 1);
    }
    receivers_release(&fuse->receivers);
    loop_end(fuse);
    (void)pthread_mutex_lock(&loop->lock);
    loop->ended_count++;
    (void)pthread_cond_signal(&loop->changed);
    (void)pthread_mutex_unlock(&loop->lock);
    return NULL;
}

/* Returns a descriptor of the same file system for one thread, or that of the owner. */
static int descriptor_for_thread(const struct dlfs_fuse *fuse)
{
    /* The kernel aborts what it has sent to a clone when that is closed, instead of resending. */
    int clone = -1;
    if ((fuse->config.flags & DLFS_FUSE_KEPT) == 0) {
        clone = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    }
    if (clone >= 0 && ioctl(clone, FUSE_DEV_IOC_CLONE, &fuse->config.kernel) != 0) {
        (void)close(clone);
        clone = -1;
    }
    return clone >= 0 ? clone : fuse->config.kernel;
}

/* Starts one more thread; the lock is held. */
static int start(struct dlfs_fuse *fuse)
{
    struct loop *loop = &fuse->loop;
    struct loop_thread *thread = &loop->threads[loop->thread_count];
    thread->fuse = fuse;
    thread->memory = malloc(REQUEST_BYTES);
    if (thread->memory == NULL) {
        return -ENOMEM;
    }
    thread->kernel = descriptor_for_thread(fuse);
    (void)atomic_fetch_add(&loop->idle, 1);
    int code = thread_start(&thread->thread, NULL, work, thread);
    if (code < 0) {
        (void)atomic_fetch_sub(&loop->idle, 1);
        free(thread->memory);
        if (thread->kernel != fuse->config.kernel) {
            (void)close(thread->kernel);
        }
        return code;
    }
    loop->thread_count++;
    return 0;
}

/* Starts another thread, unless there are enough. If that fails, the present ones go on. */
static void start_another(struct dlfs_fuse *fuse)
{
    struct loop *loop = &fuse->loop;
    (void)pthread_mutex_lock(&loop->lock);
    if (loop->thread_count < fuse->config.threads_max && !atomic_load(&loop->ending) &&
        atomic_load(&loop->idle) == 0) {
        (void)start(fuse);
    }
    (void)pthread_mutex_unlock(&loop->lock);
}

/* ---- life ------------------------------------------------------------------------------------ */

void loop_init(struct loop *loop)
{
    (void)pthread_mutex_init(&loop->lock, NULL);
    (void)condition_init(&loop->changed);
}

void loop_destroy(struct loop *loop)
{
    (void)pthread_cond_destroy(&loop->changed);
    (void)pthread_mutex_destroy(&loop->lock);
}

void loop_end(struct dlfs_fuse *fuse)
{
    struct loop *loop = &fuse->loop;
    atomic_store(&loop->ending, true);
    receivers_end(&fuse->receivers);
    (void)pthread_mutex_lock(&loop->lock);
    (void)pthread_cond_signal(&loop->changed);
    (void)pthread_mutex_unlock(&loop->lock);
}

/* Handles the wake-up signal: to interrupt a system call is its only effect. */
static void wake(int number)
{
    (void)number;
}

/* Wakes the threads that wait for requests until all have ended; the lock is held. */
static void await_threads(struct loop *loop)
{
    while (loop->ended_count < loop->thread_count) {
        for (uint32_t i = 0; i < loop->thread_count; i++) {
            if (atomic_load(&loop->threads[i].receives)) {
                (void)pthread_kill(loop->threads[i].thread, WAKE_SIGNAL);
            }
        }
        condition_wait_until(&loop->changed, &loop->lock, monotonic_ns() + WAKE_NS);
    }
}

int loop_run(struct dlfs_fuse *fuse)
{
    struct sigaction action = {.sa_handler = wake}; /* without SA_RESTART, so that it interrupts */
    struct loop *loop = &fuse->loop;
    if (sigaction(WAKE_SIGNAL, &action, NULL) != 0) {
        return -errno;
    }
    (void)pthread_mutex_lock(&loop->lock);
    int code = start(fuse);
    while (code == 0 && !atomic_load(&loop->ending)) {
        (void)pthread_cond_wait(&loop->changed, &loop->lock);
    }
    await_threads(loop);
    code = code < 0 ? code : loop->failure;
    (void)pthread_mutex_unlock(&loop->lock);
    for (uint32_t i = 0; i < loop->thread_count; i++) {
        struct loop_thread *thread = &loop->threads[i];
        (void)pthread_join(thread->thread, NULL);
        free(thread->memory);
        if (thread->kernel != fuse->config.kernel) {
            (void)close(thread->kernel);
        }
    }
    return code;
}
