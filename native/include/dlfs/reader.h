/*
 * Reading samples by index, as batches, through a cache. The conventions are those of dlfs.h.
 */
#ifndef DLFS_PUBLIC_READER_H
#define DLFS_PUBLIC_READER_H

#include <dlfs/device.h>
#include <dlfs/directory.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A run of chunks of the volume's chunk space that holds a run of the dataset's chunks. */
typedef struct dlfs_extent {
    uint64_t first_chunk; /* volume chunk number; copy c of it lies on member (number + c) %
                             member_count, in row c * band_rows + number / member_count */
    uint64_t chunk_count;
} dlfs_extent;

#define DLFS_READER_SHARED 1u /* the sample memory can be mapped by other processes: channel.h */

typedef struct dlfs_reader_config {
    dlfs_device *const *devices; /* [member_count], in member order; the array is copied, the
                                    devices are borrowed until dlfs_reader_destroy. With replicas >
                                    1, NULL for a member that cannot be had */
    uint32_t member_count;
    uint32_t chunk_bytes;
    uint32_t block_bytes;       /* the volume's, a multiple of every device's */
    uint32_t depth;             /* operations in flight per member and thread */
    uint64_t data_offset_bytes; /* of row 0 on each member */
    const dlfs_extent *extents; /* copied */
    uint64_t extent_count;
    const dlfs_directory *directory; /* borrowed until dlfs_reader_destroy */
    uint64_t memory_bytes; /* budget of the sample memory: cached, read ahead, lent to batches */
    uint64_t gap_bytes;    /* two samples nearer than this are read by one request */
    uint32_t retry_count;  /* of a failed or short read, before the sample is reported */
    uint32_t timeout_ms;   /* for one read or batch of a stream, all retries and copies included;
                              4 s more for each MiB that comes bit by bit; then DLFS_E_TIMEOUT */
    uint32_t flags;        /* DLFS_READER_* */
    uint32_t replicas;     /* copies of each chunk, 1..DLFS_REPLICAS_MAX, at most member_count */
    uint64_t band_rows;    /* rows of each copy's band; of no use with one copy */
} dlfs_reader_config;

/*
 * Reads the samples of one dataset. Any threads at once. With replicas, what one member does not
 * give, or gives with a wrong checksum, is read from another; a member that is lost (DLFS_E_LOST,
 * DLFS_E_TIMEOUT, a sixteenth of timeout_ms without an answer, many failures in a row) is left
 * alone but for a probe now and then. Reads of one without another copy that left a read without an
 * answer for all its time end at once with DLFS_E_TIMEOUT until a probe is due.
 */
typedef struct dlfs_reader dlfs_reader;
/* Errors: -EINVAL, -ENOMEM, DLFS_E_LIMIT. Maps no memory until the first read. */
DLFS_API int dlfs_reader_create(const dlfs_reader_config *config, dlfs_reader **out);
/*
 * Closes the reader's queue pairs and frees it; memory that batches still use goes with the last of
 * them. -EBUSY, and nothing happens, while a stream or a call is under way.
 */
DLFS_API int dlfs_reader_destroy(dlfs_reader *reader);

/* A sample that could not be given, and why. */
typedef struct dlfs_failure {
    uint64_t position; /* in the batch */
    uint64_t index;
    int32_t code;
    uint32_t member;
    uint64_t offset_bytes; /* on the member */
    uint32_t crc_expected;
    uint32_t crc_got;
} dlfs_failure;

/*
 * The samples of one read. Sample i is base[offsets[i]..offsets[i]+lengths[i]); those that failed
 * have length -1. The bytes stay where they are until dlfs_batch_release. Read-only for the caller.
 */
typedef struct dlfs_batch {
    const uint8_t *base;
    uint64_t base_bytes;
    uint64_t count;
    const int64_t *offsets;  /* in one piece with what follows: */
    const int64_t *lengths;  /* offsets + count */
    const uint64_t *indices; /* lengths + count */
    const dlfs_failure *failures;
    uint64_t failure_count;
    uint64_t lost_members; /* as dlfs_reader_lost_members, when the batch was given */
} dlfs_batch;

/*
 * Reads samples by index, verified, as one batch: sorted by location, neighbours merged, the
 * device's queue full. Blocks. Failed samples are listed, not an error of the call. Errors: -EINVAL
 * (an index out of range), -ENOMEM, errors of the device as a whole.
 */
