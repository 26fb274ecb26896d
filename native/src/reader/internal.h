/*
 * The inside of the reader, for the files of reader/, arena/ and stream/, which share its lock.
 * They share the structures of reader/state.h too, and call only the layers below them; from the
 * bottom:
 *
 * - arena/cache_map.c, fill.c, shares.c, slots.c, arena.c, cache.c: the sample memory, equal slots
 *   of a chunk with counted references, which readers share, and which samples and chunks stay in
 *   it from one epoch to the next;
 * - arena/private_memory.c, share.c: memory of batches that own theirs, charged to a budget;
 * - reader/chunk_map.c: where chunks and their copies lie;
 * - reader/members.c: which members are lost;
 * - reader/plan.c, span.c, fetch_queues.c, requests.c, fetch.c: spans of the data space read
 * through the members' queue pairs (reader/fetch.h);
 * - reader/reader.c, batch.c: the reader itself, its idle fetches and batches;
 * - reader/read_place.c, read_batch.c, read_sample.c, read_part.c: reads on demand;
 * - stream/: an epoch read ahead.
 *
 * Threads: any thread may read. One mutex guards the arena and the lists of its readers. It is
 * taken once or twice a batch, never once a sample, and never held over I/O or a checksum. A fetch
 * belongs to one thread at a time.
 */
#ifndef DLFS_READER_INTERNAL_H
#define DLFS_READER_INTERNAL_H

#include <stdbool.h>

#include "arena/cache.h"
#include "arena/private_memory.h"
#include "directory/directory.h"
#include "reader/fetch.h"
#include "reader/reader.h"
#include "reader/state.h"

/* ---- reader/batch.c -------------------------------------------------------------------------- */

/* Takes an idle batch or a new one, with room for this many samples; NULL without memory. */
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
/* Waits until a request of a read has ended, or the read is stopped. */
void reader_wait(struct fetch *fetch);
/* Returns the CRC32Cs of a sample's parts, by the number of their chunk in the data space; NULL if
 * it is verified as a whole. */
const uint32_t *reader_part_checksums(const dlfs_reader *reader, const struct location *location);
/* Returns the address of the first damaged part of a sample that is in memory, and its CRC32C;
 * UINT64_MAX if there is none, or the sample has no parts. */
uint64_t reader_bad_part(const dlfs_reader *reader, const struct location *location,
                         const uint8_t *sample, uint32_t *crc_got);
/* Misses that were verified already, by address. */
struct known_misses {
    const struct miss *first;
    uint64_t count;
};

/*
 * Verifies every sample that lies completely in a span, but for those that are known to be sound
 * (or NULL). *bad gets those that fail, for the caller to free, or NULL. A negative code means that
 * the check was not possible.
 */
int reader_verify_span(const dlfs_reader *reader, const struct span *span,
                       const struct known_misses *sound, struct bad_samples **bad);

/* ---- reader/read_batch.c, reader/read_sample.c ----------------------------------------------- */

#define READ_TERMS_PLAIN ((struct read_terms){.limit = {.private_bytes_max = UINT64_MAX}})

#endif
