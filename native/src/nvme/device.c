/*
 * A namespace of a controller over TCP as a block device: open, flush, single commands, status. It
 * is the top of nvme/: queue pairs are in nvme/queue.c, connections in nvme/association.c.
 *
 * A forked child has a copy of the device but neither its thread nor the right to use its
 * connections. On first use it creates its own association; it keeps the inherited one, unused,
 * until the device is destroyed.
 */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "nvme/queue.h"

struct nvme_device {
    dlfs_device base;
    struct nvme_config config;
    struct nvme_association *_Atomic association;
};

static const struct dlfs_device_ops nvme_device_ops;

/*
 * Returns the association of this process in *out; creates it on first use after a fork. -ENOTSUP:
 * the device is of another kind.
 */
static int own_association(dlfs_device *base, struct nvme_association **out)
{
    if (base == NULL || base->ops != &nvme_device_ops) {
        return -ENOTSUP;
    }
    struct nvme_device *device = (struct nvme_device *)base;
    struct nvme_association *found = atomic_load(&device->association);
    if (found->owner == getpid()) {
        *out = found;
        return 0;
    }
    struct nvme_association *made;
    int code = nvme_association_create(&device->config, &made);
    if (code < 0) {
        return code;
    }
    made->inherited = found;
    if (atomic_load(&found->write_limit.until_ns) != DLFS_WRITES_FREE) {
        nvme_write_limit_set(&made->write_limit, 0, 0); /* only the parent has the lease */
    }
    if (!atomic_compare_exchange_strong(&device->association, &found, made)) {
        made->inherited = NULL;
        nvme_association_destroy(made);
        *out = found; /* another thread of this process created it first */
        return 0;
    }
    *out = made;
    /* Without time to reconnect there is one round of attempts, as when the device was opened. */
    return nvme_association_start(made, device->config.reconnect_ms == 0);
}

/* ---- queue pairs ----------------------------------------------------------------------------- */

static int queue_create(dlfs_device *base, uint32_t depth, const struct dlfs_connect_limit *limit,
                        dlfs_queue **out)
{
    struct nvme_association *association;
    struct nvme_queue *queue;
    if (base->size_bytes == 0) {
        return -ENOTSUP; /* a controller without a namespace has no I/O queues */
    }
    int code = own_association(base, &association);
    if (code == 0) {
        code = nvme_queue_make(association, depth, base->block_bytes, limit, &queue);
    }
    if (code != 0) {
        return code;
    }
    queue->base.ops = &nvme_queue_ops;
    *out = &queue->base;
    return 0;
}

/* ---- single commands ------------------------------------------------------------------------- */

/* Runs one I/O command on the internal queue pair. *incarnation gets that of the controller that
 * answered. */
static int run_io(struct nvme_association *association, struct nvme_exchange *exchange,
                  uint64_t *incarnation)
{
    (void)pthread_mutex_lock(&association->passthrough_lock);
    int code = 0;
    if (association->passthrough_queue == NULL) {
        code = nvme_queue_make(association, 1, 0, NULL, &association->passthrough_queue);
    }
    if (code == 0) {
        code = nvme_queue_run(association->passthrough_queue, exchange, incarnation);
    }
    (void)pthread_mutex_unlock(&association->passthrough_lock);
    return code;
}

static int flush_command(void *argument, struct nvme_flushed *flushed)
{
    struct nvme_association *association = argument;
    struct nvme_exchange exchange = {.direction = DLFS_NVME_DATA_NONE};
    nvme_entry_command(exchange.entry, &(dlfs_nvme_command){.opcode = NVME_OPCODE_FLUSH,
                                                            .nsid = association->config.nsid});
    int code = run_io(association, &exchange, &flushed->incarnation);
    if (code == 0) {
        code = nvme_status_code(exchange.cqe.status);
    }
    (void)pthread_mutex_lock(&association->lock);
    if (code == -EIO) {
        nvme_text_format(&association->error, "the target answered a flush with status 0x%x",
                         exchange.cqe.status);
    }
    flushed->cached = association->admin.controller.write_cache;
    (void)pthread_mutex_unlock(&association->lock);
    return code;
}

