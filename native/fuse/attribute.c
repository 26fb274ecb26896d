/*
 * Names and attributes below datasets: answered from the sample directory, at once.
 *
 * Nothing about a sealed dataset changes, so the kernel may keep every answer for as long as it has
 * memory, also that a name is not there. Only what a dataset's own name means is asked again.
 */
#include "service.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define REPLY_BYTES_MAX (128u << 10)
#define XATTR_INDEX "user.dlfs.index"
#define XATTR_CRC32C "user.dlfs.crc32c"
#define XATTR_VERSION "user.dlfs.version"
#define XATTR_BYTES 24u /* of a value */

/* ---- attributes ------------------------------------------------------------------------------ */

static void fill(const struct dlfs_fuse *fuse, const struct slot *slot, struct node node,
                 struct fuse_entry_param *entry)
{
    int64_t modified_ns = slot->known.modified_ns;
    struct timespec when = {modified_ns / NS_PER_S, modified_ns % NS_PER_S};
    memset(entry, 0, sizeof *entry);
    entry->ino = place_pack(slot->known.number, node);
    entry->generation = slot->known.generation;
    entry->attr_timeout = entry->entry_timeout = FOREVER_SECONDS;
    entry->attr.st_ino = entry->ino;
    entry->attr.st_nlink = 1;
    entry->attr.st_uid = fuse->config.uid;
    entry->attr.st_gid = fuse->config.gid;
    entry->attr.st_blksize = BLOCK_BYTES;
    entry->attr.st_mtim = entry->attr.st_ctim = entry->attr.st_atim = when;
}

void fill_file(const struct dlfs_fuse *fuse, const struct slot *slot, uint64_t index,
               struct fuse_entry_param *entry)
{
    uint64_t length = slot_length(slot, index);
    fill(fuse, slot, (struct node){FILE_DEPTH, index}, entry);
    entry->attr.st_mode = S_IFREG | fuse->config.file_mode;
    entry->attr.st_size = (off_t)length;
    entry->attr.st_blocks = (blkcnt_t)((length + DISK_BLOCK_BYTES - 1) / DISK_BLOCK_BYTES);
}

void fill_directory(const struct dlfs_fuse *fuse, const struct slot *slot, struct node node,
                    struct fuse_entry_param *entry)
{
    fill(fuse, slot, node, entry);
    entry->attr.st_mode = S_IFDIR | fuse->config.file_mode | (fuse->config.file_mode & 0444) >> 2;
    if (node.depth == DATASET_DEPTH) { /* the name may mean another version later */
        entry->entry_timeout = fuse->config.root_timeout_ms / 1e3;
    }
}

/* Of a file or a directory; the slot is entered. */
static int fill_node(const struct dlfs_fuse *fuse, const struct slot *slot, struct node node,
                     struct fuse_entry_param *entry)
{
    if (node.depth == FILE_DEPTH && node.index >= slot->count) {
        return ESTALE;
    }
    if (node.depth == FILE_DEPTH) {
        fill_file(fuse, slot, node.index, entry);
    } else {
        fill_directory(fuse, slot, node, entry);
    }
    return 0;
}

void handle_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
    (void)info;
    struct dlfs_fuse *fuse = fuse_of(request);
    struct place place = place_unpack(inode);
    struct fuse_entry_param entry;
    struct slot *slot;
    int error;
    if (inode == ROOT_INODE) {
        error = root_fill(fuse, &entry);
    } else if (place.node.depth != FILE_DEPTH) {
        error = slot_known(fuse, place.slot, &slot);
        if (error == 0) {
            fill_directory(fuse, slot, place.node, &entry);
        }
    } else {
        error = slot_enter(fuse, place.slot, &slot);
        if (error == 0) {
            error = fill_node(fuse, slot, place.node, &entry);
            slot_leave(fuse, slot);
        }
    }
    if (error != 0) {
        (void)fuse_reply_err(request, error);
    } else {
        (void)fuse_reply_attr(request, &entry.attr, entry.attr_timeout);
    }
}

