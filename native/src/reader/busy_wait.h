/* How long a thread polls for a read before it sleeps. */
#ifndef DLFS_BUSY_WAIT_H
#define DLFS_BUSY_WAIT_H

#include <stdbool.h>
#include <stdint.h>

#include "platform/clock.h"

/* Polling of a read before its thread sleeps, and the callback that announces the sleep, or returns
 * for how many microseconds to poll instead. */
struct busy_wait {
    uint64_t until_ns;                    /* of the monotonic clock; 0: does not poll */
    uint32_t (*on_sleep)(void *argument); /* or NULL; NULL once it has returned 0 */
    void *argument;
};

/* Announces that the thread is about to sleep. */
static inline void busy_wait_announce(struct busy_wait *wait)
{
    uint64_t more_us = wait->on_sleep != NULL ? wait->on_sleep(wait->argument) : 0;
    wait->until_ns = more_us > 0 ? monotonic_ns() + more_us * 1000 : 0;
    if (more_us == 0) {
        wait->on_sleep = NULL;
    }
}

/* Returns true if the thread is to poll once more; announces its sleep otherwise. */
static inline bool busy_wait_goes_on(struct busy_wait *wait)
{
    if (wait->until_ns == 0 || monotonic_ns() >= wait->until_ns) {
        busy_wait_announce(wait);
    }
    return wait->until_ns > 0;
}

#endif
