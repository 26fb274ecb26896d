/*
 * Plans the entries of a stream and takes in the spans that were read, by the plan that
 * stream/plan_choice.c chose.
 */
#include "stream/state.h"

/* Plans an entry by a plan of chunks. Returns false if the entry has to wait. */
static bool plan_one(dlfs_stream *stream, uint64_t position)
{
    struct location location;
    enum entry_plan planned = entry_plan_alone(stream, position, &location);
    if (planned != ENTRY_NEEDS_CHUNK) {
        return planned == ENTRY_PLANNED;
    }
    return stream->plan == DLFS_PLAN_CHUNKS ? chunks_plan(stream, position, &location)
                                            : chunk_copy_plan(stream, position, &location);
}

bool lookahead_plan(dlfs_stream *stream)
{
    if (stream->planned < stream->head) {
        stream->planned = stream->head;
    }
    if (stream->plan == DLFS_PLAN_CHUNK_COPY) {
        chunk_copy_release_passed(stream);
    }
    if (stream->planned == stream->filled) {
        return false;
    }
    if (stream->plan == DLFS_PLAN_DIRECT || stream_is_filling(stream)) {
        return direct_plan(stream);
    }
    uint64_t before = stream->planned;
    uint64_t end = before + FILL_MAX < stream->filled ? before + FILL_MAX : stream->filled;
    while (stream->planned < end && plan_one(stream, stream->planned)) {
        stream->planned++;
    }
    return stream->planned > before;
}

/* Prefetches the entries of the spans of windows that have ended. */
static void prefetch_done(const dlfs_stream *stream)
{
    const struct fetch *fetch = stream->fetch;
    for (uint32_t at = fetch->done.first; at != SPAN_NONE; at = fetch->spans[at].next) {
        const struct span *span = &fetch->spans[at];
        if (span->kind == KIND_WINDOW || span->kind == KIND_TO_CACHE) {
            __builtin_prefetch(&stream->ring[span->tag]);
        }
    }
}

/* Takes in spans of windows that were verified: under the lock once for all of them. */
static void finish_verified(dlfs_stream *stream, struct span_list *verified)
{
    struct span *span;
    if (verified->first == SPAN_NONE) {
        return;
    }
    pthread_mutex_lock(&stream->reader->arena->lock);
    while ((span = span_pop(stream->fetch, verified)) != NULL) {
        direct_finish(stream, span);
        span_recycle(stream->fetch, span);
    }
    pthread_mutex_unlock(&stream->reader->arena->lock);
}

void lookahead_finish(dlfs_stream *stream)
{
    struct span_list verified = {SPAN_NONE, SPAN_NONE};
    struct span *span;
    prefetch_done(stream);
    while ((span = fetch_take_done(stream->fetch)) != NULL) {
        bool again = false;
        switch ((enum span_kind)span->kind) {
        case KIND_WINDOW:
        case KIND_TO_CACHE:
            direct_verify(stream, span);
            span_push(stream->fetch, &verified, span_number(stream->fetch, span));
            continue;
        case KIND_ALONE:
            finish_alone(stream, span, &again);
            break;
        case KIND_CHUNK:
            chunks_finish(stream, span);
            break;
        case KIND_COPY:
            chunk_copy_finish(stream, span);
            break;
        }
        if (!again) {
            span_recycle(stream->fetch, span);
        }
    }
    finish_verified(stream, &verified);
}
