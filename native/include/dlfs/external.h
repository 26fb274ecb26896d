/*
 * Block devices that another library implements.
 *
 * Such a library does not link with libdlfs. It includes this header, fills in a struct
 * dlfs_external, and passes its address to the program that calls dlfs_device_create_external.
 * libdlfs checks and counts every operation before it calls these functions, as for its own kinds
 * of device, so that readers use such a device like any other.
 *
 * Return values are those of dlfs.h: 0 or a count, -errno, DLFS_E_*.
 */
#ifndef DLFS_EXTERNAL_H
#define DLFS_EXTERNAL_H

#include <dlfs/device.h>

/* Version of the structures below. libdlfs refuses a library that was built for another one. */
#define DLFS_EXTERNAL_VERSION 2u

struct dlfs_external_ops {
    uint32_t version; /* DLFS_EXTERNAL_VERSION of the header it was compiled with */
    uint32_t reserved;
    /* Makes every completed write durable. Blocks. Any threads at once. */
    int (*flush)(void *device);
    /*
     * Destroys the device; no queue pair exists any more. In a forked child it frees the child's
     * copy and leaves the parent's alone.
     */
    void (*destroy)(void *device);
    /* Creates a queue pair. depth is within 1..DLFS_DEPTH_MAX. Any threads at once. */
    int (*queue_create)(void *device, uint32_t depth, void **out);
    /*
     * This function and those below it are called by one thread at a time for one queue pair.
     * Operations are valid, and in flight + count <= depth. Returns how many were accepted; after
     * an error none was.
     */
    int (*queue_submit)(void *queue, const dlfs_operation *operations, uint32_t count);
    /*
     * Returns completions, and waits for them, like dlfs_queue_poll. count >= 1 and at least one
     * operation is in flight.
     */
    int (*queue_poll)(void *queue, dlfs_completion *completions, uint32_t count, int timeout_ms);
    /*
     * Implements dlfs_queue_register, with no operation in flight. NULL: the library does not need
     * it.
     */
    int (*queue_register)(void *queue, void *base, size_t bytes);
    /* Implements dlfs_queue_descriptor. NULL: the library has no descriptor. */
    int (*queue_descriptor)(void *queue);
    /* Destroys a queue pair. No operation is in flight, unless a poll failed permanently. */
    void (*queue_destroy)(void *queue);
    /*
     * Frees a forked child's copy of a queue pair, without waiting for or touching resources that
     * the parent shares.
     */
    void (*queue_abandon)(void *queue);
    /*
     * Implement dlfs_device_generation and dlfs_device_limit_writes. Any threads at once. NULL:
     * writes cannot be limited.
     */
    int (*generation)(void *device, uint64_t *generation);
    int (*limit_writes)(void *device, uint64_t generation, uint64_t until_ns);
};

struct dlfs_external {
    const struct dlfs_external_ops *ops; /* must outlive the device */
    void *device;                        /* first argument of the device's functions */
    const char *kind;                    /* one word; must outlive the device */
    uint64_t size_bytes;                 /* a multiple of block_bytes */
    uint32_t block_bytes;                /* a power of two, 512..65536 */
    uint32_t writable;                   /* 0 or 1 */
};

#endif
