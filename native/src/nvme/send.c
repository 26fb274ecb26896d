/*
 * Sends what a queue pair has to send, with few system calls: commands of waiting operations, data
 * that R2Ts request, and commands whose data arrived with a wrong digest once more. PDU headers and
 * digests lie next to each other in the send buffer, so that a batch of reads is one vector.
 */
#include <errno.h>

#include "nvme/transfer.h"
#include "platform/clock.h"

/* Bytes after whose commands one round of issuing ends, and they are sent. */
#define ROUND_BYTES_MAX (UINT64_C(512) << 10)
/* Interval at which a write that waits for the confirmation of the lease is checked. */
#define PERMIT_CHECK_NS (UINT64_C(5) * NVME_NANOSECONDS_PER_MS)

void nvme_output_clear(struct nvme_queue *queue)
{
    queue->out.used_bytes = 0;
    queue->out.first = 0;
    queue->out.count = 0;
    queue->socket_full = false;
}

/* Returns true if the send buffer has room for one more PDU: header, data and digest. */
static bool output_has_room(const struct nvme_output *out)
{
    return out->used_bytes + NVME_HEAD_BYTES_MAX + NVME_DIGEST_BYTES <= NVME_OUTPUT_BYTES &&
           out->count + 3 <= NVME_OUTPUT_VECTORS;
}

/* Adds the bytes that were just written at the end of out->bytes to what is sent. */
static void output_add_bytes(struct nvme_output *out, uint32_t bytes)
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

/* Adds a command's data and its digest behind the PDU header that was added last. */
static void output_add_data(struct nvme_queue *queue, uint32_t number, uint8_t *data,
                            uint32_t bytes)
{
    struct nvme_output *out = &queue->out;
    out->owners[out->count] = number;
    out->vectors[out->count++] = (struct iovec){data, bytes};
    queue->commands[number].sends_pending++;
    if (queue->connection->terms.data_digest) {
        nvme_put32(out->bytes + out->used_bytes, dlfs_crc32c(0, data, bytes));
        output_add_bytes(out, NVME_DIGEST_BYTES);
    }
}

/* ---- commands -------------------------------------------------------------------------------- */

/*
 * Returns the next command ID of a command: its index, and above that a count of its uses, by which
 * an answer to an earlier use is recognized.
 */
static uint16_t next_cid(const struct nvme_queue *queue, uint32_t number)
{
    uint16_t cid = (uint16_t)(queue->commands[number].cid + 0x1000u);
    return cid < 0xF000u ? cid : (uint16_t)number;
}

/* Takes a command from the free list. */
static uint32_t take_command(struct nvme_queue *queue)
{
    uint32_t number = queue->free_command;
    struct nvme_command *command = &queue->commands[number];
    queue->free_command = command->next;
    queue->in_flight_count++;
    *command = (struct nvme_command){.cid = next_cid(queue, number), .in_flight = true};
    return number;
}

static void fill_entry(const struct nvme_queue *queue, const struct nvme_operation *operation,
                       const struct nvme_command *command, uint8_t *entry)
{
    if (operation->kind == NVME_OP_PASSTHROUGH) {
        memcpy(entry, queue->passthrough->entry, NVME_ENTRY_BYTES);
        return;
    }
    uint8_t opcode = operation->kind == DLFS_OP_WRITE ? NVME_OPCODE_WRITE : NVME_OPCODE_READ;
    uint64_t offset_bytes =
        operation->offset_bytes + (uint64_t)(command->buffer - operation->buffer);
    nvme_entry_transfer(entry, opcode, queue->nsid, offset_bytes >> queue->block_shift,
                        command->length_bytes >> queue->block_shift);
}

static enum nvme_transfer choose_transfer(const struct nvme_queue *queue,
                                          const struct nvme_command *command)
{
    if (command->length_bytes == 0) {
        return NVME_NO_DATA;
    }
    if (command->to_host) {
        return NVME_TO_HOST;
    }
    return command->length_bytes <= queue->connection->capsule_bytes_max ? NVME_IN_CAPSULE
                                                                         : NVME_BY_R2T;
}

/* Puts a command into the send buffer. Requires output_has_room. */
static void encode_command(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_command *command = &queue->commands[number];
    struct nvme_output *out = &queue->out;
    uint8_t entry[NVME_ENTRY_BYTES];
    enum nvme_transfer transfer = choose_transfer(queue, command);
    uint32_t capsule_bytes = transfer == NVME_IN_CAPSULE ? command->length_bytes : 0;
    fill_entry(queue, &queue->operations[command->operation], command, entry);
    nvme_entry_finish(entry, command->cid, transfer, command->length_bytes);
    output_add_bytes(out, nvme_encode_command(&queue->connection->terms, entry, capsule_bytes,
                                              out->bytes + out->used_bytes));
    if (capsule_bytes > 0) {
        command->transferred_bytes = capsule_bytes;
        output_add_data(queue, number, command->buffer, capsule_bytes);
    }
}

