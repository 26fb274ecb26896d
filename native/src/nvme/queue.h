/*
 * An I/O queue pair over a TCP connection of its own, as dlfs_queue_ops. It is the top layer of a
 * queue pair; nvme/operations.h draws all of them.
 *
 * When the connection ends, operations in flight start again from their beginning, or end with an
 * error, as dlfs/nvme.h says.
 *
 * Threads: one thread at a time.
 */
#ifndef DLFS_NVME_QUEUE_H
#define DLFS_NVME_QUEUE_H

#include "nvme/operations.h"

extern const struct dlfs_queue_ops nvme_queue_ops;
/*
 * Creates a queue pair; the caller initializes queue->base. block_bytes is 0 for one that only runs
 * passthrough commands. Ends at the limit, which may be NULL, with DLFS_E_TIMEOUT.
 */
int nvme_queue_make(struct nvme_association *association, uint32_t depth, uint32_t block_bytes,
                    const struct dlfs_connect_limit *limit, struct nvme_queue **out);
void nvme_queue_free(struct nvme_queue *queue);
/*
 * Runs one command on an idle queue pair of depth 1 and waits for its CQE. Returns 0 if the
 * controller answered, whatever the status; *incarnation gets that of the controller.
 */
int nvme_queue_run(struct nvme_queue *queue, struct nvme_exchange *exchange, uint64_t *incarnation);

#endif
