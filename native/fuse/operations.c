/*
 * The table of handlers: what the mount negotiates with the kernel, opens, and refusals to write.
 *
 * Files are normally not opened at the server: the first OPEN is refused with ENOSYS, and from then
 * on the kernel opens and closes files without a request. A kernel without that feature sends OPEN
 * requests, which succeed.
 */
#include "operations.h"

#include <errno.h>
#include <fcntl.h>

#include "names.h"
#include "read.h"
#include "root.h"
#include "xattr.h"

/* Most background requests under way, which no program waits for yet: the kernel's own read-ahead.
 */
#define BACKGROUND_MAX 64u

#define WRITE_FLAGS (O_WRONLY | O_RDWR | O_TRUNC | O_APPEND)

/* ---- connection ------------------------------------------------------------------------------ */

static void handle_init(void *userdata, struct fuse_conn_info *connection)
{
    struct dlfs_fuse *fuse = userdata;
    bool forced = (fuse->config.flags & DLFS_FUSE_OPEN_REQUESTS) != 0;
    fuse->open_requests = forced || (connection->capable & FUSE_CAP_NO_OPEN_SUPPORT) == 0;
    fuse->opendir_requests = forced || (connection->capable & FUSE_CAP_NO_OPENDIR_SUPPORT) == 0;
    /* Otherwise the kernel would take a file opened with O_TRUNC for empty, without a request. */
    connection->want &= ~(unsigned)FUSE_CAP_ATOMIC_O_TRUNC;
    connection->want |= connection->capable & FUSE_CAP_EXPORT_SUPPORT;
    /* Files never change, so the kernel need not revalidate its cache at each read. */
    connection->want &= ~(unsigned)FUSE_CAP_AUTO_INVAL_DATA;
    /* Every listing includes attributes: a program that lists a directory then reads its files. */
    connection->want &= ~(unsigned)FUSE_CAP_READDIRPLUS_AUTO;
    connection->max_background = BACKGROUND_MAX;
    connection->congestion_threshold = BACKGROUND_MAX * 3 / 4;
}

static void reply_open(fuse_req_t request, struct fuse_file_info *info, bool open_requests)
{
    count(&fuse_of(request)->counters.opens, 1);
    info->keep_cache = 1;
    info->cache_readdir = 1;
    if (open_requests) {
        (void)fuse_reply_open(request, info);
    } else {
        (void)fuse_reply_err(request, ENOSYS);
    }
}

static void handle_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
    (void)inode;
    if (info->flags & WRITE_FLAGS) {
        (void)fuse_reply_err(request, EROFS);
    } else {
        reply_open(request, info, fuse_of(request)->open_requests);
    }
}

static void handle_opendir(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
    (void)inode;
    reply_open(request, info, fuse_of(request)->opendir_requests);
}

/* ---- refusals of every change ---------------------------------------------------------------- */

/* The kernel refuses changes itself, unless root has remounted the file system for writing. */
static void refuse(fuse_req_t request)
{
    (void)fuse_reply_err(request, EROFS);
}

static void refuse_setattr(fuse_req_t request, fuse_ino_t inode, struct stat *attributes,
                           int to_set, struct fuse_file_info *info)
{
    (void)inode, (void)attributes, (void)to_set, (void)info;
    refuse(request);
}

static void refuse_mknod(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
                         dev_t device)
{
    (void)parent, (void)name, (void)mode, (void)device;
    refuse(request);
}

static void refuse_mkdir(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode)
{
    (void)parent, (void)name, (void)mode;
    refuse(request);
}

static void refuse_removal(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    (void)parent, (void)name;
    refuse(request);
}

static void refuse_symlink(fuse_req_t request, const char *target, fuse_ino_t parent,
                           const char *name)
{
    (void)target, (void)parent, (void)name;
    refuse(request);
}

static void refuse_rename(fuse_req_t request, fuse_ino_t parent, const char *name,
                          fuse_ino_t new_parent, const char *new_name, unsigned int flags)
{
    (void)parent, (void)name, (void)new_parent, (void)new_name, (void)flags;
    refuse(request);
}

static void refuse_link(fuse_req_t request, fuse_ino_t inode, fuse_ino_t new_parent,
                        const char *new_name)
{
    (void)inode, (void)new_parent, (void)new_name;
    refuse(request);
}

static void refuse_create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
                          struct fuse_file_info *info)
{
    (void)parent, (void)name, (void)mode, (void)info;
    refuse(request);
}

static void refuse_write(fuse_req_t request, fuse_ino_t inode, const char *data, size_t bytes,
                         off_t offset, struct fuse_file_info *info)
{
    (void)inode, (void)data, (void)bytes, (void)offset, (void)info;
    refuse(request);
}

static void refuse_setxattr(fuse_req_t request, fuse_ino_t inode, const char *name,
                            const char *value, size_t bytes, int flags)
{
    (void)inode, (void)name, (void)value, (void)bytes, (void)flags;
    refuse(request);
}

static void refuse_removexattr(fuse_req_t request, fuse_ino_t inode, const char *name)
{
    (void)inode, (void)name;
    refuse(request);
}

/* FORGET has no handler: the server keeps no state of inodes. */
const struct fuse_lowlevel_ops OPERATIONS = {
    .init = handle_init,
    .lookup = handle_lookup,
    .getattr = handle_getattr,
    .readlink = handle_readlink,
    .open = handle_open,
    .read = handle_read,
    .opendir = handle_opendir,
    .readdir = handle_readdir,
    .readdirplus = handle_readdirplus,
    .statfs = handle_statfs,
    .getxattr = handle_getxattr,
    .listxattr = handle_listxattr,
    .setattr = refuse_setattr,
    .mknod = refuse_mknod,
    .mkdir = refuse_mkdir,
    .unlink = refuse_removal,
    .rmdir = refuse_removal,
    .symlink = refuse_symlink,
    .rename = refuse_rename,
    .link = refuse_link,
    .create = refuse_create,
    .write = refuse_write,
    .setxattr = refuse_setxattr,
    .removexattr = refuse_removexattr,
};
