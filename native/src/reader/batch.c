/*
 * Batches: the arrays that describe the samples of a read, and the references that pin their bytes.
 * A released batch is kept with its arrays for the next read. Any thread may release a batch, also
 * after the reader was closed: the last batch frees the reader.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "reader/internal.h"

#define RELEASED_MAX 1024u /* samples that are released under one hold of the lock */
#define IDLE_BATCHES_BYTES_MAX ((size_t)16 << 20) /* of the arrays of idle batches */

size_t batch_bytes(const struct batch *batch)
{
    return batch->capacity * BATCH_BYTES_PER_SAMPLE +
           batch->failure_capacity * sizeof(*batch->failures);
}

static int reserve(struct batch *batch, uint64_t count)
{
    batch->process = dlfs_process();
    if (batch->offsets == NULL || count > batch->capacity) {
        free(batch->offsets);
        batch->capacity = 0;
        batch->offsets =
            calloc(count + 1, BATCH_BYTES_PER_SAMPLE); /* not NULL without samples either */
        if (batch->offsets == NULL) {
            return -ENOMEM;
        }
        batch->capacity = count;
    }
    batch->lengths = batch->offsets + count;
    batch->indices = (uint64_t *)(batch->lengths + count);
    return 0;
}

struct batch *batch_prepare(struct batch *idle, uint64_t count)
{
    struct batch *batch = idle != NULL ? idle : calloc(1, sizeof(*batch));
    if (batch != NULL && reserve(batch, count) < 0) {
        batch_free(batch);
        return NULL;
    }
    if (batch != NULL) {
        batch->public = (dlfs_batch){
            .count = count,
            .offsets = batch->offsets,
            .lengths = batch->lengths,
            .indices = batch->indices,
            .failures = batch->failures,
        };
    }
    return batch;
}

int batch_reserve_failures(struct batch *batch, uint64_t count)
{
    if (count <= batch->failure_capacity) {
        return 0;
    }
    uint64_t capacity = count > 8 ? 2 * (count - 1) : 8;
    dlfs_failure *failures = realloc(batch->failures, capacity * sizeof(*failures));
    if (failures == NULL) {
        return -ENOMEM;
    }
    batch->failures = failures;
    batch->public.failures = failures;
    batch->failure_capacity = capacity;
    return 0;
}

struct batch *batch_take(dlfs_reader *reader, uint64_t count)
{
    pthread_mutex_lock(&reader->arena->lock);
    struct batch *batch = reader->idle_batches;
    if (batch != NULL) {
        reader->idle_batches = batch->next;
        reader->idle_batches_bytes -= batch_bytes(batch);
    }
    reader->references++;
    pthread_mutex_unlock(&reader->arena->lock);
    batch = batch_prepare(batch, count);
    if (batch != NULL) {
        batch->release = batch_recycle;
        batch->reader = reader;
        batch->private_memory = NULL;
        return batch;
    }
    pthread_mutex_lock(&reader->arena->lock);
    reader->references--;
    pthread_mutex_unlock(&reader->arena->lock);
    return NULL;
}

int batch_fail(struct batch *batch, const dlfs_failure *failure)
{
    uint64_t count = batch->public.failure_count;
    if (batch_reserve_failures(batch, count + 1) < 0) {
        return -ENOMEM;
    }
    batch->failures[count] = *failure;
    batch->offsets[failure->position] = 0;
    batch->lengths[failure->position] = -1;
    batch->public.failure_count = count + 1;
    return 0;
}

