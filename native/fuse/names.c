/*
 * Names and attributes below a dataset are answered from its sample directory in memory. The owner
 * answers what lies above the datasets.
 *
 * A sealed dataset never changes, so the kernel may cache its attributes and names, missing names
 * included, as long as it has memory.
 */
#include "operations.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "inode.h"
#include "platform/clock.h"
#include "tree.h"

#define FOREVER_SECONDS 1000000000u /* the kernel may cache this as long as it has memory */
#define BLOCK_BYTES 4096u
#define DISK_BLOCK_BYTES 512u /* the unit of blocks on every file system */
#define TYPE_SHIFT 12         /* of the type of a file in its mode */

/* ---- attributes ------------------------------------------------------------------------------ */

/* Sets the attributes of a file or directory; of a file, the dataset is open. ESTALE: no such
 * sample. */
static int set_entry(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                     struct tree_node node, struct fuse_entry_out *entry)
{
    const dlfs_fuse_config *config = &fuse->config;
    bool is_file = node.depth == FILE_DEPTH;
    if (is_file && node.index >= dataset->count) {
        return ESTALE;
    }
    uint64_t inode = inode_pack(dataset->number, node);
    uint64_t length = is_file ? dataset_length(dataset, node.index) : 0;
    struct timespec modified = clock_timespec((uint64_t)dataset->modified_ns);
    uint32_t directory_mode = S_IFDIR | config->file_mode | (config->file_mode & 0444) >> 2;
    *entry = (struct fuse_entry_out){
        .nodeid = inode,
        .generation = dataset->generation,
        .entry_valid = FOREVER_SECONDS,
        .attr_valid = FOREVER_SECONDS,
        .attr = {.ino = inode,
                 .size = length,
                 .blocks = (length + DISK_BLOCK_BYTES - 1) / DISK_BLOCK_BYTES,
                 .atime = (uint64_t)modified.tv_sec,
                 .mtime = (uint64_t)modified.tv_sec,
                 .ctime = (uint64_t)modified.tv_sec,
                 .atimensec = (uint32_t)modified.tv_nsec,
                 .mtimensec = (uint32_t)modified.tv_nsec,
                 .ctimensec = (uint32_t)modified.tv_nsec,
                 .mode = is_file ? S_IFREG | config->file_mode : directory_mode,
                 .nlink = 1,
                 .uid = config->uid,
                 .gid = config->gid,
                 .blksize = BLOCK_BYTES},
    };
    return 0;
}

void handle_getattr(const struct kernel_request *request)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(request->inode);
    struct fuse_entry_out entry;
    struct dataset_entry *dataset;
    if (is_above_datasets(&fuse->datasets, request->inode)) {
        upcall_forward(&fuse->upcalls, request);
        return;
    }
    bool is_file = inode.node.depth == FILE_DEPTH; /* a directory needs no open dataset */
    int error = is_file ? dataset_acquire(&fuse->datasets, inode.dataset, &dataset)
                        : dataset_find(&fuse->datasets, inode.dataset, &dataset);
    bool acquired = is_file && error == 0;
    error = error != 0 ? error : set_entry(fuse, dataset, inode.node, &entry);
    if (error == 0) {
        const struct fuse_attr_out attributes = {.attr_valid = FOREVER_SECONDS, .attr = entry.attr};
        (void)reply_data(&request->reply, &attributes, sizeof attributes);
    } else {
        reply_error(&request->reply, error);
    }
    if (acquired) {
        dataset_release(&fuse->datasets, dataset);
    }
}

/* ---- look-ups -------------------------------------------------------------------------------- */

/*
 * Finds a name. The kernel asks for "." and ".." to resolve file handles (NFS) of inodes that it
 * has forgotten.
 */
static int find(const dlfs_directory *directory, struct tree_node parent, const char *name,
                struct tree_node *found)
{
    *found = parent;
    if (strcmp(name, ".") == 0) {
        return 0;
    }
    return strcmp(name, "..") == 0 ? tree_parent(directory, parent, found)
                                   : tree_child(directory, parent, name, found);
}

