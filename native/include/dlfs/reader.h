/*
 * Reading samples by index, as batches, through a cache in memory. The conventions are those of
 * dlfs.h.
 */
#ifndef DLFS_PUBLIC_READER_H
#define DLFS_PUBLIC_READER_H

#include <dlfs/arena.h>
#include <dlfs/device.h>
#include <dlfs/directory.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A run of consecutive chunks of the volume's chunk space; the runs of a dataset hold its chunks in
 * order.
 */
typedef struct dlfs_extent {
    uint64_t first_chunk; /* volume chunk number */
    uint64_t chunk_count;
} dlfs_extent;

/*
 * Consecutive members that share their own range of the volume's chunks. Copy c of the group's
 * chunk n lies on its member (n + c) % member_count, in row c * band_rows + n / member_count.
 */
typedef struct dlfs_chunk_group {
    uint64_t first_chunk; /* number of the group's chunk 0 in the volume's chunk space */
    uint64_t band_rows;   /* rows of the band that holds one copy of each chunk */
    uint32_t first_member;
    uint32_t member_count;
} dlfs_chunk_group;

#define DLFS_READER_PARTS \
    1u /* the directory has parts of samples: chunks are not kept, even if all of them fit */

typedef struct dlfs_reader_config {
    dlfs_device *const *devices; /* [member_count], in member order. The array is copied; the
                                    devices must outlive the reader. With replicas > 1, NULL stands
                                    for a member that is not available */
    uint32_t member_count;
    uint32_t chunk_bytes;
    uint32_t
        block_bytes; /* block size of the volume, a multiple of the block size of every device */
    uint32_t depth;  /* operations in flight for each member and thread */
    uint64_t data_offset_bytes; /* offset of row 0 on each member */
    const dlfs_extent *extents; /* copied */
    uint64_t extent_count;
    const dlfs_directory *directory; /* must outlive the reader */
    dlfs_arena *arena;     /* sample memory that it shares with other readers; NULL: its own */
    uint64_t memory_bytes; /* of an arena of its own: cached, read ahead and pinned by batches */
    uint64_t gap_bytes;    /* two samples closer than this are read by one request */
    uint32_t retry_count; /* attempts after a failed or short read, before the sample is reported as
                             failed */
    uint32_t timeout_ms;  /* upper bound of one read or one batch of a stream, with all retries and
                             copies; then DLFS_E_TIMEOUT. Each MiB that has arrived adds 4 s */
    uint32_t flags;       /* DLFS_READER_* */
    uint32_t replicas;    /* copies of each chunk, 1..DLFS_REPLICAS_MAX, at most member_count */
    uint64_t band_rows; /* rows of the band that holds one copy of each chunk; unused with one copy,
                           or with groups */
    const dlfs_chunk_group *groups; /* [group_count] in order of their chunks, copied */
    uint32_t group_count;           /* 0: all members are one group; at most DLFS_GROUPS_MAX */
    uint32_t reserved;
} dlfs_reader_config;

/*
 * Reads the samples of one dataset. Any threads at once.
 *
 * With replicas, a sample that one member does not return, or returns with a wrong checksum, is
 * read from another member. A member counts as lost after DLFS_E_LOST, DLFS_E_TIMEOUT, a sixteenth
 * of timeout_ms without an answer, or many failures in a row. The reader then avoids it except for
 * an occasional probe. A member that left a read unanswered to its end, through all retries, or
 * that could not be connected in half of timeout_ms (an eighth with replicas), is hung: a thread of
 * the reader asks it. Until it answers, reads of samples that no other member has
 * end at once with DLFS_E_TIMEOUT.
 */
typedef struct dlfs_reader dlfs_reader;
/*
 * Creates a reader, which maps no memory until its first read. Errors: -EINVAL, -ENOMEM,
 * DLFS_E_LIMIT.
 */
DLFS_API int dlfs_reader_create(const dlfs_reader_config *config, dlfs_reader **out);
/*
 * Closes the reader's queue pairs and destroys it. Memory that batches still use is freed with the
 * last of them, and memory of reads that hang by a thread when these have ended. Returns -EBUSY,
 * and does nothing, while a stream or a call is under way.
 */
