/* A device that hangs while its gate is closed: its operations wait until the gate is open. */
#ifndef DLFS_TESTS_GATE_H
#define DLFS_TESTS_GATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "device/device.h"

struct gate {
    dlfs_device base;
    dlfs_device *inner;
    dlfs_device *device; /* over inner, behind the gate */
    _Atomic bool closed;
    _Atomic uint32_t operation_count; /* operations submitted so far */
    _Atomic uint32_t queues;          /* queue pairs that exist */
    _Atomic uint32_t created;         /* queue pairs created so far */
    _Atomic uint32_t queues_max;      /* queues_max queue pairs allowed; 0: any number */
    _Atomic uint32_t destroyed_devices;
    _Atomic int refusal;           /* code with which creating a queue pair fails; 0: none */
    dlfs_queue *_Atomic released;  /* released while the next queue pair is created; or NULL */
    dlfs_queue *_Atomic destroyed; /* destroyed while the next queue pair is refused; or NULL */
    _Atomic bool holds_created;    /* a queue pair that was created is not returned meanwhile */
};

struct gate_queue {
    dlfs_queue base;
    struct gate *gate;
    dlfs_queue *inner;
    uint32_t waiting;
    dlfs_operation operations[DLFS_DEPTH_MAX];
};

static int gate_flush(dlfs_device *device)
{
    return dlfs_device_flush(((struct gate *)device)->inner);
}

static void gate_destroy(dlfs_device *device)
{
    atomic_fetch_add(&((struct gate *)device)->destroyed_devices, 1);
}

static int gate_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct gate_queue *queue = (struct gate_queue *)base;
    for (uint32_t i = 0; i < count; i++) {
        queue->operations[queue->waiting++] = operations[i];
    }
    atomic_fetch_add(&queue->gate->operation_count, count);
    return (int)count;
}

static int gate_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count, int timeout_ms)
{
    struct gate_queue *queue = (struct gate_queue *)base;
    for (int waited_ms = 0; atomic_load(&queue->gate->closed); waited_ms++) {
        if (timeout_ms >= 0 && waited_ms >= timeout_ms) {
            return 0;
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (queue->waiting > 0) {
        CHECK_EQ(dlfs_queue_submit(queue->inner, queue->operations, queue->waiting),
                 queue->waiting);
    }
    queue->waiting = 0;
    return dlfs_queue_poll(queue->inner, completions, count, timeout_ms);
}

/* Frees a queue in a forked child, whose gate is a copy: its count stays as it is. */
static void gate_queue_abandon(dlfs_queue *base)
{
    struct gate_queue *queue = (struct gate_queue *)base;
    dlfs_queue_destroy(queue->inner);
    free(queue);
}

static void gate_queue_destroy(dlfs_queue *base)
{
    atomic_fetch_sub(&((struct gate_queue *)base)->gate->queues, 1);
    gate_queue_abandon(base);
}

static const struct dlfs_queue_ops gate_queue_ops = {
    .submit = gate_submit,
    .poll = gate_poll,
    .destroy = gate_queue_destroy,
    .abandon = gate_queue_abandon,
};

static int gate_queue_create(dlfs_device *base, uint32_t depth,
                             const struct dlfs_connect_limit *limit, dlfs_queue **out)
{
    (void)limit;
    struct gate *gate = (struct gate *)base;
    if (atomic_load(&gate->refusal) < 0) {
        return atomic_load(&gate->refusal);
    }
    uint32_t queues_max = atomic_load(&gate->queues_max);
    if (atomic_fetch_add(&gate->queues, 1) >= queues_max && queues_max > 0) {
        atomic_fetch_sub(&gate->queues, 1);
        dlfs_queue_destroy(atomic_exchange(&gate->destroyed, NULL));
        return DLFS_E_LIMIT;
    }
    dlfs_queue *released = atomic_exchange(&gate->released, NULL);
    if (released != NULL) {
        dlfs_queue_release(released);
    }
    while (atomic_load(&gate->holds_created)) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    struct gate_queue *queue = calloc(1, sizeof *queue);
    queue->base.ops = &gate_queue_ops;
    queue->gate = gate;
    atomic_fetch_add(&gate->created, 1);
    CHECK_EQ(dlfs_queue_create(gate->inner, depth, &queue->inner), 0);
    *out = &queue->base;
    return 0;
}

static const struct dlfs_device_ops gate_ops = {
    .version = DLFS_EXTERNAL_VERSION,
    .queue_create = gate_queue_create,
    .flush = gate_flush,
    .destroy = gate_destroy,
};

/* Puts a gate before a device. */
static inline void gate_put(struct gate *gate, dlfs_device *inner)
{
    gate->base.ops = &gate_ops;
    gate->base.kind = "gate";
    gate->base.size_bytes = dlfs_device_size_bytes(inner);
    gate->base.block_bytes = dlfs_device_block_bytes(inner);
    gate->inner = inner;
    CHECK_EQ(dlfs_device_create_external(&gate->base, &gate->device), 0);
}

#endif
