/*
 * Touching memory first. Pages are given to the arena when they are first touched, and zeroed: for
 * a reader whose arena takes the whole dataset, as much work as reading it, and several times as
 * much on a virtual machine whose host gives memory page by page only then.
 *
 * Two threads do it, a huge page at a time, each page claimed by one of them: a thread of this
 * file's own, and the stream's when it would plan a read into memory that nobody has touched. It
 * does not start such a read: the kernel would touch the memory while the read is submitted, and
 * where both are at the same huge page, each of them zeroes one.
 */
#include <sys/mman.h>

#include "platform/thread.h"
#include "stream/stream.h"

#define STEP_BYTES ((size_t)2 << 20) /* a huge page, which the arena is aligned to */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Claims the next step; false when there is none left. The lock is held. */
static bool take_step(struct prefault *prefault, size_t *at)
{
    if (prefault->claimed >= prefault->end) {
        return false;
    }
    *at = prefault->claimed;
    prefault->claimed += STEP_BYTES;
    return true;
}

/* Touches a step: false with a kernel older than 5.14, or no memory, of which the reads will tell.
 */
static bool touch(dlfs_stream *stream, size_t at)
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
        bool touched = touch(stream, prefault->busy);
        pthread_mutex_lock(lock);
        if (!touched) {
            prefault->claimed = prefault->end; /* reads go on without */
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
    (void)touch(stream, stream->prefault.own);
}
