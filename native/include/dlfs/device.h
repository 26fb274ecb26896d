/*
 * Block devices and their queue pairs: files, disks, memory, devices of other libraries. NVMe over
 * TCP is in nvme.h. The conventions are those of dlfs.h.
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

#define DLFS_OPEN_WRITE 1u /* without this flag the device is read-only */
/*
 * Use the page cache rather than O_DIRECT. File systems without O_DIRECT always use the page cache.
 */
#define DLFS_OPEN_BUFFERED 2u

#define DLFS_ENGINE_AUTO 0u    /* io_uring if the kernel allows it, else threads */
#define DLFS_ENGINE_URING 1u   /* io_uring, or the error of its set-up */
#define DLFS_ENGINE_THREADS 2u /* a pool of threads that call preadv and pwritev */

/*
 * Opens a regular file or a block device. Uses O_DIRECT unless the flags or the file system forbid
 * it. Errors: -errno of open; -ENOTBLK when the path is neither; -ENOSYS or -EPERM when the engine
 * is URING and the kernel does not have or allow io_uring.
 */
DLFS_API int dlfs_device_open_file(const char *path, uint32_t flags, uint32_t engine,
                                   dlfs_device **out);
/*
 * Creates a device in memory, filled with zeros. size_bytes is a multiple of block_bytes, which is
 * a power of two in 512..65536.
 */
DLFS_API int dlfs_device_create_memory(uint64_t size_bytes, uint32_t block_bytes,
                                       dlfs_device **out);

/*
 * Completes a device that another library implements, as libdlfs_spdk does (src/device/device.h),
 * and returns it in *out. Errors, after which it is still that library's: -EINVAL (sizes),
 * -EPROTONOSUPPORT (the library was built for another version of libdlfs).
 */
DLFS_API int dlfs_device_create_external(dlfs_device *external, dlfs_device **out);

/*
 * Destroys a device. Returns -EBUSY, and frees nothing, while a queue pair of it exists. Other
 * objects that borrow the device must be gone too, which is not checked: readers
 * (dlfs_reader_config) and volumes (dlfs_mount_devices). No other thread may be using it. If reads
 * of a destroyed reader hang, the device is freed when they have ended. NULL: returns 0.
 */
DLFS_API int dlfs_device_destroy(dlfs_device *device);
/* Any threads may call the next four functions at once. */
DLFS_API uint64_t dlfs_device_size_bytes(const dlfs_device *device);
DLFS_API uint32_t dlfs_device_block_bytes(const dlfs_device *device);
/*
 * Returns "uring", "threads", "memory", "nvme-tcp", or the kind that another library named.
 */
DLFS_API const char *dlfs_device_kind(const dlfs_device *device);
/* Makes every completed write durable. Blocks. Errors: -errno. */
DLFS_API int dlfs_device_flush(dlfs_device *device);
/*
 * Returns the descriptor of a file or disk, which the device owns. A device that is open for
 * writing uses it for every operation, by its number: another open file of the same file may take
 * its place (dup2) while operations are in flight. -ENOTSUP: the kind of device has none.
 */
DLFS_API int dlfs_device_descriptor(const dlfs_device *device);

/*
 * Creates a queue pair, which is one thread's private path to a device and must not outlive it.
 * depth is the number of operations in flight, 1..DLFS_DEPTH_MAX.
 *
 * Threads: any threads may create, use and destroy different queue pairs of one device at once. One
 * queue pair is used and destroyed by one thread at a time, which need not be the thread that
 * created it.
 *
 * Forks: a queue pair belongs to the process that created it. A forked child may destroy it, which
 * neither waits nor affects the parent; every other call returns DLFS_E_CLOSED. A child may go on
 * using the device.
 *
 * Errors: -EINVAL (depth), -ENOMEM, -errno of the resources that the kind of device needs
 * (io_uring, threads), the errors named in nvme.h, DLFS_E_LOST.
 */
DLFS_API int dlfs_queue_create(dlfs_device *device, uint32_t depth, dlfs_queue **out);
/*
 * Waits for the operations in flight, then destroys the queue pair. Reads of a kind of device that
 * can drop them (NVMe/TCP) are waited for until nothing is answered for a tenth of a second. No
 * buffer is written to afterwards.
 */
