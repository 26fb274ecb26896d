/*
 * The state of a queue pair, and the functions of operations.c. queue.c keeps the connection and
 * calls them; they do not call it.
 *
 * An operation takes an entry until its completion is returned. It goes to SPDK as one request, or
 * as several if it is very long or its data is copied through SPDK's memory (bounced).
 */
#ifndef DLFS_SPDK_QUEUE_H
#define DLFS_SPDK_QUEUE_H

#include "shim.h"

#define REQUEST_BYTES_MAX (UINT32_C(1) << 20) /* most bytes of one request */
#define BOUNCE_BYTES (UINT32_C(128) << 10)    /* most bytes of one bounced request */
#define NONE UINT32_MAX                       /* no operation, no request */

struct operation {
    dlfs_operation given;   /* as the caller submitted it */
    uint64_t deadline_ns;   /* an answer to this attempt must come before this time */
    uint64_t end_ns;        /* no attempt starts after this time */
    uint64_t not_before_ns; /* no attempt starts before this time; 0: at once */
    uint64_t issued_bytes;  /* bytes for which requests were issued */
    uint32_t requests_in_flight;
    int32_t code;     /* the first error; 0: none */
    bool waiting;     /* it is in queue->waiting, with requests still to issue */
    bool retry;       /* a request failed in a way that allows another attempt */
    bool unanswered;  /* a request was aborted with the connection: it may have been executed */
    bool was_delayed; /* a write that could not be issued at once */
    bool used;
    uint32_t next; /* next operation of its list */
};

struct request {
    struct queue *queue;
    uint8_t *bounce; /* its part of the bounce memory, or NULL */
    uint64_t start;  /* offset in the operation */
    uint32_t bytes;
    uint32_t operation;
    bool bounced;  /* true if this use copies its data through the bounce memory */
    uint32_t next; /* next one of its free list */
};

struct list {
    uint32_t first;
    uint32_t last;
};

struct queue {
    struct queue_link link;
    struct device *device;
    struct controller *controller;
    struct spdk_nvme_qpair *spdk; /* NULL while there is none */
    struct spdk_nvme_ns *ns;      /* NULL while there is none */
    uint32_t depth;
    uint32_t request_count;
    bool needs_dma; /* true if data must lie in registered or bounce memory */
    bool connected;
    bool namespace_gone;
    bool write_lost; /* a write was aborted with the connection, but the controller was not reset */
    uint64_t incarnation; /* incarnation of the controller that the connection leads to */
    struct range *range;  /* the caller's registered memory, or NULL */
    uint8_t *bounce;      /* bounce memory of all requests, or NULL */
    uint32_t bounce_count;
    uint32_t free_operation;
    uint32_t free_request; /* list of free requests without bounce memory */
    uint32_t free_bounced; /* list of free requests with bounce memory */
    uint32_t writes_in_flight;
    struct list waiting;  /* operations with requests still to issue */
    struct list finished; /* operations whose completion is not returned yet */
    uint32_t finished_count;
    uint64_t down_since_ns; /* when the connection ended; 0 while connected */
    uint64_t retry_at_ns;   /* time of the next attempt to connect */
    uint64_t backoff_ns;    /* pause before it */
    uint64_t checked_ns;    /* when time limits were last checked */
    uint32_t poll_count;
    struct request *requests;      /* [request_count] */
    struct operation operations[]; /* [depth] */
};

/* All of these are called with the queue pair's lock held. */

/* Puts a caller's operation into a free entry, as a waiting one. */
void operation_add(struct queue *queue, const dlfs_operation *given, uint64_t now);
/*
 * Issues waiting operations in order; returns false if the connection is gone. A write that may not
 * be sent yet also delays the operations after it.
 */
bool operations_issue(struct queue *queue);
/* Ends all waiting operations with code. */
void operations_fail_waiting(struct queue *queue, int code);
/* Ends waiting operations whose time limit has passed. */
void operations_expire_waiting(struct queue *queue, uint64_t now);
/* Sets the code with which the writes in flight end when their connection does. */
void operations_fail_writes(struct queue *queue, int code);
/*
 * Marks operations without an answer in time as timed out, and all writes in flight with them,
 * since the target may still execute those. Returns false if there are none. The caller then
 * disconnects.
 */
bool operations_time_out(struct queue *queue, uint64_t now);
/* Moves finished operations to the caller's completions; returns their number. */
uint32_t operations_take_finished(struct queue *queue, dlfs_completion *completions,
                                  uint32_t count);
/* Initializes the lists of a new queue pair. */
void operations_init(struct queue *queue);

#endif
