/*
 * Streams: an epoch's samples read ahead, in order. The conventions are those of dlfs.h.
 */
#ifndef DLFS_PUBLIC_STREAM_H
#define DLFS_PUBLIC_STREAM_H

#include <dlfs/reader.h>
#include <dlfs/sequence.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_PLAN_AUTO 0u
/* Each sample read where it lands, neighbours in the look-ahead merged. */
#define DLFS_PLAN_DIRECT 1u
#define DLFS_PLAN_CHUNKS 2u  /* whole chunks, kept until their last sample is used, or longer */
#define DLFS_PLAN_HARVEST 3u /* whole chunks, of which the samples needed soonest are kept */

typedef struct dlfs_stream_config {
    const dlfs_sequence *sequence; /* borrowed until dlfs_stream_destroy */
    uint64_t first;                /* global position of this consumer's first sample */
    uint64_t stride;               /* ranks: the next sample is `stride` positions on */
    uint64_t count;                /* samples this consumer will take */
    /* Consumers that share a rank's batches: behind `group` samples, the next one lies group_stride
     * positions behind the first of them. 0: all samples are one group. */
    uint64_t group;
    uint64_t group_stride; /* > (group - 1) * stride; unused if group is 0 */
    uint32_t plan;         /* DLFS_PLAN_* */
    uint32_t reserved;
} dlfs_stream_config;

typedef struct dlfs_stream dlfs_stream;
/* Starts one thread that reads ahead within the reader's memory budget. */
DLFS_API int dlfs_stream_create(dlfs_reader *reader, const dlfs_stream_config *config,
                                dlfs_stream **out);
/*
 * The next count samples of the stream (fewer at its end), waiting for them up to timeout_ms (-1:
 * as long as it takes; the batch becomes ready or fails within the reader's timeout). -EAGAIN
 * when the time has passed: call again. DLFS_E_END when there are none left.
 */
DLFS_API int dlfs_stream_next(dlfs_stream *stream, uint64_t count, int timeout_ms,
                              dlfs_batch **out);
/* Ends the thread and gives back what was read ahead; batches given out stay valid. */
DLFS_API void dlfs_stream_destroy(dlfs_stream *stream);
/* The plan in use (DLFS_PLAN_*). */
DLFS_API uint32_t dlfs_stream_plan(const dlfs_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
