/* Flushes, leases and repeated writes of both NVMe initiators; see nvme/protocol/writes.h. */
#include "nvme/protocol/writes.h"

#include <errno.h>

#include "dlfs/dlfs.h"
#include "platform/clock.h"

/* Added to the keep-alive timeout of a controller that reports no Command Quiesce Time. */
#define QUIESCE_MARGIN_MS 1000u

/* ---- flush ----------------------------------------------------------------------------------- */

void nvme_durability_init(struct nvme_durability *durability)
{
    (void)pthread_mutex_init(&durability->flush_lock, NULL);
    atomic_init(&durability->unflushed, UINT64_MAX);
    atomic_init(&durability->losses, 0);
}

void nvme_durability_destroy(struct nvme_durability *durability)
{
    (void)pthread_mutex_destroy(&durability->flush_lock);
}

void nvme_durability_note(struct nvme_durability *durability, uint64_t incarnation)
{
    uint64_t oldest = atomic_load(&durability->unflushed);
    while (incarnation < oldest &&
           !atomic_compare_exchange_weak(&durability->unflushed, &oldest, incarnation)) {
    }
}

/*
 * A completed write may be lost until a flush that began later has succeeded on the same
 * controller. If a controller of a later incarnation answers the flush and has a volatile cache,
 * the write may be gone. So may the writes of every flush that waited for flush_lock meanwhile:
 * losses then differs from the value that they read before.
 */
static int flush_locked(struct nvme_durability *durability, uint64_t losses,
                        nvme_flush_command command, void *argument, bool *lost)
{
    uint64_t oldest = atomic_exchange(&durability->unflushed, UINT64_MAX);
    struct nvme_flushed flushed = {.incarnation = 0};
    int code = command(argument, &flushed);
    if (code < 0) {
        nvme_durability_note(durability, oldest);
        return code;
    }
    if (flushed.cached && oldest < flushed.incarnation) {
        atomic_fetch_add(&durability->losses, 1);
    }
    *lost = atomic_load(&durability->losses) != losses;
    return *lost ? -EIO : 0;
}

int nvme_durability_flush(struct nvme_durability *durability, nvme_flush_command command,
                          void *argument, bool *lost)
{
    uint64_t losses = atomic_load(&durability->losses);
    (void)pthread_mutex_lock(&durability->flush_lock);
    int code = flush_locked(durability, losses, command, argument, lost);
    (void)pthread_mutex_unlock(&durability->flush_lock);
    return code;
}

/* ---- leases ---------------------------------------------------------------------------------- */

void nvme_write_limit_init(struct nvme_write_limit *limit)
{
    atomic_init(&limit->incarnation, 0);
    atomic_init(&limit->until_ns, DLFS_WRITES_FREE);
}

void nvme_write_limit_set(struct nvme_write_limit *limit, uint64_t incarnation, uint64_t until_ns)
{
    atomic_store(&limit->incarnation, incarnation);
    atomic_store(&limit->until_ns, until_ns);
}

int nvme_write_permit(const struct nvme_write_limit *limit, uint64_t incarnation)
{
    uint64_t until_ns = atomic_load(&limit->until_ns);
    if (until_ns == DLFS_WRITES_FREE) {
        return 0;
    }
    if (boottime_ns() >= until_ns) {
        return -EKEYEXPIRED;
    }
    return incarnation == atomic_load(&limit->incarnation) ? 0 : -EAGAIN;
}

/* ---- repetition ------------------------------------------------------------------------------ */

uint64_t nvme_quiesce_ms(uint32_t reported_ms, uint32_t keepalive_ms, uint32_t granularity_ms)
{
    if (reported_ms > 0 || keepalive_ms == 0) {
        return reported_ms;
    }
    uint64_t step_ms = granularity_ms > 0 ? granularity_ms : 1;
    return (keepalive_ms + step_ms - 1) / step_ms * step_ms + QUIESCE_MARGIN_MS;
}

int nvme_unanswered_write_code(int code, uint64_t left_ns, uint64_t quiesce_ns)
{
    if (code == DLFS_E_TIMEOUT || code == -EKEYEXPIRED) {
        return code;
    }
    return quiesce_ns == 0 || quiesce_ns >= left_ns ? DLFS_E_LOST : 0;
}
