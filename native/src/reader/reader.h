/*
 * The reader: samples of one dataset, from the members' devices into memory. This header is what
 * the other parts of the library include; the layers of the reader, from the bottom:
 *
 * - reader/cache_map.c, arena.c, cache.c: the sample memory, equal slots of a chunk with counted
 *   references, and which samples and chunks stay in it from one epoch to the next;
 * - reader/private_memory.c, share.c: memory of batches that own theirs, charged to a budget;
 * - reader/members.c: where chunks and their copies lie, and which members are lost;
 * - reader/plan.c, span.c, fetch_queues.c, requests.c, fetch.c: spans of the data space read
 * through the members' queue pairs (reader/fetch.h);
 * - reader/reader.c, batch.c: the reader itself, its idle fetches and batches;
 * - reader/read_batch.c, read_sample.c, read_part.c: reads on demand;
 * - stream/: an epoch read ahead.
 *
 * Threads: any thread may read. One mutex guards the arena and the reader's lists. It is taken once
 * or twice a batch, never once a sample, and never held over I/O or a checksum. A fetch belongs to
 * one thread at a time.
 */
#ifndef DLFS_READER_H
#define DLFS_READER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "device/device.h"
#include "directory/directory.h"
#include "dlfs/dlfs.h"
#include "reader/arena.h"
#include "reader/cache.h"
#include "reader/fetch.h"
#include "reader/share.h"

/* Memory of a batch that does not lie in the arena. */
struct private_memory {
    uint8_t *base;
    size_t bytes;        /* that were asked for */
    size_t mapped_bytes; /* length of the mapping; 0 if the memory is malloc's */
    dlfs_reader *reader;
    struct dlfs_share *share; /* the budget that is charged, or NULL */
    uint32_t references;
    struct private_memory *next; /* in the reader's list of idle ones */
};

/* A batch, of this process's reader or received from a service. */
struct batch {
    dlfs_batch public;
    void (*release)(struct batch *batch);  /* implements dlfs_batch_release */
    dlfs_reader *reader;                   /* NULL if a service gave the batch */
    struct private_memory *private_memory; /* NULL if the samples lie in the arena */
    struct dlfs_client *client;            /* the connection to the service, or NULL */
    uint64_t number;                       /* the service's number of the batch */
    uint64_t capacity;                     /* samples that the arrays have room for */
    uint64_t failure_capacity;
    int64_t *offsets; /* one allocation: offsets, lengths and indices, one after the other */
    int64_t *lengths;
    uint64_t *indices;
    dlfs_failure *failures;
    struct batch *next; /* in a list of idle batches */
};

/* The state of a member that all threads share. */
struct member {
    _Atomic uint64_t lost_until_ns; /* 0: not lost; else time of the next probe; UINT64_MAX: there
                                       is no device */
    _Atomic uint32_t failures;      /* failed requests in a row */
    _Atomic uint32_t probes;        /* probes since it was lost, which double the interval */
    _Atomic int code;               /* why it was lost, the last time */
    _Atomic bool hung;              /* lost because it did not answer within the whole timeout */
};

struct dlfs_reader {
    dlfs_reader_config config;
    dlfs_device **devices;
    struct member *members;        /* [member_count] */
    _Atomic uint64_t lost_members; /* as bits */
    dlfs_extent *extents;
    uint64_t *extent_starts;        /* [extent_count + 1] first dataset chunk of each extent */
    const dlfs_location *locations; /* [sample_count] as the directory stores them */
    uint64_t sample_count;
    uint64_t data_bytes;
    uint64_t chunk_count;
    uint32_t chunk_shift; /* log2 of chunk_bytes */
    bool dataset_fits;    /* the arena has room for the whole dataset: chunks stay once read */

    pthread_mutex_t lock;
    pthread_cond_t released; /* a slot became free or idle */
    uint8_t *arena;
    size_t arena_bytes;
    int arena_descriptor; /* of its memory file, if it is shared with other processes; else -1 */
    uint64_t resident_offset;         /* of resident_slots in the arena, behind the slots */
    _Atomic uint32_t *resident_slots; /* [chunk_count] slot + 1 of each resident chunk, which other
                                         processes look up; NULL if chunks are not resident */
    bool prefaulted;                  /* a stream has touched the arena's memory, or is doing so */
    struct slot *slots;               /* [slot_count] */
    uint32_t slot_count;
    struct slot_list free_slots;
    struct slot_list idle_slots; /* CHUNK, not cached, without references */
    struct cache cache;
    uint32_t *chunk_slots; /* [chunk_count] slot + 1 of a chunk that is LOADING or CHUNK, else 0 */
    struct fetch *idle_fetches;
    struct fetch *draining_fetches; /* idle, but a device may still write for reads that were
                                       abandoned */
    struct batch *idle_batches;
    size_t idle_batches_bytes;           /* of their arrays */
    size_t idle_plans_bytes;             /* of the plans of idle and draining fetches */
    struct private_memory *idle_private; /* kept for the next batch */
    size_t idle_private_bytes;
    uint64_t references; /* the owner's and one for each batch; the last one frees the reader */
    uint64_t fetches_in_use;
    uint64_t open_streams;
    dlfs_stream *streams; /* list of the open ones */
    dlfs_reader_stats stats;
    dlfs_member_stats *member_stats; /* [member_count] */
    _Atomic uint64_t copy_ns;
};

