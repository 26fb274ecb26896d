/*
 * The private header of channels, which let other processes use a reader of the node service.
 *
 * The client puts requests (struct submission) into the submission ring; the service's thread takes
 * them and puts answers (struct completion) into the completion ring. Both rings, and the areas for
 * what a request or an answer carries, lie in memory that the two processes share. The files:
 *
 * - channel/memory.c: lays out and maps a channel's memory;
 * - channel/ring.c: the rings, and waiting for the other side;
 * - channel/server.c: the service's end and its thread;
 * - channel/operations.c: the operations that clients request;
 * - channel/area.c: memory for large answers, at the service's end;
 * - channel/delivery.c: batches that the client has not released, at the service's end;
 * - channel/client.c: the client's end;
 * - channel/resident.c: samples that the client reads without a request;
 * - channel/batch_pool.c: the client's batches, references and arena.
 *
 * server.c uses operations.c, which uses area.c and delivery.c. client.c uses resident.c and
 * batch_pool.c; resident.c uses batch_pool.c. <dlfs/channel.h> describes trust, fairness and
 * memory.
 */
#ifndef DLFS_CHANNEL_INSIDE_H
#define DLFS_CHANNEL_INSIDE_H

#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dlfs/channel.h"
#include "reader/reader.h"
#include "reader/residents.h"
#include "sequence/sequence.h"
#include "stream/stream.h"

#define CHANNEL_MAGIC UINT64_C(0x314c4e4843464c44) /* "DLFCHNL1" in memory */
#define CHANNEL_LAYOUT 4u
#define COMPLETION_COUNT 16u
#define SUBMISSIONS_SPARE 16u /* entries in addition to one for the release of every batch */
#define CACHE_LINE_BYTES 64u
#define COPIED_BYTES_MAX (UINT64_C(1) << 46)
#define COPIED_UNIT 4096u
#define GET_BYTES_MAX (UINT64_C(1) << 20)  /* largest sample that OPERATION_GET answers */
#define PART_BYTES_MAX (UINT64_C(8) << 20) /* largest part that OPERATION_PART answers */

/* ---- layout of a channel's memory ------------------------------------------------------------ */

enum operation {
    OPERATION_READ = 1, /* read a batch; value: count; request area: indices */
    OPERATION_GET,      /* read a sample; value: index; limit: bytes; result area: its bytes */
    OPERATION_CHOOSE,   /* add indices to the chosen order; value: count; request area: indices */
    OPERATION_OPEN,     /* open the stream; request area: a struct stream_request */
    OPERATION_NEXT,     /* next batch of the stream; value: count; limit: milliseconds */
    OPERATION_CLOSE,    /* close the stream */
    OPERATION_RELEASE,  /* release a batch; value: its number; it has no answer */
    OPERATION_STATS,    /* result area: a dlfs_reader_stats */
    OPERATION_MEMBER,   /* value: member; result: the code why the member was lost */
    OPERATION_MEMBER_STATS, /* value: member; result area: a dlfs_member_stats */
    /*
     * Read a range of a sample. Request area: a dlfs_part of at most PART_BYTES_MAX and of the
     * result area's size. Result area: its bytes; or, if failure_count is 1, a dlfs_failure.
     */
    OPERATION_PART,
};

struct submission {
    uint64_t tag; /* chosen by the client; the answer has the same */
    uint32_t operation;
    uint32_t flags;
    uint64_t value;
    uint64_t limit;
};

/* The memory that the samples of an answer's batch lie in. */
enum batch_memory { BATCH_NONE, BATCH_IN_ARENA, BATCH_COPIED };

struct completion {
    uint64_t tag;
    int64_t result;       /* a negative code, or the operation's result */
    uint64_t number;      /* number of the batch, for OPERATION_RELEASE */
    uint64_t base_offset; /* of a copied batch: in the memory for copied batches */
    uint64_t base_bytes;
    uint64_t failure_count;
    uint64_t lost_members;
    uint32_t memory; /* enum batch_memory */
    uint32_t reserved;
};

struct stream_request {
    struct sequence_parameters sequence;
    dlfs_stream_config config; /* its sequence is ignored */
};

/* The positions of both sides in a ring, each in a separate cache line. */
struct ring_positions {
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t tail;   /* entries put so far, by the producer */
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t head;   /* entries taken so far, by the consumer */
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t asleep; /* 1: the consumer sleeps */
    _Atomic uint32_t processor; /* processor on which the consumer last waited */
};

