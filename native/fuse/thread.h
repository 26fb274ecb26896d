/* Threads of the mount. */
#ifndef DLFS_FUSE_THREAD_H
#define DLFS_FUSE_THREAD_H

#include <pthread.h>
#include <signal.h>

/* Starts a thread with all signals blocked, which are for the program's own. Returns 0 or -errno.
 */
static inline int start_thread(pthread_t *thread, void *(*main)(void *argument), void *argument)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, main, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

#endif
