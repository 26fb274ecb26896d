/*
 * A device in memory, for tests and trials. Operations are executed when they are submitted; poll
 * returns their completions in that order. Concurrent writes of two queue pairs to one block have
 * an undefined result, as on any device. The memory is private: a forked child has its own copy.
 */
#include "device/device.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct memory_device {
    dlfs_device base;
    uint8_t *memory;
};

struct memory_queue {
    dlfs_queue base;
    uint32_t first; /* start of the ring of completions not yet returned */
    uint32_t count;
    dlfs_completion completions[]; /* [depth] */
};

static void memory_apply(const struct memory_device *device, const dlfs_operation *operation)
{
    uint8_t *place = device->memory + operation->offset_bytes;
    if (operation->kind == DLFS_OP_WRITE) {
        memcpy(place, operation->buffer, operation->length_bytes);
    } else {
        memcpy(operation->buffer, place, operation->length_bytes);
    }
}

static int memory_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct memory_queue *queue = (struct memory_queue *)base;
    const struct memory_device *device = (const struct memory_device *)base->device;
    for (uint32_t i = 0; i < count; i++) {
        memory_apply(device, &operations[i]);
        queue->completions[(queue->first + queue->count) % base->depth] = (dlfs_completion){
            .tag = operations[i].tag, .result = (int64_t)operations[i].length_bytes};
        queue->count++;
    }
    return (int)count;
}

static int memory_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count,
                       int timeout_ms)
{
    (void)timeout_ms; /* operations in flight have been executed */
    struct memory_queue *queue = (struct memory_queue *)base;
    uint32_t given = queue->count < count ? queue->count : count;
    for (uint32_t i = 0; i < given; i++) {
        completions[i] = queue->completions[queue->first];
        queue->first = (queue->first + 1) % base->depth;
    }
    queue->count -= given;
    return (int)given;
}

static void memory_queue_free(dlfs_queue *base)
{
    free(base);
}

static const struct dlfs_queue_ops memory_queue_ops = {
    .submit = memory_submit,
    .poll = memory_poll,
    .register_range = NULL,
    .destroy = memory_queue_free,
    .abandon = memory_queue_free,
};

static int memory_queue_create(dlfs_device *device, uint32_t depth,
                               const struct dlfs_connect_limit *limit, dlfs_queue **out)
{
    (void)device;
    (void)limit;
    struct memory_queue *queue = calloc(1, sizeof *queue + depth * sizeof queue->completions[0]);
    if (queue == NULL) {
        return -ENOMEM;
    }
    queue->base.ops = &memory_queue_ops;
    *out = &queue->base;
    return 0;
}

static int memory_flush(dlfs_device *device)
{
    (void)device;
    return 0;
}

static void memory_destroy(dlfs_device *base)
{
    struct memory_device *device = (struct memory_device *)base;
    (void)munmap(device->memory, base->size_bytes);
    free(device);
}

static const struct dlfs_device_ops memory_device_ops = {
    .queue_create = memory_queue_create,
    .flush = memory_flush,
    .destroy = memory_destroy,
};

int dlfs_device_create_memory(uint64_t size_bytes, uint32_t block_bytes, dlfs_device **out)
{
    if (out == NULL || !dlfs_device_fits(size_bytes, block_bytes)) {
        return -EINVAL;
    }
    if (size_bytes > SIZE_MAX) {
        return -ENOMEM;
    }
    struct memory_device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return -ENOMEM;
    }
    /*
     * Pages are allocated when they are touched: a large device occupies only what was written to
     * it.
     */
    void *memory = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        free(device);
        return -ENOMEM;
    }
    device->memory = memory;
    dlfs_device_init(&device->base, &memory_device_ops, "memory", size_bytes, block_bytes, true);
    *out = &device->base;
    return 0;
}
