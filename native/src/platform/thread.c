/* Starts the library's own threads. */
#include "platform/thread.h"

#include <signal.h>

int thread_start(pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *argument),
                 void *argument)
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