/* ---- names ----------------------------------------------------------------------------------- */

void reply_absent(fuse_req_t request, double seconds)
{
    struct fuse_entry_param entry;
    memset(&entry, 0, sizeof entry);
    entry.entry_timeout = seconds;
    (void)fuse_reply_entry(request, &entry);
}

/* What file handles that outlive the kernel's memory of an inode (NFS) are resolved by. */
static int look_up_dots(struct dlfs_fuse *fuse, const struct slot *slot, struct node node,
                        bool parent, struct fuse_entry_param *entry)
{
    if (parent && node.depth == DATASET_DEPTH) {
        return root_fill(fuse, entry);
    }
    if (parent) {
        int code = tree_parent(slot->directory, node, &node);
        if (code < 0) {
            return errno_for(fuse, slot->known.number, code);
        }
    }
    return fill_node(fuse, slot, node, entry);
}

static int look_up(struct dlfs_fuse *fuse, const struct slot *slot, struct node parent,
                   const char *name, struct node *found, struct fuse_entry_param *entry)
{
    bool dots = strcmp(name, "..") == 0;
    *found = parent;
    if (dots || strcmp(name, ".") == 0) {
        return look_up_dots(fuse, slot, parent, dots, entry);
    }
    int code = tree_child(slot->directory, parent, name, found);
    if (code < 0) {
        return errno_for(fuse, slot->known.number, code);
    }
    return fill_node(fuse, slot, *found, entry);
}

void handle_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct place place = place_unpack(parent);
    struct fuse_entry_param entry;
    struct node found;
    struct slot *slot;
    count(&fuse->counters.lookups, 1);
    if (strlen(name) > DLFS_FUSE_NAME_BYTES_MAX) {
        (void)fuse_reply_err(request, ENAMETOOLONG);
        return;
    }
    if (parent == ROOT_INODE) {
        root_lookup(request, name);
        return;
    }
    int error = slot_enter(fuse, place.slot, &slot);
    if (error != 0) {
        (void)fuse_reply_err(request, error);
        return;
    }
    error = look_up(fuse, slot, place.node, name, &found, &entry);
    if (error == ENOENT) {
        reply_absent(request, FOREVER_SECONDS);
    } else if (error != 0) {
        (void)fuse_reply_err(request, error);
    } else if (fuse_reply_entry(request, &entry) == 0 && found.depth == FILE_DEPTH) {
        read_ahead_of(fuse, slot, found.index);
    }
    slot_leave(fuse, slot);
}

/* ---- listings -------------------------------------------------------------------------------- */

size_t add_entry(fuse_req_t request, char *reply, size_t bytes, const char *name,
                 const struct fuse_entry_param *entry, off_t next, bool plus)
{
    return plus ? fuse_add_direntry_plus(request, reply, bytes, name, entry, next)
                : fuse_add_direntry(request, reply, bytes, name, &entry->attr, next);
}

/* Fills a reply with children from a position on; how much of it, or a negative code. */
static int64_t list(fuse_req_t request, const struct slot *slot, struct listing *listing,
                    uint64_t position, char *reply, size_t bytes, bool plus)
{
    struct child child;
    size_t used = 0;
    int code;
    while ((code = listing_child(listing, position, &child)) > 0) {
        struct fuse_entry_param entry;
        if (fill_node(fuse_of(request), slot, child.node, &entry) != 0) {
            return DLFS_E_FORMAT;
        }
        size_t more = add_entry(request, reply + used, bytes - used, child.name, &entry,
                                (off_t)child.next, plus);
        if (more > bytes - used) {
            break;
        }
        used += more;
        position = child.next;
    }
    return code < 0 && used == 0 ? code : (int64_t)used;
}

