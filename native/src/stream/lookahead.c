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

/* Prefetches the location of the first sample of the next span. */
static void prefetch_next(const dlfs_stream *stream)
{
    const struct span *next = fetch_peek_done(stream->fetch);
    if (next != NULL && (next->kind == KIND_WINDOW || next->kind == KIND_TO_CACHE)) {
        prefetch_location(stream, stream->ring[next->tag].index);
    }
}

void lookahead_finish(dlfs_stream *stream, struct span *span)
{
    bool again = false;
    prefetch_next(stream);
    switch ((enum span_kind)span->kind) {
    case KIND_ALONE:
        finish_alone(stream, span, &again);
        break;
    case KIND_WINDOW:
    case KIND_TO_CACHE:
        direct_finish(stream, span);
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
