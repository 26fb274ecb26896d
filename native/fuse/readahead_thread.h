/*
 * A thread that reads ahead: in large files, and for threads that receive requests over io_uring.
 *
 * Such a thread has one entry, which is free for the next request as soon as the reply is sent. So
 * it must not go on with other work then: the program's next request would wait for it.
 *
 * Threads: readahead_thread_post from any.
 */
#ifndef DLFS_FUSE_READAHEAD_THREAD_H
#define DLFS_FUSE_READAHEAD_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "readahead.h"

#define READAHEAD_JOBS_MAX 32u /* read-aheads that wait; further ones are dropped */

/* A read-ahead to be done. */
struct readahead_job {
    uint32_t dataset; /* number */
    struct readahead_plan plan;
    struct file_range range; /* to read in place of the plan, if it is not empty */
};

struct readahead_thread {
    pthread_mutex_t lock;
    pthread_cond_t posted;
    bool running;
    bool ending; /* set under the lock, by an atomic store: reads end then */
    pthread_t thread;
    void (*read)(void *owner, const struct readahead_job *job);
    void *owner;
    uint32_t first; /* position of the oldest read-ahead in the ring buffer */
    uint32_t count;
    struct readahead_job jobs[READAHEAD_JOBS_MAX];
};

void readahead_thread_init(struct readahead_thread *thread);
void readahead_thread_destroy(struct readahead_thread *thread);
/* Starts the thread, which calls read(owner, job) for each job. Returns 0 or -errno. */
int readahead_thread_start(struct readahead_thread *thread,
                           void (*read)(void *owner, const struct readahead_job *job), void *owner);
/* Ends the thread, and the read-ahead in a file under way. Does nothing if it was not started. */
void readahead_thread_stop(struct readahead_thread *thread);
void readahead_thread_post(struct readahead_thread *thread, const struct readahead_job *job);

#endif
