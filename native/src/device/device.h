/*
 * What a kind of block device implements. device.c does everything that all kinds share
 * (validation, counting, fork checks, whole transfers) and calls these; a kind embeds struct
 * dlfs_device and struct dlfs_queue as the first member of its own structures, fills in the public
 * fields with dlfs_device_init and dlfs_queue_init, and needs nothing else to plug in. Kinds whose
 * hardware limits a transfer (MDTS) split inside.
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
/* A single request to the kernel is at most this long; longer operations go on from where it ended.
 */
#define DLFS_REQUEST_BYTES_MAX (UINT32_C(1) << 30)
/* How often an interrupted request (EINTR, EAGAIN, ECANCELED) is sent again before its error is
 * reported. */
#define DLFS_INTERRUPTED_MAX 16u

struct dlfs_device_ops {
    /* depth is within 1..DLFS_DEPTH_MAX. *out gets a queue on which dlfs_queue_init was called. */
    int (*queue_create)(dlfs_device *device, uint32_t depth, dlfs_queue **out);
    int (*flush)(dlfs_device *device);
    /* How many queue pairs the device allows at once. NULL where there is no such limit. */
    uint32_t (*queues_max)(dlfs_device *device);
    /* No queue pair exists any more. In a forked child it frees the child's copy and leaves the
     * parent's alone. */
    void (*destroy)(dlfs_device *device);
    /* As dlfs_nvme_get_generation and dlfs_nvme_limit_writes say. NULL where the kind has none. */
    int (*get_generation)(dlfs_device *device, uint64_t *generation);
    int (*limit_writes)(dlfs_device *device, uint64_t generation, uint64_t until_ns);
};

struct dlfs_queue_ops {
    /*
     * Operations are valid and fit: in_flight + count <= depth. Returns how many were accepted. An
     * error means that none was.
     */
    int (*submit)(dlfs_queue *queue, const dlfs_operation *operations, uint32_t count);
    /* count >= 1 and something is in flight. Waits as dlfs_queue_poll says. */
    int (*poll)(dlfs_queue *queue, dlfs_completion *completions, uint32_t count, int timeout_ms);
    /* As dlfs_queue_descriptor says. NULL where the kind has none. */
    int (*descriptor)(dlfs_queue *queue);
    /* Nothing is in flight. NULL where the kind has no use for it. */
    int (*register_range)(dlfs_queue *queue, void *base, size_t bytes);
    /* Nothing is in flight, unless poll failed for good. */
    void (*destroy)(dlfs_queue *queue);
    /* In a forked child: frees the child's copy without waiting for or touching what the parent
     * shares. */
    void (*abandon)(dlfs_queue *queue);
};

/* A thread's place in the line of those that wait for a queue pair; all zero: not in line. */
struct dlfs_queue_waiter {
    struct dlfs_queue_waiter *next;
    dlfs_queue *queue; /* handed over */
    uint64_t looked_ns;
    uint32_t depth;
    _Atomic enum { DLFS_WAITER_NONE, DLFS_WAITER_QUEUED, DLFS_WAITER_SERVED } state;
};

/* The queue pairs of a device that are shared (device/queues.c). */
struct dlfs_queues {
    dlfs_queue *resting; /* the one that was used last in front */
    struct dlfs_queue_waiter *line;
    uint64_t full_until_ns; /* the target has no more of them; 0: it may */
    uint32_t generation;    /* of the process that all this belongs to */
    _Atomic uint32_t waiting;
};

struct dlfs_device {
    const struct dlfs_device_ops *ops;
    const char *kind;
    uint64_t size_bytes; /* a multiple of block_bytes */
    uint32_t block_bytes;
    bool writable;
    _Atomic uint32_t queue_count;
    struct dlfs_queues queues;
};

struct dlfs_queue {
    const struct dlfs_queue_ops *ops;
    dlfs_device *device;
    uint32_t depth;
    uint32_t in_flight;  /* kept by device.c */
    uint32_t generation; /* of the process that made it; another one may only destroy it */
    dlfs_queue *next;    /* at rest */
    uint64_t rested_ns;  /* ... since */
};

void dlfs_device_init(dlfs_device *device, const struct dlfs_device_ops *ops, const char *kind,
                      uint64_t size_bytes, uint32_t block_bytes, bool writable);
/* Called by queue_create of a kind; counts the queue on its device. */
void dlfs_queue_init(dlfs_queue *queue, const struct dlfs_queue_ops *ops, dlfs_device *device,
                     uint32_t depth);

/* How many forks lie between this process and the one that loaded the library. */
uint32_t dlfs_generation(void);
/* dlfs_queue_create, but it does not wait: DLFS_E_LIMIT when the target has no more of them. */
int dlfs_queue_make(dlfs_device *device, uint32_t depth, dlfs_queue **out);

/*
 * Takes a queue pair that rests, or a new one, for a while: one that was borrowed before, or is
 * handed over now. -EAGAIN: there is none; `waiter` is in line, and the caller asks again when
 * dlfs_queue_waiter_is_due. Else as dlfs_queue_make, and `waiter` is not in line.
 */
int dlfs_queue_borrow(dlfs_device *device, uint32_t depth, struct dlfs_queue_waiter *waiter,
                      dlfs_queue **out);
/* Gives it back, with nothing in flight, to the first in line or to rest. A queue pair that failed
 * is destroyed instead. */
void dlfs_queue_give_back(dlfs_queue *queue);
/* Whether the line is not empty: threads that hold a queue pair are to give way soon. */
static inline bool dlfs_queues_wanted(const dlfs_device *device)
{
    return atomic_load_explicit(&device->queues.waiting, memory_order_relaxed) > 0;
}
bool dlfs_queue_waiter_is_due(const struct dlfs_queue_waiter *waiter, uint64_t now_ns);
/* Sleeps until there may be a queue pair for a waiter that is in line, at most timeout_ms. */
void dlfs_queue_waiter_wait(struct dlfs_queue_waiter *waiter, int timeout_ms);
void dlfs_queue_waiter_leave(dlfs_device *device, struct dlfs_queue_waiter *waiter);
/* A queue pair of the device was destroyed. */
void dlfs_queues_changed(dlfs_device *device);
/* Destroys those at rest. */
void dlfs_queues_close(dlfs_device *device);
uint32_t dlfs_queues_resting(const dlfs_device *device);
/* How many there may be. */
uint32_t dlfs_queues_max(dlfs_device *device);

/* A file or block device that is open; what the two engines share. */
struct dlfs_file_device {
    dlfs_device base;
    int descriptor;
};

/* 0 when this process may use io_uring with what the engine needs, else -errno. */
int dlfs_uring_probe(void);
int dlfs_uring_queue_create(dlfs_device *device, uint32_t depth, dlfs_queue **out);
int dlfs_threads_queue_create(dlfs_device *device, uint32_t depth, dlfs_queue **out);
/* A negative errno of a read or write as a completion's result: DLFS_E_LOST when the device has
 * gone. */
int64_t dlfs_file_result(int64_t error);

/*
 * Upper bound of one operation of an NVMe/TCP device, retries included, in milliseconds; 0 for
 * other kinds.
 */
uint32_t dlfs_nvme_operation_ms(const dlfs_device *device);

#endif
