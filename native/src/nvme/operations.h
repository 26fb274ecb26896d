/*
 * The state of an I/O queue pair and the life of its operations: the bottom layer of a queue pair.
 *
 * An operation, which a caller submits, is split into commands that each transfer at most what the
 * controller allows. The index of a command in queue->commands is the low part of its command ID.
 * An operation is always in one of these states:
 *   - waiting: it is in queue->waiting, with commands still to issue, and some may be in flight;
 *   - in flight: all of its commands were issued, and some have not completed;
 *   - delayed: it is in queue->delayed until a pause before its next attempt is over;
 *   - done: its completion is in queue->done until dlfs_queue_poll returns it.
 *
 * Layers of a queue pair, each of which calls only those above it in this list:
 *   operations.c           operations and commands: enqueue, complete, try again
 *   send.c, inbound.c      what is sent, what is received (nvme/transfer.h)
 *   recovery.c             lost and new connections, deadlines (nvme/recovery.h)
 *   queue.c                submit, poll, create, free (nvme/queue.h)
 *
 * Threads: one thread at a time uses a queue pair. No memory is allocated after its creation.
 */
#ifndef DLFS_NVME_OPERATIONS_H
#define DLFS_NVME_OPERATIONS_H

#include "nvme/association.h"

#define NVME_NONE UINT32_MAX /* no operation, no command */
#define NVME_OUTPUT_BYTES 16384u
#define NVME_OUTPUT_VECTORS 128u
/* A kind of operation in addition to DLFS_OP_*: it runs queue->passthrough. */
#define NVME_OP_PASSTHROUGH 2u
/* The command ID's bits that hold the index of the command. The bits above them count its uses. */
#define NVME_CID_INDEX 0xFFFu

struct nvme_list {
    uint32_t first;
    uint32_t last;
};

struct nvme_operation {
    uint8_t *buffer;
    uint64_t offset_bytes;
    uint64_t tag;
    uint64_t submitted_ns;  /* time of submission, on the queue pair's clock (nvme_queue_now) */
    uint64_t not_before_ns; /* earliest time of its commands, CLOCK_MONOTONIC; 0: at once */
    uint32_t length_bytes;
    uint32_t issued_bytes; /* bytes for which commands were issued */
    uint32_t commands_in_flight;
    uint32_t next;          /* next operation of the list that this one is in */
    int32_t code;           /* first error that ends the operation; 0: none */
    int32_t retryable_code; /* first error after which the operation may be tried again; 0: none */
    uint8_t kind;           /* DLFS_OP_* or NVME_OP_PASSTHROUGH */
    uint8_t retries;        /* attempts after retryable errors */
    uint8_t broken_connections; /* connections that protocol or digest errors ended under it */
    bool waiting;               /* true while it is in queue->waiting */
};

/* An entry of the command table: a command in flight, or free. */
struct nvme_command {
    uint8_t *buffer;
    uint64_t sent_ns; /* time when it was issued, on the queue pair's clock */
    uint32_t length_bytes;
    uint32_t transferred_bytes; /* reads: received; writes: handed to the send buffer */
    uint32_t operation;         /* index of its operation */
    uint32_t next;              /* next command of the free list or of queue->sendable */
    uint32_t r2t_left_bytes;    /* bytes that an R2T requested and that are still to be sent */
    uint16_t r2t_tag;
    uint16_t cid;
    uint16_t sends_pending; /* data vectors not sent yet, plus one while it is in sendable */
    uint16_t status;        /* status of the CQE that came while sends were pending */
    uint8_t kind;
    uint8_t digest_retries; /* times that it was sent again after a wrong data digest */
    bool in_flight;
    bool to_host;       /* true if its data goes from the controller to the host */
    bool digest_failed; /* some of its data had a wrong digest */
    bool last_seen;     /* a C2HData with the LAST flag was received */
    bool completed;     /* an error CQE arrived before all data was sent */
};

/* The send buffer: PDU headers and digests as bytes, and data in the callers' buffers. */
struct nvme_output {
    uint32_t used_bytes;
    uint32_t first; /* first vector that is not completely sent */
    uint32_t count;
    struct iovec vectors[NVME_OUTPUT_VECTORS];
    uint32_t owners[NVME_OUTPUT_VECTORS]; /* command whose data a vector is, or NVME_NONE */
    uint8_t bytes[NVME_OUTPUT_BYTES];
};

