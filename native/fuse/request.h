/*
 * Requests of the kernel, and replies to them. A request comes through /dev/fuse or over io_uring;
 * only where its reply goes differs (reply_path).
 *
 * Source: Linux, include/uapi/linux/fuse.h and fs/fuse/dev.c.
 */
#ifndef DLFS_FUSE_REQUEST_H
#define DLFS_FUSE_REQUEST_H

#include <linux/fuse.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define REPLY_PIECES_MAX 64u
#define LISTING_BYTES_MAX (128u << 10) /* of a reply */

struct dlfs_fuse;
struct entry;
struct reply_path;

/* Sends a reply: its header and, unless that has an error, other parts. Returns false if the kernel
 * does not take it. */
typedef bool send_reply(const struct reply_path *path, const struct iovec *parts, int part_count);

/* Where the reply to a request goes. Any thread may reply, once. */
struct reply_path {
    struct dlfs_fuse *fuse;
    uint64_t unique; /* ID of the request */
    send_reply *send;
    int kernel;          /* descriptor of /dev/fuse that the request was read from */
    struct entry *entry; /* that the request came in over io_uring */
};

/* A request whose bytes were checked: the operation's structure and name are complete. */
struct kernel_request {
    struct reply_path reply;
    uint32_t opcode;
    uint64_t inode;
    const uint8_t *arguments; /* the operation's structure; not aligned */
    const char *name;         /* first string after it; NULL if the operation has none */
};

static inline struct dlfs_fuse *fuse_of(const struct kernel_request *request)
{
    return request->reply.fuse;
}

/* Sends a reply that was read from /dev/fuse. */
bool send_to_device(const struct reply_path *path, const struct iovec *parts, int part_count);
/* Replies with an errno > 0, or with 0 and no data. */
void reply_error(const struct reply_path *path, int error);
/* Replies with data. Returns false if the kernel does not take it: the request was interrupted. */
bool reply_data(const struct reply_path *path, const void *data, size_t bytes);
/* Replies with data that lies in up to REPLY_PIECES_MAX pieces. */
bool reply_pieces(const struct reply_path *path, const struct iovec *pieces, uint32_t count);

#endif
