/* Attributes of files and directories, and replies that carry them. */
#ifndef DLFS_FUSE_ENTRY_H
#define DLFS_FUSE_ENTRY_H

#include "inode.h"
#include "mount.h"

#define FOREVER_SECONDS 1e9 /* the kernel may cache this as long as it has memory */
#define BLOCK_BYTES 4096u

/* Sets the attributes of an upper directory: of a volume, or of the root if `volume` is NULL. */
void entry_set_upper(const struct dlfs_fuse *fuse, const struct dataset_entry *volume,
                     int64_t modified_ns, struct fuse_entry_param *entry);
/* The same, with the time that an upcall gives. Returns 0 or an errno > 0. */
int entry_ask_upper(struct dlfs_fuse *fuse, const struct dataset_entry *volume,
                    struct fuse_entry_param *entry);
/* Sets the attributes of the symbolic link `incoming`, which never change. */
void entry_set_incoming(const struct dlfs_fuse *fuse, struct fuse_entry_param *entry);
void entry_set_directory(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                         struct tree_node node, struct fuse_entry_param *entry);
/* Sets the attributes of a file or directory of an open dataset. ESTALE: no such sample. */
int entry_set_node(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                   struct tree_node node, struct fuse_entry_param *entry);

/*
 * Appends an entry to the reply of a listing; plus: with all attributes. Returns the bytes that the
 * entry needs. If they are more than `bytes`, nothing was appended.
 */
size_t entry_append(fuse_req_t request, char *reply, size_t bytes, const char *name,
                    const struct fuse_entry_param *entry, off_t next, bool plus);
/* Replies that a name does not exist, which the kernel may cache for some seconds. */
void entry_reply_absent(fuse_req_t request, double seconds);

static inline double root_timeout_seconds(const struct dlfs_fuse *fuse)
{
    return fuse->config.root_timeout_ms / 1e3;
}

#endif
