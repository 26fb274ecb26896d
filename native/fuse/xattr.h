/* Extended attributes (SEMANTICS.md, rules 19 and 20). */
#ifndef DLFS_FUSE_XATTR_H
#define DLFS_FUSE_XATTR_H

#include "mount.h"

void handle_getxattr(fuse_req_t request, fuse_ino_t number, const char *name, size_t bytes);
void handle_listxattr(fuse_req_t request, fuse_ino_t number, size_t bytes);

#endif
