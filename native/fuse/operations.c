/*
 * The table of handlers: what the mount negotiates with the kernel, opens, and refusals to write.
 *
 * Files are normally not opened at the server: the first OPEN is refused with ENOSYS, and from then
 * on the kernel opens and closes files without a request. A kernel without that feature sends OPEN
 * requests, which succeed. Every operation that is not in the table fails with ENOSYS, and the
 * kernel does without it.
 */
#include "operations.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

/* Most background requests under way, which no program waits for yet: the kernel's own read-ahead.
 */
#define BACKGROUND_MAX 64u
#define MINOR_MIN 23u  /* of the protocol; since Linux 3.15 */
#define MINOR_USED 31u /* of the protocol; what came later is a flag of INIT */
#define TIME_UNIT_NS 1u

/*
 * No FUSE_ATOMIC_O_TRUNC: the kernel would take a file opened with O_TRUNC for empty, without a
 * request. No FUSE_AUTO_INVAL_DATA: files never change, so the kernel need not revalidate its cache
 * at each read. No FUSE_READDIRPLUS_AUTO: every listing includes attributes, since a program that
 * lists a directory then reads its files.
 */
#define FLAGS                                                                                   \
    ((uint32_t)(FUSE_ASYNC_READ | FUSE_EXPORT_SUPPORT | FUSE_BIG_WRITES | FUSE_DO_READDIRPLUS | \
                FUSE_ASYNC_DIO | FUSE_MAX_PAGES | FUSE_INIT_EXT))

#define WRITE_FLAGS (O_WRONLY | O_RDWR | O_TRUNC | O_APPEND)

/* ---- connection ------------------------------------------------------------------------------ */

int negotiate(struct dlfs_fuse *fuse, const uint8_t *bytes, size_t byte_count,
              struct fuse_init_in *init, struct fuse_init_out *reply)
{
    struct fuse_in_header header;
    if (byte_count < sizeof header) {
        return -EINVAL;
    }
    memcpy(&header, bytes, sizeof header);
    byte_count -= sizeof header;
    if (header.opcode != FUSE_INIT || byte_count < offsetof(struct fuse_init_in, flags2)) {
        return -EINVAL;
    }
    memset(init, 0, sizeof *init); /* older kernels send less */
    memcpy(init, bytes + sizeof header, byte_count < sizeof *init ? byte_count : sizeof *init);
    if (init->major != FUSE_KERNEL_VERSION || init->minor < MINOR_MIN) {
        return -EPROTO;
    }
    fuse->open_requests = (init->flags & FUSE_NO_OPEN_SUPPORT) == 0;
    fuse->opendir_requests = (init->flags & FUSE_NO_OPENDIR_SUPPORT) == 0;
    *reply = (struct fuse_init_out){
        .major = FUSE_KERNEL_VERSION,
        .minor = MINOR_USED,
        .max_readahead = init->max_readahead,
        .flags = init->flags & FLAGS,
        .max_background = BACKGROUND_MAX,
        .congestion_threshold = BACKGROUND_MAX * 3 / 4,
        .max_write = REQUEST_DATA_BYTES_MAX,
        .time_gran = TIME_UNIT_NS,
        .max_pages = (uint16_t)(REQUEST_DATA_BYTES_MAX / PAGE_BYTES_MIN),
    };
    return 0;
}

static void reply_open(const struct kernel_request *request, bool open_requests)
{
    const struct fuse_open_out open = {.open_flags = FOPEN_KEEP_CACHE | FOPEN_CACHE_DIR};
    count(&fuse_of(request)->counters.opens, 1);
    if (open_requests) {
        (void)reply_data(&request->reply, &open, sizeof open);
    } else {
        reply_error(&request->reply, ENOSYS);
    }
}

static void handle_open(const struct kernel_request *request)
{
    struct fuse_open_in open;
    memcpy(&open, request->arguments, sizeof open);
    if (open.flags & WRITE_FLAGS) {
        reply_error(&request->reply, EROFS);
    } else {
        reply_open(request, fuse_of(request)->open_requests);
    }
}

static void handle_opendir(const struct kernel_request *request)
{
    reply_open(request, fuse_of(request)->opendir_requests);
}

static void forward(const struct kernel_request *request)
{
    upcall_forward(&fuse_of(request)->upcalls, request);
}

static void acknowledge(const struct kernel_request *request)
{
    reply_error(&request->reply, 0);
}

/* The kernel refuses changes itself, unless root has remounted the file system for writing. */
static void refuse(const struct kernel_request *request)
{
    reply_error(&request->reply, EROFS);
}

