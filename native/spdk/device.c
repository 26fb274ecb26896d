/*
 * Namespaces as devices: open, describe, flush, and single commands.
 *
 * Flushes and single I/O commands use a separate queue pair of the device, created on first use and
 * used by one thread at a time.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shim.h"

#define COMMAND_DEPTH 2u

uint32_t dlfs_spdk_version(void)
{
    return DLFS_SPDK_VERSION;
}

/* ---- flushes and single commands ------------------------------------------------------------- */

/* Creates the command queue and its data buffer on first use. With the command lock held. */
static int ensure_command_queue(struct device *device)
{
    if (device->command_data == NULL) {
        device->command_data = spdk_zmalloc(DLFS_NVME_DATA_BYTES_MAX, 4096, NULL,
                                            SPDK_ENV_NUMA_ID_ANY, SPDK_MALLOC_DMA);
        if (device->command_data == NULL) {
            return -ENOMEM;
        }
    }
    if (device->command_queue != NULL) {
        return 0;
    }
    return queue_create(&device->base, COMMAND_DEPTH, NULL, &device->command_queue);
}

static int run_one(struct device *device, const dlfs_operation *operation)
{
    dlfs_completion completion;
    int code = queue_submit(device->command_queue, operation, 1);
    if (code < 0) {
        return code;
    }
    code = queue_poll(device->command_queue, &completion, 1, -1);
    return code < 0 ? code : completion.result < 0 ? (int)completion.result : 0;
}

static int flush_command(void *argument, struct nvme_flushed *flushed)
{
    struct device *device = argument;
    dlfs_operation operation = {.length_bytes = 1, .kind = OP_FLUSH};
    (void)pthread_mutex_lock(&device->command_lock);
    int code = ensure_command_queue(device);
    if (code == 0) {
        code = run_one(device, &operation);
        flushed->incarnation = queue_incarnation(device->command_queue);
    }
    (void)pthread_mutex_unlock(&device->command_lock);
    flushed->cached = device->volatile_cache;
    return code;
}

static int device_flush(dlfs_device *base)
{
    struct device *device = (struct device *)base;
    if (environment_is_foreign()) {
        return DLFS_E_CLOSED;
    }
    bool lost = false; /* the code says so too */
    return nvme_durability_flush(&device->durability, flush_command, device, &lost);
}

static int run_io(struct device *device, const dlfs_nvme_command *command, void *data,
                  uint32_t data_bytes, uint32_t direction, dlfs_nvme_result *result)
{
    (void)pthread_mutex_lock(&device->command_lock);
    int code = ensure_command_queue(device);
    if (code == 0) {
        struct raw_command raw = {.command = command,
                                  .result = result,
                                  .data = data_bytes > 0 ? device->command_data : NULL,
                                  .data_bytes = data_bytes};
        dlfs_operation operation = {.buffer = &raw, .length_bytes = 1, .kind = OP_COMMAND};
        if (direction == DLFS_NVME_DATA_OUT) {
            memcpy(raw.data, data, data_bytes);
        }
        code = run_one(device, &operation);
        if (code == 0 && direction == DLFS_NVME_DATA_IN) {
            memcpy(data, raw.data, data_bytes);
        }
    }
    (void)pthread_mutex_unlock(&device->command_lock);
    return code;
}

int dlfs_spdk_run(dlfs_device *base, uint32_t queue, const dlfs_nvme_command *command, void *data,
                  uint32_t data_bytes, uint32_t direction, dlfs_nvme_result *result)
{
    bool has_data = direction != DLFS_NVME_DATA_NONE;
    if (base == NULL || command == NULL || result == NULL || queue > DLFS_NVME_QUEUE_IO ||
        direction > DLFS_NVME_DATA_OUT || command->opcode > 0xff ||
        data_bytes > DLFS_NVME_DATA_BYTES_MAX || data_bytes % 4 != 0 ||
        has_data != (data != NULL) || has_data != (data_bytes > 0)) {
        return -EINVAL;
    }
    if (environment_is_foreign()) {
        return DLFS_E_CLOSED;
    }
    struct device *device = (struct device *)base;
    if (queue == DLFS_NVME_QUEUE_IO) {
        return run_io(device, command, data, data_bytes, direction, result);
    }
    return controller_run(device->controller, device->reconnect_ms, device->timeout_ms, command,
                          data, data_bytes, direction, result);
}

/* ---- leases ---------------------------------------------------------------------------------- */

static int device_incarnation(dlfs_device *base, uint64_t *incarnation)
{
    struct device *device = (struct device *)base;
    if (environment_is_foreign()) {
        return DLFS_E_CLOSED;
    }
    *incarnation = atomic_load(&device->controller->incarnation);
    return 0;
}