/* Written by the client: counts of resident samples that it read, and the last answer it took. */
struct resident_counts {
    _Alignas(CACHE_LINE_BYTES) _Atomic uint64_t samples;
    _Atomic uint64_t sample_bytes;
    _Atomic uint64_t batches;
    _Atomic uint64_t taken; /* tag of the last answer whose result area the client has read */
};

struct channel_header {
    uint64_t magic;
    uint32_t layout;
    uint32_t version;       /* DLFS_VERSION */
    uint32_t failure_bytes; /* sizeof(dlfs_failure); differs if the two builds differ */
    uint32_t stats_bytes;
    uint32_t member_stats_bytes;
    uint32_t samples_max;
    uint32_t submission_count;
    uint64_t copied_bytes;
    uint64_t arena_bytes;
    uint64_t resident_offset; /* offset in the arena of the index of resident chunks */
    uint64_t resident_count;  /* entries of the index; 0 without an index */
    uint32_t chunk_shift;
    struct ring_positions submissions;
    struct ring_positions completions;
    struct resident_counts resident;
};

_Static_assert(sizeof(struct submission) == 32, "part of the layout");
_Static_assert(sizeof(struct completion) == CACHE_LINE_BYTES, "part of the layout");
_Static_assert(sizeof(struct channel_header) <= 4096, "the header has one page");
_Static_assert(sizeof(dlfs_member_stats) <= 4096 && sizeof(dlfs_reader_stats) <= 4096,
               "the result area is four pages at least");
_Static_assert(sizeof(struct stream_request) <= 4096, "the request area is a page at least");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "atomics work between processes");

/* A channel's memory as mapped by one process. */
struct channel_memory {
    uint8_t *base;
    size_t bytes;
    struct channel_header *header;
    uint8_t *submissions;
    uint8_t *completions;
    uint8_t *request; /* request area: `samples_max` indices, at least a page */
    uint8_t *result;  /* result area, of result_bytes: holds the four arrays below, or bytes */
    size_t result_bytes;
    int64_t *offsets;
    int64_t *lengths;
    uint64_t *indices;
    dlfs_failure *failures;
    uint8_t *copied;
    uint64_t copied_bytes;
    uint32_t samples_max;
    uint32_t submission_count;
};

/* channel/memory.c */
/* Creates and maps the memory of a new channel. */
int channel_memory_create(struct channel_memory *memory, const dlfs_channel_config *config,
                          const struct residents *residents, int *descriptor);
/*
 * Maps the memory of a service's channel. DLFS_E_FORMAT: the memory is not a channel of this
 * version for an arena of arena_bytes.
 */
int channel_memory_open(struct channel_memory *memory, int descriptor, uint64_t arena_bytes);
void channel_memory_unmap(struct channel_memory *memory);

/* ---- rings ----------------------------------------------------------------------------------- */

/* One side of a ring, producer or consumer. Used by one thread at a time. */
struct ring {
    struct ring_positions *positions;
    uint8_t *entries;
    uint32_t entry_bytes;
    uint32_t count;    /* a power of two */
    uint32_t position; /* of this side */
};

/*
 * State of a side that waits for the other side. A wait first spins, then sleeps. The score counts
 * waits that ended while spinning: it rises with each of them and falls with each that did not. At
 * score 0 a wait sleeps at once. A wait also sleeps at once if the other side last ran on the same
 * processor, since spinning would keep the other side from running.
 */
struct waiter {
    int socket;    /* to the other side */
    int stop;      /* descriptor that becomes readable when waiting must end; or -1 */
    bool may_spin; /* the process may run on more than one processor */
    const _Atomic uint32_t *other_processor;
    uint32_t score;
    _Atomic uint64_t sleeps;
    _Atomic uint64_t wakes; /* system calls that woke the other side */
};

/* WAIT_TIME: the timeout expired. WAIT_GONE: the other side hung up. */
enum wait_end { WAIT_READY, WAIT_TIME, WAIT_STOPPED, WAIT_GONE };

struct ring ring_over(struct ring_positions *positions, uint8_t *entries, uint32_t entry_bytes,
                      uint32_t count);
/* Puts an entry. Returns false if the ring is full or the other side's position is invalid. */
bool ring_put(struct ring *ring, const void *entry);
/* Takes an entry. Returns 1, 0 if there is none, -1 if the other side's position is invalid. */
int ring_take(struct ring *ring, void *entry);