static int device_flush(dlfs_device *base)
{
    struct nvme_association *association;
    bool lost = false;
    int code = own_association(base, &association);
    if (code < 0) {
        return code;
    }
    code = nvme_durability_flush(&association->durability, flush_command, association, &lost);
    if (lost) {
        (void)pthread_mutex_lock(&association->lock);
        nvme_text_format(&association->error,
                         "the connection was lost after writes that were not flushed yet, and the "
                         "target has a volatile write cache, which may have lost them");
        (void)pthread_mutex_unlock(&association->lock);
    }
    return code;
}

/* ---- leases ---------------------------------------------------------------------------------- */

static int device_incarnation(dlfs_device *base, uint64_t *incarnation)
{
    struct nvme_association *association;
    int code = own_association(base, &association);
    if (code == 0) {
        *incarnation = atomic_load(&association->incarnation);
    }
    return code;
}

static int device_limit_writes(dlfs_device *base, uint64_t incarnation, uint64_t until_ns)
{
    struct nvme_association *association;
    int code = own_association(base, &association);
    if (code == 0) {
        nvme_write_limit_set(&association->write_limit, incarnation, until_ns);
    }
    return code;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void free_association(struct nvme_association *association)
{
    while (association != NULL) {
        struct nvme_association *inherited = association->inherited;
        nvme_queue_free(association->passthrough_queue);
        nvme_association_destroy(association);
        association = inherited;
    }
}

static void device_destroy(dlfs_device *base)
{
    struct nvme_device *device = (struct nvme_device *)base;
    free_association(atomic_load(&device->association));
    free(device);
}

static uint32_t queues_max(dlfs_device *base)
{
    dlfs_nvme_status status;
    return dlfs_nvme_get_status(base, &status) == 0 ? status.queue_count_max : 0;
}

static uint32_t device_operation_ms(const dlfs_device *base)
{
    const struct nvme_config *config = &((const struct nvme_device *)base)->config;
    uint64_t operation_ms = (uint64_t)config->timeout_ms + config->reconnect_ms;
    return operation_ms < INT32_MAX ? (uint32_t)operation_ms : INT32_MAX;
}

static const struct dlfs_device_ops nvme_device_ops = {
    .queue_create = queue_create,
    .flush = device_flush,
    .queues_max = queues_max,
    .destroy = device_destroy,
    .incarnation = device_incarnation,
    .limit_writes = device_limit_writes,
    .operation_ms = device_operation_ms,
};

/* Copies the association's last error message to the caller. */
static void give_message(struct nvme_association *association, char *message,
                         uint32_t message_bytes)
{
    if (message == NULL || message_bytes == 0) {
        return;
    }
    (void)pthread_mutex_lock(&association->lock);
    size_t length = strnlen(association->error.bytes, message_bytes - 1);
    memcpy(message, association->error.bytes, length);
    message[length] = '\0';
    (void)pthread_mutex_unlock(&association->lock);
}

int dlfs_device_open_nvme(const dlfs_nvme_config *config, char *message, uint32_t message_bytes,
                          dlfs_device **out)
{
    struct nvme_association *association = NULL;
    struct nvme_device *device = NULL;
    if (config == NULL || out == NULL) {
        return -EINVAL;
    }
    device = calloc(1, sizeof *device);
    if (device == NULL) {
        return -ENOMEM;
    }
    int code = nvme_config_copy(config, &device->config);
    if (code == 0) {
        code = nvme_association_create(&device->config, &association);
    }
    if (code != 0) {
        goto failed;
    }
    code = nvme_association_start(association, true);
    if (code == 0) {
        code = nvme_association_wait(association);
    }
    if (code != 0) {
        give_message(association, message, message_bytes);
        goto failed;
    }
    const struct nvme_namespace *ns = &association->admin.ns;
    dlfs_device_init(&device->base, &nvme_device_ops, "nvme-tcp", ns->size_bytes, ns->block_bytes,
                     device->config.writable);
    atomic_init(&device->association, association);
    *out = &device->base;
    return 0;

failed:
    nvme_association_destroy(association);
    free(device);
    return code;
}

int dlfs_nvme_run(dlfs_device *base, uint32_t queue, const dlfs_nvme_command *command, void *data,
                  uint32_t data_bytes, uint32_t direction, dlfs_nvme_result *result)
{
    bool has_data = direction != DLFS_NVME_DATA_NONE;
    if (queue > DLFS_NVME_QUEUE_IO || direction > DLFS_NVME_DATA_OUT || command == NULL ||
        command->opcode > UINT8_MAX || data_bytes > DLFS_NVME_DATA_BYTES_MAX ||
        has_data != (data_bytes > 0) || has_data != (data != NULL) || result == NULL) {
        return -EINVAL;
    }
    struct nvme_association *association;
    struct nvme_exchange exchange = {
        .data = data, .data_bytes = data_bytes, .direction = direction};
    struct nvme_admin_request request = {.exchange = &exchange};
    uint64_t incarnation;
    nvme_entry_command(exchange.entry, command);
    int code = own_association(base, &association);
    if (code == 0) {
        code = queue == DLFS_NVME_QUEUE_IO ? run_io(association, &exchange, &incarnation)
                                           : nvme_association_run(association, &request);
    }
    if (code < 0) {
        return code;
    }
    *result = (dlfs_nvme_result){.value = exchange.cqe.value,
                                 .status = exchange.cqe.status & NVME_STATUS_CODE};
    return 0;
}

int dlfs_nvme_authenticate(dlfs_device *base)
{
    struct nvme_association *association;
    struct nvme_admin_request request = {.authenticate = true};
    int code = own_association(base, &association);
    if (code == 0 && ((const struct nvme_device *)base)->config.dhchap_key[0] == '\0') {
        code = -ENOTSUP;
    }
    return code < 0 ? code : nvme_association_run(association, &request);
}

int dlfs_nvme_set_paths(dlfs_device *base, const char *const *hosts, const uint32_t *ports,
                        uint32_t path_count)
{
    struct nvme_path paths[DLFS_NVME_PATHS_MAX];
    struct nvme_association *association;
    if (hosts == NULL || ports == NULL || path_count == 0 || path_count > DLFS_NVME_PATHS_MAX) {
        return -EINVAL;
    }
    int code = nvme_paths_copy(hosts, ports, path_count, paths);
    if (code == 0) {
        code = own_association(base, &association);
    }
    if (code == 0) {
        nvme_association_set_paths(association, paths, path_count);
    }
    return code;
}

int dlfs_nvme_get_status(dlfs_device *base, dlfs_nvme_status *status)
{
    struct nvme_association *association;
    int code = own_association(base, &association);
    if (code < 0) {
        return code;
    }
    struct nvme_counters *counters = &association->counters;
    (void)pthread_mutex_lock(&association->lock);
    const struct nvme_admin *admin = &association->admin;
    *status = (dlfs_nvme_status){
        .reconnects = atomic_load(&counters->reconnects),
        .retries = atomic_load(&counters->retries),
        .timeouts = atomic_load(&counters->timeouts),
        .digest_errors = atomic_load(&counters->digest_errors),
        .protocol_errors = atomic_load(&counters->protocol_errors),
        .connected = association->state == NVME_READY,
        .path = association->path,
        .transfer_bytes_max = admin->transfer_bytes_max,
        .queue_count_max = admin->queue_count_max,
        .write_cache = admin->controller.write_cache,
        .controller_id = admin->controller.id,
        .id_kind = admin->ns.id_kind,
        .path_moves = atomic_load(&counters->path_moves),
        .namespace_events = atomic_load(&counters->events[NVME_EVENT_NAMESPACE]),
        .ana_events = atomic_load(&counters->events[NVME_EVENT_ANA]),
        .discovery_events = atomic_load(&counters->events[NVME_EVENT_DISCOVERY]),
        .health_events = atomic_load(&counters->events[NVME_EVENT_HEALTH]) +
                         atomic_load(&counters->events[NVME_EVENT_FIRMWARE]),
        .namespace_bytes = association->namespace_bytes,
        .write_protected = atomic_load(&association->write_protected),
        .ana_state = admin->ana_state,
        .ana_group = admin->ns.ana_group,
        .health_warnings = association->health_warnings,
    };
    for (int kind = 0; kind < NVME_EVENT_KINDS; kind++) {
        status->events += atomic_load(&counters->events[kind]);
    }
    memcpy(status->id, admin->ns.id, sizeof status->id);
    memcpy(status->last_event, association->event, sizeof status->last_event);
    memcpy(status->last_error, association->error.bytes, sizeof status->last_error);
    (void)pthread_mutex_unlock(&association->lock);
    return 0;
}
