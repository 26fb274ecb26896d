/*
 * What a queue pair sends: commands as soon as there are slots and room, data as R2Ts ask for it,
 * once more what came back garbled, with few system calls. Heads and digests are written one behind
 * the other, so that a batch of reads is one vector.
 */
#include <errno.h>

#include "nvme/queue.h"
#include "platform/clock.h"

#define ASKED_BYTES_MAX (UINT64_C(512) << 10) /* with one system call */
/* How often a write that waits for its lease to be confirmed is looked at. */
#define PERMIT_LOOK_NS (UINT64_C(5) * NVME_NANOSECONDS_PER_MS)

void nvme_out_clear(struct nvme_queue *queue)
{
    queue->out.used_bytes = 0;
    queue->out.first = 0;
    queue->out.count = 0;
    queue->blocked = false;
}

/* Room for one more PDU: its head, its data and its digest. */
static bool out_has_room(const struct nvme_out *out)
{
    return out->used_bytes + NVME_HEAD_BYTES_MAX + NVME_DIGEST_BYTES <= NVME_OUT_BYTES &&
           out->count + 3 <= NVME_OUT_VECTORS;
}

/* The bytes that were just written at the end of out->bytes are to be sent. */
static void out_add_bytes(struct nvme_out *out, uint32_t bytes)
{
    uint8_t *start = out->bytes + out->used_bytes;
    out->used_bytes += bytes;
    if (out->count > out->first) {
        struct iovec *last = &out->vectors[out->count - 1];
        if ((uint8_t *)last->iov_base + last->iov_len == start) {
            last->iov_len += bytes;
            return;
        }
    }
    out->owners[out->count] = NVME_NONE;
    out->vectors[out->count++] = (struct iovec){start, bytes};
}

/* Data of a slot, and its digest, follow the head that was added last. */
static void out_add_data(struct nvme_queue *queue, uint32_t number, uint8_t *data, uint32_t bytes)
{
    struct nvme_out *out = &queue->out;
    out->owners[out->count] = number;
    out->vectors[out->count++] = (struct iovec){data, bytes};
    queue->slots[number].pending++;
    if (queue->connection->terms.data_digest) {
        nvme_put32(out->bytes + out->used_bytes, dlfs_crc32c(0, data, bytes));
        out_add_bytes(out, NVME_DIGEST_BYTES);
    }
}

/* ---- commands -------------------------------------------------------------------------------- */

/* Twelve bits of slot, and a count above them that shows a late answer for what it is. */
static uint16_t next_cid(const struct nvme_queue *queue, uint32_t number)
{
    uint16_t cid = (uint16_t)(queue->slots[number].cid + 0x1000u);
    return cid < 0xF000u ? cid : (uint16_t)number;
}

static uint32_t slot_take(struct nvme_queue *queue)
{
    uint32_t number = queue->free_slot;
    struct nvme_slot *slot = &queue->slots[number];
    queue->free_slot = slot->next;
    queue->busy_count++;
    *slot = (struct nvme_slot){.cid = next_cid(queue, number), .busy = true};
    return number;
}

static void fill_entry(const struct nvme_queue *queue, const struct nvme_operation *operation,
                       const struct nvme_slot *slot, uint8_t *entry)
{
    if (operation->kind == NVME_OP_GENERIC) {
        memcpy(entry, queue->generic.entry, NVME_ENTRY_BYTES);
        return;
    }
    uint8_t opcode = operation->kind == DLFS_OP_WRITE ? NVME_OPCODE_WRITE : NVME_OPCODE_READ;
    uint64_t offset_bytes = operation->offset_bytes + (uint64_t)(slot->buffer - operation->buffer);
    nvme_entry_transfer(entry, opcode, queue->nsid, offset_bytes >> queue->block_shift,
                        slot->length_bytes >> queue->block_shift);
}

static enum nvme_transfer choose_transfer(const struct nvme_queue *queue,
                                          const struct nvme_slot *slot)
{
    if (slot->length_bytes == 0) {
        return NVME_NO_DATA;
    }
    if (slot->to_host) {
        return NVME_TO_HOST;
    }
    return slot->length_bytes <= queue->connection->capsule_bytes_max ? NVME_IN_CAPSULE
                                                                      : NVME_BY_R2T;
}