/* Initializes a waiter. `other` is the ring that the other side consumes. */
void waiter_init(struct waiter *waiter, const struct ring *other, int socket, int stop);
/* Wakes the consumer of a ring if it sleeps. Call it after the entries were put. */
void ring_wake(struct ring *ring, struct waiter *waiter);
/* Waits as the consumer for an entry, up to timeout_ms; -1: without limit. */
enum wait_end ring_wait(struct ring *ring, struct waiter *waiter, int timeout_ms);

/* ---- the service's end ----------------------------------------------------------------------- */

/* An entry for a batch that was delivered to the client and not released yet. */
struct delivered_batch {
    struct batch *batch; /* a batch pinned in the arena; NULL for a copied one */
    uint64_t pinned_bytes;
    uint64_t copied_offset;
    uint64_t copied_bytes;
    uint64_t charged_bytes; /* charged for the arrays of a pinned batch */
    uint32_t generation; /* upper half of the batch's number: differs for each use of the entry */
    uint32_t next;       /* next entry of the free list */
    bool out;            /* the client has the batch */
};

/* A range of the memory for copied batches that is in use. */
struct copied_run {
    uint64_t offset;
    uint64_t bytes;
};

struct dlfs_channel {
    dlfs_reader *reader;
    struct reader_geometry geometry; /* of the reader */
    dlfs_share *share;
    dlfs_share *memory_share;
    struct channel_memory memory;
    struct ring submissions;
    struct ring completions;
    struct waiter waiter;
    dlfs_channel_stats counters; /* accessed atomically; without those of the waiter */
    pthread_t thread;
    _Atomic bool stop;     /* the thread serves no longer */
    _Atomic bool released; /* it does not wait for the client's end either */
    sem_t served;          /* posted by the thread when it serves no longer */
    bool revoked;
    bool uses_residents; /* it has entered the reader's, and not left */
    /* Of the client's resident_counts: added to the reader's so far. */
    _Atomic uint64_t resident_samples;
    _Atomic uint64_t resident_bytes;
    _Atomic uint64_t resident_batches;
    /* Only the channel's thread uses the members below. */
    dlfs_stream *stream;
    dlfs_sequence *sequence;
    uint64_t *chosen; /* [chosen_count] indices of a chosen order, sent by the client */
    uint64_t chosen_count;
    uint64_t stream_bytes;    /* memory charged for the stream and its sequence */
    struct batch *pending;    /* batch taken from the stream, without memory to deliver it yet */
    uint64_t pending_bytes;   /* memory charged for the pending batch */
    uint64_t pending_count;   /* samples that the client requested for the pending batch */
    uint64_t *indices;        /* [area_samples] indices of the current request */
    uint64_t area_samples;    /* longest batch whose arrays the result area has pages for */
    uint64_t area_bytes;      /* longest answer of plain bytes that it has pages for */
    uint64_t answered_tag;    /* of the last answer */
    uint64_t requested_ns;    /* time at which the last request was taken */
    uint64_t copied_retained; /* leading bytes of the memory for copied batches that have pages */
    struct delivered_batch *delivered; /* [batches_max] */
    uint32_t batches_max;
    uint32_t delivered_used; /* entries used at least once */
    uint32_t delivered_free; /* head of the free list */
    uint64_t *pins;          /* [arena slots] samples that this channel's batches pin in each, if
                                they are charged by whole slots */
    struct copied_run *runs; /* [batches_max] runs in use, in order of their offsets */
    uint32_t run_count;
};

static inline void counter_add(uint64_t *counter, uint64_t value)
{
    (void)__atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
}

/* channel/operations.c; used by the channel's thread. */
#define PROTOCOL_BROKEN INT64_MIN /* the client does not follow the protocol */
/* Performs a request other than a release. Returns a code, PROTOCOL_BROKEN, or the result. */
int64_t operation_perform(dlfs_channel *channel, const struct submission *request,
                          struct completion *answer);
/* Closes the stream and drops the chosen order and the pending batch, if any. */
void operation_close_stream(dlfs_channel *channel);
/* Adds the client's counts of resident samples to the channel's and the reader's. Any thread. */
void operation_count_resident_reads(dlfs_channel *channel);

/* channel/area.c; used by the channel's thread. */
/*
 * Reserves memory for an answer with the arrays of `samples` samples, or with `bytes` plain bytes,
 * and for as many indices. Charges it to the client. Returns false if that exceeds the client's
 * bound.
 */
