/*
 * A device over another one that fails on purpose: errors, short reads, flipped bits, stalls,
 * completions out of order, and the loss of the device, at a given operation or on request. Except
 * for that loss, the failures of the n-th operation of the k-th queue pair are a function of (seed,
 * k, n). libdlfs takes it as a device of another library (device/device.h).
 *
 * A queue pair delays finished operations in a table until they are due. Poll returns those that
 * are due, in order of arrival or, with `reorder`, in a random order.
 */
#include "fault/fault.h"

#include "device/device.h"
#include "platform/clock.h"
#include "platform/mix.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MILLION 1000000u
#define POLL_BATCH 64u
#define KIND "fault"

struct fault_device {
    dlfs_device base;
    dlfs_device *inner;
    dlfs_fault_config config;
    _Atomic uint64_t queues_made;
    _Atomic uint64_t operations;
    _Atomic bool lost;
};

struct fault_entry {
    dlfs_operation operation;
    int64_t result;
    uint64_t flip_bit; /* bit of the buffer, if flip is set */
    uint64_t due_ns;
    uint64_t delay_ns;
    uint32_t next_free;
    bool flip;
    bool shorten;
};

struct fault_queue {
    dlfs_queue base;
    struct fault_device *device;
    dlfs_queue *inner;
    uint64_t random;       /* state of the generator that chooses failures */
    uint64_t random_order; /* state of the generator for the order of completions, whose use depends
                              on timing */
    uint32_t first_free;
    uint32_t delayed_count;
    uint32_t *delayed; /* [depth]: numbers of the finished entries not yet returned, by arrival */
    struct fault_entry entries[];
};

/*
 * Returns the next number of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
 * number generators", OOPSLA 2014).
 */
static uint64_t random_next(uint64_t *state)
{
    return mix(*state += MIX_GOLDEN);
}

static bool happens(struct fault_queue *queue, uint32_t per_million)
{
    /*
     * A number is drawn even for probability 0, so that one setting does not change the others'
     * choices.
     */
    return random_next(&queue->random) % MILLION < per_million;
}

static bool touches_bad(const dlfs_fault_config *config, const dlfs_operation *operation)
{
    if (operation->kind != DLFS_OP_READ || config->bad_length_bytes == 0) {
        return false;
    }
    uint64_t end = operation->offset_bytes + operation->length_bytes;
    uint64_t bad = config->bad_first_bytes;
    return operation->offset_bytes < bad ? end > bad
                                         : operation->offset_bytes - bad < config->bad_length_bytes;
}

static void entry_delay(struct fault_queue *queue, uint32_t number, int64_t result)
{
    struct fault_entry *entry = &queue->entries[number];
    entry->result = result;
    entry->due_ns = entry->delay_ns == 0 ? 0 : monotonic_ns() + entry->delay_ns;
    queue->delayed[queue->delayed_count++] = number;
}

/*
 * Draws the failures of an operation; returns true if it fails without reaching the inner device.
 */
static bool entry_draw(struct fault_queue *queue, struct fault_entry *entry)
{
    const dlfs_fault_config *config = &queue->device->config;
    bool read = entry->operation.kind == DLFS_OP_READ;
    bool error = happens(queue, config->error_per_million);
    bool shorten = happens(queue, config->short_per_million);
    bool flip = happens(queue, config->flip_per_million);
    bool stall = happens(queue, config->stall_per_million);
    entry->flip_bit = random_next(&queue->random) % ((uint64_t)entry->operation.length_bytes * 8);
    entry->flip = read && flip;
    entry->shorten = read && shorten;
    entry->delay_ns = stall ? (uint64_t)config->stall_ms * UINT64_C(1000000) : 0;
    return error || touches_bad(config, &entry->operation);
}

static bool is_lost(const struct fault_device *device)
{
    return atomic_load(&device->lost);
}

/* Counts an operation; returns true if the device is lost to it. */
static bool loses_operation(struct fault_device *device)
{
    if (atomic_fetch_add(&device->operations, 1) + 1 == device->config.lost_from) {
        atomic_store(&device->lost, true);
    }
    return is_lost(device);
}

/*
 * Submits an operation to the inner device: returns 1 if it was accepted, 0 if the queue is full,
 * or an error.
 */
static int entry_submit(struct fault_queue *queue, uint32_t number)
{
    struct fault_entry *entry = &queue->entries[number];
    bool fails = entry_draw(queue, entry);
    bool lost = loses_operation(queue->device);
    if (fails || lost) {
        entry_delay(queue, number, lost ? DLFS_E_LOST : -EIO);
        return 1;
    }
    dlfs_operation operation = entry->operation;
    operation.tag = number;
    uint32_t block_bytes = dlfs_device_block_bytes(queue->device->inner);
    if (entry->shorten && operation.length_bytes == block_bytes) {
        entry_delay(queue, number, DLFS_E_TRUNCATED); /* a block cannot be read in part */
        return 1;
    }
    if (entry->shorten) {
        operation.length_bytes -= block_bytes;
    }
    return dlfs_queue_submit(queue->inner, &operation, 1);
}