void handle_lookup(const struct kernel_request *request)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    const char *name = request->name;
    struct inode inode = inode_unpack(request->inode);
    struct fuse_entry_out entry;
    struct tree_node found;
    struct dataset_entry *dataset;
    if (strlen(name) > DLFS_FUSE_NAME_BYTES_MAX) {
        reply_error(&request->reply, ENAMETOOLONG);
        return;
    }
    if (is_above_datasets(&fuse->datasets, request->inode) ||
        (inode.node.depth == DATASET_DEPTH && strcmp(name, "..") == 0)) {
        upcall_forward(&fuse->upcalls, request);
        return;
    }
    int error = dataset_acquire(&fuse->datasets, inode.dataset, &dataset);
    if (error != 0) {
        reply_error(&request->reply, error);
        return;
    }
    int code = find(dataset->directory, inode.node, name, &found);
    error = code < 0 ? upcall_errno(&fuse->upcalls, dataset->number, code)
                     : set_entry(fuse, dataset, found, &entry);
    if (error == ENOENT) {
        entry = (struct fuse_entry_out){.entry_valid = FOREVER_SECONDS};
        (void)reply_data(&request->reply, &entry, sizeof entry);
    } else if (error != 0) {
        reply_error(&request->reply, error);
    } else if (reply_data(&request->reply, &entry, sizeof entry) && found.depth == FILE_DEPTH) {
        read_ahead_on_lookup(fuse, dataset, found.index);
    }
    dataset_release(&fuse->datasets, dataset);
}

/* ---- listings -------------------------------------------------------------------------------- */

/*
 * Appends an entry to the reply of a listing; plus: with all attributes. Returns the bytes that the
 * entry needs. If they are more than `bytes`, nothing was appended.
 */
static size_t append_entry(uint8_t *reply, size_t bytes, const struct child *child,
                           const struct fuse_entry_out *entry, bool plus)
{
    struct fuse_dirent item = {.ino = entry->attr.ino,
                               .off = child->next,
                               .namelen = (uint32_t)strlen(child->name),
                               .type = (entry->attr.mode & S_IFMT) >> TYPE_SHIFT};
    size_t head_bytes = plus ? sizeof *entry : 0;
    size_t used = head_bytes + FUSE_NAME_OFFSET + item.namelen;
    size_t needed = FUSE_DIRENT_ALIGN(used);
    if (needed <= bytes) {
        memcpy(reply, entry, head_bytes);
        memcpy(reply + head_bytes, &item, FUSE_NAME_OFFSET);
        memcpy(reply + head_bytes + FUSE_NAME_OFFSET, child->name, item.namelen);
        memset(reply + used, 0, needed - used);
    }
    return needed;
}

/* Fills a reply with children from a position on. Returns its bytes, or a negative code. */
static int64_t fill_reply(const struct kernel_request *request, const struct dataset_entry *dataset,
                          struct listing *listing, uint64_t position, uint8_t *reply, size_t bytes,
                          bool plus)
{
    struct child child;
    size_t used = 0;
    int code;
    while ((code = listing_child(listing, position, &child)) > 0) {
        struct fuse_entry_out entry;
        if (set_entry(fuse_of(request), dataset, child.node, &entry) != 0) {
            return DLFS_E_FORMAT;
        }
        size_t more = append_entry(reply + used, bytes - used, &child, &entry, plus);
        if (more > bytes - used) {
            break;
        }
        used += more;
        position = child.next;
    }
    return code < 0 && used == 0 ? code : (int64_t)used;
}

void handle_readdir(const struct kernel_request *request)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(request->inode);
    struct fuse_read_in read;
    struct listing listing;
    struct dataset_entry *dataset;
    bool plus = request->opcode == FUSE_READDIRPLUS;
    memcpy(&read, request->arguments, sizeof read);
    read.size = read.size < LISTING_BYTES_MAX ? read.size : LISTING_BYTES_MAX;
    if (is_above_datasets(&fuse->datasets, request->inode)) {
        upcall_forward(&fuse->upcalls, request);
        return;
    }
    uint8_t *reply = malloc(read.size + 1u);
    int error = reply == NULL ? ENOMEM : dataset_acquire(&fuse->datasets, inode.dataset, &dataset);
    if (error == 0) {
        int64_t used = listing_begin(dataset->directory, inode.node, &listing);
        if (used == 0) {
            used = fill_reply(request, dataset, &listing, read.offset, reply, read.size, plus);
        }
        error = used < 0 ? upcall_errno(&fuse->upcalls, inode.dataset, (int)used) : 0;
        if (error == 0) {
            (void)reply_data(&request->reply, reply, (size_t)used);
        }
        dataset_release(&fuse->datasets, dataset);
    }
    if (error != 0) {
        reply_error(&request->reply, error);
    }
    free(reply);
}
