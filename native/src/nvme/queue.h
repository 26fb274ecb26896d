/*
 * An I/O queue pair over its own connection.
 *
 * An operation is cut into parts of at most what one command may move; each part is a command,
 * which has one of the slots, and the slot's number in its CID. Operations wait in order for free
 * slots and for room to send. When the connection ends, operations that were under way start again
 * from their beginning, or end, as dlfs/nvme.h says.
 *
 * nvme/queue.c has the life of operations; nvme/recovery.c connections that come and go, and time
 * that runs out; nvme/send.c what goes out; nvme/answer.c what comes in. One thread at a time; no
 * memory is allocated after creation.
 */
#ifndef DLFS_NVME_QUEUE_H
#define DLFS_NVME_QUEUE_H

#include "nvme/association.h"

#define NVME_NANOSECONDS_PER_MS UINT64_C(1000000)
#define NVME_NONE UINT32_MAX
#define NVME_OUT_BYTES 16384u
#define NVME_OUT_VECTORS 128u
#define NVME_OP_GENERIC 2u /* besides DLFS_OP_*: queue->generic */

struct nvme_list {
    uint32_t first;
    uint32_t last;
};

struct nvme_operation {
    uint8_t *buffer;
    uint64_t offset_bytes;
    uint64_t tag;
    uint64_t born_ns;  /* of the queue pair's own clock */
    uint64_t after_ns; /* of the monotonic clock: not issued before; 0: at once */
    uint32_t length_bytes;
    uint32_t issued_bytes; /* that parts were made of */
    uint32_t parts;        /* under way */
    uint32_t next;         /* in a list */
    int32_t code;          /* the first failure that is final */
    int32_t passing_code;  /* the first one that is worth another try */
    uint8_t kind;
    uint8_t attempts; /* after passing failures */
    uint8_t faults;   /* protocol and digest errors met */
    bool waiting;     /* it is in the list of those with parts still to issue */
};

/* A command under way, or free. */
struct nvme_slot {
    uint8_t *buffer;
    uint64_t sent_ns;
    uint32_t length_bytes;
    uint32_t moved_bytes; /* reads: received; writes: sent, or given out to be sent */
    uint32_t operation;
    uint32_t next;        /* in a list */
    uint32_t ready_bytes; /* of an R2T: still to be sent */
    uint16_t ready_tag;
    uint16_t cid;
    uint16_t pending; /* vectors to be sent, and being in the list of ready ones */
    uint16_t status;  /* once answered */
    uint8_t kind;
    bool busy;
    bool to_host;  /* the direction of its data */
    bool garbled;  /* some of its data came with a wrong digest */
    uint8_t tries; /* after that */
    bool ended;    /* LAST has come */
    bool answered; /* with a failure, while something was still to be sent */
};

/* What waits to be sent: heads and digests in bytes, and data where it is. */
struct nvme_out {
    uint32_t used_bytes;
    uint32_t first; /* of the vectors: the first that is not sent wholly */
    uint32_t count;
    struct iovec vectors[NVME_OUT_VECTORS];
    uint32_t owners[NVME_OUT_VECTORS]; /* the slot whose data a vector is, or NVME_NONE */
    uint8_t bytes[NVME_OUT_BYTES];
};

/* The single command of an internal queue pair. */
struct nvme_generic {
    uint8_t entry[NVME_ENTRY_BYTES];
    uint32_t direction;
    bool harmless; /* may be run again when nobody knows whether it was run */
    struct nvme_answer answer;
    uint64_t generation; /* that answered */
};