/* Issues the next command of an operation. Requires a free command and output_has_room. */
static void issue_next_command(struct nvme_queue *queue, uint32_t number, uint64_t now_ns)
{
    struct nvme_operation *operation = &queue->operations[number];
    uint32_t index = take_command(queue);
    struct nvme_command *command = &queue->commands[index];
    uint32_t left_bytes = operation->length_bytes - operation->issued_bytes;
    uint32_t most = queue->connection->transfer_bytes_max;
    bool passthrough = operation->kind == NVME_OP_PASSTHROUGH;
    command->operation = number;
    command->kind = operation->kind;
    command->buffer = operation->buffer + operation->issued_bytes;
    command->length_bytes = passthrough || left_bytes < most ? left_bytes : most;
    command->sent_ns = now_ns;
    command->to_host = passthrough ? queue->passthrough->direction == DLFS_NVME_DATA_IN
                                   : operation->kind == DLFS_OP_READ;
    encode_command(queue, index);
    queue->small_count += nvme_command_is_small(command);
    queue->write_count += command->kind == DLFS_OP_WRITE;
    queue->change_count += command->kind != DLFS_OP_READ; /* may_issue has counted it too */
    operation->issued_bytes += command->length_bytes;
    operation->commands_in_flight++;
}

/* ---- what may be issued ---------------------------------------------------------------------- */

static int write_permit(const struct nvme_queue *queue)
{
    return nvme_write_permit(&queue->association->write_limit, queue->connection->incarnation);
}

uint64_t nvme_issue_time(const struct nvme_queue *queue, struct nvme_operation *operation,
                         uint64_t now_ns)
{
    if (operation->kind == DLFS_OP_READ || queue->connection == NULL) {
        return 0;
    }
    if (atomic_load(&queue->association->writes_paused)) {
        return now_ns + PERMIT_CHECK_NS;
    }
    if (operation->kind != DLFS_OP_WRITE) {
        return 0;
    }
    if (operation->not_before_ns != 0) {
        uint64_t now = monotonic_ns();
        if (now < operation->not_before_ns) {
            return now_ns + (operation->not_before_ns - now);
        }
        operation->not_before_ns = 0;
    }
    return write_permit(queue) == -EAGAIN ? now_ns + PERMIT_CHECK_NS : 0;
}

/* Ends the first waiting operation if it is a write to a namespace that has become read-only, or
 * the writer's lease has expired. */
static bool fails_unsent(struct nvme_queue *queue, struct nvme_operation *operation)
{
    if (operation->kind != DLFS_OP_WRITE) {
        return false;
    }
    bool protected = atomic_load(&queue->association->write_protected);
    int code = protected ? -EROFS : write_permit(queue) == -EKEYEXPIRED ? -EKEYEXPIRED : 0;
    if (code == 0) {
        return false;
    }
    operation->code = code;
    nvme_drop_failed(queue);
    return true;
}

/*
 * Returns false if commands other than reads are paused, or the controller is not the present
 * one any more. Counts the command before it looks: the thread pauses commands first and then
 * reads the count, so that one of both sees the other.
 */
static bool may_issue(struct nvme_queue *queue, const struct nvme_operation *operation)
{
    struct nvme_association *association = queue->association;
    if (operation->kind == DLFS_OP_READ) {
        return true;
    }
    atomic_fetch_add(&association->writes_in_flight, 1);
    if (!atomic_load(&association->writes_paused) &&
        queue->connection->incarnation == atomic_load(&association->incarnation)) {
        return true;
    }
    atomic_fetch_sub(&association->writes_in_flight, 1);
    return false;
}

/*
 * Issues waiting operations for one call that sends them, up to ROUND_BYTES_MAX and up to half of
 * the commands that may be in flight. A target may process commands that arrive together as one
 * batch and answer after the last of them. With two batches in flight it processes one while the
 * host receives the answers to the other.
 */
static void issue_waiting(struct nvme_queue *queue)
{
    uint64_t now_ns = queue->polled_ns - queue->paused_ns;
    uint64_t issued_total_bytes = 0;
    uint32_t left = (queue->command_count + 1) / 2;
    nvme_drop_failed(queue);
    while (queue->waiting.first != NVME_NONE && issued_total_bytes < ROUND_BYTES_MAX &&
           left-- > 0) {
        struct nvme_operation *operation = &queue->operations[queue->waiting.first];
        if (queue->free_command == NVME_NONE || !output_has_room(&queue->out)) {
            return;
        }
        if (fails_unsent(queue, operation)) {
            continue;
        }
        uint64_t issue_at_ns = nvme_issue_time(queue, operation, now_ns);
        if (issue_at_ns > 0) {
            nvme_queue_note_deadline(queue, issue_at_ns);
            return;
        }
        if (!may_issue(queue, operation)) {
            nvme_queue_note_deadline(queue, now_ns + PERMIT_CHECK_NS);
            return;
        }
        uint32_t before_bytes = operation->issued_bytes;
        issue_next_command(queue, queue->waiting.first, now_ns);
        issued_total_bytes += operation->issued_bytes - before_bytes;
        nvme_queue_note_deadline(queue, now_ns + queue->timeout_ns);
        if (operation->issued_bytes == operation->length_bytes) {
            (void)nvme_waiting_pop(queue);
        }
    }
}

