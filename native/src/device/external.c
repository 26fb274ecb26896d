/*
 * Devices that another library implements (dlfs/external.h). Each call is passed on with the
 * library's own pointer.
 */
#include "dlfs/external.h"

#include <errno.h>
#include <stdlib.h>

#include "device/device.h"

struct external_device {
    dlfs_device base;
    const struct dlfs_external_ops *ops;
    void *device;
};

struct external_queue {
    dlfs_queue base;
    const struct dlfs_external_ops *ops;
    void *queue;
};

static int external_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct external_queue *queue = (struct external_queue *)base;
    return queue->ops->queue_submit(queue->queue, operations, count);
}

static int external_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count,
                         int timeout_ms)
{
    struct external_queue *queue = (struct external_queue *)base;
    return queue->ops->queue_poll(queue->queue, completions, count, timeout_ms);
}

static int external_descriptor(dlfs_queue *base)
{
    struct external_queue *queue = (struct external_queue *)base;
    return queue->ops->queue_descriptor != NULL ? queue->ops->queue_descriptor(queue->queue)
                                                : -ENOTSUP;
}

static int external_register(dlfs_queue *base, void *start, size_t bytes)
{
    struct external_queue *queue = (struct external_queue *)base;
    return queue->ops->queue_register != NULL
               ? queue->ops->queue_register(queue->queue, start, bytes)
               : 0;
}

static void external_queue_destroy(dlfs_queue *base)
{
    struct external_queue *queue = (struct external_queue *)base;
    queue->ops->queue_destroy(queue->queue);
    free(queue);
}

static void external_queue_abandon(dlfs_queue *base)
{
    struct external_queue *queue = (struct external_queue *)base;
    queue->ops->queue_abandon(queue->queue);
    free(queue);
}

static const struct dlfs_queue_ops external_queue_ops = {
    .submit = external_submit,
    .poll = external_poll,
    .descriptor = external_descriptor,
    .register_range = external_register,
    .destroy = external_queue_destroy,
    .abandon = external_queue_abandon,
};

static int external_queue_create(dlfs_device *base, uint32_t depth,
                                 const struct dlfs_connect_limit *limit, dlfs_queue **out)
{
    (void)limit;
    struct external_device *device = (struct external_device *)base;
    struct external_queue *queue = calloc(1, sizeof *queue);
    if (queue == NULL) {
        return -ENOMEM;
    }
    queue->ops = device->ops;
    int error = device->ops->queue_create(device->device, depth, &queue->queue);
    if (error < 0) {
        free(queue);
        return error;
    }
    dlfs_queue_init(&queue->base, &external_queue_ops, base, depth);
    *out = &queue->base;
    return 0;
}

static int external_flush(dlfs_device *base)
{
    struct external_device *device = (struct external_device *)base;
    return device->ops->flush(device->device);
}

static void external_destroy(dlfs_device *base)
{
    struct external_device *device = (struct external_device *)base;
    device->ops->destroy(device->device);
    free(device);
}

static int external_generation(dlfs_device *base, uint64_t *generation)
{
    struct external_device *device = (struct external_device *)base;
    return device->ops->generation != NULL ? device->ops->generation(device->device, generation)
                                           : -ENOTSUP;
}

static int external_limit_writes(dlfs_device *base, uint64_t generation, uint64_t until_ns)
{
    struct external_device *device = (struct external_device *)base;
    return device->ops->limit_writes != NULL
               ? device->ops->limit_writes(device->device, generation, until_ns)
               : -ENOTSUP;
}

static const struct dlfs_device_ops external_device_ops = {
    .queue_create = external_queue_create,
    .flush = external_flush,
    .destroy = external_destroy,
    .generation = external_generation,
    .limit_writes = external_limit_writes,
};

int dlfs_device_create_external(const struct dlfs_external *external, dlfs_device **out)
{
    if (external == NULL || external->ops == NULL || out == NULL) {
        return -EINVAL;
    }
    if (external->ops->version != DLFS_EXTERNAL_VERSION) {
        return -EPROTONOSUPPORT;
    }
    uint32_t block_bytes = external->block_bytes;
    bool block_fits = block_bytes >= DLFS_BLOCK_BYTES_MIN && block_bytes <= DLFS_BLOCK_BYTES_MAX &&
                      (block_bytes & (block_bytes - 1)) == 0;
    if (!block_fits || external->size_bytes == 0 || external->size_bytes % block_bytes != 0) {
        return -EINVAL;
    }
    struct external_device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return -ENOMEM;
    }
    device->ops = external->ops;
    device->device = external->device;
    dlfs_device_init(&device->base, &external_device_ops, external->kind, external->size_bytes,
                     block_bytes, external->writable != 0);
    *out = &device->base;
    return 0;
}