/* ---- the table ------------------------------------------------------------------------------- */

struct operation {
    void (*handle)(const struct kernel_request *request);
    size_t argument_bytes; /* of the structure before the name */
    bool has_name;
};

static const struct operation OPERATIONS[] = {
    [FUSE_LOOKUP] = {handle_lookup, 0, true},
    [FUSE_GETATTR] = {handle_getattr, 0, false},
    [FUSE_READLINK] = {forward, 0, false},
    [FUSE_OPEN] = {handle_open, sizeof(struct fuse_open_in), false},
    [FUSE_READ] = {handle_read, sizeof(struct fuse_read_in), false},
    [FUSE_RELEASE] = {acknowledge, 0, false},
    [FUSE_OPENDIR] = {handle_opendir, 0, false},
    [FUSE_READDIR] = {handle_readdir, sizeof(struct fuse_read_in), false},
    [FUSE_READDIRPLUS] = {handle_readdir, sizeof(struct fuse_read_in), false},
    [FUSE_RELEASEDIR] = {acknowledge, 0, false},
    [FUSE_STATFS] = {forward, 0, false},
    [FUSE_GETXATTR] = {handle_getxattr, sizeof(struct fuse_getxattr_in), true},
    [FUSE_LISTXATTR] = {handle_listxattr, sizeof(struct fuse_getxattr_in), false},
    [FUSE_DESTROY] = {acknowledge, 0, false},
    [FUSE_SETATTR] = {refuse, 0, false},
    [FUSE_MKNOD] = {refuse, 0, false},
    [FUSE_MKDIR] = {refuse, 0, false},
    [FUSE_UNLINK] = {refuse, 0, false},
    [FUSE_RMDIR] = {refuse, 0, false},
    [FUSE_SYMLINK] = {refuse, 0, false},
    [FUSE_RENAME] = {refuse, 0, false},
    [FUSE_RENAME2] = {refuse, 0, false},
    [FUSE_LINK] = {refuse, 0, false},
    [FUSE_CREATE] = {refuse, 0, false},
    [FUSE_WRITE] = {refuse, 0, false},
    [FUSE_SETXATTR] = {refuse, 0, false},
    [FUSE_REMOVEXATTR] = {refuse, 0, false},
};

/* Returns true for requests that get no reply. The server keeps no state of inodes to be forgotten,
 * and lets a request that was interrupted go on. */
static bool is_without_reply(uint32_t opcode)
{
    return opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET || opcode == FUSE_INTERRUPT ||
           opcode == FUSE_NOTIFY_REPLY;
}

/* Sets the arguments of a request from what follows its header. Returns 0 or an errno > 0. */
static int parse(struct kernel_request *request, const struct operation *operation,
                 const uint8_t *bytes, size_t byte_count)
{
    if (byte_count < operation->argument_bytes) {
        return EINVAL;
    }
    const uint8_t *name = bytes + operation->argument_bytes;
    size_t name_room = byte_count - operation->argument_bytes;
    request->arguments = bytes;
    request->name = operation->has_name ? (const char *)name : NULL;
    /* A name has at least one byte, and an end. */
    bool complete = name_room > 0 && name[0] != 0 && memchr(name, 0, name_room) != NULL;
    return operation->has_name && !complete ? EINVAL : 0;
}

bool serve_request(const struct reply_path *path, const uint8_t *bytes, size_t byte_count)
{
    struct fuse_in_header header;
    if (byte_count < sizeof header) {
        return true; /* it has no ID that a reply could have */
    }
    memcpy(&header, bytes, sizeof header);
    if (is_without_reply(header.opcode)) {
        return true;
    }
    if (header.pid != 0) { /* otherwise the kernel sent it, and no program waits for it */
        receivers_note_request(&path->fuse->receivers, header.pid);
    }
    struct kernel_request request = {
        .reply = *path, .opcode = header.opcode, .inode = header.nodeid};
    request.reply.unique = header.unique;
    const struct operation *operation = NULL;
    if (header.opcode < sizeof OPERATIONS / sizeof *OPERATIONS) {
        operation = &OPERATIONS[header.opcode];
    }
    int error = operation == NULL || operation->handle == NULL ? ENOSYS
                : header.len != byte_count
                    ? EINVAL
                    : parse(&request, operation, bytes + sizeof header, byte_count - sizeof header);
    if (error != 0) {
        reply_error(&request.reply, error);
    } else {
        operation->handle(&request);
    }
    return header.opcode != FUSE_DESTROY;
}
