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

static int set_attributes(struct dlfs_fuse *fuse, uint64_t number, struct fuse_entry_out *entry)
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

void handle_getattr(const struct request *request)
{
    struct fuse_entry_out entry;
    int error = set_attributes(fuse_of(request), request->inode, &entry);
    if (error != 0) {
        reply_error(&request->reply, error);
        return;
    }
    const struct fuse_attr_out attributes = {.attr_valid = entry.attr_valid,
                                             .attr_valid_nsec = entry.attr_valid_nsec,
                                             .attr = entry.attr};
    (void)reply_data(&request->reply, &attributes, sizeof attributes);
}

void handle_readlink(const struct request *request)
{
    const char *target = fuse_of(request)->incoming_link;
    if (request->inode == INCOMING_INODE && target != NULL) {
        (void)reply_data(&request->reply, target, strlen(target));
    } else {
        reply_error(&request->reply, EINVAL);
    }
}

/* ---- look-ups -------------------------------------------------------------------------------- */

/*
 * Looks up "." or "..". The kernel asks for them to resolve file handles (NFS) of inodes that it
 * has forgotten.
 */
static int look_up_dots(struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                        struct tree_node node, bool parent, struct fuse_entry_out *entry)
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
                   struct fuse_entry_out *entry)
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

void handle_lookup(const struct request *request)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    const char *name = request->name;
    struct inode inode = inode_unpack(request->inode);
    struct fuse_entry_out entry;
    struct tree_node found;
    struct dataset_entry *dataset;
    count(&fuse->counters.lookups, 1);
    if (strlen(name) > DLFS_FUSE_NAME_BYTES_MAX) {
        reply_error(&request->reply, ENAMETOOLONG);
        return;
    }
    if (root_is_upper(fuse, request->inode, &dataset)) {
        root_lookup(request, dataset);
        return;
    }
    int error = dataset_acquire(&fuse->datasets, inode.dataset, &dataset);
    if (error != 0) {
        reply_error(&request->reply, error);
        return;
    }
    error = look_up(fuse, dataset, inode.node, name, &found, &entry);
    if (error == ENOENT) {
        entry_reply_absent(request, false);
    } else if (error != 0) {
        reply_error(&request->reply, error);
    } else if (reply_data(&request->reply, &entry, sizeof entry) && found.depth == FILE_DEPTH) {
        read_ahead_on_lookup(fuse, dataset, found.index);
    }
    dataset_release(&fuse->datasets, dataset);
}

/* ---- listings -------------------------------------------------------------------------------- */

/* Fills a reply with children from a position on. Returns its bytes, or a negative code. */
static int64_t fill_reply(const struct request *request, const struct dataset_entry *dataset,
                          struct listing *listing, uint64_t position, uint8_t *reply, size_t bytes,
                          bool plus)
{
    struct child child;
    size_t used = 0;
    int code;
    while ((code = listing_child(listing, position, &child)) > 0) {
        struct fuse_entry_out entry;
        if (entry_set_node(fuse_of(request), dataset, child.node, &entry) != 0) {
            return DLFS_E_FORMAT;
        }
        size_t more =
            entry_append(reply + used, bytes - used, child.name, &entry, child.next, plus);
        if (more > bytes - used) {
            break;
        }
        used += more;
        position = child.next;
    }
    return code < 0 && used == 0 ? code : (int64_t)used;
}

static void read_directory(const struct request *request, bool plus)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(request->inode);
    struct fuse_read_in read;
    struct listing listing;
    struct dataset_entry *dataset;
    memcpy(&read, request->arguments, sizeof read);
    read.size = read.size < REPLY_BYTES_MAX ? read.size : REPLY_BYTES_MAX;
    if (root_is_upper(fuse, request->inode, &dataset)) {
        root_readdir(request, dataset, &read, plus);
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

void handle_readdir(const struct request *request)
{
    read_directory(request, false);
}

void handle_readdirplus(const struct request *request)
{
    read_directory(request, true);
}
