/* Threads of this library's own. */
#ifndef DLFS_THREAD_H
#define DLFS_THREAD_H

#include <pthread.h>

/*
 * Starts a thread in which all signals are blocked but those that its own faults raise: a signal
 * sent to the process is for the program's threads, which may block it to wait for it. 0 or -errno.
 */
int thread_start(pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *argument),
                 void *argument);

#endif
