/*
 * Sends for a queue pair (send.c) and handles the PDUs that it receives (inbound.c). Above
 * nvme/operations.h, below nvme/recovery.h.
 */
#ifndef DLFS_NVME_TRANSFER_H
#define DLFS_NVME_TRANSFER_H

#include "nvme/operations.h"

/* Checks received PDUs against the commands in flight. Its context is a struct nvme_queue. */
extern const struct nvme_sink nvme_queue_sink;

/* Empties the send buffer. */
void nvme_output_clear(struct nvme_queue *queue);
/*
 * Returns when a waiting operation may be issued, by the queue pair's clock; 0: now. A write waits
 * until the controller that lost it has quiesced, and until the writer's lease is confirmed.
 */
uint64_t nvme_issue_time(const struct nvme_queue *queue, struct nvme_operation *operation,
                         uint64_t now_ns);
/*
 * Issues waiting operations as commands and sends as much as the socket takes. Returns 0, or the
 * negative code and *reason why the connection must be closed.
 */
int nvme_send_pending(struct nvme_queue *queue, const char **reason);

#endif
