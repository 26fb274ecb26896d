/*
 * The inside of the reader, in parts that meet here:
 *
 * - reader/arena.c: the sample memory: equal slots of a chunk, counted references, chunks kept by
 * number;
 * - reader/cache.c: the samples and chunks that stay in it from one epoch to the next;
 * - reader/members.c: where chunks and their copies lie, and which members are lost;
 * - reader/fetch.c, reader/pieces.c: spans of the dataset's data space brought into memory through
 * the queue pairs, piece by piece;
 * - reader/reader.c, read.c, reader/plan.c: batches read on demand;
 * - stream/stream.c, stream/choose.c, stream/ahead.c, stream/harvest.c: an epoch read ahead.
 *
 * One mutex guards the arena and the reader's lists; it is taken once or twice a batch, never a
 * sample, and never held over I/O or a checksum. A fetch belongs to one thread and needs no lock.
 */
#ifndef DLFS_READER_H
#define DLFS_READER_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "device/device.h"
#include "directory/directory.h"
#include "dlfs/dlfs.h"
#include "reader/plan.h"

#define SLOT_NONE UINT32_MAX
#define SLOTS_MIN 4u
#define MEMBER_NONE UINT32_MAX

enum slot_state {
    SLOT_FREE,
    SLOT_TRANSIENT, /* holds samples or is being filled; free again at no reference */
    SLOT_LOADING,   /* a chunk of the dataset is on its way */
    SLOT_CHUNK, /* a chunk of the dataset, verified; idle at no reference, then it may be evicted */
    SLOT_PACKED, /* copies of single samples, verified (reader/cache.c) */
    SLOT_TAIL,   /* belongs to the run that an earlier slot heads */
};

/* The samples of a chunk that failed their checksum. */
struct bad_samples {
    uint64_t count;
    uint64_t capacity;
    uint64_t addresses[]; /* rising */
};

struct slot {
    uint64_t chunk; /* LOADING, KEPT: the dataset's chunk, the first one of a run; PACKED: bytes of
                       the run that are taken */
    uint64_t references; /* more than 2^32 samples may be given of one slot, if only in theory */
    uint32_t run;        /* slots of the run that this one heads, 1 mostly */
    uint32_t previous;   /* in the list of free or of idle slots */
    uint32_t next;
    uint32_t waiters;     /* stream/stream.c: first entry that waits for the chunk */
    uint32_t head;        /* TAIL: the slot that heads the run */
    uint32_t samples;     /* cached: how many it holds, of chunks about */
    uint32_t uses;        /* cached: of its samples, since the cache last looked */
    uint8_t idle_reviews; /* ... how often in a row it found too few */
    uint8_t state;
    bool cached;             /* KEPT, PACKED: counts as the cache's, and stays when it is idle */
    struct bad_samples *bad; /* KEPT: what of it is not to be given; NULL: all is sound */
    const void *owner;       /* LOADING: the stream that loads it, or NULL */
};

struct slot_list {
    uint32_t first;
    uint32_t last;
    uint32_t count;
};

/* A sample that lies in PACKED slots. */
struct cached_sample {
    uint64_t key;    /* index + 1; 0: the place is empty */
    uint64_t offset; /* in the arena; CACHE_PENDING set: its bytes are being copied */
};

/* What stays in the arena between epochs (reader/cache.c). */
struct cache {
    struct cached_sample *map; /* [map_places] open addressing, by index; in the arena, or NULL */
    uint64_t map_capacity;
    uint32_t map_slot;         /* the first of its slots */
    bool map_in_use;           /* a stream that packs samples reads now */
    uint64_t count;            /* samples in the map */
    uint32_t open;             /* the PACKED run that takes the next sample, or SLOT_NONE */
    uint32_t slots;            /* that are cached */
    uint32_t slots_max;        /* ... at most, while the present streams read */
    uint32_t packed_run_slots; /* slots of a PACKED run */
    struct slot_list idle;     /* cached slots without references, the one idle for longest first */
    uint64_t clock;            /* samples that streams have given out */
    uint64_t reviewed_at;      /* the clock when the uses of slots were last looked at */
    uint64_t review_period;    /* samples of the largest epoch that has begun since */
    double batches_pinned;     /* that consumers hold at once, as far as is known */
    bool full;                 /* nothing more can be taken in for now */
    bool lacked_room;          /* something was not cached since the last look, for want of room */
};