/* Sends the command of a part. There is room. */
static void issue_command(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_slot *slot = &queue->slots[number];
    struct nvme_out *out = &queue->out;
    uint8_t entry[NVME_ENTRY_BYTES];
    enum nvme_transfer transfer = choose_transfer(queue, slot);
    uint32_t capsule_bytes = transfer == NVME_IN_CAPSULE ? slot->length_bytes : 0;
    fill_entry(queue, &queue->operations[slot->operation], slot, entry);
    nvme_entry_finish(entry, slot->cid, transfer, slot->length_bytes);
    out_add_bytes(out, nvme_encode_command(&queue->connection->terms, entry, capsule_bytes,
                                           out->bytes + out->used_bytes));
    if (capsule_bytes > 0) {
        slot->moved_bytes = capsule_bytes;
        out_add_data(queue, number, slot->buffer, capsule_bytes);
    }
}

/* Makes the next part of an operation a command. There is a slot, and room. */
static void issue_part(struct nvme_queue *queue, uint32_t number, uint64_t now_ns)
{
    struct nvme_operation *operation = &queue->operations[number];
    uint32_t slot_number = slot_take(queue);
    struct nvme_slot *slot = &queue->slots[slot_number];
    uint32_t left_bytes = operation->length_bytes - operation->issued_bytes;
    uint32_t most = queue->connection->transfer_bytes_max;
    bool generic = operation->kind == NVME_OP_GENERIC;
    slot->operation = number;
    slot->kind = operation->kind;
    slot->buffer = operation->buffer + operation->issued_bytes;
    slot->length_bytes = generic || left_bytes < most ? left_bytes : most;
    slot->sent_ns = now_ns;
    slot->to_host =
        generic ? queue->generic.direction == DLFS_NVME_DATA_IN : operation->kind == DLFS_OP_READ;
    issue_command(queue, slot_number);
    queue->small_count += nvme_slot_is_small(slot);
    queue->write_count += slot->kind == DLFS_OP_WRITE;
    operation->issued_bytes += slot->length_bytes;
    operation->parts++;
}

/* Takes the first waiting operation out of the list. */
static uint32_t waiting_pop(struct nvme_queue *queue)
{
    uint32_t number = queue->waiting.first;
    struct nvme_operation *operation = &queue->operations[number];
    queue->waiting.first = operation->next;
    operation->waiting = false;
    return number;
}

void nvme_pop_failed(struct nvme_queue *queue)
{
    while (queue->waiting.first != NVME_NONE) {
        const struct nvme_operation *operation = &queue->operations[queue->waiting.first];
        if (operation->code == 0 && operation->passing_code == 0) {
            return;
        }
        uint32_t number = waiting_pop(queue);
        if (operation->parts == 0) {
            nvme_operation_end(queue, number);
        }
    }
}

/* ---- what may be issued ---------------------------------------------------------------------- */

static int write_permit(const struct nvme_queue *queue)
{
    return nvme_write_permit(&queue->association->write_limit, queue->connection->generation);
}

uint64_t nvme_held_until(const struct nvme_queue *queue, struct nvme_operation *operation,
                         uint64_t now_ns)
{
    if (operation->kind != DLFS_OP_WRITE || queue->connection == NULL) {
        return 0;
    }
    if (operation->after_ns != 0) {
        uint64_t now = monotonic_ns();
        if (now < operation->after_ns) {
            return now_ns + (operation->after_ns - now);
        }
        operation->after_ns = 0;
    }
    return write_permit(queue) == -EAGAIN ? now_ns + PERMIT_LOOK_NS : 0;
}

/* Ends the first of the waiting operations when it is a write whose lease is over. */
static bool ends_with_lease(struct nvme_queue *queue, struct nvme_operation *operation)
{
    if (operation->kind != DLFS_OP_WRITE || write_permit(queue) != -EKEYEXPIRED) {
        return false;
    }
    operation->code = -EKEYEXPIRED;
    nvme_pop_failed(queue);
    return true;
}

/*
 * Makes what waits commands, for one call that sends them: not all at once where much is asked for,
 * nor more than half of what may be under way, since a target may serve together what came
 * together, and answer after the last of it only. In two halves, one is served while the other's
 * answers are taken.
 */
static void issue_waiting(struct nvme_queue *queue)
{
    uint64_t now_ns = queue->seen_ns - queue->paused_ns;
    uint64_t asked_bytes = 0;
    uint32_t left = (queue->slot_count + 1) / 2;
    nvme_pop_failed(queue);
    while (queue->waiting.first != NVME_NONE && asked_bytes < ASKED_BYTES_MAX && left-- > 0) {
        struct nvme_operation *operation = &queue->operations[queue->waiting.first];
        if (queue->free_slot == NVME_NONE || !out_has_room(&queue->out)) {
            return;
        }
        if (ends_with_lease(queue, operation)) {
            continue;
        }
        uint64_t held_ns = nvme_held_until(queue, operation, now_ns);
        if (held_ns > 0) {
            nvme_expect_by(queue, held_ns);
            return;
        }
        uint32_t before_bytes = operation->issued_bytes;
        issue_part(queue, queue->waiting.first, now_ns);
        asked_bytes += operation->issued_bytes - before_bytes;
        nvme_expect_by(queue, now_ns + queue->timeout_ns);
        if (operation->issued_bytes == operation->length_bytes) {
            (void)waiting_pop(queue);
        }
    }
}

