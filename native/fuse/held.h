/*
 * Samples held in memory, whole and verified: those that are read in parts, and those that are read
 * before they are asked for. One budget; what was used longest ago gives way.
 *
 * Nobody waits for a sample that is being read: whoever wants it leaves a note, and who reads it
 * answers them all. So the thread that asked is free, and the bytes cost no thread a wake-up.
 *
 * Threads: any at once.
 */
#ifndef DLFS_FUSE_HELD_H
#define DLFS_FUSE_HELD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "dlfs/dlfs.h"

#define HELD_BUCKETS 4096u
#define HELD_OWN_BYTES_MAX (UINT64_C(1) << 20) /* larger ones stay in the batch they came in */

/* Somebody who waits for a part of a sample. */
struct waiter {
    void *request;
    uint64_t offset;
    uint64_t bytes;
    struct waiter *next;
};

enum held_state { HELD_LOADING, HELD_READY };

struct held_sample {
    uint64_t key;
    uint64_t bytes;
    const uint8_t *data;
    uint8_t *own; /* where it is, or NULL: in the batch */
    dlfs_batch *batch;
    enum held_state state;
    bool ahead;     /* nobody has asked for it yet */
    uint32_t users; /* of the data */
    uint64_t given_bytes;
    uint64_t used_ns;
    struct waiter *waiters;
    struct held_sample *chain; /* of its bucket */
    struct held_sample *newer;
    struct held_sample *older;
};

/* Who waits for room, on the stack of that thread. */
struct turn {
    struct turn *next;
};

struct held {
    pthread_mutex_t lock;
    pthread_cond_t room;
    struct turn *turns; /* the first to come is the first to have room */
    uint64_t budget_bytes;
    uint64_t bytes;
    struct held_sample *newest;
    struct held_sample *oldest;
    struct held_sample *buckets[HELD_BUCKETS];
};

int held_create(uint64_t budget_bytes, struct held **out);
void held_destroy(struct held *held);

enum held_found {
    HELD_NONE,   /* nobody has read it */
    HELD_DATA,   /* *out is the sample: held_release it */
    HELD_PARKED, /* the request will be answered by who reads it */
    HELD_NO_MEMORY,
};
/* Looks for a sample on behalf of a request for a part of it. */
enum held_found held_find(struct held *held, uint64_t key, const struct waiter *waiter,
                          bool *was_ahead, struct held_sample **out);
/*
 * Begins to read a sample: the caller fills its own memory, or where it has none sets data and
 * batch, and calls held_end. Others that are not in use give way; where that is not enough, one
 * ahead of its time is given up, and another waits for room, in turn: so a sample larger than the
 * budget, which is held alone, is not kept waiting by smaller ones for ever. Errors: -EEXIST, it is
 * there by now; -EAGAIN, no room; -ENOMEM.
 */
int held_begin(struct held *held, uint64_t key, uint64_t bytes, bool ahead,
               struct held_sample **out);
/*
 * Ends it, well or not; returns those who waited, for the caller to answer and free. The caller is
 * a user of the sample, if it was read, and releases it.
 */
struct waiter *held_end(struct held *held, struct held_sample *sample, bool well);
/*
 * So many bytes were given out. Once they are as many as the sample has, the kernel has it all, and
 * it goes with its last user.
 */
void held_release(struct held *held, struct held_sample *sample, uint64_t given_bytes);
/* Gives up what nobody has used for so long. */
void held_expire(struct held *held, uint64_t age_ns);
uint64_t held_bytes(struct held *held);

#endif
