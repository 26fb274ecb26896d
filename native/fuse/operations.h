/* The handlers of all requests, whichever way they come. */
#ifndef DLFS_FUSE_OPERATIONS_H
#define DLFS_FUSE_OPERATIONS_H

#include "mount.h"

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
