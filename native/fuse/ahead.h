/*
 * Which samples to read before they are asked for.
 *
 * Two guesses. A program that looks a file up is about to read it, as long as those looked up
 * lately were read: the device is then at work while the kernel and the program are on their way.
 * And a program that goes from index to index will go on so: copying a folder, or a training run
 * without a shuffle.
 *
 * Pure bookkeeping. Threads: any at once.
 */
#ifndef DLFS_FUSE_AHEAD_H
#define DLFS_FUSE_AHEAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "dlfs/dlfs.h"

#define AHEAD_RUNS 16u                  /* programs that are followed at once */
#define AHEAD_RUN_MIN 3u                /* steps in a row before a run is believed in */
#define AHEAD_SAMPLES 32u               /* of one reading ahead */
#define AHEAD_BYTES (UINT64_C(4) << 20) /* likewise */
#define AHEAD_SAMPLE_BYTES_MAX (1u << 20)

/* Somebody who goes from index to index. */
struct run {
    uint32_t slot;
    uint32_t steps;
    uint64_t next;  /* the index that would follow */
    uint64_t until; /* read ahead so far */
    uint64_t used;  /* by the clock of the runs */
};

struct ahead {
    pthread_mutex_t lock;
    _Atomic int32_t belief; /* that what is looked up will be read */
    uint64_t clock;
    struct run runs[AHEAD_RUNS];
};

void ahead_init(struct ahead *ahead);
void ahead_destroy(struct ahead *ahead);
/* A file was looked up: whether it is worth reading now. */
bool ahead_looked_up(struct ahead *ahead);
/* A file's first bytes were read. */
void ahead_was_read(struct ahead *ahead);
/*
 * A sample was looked up or read: how many from *first on are to be read ahead now, mostly none.
 * locations are those of the count samples of the dataset.
 */
uint32_t ahead_follow(struct ahead *ahead, uint32_t slot, uint64_t index,
                      const dlfs_location *locations, uint64_t count, uint64_t *first);

#endif
