/*
 * Operations on their way to SPDK and back.
 *
 * An operation takes a slot until its completion is handed out. It goes to SPDK as one request, or
 * as several pieces when it is very long or its data takes the way by SPDK's memory; SPDK splits
 * requests further for what the controller can transfer at once. What SPDK has no room for waits in
 * order.
 *
 * Reads that a lost connection aborts go again at once, writes once the controller has quiesced, as
 * dlfs/nvme.h says. What was not answered in time ends with DLFS_E_TIMEOUT when its
 * connection does. Every operation ends within timeout_ms + reconnect_ms, while it is polled.
 *
 * A write is issued only while the lease of this host's writer allows it (dlfs_nvme_limit_writes);
 * queue.c looks at the lease once more before SPDK may send what was issued.
 *
 * Source: NVM Express Base Specification 2.0, section 3.3.3.2.1 (status codes).
 */
#include "platform/clock.h"
#include "queue.h"

#include <errno.h>
#include <string.h>

#include <spdk/likely.h>

/* ---- slots ----------------------------------------------------------------------------------- */

static void append(struct queue *queue, struct list *list, uint32_t number)
{
    queue->slots[number].next = NONE;
    if (list->first == NONE) {
        list->first = number;
    } else {
        queue->slots[list->last].next = number;
    }
    list->last = number;
}

static uint32_t take(struct queue *queue, struct list *list)
{
    uint32_t number = list->first;
    list->first = queue->slots[number].next;
    return number;
}

static bool issued_all(const struct slot *slot)
{
    return slot->issued_bytes >= slot->operation.length_bytes || slot->code < 0;
}

static void finish(struct queue *queue, uint32_t number)
{
    append(queue, &queue->finished, number);
    queue->finished_count++;
}

static void set_deadline(const struct queue *queue, struct slot *slot, uint64_t now)
{
    uint64_t deadline_ns = now + queue->device->timeout_ms * NS_PER_MS;
    slot->deadline_ns = deadline_ns < slot->end_ns ? deadline_ns : slot->end_ns;
}

/* Starts an operation again, now or when its controller has quiesced. Returns 0, or the code with
 * which it ends. */
static int start_again(struct queue *queue, uint32_t number)
{
    struct slot *slot = &queue->slots[number];
    uint64_t now = monotonic_ns();
    uint64_t left_ns = slot->end_ns > now ? slot->end_ns - now : 0;
    slot->after_ns = 0;
    if (slot->operation.kind == DLFS_OP_WRITE && slot->unanswered) {
        uint64_t quiesce_ns = atomic_load(&queue->controller->quiesce_ns);
        int code = nvme_unanswered_write_code(DLFS_E_LOST, left_ns, quiesce_ns);
        if (code < 0) {
            return code;
        }
        slot->after_ns = now + quiesce_ns;
    }
    if (left_ns == 0) {
        return DLFS_E_LOST;
    }
    set_deadline(queue, slot, now);
    slot->again = false;
    slot->unanswered = false;
    slot->issued_bytes = 0;
    slot->waiting = true;
    append(queue, &queue->waiting, number);
    return 0;
}

/* A slot without pieces in flight that does not wait: done, or once more. */
static void settle(struct queue *queue, uint32_t number)
{
    struct slot *slot = &queue->slots[number];
    if (slot->pieces > 0 || slot->waiting) {
        return;
    }
    if (slot->code == 0 && slot->again) {
        slot->code = start_again(queue, number);
    }
    if (!slot->waiting) {
        finish(queue, number);
    }
}

void request_fail_waiting(struct queue *queue, int code)
{
    while (queue->waiting.first != NONE) {
        uint32_t number = take(queue, &queue->waiting);
        struct slot *slot = &queue->slots[number];
        slot->waiting = false;
        if (slot->code == 0) {
            slot->code = code;
        }
        settle(queue, number);
    }
}

void request_end_waiting(struct queue *queue, uint64_t now)
{
    struct list all = queue->waiting;
    queue->waiting.first = NONE;
    while (all.first != NONE) {
        uint32_t number = take(queue, &all);
        struct slot *slot = &queue->slots[number];
        if (slot->pieces == 0 && now >= slot->end_ns) {
            slot->waiting = false;
            slot->code = slot->code < 0 ? slot->code : DLFS_E_TIMEOUT;
            finish(queue, number);
        } else {
            append(queue, &queue->waiting, number);
        }
    }
}

