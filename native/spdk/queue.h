/*
 * A queue pair's state, which two files share: request.c takes operations to SPDK and back, queue.c
 * keeps the connection and has the queue pair's face.
 */
#ifndef DLFS_SPDK_QUEUE_H
#define DLFS_SPDK_QUEUE_H

#include "shim.h"

#define PIECE_BYTES (UINT32_C(1) << 20)    /* of one request to SPDK */
#define BOUNCE_BYTES (UINT32_C(128) << 10) /* of one that goes by SPDK's memory */
#define NONE UINT32_MAX                    /* no slot, no piece */

struct slot {
    dlfs_operation operation;
    uint64_t deadline_ns;  /* for an answer to this attempt */
    uint64_t end_ns;       /* no attempt after this */
    uint64_t after_ns;     /* no attempt before this; 0: at once */
    uint64_t issued_bytes; /* of the operation, given to SPDK */
    uint32_t pieces;       /* in flight */
    int32_t code;          /* the first error */
    bool waiting;          /* in the list of those with more to issue */
    bool again;            /* a piece is worth another attempt */
    bool unanswered;       /* a piece was aborted with the connection */
    bool held;             /* a write that had to wait before it was issued */
    bool used;
    uint32_t next;
};

struct piece {
    struct queue *queue;
    uint8_t *bounce; /* its own place in SPDK's memory, or NULL */
    uint64_t start;  /* in the operation */
    uint32_t bytes;
    uint32_t slot;
    bool bounced; /* this time */
    uint32_t next;
};

struct list {
    uint32_t first;
    uint32_t last;
};

struct queue {
    struct queue *next; /* of its controller */
    struct device *device;
    struct controller *controller;
    struct spdk_nvme_qpair *spdk; /* NULL while there is none */
    struct spdk_nvme_ns *ns;      /* NULL while there is none */
    pthread_mutex_t lock;
    uint32_t depth;
    uint32_t piece_count;
    bool needs_dma; /* the transport does */
    bool connected;
    bool namespace_gone;
    bool write_lost;     /* a write was aborted with the connection, and the controller goes on */
    uint64_t generation; /* of the controller that the connection belongs to */
    struct range *range;
    uint8_t *bounce; /* all of it */
    uint32_t bounce_count;
    uint32_t free_slot;
    uint32_t free_piece;   /* those without a bounce buffer */
    uint32_t free_bounced; /* those with one */
    uint32_t flying;       /* pieces */
    uint32_t writing;      /* those that write */
    struct list waiting;
    struct list finished;
    uint32_t finished_count;
    uint64_t down_since_ns; /* 0 while connected */
    uint64_t retry_at_ns;
    uint64_t backoff_ns;
    uint64_t checked_ns;
    uint32_t looks;
    struct piece *pieces; /* [piece_count] */
    struct slot slots[];  /* [depth] */
};

/* With the queue pair's lock held, all of these. */

/* Puts an operation into a slot, where it waits. */
void request_add(struct queue *queue, const dlfs_operation *operation, uint64_t now);
/* Issues what waits, in order; false when the connection is gone. A write that may not be sent yet
 * holds up what is behind it. */
bool request_issue(struct queue *queue);
/* Ends all that waits. */
void request_fail_waiting(struct queue *queue, int code);
/* Ends what has waited for all of its time. */
void request_end_waiting(struct queue *queue, uint64_t now);
/* Decides how the writes in flight end: with code, when their connection does. */
void request_doom_writes(struct queue *queue, int code);
/* Dooms what was not answered in time, and all writes with it, since a silent target may still act
 * on them. False when there is nothing of the kind. */
bool request_doom_late(struct queue *queue, uint64_t now);
/* Hands out what has finished. */
uint32_t request_take_finished(struct queue *queue, dlfs_completion *completions, uint32_t count);
/* Makes the lists of a new queue pair. */
void request_init(struct queue *queue);

#endif