/* Memory of a batch that the arena does not hold. */
struct private_memory {
    uint8_t *base;
    size_t bytes;
    size_t mapped_bytes; /* 0: it is malloc's */
    dlfs_reader *reader;
    struct dlfs_share *share; /* that the bytes are taken of, or NULL */
    uint32_t references;
    struct private_memory *next; /* of those at rest */
};

struct batch {
    dlfs_batch public;
    void (*release)(struct batch *batch); /* what dlfs_batch_release does */
    dlfs_reader *reader;
    struct private_memory *private_memory; /* NULL: the samples are in the arena */
    struct dlfs_client *client; /* of a batch that another process's reader gave; then no reader */
    uint64_t number;            /* by which the client releases it */
    uint64_t capacity;
    uint64_t failure_capacity;
    int64_t *offsets; /* the memory of all three, which lie one behind the other */
    int64_t *lengths;
    uint64_t *indices;
    dlfs_failure *failures;
    struct batch *next;
};

enum span_state { SPAN_UNUSED, SPAN_WAITING, SPAN_IN_FLIGHT, SPAN_DONE };

/* A block-aligned run of the data space, in one chunk or over whole ones, and where it lands. */
struct span {
    uint64_t address;
    uint64_t length;
    uint8_t *memory;
    uint64_t deadline_ns;
    uint64_t submitted_bytes; /* bytes handed to queue pairs */
    uint64_t asked_members;   /* members that pieces were asked of, as bits */
    uint64_t suspect_members; /* members to do without in waiter, as bits: what came was wrong */
    uint64_t bad_address;     /* of the first piece that failed */
    uint32_t in_flight;       /* pieces */
    uint32_t attempts;
    uint32_t avoided_member; /* the member to do without, or MEMBER_NONE */
    int code;                /* of the first piece that failed */
    uint8_t state;
    bool begun;       /* some of it has been asked of a member, once at least */
    bool redirected;  /* timed out early, so that another copy can be asked */
    bool was_corrupt; /* what came was wrong, once at least */
    bool abandoned;   /* timed out: the memory stays referenced until the last piece is back */
    uint32_t slot;    /* the arena's slot that memory lies in, or SLOT_NONE */
    struct private_memory *private_memory; /* or the block */
    uint32_t next;                         /* in the list of waiting or done spans */
    uint32_t tag;                          /* the caller's own, as are part and kind */
    uint32_t part; /* read.c: which of its samples is read alone, from 1 on; 0: all at once */
    uint8_t kind;
};

struct span_list {
    uint32_t first;
    uint32_t last;
};

/* A part of a span that lies in one chunk, on its way from one of the chunk's copies. */
struct request {
    uint64_t address;
    uint32_t length;
    uint32_t span;   /* SLOT_NONE: none, it asks whether a lost member is back */
    uint32_t member; /* that it was asked of; MEMBER_NONE: at rest, or to be asked again */
    uint32_t copy;
    uint32_t tried;    /* copies that failed, as bits */
    uint64_t begun_ns; /* when it was asked of the member */
    uint32_t next;     /* in the list of pieces at rest or of those to be asked again */
};

/* What all threads know of a member. */
struct member {
    _Atomic uint64_t lost_until_ns; /* 0: it is well; UINT64_MAX: there is no device */
    _Atomic uint32_t failures;      /* in a row */
    _Atomic uint32_t probes;        /* since it was lost */
    _Atomic int code;               /* why it was lost */
    _Atomic bool hung;              /* lost: it left a read without an answer for all its time */
};

/* One thread's way to the members. */
struct fetch {
    dlfs_reader *reader;
    dlfs_queue **queues; /* [member_count]; NULL: there is nothing to ask of a member */
    struct dlfs_queue_waiter *queue_waiters; /* [member_count] in line for those */
    uint64_t *queue_taken_ns;                /* [member_count] since when each queue pair is held */
    uint64_t yielding;    /* members of which nothing more is asked: others want the queue pair */
    struct pollfd *waits; /* [member_count] scratch */
    struct request *requests; /* [member_count * depth] */
    uint32_t unused_requests; /* list */
    uint32_t resend_requests; /* list of those to be asked of another member */
    struct span *spans;       /* [span_capacity] */
    uint32_t span_capacity;
    uint32_t unused_spans; /* list of unused spans */
    uint32_t unused_span_count;
    struct span_list waiting;
    struct span_list done;
    uint32_t requests_in_flight;
    uint32_t abandoned_requests;
    uint64_t deadline_ns;            /* what is under way then ends with DLFS_E_TIMEOUT */
    const _Atomic bool *stop;        /* it ends when this is set, too; or NULL */
    uint64_t checked_ns;             /* when deadlines were last looked at */
    uint64_t *answered_ns;           /* [member_count] when each last answered, 0: never */
    uint32_t redirected;             /* spans that were, since the read began */
    uint32_t redirect_rounds;        /* looks that turned some, lately */
    uint64_t redirected_ns;          /* the last one */
    uint64_t probing;                /* members that probes are out to, as bits */
    uint8_t *probe_memory;           /* [member_count * block_bytes], with replicas */
    dlfs_operation *operations;      /* [member_count * depth] */
    uint32_t *operation_counts;      /* [member_count] */
    dlfs_completion *completions;    /* [group] */
    uint32_t group;                  /* completions taken at a time */
    uint64_t now_ns;                 /* as of the last look at the clock */
    dlfs_reader_stats stats;         /* since last folded into the reader's */
    dlfs_member_stats *member_stats; /* [member_count] likewise */
    struct miss *misses;             /* scratch of the read under way, [plan_capacity] each */
    struct miss *sort_scratch;
    struct plan_span *plan;
    uint64_t plan_capacity;
    struct fetch *next;
};

