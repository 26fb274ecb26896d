/* The inside of a stream: what stream/stream.c, stream/ahead.c and stream/harvest.c share. */
#ifndef DLFS_STREAM_H
#define DLFS_STREAM_H

#include "reader/reader.h"

#define FILL_MAX 1024u  /* positions filled, or planned, between looks at the device */
#define WINDOW_MAX 512u /* positions of one direct plan */
#define COPY_BUCKETS 64u

enum entry_state {
    ENTRY_NEW,     /* its bytes are not on their way */
    ENTRY_WAITING, /* ... are on their way */
    ENTRY_COPIED,  /* ... are being copied out of their chunk */
    ENTRY_READY,   /* ... are in memory, verified, and referenced */
    ENTRY_FAILED,  /* ... cannot be had; the stream's failures say why */
};

/* A sample of the look-ahead. */
struct entry {
    uint64_t index;
    uint64_t offset; /* READY: in the arena */
    uint64_t length; /* READY */
    uint32_t next;   /* in the chain of those that wait for one span */
    uint8_t state;
    bool alone;     /* read by itself, as when a larger read failed */
    bool in_bucket; /* READY: lies in its bucket's memory */
    bool cached;    /* WAITING: the cache has room for it at `offset` */
};

enum span_kind {
    KIND_CHUNK,    /* a chunk or a run of chunks, kept */
    KIND_WINDOW,   /* neighbours of a window of the look-ahead, used where they land */
    KIND_TO_CACHE, /* ... copied to the cache */
    KIND_ALONE,    /* one sample */
    KIND_COPY,     /* a chunk, of which samples are copied out */
};

/* Memory of the harvested samples of one stretch of positions. */
struct bucket {
    uint64_t number; /* positions number * span .. */
    uint32_t slot;   /* the newest of its slots, chained by slot.next; SLOT_NONE: none */
    uint32_t used;   /* bytes of the newest */
};

/* A harvested sample between its chunk's landing and its being ready. */
struct sample_copy {
    uint32_t entry;
    uint32_t crc32c;
    uint64_t start; /* in the chunk */
    uint64_t length;
    uint64_t offset;   /* in the arena */
    uint64_t position; /* of the entry */
};

struct chunk_copy {
    uint64_t bucket_span; /* positions */
    struct bucket buckets[COPY_BUCKETS];
    uint32_t *map; /* open addressing: ring slot + 1 by index, 0: none */
    uint64_t map_mask;
    struct sample_copy *copies; /* [pick_capacity] */
    uint64_t copy_capacity;
    uint32_t loading;
    uint32_t loading_max;
};

/* The arena's memory being touched for the first time; all but the thread guarded by the lock. */
struct prefault {
    pthread_t thread;
    bool running;
    bool wanted;    /* the stream's thread came to memory that nobody has touched */
    size_t end;     /* bytes of the arena that will be touched; 0: that is not for this stream */
    size_t claimed; /* of them, touched, or being touched by one of the two threads */
    size_t busy;    /* the step that the thread is at */
    size_t own;     /* ... that the stream's thread is at */
};

/* What one epoch takes, of all its consumers together. */
struct need {
    uint64_t samples;       /* different ones, at most */
    uint64_t bytes;         /* of them */
    uint64_t mean_bytes;    /* of one; at least 1 */
    uint64_t largest_bytes; /* of the largest that was looked at */
    double end_bytes;       /* lost at the end of a run: half of the sample that does not fit */
    uint64_t read_bytes;    /* that one takes if it is read alone: its blocks */
    bool partial;           /* not of all samples */
};

/* The slot in which the next read lands. */
struct landing {
    uint32_t slot; /* or SLOT_NONE */
    uint64_t used; /* bytes of it */
};

struct dlfs_stream {
    dlfs_reader *reader;
    dlfs_stream_config config;
    uint32_t plan;
    struct need need;
    dlfs_stream *next;     /* in the reader's list */
    uint64_t awaited_max;  /* positions that the consumer has waited for at once */
    uint32_t cached_slots; /* slots that this stream leaves to the cache */
    bool cache_crowded; /* the cache has no room for this stream's samples, though they would fit */
    uint64_t to_cache_bytes_max; /* bytes that may be under way to the cache */
    uint64_t cached_share;       /* the chunks whose samples are cached: cache_spread below it */
    struct read_limit limit;     /* of a batch that is read on demand */
    struct fetch *fetch;
    pthread_t thread;
    struct prefault prefault;
    pthread_cond_t ready; /* an entry became ready or failed, or the thread is starved */

    /* Guarded by the reader's lock. */
    struct entry *ring; /* [mask + 1] */
    uint64_t mask;
    uint64_t lookahead; /* positions of look-ahead, <= mask + 1 */
    uint64_t head;      /* the next position to be given out */
    uint64_t planned;   /* every entry before it was planned */
    uint64_t filled;    /* every entry before it has its index */
    uint64_t awaited; /* positions from the head that the consumer waits for, 0: it does not wait */
    uint64_t awaited_ended; /* of them, known to have ended */
    bool stop;
    bool paused;           /* the consumer reads on demand: nothing is planned */
    bool blocked;          /* no memory, and nothing under way that would free any */
    bool overdue;          /* the consumer has waited for too long: what it waits for fails */
    uint64_t time_left_ns; /* for the batch at the head, not counting what was waited already; 0: it
                             is not waited for yet */
    uint64_t deadline_ns;  /* while the consumer waits: when that is over */
    dlfs_failure *failures;
    uint64_t failure_count;
    uint64_t failure_capacity;

