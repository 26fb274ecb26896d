/* The state machine of received bytes; see nvme/protocol/receiver.h. */
#include "nvme/protocol/receiver.h"

#include "dlfs/dlfs.h"

void nvme_receiver_init(struct nvme_receiver *receiver, const struct nvme_terms *terms,
                        uint8_t *staging, uint32_t staging_bytes)
{
    *receiver =
        (struct nvme_receiver){.terms = *terms, .staging = staging, .staging_bytes = staging_bytes};
}

bool nvme_receiver_is_empty(const struct nvme_receiver *receiver)
{
    return receiver->stage == NVME_STAGE_HEADER && receiver->first == receiver->last;
}

int nvme_receiver_space(struct nvme_receiver *receiver, uint32_t stage_bytes,
                        struct iovec vectors[2])
{
    /* The undecoded remainder is shorter than a header. */
    uint32_t left = receiver->last - receiver->first;
    if (receiver->first > 0 && left > 0) {
        memmove(receiver->staging, receiver->staging + receiver->first, left);
    }
    receiver->first = 0;
    receiver->last = left;
    if (stage_bytes > receiver->staging_bytes - left) {
        stage_bytes = receiver->staging_bytes - left;
    }
    struct iovec staged = {.iov_base = receiver->staging + left, .iov_len = stage_bytes};
    receiver->direct_bytes = 0;
    /* With a small staging buffer the tail of large data is received directly too. */
    if (receiver->stage == NVME_STAGE_DATA &&
        (receiver->left_bytes >= NVME_DIRECT_BYTES || stage_bytes < NVME_DIRECT_BYTES)) {
        receiver->direct_bytes = receiver->left_bytes;
        vectors[0] = (struct iovec){receiver->destination, receiver->left_bytes};
        vectors[1] = staged;
        return 2;
    }
    vectors[0] = staged;
    return 1;
}

/* Ends a C2HData whose data is complete. */
static int finish_data(struct nvme_receiver *receiver, bool digest_valid)
{
    receiver->stage = NVME_STAGE_HEADER;
    return receiver->sink->end_data(receiver->context, &receiver->pdu, digest_valid,
                                    &receiver->reason);
}

/* Notes that bytes of data have reached their destination. */
static int data_came(struct nvme_receiver *receiver, uint32_t bytes)
{
    receiver->destination += bytes;
    receiver->left_bytes -= bytes;
    if (receiver->left_bytes > 0) {
        return 0;
    }
    if (receiver->terms.data_digest) {
        receiver->stage = NVME_STAGE_DIGEST;
        return 0;
    }
    return finish_data(receiver, true);
}

/* Copies staged data to its destination. */
static int copy_data(struct nvme_receiver *receiver)
{
    uint32_t bytes = receiver->last - receiver->first;
    if (bytes > receiver->left_bytes) {
        bytes = receiver->left_bytes;
    }
    const uint8_t *source = receiver->staging + receiver->first;
    receiver->first += bytes;
    if (receiver->terms.data_digest) {
        receiver->crc32c = dlfs_crc32c_copy(receiver->crc32c, receiver->destination, source, bytes);
    } else {
        memcpy(receiver->destination, source, bytes);
    }
    return data_came(receiver, bytes);
}

static int check_digest(struct nvme_receiver *receiver)
{
    if (receiver->last - receiver->first < NVME_DIGEST_BYTES) {
        return 1;
    }
    uint32_t expected = nvme_get32(receiver->staging + receiver->first);
    receiver->first += NVME_DIGEST_BYTES;
    return finish_data(receiver, expected == receiver->crc32c);
}

static int skip_padding(struct nvme_receiver *receiver)
{
    uint32_t bytes = receiver->last - receiver->first;
    if (bytes > receiver->pdu.padding_bytes) {
        bytes = receiver->pdu.padding_bytes;
    }
    receiver->first += bytes;
    receiver->pdu.padding_bytes -= bytes;
    if (receiver->pdu.padding_bytes == 0) {
        receiver->stage = NVME_STAGE_DATA;
    }
    return 0;
}

/* Decodes the next header; returns 1 if it is incomplete. */
static int take_header(struct nvme_receiver *receiver)
{
    struct nvme_pdu *pdu = &receiver->pdu;
    int length = nvme_decode(&receiver->terms, receiver->staging + receiver->first,
                             receiver->last - receiver->first, pdu, &receiver->reason);
    if (length <= 0) {
        return length == 0 ? 1 : length;
    }
    receiver->first += (uint32_t)length;
    switch (pdu->type) {
    case NVME_PDU_C2H_DATA:
        receiver->left_bytes = pdu->data_bytes;
        receiver->crc32c = 0;
        receiver->stage = pdu->padding_bytes > 0 ? NVME_STAGE_PADDING : NVME_STAGE_DATA;
        return receiver->sink->begin_data(receiver->context, pdu, &receiver->destination,
                                          &receiver->reason);
    case NVME_PDU_RESPONSE:
        return receiver->sink->on_cqe(receiver->context, pdu, &receiver->reason);
    case NVME_PDU_R2T:
        return receiver->sink->on_r2t(receiver->context, pdu, &receiver->reason);
    default:
        receiver->reason = "the target ended the connection (C2HTermReq)";
        return DLFS_E_LOST;
    }
}

/* Processes staged bytes in the present stage; returns 1 if it needs more of them. */
static int step(struct nvme_receiver *receiver)
{
    switch (receiver->stage) {
    case NVME_STAGE_HEADER:
        return take_header(receiver);
    case NVME_STAGE_PADDING:
        return skip_padding(receiver);
    case NVME_STAGE_DATA:
        return copy_data(receiver);
    case NVME_STAGE_DIGEST:
    default:
        return check_digest(receiver);
    }
}

int nvme_receiver_take(struct nvme_receiver *receiver, size_t bytes)
{
    uint32_t direct = receiver->direct_bytes;
    if (direct > bytes) {
        direct = (uint32_t)bytes;
    }
    receiver->direct_bytes = 0;
    receiver->last += (uint32_t)(bytes - direct);
    int code = 0;
    if (direct > 0) {
        if (receiver->terms.data_digest) {
            receiver->crc32c = dlfs_crc32c(receiver->crc32c, receiver->destination, direct);
        }
        code = data_came(receiver, direct);
    }
    while (code == 0 && receiver->first < receiver->last) {
        code = step(receiver);
    }
    return code < 0 ? code : 0;
}
