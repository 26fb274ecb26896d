/*
 * Decides which threads receive requests from the kernel, and whether they busy-poll.
 *
 * Waking a thread on another processor costs more than the server's work for a small file. As long
 * as one program uses the mount, it waits for each answer; so one thread, the sole receiver,
 * receives and answers everything. It busy-polls for an event that is about to come: the device's
 * completion, or the program's next request. The other threads wait, and one of them becomes the
 * receiver as soon as the first has to block on anything but the kernel. When several programs use
 * the mount, all threads receive and none busy-polls.
 *
 * Threads: any at once.
 */
#ifndef DLFS_FUSE_RECEIVERS_H
#define DLFS_FUSE_RECEIVERS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Estimates whether busy polling for one kind of event pays, from its recent results. */
struct busy_poll {
    _Atomic int32_t credit;
};

struct receivers {
    pthread_mutex_t lock; /* protects taken */
    pthread_cond_t vacant;
    bool taken;                   /* a thread is the sole receiver */
    _Atomic bool ending;          /* receivers_end was called */
    _Atomic bool all_receive;     /* several programs use the mount */
    _Atomic uint32_t last_client; /* thread ID of the program that sent the last request */
    _Atomic int32_t change_score; /* high while requests come from changing threads */
    uint32_t busy_poll_us;        /* longest busy polling for one event; 0: never */
    struct busy_poll device;
    struct busy_poll kernel;
};

/* With busy_poll_us 0 all threads receive, always. */
void receivers_init(struct receivers *receivers, uint32_t busy_poll_us);
void receivers_destroy(struct receivers *receivers);
/*
 * Waits until the calling thread may receive a request. Returns true if it is the sole receiver.
 */
bool receivers_wait(struct receivers *receivers);
/* Notes that a request of this client thread was received. */
void receivers_note_request(struct receivers *receivers, uint32_t client);
/* Lets another thread become the receiver: the calling thread is about to block. */
void receivers_release(struct receivers *receivers);
/* Lets no thread wait any more: the mount ends. */
void receivers_end(struct receivers *receivers);
/* Notes that the calling thread receives requests over io_uring: each is for it alone. */
void receivers_enter_ring(struct receivers *receivers);
/*
 * Returns true if the calling thread is the sole receiver, or if it receives over io_uring while
 * one program uses the mount.
 */
bool receivers_is_sole(const struct receivers *receivers);

/* Returns true if busy polling for this event should be tried now. */
bool busy_poll_pays(struct busy_poll *poll);
/* Notes whether the event came while a thread busy-polled for it. */
void busy_poll_note(struct busy_poll *poll, bool came);

#endif