struct dlfs_reader {
    dlfs_reader_config config;
    dlfs_device **devices;
    struct member *members; /* [member_count] */
    _Atomic uint64_t lost_members;
    dlfs_extent *extents;
    uint64_t *extent_starts; /* [extent_count + 1] first dataset chunk of each extent */
    const dlfs_location *locations;
    uint64_t sample_count;
    uint64_t data_bytes;
    uint64_t chunk_count;
    uint32_t chunk_shift;
    bool dataset_fits; /* the whole dataset fits in the arena: what is read stays */

    pthread_mutex_t lock;
    pthread_cond_t released; /* a slot became free or idle */
    uint8_t *arena;
    size_t arena_bytes;
    int arena_descriptor;     /* of its file, where it is shared with other processes; else -1 */
    uint64_t resident_offset; /* in the arena, behind the slots */
    _Atomic uint32_t *resident_slots; /* [chunk_count] for other processes: slot + 1 of a chunk that
                               is kept for good; NULL: none are */
    bool prefaulted;                  /* a stream has touched the arena, or is at it */
    struct slot *slots;
    uint32_t slot_count;
    struct slot_list free_slots;
    struct slot_list idle_slots; /* KEPT, not cached */
    struct cache cache;
    uint32_t *chunk_slots; /* [chunk_count] slot + 1 of a chunk that is LOADING or KEPT, 0: none */
    struct fetch *idle_fetches; /* at rest */
    struct fetch
        *draining_fetches; /* at rest, while a device has memory of reads that were abandoned */
    struct batch *idle_batches;          /* at rest */
    size_t idle_batches_bytes;           /* of their arrays */
    size_t idle_plans_bytes;             /* of the plans of fetches at rest */
    struct private_memory *idle_private; /* at rest */
    size_t idle_private_bytes;           /* of them */
    uint64_t references; /* the owner's and each batch's; the last to go frees the reader */
    uint64_t fetches_in_use;
    uint64_t open_streams;
    dlfs_stream *streams; /* list of them */
    dlfs_reader_stats stats;
    dlfs_member_stats *member_stats; /* [member_count] */
    _Atomic uint64_t copy_ns;
};

/* A sample's place, decoded and checked. */
struct location {
    uint64_t address;
    uint64_t length;
    uint64_t chunk;
    uint32_t crc32c;
};

/* False when the location points outside the dataset's data. */
static inline bool reader_locate(const dlfs_reader *reader, uint64_t index,
                                 struct location *location)
{
    const dlfs_location *packed = &reader->locations[index];
    location->address = dlfs_location_address(packed);
    location->length = dlfs_location_length(packed);
    location->crc32c = packed->crc32c;
    location->chunk = location->address >> reader->chunk_shift;
    return location->address <= reader->data_bytes &&
           location->length <= reader->data_bytes - location->address;
}

/* Whether a sample lies in one chunk. */
static inline bool location_in_one_chunk(const dlfs_reader *reader, const struct location *location)
{
    return (location->address + location->length - 1) >> reader->chunk_shift == location->chunk;
}

static inline uint8_t *slot_memory(const dlfs_reader *reader, uint32_t slot)
{
    return reader->arena + ((size_t)slot << reader->chunk_shift);
}

static inline uint32_t slot_of(const dlfs_reader *reader, uint64_t arena_offset)
{
    return (uint32_t)(arena_offset >> reader->chunk_shift);
}

/* What a batch may have of memory of its own. */
struct read_limit {
    uint64_t private_bytes_max;
    struct dlfs_share *share; /* that it is taken of, or NULL */
};

