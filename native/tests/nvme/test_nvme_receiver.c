/*
 * The receiver: a stream of PDUs that is split at every byte and into fragments of every length,
 * with and without digests, is decoded completely and in order; an error ends it.
 */
#include "nvme/nvme_tests.h"
#include "nvme/protocol/receiver.h"

#define STAGING_BYTES 65536u
#define LARGE_BYTES 40000u
#define STREAM_MAX 131072u

/* The calls of the sink, and the memory for received data. */
struct seen {
    uint8_t memory[LARGE_BYTES + 1024];
    char log[256];
    uint32_t log_length;
    int refuse; /* what begin_data returns */
};

static void note(struct seen *seen, char what, uint16_t cid)
{
    int length = snprintf(seen->log + seen->log_length, sizeof seen->log - seen->log_length,
                          "%c%u ", what, cid);
    CHECK(length > 0);
    seen->log_length += (uint32_t)length;
}

static int place(void *context, const struct nvme_pdu *pdu, uint8_t **destination,
                 const char **reason)
{
    struct seen *seen = context;
    *reason = "refused";
    note(seen, 'p', pdu->cid);
    if ((uint64_t)pdu->offset_bytes + pdu->data_bytes > sizeof seen->memory) {
        return DLFS_E_PROTOCOL;
    }
    *destination = seen->memory + pdu->offset_bytes;
    return seen->refuse;
}

static int arrived(void *context, const struct nvme_pdu *pdu, bool sound, const char **reason)
{
    *reason = "its data digest is wrong";
    note(context, 'a', pdu->cid);
    return sound ? 0 : DLFS_E_DIGEST;
}

static int response(void *context, const struct nvme_pdu *pdu, const char **reason)
{
    (void)reason;
    note(context, 'c', pdu->cid);
    return 0;
}

static int ready(void *context, const struct nvme_pdu *pdu, const char **reason)
{
    (void)reason;
    note(context, 'r', pdu->cid);
    return 0;
}

static const struct nvme_sink sink = {place, arrived, response, ready};

static uint8_t data[LARGE_BYTES + 1024];
static uint8_t stream[STREAM_MAX];
static uint8_t staging[STAGING_BYTES];

/* Two small PDUs, a large one, a response, an R2T, and one more with padding. */
static uint32_t make_stream(const struct nvme_terms *terms)
{
    uint32_t length = make_data(terms, stream, 1, 0, data, 512, NVME_PDU_LAST, 8);
    length += make_response(terms, stream + length, 1, 0, 0);
    length += make_data(terms, stream + length, 2, 512, data + 512, LARGE_BYTES,
                        NVME_PDU_LAST | NVME_PDU_SUCCESS, 0);
    length += make_r2t(terms, stream + length, 3, 9, 0, 4096);
    length += make_data(terms, stream + length, 4, LARGE_BYTES + 512, data + LARGE_BYTES + 512, 512,
                        NVME_PDU_LAST, 100);
    CHECK(length < STREAM_MAX);
    return length;
}

/* Feeds stream[*fed..until) to the receiver, as a socket would. */
static int feed(struct nvme_receiver *receiver, uint32_t *fed, uint32_t until, uint32_t stage_bytes)
{
    int code = 0;
    while (code == 0 && *fed < until) {
        struct iovec vectors[2];
        int count = nvme_receiver_space(receiver, stage_bytes, vectors);
        uint32_t start = *fed;
        for (int i = 0; i < count && *fed < until; i++) {
            size_t bytes = until - *fed;
            bytes = bytes < vectors[i].iov_len ? bytes : vectors[i].iov_len;
            memcpy(vectors[i].iov_base, stream + *fed, bytes);
            *fed += (uint32_t)bytes;
        }
        CHECK(*fed > start);
        code = nvme_receiver_take(receiver, *fed - start);
    }
    return code;
}

static void start(struct nvme_receiver *receiver, const struct nvme_terms *terms, struct seen *seen)
{
    nvme_receiver_init(receiver, terms, staging, sizeof staging);
    receiver->sink = &sink;
    receiver->context = seen;
    memset(seen, 0, sizeof *seen);
}

