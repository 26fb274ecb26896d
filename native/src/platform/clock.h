/*
 * Clocks, deadlines, and condition variables that wait until one. All times are in nanoseconds.
 *
 * Everything is measured with CLOCK_MONOTONIC, which a change of the wall clock does not affect.
 * Leases alone use CLOCK_BOOTTIME, which also advances while the machine is suspended.
 */
#ifndef DLFS_CLOCK_H
#define DLFS_CLOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define NS_PER_SECOND UINT64_C(1000000000)

static inline uint64_t clock_read_ns(clockid_t clock)
{
    struct timespec now;
    (void)clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * NS_PER_SECOND + (uint64_t)now.tv_nsec;
}

static inline uint64_t monotonic_ns(void)
{
    return clock_read_ns(CLOCK_MONOTONIC);
}

/* The same clock as of the kernel's last tick, up to 10 ms ago; costs a fifth of monotonic_ns. */
static inline uint64_t monotonic_coarse_ns(void)
{
    return clock_read_ns(CLOCK_MONOTONIC_COARSE);
}

/* Time since boot, including the time that the machine was suspended. */
static inline uint64_t boottime_ns(void)
{
    return clock_read_ns(CLOCK_BOOTTIME);
}

/* Converts a time into the form that pthread_cond_timedwait and sem_clockwait take. */
static inline struct timespec clock_timespec(uint64_t at_ns)
{
    return (struct timespec){.tv_sec = (time_t)(at_ns / NS_PER_SECOND),
                             .tv_nsec = (long)(at_ns % NS_PER_SECOND)};
}

/* Creates a condition variable whose timed waits end by the monotonic clock. Returns 0 or -errno.
 */
static inline int condition_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    int error = pthread_condattr_init(&attributes);
    if (error != 0) {
        return -error;
    }
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    error = pthread_cond_init(condition, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    return -error;
}

/* Waits for a condition variable of condition_init until a monotonic time. */
static inline void condition_wait_until(pthread_cond_t *condition, pthread_mutex_t *lock,
                                        uint64_t until_ns)
{
    struct timespec until = clock_timespec(until_ns);
    (void)pthread_cond_timedwait(condition, lock, &until);
}

/* The monotonic time at which a call gives up waiting. */
struct deadline {
    bool never;     /* the call waits without limit */
    uint64_t at_ns; /* 0: the call does not wait at all */
};

/* Returns the deadline of a call that may wait timeout_ms from now; without limit if negative. */
static inline struct deadline deadline_after(int timeout_ms)
{
    struct deadline deadline = {.never = timeout_ms < 0, .at_ns = 0};
    if (timeout_ms > 0) {
        deadline.at_ns = monotonic_ns() + (uint64_t)timeout_ms * UINT64_C(1000000);
    }
    return deadline;
}

/* Returns the time left: 0 once the deadline has passed, UINT64_MAX if there is none. */
static inline uint64_t deadline_left_ns(const struct deadline *deadline)
{
    if (deadline->never) {
        return UINT64_MAX;
    }
    if (deadline->at_ns == 0) {
        return 0;
    }
    uint64_t now = monotonic_ns();
    return now < deadline->at_ns ? deadline->at_ns - now : 0;
}

#endif
