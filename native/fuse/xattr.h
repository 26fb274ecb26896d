/* Extended attributes of files and directories. */
#ifndef DLFS_FUSE_XATTR_H
#define DLFS_FUSE_XATTR_H

#include "mount.h"

void handle_getxattr(const struct request *request);
void handle_listxattr(const struct request *request);

#endif
