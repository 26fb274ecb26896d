/*
 * Checks every PDU that a queue pair receives against the commands in flight. These are protocol
 * errors, after which the target cannot be trusted and the connection is closed: a PDU for a
 * command that is not in flight, data outside the requested range or out of order, and a success
 * before all data was transferred. A wrong data digest is an error of its command alone, which is
 * sent again.
 *
 * Source: NVM Express TCP Transport Specification 1.0, on data digest errors.
 */
#include "nvme/transfer.h"

/* Times that one command is sent again after a wrong data digest. */
#define DIGEST_RETRIES_MAX 16u

/* Returns the command in flight with a command ID, or NULL. */
static struct nvme_command *find_command(struct nvme_queue *queue, uint16_t cid)
{
    uint32_t number = cid & NVME_CID_INDEX;
    if (number >= queue->command_count) {
        return NULL;
    }
    struct nvme_command *command = &queue->commands[number];
    bool to_be_sent = command->to_host && command->sends_pending > 0;
    return command->in_flight && command->cid == cid && !command->completed && !to_be_sent ? command
                                                                                           : NULL;
}

static uint32_t number_of(const struct nvme_queue *queue, const struct nvme_command *command)
{
    return (uint32_t)(command - queue->commands);
}

/* Returns the destination of a C2HData. */
static int queue_begin_data(void *context, const struct nvme_pdu *pdu, uint8_t **destination,
                            const char **reason)
{
    struct nvme_queue *queue = context;
    const struct nvme_command *command = find_command(queue, pdu->cid);
    if (command == NULL || !command->to_host) {
        return nvme_protocol_error(reason, "data for a command that is not under way");
    }
    uint32_t left_bytes = command->length_bytes - command->transferred_bytes;
    if (command->last_seen || pdu->offset_bytes != command->transferred_bytes ||
        pdu->data_bytes > left_bytes) {
        return nvme_protocol_error(reason, "data out of place, or more than was asked for");
    }
    bool last = (pdu->flags & NVME_PDU_LAST) != 0;
    if (last != (pdu->data_bytes == left_bytes) && command->kind != NVME_OP_PASSTHROUGH) {
        return nvme_protocol_error(reason, "the LAST flag on the wrong C2HData");
    }
    *destination = command->buffer + command->transferred_bytes;
    return 0;
}

/* Ends a command that succeeded, or sends it again if its data had a wrong digest. */
static void command_succeeded(struct nvme_queue *queue, struct nvme_command *command)
{
    uint32_t number = number_of(queue, command);
    if (command->digest_failed && command->digest_retries < DIGEST_RETRIES_MAX) {
        atomic_fetch_add(&queue->association->counters.retries, 1);
        command->digest_retries++;
        nvme_sendable_append(queue, number);
        return;
    }
    if (command->digest_failed && queue->operations[command->operation].code == 0) {
        queue->operations[command->operation].code = DLFS_E_DIGEST;
    }
    nvme_command_end(queue, number, 0);
}

/* Notes that the data of a C2HData has arrived. */
static int queue_end_data(void *context, const struct nvme_pdu *pdu, bool digest_valid,
                          const char **reason)
{
    (void)reason;
    struct nvme_queue *queue = context;
    struct nvme_command *command = &queue->commands[pdu->cid & NVME_CID_INDEX];
    command->transferred_bytes += pdu->data_bytes;
    command->last_seen = (pdu->flags & NVME_PDU_LAST) != 0;
    if (!digest_valid) {
        command->digest_failed = true;
        atomic_fetch_add(&queue->association->counters.digest_errors, 1);
    }
    if ((pdu->flags & NVME_PDU_SUCCESS) != 0) {
        if (command->kind == NVME_OP_PASSTHROUGH) {
            queue->passthrough->cqe = (struct nvme_cqe){.cid = command->cid};
        }
        command_succeeded(queue, command);
    }
    return 0;
}

/* Handles a completion queue entry. */
static int queue_on_cqe(void *context, const struct nvme_pdu *pdu, const char **reason)
{
    struct nvme_queue *queue = context;
    struct nvme_command *command = find_command(queue, pdu->cid);
    if (command == NULL) {
        return nvme_protocol_error(reason, "a completion of a command that is not under way");
    }
    bool success = (pdu->cqe.status & NVME_STATUS_CODE) == 0;
    bool whole =
        command->transferred_bytes == command->length_bytes || command->kind == NVME_OP_PASSTHROUGH;
    if (success && (!whole || command->sends_pending > 0)) {
        return nvme_protocol_error(reason,
                                   "a completion before all of the command's data had been moved");
    }
    if (command->kind == NVME_OP_PASSTHROUGH) {
        queue->passthrough->cqe = pdu->cqe;
    }
    if (command->sends_pending > 0) {
        /* Its data is still in the send buffer: the caller's buffer stays in use until it is sent.
         */
        command->completed = true;
        command->status = pdu->cqe.status;
        return 0;
    }
    if (success) {
        command_succeeded(queue, command);
    } else {
        nvme_command_end(queue, number_of(queue, command), pdu->cqe.status);
    }
    return 0;
}

/* Handles a request to transfer: the controller is ready for data of a write. */
static int queue_on_r2t(void *context, const struct nvme_pdu *r2t, const char **reason)
{
    struct nvme_queue *queue = context;
    struct nvme_command *command = find_command(queue, r2t->cid);
    if (command == NULL || command->to_host) {
        return nvme_protocol_error(reason, "an R2T for a command that is not under way");
    }
    uint32_t left_bytes = command->length_bytes - command->transferred_bytes;
    if (command->r2t_left_bytes > 0 || r2t->data_bytes == 0 ||
        r2t->offset_bytes != command->transferred_bytes || r2t->data_bytes > left_bytes) {
        return nvme_protocol_error(reason, "an R2T for data that is not there, or was sent before");
    }
    command->r2t_tag = r2t->tag;
    command->r2t_left_bytes = r2t->data_bytes;
    nvme_sendable_append(queue, number_of(queue, command));
    return 0;
}

const struct nvme_sink nvme_queue_sink = {.begin_data = queue_begin_data,
                                          .end_data = queue_end_data,
                                          .on_cqe = queue_on_cqe,
                                          .on_r2t = queue_on_r2t};