bool area_reserve(dlfs_channel *channel, uint64_t samples, uint64_t bytes);
/* Frees the pages of large answers. The client must have read the last answer. */
void area_trim(dlfs_channel *channel);

/* channel/delivery.c; used by the channel's thread. */
int delivery_create(dlfs_channel *channel, uint32_t batches_max);
/* Returns true if one more batch may be delivered. */
bool delivery_possible(const dlfs_channel *channel);
/*
 * Delivers a batch to the client, pinned in the arena or copied. Writes the result area, with the
 * indices on request, and the completion. The batch's charge is discharged when it is released.
 * DLFS_E_LIMIT: there is no memory for it; batch and charge stay the caller's.
 */
int deliver_batch(dlfs_channel *channel, struct batch *batch, uint64_t charged_bytes, bool indices,
                  struct completion *completion);
/* Releases a batch by its number. Returns false if the client has no such batch. */
bool delivery_release(dlfs_channel *channel, uint64_t number);
void delivery_release_all(dlfs_channel *channel);
/* Frees the pages that are retained for copied batches, unless one is in use. */
void delivery_trim(dlfs_channel *channel);
void delivery_free(dlfs_channel *channel);
/* Charges memory of the service to the client. Returns false if it exceeds the client's bound. */
bool charge(dlfs_channel *channel, uint64_t bytes);
void discharge(dlfs_channel *channel, uint64_t bytes);

/* ---- the client's end ------------------------------------------------------------------------ */

struct dlfs_arena_view {
    uint8_t *base;
    size_t bytes;
    _Atomic uint32_t references;
    _Atomic uint64_t lost_members; /* as of the last answer to any client of the arena */
};

/* The client's view of resident chunks: chunks that stay in the arena as long as the channel. */
struct resident_index {
    const _Atomic uint32_t *slots; /* [chunks] the chunk's slot + 1; 0 if it is not resident */
    const dlfs_location *locations;
    uint64_t sample_count;
    uint64_t data_bytes;
    uint64_t arena_bytes;
    uint32_t chunk_shift;
};

struct dlfs_client {
    dlfs_arena_view *arena;
    struct channel_memory memory;
    struct waiter waiter;
    struct ring completions;
    uint32_t timeout_ms;
    pthread_mutex_t call_lock;      /* held by a caller from its request to the answer */
    uint64_t tag;                   /* of the current request */
    struct resident_index resident; /* without locations: no sample is resident */
    const dlfs_location *locations; /* [location_count] for the lengths of samples; or NULL */
    uint64_t location_count;
    _Atomic uint64_t checked_ns; /* time at which the service was last known to be alive */
    _Atomic bool lost;
    _Atomic uint64_t requests;
    pthread_mutex_t state_lock; /* protects the members below */
    struct ring submissions;
    struct batch *batches; /* free list */
    uint64_t references;   /* the owner's, and one for each batch in use */
};

/* channel/batch_pool.c */
static inline bool client_is_lost(const dlfs_client *client)
{
    return atomic_load_explicit(&client->lost, memory_order_relaxed);
}
/*
 * Marks the channel as lost: only its batches may still be used and released. Their memory stays
 * unchanged until the client's end of the sockets is closed. Returns DLFS_E_SERVICE.
 */
static inline int client_lose(dlfs_client *client)
{
    atomic_store_explicit(&client->lost, true, memory_order_relaxed);
    return DLFS_E_SERVICE;
}
/* Drops a reference to the client; the last one frees it. */
void client_release(dlfs_client *client);
/*
 * Takes a batch with room for `count` samples from the pool. It references the client until
 * batch_pool_put. NULL: no memory.
 */
struct batch *batch_pool_take(dlfs_client *client, uint64_t count);
/* Returns a batch to the pool, after putting `entry` into the submission ring unless it is NULL. */
void batch_pool_put(struct batch *batch, const struct submission *entry);

/* channel/resident.c */
/* Makes a batch of resident samples. Returns false if the service must be asked for one of them. */
bool resident_read(dlfs_client *client, const uint64_t *indices, uint64_t count, dlfs_batch **out);
/* Copies a resident sample. Returns its length, -ERANGE, or -EAGAIN: it is not resident. */
int64_t resident_get(dlfs_client *client, uint64_t index, void *buffer, uint64_t buffer_bytes);

#endif
