/*
 * Reads one sample into the caller's buffer, for programs that read samples one at a time: without
 * the arrays of a batch if the sample is in memory.
 */
#include <errno.h>
#include <string.h>

#include "reader/internal.h"

/* Copies a sample that is in memory. Returns -EAGAIN if it is not. */
static int64_t copy_cached(dlfs_reader *reader, uint64_t index, const struct location *location,
                           void *buffer)
{
    uint64_t offset;
    int64_t result = -EAGAIN;
    pthread_mutex_lock(&reader->arena->lock);
    if (reader->share.attached && arena_look_up(reader, index, location, &offset)) {
        reader->stats.samples++;
        reader->stats.sample_bytes += location->length;
        reader->stats.cache_hits++;
        result = (int64_t)location->length;
    }
    pthread_mutex_unlock(&reader->arena->lock);
    if (result < 0) {
        return result;
    }
    memcpy(buffer, reader->arena->memory + offset, location->length);
    pthread_mutex_lock(&reader->arena->lock);
    arena_release(reader, slot_of(reader, offset));
    pthread_mutex_unlock(&reader->arena->lock);
    return result;
}

int64_t reader_get(dlfs_reader *reader, uint64_t index, void *buffer, uint64_t buffer_bytes,
                   uint32_t flags, const _Atomic bool *stop, dlfs_failure *failure)
{
    struct location location;
    if (reader == NULL || index >= reader->sample_count || (flags & ~DLFS_GET_CACHED) != 0) {
        return -EINVAL;
    }
    if (!reader_locate(reader, index, &location)) {
        return DLFS_E_FORMAT;
    }
    if (location.length > buffer_bytes) {
        return -ERANGE;
    }
    if (location.length == 0) {
        return 0;
    }
    int64_t result = copy_cached(reader, index, &location, buffer);
    if (result != -EAGAIN || (flags & DLFS_GET_CACHED)) {
        return result;
    }
    struct read_terms terms = READ_TERMS_PLAIN;
    terms.stop = stop;
    dlfs_batch *batch;
    int code = reader_read(reader, &index, 1, &terms, &batch);
    return code < 0 ? code : batch_take_sample(batch, buffer, buffer_bytes, failure);
}

DLFS_API int64_t dlfs_reader_get(dlfs_reader *reader, uint64_t index, void *buffer,
                                 uint64_t buffer_bytes, uint32_t flags)
{
    dlfs_failure failure;
    return reader_get(reader, index, buffer, buffer_bytes, flags, NULL, &failure);
}
