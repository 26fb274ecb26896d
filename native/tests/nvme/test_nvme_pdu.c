/* The PDU codec: every field of sent PDUs, and valid and invalid values of received ones. */
#include <errno.h>

#include "nvme/nvme_tests.h"

static struct nvme_pdu pdu;
static const char *reason;

static int decode(const struct nvme_terms *terms, const uint8_t *bytes, size_t count)
{
    reason = NULL;
    return nvme_decode(terms, bytes, count, &pdu, &reason);
}

/* ---- encoding ---- */

static void test_icreq(void)
{
    uint8_t bytes[NVME_IC_BYTES];
    uint8_t expected[NVME_IC_BYTES] = {0x00, 0x00, 128, 0, 128};
    CHECK_EQ(nvme_encode_icreq(false, false, bytes), 128);
    CHECK(memcmp(bytes, expected, sizeof bytes) == 0);
    for (uint8_t digests = 0; digests < 4; digests++) {
        CHECK_EQ(nvme_encode_icreq(digests & 1, digests >> 1, bytes), 128);
        expected[11] = digests;
        CHECK(memcmp(bytes, expected, sizeof bytes) == 0);
    }
}

static void check_head(const struct nvme_terms *terms, const uint8_t *bytes, uint32_t head_bytes,
                       uint32_t header_bytes, uint32_t data_bytes)
{
    uint32_t digest = terms->header_digest ? 4 : 0;
    uint32_t least = header_bytes + digest;
    CHECK_EQ(bytes[2], header_bytes);
    CHECK_EQ((bytes[1] & 1) != 0, terms->header_digest);
    if (digest > 0) {
        CHECK_EQ(nvme_get32(bytes + header_bytes), dlfs_crc32c(0, bytes, header_bytes));
    }
    if (data_bytes == 0) {
        CHECK_EQ(head_bytes, least);
        CHECK_EQ(bytes[3], 0);
        CHECK_EQ(nvme_get32(bytes + 4), least);
        CHECK_EQ(bytes[1] & 2, 0);
        return;
    }
    CHECK_EQ(bytes[3], head_bytes);
    CHECK(head_bytes >= least && head_bytes < least + terms->alignment_bytes);
    CHECK_EQ(head_bytes % terms->alignment_bytes, 0);
    CHECK_EQ((bytes[1] & 2) != 0, terms->data_digest);
    CHECK_EQ(nvme_get32(bytes + 4), head_bytes + data_bytes + (terms->data_digest ? 4 : 0));
    for (uint32_t i = least; i < head_bytes; i++) {
        CHECK_EQ(bytes[i], 0);
    }
}

static void test_commands_and_data(void)
{
    uint8_t entry[NVME_ENTRY_BYTES];
    uint8_t bytes[NVME_HEAD_BYTES_MAX];
    for (uint32_t i = 0; i < sizeof entry; i++) {
        entry[i] = (uint8_t)(i + 1);
    }
    for (uint32_t round = 0; round < 128; round++) {
        struct nvme_terms terms = make_terms((round & 1) != 0, (round & 2) != 0);
        terms.alignment_bytes = 4 * (round / 4 + 1);
        memset(bytes, 0xAA, sizeof bytes);
        uint32_t head = nvme_encode_command(&terms, entry, 0, bytes);
        check_head(&terms, bytes, head, 72, 0);
        CHECK_EQ(bytes[0], 0x04);
        CHECK(memcmp(bytes + 8, entry, sizeof entry) == 0);
        memset(bytes, 0xAA, sizeof bytes);
        head = nvme_encode_command(&terms, entry, 512, bytes);
        check_head(&terms, bytes, head, 72, 512);
        memset(bytes, 0xAA, sizeof bytes);
        struct nvme_pdu r2t = {.cid = 0x1234, .tag = 0xABCD};
        head = nvme_encode_data(&terms, &r2t, 65536, 4096, (round & 1) != 0, bytes);
        check_head(&terms, bytes, head, 24, 4096);
        CHECK_EQ(bytes[0], 0x06);
        CHECK_EQ((bytes[1] & 4) != 0, (round & 1) != 0);
        CHECK_EQ(nvme_get16(bytes + 8), 0x1234);
        CHECK_EQ(nvme_get16(bytes + 10), 0xABCD);
        CHECK_EQ(nvme_get32(bytes + 12), 65536);
        CHECK_EQ(nvme_get32(bytes + 16), 4096);
        CHECK_EQ(nvme_get32(bytes + 20), 0);
    }
}

/* ---- ICResp ---- */

static int decode_icresp(uint32_t place, uint8_t value, uint8_t asked)
{
    uint8_t bytes[NVME_IC_BYTES] = {0x01, 0x00, 128, 0, 128};
    struct nvme_terms terms;
    bytes[11] = asked;
    nvme_put32(bytes + 12, 131072);
    bytes[place] = value;
    reason = NULL;
    int code = nvme_decode_icresp(bytes, (asked & 1) != 0, (asked & 2) != 0, &terms, &reason);
    CHECK((code < 0) == (reason != NULL));
    return code;
}

