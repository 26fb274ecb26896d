/* The controller's side of NVMe/TCP for tests: PDUs as a controller sends them. */
#ifndef DLFS_TESTS_NVME_TESTS_H
#define DLFS_TESTS_NVME_TESTS_H

#include "check.h"
#include "nvme/protocol/pdu.h"

#include <dlfs/dlfs.h>

static inline struct nvme_terms make_terms(bool header_digest, bool data_digest)
{
    return (struct nvme_terms){.header_digest = header_digest,
                               .data_digest = data_digest,
                               .alignment_bytes = 4,
                               .data_bytes_max = 65536};
}

/* Puts a header of 24 bytes with its digest at out; the specific part is there already. */
static inline uint32_t finish_header(const struct nvme_terms *terms, uint8_t *out, uint8_t type,
                                     uint8_t flags, uint8_t start, uint32_t total)
{
    bool digest = terms->header_digest && type != NVME_PDU_C2H_TERMINATE;
    out[0] = type;
    out[1] = (uint8_t)(flags | (digest ? NVME_PDU_HEADER_DIGEST : 0));
    out[2] = NVME_PDU_HEADER_BYTES;
    out[3] = start;
    nvme_put32(out + 4, total);
    if (digest) {
        nvme_put32(out + NVME_PDU_HEADER_BYTES, dlfs_crc32c(0, out, NVME_PDU_HEADER_BYTES));
    }
    return NVME_PDU_HEADER_BYTES + (digest ? NVME_DIGEST_BYTES : 0);
}

/* A whole C2HData with padding_bytes before its data: its length. */
static inline uint32_t make_data(const struct nvme_terms *terms, uint8_t *out, uint16_t cid,
                                 uint32_t offset, const uint8_t *data, uint32_t bytes,
                                 uint8_t flags, uint32_t padding_bytes)
{
    uint32_t head = NVME_PDU_HEADER_BYTES + (terms->header_digest ? NVME_DIGEST_BYTES : 0);
    uint32_t start = head + padding_bytes;
    uint32_t total = start + bytes + (terms->data_digest ? NVME_DIGEST_BYTES : 0);
    memset(out, 0, start);
    nvme_put16(out + 8, cid);
    nvme_put32(out + 12, offset);
    nvme_put32(out + 16, bytes);
    memcpy(out + start, data, bytes);
    if (terms->data_digest) {
        flags |= NVME_PDU_DATA_DIGEST;
        nvme_put32(out + start + bytes, dlfs_crc32c(0, data, bytes));
    }
    (void)finish_header(terms, out, NVME_PDU_C2H_DATA, flags, (uint8_t)start, total);
    return total;
}

static inline uint32_t make_response(const struct nvme_terms *terms, uint8_t *out, uint16_t cid,
                                     uint16_t status, uint64_t value)
{
    uint32_t total = NVME_PDU_HEADER_BYTES + (terms->header_digest ? NVME_DIGEST_BYTES : 0);
    memset(out, 0, total);
    nvme_put64(out + 8, value);
    nvme_put16(out + 20, cid);
    nvme_put16(out + 22, (uint16_t)(status << 1));
    return finish_header(terms, out, NVME_PDU_RESPONSE, 0, 0, total);
}

static inline uint32_t make_r2t(const struct nvme_terms *terms, uint8_t *out, uint16_t cid,
                                uint16_t tag, uint32_t offset, uint32_t bytes)
{
    uint32_t total = NVME_PDU_HEADER_BYTES + (terms->header_digest ? NVME_DIGEST_BYTES : 0);
    memset(out, 0, total);
    nvme_put16(out + 8, cid);
    nvme_put16(out + 10, tag);
    nvme_put32(out + 12, offset);
    nvme_put32(out + 16, bytes);
    return finish_header(terms, out, NVME_PDU_R2T, 0, 0, total);
}

#endif
