/* Streams: the samples of an epoch, read ahead in order. The conventions are those of dlfs.h. */
#ifndef DLFS_PUBLIC_STREAM_H
#define DLFS_PUBLIC_STREAM_H

#include <dlfs/reader.h>
#include <dlfs/sequence.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_PLAN_AUTO 0u
/* Read each sample into its batch; neighbours within the look-ahead are merged into one request. */
#define DLFS_PLAN_DIRECT 1u
/* Read whole chunks, and cache each at least until its last sample is used. */
#define DLFS_PLAN_CHUNKS 2u
/* Read whole chunks, and copy the samples out of them that are needed soonest. */
#define DLFS_PLAN_CHUNK_COPY 3u

typedef struct dlfs_stream_config {
    const dlfs_sequence *sequence; /* must outlive the stream */
    uint64_t first;                /* global position of this consumer's first sample */
    uint64_t
        stride;     /* distance between the positions of consecutive samples: the number of ranks */
    uint64_t count; /* samples that this consumer takes */
    /*
     * Set when several consumers share the batches of a rank: after every `group` samples, the next
     * group begins group_stride positions after the beginning of the last one. 0: one group of all
     * samples.
     */
    uint64_t group;
    uint64_t group_stride; /* > (group - 1) * stride; unused if group is 0 */
    uint32_t plan;         /* DLFS_PLAN_* */
    uint32_t reserved;
} dlfs_stream_config;

typedef struct dlfs_stream dlfs_stream;
/* Creates a stream, with one thread that reads ahead within the reader's memory budget. */
DLFS_API int dlfs_stream_create(dlfs_reader *reader, const dlfs_stream_config *config,
                                dlfs_stream **out);
/*
 * Returns the next count samples of the stream, or fewer at its end. Waits for them up to
 * timeout_ms (-1: without limit; the batch is completed or fails within the reader's timeout).
 * Errors: -EAGAIN (the time has passed; call again), DLFS_E_END (no samples are left).
 */
DLFS_API int dlfs_stream_next(dlfs_stream *stream, uint64_t count, int timeout_ms,
                              dlfs_batch **out);
/* Ends the thread and frees the data that was read ahead; batches already returned stay valid. */
DLFS_API void dlfs_stream_destroy(dlfs_stream *stream);
/* Returns the plan in use (DLFS_PLAN_*). */
DLFS_API uint32_t dlfs_stream_plan(const dlfs_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
