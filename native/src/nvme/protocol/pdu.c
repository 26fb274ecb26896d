/* Encoding and decoding of NVMe/TCP PDUs; see nvme/protocol/pdu.h. */
#include "nvme/protocol/pdu.h"

#include <errno.h>

#include "dlfs/dlfs.h"

#define MAXH2CDATA_MIN 4096u
#define CPDA_MAX 31u

static uint32_t round_up(uint32_t value, uint32_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

static void put_common(uint8_t *out, uint8_t type, uint8_t flags, uint8_t header_bytes,
                       uint8_t data_offset_bytes, uint32_t pdu_bytes)
{
    out[0] = type;
    out[1] = flags;
    out[2] = header_bytes;
    out[3] = data_offset_bytes;
    nvme_put32(out + 4, pdu_bytes);
}

uint32_t nvme_encode_icreq(bool header_digest, bool data_digest, uint8_t out[NVME_IC_BYTES])
{
    memset(out, 0, NVME_IC_BYTES);
    put_common(out, NVME_PDU_ICREQ, 0, NVME_IC_BYTES, 0, NVME_IC_BYTES);
    /* PFV 0, HPDA 0, MAXR2T 0: that is one. */
    out[11] = (uint8_t)((header_digest ? 1u : 0u) | (data_digest ? 2u : 0u));
    return NVME_IC_BYTES;
}

/*
 * Completes a header of header_bytes at out: common header, digest, and padding up to the data.
 * Returns the offset of the data.
 */
static uint32_t finish_head(const struct nvme_terms *terms, uint8_t *out, uint8_t type,
                            uint8_t flags, uint32_t header_bytes, uint32_t data_bytes)
{
    uint32_t digest_bytes = terms->header_digest ? NVME_DIGEST_BYTES : 0;
    uint32_t head_bytes = header_bytes + digest_bytes;
    uint32_t total_bytes = head_bytes;
    uint32_t start_bytes = 0;
    if (terms->header_digest) {
        flags |= NVME_PDU_HEADER_DIGEST;
    }
    if (data_bytes > 0) {
        start_bytes = round_up(head_bytes, terms->alignment_bytes);
        memset(out + head_bytes, 0, start_bytes - head_bytes);
        total_bytes = start_bytes + data_bytes;
        if (terms->data_digest) {
            flags |= NVME_PDU_DATA_DIGEST;
            total_bytes += NVME_DIGEST_BYTES;
        }
    }
    put_common(out, type, flags, (uint8_t)header_bytes, (uint8_t)start_bytes, total_bytes);
    if (terms->header_digest) {
        nvme_put32(out + header_bytes, dlfs_crc32c(0, out, header_bytes));
    }
    return data_bytes > 0 ? start_bytes : head_bytes;
}

uint32_t nvme_encode_command(const struct nvme_terms *terms, const uint8_t entry[NVME_ENTRY_BYTES],
                             uint32_t data_bytes, uint8_t out[NVME_HEAD_BYTES_MAX])
{
    memcpy(out + NVME_COMMON_BYTES, entry, NVME_ENTRY_BYTES);
    return finish_head(terms, out, NVME_PDU_COMMAND, 0, NVME_COMMAND_BYTES, data_bytes);
}

uint32_t nvme_encode_data(const struct nvme_terms *terms, const struct nvme_pdu *r2t,
                          uint32_t offset_bytes, uint32_t data_bytes, bool last,
                          uint8_t out[NVME_HEAD_BYTES_MAX])
{
    nvme_put16(out + 8, r2t->cid);
    nvme_put16(out + 10, r2t->tag);
    nvme_put32(out + 12, offset_bytes);
    nvme_put32(out + 16, data_bytes);
    nvme_put32(out + 20, 0);
    return finish_head(terms, out, NVME_PDU_H2C_DATA, last ? NVME_PDU_LAST : 0,
                       NVME_PDU_HEADER_BYTES, data_bytes);
}

int nvme_decode_icresp(const uint8_t bytes[NVME_IC_BYTES], bool header_digest, bool data_digest,
                       struct nvme_terms *terms, const char **reason)
{
    if (bytes[0] != NVME_PDU_ICRESP || bytes[1] != 0 || bytes[2] != NVME_IC_BYTES ||
        nvme_get32(bytes + 4) != NVME_IC_BYTES) {
        return nvme_protocol_error(reason,
                                   "expected an ICResp of 128 bytes (is it an NVMe/TCP port?)");
    }
    uint32_t bytes_max = nvme_get32(bytes + 12);
    if (nvme_get16(bytes + 8) != 0) {
        return nvme_protocol_error(reason, "ICResp: expected PDU format version 0");
    }
    if (bytes[10] > CPDA_MAX) {
        return nvme_protocol_error(reason, "ICResp: expected CPDA 0..31");
    }
    if (bytes_max < MAXH2CDATA_MIN || bytes_max % 4 != 0) {
        return nvme_protocol_error(reason,
                                   "ICResp: expected MAXH2CDATA of at least 4096, a multiple of 4");
    }
    uint8_t asked = (uint8_t)((header_digest ? 1u : 0u) | (data_digest ? 2u : 0u));
    if ((bytes[11] & ~asked) != 0) {
        return nvme_protocol_error(reason, "ICResp: it turns on digests that were not asked for");
    }
    if (bytes[11] != asked) {
        *reason = "the target does not do the digests that were asked for";
        return -ENOTSUP;
    }
    *terms = (struct nvme_terms){.header_digest = header_digest,
                                 .data_digest = data_digest,
                                 .alignment_bytes = 4u * (bytes[10] + 1u),
                                 .data_bytes_max = bytes_max};
    return 0;
}

/* The types of PDUs that a controller may send, and their flags. */
static const struct {
    bool known;
    uint8_t flags;
} types[] = {
    [NVME_PDU_C2H_TERMINATE] = {.known = true},
    [NVME_PDU_RESPONSE] = {true, NVME_PDU_HEADER_DIGEST},
    [NVME_PDU_C2H_DATA] = {true, NVME_PDU_HEADER_DIGEST | NVME_PDU_DATA_DIGEST | NVME_PDU_LAST |
                                     NVME_PDU_SUCCESS},
    [NVME_PDU_R2T] = {true, NVME_PDU_HEADER_DIGEST},
};

static int decode_data(const struct nvme_terms *terms, const uint8_t *bytes, uint32_t head_bytes,
                       struct nvme_pdu *pdu, const char **reason)
{
    uint32_t total_bytes = nvme_get32(bytes + 4);
    uint32_t start_bytes = bytes[3];
    uint32_t trailer_bytes = terms->data_digest ? NVME_DIGEST_BYTES : 0;
    pdu->cid = nvme_get16(bytes + 8);
    pdu->offset_bytes = nvme_get32(bytes + 12);
    pdu->data_bytes = nvme_get32(bytes + 16);
    if (((pdu->flags & NVME_PDU_DATA_DIGEST) != 0) != terms->data_digest) {
        return nvme_protocol_error(reason,
                                   "C2HData: its data digest flag is not what was agreed on");
    }
    if ((pdu->flags & NVME_PDU_SUCCESS) != 0 && (pdu->flags & NVME_PDU_LAST) == 0) {
        return nvme_protocol_error(reason, "C2HData: SUCCESS without LAST");
    }
    if (pdu->data_bytes == 0 || start_bytes < head_bytes || start_bytes % 4 != 0) {
        return nvme_protocol_error(reason, "C2HData: no data, or a wrong data offset (PDO)");
    }
    if ((uint64_t)start_bytes + pdu->data_bytes + trailer_bytes != total_bytes) {
        return nvme_protocol_error(reason, "C2HData: its lengths contradict each other");
    }
    pdu->padding_bytes = start_bytes - head_bytes;
    return 0;
}

static int decode_body(const struct nvme_terms *terms, const uint8_t *bytes, uint32_t head_bytes,
                       struct nvme_pdu *pdu, const char **reason)
{
    uint32_t total_bytes = nvme_get32(bytes + 4);
    if (pdu->type == NVME_PDU_C2H_DATA) {
        return decode_data(terms, bytes, head_bytes, pdu, reason);
    }
    if (pdu->type == NVME_PDU_C2H_TERMINATE) {
        if (total_bytes < head_bytes || total_bytes > NVME_TERMINATE_BYTES_MAX) {
            return nvme_protocol_error(reason, "C2HTermReq: expected 24..152 bytes");
        }
        return 0;
    }
    if (total_bytes != head_bytes) {
        return nvme_protocol_error(reason,
                                   "a PDU without data: its length contradicts its header's");
    }
    if (pdu->type == NVME_PDU_RESPONSE) {
        uint16_t status = nvme_get16(bytes + 22);
        pdu->cid = nvme_get16(bytes + 20);
        pdu->cqe = (struct nvme_cqe){
            .value = nvme_get64(bytes + 8), .cid = pdu->cid, .status = (uint16_t)(status >> 1)};
        return 0;
    }
    pdu->cid = nvme_get16(bytes + 8);
    pdu->tag = nvme_get16(bytes + 10);
    pdu->offset_bytes = nvme_get32(bytes + 12);
    pdu->data_bytes = nvme_get32(bytes + 16);
    return 0;
}

int nvme_decode(const struct nvme_terms *terms, const uint8_t *bytes, size_t available,
                struct nvme_pdu *pdu, const char **reason)
{
    if (available < NVME_COMMON_BYTES) {
        return 0;
    }
    uint8_t type = bytes[0];
    if (type >= sizeof types / sizeof *types || !types[type].known) {
        return nvme_protocol_error(reason, "a PDU of a type that no controller sends");
    }
    if (bytes[2] != NVME_PDU_HEADER_BYTES) {
        return nvme_protocol_error(reason,
                                   "a PDU whose header length (HLEN) does not suit its type");
    }
    bool digest = terms->header_digest && type != NVME_PDU_C2H_TERMINATE;
    uint32_t head_bytes = NVME_PDU_HEADER_BYTES + (digest ? NVME_DIGEST_BYTES : 0);
    if ((bytes[1] & ~types[type].flags) != 0) {
        return nvme_protocol_error(reason, "a PDU with flags that do not suit its type");
    }
    if (((bytes[1] & NVME_PDU_HEADER_DIGEST) != 0) != digest) {
        return nvme_protocol_error(reason,
                                   "a PDU whose header digest flag is not what was agreed on");
    }
    if (available < head_bytes) {
        return 0;
    }
    if (digest &&
        nvme_get32(bytes + NVME_PDU_HEADER_BYTES) != dlfs_crc32c(0, bytes, NVME_PDU_HEADER_BYTES)) {
        *reason = "a header digest does not match";
        return DLFS_E_DIGEST;
    }
    *pdu = (struct nvme_pdu){.type = type, .flags = bytes[1]};
    int error = decode_body(terms, bytes, head_bytes, pdu, reason);
    return error < 0 ? error : (int)head_bytes;
}
