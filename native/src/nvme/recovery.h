/*
 * Handles lost and new connections of a queue pair, and expired time limits. Above
 * nvme/transfer.h, below nvme/queue.h.
 */
#ifndef DLFS_NVME_RECOVERY_H
#define DLFS_NVME_RECOVERY_H

#include "nvme/operations.h"

/* Applies epoll_ctl to the connection's socket if the queue pair has an epoll set. */
void nvme_watch(struct nvme_queue *queue, int action, uint32_t events);
/* Makes the epoll set report room in the socket exactly while the socket is full. */
void nvme_watch_room(struct nvme_queue *queue);
/* Closes the connection because of code, and reports that to the association. */
void nvme_queue_fail(struct nvme_queue *queue, int code, const char *reason);
/* Completes all waiting and delayed operations with code. Requires that there is no connection. */
void nvme_end_waiting(struct nvme_queue *queue, int code);
/* Applies the changes that the association left in the link: a connection ended, or a new one. */
void nvme_queue_take_update(struct nvme_queue *queue);
/* Calls nvme_send_pending, and closes the connection when it fails. */
void nvme_queue_send(struct nvme_queue *queue);
/* Requeues delayed operations whose pause is over, and ends what exceeded its time limit. */
void nvme_check_deadlines(struct nvme_queue *queue);

#endif