    /* The thread's own. */
    uint64_t *indices;       /* scratch */
    struct landing landing;  /* of samples that stay there until they are used */
    struct landing to_cache; /* of samples that are copied to the cache */
    uint64_t to_cache_bytes; /* under way to the latter */
    struct chunk_copy chunk_copy;
};

static inline struct entry *entry_at(dlfs_stream *stream, uint64_t position)
{
    return &stream->ring[position & stream->mask];
}

/* The position of a ring slot in [head, head + ring size). */
static inline uint64_t entry_position(const dlfs_stream *stream, uint32_t ring_index)
{
    return stream->head + ((ring_index - stream->head) & stream->mask);
}

/*
 * Whether a read that took too long is followed by another: of another copy, or because it was
 * ended with those of the batch that the consumer has waited for too long.
 */
static inline bool stream_tries_again(const dlfs_stream *stream, uint64_t position,
                                      const struct span *span)
{
    if (stream->overdue) {
        return position >= stream->head + stream->awaited;
    }
    return span->redirected;
}

/* stream/choose.c */
/* Finds out what the epoch takes. */
void need_measure(dlfs_stream *stream);
/* Slots that the cache may have while a dataset is harvested, and no chunk is chosen. */
uint32_t chunk_copy_cache_slots(const dlfs_reader *reader);
/* Chooses the plan that moves the fewest bytes, and makes the cache ready. Takes the lock. */
void plan_begin(dlfs_stream *stream);
/* The lock is held: the consumer takes larger batches than before, perhaps. */
void plan_batch_grew(dlfs_stream *stream);
/* The consumer held so many batches that there was no memory for the next one. */
void plan_memory_ran_out(dlfs_stream *stream);
/* The stream has ended. */
void plan_end(dlfs_stream *stream);

/* stream/ahead.c; the lock is held, but for ahead_finish, which takes it. */
/* Plans for a while; returns whether anything was planned. */
bool lookahead_plan(dlfs_stream *stream);
/* Takes in a span that has ended. */
void lookahead_finish(dlfs_stream *stream, struct span *span);
void entry_ready(struct entry *entry, uint64_t offset, uint64_t length);
void entry_fail(dlfs_stream *stream, uint64_t position, int code, uint32_t crc_got,
                uint64_t bad_address);
/* Plans the entry again, by itself if `alone`. */
void entry_again(dlfs_stream *stream, uint64_t position, bool alone);
/* Has an entry wait for the chunk that a slot is loading. */
void entry_wait(dlfs_stream *stream, uint64_t position, uint32_t slot);
/* A larger read ended without the sample of a ring slot's entry: fails it, or reads it alone. */
void entry_read_alone(dlfs_stream *stream, uint32_t ring_index, const struct span *span);
void stream_start(dlfs_stream *stream, struct span *span, enum span_kind kind, uint32_t slot,
                  uint64_t slot_offset);
/* Reads one sample by itself; false when there is no memory for it. */
bool load_alone(dlfs_stream *stream, uint64_t position, const struct location *location);

/* stream/harvest.c */
/* Positions of look-ahead of the samples that a chunk is harvested for. */
uint64_t chunk_copy_lookahead(const dlfs_reader *reader, uint64_t mean_bytes,
                              uint32_t cached_slots);
int chunk_copy_create(dlfs_stream *stream, uint64_t mean_bytes);
void chunk_copy_destroy(dlfs_stream *stream);
void chunk_copy_remove_entry(dlfs_stream *stream, uint64_t position);
void chunk_copy_add_entry(dlfs_stream *stream, uint64_t position);
/* The lock is held. Plans an entry: false when it has to wait for memory or for other chunks. */
bool chunk_copy_plan(dlfs_stream *stream, uint64_t position, const struct location *location);
/* Gives up the buckets that lie before the head; the lock is held. */
void chunk_copy_release_passed(dlfs_stream *stream);
/* A chunk has landed; takes the lock. */
void chunk_copy_finish(dlfs_stream *stream, struct span *span);

/* reader/warm.c */
/* Begins to touch the arena's memory, if the stream is the first that needs all of it. */
void prefault_start(dlfs_stream *stream);
/* Ends that, however far it has come. */
void prefault_stop(dlfs_stream *stream);
/* Whether reads into a run of slots may start; the lock is held. */
bool prefault_covers(const dlfs_stream *stream, uint32_t slot, uint64_t run);
/* Takes on a step of the work, if that is wanted; the lock is held. */
bool prefault_claim(dlfs_stream *stream);
/* Does it, without the lock. */
void prefault_help(dlfs_stream *stream);

#endif
