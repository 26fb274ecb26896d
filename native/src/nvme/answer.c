/*
 * What a queue pair receives, checked against the commands that are under way. An answer to
 * nothing, data outside of what was asked for or in another order, a success whose bytes did not
 * all come or go: the target cannot be trusted with anything that is under way, and the connection
 * ends. A wrong digest of data is an error of its command alone, which is sent again.
 *
 * Source: NVM Express TCP Transport Specification 1.0, on data digest errors.
 */
#include "nvme/queue.h"

#define TRIES_MAX 16u /* of a command whose data comes with a wrong digest */

static int broken(const char **reason, const char *text)
{
    *reason = text;
    return DLFS_E_PROTOCOL;
}

static struct nvme_slot *find_slot(struct nvme_queue *queue, uint16_t cid)
{
    uint32_t number = cid & 0xFFFu;
    if (number >= queue->slot_count) {
        return NULL;
    }
    struct nvme_slot *slot = &queue->slots[number];
    bool to_be_sent = slot->to_host && slot->pending > 0;
    return slot->busy && slot->cid == cid && !slot->answered && !to_be_sent ? slot : NULL;
}

static uint32_t number_of(const struct nvme_queue *queue, const struct nvme_slot *slot)
{
    return (uint32_t)(slot - queue->slots);
}

static int queue_place(void *context, const struct nvme_pdu *pdu, uint8_t **destination,
                       const char **reason)
{
    struct nvme_queue *queue = context;
    const struct nvme_slot *slot = find_slot(queue, pdu->cid);
    if (slot == NULL || !slot->to_host) {
        return broken(reason, "data for a command that is not under way");
    }
    uint32_t left_bytes = slot->length_bytes - slot->moved_bytes;
    if (slot->ended || pdu->offset_bytes != slot->moved_bytes || pdu->data_bytes > left_bytes) {
        return broken(reason, "data out of place, or more than was asked for");
    }
    bool last = (pdu->flags & NVME_PDU_LAST) != 0;
    if (last != (pdu->data_bytes == left_bytes) && slot->kind != NVME_OP_GENERIC) {
        return broken(reason, "the LAST flag on the wrong C2HData");
    }
    *destination = slot->buffer + slot->moved_bytes;
    return 0;
}

/* A command succeeded: the end of its part, unless its data is garbled and there are tries left. */
static void succeed(struct nvme_queue *queue, struct nvme_slot *slot)
{
    uint32_t number = number_of(queue, slot);
    if (slot->garbled && slot->tries < TRIES_MAX) {
        atomic_fetch_add(&queue->association->counters.retries, 1);
        slot->tries++;
        nvme_ready_append(queue, number);
        return;
    }
    if (slot->garbled && queue->operations[slot->operation].code == 0) {
        queue->operations[slot->operation].code = DLFS_E_DIGEST;
    }
    nvme_part_end(queue, number, 0);
}

static int queue_arrived(void *context, const struct nvme_pdu *pdu, bool sound, const char **reason)
{
    (void)reason;
    struct nvme_queue *queue = context;
    struct nvme_slot *slot = &queue->slots[pdu->cid & 0xFFFu];
    slot->moved_bytes += pdu->data_bytes;
    slot->ended = (pdu->flags & NVME_PDU_LAST) != 0;
    if (!sound) {
        slot->garbled = true;
        atomic_fetch_add(&queue->association->counters.digest_errors, 1);
    }
    if ((pdu->flags & NVME_PDU_SUCCESS) != 0) {
        if (slot->kind == NVME_OP_GENERIC) {
            queue->generic.answer = (struct nvme_answer){.cid = slot->cid};
        }
        succeed(queue, slot);
    }
    return 0;
}

static int queue_response(void *context, const struct nvme_pdu *pdu, const char **reason)
{
    struct nvme_queue *queue = context;
    struct nvme_slot *slot = find_slot(queue, pdu->cid);
    if (slot == NULL) {
        return broken(reason, "a completion of a command that is not under way");
    }
    bool success = (pdu->answer.status & NVME_STATUS_CODE) == 0;
    bool whole = slot->moved_bytes == slot->length_bytes || slot->kind == NVME_OP_GENERIC;
    if (success && (!whole || slot->pending > 0)) {
        return broken(reason, "a completion before all of the command's data had been moved");
    }
    if (slot->kind == NVME_OP_GENERIC) {
        queue->generic.answer = pdu->answer;
    }
    if (slot->pending > 0) {
        /* Its data is still being sent: the buffer stays ours until that is done. */
        slot->answered = true;
        slot->status = pdu->answer.status;
        return 0;
    }
    if (success) {
        succeed(queue, slot);
    } else {
        nvme_part_end(queue, number_of(queue, slot), pdu->answer.status);
    }
    return 0;
}

static int queue_ready(void *context, const struct nvme_pdu *r2t, const char **reason)
{
    struct nvme_queue *queue = context;
    struct nvme_slot *slot = find_slot(queue, r2t->cid);
    if (slot == NULL || slot->to_host) {
        return broken(reason, "an R2T for a command that is not under way");
    }
    uint32_t left_bytes = slot->length_bytes - slot->moved_bytes;
    if (slot->ready_bytes > 0 || r2t->data_bytes == 0 || r2t->offset_bytes != slot->moved_bytes ||
        r2t->data_bytes > left_bytes) {
        return broken(reason, "an R2T for data that is not there, or was sent before");
    }
    slot->ready_tag = r2t->tag;
    slot->ready_bytes = r2t->data_bytes;
    nvme_ready_append(queue, number_of(queue, slot));
    return 0;
}

const struct nvme_sink nvme_queue_sink = {.place = queue_place,
                                          .arrived = queue_arrived,
                                          .response = queue_response,
                                          .ready = queue_ready};
