/* Contents of files. */
#ifndef DLFS_FUSE_READ_H
#define DLFS_FUSE_READ_H

#include "mount.h"

void handle_read(const struct request *request);
/* Reads ahead for a program that reads in sequence; called by the read-ahead thread. */
void read_ahead_job(void *fuse, const struct readahead_job *job);
/* Reads ahead after the look-up of a sample, if a read is likely. The caller has the dataset. */
void read_ahead_on_lookup(struct dlfs_fuse *fuse, struct dataset_entry *dataset, uint64_t index);

#endif
