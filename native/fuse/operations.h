/* The handlers of all requests, whichever way they come, and what has them called. */
#ifndef DLFS_FUSE_OPERATIONS_H
#define DLFS_FUSE_OPERATIONS_H

#include "mount.h"

/* ---- names.c, xattr.c, read.c ---------------------------------------------------------------- */

void handle_lookup(const struct kernel_request *request);
void handle_getattr(const struct kernel_request *request);
void handle_readdir(const struct kernel_request *request); /* and READDIRPLUS */
void handle_getxattr(const struct kernel_request *request);
void handle_listxattr(const struct kernel_request *request);
void handle_read(const struct kernel_request *request);
/* Gives up the early read, if there is one. */
void early_read_drop(struct dlfs_fuse *fuse);
/* Reads ahead for a program that reads in sequence; called by the read-ahead thread. */
void read_ahead_job(void *fuse, const struct readahead_job *job);
/* Reads ahead after the look-up of a sample, if a read is likely. The caller has the dataset. */
void read_ahead_on_lookup(struct dlfs_fuse *fuse, struct dataset_entry *dataset, uint64_t index);

/* ---- operations.c ---------------------------------------------------------------------------- */

/*
 * Handles a request, which is not trusted: one whose structure or name is incomplete fails with
 * EINVAL. The reply's path has everything but the ID. Returns false if the kernel says that the
 * mount ends (DESTROY).
 */
bool serve_request(const struct reply_path *path, const uint8_t *bytes, size_t byte_count);
/*
 * Reads an INIT request, notes what the kernel can do, and sets the reply. Errors: -EINVAL, it is
 * no INIT request; -EPROTO, the kernel is too old.
 */
int negotiate(struct dlfs_fuse *fuse, const uint8_t *bytes, size_t byte_count,
              struct fuse_init_in *init, struct fuse_init_out *reply);

#endif