struct nvme_queue {
    dlfs_queue base;
    struct nvme_association *association;
    struct nvme_link *link;
    struct nvme_connection *connection; /* NULL: none at present */
    int lost_code;                      /* < 0: there will be none */
    int epoll;                          /* what dlfs_queue_descriptor gave out; -1: nobody asked */
    bool blocked;                       /* the socket takes no more at present */
    bool watched_out;                   /* the epoll set waits for that to change */
    uint32_t block_shift;
    uint32_t nsid;
    uint32_t slot_count; /* of this connection */
    uint32_t slots_max;
    uint32_t free_slot;
    uint32_t busy_count;
    uint32_t small_count; /* busy ones that do not read much data */
    uint32_t write_count; /* busy ones that write */
    uint32_t free_operation;
    struct nvme_list waiting; /* operations with parts to issue */
    struct nvme_list held;    /* operations to be tried again at held_until_ns */
    struct nvme_list ready;   /* slots with an R2T to answer, or a read to be sent again */
    uint64_t held_until_ns;
    uint64_t seen_ns;   /* when the queue pair was last looked at */
    uint64_t paused_ns; /* that nobody looked; its own clock is behind by this */
    uint64_t due_ns;    /* of its own clock: nothing can expire before then */
    uint64_t timeout_ns;
    uint64_t budget_ns;  /* of an operation as a whole */
    uint64_t quiesce_ns; /* quiesce_ms of the connection in use, or of the last one */
    uint32_t done_first; /* of the ring of completions */
    uint32_t done_count;
    struct nvme_generic generic;
    struct nvme_operation *operations; /* [depth] */
    struct nvme_slot *slots;           /* [slots_max] */
    dlfs_completion *done;             /* [depth] */
    struct nvme_out out;
};

/* Makes a queue pair without telling base about it; block_bytes may be 0. */
int nvme_queue_make(struct nvme_association *association, uint32_t depth, uint32_t block_bytes,
                    struct nvme_queue **out);
void nvme_queue_free(struct nvme_queue *queue);
int nvme_queue_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count);
int nvme_queue_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count, int timeout_ms);
int nvme_queue_descriptor(dlfs_queue *base);
/*
 * Runs one command on a queue pair of depth 1 with nothing in flight; queue->generic is set up but
 * for its answer. 0 when the controller answered.
 */
int nvme_queue_run(struct nvme_queue *queue, void *data, uint32_t data_bytes);

static inline uint32_t nvme_slot_is_small(const struct nvme_slot *slot)
{
    return !slot->to_host || slot->length_bytes < NVME_DIRECT_BYTES;
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

/* Of nvme/queue.c, for the others: */

/* Looks at the clock: the queue pair's own time. */
uint64_t nvme_queue_tick(struct nvme_queue *queue);
/* Puts an operation at the end of those that wait to be issued. */
void nvme_wait_again(struct nvme_queue *queue, uint32_t number);
/* Hands an operation's result to poll, and frees it. */
void nvme_operation_done(struct nvme_queue *queue, uint32_t number, int64_t result);

/* A part has ended: status of the controller's answer. Frees its slot. */
void nvme_part_end(struct nvme_queue *queue, uint32_t number, uint16_t status);
/* An operation that was taken out of the waiting list has no parts under way. */
void nvme_operation_end(struct nvme_queue *queue, uint32_t number);

/* Of nvme/recovery.c: */

/* epoll_ctl of the connection's socket, where somebody asked for a descriptor. */
void nvme_watch(struct nvme_queue *queue, int action, uint32_t events);
/* Has the epoll set wait for room in the socket exactly while there is none. */
void nvme_watch_room(struct nvme_queue *queue);
/* Gives the connection up because of code, and tells the association. */
void nvme_queue_fail(struct nvme_queue *queue, int code, const char *reason);
/* Ends everything that waits. There is no connection. */
void nvme_end_all(struct nvme_queue *queue, int code);
/* Does what the association has to tell. */
void nvme_take_news(struct nvme_queue *queue);
/* nvme_pump, and what follows from its failing. */
void nvme_queue_pump(struct nvme_queue *queue);
/* Something may expire at at_ns. */
void nvme_expect_by(struct nvme_queue *queue, uint64_t at_ns);
/* Tries again what was held for long enough; ends what has run out of time. */
void nvme_check_time(struct nvme_queue *queue);

/* Of nvme/send.c: */

/* Puts a slot at the end of those with something to send beside a first command. */
void nvme_ready_append(struct nvme_queue *queue, uint32_t number);

void nvme_out_clear(struct nvme_queue *queue);
/* Ends what waits first in line with parts to issue, if an earlier part of it has failed. */
void nvme_pop_failed(struct nvme_queue *queue);
/* When a waiting operation that may not be issued yet is to be looked at again, by the queue pair's
 * own clock; 0: it may be issued now. */
uint64_t nvme_held_until(const struct nvme_queue *queue, struct nvme_operation *operation,
                         uint64_t now_ns);
/* Issues what waits and sends what the socket takes: 0, or why the connection is of no use. */
int nvme_pump(struct nvme_queue *queue, const char **reason);

/* Of nvme/answer.c: */

extern const struct nvme_sink nvme_queue_sink;

#endif
