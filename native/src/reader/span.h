/*
 * Spans, their requests, and the fetch that reads them: the structures that one thread's reads use,
 * and the life of a span (reader/span.c). A fetch belongs to one thread at a time and needs no
 * lock.
 */
#ifndef DLFS_SPAN_H
#define DLFS_SPAN_H

#include <stdatomic.h>
#include <stdbool.h>

#include "device/device.h"
#include "reader/plan.h"

#define MEMBER_NONE UINT32_MAX
#define SPAN_NONE UINT32_MAX
#define REQUEST_NONE UINT32_MAX

struct private_memory;

enum span_state { SPAN_UNUSED, SPAN_WAITING, SPAN_IN_FLIGHT, SPAN_DONE };

/* A block-aligned byte range of the data space, in one chunk or over whole chunks, and the memory
 * that it is read into. */
struct span {
    uint64_t address;
    uint64_t length;
    uint8_t *memory;
    uint64_t deadline_ns;     /* 0 until the first request is queued */
    uint64_t begun_ns;        /* when its first request was made, in whatever attempt */
    uint64_t submitted_bytes; /* of which requests were made */
    uint64_t queued_from;     /* bytes that had arrived from queued_member when it was begun */
    uint64_t queued_until;    /* those that arrive from it until the span's own turn is over */
    uint32_t queued_member;   /* the member of its first request, or MEMBER_NONE */
    uint64_t asked_members;   /* members that requests were sent to, as bits */
    uint64_t suspect_members; /* members to avoid one after the other, as bits, since the bytes that
                                 came were corrupt */
    uint64_t silent_members;  /* members whose devices gave up its last request, as bits */
    uint64_t bad_address;     /* of the first request that failed */
    uint32_t in_flight;       /* requests */
    uint32_t attempts;        /* retries that were used up */
    uint32_t avoided_member;  /* the member not to ask if another has the bytes, or MEMBER_NONE */
    int code;                 /* of the first request that failed */
    uint8_t state;            /* enum span_state */
    bool begun;               /* a request of it was made, at least once */
    bool redirected;          /* ended early so that another copy can be read */
    bool was_corrupt;         /* a checksum failed, at least once */
    bool abandoned;           /* timed out; its memory stays referenced until all requests ended */
    uint32_t slot;            /* the arena's slot that `memory` lies in, or SLOT_NONE */
    struct private_memory *private_memory; /* what `memory` lies in else, or NULL */
    uint32_t next;                         /* in the list of unused, waiting or done spans */
    uint32_t tag;                          /* the caller's own, as are the members below */
    uint32_t single; /* number of its sample that is read by itself, from 1; 0: all at once */
    uint8_t kind;
    struct miss sample; /* where its sample `tag` lies: a look-up then misses the caches again */
};

/* A queue of spans, by their numbers. */
struct span_list {
    uint32_t first; /* SPAN_NONE if empty */
    uint32_t last;
};

/* One read operation of a device: the part of a span in one chunk, from one copy of the chunk. */
struct request {
    uint64_t address;
    uint32_t length;
    uint32_t span;     /* SPAN_NONE: a probe that finds out if a lost member is back */
    uint32_t member;   /* that it was sent to; MEMBER_NONE: unused, or to be sent again */
    uint32_t copy;     /* that it reads */
    uint32_t tried;    /* copies that failed, as bits */
    uint64_t begun_ns; /* when it was queued */
    uint32_t next;     /* in the list of unused requests or of those to send again */
};

/* One thread's access to a member. */
struct fetch_member {
    dlfs_queue *queue;               /* NULL while none is needed */
    struct dlfs_queue_waiter waiter; /* in line for a queue pair */
    uint64_t taken_ns;               /* when the queue pair was taken */
    uint64_t answered_ns;            /* last answer, 0: none */
    uint64_t bytes_in_flight;        /* of its requests, submitted or not */
    uint64_t arrived_bytes;          /* since the fetch was created */
    uint32_t operation_count;        /* of its operations that are not yet submitted */
    dlfs_member_stats stats;         /* not yet added to the reader's */
};

/* One thread's access to the members. */
struct fetch {
    dlfs_reader *reader;
    struct fetch_member *members; /* [member_count] */
    uint64_t yielding;        /* members that get no new requests, since other threads wait for the
                                 queue pair; as bits */
    struct request *requests; /* [member_count * depth] */
    uint32_t unused_requests; /* list */
    uint32_t resend_requests; /* list of requests to send to another member */
    struct span *spans;       /* [span_capacity] */
    uint32_t span_capacity;
    uint32_t unused_spans; /* list */
    uint32_t unused_span_count;
    struct span_list waiting;
    struct span_list done;
    uint32_t requests_in_flight;
    uint32_t abandoned_requests;  /* of them, those of abandoned spans, and probes */
    uint64_t deadline_ns;         /* spans under way at this time end with DLFS_E_TIMEOUT */
    uint64_t slow_bytes;          /* which may arrive slowly: they move the deadline */
    uint64_t arrived_bytes;       /* since the fetch was created */
    const _Atomic bool *stop;     /* they also end when this is set; or NULL */
    const _Atomic bool *closing;  /* no device is connected once this is set; or NULL */
    uint64_t checked_ns;          /* time of the last check of deadlines */
    uint64_t connect_ns;          /* time that connecting devices took since then */
    uint32_t redirected;          /* spans that were redirected since the read began */
    uint32_t redirect_rounds;     /* recent checks that redirected spans */
    uint64_t redirected_ns;       /* time of the last of them */
    uint64_t probing;             /* members with a probe in flight, as bits */
    uint8_t *probe_memory;        /* [member_count * block_bytes] */
    dlfs_operation *operations;   /* [member_count * depth] not yet submitted */
    dlfs_completion *completions; /* [group] */
    uint32_t group;               /* completions taken at a time */
    uint64_t now_ns;              /* time of the last reading of the clock */
    dlfs_reader_stats stats;      /* not yet added to the reader's */
    struct miss *misses;          /* plan of the read under way, [plan_capacity] each */
    struct miss *sort_scratch;
    struct plan_span *plan;
    uint64_t plan_capacity;
    struct fetch *next; /* in the reader's list of idle or draining fetches */
};

