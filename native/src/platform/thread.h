/* Threads of the library. */
#ifndef DLFS_THREAD_H
#define DLFS_THREAD_H

#include <pthread.h>

/*
 * Starts a thread in which all signals are blocked except those that its own faults raise. A signal
 * sent to the process is thus handled by the program's threads, which may block it in order to wait
 * for it. Returns 0 or -errno.
 */
int thread_start(pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *argument),
                 void *argument);

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
