/*
 * Names below a dataset are answered from its sample directory in memory; names in an upper
 * directory need an upcall (root.c).
 */
#include "names.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "entry.h"
#include "read.h"
#include "root.h"
#include "tree.h"

#define REPLY_BYTES_MAX (128u << 10)

/* ---- attributes ------------------------------------------------------------------------------ */

static int set_attributes(struct dlfs_fuse *fuse, fuse_ino_t number, struct fuse_entry_param *entry)
{
    struct inode inode = inode_unpack(number);
    struct dataset_entry *dataset;
    int error;
    if (root_is_upper(fuse, number, &dataset)) {
        return entry_ask_upper(fuse, dataset, entry);
    }
    if (number == INCOMING_INODE) {
        entry_set_incoming(fuse, entry);
        return 0;
    }
    if (inode.node.depth != FILE_DEPTH) { /* needs no open dataset */
        error = dataset_find(&fuse->datasets, inode.dataset, &dataset);
        if (error == 0) {
            entry_set_directory(fuse, dataset, inode.node, entry);
        }
        return error;
    }
    error = dataset_acquire(&fuse->datasets, inode.dataset, &dataset);
    if (error == 0) {
        error = entry_set_node(fuse, dataset, inode.node, entry);
        dataset_release(&fuse->datasets, dataset);
    }
    return error;
}

void handle_getattr(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info)
{
    (void)info;
    struct fuse_entry_param entry;
    int error = set_attributes(fuse_of(request), number, &entry);
    if (error != 0) {
        (void)fuse_reply_err(request, error);
    } else {
        (void)fuse_reply_attr(request, &entry.attr, entry.attr_timeout);
    }
}

void handle_readlink(fuse_req_t request, fuse_ino_t number)
{
    const char *target = fuse_of(request)->incoming_link;
    if (number == INCOMING_INODE && target != NULL) {
        (void)fuse_reply_readlink(request, target);
    } else {
        (void)fuse_reply_err(request, EINVAL);
    }
}

/* ---- look-ups -------------------------------------------------------------------------------- */

/*
 * Looks up "." or "..". The kernel asks for them to resolve file handles (NFS) of inodes that it
 * has forgotten.
 */
static int look_up_dots(struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                        struct tree_node node, bool parent, struct fuse_entry_param *entry)
{
    if (parent && node.depth == DATASET_DEPTH) {
        return root_set_parent(fuse, dataset, entry);
    }
    if (parent) {
        int code = tree_parent(dataset->directory, node, &node);
        if (code < 0) {
            return upcall_errno(&fuse->upcalls, dataset->info.number, code);
        }
    }
    return entry_set_node(fuse, dataset, node, entry);
}

static int look_up(struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                   struct tree_node parent, const char *name, struct tree_node *found,
                   struct fuse_entry_param *entry)
{
    bool dot_dot = strcmp(name, "..") == 0;
    *found = parent;
    if (dot_dot || strcmp(name, ".") == 0) {
        return look_up_dots(fuse, dataset, parent, dot_dot, entry);
    }
    int code = tree_child(dataset->directory, parent, name, found);
    if (code < 0) {
        return upcall_errno(&fuse->upcalls, dataset->info.number, code);
    }
    return entry_set_node(fuse, dataset, *found, entry);
}

void handle_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(parent);
    struct fuse_entry_param entry;
    struct tree_node found;
    struct dataset_entry *dataset;
    count(&fuse->counters.lookups, 1);
    if (strlen(name) > DLFS_FUSE_NAME_BYTES_MAX) {
        (void)fuse_reply_err(request, ENAMETOOLONG);
        return;
    }
    if (root_is_upper(fuse, parent, &dataset)) {
        root_lookup(request, dataset, name);
        return;
    }
    int error = dataset_acquire(&fuse->datasets, inode.dataset, &dataset);
    if (error != 0) {
        (void)fuse_reply_err(request, error);
        return;
    }
    error = look_up(fuse, dataset, inode.node, name, &found, &entry);
    if (error == ENOENT) {
        entry_reply_absent(request, FOREVER_SECONDS);
    } else if (error != 0) {
        (void)fuse_reply_err(request, error);
    } else if (fuse_reply_entry(request, &entry) == 0 && found.depth == FILE_DEPTH) {
        read_ahead_on_lookup(fuse, dataset, found.index);
    }
    dataset_release(&fuse->datasets, dataset);
}

/* ---- listings -------------------------------------------------------------------------------- */

/* Fills a reply with children from a position on. Returns its bytes, or a negative code. */
static int64_t fill_reply(fuse_req_t request, const struct dataset_entry *dataset,
                          struct listing *listing, uint64_t position, char *reply, size_t bytes,
                          bool plus)
{
    struct child child;
    size_t used = 0;
    int code;
    while ((code = listing_child(listing, position, &child)) > 0) {
        struct fuse_entry_param entry;
        if (entry_set_node(fuse_of(request), dataset, child.node, &entry) != 0) {
            return DLFS_E_FORMAT;
        }
        size_t more = entry_append(request, reply + used, bytes - used, child.name, &entry,
                                   (off_t)child.next, plus);
        if (more > bytes - used) {
            break;
        }
        used += more;
        position = child.next;
    }
    return code < 0 && used == 0 ? code : (int64_t)used;
}

static void read_directory(fuse_req_t request, fuse_ino_t number, size_t bytes, off_t position,
                           bool plus)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(number);
    struct listing listing;
    struct dataset_entry *dataset;
    bytes = bytes < REPLY_BYTES_MAX ? bytes : REPLY_BYTES_MAX;
    if (root_is_upper(fuse, number, &dataset)) {
        root_readdir(request, dataset, bytes, position, plus);
        return;
    }
    char *reply = malloc(bytes);
    int error = reply == NULL ? ENOMEM : dataset_acquire(&fuse->datasets, inode.dataset, &dataset);
    if (error == 0) {
        int64_t used = listing_begin(dataset->directory, inode.node, &listing);
        if (used == 0) {
            used = fill_reply(request, dataset, &listing, (uint64_t)position, reply, bytes, plus);
        }
        error = used < 0 ? upcall_errno(&fuse->upcalls, inode.dataset, (int)used) : 0;
        if (error == 0) {
            (void)fuse_reply_buf(request, reply, (size_t)used);
        }
        dataset_release(&fuse->datasets, dataset);
    }
    if (error != 0) {
        (void)fuse_reply_err(request, error);
    }
    free(reply);
}

void handle_readdir(fuse_req_t request, fuse_ino_t number, size_t bytes, off_t position,
                    struct fuse_file_info *info)
{
    (void)info;
    read_directory(request, number, bytes, position, false);
}

void handle_readdirplus(fuse_req_t request, fuse_ino_t number, size_t bytes, off_t position,
                        struct fuse_file_info *info)
{
    (void)info;
    read_directory(request, number, bytes, position, true);
}
