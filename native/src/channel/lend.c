/*
 * What a client has of the service: batches that pin samples in the arena, or that were copied out
 * of it into the channel's memory. All that is known of them lies in the service's own memory.
 *
 * What a batch pins is counted in whole slots, for a slot with one sample in use can hold no other
 * samples; a slot that several of the channel's batches use is counted once. Where the whole
 * dataset fits in the arena, and in slots of cached samples, which stay anyway, pins keep nobody
 * out: those samples are counted by their bytes.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "channel/channel.h"

#define PLACE_NONE UINT32_MAX
#define SAMPLE_ALIGNMENT 8u
/* Pages of copied batches that lie below this are kept for the next ones. */
#define COPIED_KEPT_BYTES (UINT64_C(8) << 20)

static void add(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_fetch_add_explicit(counter, value, memory_order_relaxed);
}

/* ---- charges --------------------------------------------------------------------------------- */

bool charge(dlfs_channel *channel, uint64_t bytes)
{
    if (!share_charge(channel->memory_share, bytes)) {
        return false;
    }
    add(&channel->counters.memory_bytes, bytes);
    return true;
}

void discharge(dlfs_channel *channel, uint64_t bytes)
{
    share_refund(channel->memory_share, bytes);
    add(&channel->counters.memory_bytes, -bytes);
}

/* ---- pins ------------------------------------------------------------------------------------ */

/* Whether pins in a slot leave the others as much memory as before. */
static bool keeps_nobody_out(const dlfs_reader *reader, uint32_t slot)
{
    uint8_t state = reader->slots[slot].state;
    return reader->dataset_fits || state == SLOT_PACKED || state == SLOT_TAIL;
}

/* Counts a batch's samples in their slots; returns the bytes that are pinned now and were not. */
static uint64_t pin(dlfs_channel *channel, const dlfs_batch *batch)
{
    const dlfs_reader *reader = channel->reader;
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < batch->count; i++) {
        if (batch->lengths[i] <= 0) {
            continue;
        }
        uint32_t slot = slot_of(reader, (uint64_t)batch->offsets[i]);
        if (keeps_nobody_out(reader, slot)) {
            bytes += (uint64_t)batch->lengths[i];
        } else if (channel->pins[slot]++ == 0) {
            bytes += (uint64_t)reader->slots[slot].run << reader->chunk_shift;
        }
    }
    return bytes;
}

/* The reverse; returns the bytes that are not pinned any more. */
static uint64_t unpin(dlfs_channel *channel, const dlfs_batch *batch)
{
    const dlfs_reader *reader = channel->reader;
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < batch->count; i++) {
        if (batch->lengths[i] <= 0) {
            continue;
        }
        uint32_t slot = slot_of(reader, (uint64_t)batch->offsets[i]);
        if (keeps_nobody_out(reader, slot)) {
            bytes += (uint64_t)batch->lengths[i];
        } else if (--channel->pins[slot] == 0) {
            bytes += (uint64_t)reader->slots[slot].run << reader->chunk_shift;
        }
    }
    return bytes;
}