DLFS_API int dlfs_reader_read(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                              dlfs_batch **out);
/* The same, into memory of the batch's own: nothing is kept, and the budget is left to others. */
DLFS_API int dlfs_reader_read_apart(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                                    dlfs_batch **out);
/*
 * The same, but looks for what the devices answer for awake_us before it sleeps, and calls
 * sleeps(argument) before it does, once: for those whose other work is to go on meanwhile.
 */
DLFS_API int dlfs_reader_read_awake(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                                    uint32_t awake_us, void (*sleeps)(void *argument),
                                    void *argument, dlfs_batch **out);
/*
 * Gives a batch back, once: its memory may then be read into again. Any thread, at any time: also
 * while others use the reader or the stream that it came from, and after these were destroyed.
 * NULL: nothing.
 */
DLFS_API void dlfs_batch_release(dlfs_batch *batch);
/*
 * Copies sample i to destination + offsets[i], for every sample that did not fail, into memory of
 * destination_bytes. DLFS_E_LIMIT when one would not fit; nothing has been copied then.
 */
DLFS_API int dlfs_batch_gather(const dlfs_batch *batch, void *destination,
                               uint64_t destination_bytes, const uint64_t *offsets);

#define DLFS_GET_KEPT 1u /* only what is in memory: never waits for a device */
/*
 * Copies one sample, verified, into buffer. Returns its length. Errors: -ERANGE when it is longer
 * than buffer_bytes, -EAGAIN with DLFS_GET_KEPT when it is not in memory, -EINVAL, or the code of
 * the failure, which a read of the same sample tells in full.
 */
DLFS_API int64_t dlfs_reader_get(dlfs_reader *reader, uint64_t index, void *buffer,
                                 uint64_t buffer_bytes, uint32_t flags);

typedef struct dlfs_reader_stats {
    uint64_t samples; /* given out */
    uint64_t sample_bytes;
    uint64_t cache_hits; /* samples that were in memory already */
    uint64_t reads;      /* requests to devices */
    uint64_t read_bytes;
    uint64_t checksum_errors;
    uint64_t read_errors;
    uint64_t retries;
    uint64_t private_batches; /* batches with memory of their own: the budget was lent out */
    uint64_t memory_bytes;    /* mapped for the budget now */
    uint64_t wait_ns;         /* time that consumers waited for streams */
    uint64_t failovers;       /* requests for another copy than a chunk's first */
    /* Where the time of those who read goes, callers of dlfs_reader_read and threads of streams: */
    uint64_t plan_ns;   /* finding samples in memory, sorting and merging the others */
    uint64_t device_ns; /* waiting for devices, and taking in what they send */
    uint64_t verify_ns; /* checking what came, and with DLFS_PLAN_HARVEST copying it */
    uint64_t rest_ns;   /* streams only: nothing to do until the consumer takes or releases more */
    uint64_t copy_ns;   /* copying samples out of batches (dlfs_batch_gather) */
} dlfs_reader_stats;
DLFS_API void dlfs_reader_get_stats(dlfs_reader *reader, dlfs_reader_stats *stats);

#define DLFS_LATENCY_BUCKETS 24
/* Of one member, since the reader was made. */
typedef struct dlfs_member_stats {
    uint64_t reads; /* requests that ended */
    uint64_t read_bytes;
    uint64_t errors;
    uint64_t queue_pairs; /* of this process to the member's device now, those at rest included */
    uint64_t queue_pairs_max;               /* ... that it may have */
    uint64_t latency_ns;                    /* of all of them, from their submission to their end */
    uint64_t latency[DLFS_LATENCY_BUCKETS]; /* [k]: below 2^(k+1) us, and no less than the one
                                               before; the last: all that took longer */
} dlfs_member_stats;
/* -EINVAL when there is no such member. Any threads at once. */
DLFS_API int dlfs_reader_get_member_stats(dlfs_reader *reader, uint32_t member,
                                          dlfs_member_stats *stats);

/* The members that are lost now, as bits by number; those without a device are not among them. */
DLFS_API uint64_t dlfs_reader_lost_members(const dlfs_reader *reader);
/* Why a member was lost, the last time: a code; 0 when it never was. -EINVAL: no such member. */
DLFS_API int dlfs_reader_member_code(const dlfs_reader *reader, uint32_t member);

#ifdef __cplusplus
}
#endif

#endif