/* ---- what is asked for by answers ------------------------------------------------------------ */

void nvme_ready_append(struct nvme_queue *queue, uint32_t number)
{
    queue->slots[number].pending++;
    queue->slots[number].next = NVME_NONE;
    if (queue->ready.first == NVME_NONE) {
        queue->ready.first = number;
    } else {
        queue->slots[queue->ready.last].next = number;
    }
    queue->ready.last = number;
}

/* Sends a command again whose data came garbled. */
static void issue_again(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_slot *slot = &queue->slots[number];
    slot->cid = next_cid(queue, number);
    slot->garbled = false;
    slot->ended = false;
    slot->moved_bytes = 0;
    slot->sent_ns = queue->seen_ns - queue->paused_ns;
    issue_command(queue, number);
}

/* Sends one more piece of what an R2T asked for; true when that was the last. */
static bool issue_data(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_slot *slot = &queue->slots[number];
    struct nvme_out *out = &queue->out;
    uint32_t most = queue->connection->terms.data_bytes_max;
    uint32_t bytes = slot->ready_bytes < most ? slot->ready_bytes : most;
    bool last = bytes == slot->ready_bytes;
    struct nvme_pdu r2t = {.cid = slot->cid, .tag = slot->ready_tag};
    out_add_bytes(out, nvme_encode_data(&queue->connection->terms, &r2t, slot->moved_bytes, bytes,
                                        last, out->bytes + out->used_bytes));
    out_add_data(queue, number, slot->buffer + slot->moved_bytes, bytes);
    slot->moved_bytes += bytes;
    slot->ready_bytes -= bytes;
    return last;
}

static void issue_ready(struct nvme_queue *queue)
{
    while (queue->ready.first != NVME_NONE && out_has_room(&queue->out)) {
        uint32_t number = queue->ready.first;
        struct nvme_slot *slot = &queue->slots[number];
        if (slot->to_host) {
            issue_again(queue, number);
        } else if (!slot->answered && !issue_data(queue, number)) {
            continue;
        }
        queue->ready.first = slot->next;
        slot->pending--;
        if (slot->answered && slot->pending == 0) {
            nvme_part_end(queue, number, slot->status);
        }
    }
}

/* ---- sending --------------------------------------------------------------------------------- */

static void vector_sent(struct nvme_queue *queue, uint32_t owner)
{
    if (owner == NVME_NONE) {
        return;
    }
    struct nvme_slot *slot = &queue->slots[owner];
    slot->pending--;
    if (slot->answered && slot->pending == 0) {
        nvme_part_end(queue, owner, slot->status);
    }
}

static void out_sent(struct nvme_queue *queue, size_t bytes)
{
    struct nvme_out *out = &queue->out;
    while (out->first < out->count && bytes >= out->vectors[out->first].iov_len) {
        bytes -= out->vectors[out->first].iov_len;
        vector_sent(queue, out->owners[out->first++]);
    }
    if (out->first == out->count) {
        nvme_out_clear(queue);
    } else {
        struct iovec *vector = &out->vectors[out->first];
        vector->iov_base = (uint8_t *)vector->iov_base + bytes;
        vector->iov_len -= bytes;
    }
}

int nvme_pump(struct nvme_queue *queue, const char **reason)
{
    struct nvme_out *out = &queue->out;
    for (;;) {
        if (queue->ready.first != NVME_NONE) {
            issue_ready(queue);
        }
        issue_waiting(queue);
        if (out->count == 0) {
            return 0;
        }
        /* Right before the call: the process may have stood still since a write was issued. */
        int permit = queue->write_count > 0 ? write_permit(queue) : 0;
        if (permit < 0) {
            *reason = "the writer's lease ended before a write was sent";
            return permit == -EAGAIN ? DLFS_E_LOST : permit;
        }
        ssize_t sent = nvme_connection_send(queue->connection, out->vectors + out->first,
                                            out->count - out->first);
        if (sent < 0) {
            *reason = sent == DLFS_E_TIMEOUT ? "the network gave up on the target"
                                             : "the target closed the connection";
            return (int)sent;
        }
        queue->blocked = sent == 0;
        if (sent == 0) {
            return 0;
        }
        out_sent(queue, (size_t)sent);
    }
}
