/*
 * The threads that read requests from /dev/fuse and answer them.
 *
 * A thread that takes a request while no other waits for one starts another, up to a limit, so that
 * a request that waits for a device delays no other. No thread ends before the mount does. Each has
 * a descriptor of its own where the kernel permits it, so that threads do not contend for one
 * queue of requests under way.
 *
 * A thread that waits in read() is woken by a signal at the end, which is repeated because the
 * first one may arrive just before read() begins.
 */
#ifndef DLFS_FUSE_LOOP_H
#define DLFS_FUSE_LOOP_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define THREADS_MAX 256u

struct dlfs_fuse;

struct loop_thread {
    struct dlfs_fuse *fuse;
    int kernel;      /* descriptor of /dev/fuse */
    uint8_t *memory; /* of a request */
    pthread_t thread;
    _Atomic bool receives; /* it is in read(), or about to be */
};

struct loop {
    pthread_mutex_t lock;   /* protects the next three fields */
    pthread_cond_t changed; /* the end has begun, or a thread has ended */
    uint32_t thread_count;  /* started */
    uint32_t ended_count;   /* of these */
    int failure;            /* what reading a request failed with, or 0 */
    _Atomic bool ending;    /* no thread takes another request */
    _Atomic uint32_t idle;  /* threads that wait for a request */
    struct loop_thread threads[THREADS_MAX];
};

void loop_init(struct loop *loop);
void loop_destroy(struct loop *loop);
/*
 * Answers requests until loop_end is called or the file system is unmounted, and then waits for
 * those under way. Returns 0, or what failed.
 */
int loop_run(struct dlfs_fuse *fuse);
/* Makes loop_run end. Any thread may call it, also before. */
void loop_end(struct dlfs_fuse *fuse);

#endif