DLFS_API int dlfs_reader_destroy(dlfs_reader *reader);

/* A sample that could not be read, and the reason. */
typedef struct dlfs_failure {
    uint64_t position; /* position of the sample in the batch */
    uint64_t index;
    int32_t code;
    uint32_t member;
    uint64_t offset_bytes; /* on the member: of the sample, its bad part, or what is unreadable */
    uint32_t crc_expected; /* of the sample, or its bad part */
    uint32_t crc_got;
    uint64_t part_offset_bytes; /* of a damaged sample larger than a chunk: its bad part */
    uint64_t part_length_bytes; /* 0: the failure is of the whole sample */
} dlfs_failure;

/*
 * The samples of one read. Sample i is base[offsets[i]..offsets[i]+lengths[i]); a sample that
 * failed has length -1. The bytes stay at their address until dlfs_batch_release. The caller may
 * only read them.
 */
typedef struct dlfs_batch {
    const uint8_t *base;
    uint64_t base_bytes;
    uint64_t count;
    const int64_t *offsets;  /* [count]; lengths and indices follow in the same allocation */
    const int64_t *lengths;  /* [count], at offsets + count */
    const uint64_t *indices; /* [count], at lengths + count */
    const dlfs_failure *failures;
    uint64_t failure_count;
    uint64_t lost_members; /* the result of dlfs_reader_lost_members when the batch was completed */
} dlfs_batch;

/*
 * Returns the mapping of the sample memory, in which the samples of most batches lie; maps it if
 * need be. It stays mapped until the reader and its last batch are gone. Any threads at once.
 * Errors: -EINVAL, -ENOMEM, -errno.
 */
DLFS_API int dlfs_reader_memory(dlfs_reader *reader, const void **base, uint64_t *bytes);
/* Returns the bytes of the sample memory that the reader may hold at present. Any threads at once.
 */
DLFS_API uint64_t dlfs_reader_share_bytes(const dlfs_reader *reader);

/*
 * Reads samples by index, verifies them, and returns them as one batch. Sorts the samples by
 * location, merges neighbours into one request, and keeps the devices' queues full. Blocks. Failed
 * samples are listed in the batch and are no error of the call. Errors: -EINVAL (an index is out of
 * range), -ENOMEM, errors of a device as a whole.
 */
DLFS_API int dlfs_reader_read(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                              dlfs_batch **out);
/*
 * Reads like dlfs_reader_read, but polls the devices for poll_us before the thread sleeps. It
 * calls sleeps(argument) once, before it sleeps or connects to a device, so that the caller can
 * pass other work to another thread.
 */
DLFS_API int dlfs_reader_read_polling(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                                      uint32_t poll_us, void (*sleeps)(void *argument),
                                      void *argument, dlfs_batch **out);
/* A read of one sample that was begun and not finished yet. */
typedef struct dlfs_pending_read dlfs_pending_read;
/*
 * Begins to read a sample as dlfs_reader_read: the devices get the requests, and the call does not
 * wait for them. Errors: those of dlfs_reader_read; -EAGAIN, a device is not connected or has few
 * queue pairs, of which a read holds one until it is finished or given up.
 */
DLFS_API int dlfs_reader_begin(dlfs_reader *reader, uint64_t index, dlfs_pending_read **out);
/*
 * Waits for a read that was begun, as dlfs_reader_read_polling, and frees it. Any thread, once,
 * before the reader is destroyed.
 */
DLFS_API int dlfs_pending_read_finish(dlfs_pending_read *pending, uint32_t poll_us,
                                      void (*sleeps)(void *argument), void *argument,
                                      dlfs_batch **out);
/* Gives up a read that was begun, without waiting, instead of finishing it. NULL: does nothing. */
DLFS_API void dlfs_pending_read_cancel(dlfs_pending_read *pending);
/*
 * Releases a batch, once; the reader may then reuse its memory. Any thread, at any time: also while
 * other threads use the reader or the stream that the batch came from, and after these were
 * destroyed. Does nothing with NULL, and in a forked child of the process that read the batch.
 */
