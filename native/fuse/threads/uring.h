/*
 * Requests and replies over io_uring, in place of reads and writes of /dev/fuse.
 *
 * The kernel has one queue of requests for each processor, and sends a request to the queue of the
 * processor that the program runs on. Each queue has some entries: memory for one request and its
 * reply. Each entry has a thread of its own, bound to that processor, with a ring of its own. So
 * the program's processor answers, no request wakes another one, and one system call sends a reply
 * and waits for the next request. The kernel prefers the entry that was used last.
 *
 * A request is served as if it had been read from /dev/fuse; its reply is copied to the entry.
 * Requests without a reply (FORGET, INTERRUPT) and the first one (INIT) still come through
 * /dev/fuse, and so do all if the kernel does not offer io_uring.
 *
 * Source: Linux 6.14, include/uapi/linux/fuse.h and fs/fuse/dev_uring.c.
 */
#ifndef DLFS_FUSE_URING_H
#define DLFS_FUSE_URING_H

#include <stdint.h>

struct dlfs_fuse;
struct rings;

/*
 * Starts the threads and their rings, which wait for rings_register, with entries for payloads of
 * up to payload_bytes. Returns the number of queues. Called when INIT has come, before the kernel
 * gets the reply, since it then waits for all queues. A ring that fails later makes the mount end.
 * Errors: -ENOSYS (built without liburing, or the processors are unknown), -EPERM (io_uring is
 * forbidden), -ENOMEM, -EAGAIN.
 */
int rings_start(struct dlfs_fuse *fuse, uint64_t payload_bytes, struct rings **out);
/*
 * Registers all entries. Called when the kernel has the reply to INIT. After an error the kernel
 * sends all requests through /dev/fuse, or the mount ends.
 */
int rings_register(struct rings *rings);
/* Ends the threads, after the requests that they are handling. Returns the error that a ring failed
 * with, or 0. */
int rings_stop(struct rings *rings);
/* Stops and frees. Accepts NULL. */
void rings_destroy(struct rings *rings);

#endif
