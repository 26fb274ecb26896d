/* A batch: the arrays that describe the samples of a read, and where their bytes lie. */
#ifndef DLFS_BATCH_H
#define DLFS_BATCH_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "dlfs/dlfs.h"

struct dlfs_client;
struct private_memory;

/* A batch, of this process's reader or received from a service. */
struct batch {
    dlfs_batch public;
    void (*release)(struct batch *batch);  /* implements dlfs_batch_release */
    dlfs_reader *reader;                   /* NULL if a service gave the batch */
    struct private_memory *private_memory; /* NULL if the samples lie in the arena */
    struct dlfs_client *client;            /* the connection to the service, or NULL */
    uint64_t number;                       /* the service's number of the batch */
    uint64_t capacity;                     /* samples that the arrays have room for */
    uint64_t failure_capacity;
    uint32_t process; /* dlfs_process() of the process that may release the batch */
    int64_t *offsets; /* one allocation: offsets, lengths and indices, one after the other */
    int64_t *lengths;
    uint64_t *indices;
    dlfs_failure *failures;
    struct batch *next; /* in a list of idle batches */
};

static inline void batch_free(struct batch *batch)
{
    free(batch->offsets);
    free(batch->failures);
    free(batch);
}

#define BATCH_BYTES_PER_SAMPLE (2 * sizeof(int64_t) + sizeof(uint64_t)) /* of its arrays */
/* Returns the memory of a batch's arrays in bytes. */
size_t batch_bytes(const struct batch *batch);
/*
 * Returns an idle batch, or a new one if `idle` is NULL, with arrays for this many samples, whose
 * content is lost. Frees it, and returns NULL, without memory.
 */
struct batch *batch_prepare(struct batch *idle, uint64_t count);
/* Makes room for this many failures. */
int batch_reserve_failures(struct batch *batch, uint64_t count);

#endif