static bool pin_within_share(dlfs_channel *channel, struct lent *lent, struct batch *batch)
{
    uint64_t bytes = pin(channel, &batch->public);
    if (!share_charge(channel->share, bytes)) {
        unpin(channel, &batch->public);
        return false;
    }
    lent->batch = batch;
    add(&channel->counters.pinned_bytes, bytes);
    return true;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Of a run, what lies beyond the pages that are kept. */
static uint64_t beyond_kept(uint64_t offset, uint64_t bytes)
{
    uint64_t end = offset + bytes;
    uint64_t start = offset > COPIED_KEPT_BYTES ? offset : COPIED_KEPT_BYTES;
    return end > start ? end - start : 0;
}

/* Charges the client with the pages of a run: with those that are kept once. */
static bool charge_copy(dlfs_channel *channel, uint64_t offset, uint64_t bytes)
{
    uint64_t end = offset + bytes < COPIED_KEPT_BYTES ? offset + bytes : COPIED_KEPT_BYTES;
    uint64_t more = end > channel->copied_kept ? end - channel->copied_kept : 0;
    if (!charge(channel, more + beyond_kept(offset, bytes))) {
        return false;
    }
    channel->copied_kept += more;
    return true;
}

/* Takes a run of the memory for copied batches, the first that is long enough. */
static bool run_take(dlfs_channel *channel, uint64_t bytes, uint64_t *offset)
{
    uint64_t at = 0;
    uint32_t place = 0;
    bytes = (bytes + COPIED_UNIT - 1) / COPIED_UNIT * COPIED_UNIT;
    while (place < channel->run_count && channel->runs[place].offset - at < bytes) {
        at = channel->runs[place].offset + channel->runs[place].bytes;
        place++;
    }
    if (bytes > channel->memory.copied_bytes - at) {
        return false;
    }
    if (!charge_copy(channel, at, bytes)) {
        return false;
    }
    memmove(&channel->runs[place + 1], &channel->runs[place],
            (channel->run_count - place) * sizeof(channel->runs[0]));
    channel->runs[place] = (struct copied_run){at, bytes};
    channel->run_count++;
    add(&channel->counters.copied_bytes, bytes);
    *offset = at;
    return true;
}

static void run_give_back(dlfs_channel *channel, uint64_t offset)
{
    uint32_t place = 0;
    while (channel->runs[place].offset != offset) {
        place++;
    }
    uint64_t bytes = channel->runs[place].bytes;
    channel->run_count--;
    memmove(&channel->runs[place], &channel->runs[place + 1],
            (channel->run_count - place) * sizeof(channel->runs[0]));
    add(&channel->counters.copied_bytes, -bytes);
    if (offset + bytes > COPIED_KEPT_BYTES) {
        (void)madvise(channel->memory.copied + offset, bytes, MADV_REMOVE);
    }
    discharge(channel, beyond_kept(offset, bytes));
}

void lend_trim(dlfs_channel *channel)
{
    if (channel->run_count > 0 || channel->copied_kept == 0) {
        return;
    }
    (void)madvise(channel->memory.copied, channel->copied_kept, MADV_REMOVE);
    discharge(channel, channel->copied_kept);
    channel->copied_kept = 0;
}

static uint64_t aligned(int64_t length)
{
    return ((uint64_t)length + SAMPLE_ALIGNMENT - 1) / SAMPLE_ALIGNMENT * SAMPLE_ALIGNMENT;
}

/* Copies a batch's samples, and writes where they are to the result area; gives the batch back. */
static bool copy(dlfs_channel *channel, struct lent *lent, struct batch *batch)
{
    const dlfs_batch *from = &batch->public;
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < from->count; i++) {
        if (from->lengths[i] > 0) {
            bytes += aligned(from->lengths[i]);
        }
    }
    if (bytes > channel->memory.copied_bytes || channel->run_count == channel->batches_max ||
        !run_take(channel, bytes ? bytes : 1, &lent->copied_offset)) {
        return false;
    }
    uint8_t *to = channel->memory.copied + lent->copied_offset;
    uint64_t at = 0;
    for (uint64_t i = 0; i < from->count; i++) {
        channel->memory.offsets[i] = (int64_t)at;
        if (from->lengths[i] <= 0) {
            continue;
        }
        memcpy(to + at, from->base + from->offsets[i], (size_t)from->lengths[i]);
        at += aligned(from->lengths[i]);
    }
    lent->batch = NULL;
    lent->copied_bytes = bytes;
    add(&channel->counters.copied_batches, 1);
    return true;
}

/* ---- batches out ----------------------------------------------------------------------------- */

int lend_create(dlfs_channel *channel, uint32_t batches_max)
{
    uint64_t bytes = batches_max * (sizeof(*channel->lent) + sizeof(*channel->runs)) +
                     channel->reader->slot_count * sizeof(*channel->pins);
    if (!charge(channel, bytes)) {
        return DLFS_E_LIMIT;
    }
    channel->batches_max = batches_max;
    channel->lent_free = PLACE_NONE;
    channel->lent = calloc(batches_max, sizeof(*channel->lent));
    channel->runs = calloc(batches_max, sizeof(*channel->runs));
    channel->pins = calloc(channel->reader->slot_count, sizeof(*channel->pins));
    return channel->lent != NULL && channel->runs != NULL && channel->pins != NULL ? 0 : -ENOMEM;
}