/* ---- completions ----------------------------------------------------------------------------- */

static bool is_generic(const struct spdk_nvme_cpl *completion, unsigned code)
{
    return completion->status.sct == SPDK_NVME_SCT_GENERIC && completion->status.sc == code;
}

static bool was_aborted(const struct spdk_nvme_cpl *completion)
{
    return is_generic(completion, SPDK_NVME_SC_ABORTED_SQ_DELETION) ||
           is_generic(completion, SPDK_NVME_SC_ABORTED_BY_REQUEST);
}

static int code_of(const struct spdk_nvme_cpl *completion)
{
    if (completion->status.sct == SPDK_NVME_SCT_PATH) {
        return DLFS_E_LOST;
    }
    if (completion->status.sct != SPDK_NVME_SCT_GENERIC) {
        return -EIO;
    }
    switch (completion->status.sc) {
    case SPDK_NVME_SC_LBA_OUT_OF_RANGE:
        return DLFS_E_TRUNCATED;
    case SPDK_NVME_SC_INVALID_NAMESPACE_OR_FORMAT:
        return DLFS_E_LOST;
    case SPDK_NVME_SC_CAPACITY_EXCEEDED:
        return -ENOSPC;
    case SPDK_NVME_SC_COMMAND_NAMESPACE_IS_PROTECTED:
        return -EROFS;
    case SPDK_NVME_SC_RESERVATION_CONFLICT:
        return -EBADE;
    default:
        return -EIO;
    }
}

static void piece_free(struct queue *queue, struct piece *piece)
{
    uint32_t *list = piece->bounce != NULL ? &queue->free_bounced : &queue->free_piece;
    piece->next = *list;
    *list = (uint32_t)(piece - queue->pieces);
}

static void piece_succeeded(const struct piece *piece, struct slot *slot)
{
    struct queue *queue = piece->queue;
    if (piece->bounced && slot->operation.kind == DLFS_OP_READ) {
        memcpy((uint8_t *)slot->operation.buffer + piece->start, piece->bounce, piece->bytes);
    }
    if (slot->operation.kind == DLFS_OP_WRITE) {
        nvme_durability_note(&queue->device->durability, queue->generation);
    }
}

/* Notes a piece that the controller may have run or not. */
static void piece_aborted(const struct piece *piece, struct slot *slot)
{
    slot->again = true;
    slot->unanswered = true;
    if (slot->operation.kind == DLFS_OP_WRITE) {
        piece->queue->write_lost = true;
    }
}

static void piece_landed(struct queue *queue, struct piece *piece)
{
    struct slot *slot = &queue->slots[piece->slot];
    queue->flying--;
    queue->writing -= slot->operation.kind == DLFS_OP_WRITE;
    slot->pieces--;
    piece_free(queue, piece);
}

/* SPDK's callback, in the thread that polls or takes the connection down. */
static void piece_done(void *argument, const struct spdk_nvme_cpl *completion)
{
    struct piece *piece = argument;
    struct queue *queue = piece->queue;
    struct slot *slot = &queue->slots[piece->slot];
    uint32_t number = piece->slot;
    if (slot->operation.kind == OP_COMMAND) {
        struct raw_command *raw = slot->operation.buffer;
        command_answer(raw->command, completion);
        slot->code = was_aborted(completion) && slot->code == 0 ? DLFS_E_LOST : slot->code;
    } else if (spdk_likely(!spdk_nvme_cpl_is_error(completion))) {
        piece_succeeded(piece, slot);
    } else if (was_aborted(completion)) {
        piece_aborted(piece, slot);
    } else if (is_generic(completion, SPDK_NVME_SC_COMMAND_TRANSIENT_TRANSPORT_ERROR)) {
        slot->again = true;
    } else if (slot->code == 0) {
        slot->code = code_of(completion);
    }
    piece_landed(queue, piece);
    settle(queue, number);
}

