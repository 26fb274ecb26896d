/*
 * The kernel's protocol of FUSE over io_uring, which the headers of older systems do not have.
 *
 * Source: Linux 6.14, include/uapi/linux/fuse.h, protocol 7.42.
 */
#ifndef DLFS_FUSE_URING_PROTOCOL_H
#define DLFS_FUSE_URING_PROTOCOL_H

#include <stdint.h>

#define COMMAND_REGISTER 1u
#define COMMAND_COMMIT_AND_FETCH 2u
#define HEADER_BYTES 128u  /* of each of the two parts of a header */
#define COMMAND_OFFSET 48u /* of the command in a submission entry of 128 bytes */

/* struct fuse_uring_ent_in_out */
struct entry_state {
    uint64_t flags;
    uint64_t commit_id; /* identifies the request in COMMIT_AND_FETCH */
    uint32_t payload_bytes;
    uint32_t padding;
    uint64_t reserved;
};

/* struct fuse_uring_req_header */
struct entry_header {
    uint8_t in_out[HEADER_BYTES]; /* fuse_in_header of the request, fuse_out_header of the reply */
    uint8_t arguments[HEADER_BYTES]; /* first arguments, of an operation that has some */
    struct entry_state state;
};

/* struct fuse_uring_cmd_req */
struct entry_command {
    uint64_t flags;
    uint64_t commit_id;
    uint16_t queue;
    uint8_t padding[62]; /* to the end of the submission entry */
};

_Static_assert(sizeof(struct entry_header) == 288, "the kernel's layout");
_Static_assert(sizeof(struct entry_command) == 80, "the kernel's layout");

#endif
