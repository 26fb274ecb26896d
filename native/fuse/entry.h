/* Attributes of files and directories, and replies that carry them. */
#ifndef DLFS_FUSE_ENTRY_H
#define DLFS_FUSE_ENTRY_H

#include "inode.h"
#include "mount.h"

#define FOREVER_SECONDS 1000000000u /* the kernel may cache this as long as it has memory */
#define BLOCK_BYTES 4096u

/* Sets the attributes of an upper directory: of a volume, or of the root if `volume` is NULL. */
void entry_set_upper(const struct dlfs_fuse *fuse, const struct dataset_entry *volume,
                     int64_t modified_ns, struct fuse_entry_out *entry);
/* The same, with the time that an upcall gives. Returns 0 or an errno > 0. */
int entry_ask_upper(struct dlfs_fuse *fuse, const struct dataset_entry *volume,
                    struct fuse_entry_out *entry);
/* Sets the attributes of the symbolic link `incoming`, which never change. */
void entry_set_incoming(const struct dlfs_fuse *fuse, struct fuse_entry_out *entry);
void entry_set_directory(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                         struct tree_node node, struct fuse_entry_out *entry);
/* Sets the attributes of a file or directory of an open dataset. ESTALE: no such sample. */
int entry_set_node(const struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                   struct tree_node node, struct fuse_entry_out *entry);

/*
 * Appends an entry to the reply of a listing; plus: with all attributes. Returns the bytes that the
 * entry needs. If they are more than `bytes`, nothing was appended.
 */
size_t entry_append(uint8_t *reply, size_t bytes, const char *name,
                    const struct fuse_entry_out *entry, uint64_t next, bool plus);
/* Replies that a name does not exist, which the kernel may cache; in an upper directory until other
 * names there expire. */
void entry_reply_absent(const struct request *request, bool in_upper);

#endif
