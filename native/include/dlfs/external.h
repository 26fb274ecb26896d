/*
 * Block devices that live in libraries of their own.
 *
 * Such a library links with nothing of libdlfs: it includes this header, fills in a struct
 * dlfs_external, and hands its address to whoever calls dlfs_device_create_external. libdlfs checks
 * and counts every operation before it calls these functions, exactly as for its own kinds, so that
 * native readers drive such a device without knowing.
 *
 * Return values are those of dlfs.h: 0 or a count, -errno, DLFS_E_*.
 */
#ifndef DLFS_EXTERNAL_H
#define DLFS_EXTERNAL_H

#include <dlfs/device.h>

/* Changes whenever the structures below do; a library built for another one is refused. */
#define DLFS_EXTERNAL_VERSION 2u

struct dlfs_external_ops {
    uint32_t version; /* DLFS_EXTERNAL_VERSION of the header it was compiled with */
    uint32_t reserved;
    /* Makes every write that has completed durable. Blocks. Any threads at once. */
    int (*flush)(void *device);
    /* Ends the device: no queue pair exists any more. In a forked child it frees the child's copy
     * and leaves the parent's alone. */
    void (*destroy)(void *device);
    /* Any threads at once. depth is within 1..DLFS_DEPTH_MAX. */
    int (*queue_create)(void *device, uint32_t depth, void **out);
    /* The rest: one thread at a time for one queue pair. Operations are valid and fit: in flight +
     * count <= depth. Returns how many were accepted; an error means that none was. */
    int (*queue_submit)(void *queue, const dlfs_operation *operations, uint32_t count);
    /* count >= 1 and something is in flight. Waits as dlfs_queue_poll says. */
    int (*queue_poll)(void *queue, dlfs_completion *completions, uint32_t count, int timeout_ms);
    /* As dlfs_queue_register says, with nothing in flight. NULL where there is no use for it. */
    int (*queue_register)(void *queue, void *base, size_t bytes);
    /* As dlfs_queue_descriptor says. NULL where there is none. */
    int (*queue_descriptor)(void *queue);
    /* Nothing is in flight, unless poll failed for good. */
    void (*queue_destroy)(void *queue);
    /* In a forked child: frees the child's copy without waiting for or touching what the parent
     * shares. */
    void (*queue_abandon)(void *queue);
    /* As dlfs_nvme_get_generation and dlfs_nvme_limit_writes say. Any threads at once. NULL where
     * writes cannot be limited. */
    int (*get_generation)(void *device, uint64_t *generation);
    int (*limit_writes)(void *device, uint64_t generation, uint64_t until_ns);
};

struct dlfs_external {
    const struct dlfs_external_ops *ops; /* outlives the device */
    void *device;                        /* what its functions are given */
    const char *kind;                    /* one word; outlives the device */
    uint64_t size_bytes;                 /* a multiple of block_bytes */
    uint32_t block_bytes;                /* a power of two, 512..65536 */
    uint32_t writable;                   /* 0 or 1 */
};

#endif
