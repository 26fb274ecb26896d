/*
 * A sealed dataset never changes, so the kernel may cache its attributes and names, missing names
 * included, as long as it has memory. Only upper directories and the names of datasets expire.
 */
#include "entry.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "platform/clock.h"

#define DISK_BLOCK_BYTES 512u /* the unit of blocks on every file system */
#define TYPE_SHIFT 12         /* of the type of a file in its mode */

static void set_common(const struct dlfs_fuse *fuse, uint64_t inode, int64_t modified_ns,
                       struct fuse_entry_out *entry)
{
    struct timespec modified = clock_timespec((uint64_t)modified_ns);
    memset(entry, 0, sizeof *entry);
    entry->nodeid = entry->attr.ino = inode;
    entry->attr_valid = entry->entry_valid = FOREVER_SECONDS;
    entry->attr.nlink = 1;
    entry->attr.uid = fuse->config.uid;
    entry->attr.gid = fuse->config.gid;
    entry->attr.blksize = BLOCK_BYTES;
    entry->attr.mtime = entry->attr.ctime = entry->attr.atime = (uint64_t)modified.tv_sec;
    entry->attr.mtimensec = entry->attr.ctimensec = entry->attr.atimensec =
        (uint32_t)modified.tv_nsec;
}

/* Has the name expire with the entries of upper directories. */
static void expire_name(const struct dlfs_fuse *fuse, struct fuse_entry_out *entry)
{
    entry->entry_valid = fuse->config.root_timeout_ms / 1000;
    entry->entry_valid_nsec = fuse->config.root_timeout_ms % 1000 * 1000000;
}

static uint32_t directory_mode(const struct dlfs_fuse *fuse)
{
    return S_IFDIR | fuse->config.file_mode | (fuse->config.file_mode & 0444) >> 2;
}

void entry_set_upper(const struct dlfs_fuse *fuse, const struct dataset_entry *volume,
                     int64_t modified_ns, struct fuse_entry_out *entry)
{
    struct tree_node top = {DATASET_DEPTH, 0};
    uint64_t inode = volume == NULL ? ROOT_INODE : inode_pack(volume->info.number, top);
    set_common(fuse, inode, modified_ns, entry);
    entry->generation = volume == NULL ? 0 : volume->info.generation;
    expire_name(fuse, entry);
    entry->attr_valid = entry->entry_valid;
    entry->attr_valid_nsec = entry->entry_valid_nsec;
    entry->attr.mode = directory_mode(fuse);
}

int entry_ask_upper(struct dlfs_fuse *fuse, const struct dataset_entry *volume,
                    struct fuse_entry_out *entry)
{
    struct upcall upcall = {.request = {.kind = DLFS_FUSE_UPCALL_TIME,
                                        .dataset = volume == NULL ? 0 : volume->info.number}};
    int error = upcall_send(&fuse->upcalls, &upcall);
    if (error == 0) {
        entry_set_upper(fuse, volume, upcall.reply.modified_ns, entry);
    }
    return error;
}

void entry_set_incoming(const struct dlfs_fuse *fuse, struct fuse_entry_out *entry)
{
    set_common(fuse, INCOMING_INODE, fuse->started_ns, entry);
    entry->attr.mode = S_IFLNK | 0777;
    entry->attr.size = fuse->incoming_link == NULL ? 0 : strlen(fuse->incoming_link);
}

static void set_of_dataset(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                           struct tree_node node, struct fuse_entry_out *entry)
{
    set_common(fuse, inode_pack(dataset->info.number, node), dataset->info.modified_ns, entry);
    entry->generation = dataset->info.generation;
}

static void set_file(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                     struct tree_node node, struct fuse_entry_out *entry)
{
    uint64_t length = dataset_length(dataset, node.index);
    set_of_dataset(fuse, dataset, node, entry);
    entry->attr.mode = S_IFREG | fuse->config.file_mode;
    entry->attr.size = length;
    entry->attr.blocks = (length + DISK_BLOCK_BYTES - 1) / DISK_BLOCK_BYTES;
}

void entry_set_directory(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                         struct tree_node node, struct fuse_entry_out *entry)
{
    set_of_dataset(fuse, dataset, node, entry);
    entry->attr.mode = directory_mode(fuse);
    if (node.depth == DATASET_DEPTH) { /* its name may stand for another version later */
        expire_name(fuse, entry);
    }
}

int entry_set_node(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                   struct tree_node node, struct fuse_entry_out *entry)
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

size_t entry_append(uint8_t *reply, size_t bytes, const char *name,
                    const struct fuse_entry_out *entry, uint64_t next, bool plus)
{
    struct fuse_dirent item = {.ino = entry->attr.ino,
                               .off = next,
                               .namelen = (uint32_t)strlen(name),
                               .type = (entry->attr.mode & S_IFMT) >> TYPE_SHIFT};
    size_t head_bytes = plus ? sizeof *entry : 0;
    size_t used = head_bytes + FUSE_NAME_OFFSET + item.namelen;
    size_t needed = FUSE_DIRENT_ALIGN(used);
    if (needed <= bytes) {
        memcpy(reply, entry, head_bytes);
        memcpy(reply + head_bytes, &item, FUSE_NAME_OFFSET);
        memcpy(reply + head_bytes + FUSE_NAME_OFFSET, name, item.namelen);
        memset(reply + used, 0, needed - used);
    }
    return needed;
}

void entry_reply_absent(const struct request *request, bool in_upper)
{
    struct fuse_entry_out entry = {.entry_valid = FOREVER_SECONDS};
    if (in_upper) {
        expire_name(fuse_of(request), &entry);
    }
    (void)reply_data(&request->reply, &entry, sizeof entry);
}
