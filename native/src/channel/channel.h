/*
 * The inside of channels, in parts that meet here:
 *
 * - channel/memory.c: how a channel's memory is laid out, and how the client maps it;
 * - channel/ring.c: the rings in it, and how a side waits for the other;
 * - channel/lend.c: what the client has of the service: batches, pinned and copied memory;
 * - channel/server.c: the service's end and its thread;
 * - channel/client.c: the client's end;
 * - channel/kept.c: the samples that the client finds without asking.
 */
#ifndef DLFS_CHANNEL_INSIDE_H
#define DLFS_CHANNEL_INSIDE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dlfs/channel.h"
#include "reader/reader.h"
#include "sequence/sequence.h"
#include "stream/stream.h"

#define CHANNEL_MAGIC UINT64_C(0x314c4e4843464c44) /* "DLFCHNL1" in memory */
#define CHANNEL_LAYOUT 3u
#define COMPLETION_COUNT 16u
#define SUBMISSIONS_SPARE 16u /* beside one for the release of every batch */
#define CACHE_LINE_BYTES 64u
#define COPIED_BYTES_MAX (UINT64_C(1) << 46)
#define COPIED_UNIT 4096u
#define GET_BYTES_MAX (UINT64_C(1) << 20)  /* of a sample that is copied alone */
#define PART_BYTES_MAX (UINT64_C(8) << 20) /* of a part of one */

/* ---- what lies in a channel's memory --------------------------------------------------------- */

enum operation {
    OPERATION_READ = 1, /* value: count; the indices lie in the request area */
    OPERATION_GET,      /* value: index; limit: bytes; the bytes come in the result area */
    OPERATION_CHOOSE,   /* value: count; the request area holds as many indices more, of a chosen
                           order */
    OPERATION_OPEN,     /* the request area holds a struct stream_request */
    OPERATION_NEXT,     /* value: count; limit: milliseconds */
    OPERATION_CLOSE,
    OPERATION_RELEASE,      /* value: a batch's number; it has no answer */
    OPERATION_STATS,        /* a dlfs_reader_stats comes in the result area */
    OPERATION_MEMBER,       /* value: member; why it was lost */
    OPERATION_MEMBER_STATS, /* value: member; a dlfs_member_stats comes in the result area */
    OPERATION_PART, /* the request area holds a dlfs_part of at most PART_BYTES_MAX, and no longer
                       than the result area, where its bytes come. The answer's number, base_offset
                       and base_bytes: the member, offset_bytes and crc_expected of the
                       dlfs_failure; failure_count: it has a code, which is the result */
};

struct submission {
    uint64_t tag; /* comes back with the answer */
    uint32_t operation;
    uint32_t flags;
    uint64_t value;
    uint64_t limit;
};

enum place_of_batch { BATCH_NONE, BATCH_IN_ARENA, BATCH_COPIED };

struct completion {
    uint64_t tag;
    int64_t result; /* a code, or what the operation gives */
    uint64_t number;
    uint64_t base_offset; /* of a copied batch, in the memory for them */
    uint64_t base_bytes;
    uint64_t failure_count;
    uint64_t lost_members;
    uint32_t place;
    uint32_t reserved;
};

struct stream_request {
    struct sequence_parameters sequence;
    uint64_t first;
    uint64_t stride;
    uint64_t count;
    uint64_t group;
    uint64_t group_stride;
    uint32_t plan;
    uint32_t reserved;
};

/* The two sides' places in a ring, each in a cache line of its own. */
struct ring_places {
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t tail;   /* entries ever put in: the producer's */
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t head;   /* entries ever taken: the consumer's */
    _Alignas(CACHE_LINE_BYTES) _Atomic uint32_t asleep; /* the consumer wants to be woken */
    _Atomic uint32_t processor; /* that the consumer ran on when it last waited */
};

/* What the client read without asking, and which answer it has taken, as it says itself. */
struct kept_counts {
    _Alignas(CACHE_LINE_BYTES) _Atomic uint64_t samples;
    _Atomic uint64_t sample_bytes;
    _Atomic uint64_t batches;
    _Atomic uint64_t taken; /* tag of the last answer whose result area the client has done with */
};

