/*
 * Promises of both NVMe initiators about writes: durability through flushes, none after the lease,
 * none repeated too early. Compiled into libdlfs and into libdlfs_spdk.
 *
 * Generations number the controllers that one device has had, one made after the other: a flush
 * speaks only for writes that its own controller took, and a lease only for controllers that were
 * made before it was read. Times are nanoseconds. All functions: any threads at once.
 */
#ifndef DLFS_NVME_WRITES_H
#define DLFS_NVME_WRITES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Completed writes that no flush has covered yet, and losses of such writes. */
struct nvme_durability {
    pthread_mutex_t turn;       /* one flush at a time */
    _Atomic uint64_t unflushed; /* the oldest generation with such a write; UINT64_MAX: none */
    _Atomic uint64_t losses;    /* reported by a flush, so far */
};

/* The answer to a flush command. */
struct nvme_flushed {
    uint64_t generation; /* of the controller that answered */
    bool cached;         /* that controller has a volatile write cache */
};

/* Runs one flush command and waits for its answer: 0, or a negative code. */
typedef int (*nvme_flush_command)(void *argument, struct nvme_flushed *flushed);

void nvme_durability_init(struct nvme_durability *durability);
void nvme_durability_destroy(struct nvme_durability *durability);
/* Notes a write, before its completion is handed out. */
void nvme_durability_note(struct nvme_durability *durability, uint64_t generation);
/*
 * Makes every noted write durable. -EIO when a controller with a volatile cache went after a write
 * that this flush was to cover, or that a flush was to cover for whose turn this one waited; those
 * that come after it speak for new writes only. Else what command returns; then all writes are
 * still to be flushed.
 */
int nvme_durability_flush(struct nvme_durability *durability, nvme_flush_command command,
                          void *argument);

/* The lease of this host's writer; see dlfs_nvme_limit_writes. */
struct nvme_write_limit {
    _Atomic uint64_t until_ns;
    _Atomic uint64_t generation;
};

void nvme_write_limit_init(struct nvme_write_limit *limit);
void nvme_write_limit_set(struct nvme_write_limit *limit, uint64_t generation, uint64_t until_ns);
/*
 * Returns 0 if a write may be sent through a controller now, -EKEYEXPIRED when the lease is over,
 * -EAGAIN while it was not confirmed since that controller was made.
 */
int nvme_write_permit(const struct nvme_write_limit *limit, uint64_t generation);

/*
 * Returns the milliseconds after the end of its connections until a controller executes none of
 * their commands any more: its Command Quiesce Time where it reports one. Else the keep-alive
 * timeout, which the controller rounds up to its granularity (KAS) and after which it has noticed
 * the end whatever the network lost, and a margin. 0: nothing is known.
 */
uint64_t nvme_quiesce_ms(uint32_t reported_ms, uint32_t keepalive_ms, uint32_t granularity_ms);
/*
 * Decides about a write whose connection ended with code before its answer came. The target may
 * still execute it, behind newer writes to the same blocks: it must not look as if it were over,
 * nor be repeated before the controller has quiesced. Returns 0 if it may start again quiesce_ns
 * from now, else the code with which it ends. left_ns: the rest of the write's own time.
 */
int nvme_write_fate(int code, uint64_t left_ns, uint64_t quiesce_ns);

#endif