/* ---- issuing --------------------------------------------------------------------------------- */

/* A free piece of the right kind, or NULL. */
static struct piece *piece_take(struct queue *queue, bool bounced)
{
    uint32_t *list =
        bounced || queue->free_piece == NONE ? &queue->free_bounced : &queue->free_piece;
    if (*list == NONE) {
        return NULL;
    }
    struct piece *piece = &queue->pieces[*list];
    *list = piece->next;
    return piece;
}

static bool needs_bounce(const struct queue *queue, const dlfs_operation *operation)
{
    if (operation->kind >= OP_FLUSH) {
        return false; /* nothing, or memory of SPDK's already */
    }
    return queue->needs_dma &&
           !range_holds(queue->range, operation->buffer, operation->length_bytes);
}

static int request(struct queue *queue, const struct slot *slot, struct piece *piece)
{
    const dlfs_operation *operation = &slot->operation;
    uint8_t *data = (uint8_t *)operation->buffer + piece->start;
    uint32_t block_bytes = queue->device->external.block_bytes;
    uint64_t first = (operation->offset_bytes + piece->start) / block_bytes;
    uint32_t blocks = piece->bytes / block_bytes;
    if (piece->bounced) {
        data = piece->bounce;
    }
    if (operation->kind == DLFS_OP_READ) {
        return spdk_nvme_ns_cmd_read(queue->ns, queue->spdk, data, first, blocks, piece_done, piece,
                                     0);
    }
    if (operation->kind == DLFS_OP_WRITE) {
        if (piece->bounced) {
            memcpy(data, (uint8_t *)operation->buffer + piece->start, piece->bytes);
        }
        return spdk_nvme_ns_cmd_write(queue->ns, queue->spdk, data, first, blocks, piece_done,
                                      piece, 0);
    }
    if (operation->kind == OP_FLUSH) {
        return spdk_nvme_ns_cmd_flush(queue->ns, queue->spdk, piece_done, piece);
    }
    struct raw_command *raw = operation->buffer;
    struct spdk_nvme_cmd command;
    command_encode(raw->command, &command);
    return spdk_nvme_ctrlr_cmd_io_raw(queue->controller->spdk, queue->spdk, &command, raw->data,
                                      raw->data_bytes, piece_done, piece);
}

/*
 * Returns 0 if a write may be issued now, -EAGAIN while its controller has to quiesce, its
 * connection is being made or its lease is to be confirmed; -EKEYEXPIRED when the lease is over.
 */
static int write_permit(struct queue *queue, struct slot *slot)
{
    int permit = nvme_write_permit(&queue->device->write_limit, queue->generation);
    if (permit == -EKEYEXPIRED) {
        return permit;
    }
    uint64_t now = slot->after_ns != 0 || slot->held ? monotonic_ns() : 0;
    if (permit < 0 || queue->down_since_ns != 0 || now < slot->after_ns) {
        slot->held = true;
        return -EAGAIN;
    }
    if (slot->held) { /* it is issued later than it was submitted */
        set_deadline(queue, slot, now);
        slot->held = false;
    }
    return 0;
}

/* Returns the next piece of a slot, counted as in flight, or NULL when there is no room for one. */
static struct piece *next_piece(struct queue *queue, uint32_t number)
{
    struct slot *slot = &queue->slots[number];
    bool bounced = needs_bounce(queue, &slot->operation);
    struct piece *piece = piece_take(queue, bounced);
    if (piece == NULL) {
        return NULL;
    }
    uint64_t left = slot->operation.length_bytes - slot->issued_bytes;
    uint32_t limit = bounced ? BOUNCE_BYTES : PIECE_BYTES;
    piece->start = slot->issued_bytes;
    piece->bytes = left < limit ? (uint32_t)left : limit;
    piece->slot = number;
    piece->bounced = bounced;
    slot->pieces++;
    slot->issued_bytes += piece->bytes;
    queue->flying++;
    queue->writing += slot->operation.kind == DLFS_OP_WRITE;
    return piece;
}

/* Issues the next piece of a slot: 0, -EAGAIN when that cannot be now, -ENXIO when the connection
 * is gone. Any other error is the slot's. */
