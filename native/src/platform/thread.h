/* Threads of the library. */
#ifndef DLFS_THREAD_H
#define DLFS_THREAD_H

#include <pthread.h>
#include <signal.h>

/*
 * Starts a thread in which all signals are blocked except those that its own faults raise. A signal
 * sent to the process is thus handled by the program's threads, which may block it in order to wait
 * for it. Returns 0 or -errno.
 */
static inline int thread_start(pthread_t *thread, const pthread_attr_t *attributes,
                               void *(*main)(void *argument), void *argument)
{
    static const int faults[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTRAP};
    sigset_t blocked;
    sigset_t before;
    (void)sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        (void)sigdelset(&blocked, faults[i]);
    }
    (void)pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int error = pthread_create(thread, attributes, main, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

/* Tells the processor that the thread polls: it saves power, and slows the thread down. */
static inline void processor_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