/* Returns true if the reads under way are to end. */
static inline bool fetch_is_stopped(const struct fetch *fetch)
{
    return fetch->stop != NULL && atomic_load_explicit(fetch->stop, memory_order_relaxed);
}
/* Returns the flag that ends the connecting of a device when it is set, or NULL. */
static inline const _Atomic bool *fetch_connect_stop(const struct fetch *fetch)
{
    return fetch->stop != NULL ? fetch->stop : fetch->closing;
}

/* Returns true if devices may be connected. */
static inline bool fetch_may_connect(const struct fetch *fetch)
{
    const _Atomic bool *stop = fetch_connect_stop(fetch);
    return stop == NULL || !atomic_load_explicit(stop, memory_order_relaxed);
}
/* Returns the time that a read may take of which nothing has arrived, in nanoseconds. */
uint64_t reader_timeout_ns(const dlfs_reader *reader);
/* Moves the deadline of a fetch for bytes that have arrived. */
void fetch_credit(struct fetch *fetch, uint64_t bytes);
/* Makes room for this many spans, in addition to abandoned ones. No span may be under way. */
int fetch_reserve_spans(struct fetch *fetch, uint32_t unused);
/* Takes an unused span for the caller to fill in, or NULL if all are under way. */
struct span *span_take(struct fetch *fetch);
/* Notes that the first request of a span was made. */
void span_begun(const struct fetch *fetch, struct span *span);
/* Returns true if a span has outlived its deadline. One that has no request yet may wait until
 * queued_until_ns. */
bool span_is_late(const struct fetch *fetch, const struct span *span, uint64_t queued_until_ns);
/* Queues a span: its requests are made by the next steps. */
void span_start(struct fetch *fetch, struct span *span);
/*
 * Starts a span again because its bytes are corrupt. First avoids each of the members that it was
 * read from in turn, then reads as before while retries are left. Returns false if none is left.
 */
bool span_retry(struct fetch *fetch, struct span *span);
/* Returns a span that has ended to the unused ones. */
void span_recycle(struct fetch *fetch, struct span *span);
/* Counts the end of a request; the span goes on, or ends with its last request. */
void span_request_ended(struct fetch *fetch, struct span *span, const struct request *request,
                        int code);
/* Ends a span whose last request has ended: starts it again after an error, or marks it done. */
void span_end(struct fetch *fetch, struct span *span);
/* Ends a span with DLFS_E_TIMEOUT. Keeps a reference to memory that a device may still write to. */
void span_abandon(struct fetch *fetch, struct span *span);
/* Gives up the reference that an abandoned span holds to its memory. */
void span_release_memory(struct fetch *fetch, const struct span *span);
/* Ends a span with DLFS_E_TIMEOUT so that the caller reads another copy. */
void span_redirect(struct fetch *fetch, struct span *span);
/* Returns when a span that is queued now is given up. */
uint64_t span_deadline_ns(const struct fetch *fetch);
/* Appends a span to a list. */
void span_push(struct fetch *fetch, struct span_list *list, uint32_t number);
/* Takes the first span off a list, or NULL. */
struct span *span_pop(struct fetch *fetch, struct span_list *list);
/* Returns the time after which a span is read from another copy, in nanoseconds. */
uint64_t span_timeout_ns(const dlfs_reader *reader);

/* Returns true if a span has neither ended nor been given up. */
static inline bool span_is_under_way(const struct span *span)
{
    return span->state == SPAN_WAITING || span->state == SPAN_IN_FLIGHT;
}

static inline uint32_t span_number(const struct fetch *fetch, const struct span *span)
{
    return (uint32_t)(span - fetch->spans);
}

/* Returns the next span that ended, with its code set, or NULL. The caller recycles it, or starts
 * it again. */
static inline struct span *fetch_take_done(struct fetch *fetch)
{
    return span_pop(fetch, &fetch->done);
}

/* Returns the span that fetch_take_done will return next, or NULL. */
static inline const struct span *fetch_peek_done(const struct fetch *fetch)
{
    return fetch->done.first == SPAN_NONE ? NULL : &fetch->spans[fetch->done.first];
}

/* Returns true if no span is under way or done. */
static inline bool fetch_is_idle(const struct fetch *fetch)
{
    return fetch->requests_in_flight == fetch->abandoned_requests &&
           fetch->waiting.first == SPAN_NONE && fetch->done.first == SPAN_NONE;
}

#endif
