/* Look-ups, attributes and listings. */
#ifndef DLFS_FUSE_NAMES_H
#define DLFS_FUSE_NAMES_H

#include "mount.h"

void handle_lookup(const struct request *request);
void handle_getattr(const struct request *request);
void handle_readlink(const struct request *request);
void handle_readdir(const struct request *request);
void handle_readdirplus(const struct request *request);

#endif
