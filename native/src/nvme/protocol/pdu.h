/*
 * Encodes the NVMe/TCP PDUs that a host sends; decodes and validates those that a controller sends.
 * No I/O, no allocation. The decoder accepts any bytes.
 *
 * Multi-byte fields are little-endian. A header digest covers the header, a data digest the data;
 * both are CRC32C.
 *
 * Source: NVM Express TCP Transport Specification 1.0, section 3.6.
 */
#ifndef DLFS_NVME_PDU_H
#define DLFS_NVME_PDU_H

#include <endian.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "dlfs/codes.h"

#define NVME_PDU_ICREQ 0x00u
#define NVME_PDU_ICRESP 0x01u
#define NVME_PDU_C2H_TERMINATE 0x03u
#define NVME_PDU_COMMAND 0x04u
#define NVME_PDU_RESPONSE 0x05u
#define NVME_PDU_H2C_DATA 0x06u
#define NVME_PDU_C2H_DATA 0x07u
#define NVME_PDU_R2T 0x09u

#define NVME_PDU_HEADER_DIGEST 0x01u
#define NVME_PDU_DATA_DIGEST 0x02u
#define NVME_PDU_LAST 0x04u
#define NVME_PDU_SUCCESS 0x08u

#define NVME_COMMON_BYTES 8u      /* start of the header, the same for all types */
#define NVME_IC_BYTES 128u        /* ICReq and ICResp */
#define NVME_COMMAND_BYTES 72u    /* header of a command capsule, with the entry */
#define NVME_ENTRY_BYTES 64u      /* a submission queue entry */
#define NVME_PDU_HEADER_BYTES 24u /* header of all other types that are used */
#define NVME_DIGEST_BYTES 4u
#define NVME_TERMINATE_BYTES_MAX 152u
/* Most bytes of header, digest and padding of a PDU that the host sends: PDO has 8 bits. */
#define NVME_HEAD_BYTES_MAX 256u

/* Parameters that ICReq and ICResp negotiated for a connection. */
struct nvme_terms {
    bool header_digest;
    bool data_digest;
    uint32_t alignment_bytes; /* alignment of data in PDUs to the controller: 4 * (CPDA + 1) */
    uint32_t data_bytes_max;  /* most data bytes of one H2CData (MAXH2CDATA) */
};

/* A completion queue entry (CQE). */
struct nvme_cqe {
    uint64_t value; /* dwords 0 and 1 */
    uint16_t cid;
    uint16_t status; /* status code type << 8 | status code, DNR 0x4000, More 0x2000 */
};

/* A header from the controller, decoded. Fields that its type lacks are 0. */
struct nvme_pdu {
    uint8_t type;
    uint8_t flags;
    uint16_t cid;
    uint16_t tag;           /* R2T: TTAG */
    uint32_t offset_bytes;  /* C2HData, R2T: offset in the data of the command */
    uint32_t data_bytes;    /* C2HData: bytes that follow; R2T: bytes requested */
    uint32_t padding_bytes; /* C2HData: bytes between header and data */
    struct nvme_cqe cqe;
};

/* Sets the reason of an error after which the connection must be closed; returns its code. */
static inline int nvme_protocol_error(const char **reason, const char *text)
{
    *reason = text;
    return DLFS_E_PROTOCOL;
}

static inline uint16_t nvme_get16(const uint8_t *bytes)
{
    uint16_t value;
    memcpy(&value, bytes, sizeof value);
    return le16toh(value);
}

static inline uint32_t nvme_get32(const uint8_t *bytes)
{
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return le32toh(value);
}

static inline uint64_t nvme_get64(const uint8_t *bytes)
{
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return le64toh(value);
}

static inline void nvme_put16(uint8_t *bytes, uint16_t value)
{
    value = htole16(value);
    memcpy(bytes, &value, sizeof value);
}

static inline void nvme_put32(uint8_t *bytes, uint32_t value)
{
    value = htole32(value);
    memcpy(bytes, &value, sizeof value);
}

static inline void nvme_put64(uint8_t *bytes, uint64_t value)
{
    value = htole64(value);
    memcpy(bytes, &value, sizeof value);
}

/* ---- encoding; each function returns the number of bytes that it wrote ---- */

/* Encodes an ICReq that requests no padding and one R2T at a time. */
uint32_t nvme_encode_icreq(bool header_digest, bool data_digest, uint8_t out[NVME_IC_BYTES]);
/*
 * Encodes a command capsule up to where its data_bytes of in-capsule data start (0: none). The
 * caller sends the data and then the data digest, if one was negotiated.
 */
uint32_t nvme_encode_command(const struct nvme_terms *terms, const uint8_t entry[NVME_ENTRY_BYTES],
                             uint32_t data_bytes, uint8_t out[NVME_HEAD_BYTES_MAX]);
/* Encodes an H2CData up to where its data starts. */
uint32_t nvme_encode_data(const struct nvme_terms *terms, const struct nvme_pdu *r2t,
                          uint32_t offset_bytes, uint32_t data_bytes, bool last,
                          uint8_t out[NVME_HEAD_BYTES_MAX]);

/* ---- decoding ---- */

/*
 * Validates an ICResp against the request. Errors with *reason: DLFS_E_PROTOCOL for a malformed
 * one, -ENOTSUP if the controller lacks a requested digest.
 */
int nvme_decode_icresp(const uint8_t bytes[NVME_IC_BYTES], bool header_digest, bool data_digest,
                       struct nvme_terms *terms, const char **reason);
/*
 * Decodes the header at the start of bytes[0..available). Returns its length with its digest, or 0
 * if it is incomplete. Errors after which the connection must be closed, with *reason:
 * DLFS_E_PROTOCOL, DLFS_E_DIGEST.
 */
int nvme_decode(const struct nvme_terms *terms, const uint8_t *bytes, size_t available,
                struct nvme_pdu *pdu, const char **reason);

#endif