static int issue_piece(struct queue *queue, uint32_t number)
{
    struct slot *slot = &queue->slots[number];
    int code = slot->operation.kind == DLFS_OP_WRITE ? write_permit(queue, slot) : 0;
    if (code == 0) {
        struct piece *piece = next_piece(queue, number);
        code = piece != NULL ? request(queue, slot, piece) : -EAGAIN;
        if (piece != NULL && code < 0) {
            slot->issued_bytes -= piece->bytes;
            piece_landed(queue, piece);
        }
    }
    if (code == -ENXIO) {
        return code;
    }
    if (code == -EAGAIN || code == -ENOMEM) {
        return -EAGAIN;
    }
    slot->code = slot->code < 0 ? slot->code : code;
    return 0;
}

bool request_issue(struct queue *queue)
{
    while (queue->waiting.first != NONE) {
        uint32_t number = queue->waiting.first;
        struct slot *slot = &queue->slots[number];
        int code = issued_all(slot) ? 0 : issue_piece(queue, number);
        if (code < 0) {
            return code != -ENXIO;
        }
        if (issued_all(slot)) {
            (void)take(queue, &queue->waiting);
            slot->waiting = false;
            settle(queue, number);
        }
    }
    return true;
}

/* ---- in and out ------------------------------------------------------------------------------ */

void request_add(struct queue *queue, const dlfs_operation *operation, uint64_t now)
{
    uint32_t number = queue->free_slot;
    struct slot *slot = &queue->slots[number];
    uint64_t deadline_ns = now + queue->device->timeout_ms * NS_PER_MS;
    queue->free_slot = slot->next;
    *slot = (struct slot){.operation = *operation,
                          .deadline_ns = deadline_ns,
                          .end_ns = deadline_ns + queue->device->reconnect_ms * NS_PER_MS,
                          .waiting = true,
                          .used = true};
    append(queue, &queue->waiting, number);
}

uint32_t request_take_finished(struct queue *queue, dlfs_completion *completions, uint32_t count)
{
    uint32_t filled = 0;
    while (filled < count && queue->finished.first != NONE) {
        uint32_t number = take(queue, &queue->finished);
        queue->finished_count--;
        struct slot *slot = &queue->slots[number];
        int64_t result = slot->code < 0 ? slot->code : (int64_t)slot->operation.length_bytes;
        completions[filled++] = (dlfs_completion){.tag = slot->operation.tag, .result = result};
        slot->used = false;
        slot->next = queue->free_slot;
        queue->free_slot = number;
    }
    return filled;
}

static bool is_overdue(const struct slot *slot, uint64_t now)
{
    return slot->used && slot->pieces > 0 && now > slot->deadline_ns;
}

static void doom(struct slot *slot, int code)
{
    slot->code = slot->code < 0 ? slot->code : code;
}

void request_doom_writes(struct queue *queue, int code)
{
    for (uint32_t number = 0; number < queue->depth; number++) {
        struct slot *slot = &queue->slots[number];
        if (slot->used && slot->pieces > 0 && slot->operation.kind == DLFS_OP_WRITE) {
            doom(slot, code);
        }
    }
}

bool request_doom_late(struct queue *queue, uint64_t now)
{
    bool late = false;
    for (uint32_t number = 0; number < queue->depth; number++) {
        if (is_overdue(&queue->slots[number], now)) {
            doom(&queue->slots[number], DLFS_E_TIMEOUT);
            late = true;
        }
    }
    if (late) {
        request_doom_writes(queue, DLFS_E_TIMEOUT);
    }
    return late;
}

void request_init(struct queue *queue)
{
    queue->waiting.first = NONE;
    queue->finished.first = NONE;
    queue->free_piece = NONE;
    queue->free_bounced = NONE;
    for (uint32_t number = 0; number < queue->depth; number++) {
        queue->slots[number].next = number + 1;
    }
    for (uint32_t number = queue->piece_count; number-- > 0;) {
        struct piece *piece = &queue->pieces[number];
        piece->queue = queue;
        if (number < queue->bounce_count) {
            piece->bounce = queue->bounce + (size_t)number * BOUNCE_BYTES;
        }
        piece_free(queue, piece);
    }
}
