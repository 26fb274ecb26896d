/*
 * Keeps a program on the processor that answers it.
 *
 * A thread that sends a reply over io_uring wakes the program, and is about to wait itself. Linux
 * does not know that: it finds the processor busy and moves the program to an idle one, whose
 * wake-up takes longer than the whole request, above all on a virtual machine. The next request
 * then moves it back. A processor whose threads are all SCHED_IDLE counts as idle, so the program
 * stays, and runs as soon as it is woken.
 *
 * So a thread **yields**, that is, has the policy SCHED_IDLE, as long as one program uses the
 * mount and gets its replies without a pause. Behind other programs such a thread might wait for
 * its processor for seconds. A watching thread therefore looks a few hundred times a second, and
 * makes those that have answered nothing since the last time normal again; one that was waiting
 * for its processor meanwhile stays normal for a second.
 *
 * No thread yields where the system forbids to become normal again: without CAP_SYS_NICE, and with
 * an RLIMIT_NICE below 20 plus the nice value.
 *
 * Source: Linux, kernel/sched/fair.c (select_idle_sibling, sched_idle_cpu); sched(7).
 */
#ifndef DLFS_FUSE_YIELDING_H
#define DLFS_FUSE_YIELDING_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct yielder;

struct yielding {
    pthread_mutex_t lock;  /* protects the next two fields, and those of the threads */
    pthread_cond_t asked;  /* a thread asks to yield, or the end has come */
    struct yielder *first; /* of those that yield */
    bool ending;
    bool started;
    pthread_t watcher;
    _Atomic bool permitted; /* by the system */
};

/* A thread that answers. */
struct yielder {
    struct yielding *yielding;
    pid_t id;
    _Atomic bool yields;      /* or has asked to */
    _Atomic uint32_t answers; /* counted without end */
    _Atomic uint64_t barred_until_ns;
    uint32_t seen; /* answers when the watcher looked last */
    bool is_set;   /* its policy */
    struct yielder *next;
};

/* Starts the watching thread. If that fails, no thread ever yields. */
void yielding_start(struct yielding *yielding);
/* Ends the watching thread. The threads that answer have ended before. */
void yielding_stop(struct yielding *yielding);
/* Called by a thread before it answers for the first time. */
void yielder_init(struct yielder *yielder, struct yielding *yielding);
/* Called by the thread when it is about to answer; `alone` if one program uses the mount. */
void yielder_answer(struct yielder *yielder, bool alone);
/* Called by the thread before it ends. */
void yielder_end(struct yielder *yielder);

#endif
