/*
 * Block devices and their queue pairs: files, disks, memory, devices of other libraries.
 * NVMe over TCP is in nvme.h, devices that fail on purpose in testing.h. The conventions are
 * those of dlfs.h.
 */
#ifndef DLFS_PUBLIC_DEVICE_H
#define DLFS_PUBLIC_DEVICE_H

#include <dlfs/codes.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dlfs_device dlfs_device;
typedef struct dlfs_queue dlfs_queue;

#define DLFS_OPEN_WRITE 1u /* else read-only */
/* Never O_DIRECT (file systems without it fall back to this by themselves). */
#define DLFS_OPEN_BUFFERED 2u

#define DLFS_ENGINE_AUTO 0u    /* io_uring where the kernel allows it, else threads */
#define DLFS_ENGINE_URING 1u   /* io_uring or an error */
#define DLFS_ENGINE_THREADS 2u /* a pool of threads with preadv/pwritev */

/*
 * Opens a regular file or a block device. Uses O_DIRECT unless told otherwise or the file system
 * refuses it. Errors: -errno of open; -ENOTBLK when it is neither; -ENOSYS or -EPERM when engine is
 * URING and the kernel has none or forbids it.
 */
DLFS_API int dlfs_device_open_file(const char *path, uint32_t flags, uint32_t engine,
                                   dlfs_device **out);
/*
 * A device in memory, zeroed. size_bytes: a multiple of block_bytes; block_bytes: a power of two,
 * 512..65536.
 */
DLFS_API int dlfs_device_create_memory(uint64_t size_bytes, uint32_t block_bytes,
                                       dlfs_device **out);

/*
 * A device of another library, as dlfs/external.h describes; the description is copied. The new
 * device owns external->device from here on. Errors, with nothing taken over: -EINVAL (sizes),
 * -EPROTONOSUPPORT (built for another version of external.h), -ENOMEM.
 */
struct dlfs_external;
DLFS_API int dlfs_device_create_external(const struct dlfs_external *external, dlfs_device **out);

/*
 * Frees a device. Its queue pairs must have been destroyed: -EBUSY otherwise, and nothing is freed.
 * What else borrows the device must be gone too, which is not checked: a fault device over it,
 * readers (dlfs_reader_config), volumes (dlfs_mount_devices of api.h). No other thread may be using
 * it. NULL: 0.
 */
DLFS_API int dlfs_device_destroy(dlfs_device *device);
/* The next four: any threads at once. */
DLFS_API uint64_t dlfs_device_size_bytes(const dlfs_device *device);
DLFS_API uint32_t dlfs_device_block_bytes(const dlfs_device *device);
/* "uring", "threads", "memory", "nvme-tcp", "fault", or the word of another library. */
DLFS_API const char *dlfs_device_kind(const dlfs_device *device);
/* Makes every write that has completed durable. Blocks. -errno. */
DLFS_API int dlfs_device_flush(dlfs_device *device);

/*
 * Makes a queue pair: one thread's private path to a device, which must outlive it. depth:
 * 1..DLFS_DEPTH_MAX operations in flight. Any threads may make and destroy queue pairs of one
 * device at once, and use many of them at once; a single one is used and destroyed by one thread at
 * a time, which need not be the one that made it. Errors: -EINVAL (depth); -ENOMEM; -errno of what
 * the kind needs (io_uring, threads); of NVMe over TCP those said there; DLFS_E_LOST. It belongs to
 * the process that made it: in a forked child it can be destroyed, which neither waits nor touches
 * the parent's; every other call returns DLFS_E_CLOSED. A child may go on using the device.
 */
DLFS_API int dlfs_queue_create(dlfs_device *device, uint32_t depth, dlfs_queue **out);
/* Waits for what is in flight, then frees. */
DLFS_API void dlfs_queue_destroy(dlfs_queue *queue);
DLFS_API uint32_t dlfs_queue_depth(const dlfs_queue *queue);
/* Operations submitted and not yet returned by poll. */
DLFS_API uint32_t dlfs_queue_in_flight(const dlfs_queue *queue);
/*
 * Announces one memory range that most operations will use, so that the device can pin it
 * (registered buffers). A hint: 0 also when the device has no use for it or the process may not
 * lock that much memory. Replaces any earlier range; nothing may be in flight (-EBUSY). base NULL
 * withdraws it.
 */
DLFS_API int dlfs_queue_register(dlfs_queue *queue, void *base, size_t bytes);

#define DLFS_OP_READ 0u
#define DLFS_OP_WRITE 1u

typedef struct dlfs_operation {
    void *buffer;          /* aligned to the device's block size */
    uint64_t offset_bytes; /* a multiple of the block size */
    uint32_t length_bytes; /* a multiple of the block size, > 0 */
    uint32_t kind;         /* DLFS_OP_* */
    uint64_t tag;          /* the caller's own, returned with the completion */
} dlfs_operation;

typedef struct dlfs_completion {
    uint64_t tag;
    int64_t result; /* length_bytes, or an error code; a short transfer is DLFS_E_TRUNCATED */
} dlfs_completion;

/*
 * Submits up to count operations with one system call at most; returns how many were accepted
 * (fewer when the queue is full, 0 is possible). Errors, with nothing accepted: -EINVAL for a
 * misaligned or out-of-range operation, -EROFS for a write on a read-only device. */
DLFS_API int dlfs_queue_submit(dlfs_queue *queue, const dlfs_operation *operations, uint32_t count);
/*
 * Returns up to count completions, waiting up to timeout_ms for the first one (0: does not wait,
 * -1: for ever). 0 when nothing is in flight or the time has passed.
 */
DLFS_API int dlfs_queue_poll(dlfs_queue *queue, dlfs_completion *completions, uint32_t count,
                             int timeout_ms);
/*
 * A file descriptor that becomes readable when a poll with timeout 0 may have something to do or to
 * return, for those who wait for several queue pairs at once (ppoll, epoll). It is the queue
 * pair's own, the same for its whole life: wait for it and do nothing else. It may be readable for
 * nothing; and since some devices need a push that nothing announces (the kernel was short of
 * memory), poll every 100 ms at least. -ENOTSUP where the kind has none: it must then be polled.
 */
DLFS_API int dlfs_queue_descriptor(dlfs_queue *queue);
/*
 * Reads or writes one whole range of any length (in block multiples) through the queue pair, in
 * pieces of up to piece_bytes at its full depth, and waits. Nothing else may be in flight. The
 * first error ends it.
 */
DLFS_API int dlfs_queue_transfer(dlfs_queue *queue, uint32_t kind, void *buffer,
                                 uint64_t offset_bytes, uint64_t length_bytes,
                                 uint32_t piece_bytes);

#ifdef __cplusplus
}
#endif

#endif