struct channel_header {
    uint64_t magic;
    uint32_t layout;
    uint32_t version;       /* DLFS_VERSION */
    uint32_t failure_bytes; /* sizeof(dlfs_failure), and so on: both sides are of one build */
    uint32_t stats_bytes;
    uint32_t member_stats_bytes;
    uint32_t samples_max;
    uint32_t submission_count;
    uint64_t copied_bytes;
    uint64_t arena_bytes;
    uint64_t kept_offset; /* in the arena: the index of chunks kept for good */
    uint64_t kept_count;  /* its entries; 0: there is none */
    uint32_t chunk_shift;
    struct ring_places submissions;
    struct ring_places completions;
    struct kept_counts kept;
};

_Static_assert(sizeof(struct submission) == 32, "part of the layout");
_Static_assert(sizeof(struct completion) == CACHE_LINE_BYTES, "part of the layout");
_Static_assert(sizeof(struct channel_header) <= 4096, "it has one page");
_Static_assert(sizeof(dlfs_member_stats) <= 4096 && sizeof(dlfs_reader_stats) <= 4096,
               "the result area is four pages at least");
_Static_assert(sizeof(struct stream_request) <= 4096, "the request area is a page at least");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "atomics work between processes");

/* A channel's memory as one process has it mapped. */
struct channel_memory {
    uint8_t *base;
    size_t bytes;
    struct channel_header *header;
    uint8_t *submissions;
    uint8_t *completions;
    uint8_t *request; /* area of `samples_max` indices, a page at least */
    uint8_t *result;  /* area of the four arrays that follow, result_bytes in all */
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
/* Lays out and maps the memory of a new channel. */
int channel_memory_create(struct channel_memory *memory, const dlfs_channel_config *config,
                          uint64_t arena_bytes, int *descriptor);
/* Maps a service's channel; DLFS_E_FORMAT when it is none of this version for that arena. */
int channel_memory_open(struct channel_memory *memory, int descriptor, uint64_t arena_bytes);
void channel_memory_unmap(struct channel_memory *memory);

/* ---- rings ----------------------------------------------------------------------------------- */

/* One side's view of a ring. Producer or consumer, by one thread at a time. */
struct ring {
    struct ring_places *places;
    uint8_t *entries;
    uint32_t entry_bytes;
    uint32_t count; /* a power of two */
    uint32_t own;   /* the side's own place */
};

/*
 * What a side waits with. A wait that would have ended within the spinning time adds to the score;
 * one that would not takes away; with none left it sleeps at once. So it does while the other side
 * runs on the same processor, which it would only keep from running.
 */
struct waiter {
    int socket;    /* to the other side */
    int stop;      /* readable when there is no more waiting; or -1 */
    bool may_spin; /* there is another processor for the other side */
    const _Atomic uint32_t *other_processor;
    uint32_t score;
    _Atomic uint64_t sleeps;
    _Atomic uint64_t wakes; /* system calls that woke the other side */
};

enum wait_end { WAIT_READY, WAIT_TIME, WAIT_STOPPED, WAIT_GONE };

struct ring ring_over(struct ring_places *places, uint8_t *entries, uint32_t entry_bytes,
                      uint32_t count);
/* False when it is full, or when the other side's place makes no sense. */
bool ring_put(struct ring *ring, const void *entry);
/* 1 with an entry, 0 when there is none, -1 when the other side's place makes no sense. */
int ring_take(struct ring *ring, void *entry);

/* `other`: the ring that the other side consumes. */
void waiter_init(struct waiter *waiter, const struct ring *other, int socket, int stop);
/* Wakes the consumer of a ring if it sleeps; the entries are in the ring already. */
void ring_wake(struct ring *ring, struct waiter *waiter);
/* The consumer waits for an entry, up to timeout_ms (-1: for as long as it takes). */
enum wait_end ring_wait(struct ring *ring, struct waiter *waiter, int timeout_ms);

/* ---- the service's end ----------------------------------------------------------------------- */

/* A batch that the client has. */
struct lent {
    struct batch *batch; /* pinned in the arena; or NULL, and it was copied */
    uint64_t pinned_bytes;
    uint64_t copied_offset;
    uint64_t copied_bytes;
    uint64_t charged_bytes; /* for the arrays of a batch that is pinned */
    uint32_t generation;    /* tells numbers of one place apart */
    uint32_t next;          /* free place */
    bool out;
};

struct copied_run {
    uint64_t offset;
    uint64_t bytes;
};

struct channel_counters {
    _Atomic uint64_t samples;
    _Atomic uint64_t sample_bytes;
    _Atomic uint64_t batches;
    _Atomic uint64_t batches_out;
    _Atomic uint64_t pinned_bytes;
    _Atomic uint64_t copied_bytes;
    _Atomic uint64_t copied_batches;
    _Atomic uint64_t refusals;
    _Atomic uint64_t failures;
    _Atomic uint64_t busy_ns;
    _Atomic uint64_t memory_bytes;
    _Atomic int32_t ended;
    _Atomic uint32_t under_way;
};

struct dlfs_channel {
    dlfs_reader *reader;
    dlfs_share *share;
    dlfs_share *memory_share;
    struct channel_memory memory;
    struct ring submissions;
    struct ring completions;
    struct waiter waiter;
    struct channel_counters counters;
    pthread_t thread;
    _Atomic bool stop;
    bool started;
    uint64_t kept_samples; /* of the client's own counts, what has been added to the reader's */
    uint64_t kept_bytes;
    uint64_t kept_batches;
    dlfs_stream *stream; /* what follows is the thread's own */
    dlfs_sequence *sequence;
    uint64_t *chosen; /* [chosen_count] indices of a chosen order, which the client sent */
    uint64_t chosen_count;
    uint64_t stream_bytes;   /* charged for the stream and its sequence */
    uint64_t withheld_bytes; /* charged for the batch that is withheld */
    struct batch *withheld;  /* taken from the stream when there was no room for it */
    uint64_t withheld_count; /* that was asked for */
    uint64_t *indices;       /* [area_samples] of the read under way */
    uint64_t area_samples;   /* the longest batch whose arrays the result area has pages for */
    uint64_t area_bytes;     /* ... and the longest answer of plain bytes */
    uint64_t answered_tag;   /* of the last answer */
    uint64_t asked_ns;       /* when the last request was taken */
    uint64_t copied_kept;    /* bytes of the memory for copied batches that have pages, from 0 on */
    struct lent *lent;       /* [batches_max] */
    uint32_t batches_max;
    uint32_t lent_used;      /* places that were in use once */
    uint32_t lent_free;      /* list */
    uint64_t *pins;          /* [the arena's slots] samples of this client's batches in each */
    struct copied_run *runs; /* [batches_max] memory in use for copied batches, by offset */
    uint32_t run_count;
};

/* channel/area.c; the thread's own. */
/*
 * Charges the client with the pages that an answer needs: the arrays of a batch of so many samples,
 * or plain bytes. Makes room for as many indices. False: it may not have so much.
 */
bool area_reserve(dlfs_channel *channel, uint64_t samples, uint64_t bytes);
/* Gives the pages of large answers back. The client has done with the last one. */
void area_trim(dlfs_channel *channel);

/* channel/lend.c; the thread's own. */
int lend_create(dlfs_channel *channel, uint32_t batches_max);
/* Whether one more batch may be lent. */
bool lend_possible(const dlfs_channel *channel);
/*
 * Gives a batch to the client: pinned where it is, or copied; writes the result area, with the
 * indices or without, and the completion. What was charged for the batch's arrays is discharged
 * with it. DLFS_E_LIMIT, and the batch with its charge stays the caller's, when there is no memory
 * for it.
 */
int lend_batch(dlfs_channel *channel, struct batch *batch, uint64_t charged_bytes, bool indices,
               struct completion *completion);
/* False when the client has no such batch. */
bool lend_take_back(dlfs_channel *channel, uint64_t number);
void lend_take_back_all(dlfs_channel *channel);
/* Gives the pages back that are kept for copied batches, if there are none. */
void lend_trim(dlfs_channel *channel);
void lend_free(dlfs_channel *channel);
/* Charges the client with memory that it causes; false: it may not have so much. */
bool charge(dlfs_channel *channel, uint64_t bytes);
void discharge(dlfs_channel *channel, uint64_t bytes);

#endif
