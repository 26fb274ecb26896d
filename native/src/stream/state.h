/*
 * The inside of a stream. The files, each of which calls only those before it:
 *
 * - stream/positions.c: which positions of the order are the consumer's;
 * - stream/entry.c: the entries of the look-ahead, and reads of single samples;
 * - stream/plan_direct.c, plan_chunks.c, plan_chunk_copy.c: the three plans;
 * - stream/cache_size.c, plan_choice.c: measure the epoch, size the cache, choose the plan;
 * - stream/lookahead.c: plans entries and takes in spans that were read, by the chosen plan;
 * - stream/stream.c: the stream's thread, the consumer's calls.
 *
 * Threads: the consumer calls dlfs_stream_next, and one thread of the stream reads ahead. They
 * share the entries under the arena's lock.
 */
#ifndef DLFS_STREAM_STATE_H
#define DLFS_STREAM_STATE_H

#include "reader/internal.h"
#include "reader/members.h"
#include "stream/stream.h"

#define FILL_MAX 1024u  /* positions that are filled in, or planned, between two fetch steps */
#define WINDOW_MAX 512u /* positions of one window of the direct plan */
#define COPY_BUCKETS 64u
#define RING_NONE SLOT_NONE /* ends a chain of ring indices, as slot.waiters does */

enum entry_state {
    ENTRY_NEW,     /* no read of it is under way */
    ENTRY_WAITING, /* a read of it is under way */
    ENTRY_COPIED,  /* its bytes are being copied out of their chunk */
    ENTRY_READY,   /* its bytes are in memory, verified, and hold a reference */
    ENTRY_FAILED,  /* its bytes cannot be read; the stream's failures tell why */
};

/* A sample of the look-ahead. */
struct entry {
    uint64_t index;  /* of the sample */
    uint64_t offset; /* READY: in the arena */
    uint64_t length; /* READY */
    uint32_t next;   /* ring index of the next entry that waits for the same span */
    uint8_t state;   /* enum entry_state */
    bool alone;      /* read by itself, for instance after a larger read failed */
    bool given_up;   /* WAITING: it is read again later, when there is memory for it */
    bool in_bucket;  /* READY: its bytes lie in the bucket of its position */
    bool cached;     /* WAITING: the cache has reserved room for it at `offset` */
};

enum span_kind {
    KIND_CHUNK,    /* a chunk or a run of chunks that stays in the arena */
    KIND_WINDOW,   /* neighbours in a window of the look-ahead, used where they land */
    KIND_TO_CACHE, /* neighbours in a window, copied to the cache */
    KIND_ALONE,    /* one sample */
    KIND_COPY,     /* a chunk of which samples are copied out */
};

/* Memory of the copied samples of one range of positions. */
struct bucket {
    uint64_t number; /* its positions begin at number * bucket_span */
    uint32_t slot;   /* the newest of its slots, chained by slot.next; or SLOT_NONE */
    uint32_t used;   /* bytes of the newest slot */
};

/* A sample to copy out of a chunk that was read. */
struct sample_copy {
    uint32_t entry; /* its ring index */
    uint32_t crc32c;
    uint64_t start; /* in the chunk, in bytes */
    uint64_t length;
    uint64_t offset;   /* of the copy, in the arena */
    uint64_t position; /* of the entry */
};

/* State of the chunk copy plan. */
struct chunk_copy {
    uint64_t bucket_span; /* positions of a bucket */
    struct bucket buckets[COPY_BUCKETS];
    uint32_t *map; /* [map_mask + 1] hash table from sample index to ring index + 1; 0: empty */
    uint64_t map_mask;
    struct sample_copy *copies; /* [copy_capacity] */
    uint64_t copy_capacity;
    uint32_t loading; /* chunks being read */
    uint32_t loading_max;
};

/* The samples and bytes that one epoch reads, all its consumers together. */
struct epoch_need {
    uint64_t samples;       /* different samples, at most */
    uint64_t bytes;         /* of these samples */
    uint64_t mean_bytes;    /* of one sample; at least 1 */
    uint64_t largest_bytes; /* of the largest sample that was measured */
    double end_bytes;    /* lost at the end of a packed run, where the next sample does not fit */
    uint64_t read_bytes; /* of the blocks of a mean sample that is read alone */
    bool partial;        /* the epoch leaves samples of the dataset out */
};