static int device_limit_writes(dlfs_device *base, uint64_t incarnation, uint64_t until_ns)
{
    struct device *device = (struct device *)base;
    if (environment_is_foreign()) {
        return DLFS_E_CLOSED;
    }
    nvme_write_limit_set(&device->write_limit, incarnation, until_ns);
    return 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void device_destroy(dlfs_device *base)
{
    struct device *device = (struct device *)base;
    if (environment_is_foreign()) {
        if (device->command_queue != NULL) {
            queue_abandon(device->command_queue);
        }
        free(device);
        return;
    }
    if (device->command_queue != NULL) {
        queue_destroy(device->command_queue);
    }
    spdk_free(device->command_data);
    controller_put(device->controller);
    (void)pthread_mutex_destroy(&device->command_lock);
    nvme_durability_destroy(&device->durability);
    free(device);
}

static const struct dlfs_device_ops device_ops = {
    .version = DLFS_EXTERNAL_VERSION,
    .queue_create = queue_create,
    .flush = device_flush,
    .destroy = device_destroy,
    .incarnation = device_incarnation,
    .limit_writes = device_limit_writes,
};

/* Copies a text field of Identify without its padding; replaces bytes that are not printable. */
static void copy_text(char *to, const void *from, size_t bytes)
{
    const uint8_t *source = from;
    size_t length = bytes;
    while (length > 0 && (source[length - 1] == ' ' || source[length - 1] == '\0')) {
        length--;
    }
    for (size_t i = 0; i < length; i++) {
        to[i] = source[i] >= ' ' && source[i] <= '~' ? (char)source[i] : '?';
    }
    to[length] = '\0';
}

static void describe(struct device *device, struct spdk_nvme_ns *ns)
{
    dlfs_spdk_info *info = &device->info;
    struct spdk_nvme_ctrlr *controller = device->controller->spdk;
    const struct spdk_nvme_ctrlr_data *data = spdk_nvme_ctrlr_get_data(controller);
    const struct spdk_nvme_ns_data *ns_data = spdk_nvme_ns_get_data(ns);
    const struct spdk_uuid *uuid = spdk_nvme_ns_get_uuid(ns);
    device->base.block_bytes = spdk_nvme_ns_get_sector_size(ns);
    device->base.size_bytes = spdk_nvme_ns_get_num_sectors(ns) * device->base.block_bytes;
    info->max_transfer_bytes = spdk_nvme_ns_get_max_io_xfer_size(ns);
    memcpy(info->nguid, ns_data->nguid, sizeof info->nguid);
    for (size_t i = 0; i < sizeof info->eui64; i++) { /* SPDK stores it as a number */
        info->eui64[i] = (uint8_t)(ns_data->eui64 >> (8 * i));
    }
    if (uuid != NULL) {
        memcpy(info->uuid, uuid, sizeof info->uuid);
    }
    device->volatile_cache = data->vwc.present != 0;
    copy_text(info->serial, data->sn, sizeof data->sn);
    size_t nqn_bytes = strnlen((const char *)data->subnqn, sizeof info->subsystem_nqn - 1);
    copy_text(info->subsystem_nqn, data->subnqn, nqn_bytes);
}

/* Finds the namespace and checks its block size and that it has no metadata. */
static int open_namespace(struct device *device, char *message, size_t message_bytes)
{
    struct spdk_nvme_ns *ns = spdk_nvme_ctrlr_get_ns(device->controller->spdk, device->nsid);
    if (ns == NULL || !spdk_nvme_ns_is_active(ns)) {
        (void)snprintf(message, message_bytes, "it has no namespace %u", device->nsid);
        return DLFS_E_NOT_FOUND;
    }
    uint32_t block_bytes = spdk_nvme_ns_get_sector_size(ns);
    if (spdk_nvme_ns_get_md_size(ns) > 0 || block_bytes < DLFS_BLOCK_BYTES_MIN ||
        block_bytes > DLFS_BLOCK_BYTES_MAX || (block_bytes & (block_bytes - 1)) != 0) {
        (void)snprintf(message, message_bytes,
                       "expected blocks of 512 to 65536 bytes without metadata, got %u and %u of "
                       "metadata",
                       block_bytes, spdk_nvme_ns_get_md_size(ns));
        return -EINVAL;
    }
    describe(device, ns);
    return 0;
}

static int open_device(const dlfs_spdk_config *config, char *message, size_t message_bytes,
                       struct device *device)
{
    struct spdk_nvme_transport_id transport_id;
    unsigned mark = log_mark();
    int code = transport_parse(config->transport_id, &transport_id);
    if (code < 0) {
        log_text(mark, message, message_bytes);
        return code;
    }
    bool needs_pci = transport_id.trtype == SPDK_NVME_TRANSPORT_PCIE;
    code = environment_start(config, needs_pci, message, message_bytes);
    if (code < 0) {
        return code;
    }
    code = controller_get(config, &transport_id, message, message_bytes, &device->controller);
    if (code < 0) {
        return code;
    }
    code = open_namespace(device, message, message_bytes);
    if (code < 0) {
        controller_put(device->controller);
    }
    return code;
}

int dlfs_spdk_open(const dlfs_spdk_config *config, char *message, size_t message_bytes,
                   dlfs_spdk_info *info, dlfs_spdk_create *create, dlfs_device **out)
{
    if (config == NULL || config->transport_id == NULL || config->host_nqn == NULL ||
        message == NULL || message_bytes == 0 || info == NULL || create == NULL || out == NULL ||
        config->timeout_ms == 0 || config->connect_ms == 0) {
        return -EINVAL;
    }
    message[0] = '\0';
    struct device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return -ENOMEM;
    }
    device->nsid = config->nsid;
    device->flags = config->flags;
    device->timeout_ms = config->timeout_ms;
    device->reconnect_ms = config->reconnect_ms;
    int code = open_device(config, message, message_bytes, device);
    if (code < 0) {
        free(device);
        return code;
    }
    (void)pthread_mutex_init(&device->command_lock, NULL);
    nvme_durability_init(&device->durability);
    nvme_write_limit_init(&device->write_limit);
    device->base.ops = &device_ops;
    device->base.kind = "spdk";
    device->base.writable = (config->flags & DLFS_SPDK_WRITE) != 0;
    *info = device->info;
    code = create(&device->base, out);
    if (code < 0) {
        device_destroy(&device->base);
    }
    return code;
}
