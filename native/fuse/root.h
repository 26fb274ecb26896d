/*
 * The upper directories: the root, and in a mount of several volumes the directory of each volume.
 * They list the datasets or the volumes. Also the space of the volumes.
 *
 * `volume` is an entry of the dataset table that stands for a volume's directory; NULL: the root.
 */
#ifndef DLFS_FUSE_ROOT_H
#define DLFS_FUSE_ROOT_H

#include "mount.h"

/* Returns true if an inode is an upper directory, and whose; false if its volume is withdrawn. */
bool root_is_upper(struct dlfs_fuse *fuse, uint64_t inode, struct dataset_entry **volume);
/* Sets the attributes of the upper directory that has a dataset. Returns 0 or an errno > 0. */
int root_set_parent(struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                    struct fuse_entry_out *entry);
void root_lookup(const struct request *request, const struct dataset_entry *volume);
void root_readdir(const struct request *request, const struct dataset_entry *volume,
                  const struct fuse_read_in *read, bool plus);
/* Frees the listings of one directory. */
void root_free_listings(struct dlfs_fuse *fuse, uint32_t directory);
void root_free_all_listings(struct dlfs_fuse *fuse);
/* Does the work of dlfs_fuse_set_listing. */
int root_set_listing(struct dlfs_fuse *fuse, uint32_t directory, const uint8_t *names,
                     uint64_t names_bytes, const uint32_t *datasets, uint32_t entry_count);
void handle_statfs(const struct request *request);

#endif