/* A slot that small reads fill one after the other. */
struct partial_slot {
    uint32_t slot; /* or SLOT_NONE */
    uint64_t used; /* bytes of it */
};

struct dlfs_stream {
    dlfs_reader *reader;
    dlfs_stream_config config;
    uint32_t plan; /* DLFS_PLAN_*, as chosen */
    struct epoch_need need;
    dlfs_stream *next;      /* in the reader's list */
    uint32_t share_changes; /* value of the reader's that the plan follows */
    uint64_t awaited_max;   /* most positions that the consumer has waited for at once */
    uint32_t cached_slots;  /* slots that this stream leaves to the cache */
    bool cache_crowded;     /* samples of other streams fill the cache, where these would fit */
    uint64_t to_cache_bytes_max; /* most bytes being read for the cache at a time */
    uint64_t cached_share;       /* samples of chunks with a cache_spread below it are cached */
    struct stream_bounds bounds;
    struct fetch *fetch;
    pthread_t thread;
    pthread_cond_t ready; /* an entry became ready or failed, or the thread is blocked */

    /* Guarded by the arena's lock. */
    struct entry *ring; /* [mask + 1] */
    uint64_t mask;
    uint64_t lookahead;     /* positions of look-ahead, <= mask + 1 */
    uint64_t head;          /* the next position to be given */
    uint64_t planned;       /* every entry before it was planned */
    uint64_t filled;        /* every entry before it has its index */
    uint64_t awaited;       /* positions from the head that the consumer waits for, or 0 */
    uint64_t awaited_ended; /* of them, those known to be ready or failed */
    _Atomic bool stop;
    bool paused;            /* the consumer reads on demand: nothing is planned */
    bool helps_fill;        /* no chunk is read until more of the arena is touched */
    bool blocked;           /* no memory, and nothing under way that would free any */
    bool overdue;           /* the consumer's deadline has passed: what it waits for fails */
    uint64_t time_left_ns;  /* for the batch at the head, without the time waited already; 0 if no
                               call has waited for it */
    uint64_t deadline_ns;   /* of the consumer, while it waits */
    uint64_t slow_bytes;    /* of its batch, which may arrive slowly: they move the deadline */
    uint64_t arrived_bytes; /* of the fetch, for which the deadline was moved already */
    dlfs_failure *failures;
    uint64_t failure_count;
    uint64_t failure_capacity;

    /* The thread's own. */
    uint64_t *indices;                /* [FILL_MAX] scratch */
    struct partial_slot partial_slot; /* of samples that stay where they land */
    struct partial_slot to_cache;     /* of samples that are copied to the cache */
    uint64_t to_cache_bytes;          /* being read for the cache */
    struct chunk_copy chunk_copy;
};

static inline struct entry *entry_at(dlfs_stream *stream, uint64_t position)
{
    return &stream->ring[position & stream->mask];
}

/* Returns the position of a ring index, in [head, head + ring size). */
static inline uint64_t entry_position(const dlfs_stream *stream, uint32_t ring_index)
{
    return stream->head + ((ring_index - stream->head) & stream->mask);
}

/* Returns the location of an entry's sample, which was valid when the entry was planned. */
static inline struct location entry_location(const dlfs_stream *stream, const struct entry *entry)
{
    struct location location;
    (void)reader_locate(stream->reader, entry->index, &location);
    return location;
}

/* Prefetches the location of a sample: a cache miss takes as long as the sample's checksum. */
static inline void prefetch_location(const dlfs_stream *stream, uint64_t index)
{
    __builtin_prefetch(&stream->reader->locations[index]);
}

/* ---- stream/entry.c; the lock is held -------------------------------------------------------- */

void entry_ready(struct entry *entry, uint64_t offset, uint64_t length);
/* Marks an entry as failed, and keeps the failure for its batch. */
void entry_fail(dlfs_stream *stream, uint64_t position, int code, uint32_t crc_got,
                uint64_t bad_address);
