/*
 * A sealed dataset never changes, so the kernel may cache its attributes and names, missing names
 * included, as long as it has memory. Only upper directories and the names of datasets expire.
 */
#include "entry.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "platform/clock.h"

#define DISK_BLOCK_BYTES 512u /* the unit of st_blocks on every file system */

static void set_common(const struct dlfs_fuse *fuse, uint64_t inode, int64_t modified_ns,
                       struct fuse_entry_param *entry)
{
    memset(entry, 0, sizeof *entry);
    entry->ino = entry->attr.st_ino = inode;
    entry->attr_timeout = entry->entry_timeout = FOREVER_SECONDS;
    entry->attr.st_nlink = 1;
    entry->attr.st_uid = fuse->config.uid;
    entry->attr.st_gid = fuse->config.gid;
    entry->attr.st_blksize = BLOCK_BYTES;
    entry->attr.st_mtim = clock_timespec((uint64_t)modified_ns);
    entry->attr.st_ctim = entry->attr.st_atim = entry->attr.st_mtim;
}

static mode_t directory_mode(const struct dlfs_fuse *fuse)
{
    return S_IFDIR | fuse->config.file_mode | (fuse->config.file_mode & 0444) >> 2;
}

void entry_set_upper(const struct dlfs_fuse *fuse, const struct dataset_entry *volume,
                     int64_t modified_ns, struct fuse_entry_param *entry)
{
    struct tree_node top = {DATASET_DEPTH, 0};
    uint64_t inode = volume == NULL ? ROOT_INODE : inode_pack(volume->info.number, top);
    set_common(fuse, inode, modified_ns, entry);
    entry->generation = volume == NULL ? 0 : volume->info.generation;
    entry->entry_timeout = entry->attr_timeout = root_timeout_seconds(fuse);
    entry->attr.st_mode = directory_mode(fuse);
}

int entry_ask_upper(struct dlfs_fuse *fuse, const struct dataset_entry *volume,
                    struct fuse_entry_param *entry)
{
    struct upcall upcall = {.request = {.kind = DLFS_FUSE_UPCALL_TIME,
                                        .dataset = volume == NULL ? 0 : volume->info.number}};
    int error = upcall_send(&fuse->upcalls, &upcall);
    if (error == 0) {
        entry_set_upper(fuse, volume, upcall.reply.modified_ns, entry);
    }
    return error;
}

void entry_set_incoming(const struct dlfs_fuse *fuse, struct fuse_entry_param *entry)
{
    set_common(fuse, INCOMING_INODE, fuse->started_ns, entry);
    entry->attr.st_mode = S_IFLNK | 0777;
    entry->attr.st_size = fuse->incoming_link == NULL ? 0 : (off_t)strlen(fuse->incoming_link);
}

static void set_of_dataset(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                           struct tree_node node, struct fuse_entry_param *entry)
{
    set_common(fuse, inode_pack(dataset->info.number, node), dataset->info.modified_ns, entry);
    entry->generation = dataset->info.generation;
}

static void set_file(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                     struct tree_node node, struct fuse_entry_param *entry)
{
    uint64_t length = dataset_length(dataset, node.index);
    set_of_dataset(fuse, dataset, node, entry);
    entry->attr.st_mode = S_IFREG | fuse->config.file_mode;
    entry->attr.st_size = (off_t)length;
    entry->attr.st_blocks = (blkcnt_t)((length + DISK_BLOCK_BYTES - 1) / DISK_BLOCK_BYTES);
}

void entry_set_directory(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                         struct tree_node node, struct fuse_entry_param *entry)
{
    set_of_dataset(fuse, dataset, node, entry);
    entry->attr.st_mode = directory_mode(fuse);
    if (node.depth == DATASET_DEPTH) { /* its name may stand for another version later */
        entry->entry_timeout = root_timeout_seconds(fuse);
    }
}

int entry_set_node(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                   struct tree_node node, struct fuse_entry_param *entry)
{
    if (node.depth == FILE_DEPTH && node.index >= dataset->count) {
        return ESTALE;
    }
    if (node.depth == FILE_DEPTH) {
        set_file(fuse, dataset, node, entry);
    } else {
        entry_set_directory(fuse, dataset, node, entry);
    }
    return 0;
}

/* ---- replies --------------------------------------------------------------------------------- */

size_t entry_append(fuse_req_t request, char *reply, size_t bytes, const char *name,
                    const struct fuse_entry_param *entry, off_t next, bool plus)
{
    return plus ? fuse_add_direntry_plus(request, reply, bytes, name, entry, next)
                : fuse_add_direntry(request, reply, bytes, name, &entry->attr, next);
}

void entry_reply_absent(fuse_req_t request, double seconds)
{
    struct fuse_entry_param entry;
    memset(&entry, 0, sizeof entry);
    entry.entry_timeout = seconds;
    (void)fuse_reply_entry(request, &entry);
}
