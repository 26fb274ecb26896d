/*
 * The reader for other parts of the library: reads samples of one dataset from the members' devices
 * into memory. reader/internal.h describes its layers, its lock and its threads; any thread may
 * read.
 */
#ifndef DLFS_READER_H
#define DLFS_READER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "arena/share.h"
#include "dlfs/dlfs.h"
#include "reader/batch.h"
#include "reader/busy_wait.h"

/* ---- reader/batch.c -------------------------------------------------------------------------- */

/*
 * Pins a batch's samples in their slots of the arena, and counts in pins[slot] those that pin a
 * whole slot. Returns the bytes that were not pinned before: whole slots, since a slot with one
 * pinned sample cannot hold other chunks. In slots of resident chunks, which the dataset holds
 * anyway, and in those of cached samples, pins take no memory from others. There they are the bytes
 * of the samples.
 */
uint64_t batch_pin(const dlfs_reader *reader, const dlfs_batch *batch, uint64_t *pins);
/* Unpins a batch's samples. Returns the bytes that are no longer pinned. */
uint64_t batch_unpin(const dlfs_reader *reader, const dlfs_batch *batch, uint64_t *pins);
/*
 * Copies the only sample of a batch into a buffer and releases the batch. Returns the sample's
 * length, its failure, which *failure gets, or -ERANGE.
 */
int64_t batch_take_sample(dlfs_batch *batch, void *buffer, uint64_t buffer_bytes,
                          dlfs_failure *failure);

/* ---- reader/reader.c ------------------------------------------------------------------------- */

/* What a reader reads and the sizes of its memory, which stay the same. */
struct reader_geometry {
    const dlfs_directory *directory;
    uint64_t sample_count;
    uint64_t arena_bytes;
    uint32_t slot_count; /* of the arena */
    uint32_t chunk_bytes;
    uint32_t chunk_shift; /* log2 of chunk_bytes */
};

struct reader_geometry reader_geometry(const dlfs_reader *reader);
/* Returns the slots of the arena that the reader may hold now. Any thread. */
uint32_t reader_slots_max(const dlfs_reader *reader);
/* Counts samples that a client read from memory by itself. Any thread. */
void reader_count_hits(dlfs_reader *reader, uint64_t samples, uint64_t bytes);
/* Describes the failure of a sample: the member and the offset of its first byte, or of the byte at
 * bad_address if that lies in it. With DLFS_E_CHECKSUM that is the first byte of the bad part. */
dlfs_failure reader_failure(const dlfs_reader *reader, uint64_t index, int code, uint32_t crc_got,
                            uint64_t bad_address);

/* ---- reader/span.c --------------------------------------------------------------------------- */

/* Returns the time that a read is given in addition for bytes that have arrived, in nanoseconds. */
uint64_t reader_slow_ns(uint64_t bytes);

/* ---- reader/read_batch.c, reader/read_sample.c ----------------------------------------------- */

/* Bound on the private memory of a batch. */
struct read_limit {
    uint64_t private_bytes_max;
    struct dlfs_share *share; /* the budget to charge, or NULL */
};

/* The bounds and the memory of a batch that is read. */
struct read_terms {
    struct read_limit limit;  /* beyond it the read fails with DLFS_E_LIMIT */
    uint64_t deadline_ns;     /* of the monotonic clock; 0: set by the reader's timeout_ms */
    const _Atomic bool *stop; /* the read ends soon after this is set; or NULL */
    uint32_t redirect_rounds; /* carried from one attempt to the next */
    struct busy_wait busy_wait;
};
/* Reads samples as one batch. */
int reader_read(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                const struct read_terms *terms, dlfs_batch **out);
/* Copies one sample as dlfs_reader_get. Ends soon after *stop is set. Fills in *failure if the
 * sample itself cannot be read. */
int64_t reader_get(dlfs_reader *reader, uint64_t index, void *buffer, uint64_t buffer_bytes,
                   uint32_t flags, const _Atomic bool *stop, dlfs_failure *failure);
/* Reads a part of a sample as dlfs_reader_send_part, or loads it if sink is NULL. Ends soon after
 * *stop is set. */
int reader_read_part(dlfs_reader *reader, const dlfs_part *part, dlfs_part_sink *sink,
                     void *argument, const _Atomic bool *stop, dlfs_failure *failure);
/* Copies pieces to *next, a uint8_t *, and moves it behind them. */
void part_copy(void *next, const struct iovec *pieces, uint32_t piece_count);

#define PLAN_BYTES_PER_SAMPLE ((size_t)104) /* memory of the plan of a read */

#endif