static void test_icresp(void)
{
    uint8_t bytes[NVME_IC_BYTES] = {0x01, 0x00, 128, 0, 128, 0, 0, 0, 0, 0, 31, 3};
    struct nvme_terms terms;
    nvme_put32(bytes + 12, 4096);
    CHECK_EQ(nvme_decode_icresp(bytes, true, true, &terms, &reason), 0);
    CHECK(terms.header_digest && terms.data_digest);
    CHECK_EQ(terms.alignment_bytes, 128);
    CHECK_EQ(terms.data_bytes_max, 4096);
    for (uint8_t asked = 0; asked < 4; asked++) {
        CHECK_EQ(decode_icresp(0, 0x01, asked), 0);
        CHECK_EQ(decode_icresp(0, 0x05, asked), DLFS_E_PROTOCOL); /* type */
        CHECK_EQ(decode_icresp(1, 0x01, asked), DLFS_E_PROTOCOL); /* flags */
        CHECK_EQ(decode_icresp(2, 24, asked), DLFS_E_PROTOCOL);   /* HLEN */
        CHECK_EQ(decode_icresp(4, 127, asked), DLFS_E_PROTOCOL);  /* PLEN */
        CHECK_EQ(decode_icresp(7, 1, asked), DLFS_E_PROTOCOL);    /* its last byte */
        CHECK_EQ(decode_icresp(8, 1, asked), DLFS_E_PROTOCOL);    /* PFV */
        CHECK_EQ(decode_icresp(9, 1, asked), DLFS_E_PROTOCOL);    /* its last byte */
        CHECK_EQ(decode_icresp(10, 32, asked), DLFS_E_PROTOCOL);  /* CPDA */
        CHECK_EQ(decode_icresp(12, 1, asked), DLFS_E_PROTOCOL);   /* MAXH2CDATA % 4 */
        CHECK_EQ(decode_icresp(14, 0, asked), DLFS_E_PROTOCOL);   /* MAXH2CDATA < 4096 */
        CHECK_EQ(decode_icresp(11, 0x04 | asked, asked), DLFS_E_PROTOCOL);
        CHECK_EQ(decode_icresp(11, 0, asked), asked == 0 ? 0 : -ENOTSUP);
        CHECK_EQ(decode_icresp(11, 3, asked), asked == 3 ? 0 : DLFS_E_PROTOCOL);
    }
}

/* ---- decoding ---- */

