/*
 * Fuzzes the NVMe/TCP decoder and the receiver above it.
 *
 * An input is two bytes of choices and a stream. The stream is received twice: in pieces as large
 * as the receiver accepts, and in small ones. Both must give the same PDUs, the same data and the
 * same end, wherever a PDU was cut. Data goes into memory of exactly its length, so that ASan
 * detects one byte too many. Since hardly any random bytes have right digests, one of the choices
 * corrects the digests of the stream first.
 */
#include <stdlib.h>

#include "dlfs/dlfs.h"
#include "nvme/protocol/receiver.h"

#define CHOICE_BYTES 2u
#define STAGING_BYTES 512u
#define DATA_BYTES_MAX 65536u
#define PIECE_BYTES_MAX 7u
#define ALIGNMENT_BYTES_MAX 128u /* 4 * (CPDA 31 + 1) */

enum { WITH_HEADER_DIGEST = 1, WITH_DATA_DIGEST = 2, MAKE_DIGESTS_RIGHT = 4 };

/* The result of receiving a stream, for comparison. */
struct story {
    uint32_t crc32c;
    uint32_t events;
    int code;
    uint8_t *data; /* data of the current C2HData */
};

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

static void note(struct story *story, const struct nvme_pdu *pdu)
{
    const uint64_t words[] = {pdu->type,       pdu->flags,        pdu->cid,        pdu->tag,
                              pdu->data_bytes, pdu->offset_bytes, pdu->cqe.status, pdu->cqe.value};
    story->crc32c = dlfs_crc32c(story->crc32c, words, sizeof words);
    story->events++;
}

static int place(void *context, const struct nvme_pdu *pdu, uint8_t **destination,
                 const char **reason)
{
    struct story *story = context;
    note(story, pdu);
    if (pdu->data_bytes > DATA_BYTES_MAX) {
        *reason = "too much data";
        return DLFS_E_PROTOCOL;
    }
    story->data = malloc(pdu->data_bytes);
    if (story->data == NULL) {
        abort();
    }
    *destination = story->data;
    return 0;
}

static int arrived(void *context, const struct nvme_pdu *pdu, bool sound, const char **reason)
{
    struct story *story = context;
    if (!sound) {
        *reason = "a data digest does not match";
        return DLFS_E_DIGEST;
    }
    note(story, pdu);
    story->crc32c = dlfs_crc32c(story->crc32c, story->data, pdu->data_bytes);
    free(story->data);
    story->data = NULL;
    return 0;
}

static int take(void *context, const struct nvme_pdu *pdu, const char **reason)
{
    (void)reason;
    note(context, pdu);
    return 0;
}

static const struct nvme_sink sink = {
    .begin_data = place, .end_data = arrived, .on_cqe = take, .on_r2t = take};

/* Fills the space that the receiver offers, at most piece_bytes of it; returns how much. */
static size_t fill(struct nvme_receiver *receiver, const uint8_t *bytes, size_t count,
                   size_t piece_bytes)
{
    struct iovec vectors[2];
    int offered = nvme_receiver_space(receiver, STAGING_BYTES, vectors);
    size_t filled = 0;
    for (int number = 0; number < offered; number++) {
        size_t part = vectors[number].iov_len;
        part = part < count - filled ? part : count - filled;
        part = part < piece_bytes - filled ? part : piece_bytes - filled;
        memcpy(vectors[number].iov_base, bytes + filled, part);
        filled += part;
    }
    return filled;
}

static struct story receive(const struct nvme_terms *terms, const uint8_t *bytes, size_t count,
                            size_t piece_bytes)
{
    struct story story = {0};
    uint8_t *staging = malloc(STAGING_BYTES);
    if (staging == NULL) {
        abort();
    }
    struct nvme_receiver receiver;
    nvme_receiver_init(&receiver, terms, staging, STAGING_BYTES);
    receiver.sink = &sink;
    receiver.context = &story;
    while (count > 0 && story.code == 0) {
        size_t filled = fill(&receiver, bytes, count, piece_bytes);
        if (filled == 0) {
            abort(); /* a receiver that offers no space would hang */
        }
        story.code = nvme_receiver_take(&receiver, filled);
        bytes += filled;
        count -= filled;
    }
    if (story.code != 0 && receiver.reason == NULL) {
        abort();
    }
    free(story.data);
    free(staging);
    return story;
}

static void make_digests_right(const struct nvme_terms *terms, uint8_t *bytes, size_t count)
{
    size_t at = 0;
    while (count - at >= NVME_PDU_HEADER_BYTES + NVME_DIGEST_BYTES) {
        uint8_t *pdu = bytes + at;
        size_t length = nvme_get32(pdu + 4);
        if (terms->header_digest) {
            nvme_put32(pdu + NVME_PDU_HEADER_BYTES, dlfs_crc32c(0, pdu, NVME_PDU_HEADER_BYTES));
        }
        if (length < NVME_PDU_HEADER_BYTES || length > count - at) {
            return;
        }
        size_t start = pdu[3];
        if (terms->data_digest && pdu[0] == NVME_PDU_C2H_DATA &&
            start + NVME_DIGEST_BYTES <= length) {
            size_t end = length - NVME_DIGEST_BYTES;
            nvme_put32(pdu + end, dlfs_crc32c(0, pdu + start, end - start));
        }
        at += length;
    }
}

static void decode_icresp(const uint8_t *bytes, size_t count, unsigned choices)
{
    uint8_t response[NVME_IC_BYTES] = {0};
    memcpy(response, bytes, count < sizeof response ? count : sizeof response);
    struct nvme_terms terms = {0};
    const char *reason = NULL;
    int code = nvme_decode_icresp(response, (choices & WITH_HEADER_DIGEST) != 0,
                                  (choices & WITH_DATA_DIGEST) != 0, &terms, &reason);
    if (code != 0 && reason == NULL) {
        abort();
    }
    if (code == 0 && (terms.alignment_bytes > ALIGNMENT_BYTES_MAX ||
                      terms.alignment_bytes % 4 != 0 || terms.data_bytes_max < 4096)) {
        abort(); /* the sender relies on both */
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    if (count <= CHOICE_BYTES) {
        return 0;
    }
    unsigned choices = bytes[0];
    size_t piece_bytes = 1 + bytes[1] % PIECE_BYTES_MAX;
    size_t stream_bytes = count - CHOICE_BYTES;
    decode_icresp(bytes + CHOICE_BYTES, stream_bytes, choices);
    uint8_t *stream = malloc(stream_bytes);
    if (stream == NULL) {
        abort();
    }
    memcpy(stream, bytes + CHOICE_BYTES, stream_bytes);
    struct nvme_terms terms = {.header_digest = (choices & WITH_HEADER_DIGEST) != 0,
                               .data_digest = (choices & WITH_DATA_DIGEST) != 0,
                               .alignment_bytes = 4,
                               .data_bytes_max = 4096};
    if ((choices & MAKE_DIGESTS_RIGHT) != 0) {
        make_digests_right(&terms, stream, stream_bytes);
    }
    struct story whole = receive(&terms, stream, stream_bytes, SIZE_MAX);
    struct story cut = receive(&terms, stream, stream_bytes, piece_bytes);
    if (whole.crc32c != cut.crc32c || whole.events != cut.events || whole.code != cut.code) {
        abort();
    }
    free(stream);
    return 0;
}
