/*
 * Decides which samples to read ahead, before the kernel requests them.
 *
 * Two predictions. First, a program that looks a file up is about to read it, provided that the
 * files looked up lately were read; the device then works while the kernel and the program are
 * still on their way. Second, a program that reads samples in the order of their indices goes on
 * so: a folder is copied, or a training run does not shuffle. Each window of such a run is twice as
 * long as the one before, and is read when the program enters that one. The same holds for the
 * bytes of a large file.
 *
 * Pure bookkeeping without I/O. Threads: any at once.
 */
#ifndef DLFS_FUSE_READAHEAD_H
#define DLFS_FUSE_READAHEAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "dlfs/dlfs.h"

#define READAHEAD_RUNS 16u                        /* sequential runs that are tracked at once */
#define READAHEAD_STEPS_MIN 3u                    /* steps of a run before it is read ahead */
#define READAHEAD_SAMPLES_FIRST 32u               /* samples of a run's first window */
#define READAHEAD_SAMPLES_MAX 256u                /* most samples of one window */
#define READAHEAD_BYTES (UINT64_C(16) << 20)      /* most bytes of one window */
#define READAHEAD_SAMPLE_BYTES_MAX (1u << 20)     /* largest sample that is read ahead */
#define READAHEAD_RANGE_FIRST (UINT64_C(1) << 20) /* bytes of the first window in a file */
#define READAHEAD_RANGE_MAX (UINT64_C(8) << 20)   /* most bytes of one window in a file */
#define READAHEAD_MEMORY_SHARE 4u /* all files' windows together take a quarter of the memory */

/* The samples to read ahead after a request: first .. first+count-1. */
struct readahead_plan {
    uint64_t first;
    uint32_t count;
};

/* A program that goes through a dataset from index to index. */
struct sequential_run {
    uint32_t dataset;
    uint32_t steps;       /* samples requested in sequence */
    uint32_t samples_max; /* of the next window, which is twice as long as the last one */
    uint64_t next;        /* index that would continue the run */
    uint64_t end;         /* index after the last sample read ahead */
    uint64_t trigger;     /* first sample of the newest window; its request begins the next one */
    uint64_t used_at;     /* value of the tracker's clock at the last use */
};

/* A range of a file. */
struct file_range {
    uint64_t index; /* of the sample */
    uint64_t offset;
    uint64_t bytes;
};

/* A program that reads a large file from its beginning to its end. */
struct file_run {
    uint32_t dataset;
    uint64_t index;
    uint64_t first;   /* begin of what was requested in order */
    uint64_t next;    /* end of it */
    uint64_t ahead;   /* end of what was read ahead */
    uint64_t window;  /* bytes of the last window */
    uint64_t used_at; /* value of the tracker's clock at the last use; 0: unused */
};

struct readahead {
    pthread_mutex_t lock;
    _Atomic int32_t lookup_credit; /* high while files that are looked up are also read */
    uint64_t clock;                /* uses of all runs, counted */
    struct sequential_run runs[READAHEAD_RUNS];
    struct file_run files[READAHEAD_RUNS];
};

void readahead_init(struct readahead *readahead);
void readahead_destroy(struct readahead *readahead);
/* Notes that a file was looked up. Returns true if it should be read now. */
bool readahead_on_lookup(struct readahead *readahead);
/* Notes that the first bytes of a file were read. */
void readahead_on_read(struct readahead *readahead);
/*
 * Notes that a sample was looked up or read. Returns the samples to read ahead now, mostly none.
 * locations has the count samples of the dataset.
 */
struct readahead_plan readahead_advance(struct readahead *readahead, uint32_t dataset,
                                        uint64_t index, const dlfs_location *locations,
                                        uint64_t count);
/*
 * Notes that a range of a large file of this length was requested. Returns the range to read ahead
 * now, mostly an empty one. memory_bytes is what the reader may keep.
 */
struct file_range readahead_in_file(struct readahead *readahead, uint32_t dataset, uint64_t index,
                                    uint64_t offset, uint64_t bytes, uint64_t length,
                                    uint64_t memory_bytes);

#endif