/* reader/arena.c; all with the lock held. */
int arena_map(dlfs_reader *reader);
/*
 * Takes a run of slots as LENT with one reference, evicting idle chunks, and with `displace` idle
 * slots of the cache; SLOT_NONE when there is none.
 */
uint32_t arena_take(dlfs_reader *reader, uint32_t run, bool displace);
/* Takes a run of free slots for the cache, from the end of the arena; SLOT_NONE: there is none. */
uint32_t arena_take_packed(dlfs_reader *reader, uint32_t run);
/* The slot that heads the run which a slot belongs to: itself, mostly. */
uint32_t arena_head(const dlfs_reader *reader, uint32_t slot);
/* References of a slot; those of a PACKED run are counted in its first slot. */
void arena_reference(dlfs_reader *reader, uint32_t slot);
void arena_release(dlfs_reader *reader, uint32_t slot);
/* Frees an idle cached slot, with the run that it heads. */
void arena_evict_cached(dlfs_reader *reader, uint32_t slot);
/*
 * A LENT slot becomes the chunk's, LOADING; then KEPT, or LENT again when the load failed. `bad` is
 * the arena's from then on.
 */
void arena_begin_load(dlfs_reader *reader, uint32_t slot, uint64_t chunk, const void *owner);
void arena_end_load(dlfs_reader *reader, uint32_t slot, bool kept, struct bad_samples *bad);
/* The slot of a chunk that is LOADING or KEPT, or SLOT_NONE. */
uint32_t arena_find(const dlfs_reader *reader, uint64_t chunk);
/* Whether a slot holds a sample, sound, and at which offset of the arena. */
bool arena_gives(const dlfs_reader *reader, uint32_t slot, const struct location *location,
                 uint64_t *offset);
/*
 * Finds a sample, sound, in a chunk or in the cache, and takes a reference: its offset in the
 * arena.
 */
bool arena_look_up(dlfs_reader *reader, uint64_t index, const struct location *location,
                   uint64_t *offset);
uint32_t arena_available(const dlfs_reader *reader);
void arena_free(dlfs_reader *reader);

/* reader/cache.c; all with the lock held. */
/* 2^32 times the fraction of the square root of 2: multiples are spread evenly. */
#define CACHE_SPREAD UINT32_C(0x6A09E667)
#define CACHE_BATCHES_PINNED_MIN 2 /* one that is taken, and one to come */
#define CACHE_PENDING (UINT64_C(1) << 63)
void cache_init(struct cache *cache);
/* Bytes of a map with places for so many samples. */
uint64_t cache_map_bytes(uint64_t samples);
/* Makes the map large enough for so many samples, if there are slots for it. */
void cache_reserve_map(dlfs_reader *reader, uint64_t samples);
/* Finds a cached sample: its offset in the arena. */
bool cache_find(const dlfs_reader *reader, uint64_t index, uint64_t *offset);
/* Brings the place of a sample in the map into the processor's caches. */
static inline uint64_t cache_home(const struct cache *cache, uint64_t index)
{
    return (index * UINT64_C(0x9E3779B97F4A7C15) >> 32) * cache->map_capacity >> 32;
}
static inline void cache_prefetch(const struct cache *cache, uint64_t index)
{
    if (cache->count > 0) {
        __builtin_prefetch(&cache->map[cache_home(cache, index)]);
    }
}
enum reservation {
    RESERVE_DONE,
    RESERVE_REFUSED, /* the cache is full, or has the sample */
    RESERVE_BLOCKED, /* reads under way have the memory that the cache may take */
};
/*
 * Takes room for a sample, with a reference for the caller. It is found by others when
 * cache_publish has been called; cache_abandon gives the room up.
 */
enum reservation cache_reserve(dlfs_reader *reader, uint64_t index, uint64_t length,
                               uint64_t *offset);
void cache_publish(dlfs_reader *reader, uint64_t index);
void cache_abandon(dlfs_reader *reader, uint64_t index, uint64_t offset);
/* Forgets the samples of a PACKED run that is evicted. */
void cache_unmap_run(dlfs_reader *reader, uint32_t slot);
/* Has a chunk that has landed cached, if it is to be. */
void cache_add_chunk(dlfs_reader *reader, uint32_t slot);
/* A number below 2^32 for each chunk; shares of such numbers are shares of any stretch of chunks.
 */
