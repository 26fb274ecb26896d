/* Look-ups, attributes and listings. */
#ifndef DLFS_FUSE_NAMES_H
#define DLFS_FUSE_NAMES_H

#include "mount.h"

void handle_lookup(fuse_req_t request, fuse_ino_t parent, const char *name);
void handle_getattr(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info);
void handle_readlink(fuse_req_t request, fuse_ino_t number);
void handle_readdir(fuse_req_t request, fuse_ino_t number, size_t bytes, off_t position,
                    struct fuse_file_info *info);
void handle_readdirplus(fuse_req_t request, fuse_ino_t number, size_t bytes, off_t position,
                        struct fuse_file_info *info);

#endif
