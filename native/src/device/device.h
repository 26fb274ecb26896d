/*
 * Block devices inside the library: the interface that a kind of device implements, and the queue
 * pairs that threads share.
 *
 * device.c and queue.c do everything that all kinds have in common (validation, counting, fork
 * checks, whole transfers) and call the functions of a kind. A kind embeds struct dlfs_device and
 * struct dlfs_queue as the first member of its own structures. A kind whose hardware limits a
 * transfer (MDTS) splits operations itself.
 *
 * A kind may be in another library, which is not linked with this one: it fills in the first fields
 * of struct dlfs_device and gives the device to dlfs_device_create_external.
 *
 * queues.c lends queue pairs to threads: dlfs_queue_acquire and dlfs_queue_release.
 */
#ifndef DLFS_DEVICE_H
#define DLFS_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "dlfs/dlfs.h"

#define DLFS_BLOCK_BYTES_MIN 512u
#define DLFS_BLOCK_BYTES_MAX 65536u
/* Longest request to the kernel; the remainder of a longer operation is requested afterwards. */
#define DLFS_REQUEST_BYTES_MAX (UINT32_C(1) << 30)
/*
 * Attempts for a request that was interrupted (EINTR, EAGAIN, ECANCELED), before its error is
 * reported.
 */
#define DLFS_INTERRUPTED_MAX 16u

/* When to give up creating a queue pair. All zero: never. */
struct dlfs_connect_limit {
    const _Atomic bool *stop; /* soon after this is set; or NULL */
    uint64_t until_ns;        /* at this time of the monotonic clock; or 0 */
};

/* Version of the structures below. A device of a library that was built for another is refused. */
#define DLFS_EXTERNAL_VERSION 3u

struct dlfs_device_ops {
    /* DLFS_EXTERNAL_VERSION; kinds of this library leave it 0. */
    uint32_t version;
    /*
     * Creates a queue pair and sets its ops. depth is within 1..DLFS_DEPTH_MAX. A kind that waits
     * for a network ends at the limit, which may be NULL, with DLFS_E_TIMEOUT. Any threads at once.
     */
    int (*queue_create)(dlfs_device *device, uint32_t depth, const struct dlfs_connect_limit *limit,
                        dlfs_queue **out);
    /* Makes every completed write durable. Blocks. Any threads at once. */
    int (*flush)(dlfs_device *device);
    /* Returns the most queue pairs that the device allows at once. NULL: the kind has no limit. */
    uint32_t (*queues_max)(dlfs_device *device);
    /*
     * Destroys the device; no queue pair exists any more. In a forked child it frees the child's
     * copy and leaves the parent's alone.
     */
    void (*destroy)(dlfs_device *device);
    /*
     * Implement dlfs_device_incarnation and dlfs_device_limit_writes. NULL: the kind does not have
     * them.
     */
    int (*incarnation)(dlfs_device *device, uint64_t *incarnation);
    int (*limit_writes)(dlfs_device *device, uint64_t incarnation, uint64_t until_ns);
    /* Implements dlfs_device_operation_ms. NULL: the kind does not retry. */
    uint32_t (*operation_ms)(const dlfs_device *device);
};

struct dlfs_queue_ops {
    /*
     * Submits operations, which are valid, with in_flight + count <= depth. Returns how many were
     * accepted; after an error none was.
     */
    int (*submit)(dlfs_queue *queue, const dlfs_operation *operations, uint32_t count);
    /*
     * Returns completions, and waits for them, like dlfs_queue_poll. count >= 1 and at least one
     * operation is in flight.
     */
    int (*poll)(dlfs_queue *queue, dlfs_completion *completions, uint32_t count, int timeout_ms);
    /* Implements dlfs_queue_descriptor. NULL: the kind has no descriptor. */
    int (*descriptor)(dlfs_queue *queue);
    /*
     * Implements dlfs_queue_register, with no operation in flight. NULL: the kind does not need it.
     */
    int (*register_range)(dlfs_queue *queue, void *base, size_t bytes);
    /* Destroys a queue pair. No operation is in flight, unless a poll failed permanently, or
     * drops_operations allows it. */
    void (*destroy)(dlfs_queue *queue);
    /* Returns true if destroy ends the operations in flight, all of which read. NULL: never. */
    bool (*drops_operations)(const dlfs_queue *queue);
    /*
     * Frees a forked child's copy of a queue pair, without waiting for or touching resources that
     * the parent shares.
     */
    void (*abandon)(dlfs_queue *queue);
};

/* A thread that waits for a queue pair of one device; all zero while it does not wait, but for
 * `limit`. */
struct dlfs_queue_waiter {
    struct dlfs_queue_waiter *next;
    dlfs_queue *queue;               /* handed over by the thread that released it */
    struct dlfs_connect_limit limit; /* of creating a queue pair */
    uint64_t tried_ns;
    uint32_t depth;
    _Atomic enum { DLFS_WAITER_NONE, DLFS_WAITER_QUEUED, DLFS_WAITER_SERVED } state;
};

