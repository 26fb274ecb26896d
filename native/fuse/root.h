/* The root directory, which lists the datasets, and the space of the volume. */
#ifndef DLFS_FUSE_ROOT_H
#define DLFS_FUSE_ROOT_H

#include "mount.h"

void root_lookup(fuse_req_t request, const char *name);
void root_readdir(fuse_req_t request, size_t bytes, off_t position, bool plus);
void root_free_listings(struct dlfs_fuse *fuse);
/* Does the work of dlfs_fuse_set_root_listing. */
int root_set_listing(struct dlfs_fuse *fuse, const uint8_t *names, uint64_t names_bytes,
                     const uint32_t *datasets, uint32_t entry_count);
void handle_statfs(fuse_req_t request, fuse_ino_t inode);

#endif