void lend_free(dlfs_channel *channel)
{
    free(channel->lent);
    free(channel->runs);
    free(channel->pins);
}

bool lend_possible(const dlfs_channel *channel)
{
    return channel->lent_free != PLACE_NONE || channel->lent_used < channel->batches_max;
}

static uint32_t place_take(dlfs_channel *channel)
{
    uint32_t place = channel->lent_free;
    if (place == PLACE_NONE) {
        return channel->lent_used++;
    }
    channel->lent_free = channel->lent[place].next;
    return place;
}

static void place_give_back(dlfs_channel *channel, uint32_t place)
{
    channel->lent[place].out = false;
    channel->lent[place].generation++;
    channel->lent[place].next = channel->lent_free;
    channel->lent_free = place;
}

/* Writes what the client is told of each sample; it knows the indices of a read. */
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

static uint64_t sample_bytes(const dlfs_batch *batch)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < batch->count; i++) {
        bytes += batch->lengths[i] > 0 ? (uint64_t)batch->lengths[i] : 0;
    }
    return bytes;
}

static void count_batch(struct channel_counters *counters, const dlfs_batch *batch)
{
    add(&counters->samples, batch->count - batch->failure_count);
    add(&counters->sample_bytes, sample_bytes(batch));
    add(&counters->failures, batch->failure_count);
    add(&counters->batches, 1);
    add(&counters->batches_out, 1);
}

int lend_batch(dlfs_channel *channel, struct batch *batch, uint64_t charged_bytes, bool indices,
               struct completion *completion)
{
    uint32_t place = place_take(channel);
    struct lent *lent = &channel->lent[place];
    bool in_arena = batch->private_memory == NULL && pin_within_share(channel, lent, batch);
    if (!in_arena && !copy(channel, lent, batch)) {
        place_give_back(channel, place);
        return DLFS_E_LIMIT;
    }
    describe(channel, &batch->public, in_arena, indices);
    count_batch(&channel->counters, &batch->public);
    lent->out = true;
    completion->result = (int64_t)batch->public.count;
    completion->number = ((uint64_t)lent->generation << 32) | place;
    completion->failure_count = batch->public.failure_count;
    completion->place = in_arena ? BATCH_IN_ARENA : BATCH_COPIED;
    completion->base_offset = in_arena ? 0 : lent->copied_offset;
    completion->base_bytes = in_arena ? batch->public.base_bytes : lent->copied_bytes;
    lent->charged_bytes = in_arena ? charged_bytes : 0;
    if (!in_arena) {
        dlfs_batch_release(&batch->public);
        discharge(channel, charged_bytes);
    }
    return 0;
}

static void take_back(dlfs_channel *channel, uint32_t place)
{
    struct lent *lent = &channel->lent[place];
    if (lent->batch != NULL) {
        uint64_t bytes = unpin(channel, &lent->batch->public);
        share_refund(channel->share, bytes);
        add(&channel->counters.pinned_bytes, -bytes);
        dlfs_batch_release(&lent->batch->public);
        discharge(channel, lent->charged_bytes);
        lent->batch = NULL;
    } else {
        run_give_back(channel, lent->copied_offset);
    }
    add(&channel->counters.batches_out, -UINT64_C(1));
    place_give_back(channel, place);
}

bool lend_take_back(dlfs_channel *channel, uint64_t number)
{
    uint32_t place = (uint32_t)number;
    if (place >= channel->lent_used || !channel->lent[place].out ||
        channel->lent[place].generation != number >> 32) {
        return false;
    }
    take_back(channel, place);
    return true;
}

void lend_take_back_all(dlfs_channel *channel)
{
    for (uint32_t place = 0; place < channel->lent_used; place++) {
        if (channel->lent[place].out) {
            take_back(channel, place);
        }
    }
}
