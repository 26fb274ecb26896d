/*
 * The batches that a client has not released: pinned in the arena, or copied into the channel's
 * memory. All records of them lie in the service's own memory, which the client cannot write.
 *
 * A pinned batch is charged with the bytes that it pins (batch_pin). A slot that several batches of
 * the channel pin is charged once. A chunk that becomes resident while batches of the channel pin
 * it stays charged as a slot until they are released.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "channel/channel.h"

#define ENTRY_NONE UINT32_MAX
#define SAMPLE_ALIGNMENT 8u
/* Leading bytes of the memory for copied batches whose pages stay for the next batches. */
#define COPIED_RETAINED_BYTES (UINT64_C(8) << 20)

/* ---- charges --------------------------------------------------------------------------------- */

bool charge(dlfs_channel *channel, uint64_t bytes)
{
    if (!share_charge(channel->memory_share, bytes)) {
        return false;
    }
    counter_add(&channel->counters.memory_bytes, bytes);
    return true;
}

void discharge(dlfs_channel *channel, uint64_t bytes)
{
    share_refund(channel->memory_share, bytes);
    counter_add(&channel->counters.memory_bytes, -bytes);
}

/* ---- pins ------------------------------------------------------------------------------------ */

static bool pin_within_share(dlfs_channel *channel, struct delivered_batch *delivered,
                             struct batch *batch)
{
    uint64_t bytes = batch_pin(channel->reader, &batch->public, channel->pins);
    uint32_t slots_max = reader_slots_max(channel->reader);
    if (!share_charge_part(channel->share, bytes, slots_max, channel->geometry.slot_count)) {
        (void)batch_unpin(channel->reader, &batch->public, channel->pins);
        return false;
    }
    delivered->batch = batch;
    counter_add(&channel->counters.pinned_bytes, bytes);
    return true;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Returns the bytes of a run beyond the retained pages. */
static uint64_t beyond_retained(uint64_t offset, uint64_t bytes)
{
    uint64_t end = offset + bytes;
    uint64_t start = offset > COPIED_RETAINED_BYTES ? offset : COPIED_RETAINED_BYTES;
    return end > start ? end - start : 0;
}

/* Charges the pages of a run; retained pages are charged once. */
static bool charge_copy(dlfs_channel *channel, uint64_t offset, uint64_t bytes)
{
    uint64_t end = offset + bytes < COPIED_RETAINED_BYTES ? offset + bytes : COPIED_RETAINED_BYTES;
    uint64_t more = end > channel->copied_retained ? end - channel->copied_retained : 0;
    if (!charge(channel, more + beyond_retained(offset, bytes))) {
        return false;
    }
    channel->copied_retained += more;
    return true;
}

/* Allocates the first free run of the memory for copied batches that is long enough. */
static bool run_allocate(dlfs_channel *channel, uint64_t bytes, uint64_t *offset)
{
    uint64_t at = 0;
    uint32_t position = 0;
    bytes = (bytes + COPIED_UNIT - 1) / COPIED_UNIT * COPIED_UNIT;
    while (position < channel->run_count && channel->runs[position].offset - at < bytes) {
        at = channel->runs[position].offset + channel->runs[position].bytes;
        position++;
    }
    if (bytes > channel->memory.copied_bytes - at) {
        return false;
    }
    if (!charge_copy(channel, at, bytes)) {
        return false;
    }
    memmove(&channel->runs[position + 1], &channel->runs[position],
            (channel->run_count - position) * sizeof(channel->runs[0]));
    channel->runs[position] = (struct copied_run){at, bytes};
    channel->run_count++;
    counter_add(&channel->counters.copied_bytes, bytes);
    *offset = at;
    return true;
}

static void run_free(dlfs_channel *channel, uint64_t offset)
{
    uint32_t position = 0;
    while (channel->runs[position].offset != offset) {
        position++;
    }
    uint64_t bytes = channel->runs[position].bytes;
    channel->run_count--;
    memmove(&channel->runs[position], &channel->runs[position + 1],
            (channel->run_count - position) * sizeof(channel->runs[0]));
    counter_add(&channel->counters.copied_bytes, -bytes);
    if (offset + bytes > COPIED_RETAINED_BYTES) {
        (void)madvise(channel->memory.copied + offset, bytes, MADV_REMOVE);
    }
    discharge(channel, beyond_retained(offset, bytes));
}

void delivery_trim(dlfs_channel *channel)
{
    if (channel->run_count > 0 || channel->copied_retained == 0) {
        return;
    }
    (void)madvise(channel->memory.copied, channel->copied_retained, MADV_REMOVE);
    discharge(channel, channel->copied_retained);
    channel->copied_retained = 0;
}

static uint64_t aligned(int64_t length)
{
    return ((uint64_t)length + SAMPLE_ALIGNMENT - 1) / SAMPLE_ALIGNMENT * SAMPLE_ALIGNMENT;
}

/* Copies a batch's samples and writes their offsets to the result area. */
static bool copy(dlfs_channel *channel, struct delivered_batch *delivered, struct batch *batch)
{
    const dlfs_batch *from = &batch->public;
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < from->count; i++) {
        if (from->lengths[i] > 0) {
            bytes += aligned(from->lengths[i]);
        }
    }
    if (bytes > channel->memory.copied_bytes || channel->run_count == channel->batches_max ||
        !run_allocate(channel, bytes ? bytes : 1, &delivered->copied_offset)) {
        return false;
    }
    uint8_t *to = channel->memory.copied + delivered->copied_offset;
    uint64_t at = 0;
    for (uint64_t i = 0; i < from->count; i++) {
        channel->memory.offsets[i] = (int64_t)at;
        if (from->lengths[i] <= 0) {
            continue;
        }
        memcpy(to + at, from->base + from->offsets[i], (size_t)from->lengths[i]);
        at += aligned(from->lengths[i]);
    }
    delivered->batch = NULL;
    delivered->copied_bytes = bytes;
    counter_add(&channel->counters.copied_batches, 1);
    return true;
}

