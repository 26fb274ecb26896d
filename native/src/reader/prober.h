/* Asks hung members whether they answer again, so that no read waits to find out. */
#ifndef DLFS_PROBER_H
#define DLFS_PROBER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "dlfs/dlfs.h"

/* The thread that asks. Guarded by the arena's lock, but for `wanted`; `stop` is set under it. */
struct prober {
    _Atomic bool wanted; /* a member is hung since the thread was last begun */
    pthread_t thread;
    pthread_cond_t wake; /* the thread is to end */
    bool made;           /* the thread was started, and not joined */
    bool ended;          /* it asks no more, and has released the lock or is about to */
    _Atomic bool stop;   /* the thread ends, also while it connects to a device */
};

/* Has the thread ask the members that are hung since the last call. Takes the lock if there are
 * any. */
void prober_begin(dlfs_reader *reader);
/* Ends the thread. Takes the lock. */
void prober_end(dlfs_reader *reader);

#endif