static int fault_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct fault_queue *queue = (struct fault_queue *)base;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = queue->first_free;
        uint32_t next_free = queue->entries[number].next_free;
        queue->entries[number].operation = operations[i];
        int taken = entry_submit(queue, number);
        if (taken <= 0) {
            return i > 0 ? (int)i : taken;
        }
        queue->first_free = next_free;
    }
    return (int)count;
}

static void entry_finish(struct fault_queue *queue, const dlfs_completion *completion)
{
    uint32_t number = (uint32_t)completion->tag;
    struct fault_entry *entry = &queue->entries[number];
    int64_t result = completion->result;
    if (result >= 0 && entry->shorten) {
        result = DLFS_E_TRUNCATED;
    } else if (result >= 0 && entry->flip) {
        uint8_t *byte = (uint8_t *)entry->operation.buffer + entry->flip_bit / 8;
        *byte = (uint8_t)(*byte ^ (1u << (entry->flip_bit % 8)));
    }
    entry_delay(queue, number, result);
}

/* Collects the completions of the inner queue pair, waiting up to timeout_ms for the first. */
static int inner_collect(struct fault_queue *queue, int timeout_ms)
{
    dlfs_completion completions[POLL_BATCH];
    int got;
    do {
        got = dlfs_queue_poll(queue->inner, completions, POLL_BATCH, timeout_ms);
        for (int i = 0; i < got; i++) {
            entry_finish(queue, &completions[i]);
        }
        timeout_ms = 0;
    } while (got == (int)POLL_BATCH);
    return got < 0 ? got : 0;
}

static void delayed_remove(struct fault_queue *queue, uint32_t position)
{
    uint32_t number = queue->delayed[position];
    for (uint32_t i = position + 1; i < queue->delayed_count; i++) {
        queue->delayed[i - 1] = queue->delayed[i];
    }
    queue->delayed_count--;
    queue->entries[number].next_free = queue->first_free;
    queue->first_free = number;
}

/* Returns the position in `delayed` of an operation that is due, or delayed_count. */
static uint32_t delayed_pick(struct fault_queue *queue, uint64_t now_ns)
{
    uint32_t start = 0;
    if (queue->device->config.reorder != 0 && queue->delayed_count > 0) {
        start = (uint32_t)(random_next(&queue->random_order) % queue->delayed_count);
    }
    for (uint32_t i = 0; i < queue->delayed_count; i++) {
        uint32_t position = (start + i) % queue->delayed_count;
        if (queue->entries[queue->delayed[position]].due_ns <= now_ns) {
            return position;
        }
    }
    return queue->delayed_count;
}

static uint32_t delayed_return(struct fault_queue *queue, dlfs_completion *completions,
                               uint32_t count)
{
    uint32_t filled = 0;
    uint64_t now_ns = monotonic_ns();
    while (filled < count) {
        uint32_t position = delayed_pick(queue, now_ns);
        if (position == queue->delayed_count) {
            break;
        }
        const struct fault_entry *entry = &queue->entries[queue->delayed[position]];
        completions[filled++] =
            (dlfs_completion){.tag = entry->operation.tag, .result = entry->result};
        delayed_remove(queue, position);
    }
    return filled;
}

/* Returns how long poll may wait: until its own deadline, or until a delayed operation is due. */
static uint64_t wait_ns(const struct fault_queue *queue, uint64_t left_ns)
{
    uint64_t now_ns = monotonic_ns();
    for (uint32_t i = 0; i < queue->delayed_count; i++) {
        uint64_t due_ns = queue->entries[queue->delayed[i]].due_ns;
        uint64_t until_ns = due_ns > now_ns ? due_ns - now_ns : 0;
        left_ns = until_ns < left_ns ? until_ns : left_ns;
    }
    return left_ns;
}

static int fault_wait(struct fault_queue *queue, uint64_t left_ns)
{
    uint64_t nanoseconds = wait_ns(queue, left_ns);
    if (dlfs_queue_in_flight(queue->inner) > 0) {
        uint64_t milliseconds = nanoseconds / UINT64_C(1000000) + 1;
        int timeout_ms = milliseconds > INT32_MAX ? -1 : (int)milliseconds;
        return inner_collect(queue, timeout_ms);
    }
    struct timespec pause = {.tv_sec = (time_t)(nanoseconds / UINT64_C(1000000000)),
                             .tv_nsec = (long)(nanoseconds % UINT64_C(1000000000))};
    (void)nanosleep(&pause, NULL);
    return 0;
}

