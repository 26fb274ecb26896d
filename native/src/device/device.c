/* Block devices: their life, and what a caller asks of any kind. */
#include "device/device.h"

#include <errno.h>

void dlfs_device_init(dlfs_device *device, const struct dlfs_device_ops *ops, const char *kind,
                      uint64_t size_bytes, uint32_t block_bytes, bool writable)
{
    device->ops = ops;
    device->kind = kind;
    device->size_bytes = size_bytes;
    device->block_bytes = block_bytes;
    device->writable = writable;
    atomic_init(&device->queue_count, 0);
    atomic_init(&device->references, 0);
    device->queues = (struct dlfs_queues){.process = dlfs_process()};
}

bool dlfs_device_fits(uint64_t size_bytes, uint32_t block_bytes)
{
    return block_bytes >= DLFS_BLOCK_BYTES_MIN && block_bytes <= DLFS_BLOCK_BYTES_MAX &&
           (block_bytes & (block_bytes - 1)) == 0 && size_bytes > 0 &&
           size_bytes % block_bytes == 0;
}

int dlfs_device_create_external(dlfs_device *external, dlfs_device **out)
{
    if (external == NULL || external->ops == NULL || out == NULL) {
        return -EINVAL;
    }
    if (external->ops->version != DLFS_EXTERNAL_VERSION) {
        return -EPROTONOSUPPORT;
    }
    if (!dlfs_device_fits(external->size_bytes, external->block_bytes)) {
        return -EINVAL;
    }
    dlfs_device_init(external, external->ops, external->kind, external->size_bytes,
                     external->block_bytes, external->writable);
    *out = external;
    return 0;
}

int dlfs_device_destroy(dlfs_device *device)
{
    if (device == NULL) {
        return 0;
    }
    dlfs_queues_close(device);
    if (atomic_fetch_or(&device->references, 1) > 1) {
        return 0;
    }
    atomic_store(&device->references, 0);
    if (atomic_load(&device->queue_count) != 0) {
        return -EBUSY;
    }
    device->ops->destroy(device);
    return 0;
}

void dlfs_device_retain(dlfs_device *device)
{
    atomic_fetch_add(&device->references, 2);
}

void dlfs_device_release(dlfs_device *device)
{
    if (atomic_fetch_sub(&device->references, 2) == 3) {
        atomic_store(&device->references, 0);
        (void)dlfs_device_destroy(device);
    }
}

uint64_t dlfs_device_size_bytes(const dlfs_device *device)
{
    return device->size_bytes;
}

uint32_t dlfs_device_block_bytes(const dlfs_device *device)
{
    return device->block_bytes;
}

const char *dlfs_device_kind(const dlfs_device *device)
{
    return device->kind;
}

int dlfs_device_flush(dlfs_device *device)
{
    return device->ops->flush(device);
}

int dlfs_device_incarnation(dlfs_device *device, uint64_t *incarnation)
{
    if (device == NULL || device->ops->incarnation == NULL) {
        return -ENOTSUP;
    }
    return device->ops->incarnation(device, incarnation);
}

int dlfs_device_limit_writes(dlfs_device *device, uint64_t incarnation, uint64_t until_ns)
{
    if (device == NULL || device->ops->limit_writes == NULL) {
        return -ENOTSUP;
    }
    return device->ops->limit_writes(device, incarnation, until_ns);
}

uint32_t dlfs_device_operation_ms(const dlfs_device *device)
{
    return device->ops->operation_ms == NULL ? 0 : device->ops->operation_ms(device);
}