/* Plans the entry again, by itself if `alone`. */
void entry_again(dlfs_stream *stream, uint64_t position, bool alone);
/* Makes an entry wait for the chunk that a slot is loading. */
void entry_wait(dlfs_stream *stream, uint64_t position, uint32_t slot);
/* Handles a larger read that ended without the sample of an entry: reads it alone, or fails it. */
void entry_read_alone(dlfs_stream *stream, uint32_t ring_index, const struct span *span);
/* Looks an entry's sample up in memory; it is ready if memory has it. */
bool entry_look_up(dlfs_stream *stream, struct entry *entry, const struct location *location);
/* Returns true if the cache may have room for a sample. Only entry_reserve knows. */
bool entry_may_be_cached(const dlfs_stream *stream, uint64_t address);
/* Reserves room in the cache if it admits the sample. Returns false if the entry has to be planned
 * again, or to wait for memory that reads under way occupy. */
bool entry_reserve(dlfs_stream *stream, struct entry *entry, uint64_t address, uint64_t length);
/* Gives up the room in the cache: the sample is not read now, or its bytes are corrupt. */
void entry_unreserve(dlfs_stream *stream, struct entry *entry);
/* Makes an entry ready that was read to `offset`, or copied to its room in the cache. */
void entry_landed(dlfs_stream *stream, struct entry *entry, uint64_t offset, uint64_t length);
/* Gives up a sample that is READY, until it is planned again. */
void entry_give_up(dlfs_stream *stream, uint64_t position);
/* Computes the checksum of a sample where it landed, and copies it to its room in the cache. */
uint32_t entry_checksum(const dlfs_stream *stream, const struct entry *entry, const uint8_t *bytes,
                        const struct location *location);
/* Returns the slots that samples may take which are not cached: the cache keeps its own. */
uint32_t uncached_slots(const dlfs_stream *stream);
/* Returns how many more bytes may be read for the cache now. */
uint64_t to_cache_room(const dlfs_stream *stream);
/* Starts the read of a span into a slot. */
void stream_start(dlfs_stream *stream, struct span *span, enum span_kind kind, uint32_t slot,
                  uint64_t slot_offset);
/* Returns true if a timed-out read is followed by another one: of another copy, or because it was
 * ended only together with those of the overdue batch. */
bool stream_retries(const dlfs_stream *stream, uint64_t position, const struct span *span);
enum entry_plan {
    ENTRY_PLANNED,
    ENTRY_WAITS,       /* there is no memory for it now */
    ENTRY_NEEDS_CHUNK, /* a chunk must be read; the plan of the stream starts that */
};
/* Plans an entry that needs no read of more than itself. Its location is set else. */
enum entry_plan entry_plan_alone(dlfs_stream *stream, uint64_t position, struct location *location);
/* Starts the read of one sample. Returns false if there is no memory for it. */
bool load_alone(dlfs_stream *stream, uint64_t position, const struct location *location);
/* Takes in a span of KIND_ALONE. Takes the lock. Sets *again if the span was started again. */
void finish_alone(dlfs_stream *stream, struct span *span, bool *again);

/* ---- stream/plan_*.c; the lock is held, but the finish functions take it ----------------------
 */

/* Plans an entry by whole chunks. Returns false if there is no memory for it. */
bool chunks_plan(dlfs_stream *stream, uint64_t position, const struct location *location);
/* Ends the load of a chunk: the samples that wait for it, each with a reference to it, are used
 * where they lie. Takes over `bad`, the samples that failed their checksum. */
void chunks_end_load(dlfs_stream *stream, const struct span *span, bool valid,
                     struct bad_samples *bad);
/* Takes in a chunk that was read. */
void chunks_finish(dlfs_stream *stream, struct span *span);

/* Returns true if samples whose chunks have no memory yet are to be read directly: the arena is
 * still being touched, and that takes longer. */