DLFS_API void dlfs_queue_destroy(dlfs_queue *queue);
/*
 * Gives a queue pair without operations in flight and without a registered range back to its
 * device, which keeps it for the next one of its depth. One that failed is destroyed instead.
 */
DLFS_API void dlfs_queue_release(dlfs_queue *queue);
DLFS_API uint32_t dlfs_queue_depth(const dlfs_queue *queue);
/* Returns the number of operations that were submitted and not yet returned by dlfs_queue_poll. */
DLFS_API uint32_t dlfs_queue_in_flight(const dlfs_queue *queue);
/*
 * Announces one memory range that most operations will use, so that the device can pin it
 * (registered buffers). This is a hint: the result is 0 also when the device does not need it or
 * the process may not lock that much memory. A new range replaces the earlier one; base NULL
 * removes it. Errors: -EBUSY while operations are in flight.
 */
DLFS_API int dlfs_queue_register(dlfs_queue *queue, void *base, size_t bytes);

#define DLFS_OP_READ 0u
#define DLFS_OP_WRITE 1u

typedef struct dlfs_operation {
    void *buffer;          /* aligned to the device's block size */
    uint64_t offset_bytes; /* a multiple of the block size */
    uint32_t length_bytes; /* a multiple of the block size, > 0 */
    uint32_t kind;         /* DLFS_OP_* */
    uint64_t tag;          /* chosen by the caller; the completion returns it */
} dlfs_operation;

typedef struct dlfs_completion {
    uint64_t tag;
    int64_t result; /* length_bytes, or an error code; DLFS_E_TRUNCATED after a short transfer */
} dlfs_completion;

/*
 * Submits up to count operations with at most one system call. Returns the number of accepted
 * operations, which is smaller than count when the queue is full and may be 0. Errors, after which
 * none was accepted: -EINVAL (a misaligned or out-of-range operation), -EROFS (a write to a
 * read-only device).
 */
DLFS_API int dlfs_queue_submit(dlfs_queue *queue, const dlfs_operation *operations, uint32_t count);
/*
 * Returns up to count completions. Waits up to timeout_ms for the first one; 0: does not wait, -1:
 * waits without limit. Returns 0 when no operation is in flight or the time has passed.
 */
DLFS_API int dlfs_queue_poll(dlfs_queue *queue, dlfs_completion *completions, uint32_t count,
                             int timeout_ms);
/*
 * Returns a file descriptor that becomes readable when a poll with timeout 0 may have work to do or
 * completions to return. A thread can thus wait for several queue pairs at once (ppoll, epoll). The
 * queue pair owns the descriptor, which stays the same for its life: wait for it and do nothing
 * else. It may become readable without a completion. Some devices can run short of kernel memory
 * and need a poll that no event announces; so poll every 100 ms at least. -ENOTSUP: this kind of
 * device has no descriptor and must be polled.
 */
DLFS_API int dlfs_queue_descriptor(dlfs_queue *queue);
/*
 * Reads or writes one range of any length (a multiple of the block size) and waits. The range is
 * divided into operations of up to piece_bytes, which are in flight at the queue pair's full depth.
 * No other operation may be in flight. The first error ends the transfer.
 */
DLFS_API int dlfs_queue_transfer(dlfs_queue *queue, uint32_t kind, void *buffer,
                                 uint64_t offset_bytes, uint64_t length_bytes,
                                 uint32_t piece_bytes);

DLFS_API int dlfs_device_incarnation(dlfs_device *device, uint64_t *incarnation);
#define DLFS_WRITES_FREE INT64_MAX /* deadline of writes that need no lease */
/*
 * Limits writes to a lease. Writes are sent only through the controller of that incarnation, and
 * only before until_ns of CLOCK_BOOTTIME. (dlfs_device_incarnation returns the incarnation in use,
 * or else the next one.) Through a later controller, writes wait. After until_ns no part of a write
 * is sent, and it ends with -EKEYEXPIRED. In a forked child the lease has ended. -ENOTSUP: the kind
 * of device has no controller.
 */
DLFS_API int dlfs_device_limit_writes(dlfs_device *device, uint64_t incarnation, uint64_t until_ns);

#ifdef __cplusplus
}
#endif

#endif