/* ---- locations and slots --------------------------------------------------------------------- */

/* Where a sample lies in the data space, decoded and checked. */
struct location {
    uint64_t address;
    uint64_t length;
    uint64_t chunk; /* of its first byte */
    uint32_t crc32c;
};

/* Decodes the location of a sample. Returns false if it is outside the dataset's data. */
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

/* Returns true if a sample lies in one chunk. */
static inline bool location_in_one_chunk(const dlfs_reader *reader, const struct location *location)
{
    return (location->address + location->length - 1) >> reader->chunk_shift == location->chunk;
}

/* Returns the first byte of a slot. */
static inline uint8_t *slot_memory(const dlfs_reader *reader, uint32_t slot)
{
    return reader->arena + ((size_t)slot << reader->chunk_shift);
}

/* Returns the slot that an offset of the arena lies in. */
static inline uint32_t slot_of(const dlfs_reader *reader, uint64_t arena_offset)
{
    return (uint32_t)(arena_offset >> reader->chunk_shift);
}

/* ---- reader/private_memory.c ----------------------------------------------------------------- */

/*
 * Allocates at least one byte, aligned for every device, with one reference. Charges the share,
 * unless it is NULL. Returns DLFS_E_LIMIT if the share's budget is exceeded, or -ENOMEM.
 */
int private_memory_take(dlfs_reader *reader, size_t bytes, struct dlfs_share *share,
                        struct private_memory **out);
/* Gives up a reference. */
void private_memory_release(struct private_memory *memory);
/* Frees the idle ones. */
void private_memory_free_all(dlfs_reader *reader);

/* ---- reader/batch.c -------------------------------------------------------------------------- */

#define BATCH_BYTES_PER_SAMPLE (2 * sizeof(int64_t) + sizeof(uint64_t)) /* of its arrays */
/* Returns the memory of a batch's arrays in bytes. */
size_t batch_bytes(const struct batch *batch);
/* Lays out the arrays for so many samples. Their content is lost. */
int batch_reserve(struct batch *batch, uint64_t count);
void batch_free(struct batch *batch);
/* Takes an idle batch or a new one, with room for so many samples; NULL without memory. */
struct batch *batch_take(dlfs_reader *reader, uint64_t count);
/* Adds the failure of a sample to a batch. */
int batch_fail(struct batch *batch, const dlfs_failure *failure);
/* Releases a batch's samples, and keeps the batch for the next read. */
void batch_recycle(struct batch *batch);

/* ---- reader/reader.c ------------------------------------------------------------------------- */

/* Gives up a reference to the reader and the lock. The last reference frees the reader. */
void reader_unlock_release(dlfs_reader *reader);
/* Takes an idle fetch or a new one. */
int reader_take_fetch(dlfs_reader *reader, struct fetch **out);
/* Adds the counters of a fetch to the reader's. The lock is held. */
void reader_fold_stats(dlfs_reader *reader, struct fetch *fetch);
/* Returns a fetch to the idle ones. */
void reader_return_fetch(dlfs_reader *reader, struct fetch *fetch);
/* Collects completions of abandoned reads for fetches that no thread uses. */
void reader_drain_fetches(dlfs_reader *reader);
/* Describes the failure of a sample: the member and the offset of its first byte, or of the byte at
 * bad_address if that lies in it. */
dlfs_failure reader_failure(const dlfs_reader *reader, uint64_t index, int code, uint32_t crc_got,
                            uint64_t bad_address);
/*
 * Verifies every sample that lies completely in a span. *bad gets those that fail, for the caller
 * to free, or NULL. A negative code means that the check was not possible.
 */
int reader_verify_span(const dlfs_reader *reader, const struct span *span,
                       struct bad_samples **bad);

/* ---- reader/read_batch.c, reader/read_sample.c ----------------------------------------------- */

/* Bound on the private memory of a batch. */
struct read_limit {
    uint64_t private_bytes_max;
    struct dlfs_share *share; /* the budget to charge, or NULL */
};

/* How long a read polls before its thread sleeps, and the callback that announces the sleep. */
struct busy_wait {
    uint64_t until_ns;                /* of the monotonic clock; 0: does not poll */
    void (*on_sleep)(void *argument); /* or NULL */
    void *argument;
};

/* How a batch is read. */
struct read_terms {
    struct read_limit limit;  /* beyond it the read fails with DLFS_E_LIMIT */
    uint64_t deadline_ns;     /* of the monotonic clock; 0: set by the reader's timeout_ms */
    const _Atomic bool *stop; /* the read ends soon after this is set; or NULL */
    uint32_t redirect_rounds; /* carried from one attempt to the next */
    bool private_only;        /* as dlfs_reader_read_apart: uses no slots of the arena */
    struct busy_wait busy_wait;
};
#define READ_TERMS_PLAIN ((struct read_terms){.limit = {.private_bytes_max = UINT64_MAX}})
/* Reads samples as one batch. */
int reader_read(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                const struct read_terms *terms, dlfs_batch **out);
/* Copies one sample as dlfs_reader_get. Ends soon after *stop is set. Fills in *failure if the
 * sample itself cannot be read. */
int64_t reader_get(dlfs_reader *reader, uint64_t index, void *buffer, uint64_t buffer_bytes,
                   uint32_t flags, const _Atomic bool *stop, dlfs_failure *failure);

#endif