static void check_all(const struct nvme_receiver *receiver, const struct seen *seen)
{
    CHECK(strcmp(seen->log, "p1 a1 c1 p2 a2 r3 p4 a4 ") == 0);
    CHECK(memcmp(seen->memory, data, sizeof data) == 0);
    CHECK(nvme_receiver_is_empty(receiver));
}

static void test_cuts(const struct nvme_terms *terms, uint32_t stage_bytes)
{
    static struct seen seen;
    struct nvme_receiver receiver;
    uint32_t length = make_stream(terms);
    for (uint32_t cut = 0; cut <= length; cut += cut < 1200 || cut + 1200 > length ? 1 : 97) {
        uint32_t fed = 0;
        start(&receiver, terms, &seen);
        CHECK_EQ(feed(&receiver, &fed, cut, stage_bytes), 0);
        CHECK_EQ(feed(&receiver, &fed, length, stage_bytes), 0);
        check_all(&receiver, &seen);
    }
    for (uint32_t piece = 1; piece < 200; piece++) {
        uint32_t fed = 0;
        start(&receiver, terms, &seen);
        while (fed < length) {
            uint32_t until = fed + piece < length ? fed + piece : length;
            CHECK_EQ(feed(&receiver, &fed, until, stage_bytes), 0);
        }
        check_all(&receiver, &seen);
    }
}

/* A changed byte ends the stream with a reason, unless no digest protects it. */
static void test_changes(const struct nvme_terms *terms)
{
    static struct seen seen;
    struct nvme_receiver receiver;
    uint32_t length = make_stream(terms);
    for (uint32_t changed = 0; changed < length; changed += changed < 700 ? 1 : 53) {
        uint32_t fed = 0;
        start(&receiver, terms, &seen);
        stream[changed] ^= 0x10;
        int code = feed(&receiver, &fed, length, STAGING_BYTES);
        stream[changed] ^= 0x10;
        bool whole = terms->header_digest && terms->data_digest;
        if (code == 0 && whole) { /* the changed byte is padding */
            check_all(&receiver, &seen);
        } else if (code < 0) {
            CHECK(code == DLFS_E_PROTOCOL || code == DLFS_E_DIGEST || code == DLFS_E_LOST);
            CHECK(receiver.reason != NULL);
        }
    }
}

static void test_ends(const struct nvme_terms *terms)
{
    static struct seen seen;
    struct nvme_receiver receiver;
    uint32_t fed = 0;
    uint32_t length = make_data(terms, stream, 1, 0, data, 512, NVME_PDU_LAST, 0);
    start(&receiver, terms, &seen);
    seen.refuse = DLFS_E_PROTOCOL;
    CHECK_EQ(feed(&receiver, &fed, length, STAGING_BYTES), DLFS_E_PROTOCOL);
    CHECK(strcmp(receiver.reason, "refused") == 0);
    CHECK(strcmp(seen.log, "p1 ") == 0);
    memset(stream, 0, 24);
    length = finish_header(terms, stream, NVME_PDU_C2H_TERMINATE, 0, 0, 24);
    fed = 0;
    start(&receiver, terms, &seen);
    CHECK_EQ(feed(&receiver, &fed, length, STAGING_BYTES), DLFS_E_LOST);
    CHECK(strstr(receiver.reason, "C2HTermReq") != NULL);
}

int main(void)
{
    for (uint32_t i = 0; i < sizeof data; i++) {
        data[i] = (uint8_t)(i * 2654435761u >> 24);
    }
    for (uint32_t digests = 0; digests < 4; digests++) {
        struct nvme_terms terms = make_terms((digests & 1) != 0, (digests & 2) != 0);
        test_cuts(&terms, STAGING_BYTES);
        test_cuts(&terms, NVME_STAGE_HEADS_BYTES);
        test_changes(&terms);
        test_ends(&terms);
    }
    return 0;
}
