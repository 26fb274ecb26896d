/*
 * Maps the arena's memory before reads need it. The kernel provides and zeroes a page when it is
 * first touched. For a reader whose arena takes the whole dataset that is as much work as reading
 * it, and several times as much on a virtual machine whose host provides memory page by page.
 *
 * Two threads do this, a huge page at a time, and each page is claimed by one of them: the thread
 * of this file, and the stream's thread when it would plan a read into memory that is not mapped.
 * It does not start such a read, because the kernel would map the memory while the read is
 * submitted; and two threads that touch the same huge page each zero one.
 */
#include <sys/mman.h>

#include "platform/thread.h"
#include "stream/state.h"

#define STEP_BYTES ((size_t)2 << 20) /* a huge page, which the arena is aligned to */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Claims the next step. Returns false if none is left. The lock is held. */
static bool take_step(struct prefault *prefault, size_t *at)
{
    if (prefault->claimed >= prefault->end) {
        return false;
    }
    *at = prefault->claimed;
    prefault->claimed += STEP_BYTES;
    return true;
}

/* Maps the pages of a step. Returns false with a kernel older than 5.14, or without memory: then
 * the reads touch the pages. */
static bool map_step(dlfs_stream *stream, size_t at)
{
    size_t left = stream->reader->arena_bytes - at;
    return madvise(stream->reader->arena + at, left < STEP_BYTES ? left : STEP_BYTES,
                   MADV_POPULATE_WRITE) == 0;
}

static void *prefault_thread(void *argument)
{
    dlfs_stream *stream = argument;
    struct prefault *prefault = &stream->prefault;
    pthread_mutex_t *lock = &stream->reader->lock;
    pthread_mutex_lock(lock);
    while (take_step(prefault, &prefault->busy)) {
        pthread_mutex_unlock(lock);
        bool mapped = map_step(stream, prefault->busy);
        pthread_mutex_lock(lock);
        if (!mapped) {
            prefault->claimed = prefault->end; /* the reads touch the rest */
        }
    }
    pthread_mutex_unlock(lock);
    return NULL;
}

void prefault_start(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    struct prefault *prefault = &stream->prefault;
    pthread_mutex_lock(&reader->lock);
    bool first = reader->dataset_fits && stream->plan == DLFS_PLAN_CHUNKS && !reader->prefaulted;
    reader->prefaulted |= first;
    pthread_mutex_unlock(&reader->lock);
    if (!first) {
        return;
    }
    prefault->end = (size_t)reader->chunk_count << reader->chunk_shift;
    prefault->running = thread_start(&prefault->thread, NULL, prefault_thread, stream) == 0;
    if (!prefault->running) {
        prefault->end = 0;
    }
}

void prefault_stop(dlfs_stream *stream)
{
    struct prefault *prefault = &stream->prefault;
    if (!prefault->running) {
        return;
    }
    pthread_mutex_lock(&stream->reader->lock);
    prefault->claimed = prefault->end;
    pthread_mutex_unlock(&stream->reader->lock);
    pthread_join(prefault->thread, NULL);
}

bool prefault_covers(const dlfs_stream *stream, uint32_t slot, uint64_t run)
{
    const struct prefault *prefault = &stream->prefault;
    size_t first = (size_t)slot << stream->reader->chunk_shift;
    size_t last = first + ((size_t)run << stream->reader->chunk_shift);
    if (prefault->claimed >= prefault->end) {
        return true;
    }
    return last <= prefault->claimed &&
           (last <= prefault->busy || first >= prefault->busy + STEP_BYTES);
}

bool prefault_claim(dlfs_stream *stream)
{
    struct prefault *prefault = &stream->prefault;
    bool wanted = prefault->wanted;
    prefault->wanted = false;
    return wanted && take_step(prefault, &prefault->own);
}

void prefault_help(dlfs_stream *stream)
{
    (void)map_step(stream, stream->prefault.own);
}
