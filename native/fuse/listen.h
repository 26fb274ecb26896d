/*
 * Which threads listen to the kernel.
 *
 * A thread that is woken on another processor costs more than what a small file asks of the server.
 * As long as one program asks, it waits for each answer, so one thread listens and answers, and
 * does not go to sleep where what it waits for is about to come: a device's answer, or the
 * program's next request. The others rest, and one takes over as soon as the first has to sleep for
 * anything but the kernel. Where several programs ask, all threads listen, and none stays awake.
 *
 * Threads: any at once.
 */
#ifndef DLFS_FUSE_LISTEN_H
#define DLFS_FUSE_LISTEN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Whether staying awake for something pays, as it went lately. */
struct wakefulness {
    _Atomic int32_t credit;
};

struct listening {
    pthread_mutex_t lock; /* of taken */
    pthread_cond_t left;
    bool taken; /* a thread is the one that listens */
    _Atomic bool crowd;
    _Atomic uint32_t asker;  /* the last one */
    _Atomic int32_t changes; /* of the asker lately */
    uint32_t awake_us;       /* at most */
    struct wakefulness device;
    struct wakefulness kernel;
};

/* With awake_us 0 all threads listen, always. */
void listen_init(struct listening *listening, uint32_t awake_us);
void listen_destroy(struct listening *listening);
/*
 * This thread is about to receive a request: rests until it is its turn. A point of cancellation.
 * Whether it is the only one.
 */
bool listen_begin(struct listening *listening);
/* A request of this thread of a program came. */
void listen_heard(struct listening *listening, uint32_t asker);
/* This thread is about to sleep, for something other than the kernel: another one is to listen. */
void listen_leave(struct listening *listening);
/* Whether this is the one thread that listens. */
bool listen_alone(const struct listening *listening);

/* Whether to stay awake now. */
bool wakefulness_pays(struct wakefulness *wakefulness);
/* It was tried, and came to something or not. */
void wakefulness_tried(struct wakefulness *wakefulness, bool well);

#endif