static int fault_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count,
                      int timeout_ms)
{
    struct fault_queue *queue = (struct fault_queue *)base;
    if (is_lost(queue->device) && queue->device->config.lost_polls != 0) {
        return DLFS_E_LOST;
    }
    struct deadline deadline = deadline_after(timeout_ms);
    int error = inner_collect(queue, 0);
    for (;;) {
        uint32_t filled = delayed_return(queue, completions, count);
        if (filled > 0) {
            return (int)filled;
        }
        uint64_t left_ns = deadline_left_ns(&deadline);
        if (error < 0 || left_ns == 0) {
            return error;
        }
        error = fault_wait(queue, left_ns);
    }
}

static int fault_register(dlfs_queue *base, void *start, size_t bytes)
{
    return dlfs_queue_register(((struct fault_queue *)base)->inner, start, bytes);
}

/*
 * Serves as destroy and as abandon: the inner queue pair checks by itself whether it is in a child.
 */
static void fault_queue_destroy(dlfs_queue *base)
{
    struct fault_queue *queue = (struct fault_queue *)base;
    dlfs_queue_destroy(queue->inner);
    free(queue->delayed);
    free(queue);
}

static const struct dlfs_queue_ops fault_queue_ops = {
    .submit = fault_submit,
    .poll = fault_poll,
    .register_range = fault_register,
    .destroy = fault_queue_destroy,
    .abandon = fault_queue_destroy,
};

static int fault_queue_create(dlfs_device *base, uint32_t depth,
                              const struct dlfs_connect_limit *limit, dlfs_queue **out)
{
    (void)limit;
    struct fault_device *device = (struct fault_device *)base;
    if (is_lost(device)) {
        return DLFS_E_LOST;
    }
    struct fault_queue *queue = calloc(1, sizeof *queue + depth * sizeof queue->entries[0]);
    uint32_t *delayed = calloc(depth, sizeof *delayed);
    int error = queue == NULL || delayed == NULL ? -ENOMEM : 0;
    if (error == 0) {
        error = dlfs_queue_create(device->inner, depth, &queue->inner);
    }
    if (error < 0) {
        free(delayed);
        free(queue);
        return error;
    }
    queue->base.ops = &fault_queue_ops;
    queue->device = device;
    queue->delayed = delayed;
    queue->random = device->config.seed;
    queue->random ^= random_next(&(uint64_t){atomic_fetch_add(&device->queues_made, 1)});
    queue->random_order = ~queue->random;
    for (uint32_t i = 0; i < depth; i++) {
        queue->entries[i].next_free = i + 1;
    }
    *out = &queue->base;
    return 0;
}

static int fault_flush(dlfs_device *base)
{
    struct fault_device *device = (struct fault_device *)base;
    return is_lost(device) ? DLFS_E_LOST : dlfs_device_flush(device->inner);
}

static void fault_destroy(dlfs_device *base)
{
    free(base);
}

static const struct dlfs_device_ops fault_ops = {
    .version = DLFS_EXTERNAL_VERSION,
    .queue_create = fault_queue_create,
    .flush = fault_flush,
    .destroy = fault_destroy,
};

static bool config_is_valid(const dlfs_fault_config *config)
{
    return config->error_per_million <= MILLION && config->short_per_million <= MILLION &&
           config->flip_per_million <= MILLION && config->stall_per_million <= MILLION &&
           config->bad_length_bytes <= UINT64_MAX - config->bad_first_bytes &&
           config->lost_polls <= 1 && config->reserved == 0;
}

int dlfs_device_create_fault(dlfs_device *inner, const dlfs_fault_config *config, dlfs_device **out)
{
    if (inner == NULL || config == NULL || out == NULL || !config_is_valid(config)) {
        return -EINVAL;
    }
    struct fault_device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return -ENOMEM;
    }
    device->base.ops = &fault_ops;
    device->base.kind = KIND;
    device->base.size_bytes = dlfs_device_size_bytes(inner);
    device->base.block_bytes = dlfs_device_block_bytes(inner);
    device->base.writable = true;
    device->inner = inner;
    device->config = *config;
    atomic_init(&device->queues_made, 0);
    atomic_init(&device->operations, 0);
    atomic_init(&device->lost, false);
    int error = dlfs_device_create_external(&device->base, out);
    if (error < 0) {
        free(device);
    }
    return error;
}

int dlfs_device_fault_lose(dlfs_device *device, uint32_t lost)
{
    const char *kind = device == NULL ? "" : dlfs_device_kind(device);
    if (strcmp(kind, KIND) != 0 || lost > 1) {
        return -EINVAL;
    }
    struct fault_device *fault = (struct fault_device *)device;
    atomic_store(&fault->lost, lost != 0);
    return 0;
}