static inline uint64_t cache_spread(uint64_t chunk)
{
    return chunk * CACHE_SPREAD & UINT32_MAX;
}
/* Whether a chunk that has landed in a run of slots is to be cached. */
bool cache_admits_chunk(dlfs_reader *reader, uint64_t chunk, uint32_t run);
/* The cached slot that was idle for longest, if there are too many of them; else SLOT_NONE. */
uint32_t cache_victim(const dlfs_reader *reader);
/* Samples were given out. */
void cache_count_given(dlfs_reader *reader, uint64_t samples);
/* A stream over an epoch of so many samples begins. */
void cache_begin_epoch(dlfs_reader *reader, uint64_t samples);
/*
 * Sets how many slots are cached at most, how many a PACKED run has, and whether a stream that
 * packs samples reads now.
 */
void cache_set_limits(dlfs_reader *reader, uint32_t slots_max, uint32_t packed_run_slots,
                      bool map_in_use);

#include "reader/fetch.h"

/* stream/stream.c */
/* Whether every sample lies below `total`; positions rise, so that the last one decides. */
bool stream_fits(const dlfs_stream_config *config, uint64_t total);
/* The indices of this consumer's samples ordinal..ordinal+count-1. */
int stream_indices(const dlfs_stream_config *config, uint64_t ordinal, uint64_t count,
                   uint64_t *out);
/* reader_read's limit, for the batches of a stream. */
void stream_limit(dlfs_stream *stream, const struct read_limit *limit);
/* Memory of a stream, but for the reader's. */
uint64_t stream_memory_bytes(const dlfs_stream *stream);

/* reader/block.c */
/*
 * Memory of at least one byte, aligned for every device; its one reference is the caller's. Taken
 * of a share, unless that is NULL: DLFS_E_LIMIT when the share has not so much.
 */
int private_memory_take(dlfs_reader *reader, size_t bytes, struct dlfs_share *share,
                        struct private_memory **out);
void private_memory_release(struct private_memory *private_memory);
void private_memory_free_all(dlfs_reader *reader);

/* reader/reader.c */
#define BATCH_BYTES_PER_SAMPLE (2 * sizeof(int64_t) + sizeof(uint64_t)) /* of its arrays */
/* Memory of a batch's arrays. */
size_t batch_bytes(const struct batch *batch);
/* Lays out the arrays for count samples; what was there is lost. */
int batch_reserve(struct batch *batch, uint64_t count);
void batch_free(struct batch *batch);
struct batch *batch_take(dlfs_reader *reader, uint64_t count);
/* dlfs_reader_get, which stop ends as in read_terms; *failure is set when the sample itself could
 * not be given. */
int64_t reader_get(dlfs_reader *reader, uint64_t index, void *buffer, uint64_t buffer_bytes,
                   uint32_t flags, const _Atomic bool *stop, dlfs_failure *failure);
int batch_fail(struct batch *batch, const dlfs_failure *failure);
void batch_recycle(struct batch *batch);
int reader_take_fetch(dlfs_reader *reader, struct fetch **out);
void reader_fold_stats(dlfs_reader *reader, struct fetch *fetch);
void reader_return_fetch(dlfs_reader *reader, struct fetch *fetch);
/* Takes back what devices have let go of, of reads abandoned by threads that do not read now. */
void reader_drain_fetches(dlfs_reader *reader);
/*
 * The failure of a sample, with the member and offset where it begins, or where it has the byte at
 * bad_address.
 */
dlfs_failure reader_failure(const dlfs_reader *reader, uint64_t index, int code, uint32_t crc_got,
                            uint64_t bad_address);
/* How a batch is read. */
struct read_terms {
    struct read_limit limit;  /* else DLFS_E_LIMIT */
    uint64_t deadline_ns;     /* by the monotonic clock; 0: as the reader's timeout_ms says */
    const _Atomic bool *stop; /* the read ends soon after this is set; or NULL */
    uint32_t redirect_rounds; /* of the fetch, from one try to the next */
    bool private_only;        /* as dlfs_reader_read_apart */
};
#define READ_TERMS_PLAIN ((struct read_terms){.limit = {.private_bytes_max = UINT64_MAX}})
int reader_read(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                const struct read_terms *terms, dlfs_batch **out);
/* The nanoseconds that a read of so many bytes may take. */
uint64_t reader_timeout_ns(const dlfs_reader *reader, uint64_t bytes);
/*
 * Checks every sample that lies wholly in [address, address+length). *bad: those that fail, for the
 * caller to free, or NULL. Negative when that cannot be said: none of the samples may be kept.
 */
int reader_verify_span(const dlfs_reader *reader, const struct span *span,
                       struct bad_samples **bad);

#endif