/* Every shorter prefix is incomplete, and a wrong bit in the digest is detected. */
static void check_pieces(const struct nvme_terms *terms, uint8_t *bytes, uint32_t head)
{
    for (uint32_t count = 0; count < head; count++) {
        CHECK_EQ(decode(terms, bytes, count), 0);
    }
    CHECK_EQ(decode(terms, bytes, head), head);
    if (!terms->header_digest || bytes[0] == NVME_PDU_C2H_TERMINATE) {
        return;
    }
    for (uint32_t bit = 0; bit < 32; bit++) {
        bytes[24 + bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK_EQ(decode(terms, bytes, head), DLFS_E_DIGEST);
        CHECK(reason != NULL);
        bytes[24 + bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    CHECK_EQ(decode(terms, bytes, head), head);
}

static void test_right_ones(const struct nvme_terms *terms)
{
    uint8_t bytes[512];
    uint8_t data[64] = {1, 2, 3};
    uint32_t head = terms->header_digest ? 28 : 24;
    CHECK_EQ(make_response(terms, bytes, 0xBEEF, 0x4281, UINT64_C(0x1122334455667788)), head);
    check_pieces(terms, bytes, head);
    CHECK_EQ(pdu.type, NVME_PDU_RESPONSE);
    CHECK_EQ(pdu.cid, 0xBEEF);
    CHECK_EQ(pdu.cqe.cid, 0xBEEF);
    CHECK_EQ(pdu.cqe.status, 0x4281);
    CHECK(pdu.cqe.value == UINT64_C(0x1122334455667788));
    CHECK_EQ(make_r2t(terms, bytes, 7, 0, 4096, 65536), head);
    check_pieces(terms, bytes, head);
    CHECK_EQ(pdu.type, NVME_PDU_R2T);
    CHECK_EQ(pdu.cid, 7);
    CHECK_EQ(pdu.tag, 0);
    CHECK_EQ(pdu.offset_bytes, 4096);
    CHECK_EQ(pdu.data_bytes, 65536);
    for (uint32_t padding = 0; head + padding <= 252; padding += 4) {
        uint8_t flags = padding % 8 == 0 ? NVME_PDU_LAST | NVME_PDU_SUCCESS : NVME_PDU_LAST;
        (void)make_data(terms, bytes, 3, 8192, data, sizeof data, flags, padding);
        check_pieces(terms, bytes, head);
        CHECK_EQ(pdu.type, NVME_PDU_C2H_DATA);
        CHECK_EQ(pdu.cid, 3);
        CHECK_EQ(pdu.offset_bytes, 8192);
        CHECK_EQ(pdu.data_bytes, sizeof data);
        CHECK_EQ(pdu.padding_bytes, padding);
        CHECK_EQ(pdu.flags & 0x0C, flags);
    }
    memset(bytes, 0, 24);
    nvme_put16(bytes + 8, 2);
    nvme_put32(bytes + 10, 77);
    CHECK_EQ(finish_header(terms, bytes, NVME_PDU_C2H_TERMINATE, 0, 0, 152), 24);
    check_pieces(terms, bytes, 24);
    CHECK_EQ(pdu.type, NVME_PDU_C2H_TERMINATE);
}

/* A C2HData of 64 bytes with one byte of its header changed; its digest fits. */
static int decode_changed(const struct nvme_terms *terms, uint32_t place, uint8_t value)
{
    uint8_t bytes[512];
    uint8_t data[64] = {0};
    (void)make_data(terms, bytes, 3, 0, data, sizeof data, NVME_PDU_LAST, 0);
    bytes[place] = value;
    if (terms->header_digest) {
        nvme_put32(bytes + 24, dlfs_crc32c(0, bytes, 24));
    }
    int code = decode(terms, bytes, sizeof bytes);
    CHECK((code < 0) == (reason != NULL));
    return code;
}

static void test_wrong_data(const struct nvme_terms *terms)
{
    uint8_t head = terms->header_digest ? 28 : 24;
    uint8_t total = (uint8_t)(head + 64 + (terms->data_digest ? 4 : 0));
    uint8_t agreed = (uint8_t)((terms->header_digest ? 1 : 0) | (terms->data_digest ? 2 : 0));
    CHECK_EQ(decode_changed(terms, 3, head), head);
    for (uint32_t type = 0; type < 256;
         type++) { /* types with other lengths or flags, and unknown ones */
        if (type != NVME_PDU_C2H_DATA) {
            CHECK(decode_changed(terms, 0, (uint8_t)type) < 0);
        }
    }
    for (uint32_t flags = 0; flags < 256; flags++) {
        bool right = (flags & 3) == agreed && (flags & 0xF0) == 0 &&
                     ((flags & NVME_PDU_SUCCESS) == 0 || (flags & NVME_PDU_LAST) != 0);
        CHECK_EQ(decode_changed(terms, 1, (uint8_t)flags), right ? head : DLFS_E_PROTOCOL);
    }
    for (uint32_t value = 0; value < 256; value++) {
        CHECK_EQ(decode_changed(terms, 2, (uint8_t)value), value == 24 ? head : DLFS_E_PROTOCOL);
        CHECK_EQ(decode_changed(terms, 3, (uint8_t)value), value == head ? head : DLFS_E_PROTOCOL);
        CHECK_EQ(decode_changed(terms, 4, (uint8_t)value), value == total ? head : DLFS_E_PROTOCOL);
        CHECK_EQ(decode_changed(terms, 16, (uint8_t)value), value == 64 ? head : DLFS_E_PROTOCOL);
    }
    for (uint32_t place = 5; place < 8; place++) { /* the other bytes of PLEN and of the length */
        CHECK_EQ(decode_changed(terms, place, 0xFF), DLFS_E_PROTOCOL);
        CHECK_EQ(decode_changed(terms, place + 12, 0xFF), DLFS_E_PROTOCOL);
    }
}

static void test_wrong_others(const struct nvme_terms *terms)
{
    uint8_t bytes[64];
    uint32_t head = terms->header_digest ? 28 : 24;
    for (uint32_t kind = 0; kind < 2; kind++) {
        for (uint32_t place = 1; place < 8; place++) {
            (void)(kind == 0 ? make_response(terms, bytes, 1, 0, 0)
                             : make_r2t(terms, bytes, 1, 1, 0, 4096));
            bytes[place] = (uint8_t)(bytes[place] + 4);
            if (terms->header_digest) {
                nvme_put32(bytes + 24, dlfs_crc32c(0, bytes, 24));
            }
            /* PDO has no meaning without data and is not checked. */
            CHECK_EQ(decode(terms, bytes, sizeof bytes), place == 3 ? (int)head : DLFS_E_PROTOCOL);
        }
    }
    memset(bytes, 0, sizeof bytes);
    for (uint32_t total = 0; total < 256; total++) {
        (void)finish_header(terms, bytes, NVME_PDU_C2H_TERMINATE, 0, 0, total);
        CHECK_EQ(decode(terms, bytes, 24), total >= 24 && total <= 152 ? 24 : DLFS_E_PROTOCOL);
    }
    (void)finish_header(terms, bytes, NVME_PDU_C2H_TERMINATE, NVME_PDU_HEADER_DIGEST, 0, 24);
    CHECK_EQ(decode(terms, bytes, 24), DLFS_E_PROTOCOL);
}

int main(void)
{
    test_icreq();
    test_commands_and_data();
    test_icresp();
    for (uint32_t digests = 0; digests < 4; digests++) {
        struct nvme_terms terms = make_terms((digests & 1) != 0, (digests & 2) != 0);
        test_right_ones(&terms);
        test_wrong_data(&terms);
        test_wrong_others(&terms);
    }
    return 0;
}
