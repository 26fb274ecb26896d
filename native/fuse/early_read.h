/*
 * The early read: the read of a sample that was begun when its file was looked up, so that
 * the device works while the program sends its request for the content. No thread waits for it.
 * There is one at a time: it serves a program that opens and reads one file after the other.
 *
 * Threads: any at once.
 */
#ifndef DLFS_FUSE_EARLY_READ_H
#define DLFS_FUSE_EARLY_READ_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "dataset.h"
#include "dlfs/dlfs.h"

/* A read that was begun. */
struct begun {
    dlfs_begun_read *read;         /* NULL: there is none */
    struct dataset_entry *dataset; /* whose reader is taken until the read ends */
    uint64_t index;
    uint32_t reader; /* number of the dataset's reader */
};

struct early_read {
    struct dataset_table *datasets;
    pthread_mutex_t lock; /* protects `begun` */
    struct begun begun;
    _Atomic bool present; /* whether there is one, perhaps of a moment ago */
};

void early_read_init(struct early_read *early, struct dataset_table *datasets);
void early_read_destroy(struct early_read *early);
/* Begins to read a sample, and gives up the read of another one. The dataset is acquired. */
bool early_read_begin(struct early_read *early, struct dataset_entry *dataset, uint64_t index);
/*
 * Returns the read of a sample, for the caller to finish, and then to return the reader with this
 * number. NULL: there is none. Gives up the read of another sample, which the program has left.
 */
dlfs_begun_read *early_read_take(struct early_read *early, const struct dataset_entry *dataset,
                                 uint64_t index, uint32_t *reader);
/* Gives up the read, if there is one. */
void early_read_drop(struct early_read *early);

#endif