bool stream_is_filling(const dlfs_stream *stream);
/* Collects the next window of entries and starts their reads. Returns true if it planned any. */
bool direct_plan(dlfs_stream *stream);
/* Verifies the samples of a span of a window, without the lock: marks those to be read `alone`. */
void direct_verify(dlfs_stream *stream, const struct span *span);
/* Takes in a span of a window that was verified. The lock is held. */
void direct_finish(dlfs_stream *stream, const struct span *span);

/* Returns the positions of look-ahead for which samples are copied out of chunks. */
uint64_t chunk_copy_lookahead(const dlfs_reader *reader, uint64_t mean_bytes,
                              uint32_t cached_slots);
int chunk_copy_create(dlfs_stream *stream, uint64_t mean_bytes);
void chunk_copy_destroy(dlfs_stream *stream);
/* Enters an entry into the map from index to entry. */
void chunk_copy_add_entry(dlfs_stream *stream, uint64_t position);
/* Removes the previous entry at the ring index of a position from the map. */
void chunk_copy_remove_entry(dlfs_stream *stream, uint64_t position);
/* Plans an entry. Returns false if it has to wait for memory or for other chunks. */
bool chunk_copy_plan(dlfs_stream *stream, uint64_t position, const struct location *location);
/* Releases the buckets before the head. */
void chunk_copy_release_passed(dlfs_stream *stream);
/* Takes in a chunk that was read: copies the samples out of it that are needed soonest. */
void chunk_copy_finish(dlfs_stream *stream, struct span *span);

/* ---- stream/cache_size.c --------------------------------------------------------------------- */

/* Measures what the epoch reads. */
void need_measure(dlfs_stream *stream);
/* Returns the slots of a PACKED run, for samples as large as the stream's. */
uint32_t packed_run_slots(const dlfs_stream *stream);
/* Returns the samples that the cache's map needs entries for. */
uint64_t map_samples(const dlfs_stream *stream);
/* Returns the slots that the packed samples of the whole epoch take, with the map. */
uint64_t needed_slots(const dlfs_stream *stream);
/* Returns the slots for packed samples and the map. */
uint32_t packed_slots(const dlfs_stream *stream);
/* Returns the slots for whole cached chunks. */
uint32_t chunk_slots(const dlfs_stream *stream);
/* Returns the slots for cached chunks next to copied samples. */
uint32_t chunk_copy_cache_slots(const dlfs_reader *reader);
/* Sets how many slots the stream leaves to the cache, by its plan. */
void stream_size_cache(dlfs_stream *stream);
/* Divides the slots between the cache and the open streams. */
void reader_divide_slots(dlfs_reader *reader);
/* Returns minuend - subtrahend, or 0 if that is negative. */
static inline uint32_t subtract_or_zero(uint64_t minuend, uint64_t subtrahend)
{
    return (uint32_t)(minuend > subtrahend ? minuend - subtrahend : 0);
}

/* ---- stream/plan_choice.c -------------------------------------------------------------------- */

/* Chooses the plan that moves the fewest bytes, and prepares the cache. Takes the lock. */
void plan_begin(dlfs_stream *stream);
/* Resizes the cache if the consumer takes larger batches than before. The lock is held. */
void plan_batch_grew(dlfs_stream *stream);
/* Resizes the cache after pinned batches left no memory for the next one. The lock is held. */
void plan_memory_ran_out(dlfs_stream *stream);
/* Returns true if the reader's share of the arena has changed. The lock is held. */
static inline bool plan_lags(const dlfs_stream *stream)
{
    return stream->share_changes != stream->reader->share.changes;
}
/* Adapts the stream to its reader's share of the arena. What was read ahead beyond it is given up.
 * The lock is held. */
void plan_follow_share(dlfs_stream *stream);
/* Gives up the stream's share of the memory. The lock is held. */
void plan_end(dlfs_stream *stream);

/* ---- stream/lookahead.c ---------------------------------------------------------------------- */

/* Plans the next entries. Returns true if it planned any. The lock is held. */
bool lookahead_plan(dlfs_stream *stream);
/* Takes in the spans that have ended. Takes the lock. */
void lookahead_finish(dlfs_stream *stream);

#endif