/* The queue pairs of a device that threads share (queues.c). */
struct dlfs_queues {
    dlfs_queue *idle; /* list of unused queue pairs, the last used one first */
    struct dlfs_queue_waiter *waiters;
    uint64_t full_until_ns; /* time until which the target accepts no more queue pairs; 0: it may
                               accept more */
    uint32_t process;       /* number of the process that all this belongs to */
    _Atomic uint32_t waiting;
    _Atomic uint32_t creating; /* queue pairs being created, which queue_count does not count yet */
};

struct dlfs_device {
    const struct dlfs_device_ops *ops;
    const char *kind;    /* one word */
    uint64_t size_bytes; /* a multiple of block_bytes */
    uint32_t block_bytes;
    bool writable;
    _Atomic uint32_t queue_count;
    _Atomic uint32_t references; /* twice their number; odd once the owner has destroyed it */
    struct dlfs_queues queues;
};

struct dlfs_queue {
    const struct dlfs_queue_ops *ops;
    dlfs_device *device;
    uint32_t depth;
    uint32_t in_flight;     /* operations in flight, counted by queue.c */
    uint32_t process;       /* number of its process; any other one may only destroy it */
    dlfs_queue *next;       /* next queue pair in the list of idle ones */
    uint64_t idle_since_ns; /* time at which it became idle */
};

void dlfs_device_init(dlfs_device *device, const struct dlfs_device_ops *ops, const char *kind,
                      uint64_t size_bytes, uint32_t block_bytes, bool writable);
/* Returns true if a device may have such a size and blocks. */
bool dlfs_device_fits(uint64_t size_bytes, uint32_t block_bytes);
/* Destroys a queue pair. Threads that wait for one are not woken: dlfs_queue_destroy does both. */
void dlfs_queue_close(dlfs_queue *queue);

/*
 * Returns the number of this process: the forks between the process that loaded the library and
 * this one.
 */
uint32_t dlfs_process(void);
/*
 * Creates a queue pair like dlfs_queue_create, without waiting in line: DLFS_E_LIMIT when the
 * target has no more. Ends at the limit, which may be NULL, with DLFS_E_TIMEOUT.
 */
int dlfs_queue_make(dlfs_device *device, uint32_t depth, const struct dlfs_connect_limit *limit,
                    dlfs_queue **out);

/*
 * Acquires an idle queue pair, a new one, or one that another thread has handed over. -EAGAIN:
 * there is none yet. The waiter is then in line, and the caller tries again when
 * dlfs_queue_waiter_is_due. Other errors are those of dlfs_queue_make; the waiter is not in line
 * then.
 */
int dlfs_queue_acquire(dlfs_device *device, uint32_t depth, struct dlfs_queue_waiter *waiter,
                       dlfs_queue **out);
/* Returns true if threads wait in line: the owners of queue pairs are to release them soon. */
static inline bool dlfs_queues_wanted(const dlfs_device *device)
{
    return atomic_load_explicit(&device->queues.waiting, memory_order_relaxed) > 0;
}
bool dlfs_queue_waiter_is_due(const struct dlfs_queue_waiter *waiter, uint64_t now_ns);
/* Sleeps until a queue pair may be free for this waiter, at most timeout_ms. */
void dlfs_queue_waiter_wait(struct dlfs_queue_waiter *waiter, int timeout_ms);
void dlfs_queue_waiter_leave(dlfs_device *device, struct dlfs_queue_waiter *waiter);
/* Destroys the idle queue pairs. */
void dlfs_queues_close(dlfs_device *device);
uint32_t dlfs_queues_idle(const dlfs_device *device);
/* Returns the most queue pairs that the device may have. */
uint32_t dlfs_queues_max(dlfs_device *device);

/* Creates a queue pair like dlfs_queue_create, until until_ns of the monotonic clock. */
int dlfs_queue_create_until(dlfs_device *device, uint32_t depth, uint64_t until_ns,
                            dlfs_queue **out);
/*
 * Reads like dlfs_queue_transfer, until until_ns of the monotonic clock. DLFS_E_TIMEOUT: reads may
 * be in flight still, so the memory must stay until the queue pair is destroyed.
 */
int dlfs_queue_read_until(dlfs_queue *queue, void *buffer, uint64_t offset_bytes,
                          uint64_t length_bytes, uint32_t piece_bytes, uint64_t until_ns);

/*
 * Keeps a device until dlfs_device_release: dlfs_device_destroy returns 0 and leaves it to the last
 * holder, whose queue pairs have operations in flight that nobody waits for.
 */
void dlfs_device_retain(dlfs_device *device);
void dlfs_device_release(dlfs_device *device);
/* Waits for the operations in flight. Returns false if some may hang: nothing was answered for a
 * second, and the kind cannot drop them. */
bool dlfs_queue_ends(dlfs_queue *queue);

/* Returns the upper bound of one operation of a device that retries, with all retries, in
 * milliseconds; 0 for other kinds. */
uint32_t dlfs_device_operation_ms(const dlfs_device *device);

#endif
