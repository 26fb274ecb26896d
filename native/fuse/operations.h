/* The handlers that libfuse calls. */
#ifndef DLFS_FUSE_OPERATIONS_H
#define DLFS_FUSE_OPERATIONS_H

#include "mount.h"

extern const struct fuse_lowlevel_ops OPERATIONS;

#endif