/* ---- R2T data and repeated commands ---------------------------------------------------------- */

/* Puts a command whose data arrived with a wrong digest into the send buffer again. */
static void reissue_command(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_command *command = &queue->commands[number];
    command->cid = next_cid(queue, number);
    command->digest_failed = false;
    command->last_seen = false;
    command->transferred_bytes = 0;
    command->sent_ns = queue->polled_ns - queue->paused_ns;
    encode_command(queue, number);
}

/* Puts the next H2CData PDU that answers an R2T into the send buffer; returns true if it is the
 * last one. */
static bool encode_r2t_data(struct nvme_queue *queue, uint32_t number)
{
    struct nvme_command *command = &queue->commands[number];
    struct nvme_output *out = &queue->out;
    uint32_t most = queue->connection->terms.data_bytes_max;
    uint32_t bytes = command->r2t_left_bytes < most ? command->r2t_left_bytes : most;
    bool last = bytes == command->r2t_left_bytes;
    struct nvme_pdu r2t = {.cid = command->cid, .tag = command->r2t_tag};
    output_add_bytes(out,
                     nvme_encode_data(&queue->connection->terms, &r2t, command->transferred_bytes,
                                      bytes, last, out->bytes + out->used_bytes));
    output_add_data(queue, number, command->buffer + command->transferred_bytes, bytes);
    command->transferred_bytes += bytes;
    command->r2t_left_bytes -= bytes;
    return last;
}

/* Puts what the sendable commands have to send into the send buffer while there is room. */
static void issue_sendable(struct nvme_queue *queue)
{
    while (queue->sendable.first != NVME_NONE && output_has_room(&queue->out)) {
        uint32_t number = queue->sendable.first;
        struct nvme_command *command = &queue->commands[number];
        if (command->to_host) {
            reissue_command(queue, number);
        } else if (!command->completed && !encode_r2t_data(queue, number)) {
            continue;
        }
        queue->sendable.first = command->next;
        command->sends_pending--;
        if (command->completed && command->sends_pending == 0) {
            nvme_command_end(queue, number, command->status);
        }
    }
}

/* ---- sending --------------------------------------------------------------------------------- */

/* Notes that a vector was sent, and ends its command if only that was missing. */
static void vector_sent(struct nvme_queue *queue, uint32_t owner)
{
    if (owner == NVME_NONE) {
        return;
    }
    struct nvme_command *command = &queue->commands[owner];
    command->sends_pending--;
    if (command->completed && command->sends_pending == 0) {
        nvme_command_end(queue, owner, command->status);
    }
}

/* Removes bytes that the socket took from the send buffer. */
static void output_sent(struct nvme_queue *queue, size_t bytes)
{
    struct nvme_output *out = &queue->out;
    while (out->first < out->count && bytes >= out->vectors[out->first].iov_len) {
        bytes -= out->vectors[out->first].iov_len;
        vector_sent(queue, out->owners[out->first++]);
    }
    if (out->first == out->count) {
        nvme_output_clear(queue);
    } else {
        struct iovec *vector = &out->vectors[out->first];
        vector->iov_base = (uint8_t *)vector->iov_base + bytes;
        vector->iov_len -= bytes;
    }
}

int nvme_send_pending(struct nvme_queue *queue, const char **reason)
{
    struct nvme_output *out = &queue->out;
    for (;;) {
        if (queue->sendable.first != NVME_NONE) {
            issue_sendable(queue);
        }
        issue_waiting(queue);
        if (out->count == 0) {
            return 0;
        }
        /* Checked right before the call: the process may have been stopped since it was issued. */
        int permit = queue->write_count > 0 ? write_permit(queue) : 0;
        if (permit < 0) {
            *reason = "the writer's lease ended before a write was sent";
            return permit == -EAGAIN ? DLFS_E_LOST : permit;
        }
        ssize_t sent = nvme_connection_send(queue->connection, out->vectors + out->first,
                                            out->count - out->first, reason);
        if (sent < 0) {
            return (int)sent;
        }
        queue->socket_full = sent == 0;
        if (sent == 0) {
            return 0;
        }
        output_sent(queue, (size_t)sent);
    }
}