void batch_recycle(struct batch *batch)
{
    dlfs_reader *reader = batch->reader;
    if (batch->private_memory != NULL) {
        private_memory_release(batch->private_memory);
    }
    pthread_mutex_lock(&reader->arena->lock);
    for (uint64_t i = 0; batch->private_memory == NULL && i < batch->public.count; i++) {
        if (batch->lengths[i] > 0) {
            arena_release(reader, slot_of(reader, (uint64_t)batch->offsets[i]));
        }
        if ((i + 1) % RELEASED_MAX == 0) {
            pthread_mutex_unlock(&reader->arena->lock);
            pthread_mutex_lock(&reader->arena->lock);
        }
    }
    bool stays_idle = reader->idle_batches_bytes + batch_bytes(batch) <= IDLE_BATCHES_BYTES_MAX;
    if (stays_idle) {
        reader->idle_batches_bytes += batch_bytes(batch);
        batch->next = reader->idle_batches;
        reader->idle_batches = batch;
    }
    reader_unlock_release(reader);
    if (!stays_idle) {
        batch_free(batch);
    }
}

DLFS_API void dlfs_batch_release(dlfs_batch *batch)
{
    struct batch *whole = (struct batch *)batch;
    if (whole != NULL && whole->process == dlfs_process()) {
        whole->release(whole);
    }
}

/* Returns true if a new pin in a slot counts the bytes of the sample only. */
static bool counts_by_bytes(const dlfs_reader *reader, uint32_t number)
{
    const struct slot *slot = &reader->arena->slots[number];
    return slot->state == SLOT_PACKED || slot->state == SLOT_TAIL ||
           atomic_load_explicit(&slot->resident, memory_order_relaxed);
}

uint64_t batch_pin(const dlfs_reader *reader, const dlfs_batch *batch, uint64_t *pins)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < batch->count; i++) {
        if (batch->lengths[i] <= 0) {
            continue;
        }
        uint32_t slot = slot_of(reader, (uint64_t)batch->offsets[i]);
        if (pins[slot] == 0 && counts_by_bytes(reader, slot)) {
            bytes += (uint64_t)batch->lengths[i];
        } else if (pins[slot]++ == 0) {
            bytes += (uint64_t)reader->arena->slots[slot].run << reader->chunk_shift;
        }
    }
    return bytes;
}

uint64_t batch_unpin(const dlfs_reader *reader, const dlfs_batch *batch, uint64_t *pins)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < batch->count; i++) {
        if (batch->lengths[i] <= 0) {
            continue;
        }
        uint32_t slot = slot_of(reader, (uint64_t)batch->offsets[i]);
        if (pins[slot] == 0) { /* as it was when the batch was pinned */
            bytes += (uint64_t)batch->lengths[i];
        } else if (--pins[slot] == 0) {
            bytes += (uint64_t)reader->arena->slots[slot].run << reader->chunk_shift;
        }
    }
    return bytes;
}

int64_t batch_take_sample(dlfs_batch *batch, void *buffer, uint64_t buffer_bytes,
                          dlfs_failure *failure)
{
    int64_t result = batch->lengths[0];
    if (batch->failure_count > 0) {
        *failure = batch->failures[0];
        result = failure->code;
    } else if ((uint64_t)result > buffer_bytes) {
        result = -ERANGE;
    } else {
        memcpy(buffer, batch->base + batch->offsets[0], (size_t)result);
    }
    dlfs_batch_release(batch);
    return result;
}

DLFS_API int dlfs_batch_gather(const dlfs_batch *batch, void *destination,
                               uint64_t destination_bytes, const uint64_t *offsets)
{
    for (uint64_t i = 0; i < batch->count; i++) {
        uint64_t length = batch->lengths[i] > 0 ? (uint64_t)batch->lengths[i] : 0;
        if (length > destination_bytes || offsets[i] > destination_bytes - length) {
            return DLFS_E_LIMIT;
        }
    }
    uint64_t before_ns = monotonic_ns();
    for (uint64_t i = 0; i < batch->count; i++) {
        if (batch->lengths[i] > 0) {
            memcpy((uint8_t *)destination + offsets[i], batch->base + batch->offsets[i],
                   (size_t)batch->lengths[i]);
        }
    }
    dlfs_reader *reader = ((const struct batch *)batch)->reader;
    if (reader != NULL) { /* NULL: a service gave the batch */
        atomic_fetch_add_explicit(&reader->copy_ns, monotonic_ns() - before_ns,
                                  memory_order_relaxed);
    }
    return 0;
}