DLFS_API void dlfs_batch_release(dlfs_batch *batch);
/*
 * Copies every sample i that did not fail to destination + offsets[i], into memory of
 * destination_bytes. DLFS_E_LIMIT: a sample does not fit; nothing has been copied.
 */
DLFS_API int dlfs_batch_gather(const dlfs_batch *batch, void *destination,
                               uint64_t destination_bytes, const uint64_t *offsets);

/* Return the sample only if it is in memory: the call never waits for a device. */
#define DLFS_GET_CACHED 1u
/*
 * Copies one sample, verified, into buffer and returns its length. Errors: -ERANGE (the sample is
 * longer than buffer_bytes), -EAGAIN (the sample is not there as the flags require), -EINVAL, or
 * the code of the failure, which dlfs_reader_read describes in full.
 */
DLFS_API int64_t dlfs_reader_get(dlfs_reader *reader, uint64_t index, void *buffer,
                                 uint64_t buffer_bytes, uint32_t flags);

typedef struct dlfs_reader_stats {
    uint64_t samples; /* returned to callers, in batches and one at a time */
    uint64_t sample_bytes;
    uint64_t cache_hits; /* samples that were already in memory */
    uint64_t reads;      /* requests sent to devices */
    uint64_t read_bytes;
    uint64_t checksum_errors;
    uint64_t read_errors;
    uint64_t retries;
    uint64_t private_batches; /* batches with memory of their own, because batches had pinned the
                                 whole budget */
    uint64_t held_bytes;      /* memory that it holds of the arena at present, in whole slots */
    uint64_t wait_ns;         /* time that consumers waited for streams */
    uint64_t failovers;       /* requests for a copy of a chunk other than its first */
    /*
     * Time of the reading threads (callers of dlfs_reader_read and threads of streams), by
     * activity:
     */
    uint64_t plan_ns;   /* looking samples up in memory, sorting and merging the others */
    uint64_t device_ns; /* waiting for devices and processing their completions */
    uint64_t verify_ns; /* verifying checksums and, with DLFS_PLAN_CHUNK_COPY, copying samples */
    uint64_t rest_ns;   /* streams only: idle until the consumer takes or releases batches */
    uint64_t copy_ns;   /* copying samples out of batches (dlfs_batch_gather) */
} dlfs_reader_stats;
DLFS_API void dlfs_reader_get_stats(dlfs_reader *reader, dlfs_reader_stats *stats);

#define DLFS_LATENCY_BUCKETS 24
/* Statistics of one member since the reader was created. */
typedef struct dlfs_member_stats {
    uint64_t reads; /* requests that have ended, with success or not */
    uint64_t read_bytes;
    uint64_t errors;
    uint64_t queue_pairs;     /* queue pairs that this process has to the member's device, including
                                 idle ones */
    uint64_t queue_pairs_max; /* most queue pairs that it may have */
    uint64_t latency_ns;      /* sum over all requests of the time from submission to completion */
    uint64_t latency[DLFS_LATENCY_BUCKETS]; /* [k]: requests of less than 2^(k+1) us that do not
                                               belong to an earlier bucket; the last bucket has all
                                               longer ones */
} dlfs_member_stats;
/* Fills the statistics of one member. -EINVAL: there is no such member. Any threads at once. */
DLFS_API int dlfs_reader_get_member_stats(dlfs_reader *reader, uint32_t member,
                                          dlfs_member_stats *stats);

/*
 * Returns the members that are lost at present, bit k for member k. Members without a device are
 * not included.
 */
DLFS_API uint64_t dlfs_reader_lost_members(const dlfs_reader *reader);
/*
 * Returns the code of the last loss of a member; 0 if it never was lost. -EINVAL: no such member.
 */
DLFS_API int dlfs_reader_member_code(const dlfs_reader *reader, uint32_t member);

#ifdef __cplusplus
}
#endif

#endif