/* ---- entries --------------------------------------------------------------------------------- */

int delivery_create(dlfs_channel *channel, uint32_t batches_max)
{
    uint64_t bytes = batches_max * (sizeof(*channel->delivered) + sizeof(*channel->runs)) +
                     channel->geometry.slot_count * sizeof(*channel->pins);
    if (!charge(channel, bytes)) {
        return DLFS_E_LIMIT;
    }
    channel->batches_max = batches_max;
    channel->delivered_free = ENTRY_NONE;
    channel->delivered = calloc(batches_max, sizeof(*channel->delivered));
    channel->runs = calloc(batches_max, sizeof(*channel->runs));
    channel->pins = calloc(channel->geometry.slot_count, sizeof(*channel->pins));
    return channel->delivered != NULL && channel->runs != NULL && channel->pins != NULL ? 0
                                                                                        : -ENOMEM;
}

void delivery_free(dlfs_channel *channel)
{
    free(channel->delivered);
    free(channel->runs);
    free(channel->pins);
}

bool delivery_possible(const dlfs_channel *channel)
{
    return channel->delivered_free != ENTRY_NONE || channel->delivered_used < channel->batches_max;
}

static uint32_t entry_allocate(dlfs_channel *channel)
{
    uint32_t entry = channel->delivered_free;
    if (entry == ENTRY_NONE) {
        return channel->delivered_used++;
    }
    channel->delivered_free = channel->delivered[entry].next;
    return entry;
}

static void entry_free(dlfs_channel *channel, uint32_t entry)
{
    channel->delivered[entry].out = false;
    channel->delivered[entry].generation++;
    channel->delivered[entry].next = channel->delivered_free;
    channel->delivered_free = entry;
}

/* Writes the arrays of a batch to the result area; `indices` only for a stream. */
static void describe(dlfs_channel *channel, const dlfs_batch *batch, bool in_arena, bool indices)
{
    struct channel_memory *memory = &channel->memory;
    if (batch->count == 0) {
        return;
    }
    if (in_arena) {
        memcpy(memory->offsets, batch->offsets, batch->count * sizeof(int64_t));
    }
    memcpy(memory->lengths, batch->lengths, batch->count * sizeof(int64_t));
    if (indices) {
        memcpy(memory->indices, batch->indices, batch->count * sizeof(uint64_t));
    }
    if (batch->failure_count > 0) {
        memcpy(memory->failures, batch->failures, batch->failure_count * sizeof(dlfs_failure));
    }
}

static void count_batch(dlfs_channel_stats *counters, const dlfs_batch *batch)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < batch->count; i++) {
        bytes += batch->lengths[i] > 0 ? (uint64_t)batch->lengths[i] : 0;
    }
    counter_add(&counters->samples, batch->count - batch->failure_count);
    counter_add(&counters->sample_bytes, bytes);
    counter_add(&counters->failures, batch->failure_count);
    counter_add(&counters->batches, 1);
    counter_add(&counters->batches_out, 1);
}

int deliver_batch(dlfs_channel *channel, struct batch *batch, uint64_t charged_bytes, bool indices,
                  struct completion *completion)
{
    uint32_t entry = entry_allocate(channel);
    struct delivered_batch *delivered = &channel->delivered[entry];
    bool in_arena = batch->private_memory == NULL && pin_within_share(channel, delivered, batch);
    if (!in_arena && !copy(channel, delivered, batch)) {
        entry_free(channel, entry);
        return DLFS_E_LIMIT;
    }
    describe(channel, &batch->public, in_arena, indices);
    count_batch(&channel->counters, &batch->public);
    delivered->out = true;
    completion->result = (int64_t)batch->public.count;
    completion->number = ((uint64_t)delivered->generation << 32) | entry;
    completion->failure_count = batch->public.failure_count;
    completion->memory = in_arena ? BATCH_IN_ARENA : BATCH_COPIED;
    completion->base_offset = in_arena ? 0 : delivered->copied_offset;
    completion->base_bytes = in_arena ? batch->public.base_bytes : delivered->copied_bytes;
    delivered->charged_bytes = in_arena ? charged_bytes : 0;
    if (!in_arena) {
        dlfs_batch_release(&batch->public);
        discharge(channel, charged_bytes);
    }
    return 0;
}

static void release_entry(dlfs_channel *channel, uint32_t entry)
{
    struct delivered_batch *delivered = &channel->delivered[entry];
    if (delivered->batch != NULL) {
        uint64_t bytes = batch_unpin(channel->reader, &delivered->batch->public, channel->pins);
        share_refund(channel->share, bytes);
        counter_add(&channel->counters.pinned_bytes, -bytes);
        dlfs_batch_release(&delivered->batch->public);
        discharge(channel, delivered->charged_bytes);
        delivered->batch = NULL;
    } else {
        run_free(channel, delivered->copied_offset);
    }
    counter_add(&channel->counters.batches_out, -UINT64_C(1));
    entry_free(channel, entry);
}

bool delivery_release(dlfs_channel *channel, uint64_t number)
{
    uint32_t entry = (uint32_t)number;
    if (entry >= channel->delivered_used || !channel->delivered[entry].out ||
        channel->delivered[entry].generation != number >> 32) {
        return false;
    }
    release_entry(channel, entry);
    return true;
}

void delivery_release_all(dlfs_channel *channel)
{
    for (uint32_t entry = 0; entry < channel->delivered_used; entry++) {
        if (channel->delivered[entry].out) {
            release_entry(channel, entry);
        }
    }
}