static void read_directory(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t position,
                           bool plus)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct place place = place_unpack(inode);
    struct listing listing;
    struct slot *slot;
    bytes = bytes < REPLY_BYTES_MAX ? bytes : REPLY_BYTES_MAX;
    if (inode == ROOT_INODE) {
        root_readdir(request, bytes, position, plus);
        return;
    }
    char *reply = malloc(bytes);
    int error = reply == NULL ? ENOMEM : slot_enter(fuse, place.slot, &slot);
    if (error == 0) {
        int64_t used = listing_begin(slot->directory, place.node, &listing);
        if (used == 0) {
            used = list(request, slot, &listing, (uint64_t)position, reply, bytes, plus);
        }
        error = used < 0 ? errno_for(fuse, place.slot, (int)used) : 0;
        if (error == 0) {
            (void)fuse_reply_buf(request, reply, (size_t)used);
        }
        slot_leave(fuse, slot);
    }
    if (error != 0) {
        (void)fuse_reply_err(request, error);
    }
    free(reply);
}

void handle_readdir(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t position,
                    struct fuse_file_info *info)
{
    (void)info;
    read_directory(request, inode, bytes, position, false);
}

void handle_readdirplus(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t position,
                        struct fuse_file_info *info)
{
    (void)info;
    read_directory(request, inode, bytes, position, true);
}

/* ---- extended attributes --------------------------------------------------------------------- */

/* Replies with a value, or its length where that is what was asked for. */
static void reply_value(fuse_req_t request, const char *value, size_t value_bytes, size_t bytes)
{
    if (bytes == 0) {
        (void)fuse_reply_xattr(request, value_bytes);
    } else if (value_bytes > bytes) {
        (void)fuse_reply_err(request, ERANGE);
    } else {
        (void)fuse_reply_buf(request, value, value_bytes);
    }
}

/* The value of a file's own attribute; its length, 0 when there is none of that name. */
static int file_value(const struct slot *slot, uint64_t index, const char *name, char *value)
{
    if (index < slot->count && strcmp(name, XATTR_INDEX) == 0) {
        return snprintf(value, XATTR_BYTES, "%" PRIu64, index);
    }
    if (index < slot->count && strcmp(name, XATTR_CRC32C) == 0) {
        return snprintf(value, XATTR_BYTES, "%08" PRIx32, slot->locations[index].crc32c);
    }
    return 0;
}

void handle_getxattr(fuse_req_t request, fuse_ino_t inode, const char *name, size_t bytes)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct place place = place_unpack(inode);
    char value[XATTR_BYTES];
    struct slot *slot = NULL;
    int value_bytes = 0;
    int error = inode == ROOT_INODE ? ENODATA : slot_known(fuse, place.slot, &slot);
    bool version = place.node.depth <= DATASET_DEPTH && strcmp(name, XATTR_VERSION) == 0;
    if (error == 0 && version) {
        value_bytes = snprintf(value, sizeof value, "%" PRIu32, slot->known.version);
    } else if (error == 0 && place.node.depth == FILE_DEPTH) {
        error = slot_enter(fuse, place.slot, &slot);
        if (error == 0) {
            value_bytes = file_value(slot, place.node.index, name, value);
            slot_leave(fuse, slot);
        }
    }
    if (error != 0 || value_bytes <= 0) {
        (void)fuse_reply_err(request, error != 0 ? error : ENODATA);
    } else {
        reply_value(request, value, (size_t)value_bytes, bytes);
    }
}

void handle_listxattr(fuse_req_t request, fuse_ino_t inode, size_t bytes)
{
    static const char of_file[] = XATTR_INDEX "\0" XATTR_CRC32C "\0" XATTR_VERSION;
    struct place place = place_unpack(inode);
    struct slot *slot;
    int error = inode == ROOT_INODE ? 0 : slot_known(fuse_of(request), place.slot, &slot);
    if (error != 0) {
        (void)fuse_reply_err(request, error);
    } else if (inode == ROOT_INODE || place.node.depth > DATASET_DEPTH) {
        reply_value(request, "", 0, bytes);
    } else if (place.node.depth == DATASET_DEPTH) {
        reply_value(request, XATTR_VERSION, sizeof XATTR_VERSION, bytes);
    } else {
        reply_value(request, of_file, sizeof of_file, bytes);
    }
}
