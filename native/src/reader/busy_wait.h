/* Busy polling of a read by its thread, and the announcement that the thread is about to sleep. */
#ifndef DLFS_BUSY_WAIT_H
#define DLFS_BUSY_WAIT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "platform/clock.h"

/* Polling of a read before its thread sleeps, and the callback that announces the sleep. */
struct busy_wait {
    uint64_t until_ns;                /* of the monotonic clock; 0: does not poll */
    void (*on_sleep)(void *argument); /* or NULL; NULL once it was called */
    void *argument;
};

/* An on_sleep for reads that end instead: sets the flag that the read's `stop` points to. */
static inline void busy_wait_stop(void *stop)
{
    atomic_store((_Atomic bool *)stop, true);
}

/* Announces that the thread is about to sleep. */
static inline void busy_wait_announce(struct busy_wait *wait)
{
    if (wait->on_sleep != NULL) {
        wait->on_sleep(wait->argument);
    }
    wait->on_sleep = NULL;
}

/* Returns true if the thread is to poll once more; announces its sleep otherwise. */
static inline bool busy_wait_goes_on(struct busy_wait *wait)
{
    if (wait->until_ns > 0 && monotonic_ns() < wait->until_ns) {
        return true;
    }
    busy_wait_announce(wait);
    return false;
}

#endif