struct nvme_queue {
    dlfs_queue base;
    struct nvme_association *association;
    struct nvme_link *link;
    struct nvme_connection *connection; /* NULL while there is none */
    int lost_code;     /* < 0: the controller is lost, and operations end with this code */
    int epoll;         /* descriptor that dlfs_queue_descriptor returned; -1: none was requested */
    bool socket_full;  /* the last send found no room in the socket */
    bool watches_room; /* the epoll set reports room in the socket */
    uint32_t block_shift;
    uint32_t nsid;
    uint32_t command_count; /* commands that may be in flight on this connection */
    uint32_t commands_max;
    uint32_t free_command;
    uint32_t in_flight_count;
    uint32_t small_count;        /* commands in flight that do not read NVME_DIRECT_BYTES or more */
    uint32_t write_count;        /* commands in flight that write */
    uint32_t change_count;       /* commands in flight that are no reads, which a move waits for */
    uint32_t unfinished_changes; /* operations that are not complete and no reads */
    uint32_t free_operation;
    struct nvme_list waiting;  /* operations with commands still to issue, in order */
    struct nvme_list delayed;  /* operations to try again at delayed_until_ns */
    struct nvme_list sendable; /* commands with an R2T to answer, or to be sent again */
    uint64_t delayed_until_ns;
    uint64_t polled_ns;   /* CLOCK_MONOTONIC_COARSE when the queue pair was last used */
    uint64_t paused_ns;   /* time that passed without a poll: the queue pair's clock omits it */
    uint64_t deadline_ns; /* nothing can expire before this time of the queue pair's clock */
    uint64_t timeout_ns;  /* time limit of one command */
    uint64_t budget_ns;   /* time limit of an operation with all its attempts */
    uint64_t quiesce_ns;  /* quiesce_ms of the present or the last connection */
    uint32_t done_first;  /* first entry of the ring of completions */
    uint32_t done_count;
    uint64_t done_bytes;               /* of all operations that were ever completed */
    struct nvme_exchange *passthrough; /* the only command of an internal queue pair */
    uint64_t passthrough_incarnation;  /* incarnation of the controller that answered it */
    struct nvme_operation *operations; /* [depth] */
    struct nvme_command *commands;     /* [commands_max] */
    dlfs_completion *done;             /* [depth], a ring */
    struct nvme_output out;
};

static inline uint32_t nvme_command_is_small(const struct nvme_command *command)
{
    return !command->to_host || command->length_bytes < NVME_DIRECT_BYTES;
}

/* Returns true if the queue pair's thread waits for room in the socket, which it has connected. */
static inline bool nvme_queue_needs_room(const struct nvme_queue *queue)
{
    return queue->socket_full || nvme_connection_wants_room(queue->connection);
}

/* Notes that commands of the queue pair that are no reads are in flight no more. */
static inline void nvme_note_changes_ended(struct nvme_queue *queue, uint32_t count)
{
    queue->change_count -= count;
    if (count > 0) {
        atomic_fetch_sub(&queue->association->writes_in_flight, count);
    }
}

static inline void nvme_list_clear(struct nvme_list *list)
{
    *list = (struct nvme_list){NVME_NONE, NVME_NONE};
}

static inline void nvme_list_append(struct nvme_queue *queue, struct nvme_list *list,
                                    uint32_t number)
{
    queue->operations[number].next = NVME_NONE;
    if (list->first == NVME_NONE) {
        list->first = number;
    } else {
        queue->operations[list->last].next = number;
    }
    list->last = number;
}

/*
 * Returns the time on the queue pair's clock. That clock stops while the queue pair is not polled
 * (after POLL_GAP_NS), so that an answer that waits in the socket does not count as late because
 * the caller did not poll.
 */
uint64_t nvme_queue_now(struct nvme_queue *queue);
/* Counts all time until now as polled. Called after waiting for events of the queue pair. */
void nvme_queue_note_poll(struct nvme_queue *queue);
/* Notes that something may expire at at_ns of the queue pair's clock. */
void nvme_queue_note_deadline(struct nvme_queue *queue, uint64_t at_ns);

/* Appends an operation to the waiting ones. */
void nvme_operation_enqueue(struct nvme_queue *queue, uint32_t number);
/* Removes the first waiting operation from the list and returns its index. */
uint32_t nvme_waiting_pop(struct nvme_queue *queue);
/* Removes waiting operations from the front of the list for as long as the first one has failed. */
void nvme_drop_failed(struct nvme_queue *queue);
/* Puts an operation's result into the ring of completions and frees its entry. */
void nvme_operation_complete(struct nvme_queue *queue, uint32_t number, int64_t result);
/*
 * Completes an operation that is not waiting and has no commands in flight, or delays it for
 * another attempt after a retryable error.
 */
void nvme_operation_end(struct nvme_queue *queue, uint32_t number);
/* Makes delayed operations whose pause is over waiting ones; returns true if there were any. */
bool nvme_requeue_delayed(struct nvme_queue *queue, uint64_t now_ns);

/* Frees a command that completed with status, and ends its operation if it was the last one. */
void nvme_command_end(struct nvme_queue *queue, uint32_t number, uint16_t status);
/* Appends a command to those that have something to send: R2T data, or themselves once more. */
void nvme_sendable_append(struct nvme_queue *queue, uint32_t number);

#endif
