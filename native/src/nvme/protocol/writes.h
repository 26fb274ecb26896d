/*
 * The rules for writes of both NVMe initiators, libdlfs and libdlfs_spdk: a flush covers all
 * completed writes or fails, no write is sent after the writer's lease has expired, and no write is
 * repeated while a target may still execute its first attempt.
 *
 * An incarnation is the number of a controller of a device: each reconnect begins the next one. A
 * flush covers only writes that the same controller completed. A lease allows writes only through
 * the controller that existed when the lease was confirmed.
 *
 * Times are in nanoseconds unless named otherwise.
 *
 * Threads: all functions may be called by any threads at once.
 */
#ifndef DLFS_NVME_WRITES_H
#define DLFS_NVME_WRITES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* The completed writes of a device that no flush has covered, and reported losses of such writes.
 */
struct nvme_durability {
    pthread_mutex_t flush_lock; /* held during a flush: one at a time */
    _Atomic uint64_t unflushed; /* oldest incarnation with an unflushed write; UINT64_MAX: none */
    _Atomic uint64_t losses;    /* number of flushes that reported a loss */
};

/* The answer to a flush command. */
struct nvme_flushed {
    uint64_t incarnation; /* incarnation of the controller that answered */
    bool cached;          /* true if that controller has a volatile write cache */
};

/* Callback that runs one flush command and waits for its answer. Returns 0 or a negative code. */
typedef int (*nvme_flush_command)(void *argument, struct nvme_flushed *flushed);

void nvme_durability_init(struct nvme_durability *durability);
void nvme_durability_destroy(struct nvme_durability *durability);
/* Notes a completed write. Called before the caller sees its completion. */
void nvme_durability_note(struct nvme_durability *durability, uint64_t incarnation);
/*
 * Makes every noted write durable. Returns -EIO if such a write may be lost: a controller with a
 * volatile cache completed it, and failed before this flush. Concurrent flushes that waited for
 * this one return -EIO too, since the write may have been theirs; later flushes cover new writes
 * only. Returns the code of command if that fails; all writes then remain unflushed. Sets *lost if
 * writes may be lost, and leaves it untouched where command failed.
 */
int nvme_durability_flush(struct nvme_durability *durability, nvme_flush_command command,
                          void *argument, bool *lost);

/* Until when and through which incarnation this host may write; see dlfs_device_limit_writes. */
struct nvme_write_limit {
    _Atomic uint64_t until_ns;
    _Atomic uint64_t incarnation;
};

void nvme_write_limit_init(struct nvme_write_limit *limit);
void nvme_write_limit_set(struct nvme_write_limit *limit, uint64_t incarnation, uint64_t until_ns);
/*
 * Returns 0 if a write may be sent now through a controller of that incarnation, -EKEYEXPIRED if
 * the lease has expired, -EAGAIN if the lease was not confirmed since that controller was
 * connected.
 */
int nvme_write_permit(const struct nvme_write_limit *limit, uint64_t incarnation);

/*
 * Returns how long after the end of its connections a controller may still execute their commands,
 * in milliseconds; 0 if unknown. This is the Command Quiesce Time if the controller reports one.
 * Else it is the keep-alive timeout plus a margin: by then the controller has noticed the end of
 * the connections even if the network lost every packet about it. The controller rounds that
 * timeout up to its granularity (KAS).
 */
uint64_t nvme_quiesce_ms(uint32_t reported_ms, uint32_t keepalive_ms, uint32_t granularity_ms);
/*
 * Decides about a write whose connection ended with code before its answer came. The target may
 * still execute it, and could then overwrite newer writes to the same blocks. Therefore it is
 * repeated only after the controller has quiesced, and ends with an error where that takes too
 * long. Returns 0 if it may start again quiesce_ns from now, else its final code. left_ns: the
 * remaining part of the write's time limit.
 */
int nvme_unanswered_write_code(int code, uint64_t left_ns, uint64_t quiesce_ns);

#endif
