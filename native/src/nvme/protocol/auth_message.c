/* The messages of DH-HMAC-CHAP; see nvme/protocol/auth_message.h. */
#include "nvme/protocol/auth_message.h"

#include "dlfs/codes.h"
#include "nvme/protocol/command.h"

#define FABRICS_AUTHENTICATION_SEND 0x05u
#define FABRICS_AUTHENTICATION_RECEIVE 0x06u
#define SECURITY_PROTOCOL 0xE9u /* SECP; SPSP0 and SPSP1 are 1 */

#define TYPE_COMMON 0x00u
#define TYPE_DHCHAP 0x01u
#define MESSAGE_NEGOTIATE 0x00u
#define MESSAGE_CHALLENGE 0x01u
#define MESSAGE_REPLY 0x02u
#define MESSAGE_SUCCESS1 0x03u
#define MESSAGE_SUCCESS2 0x04u
#define MESSAGE_FAILURE2 0xF0u
#define MESSAGE_FAILURE1 0xF1u
#define HEADER_BYTES 16u /* of all messages of DH-HMAC-CHAP */
#define FAILURE_BYTES 8u
#define REASON_FAILED 0x01u

/* Offsets in the descriptor of DH-HMAC-CHAP in a Negotiate message. */
#define DESCRIPTOR_AT 8u
#define DESCRIPTOR_HASHES_AT (DESCRIPTOR_AT + 4)
#define DESCRIPTOR_GROUPS_AT (DESCRIPTOR_AT + 34)

static const uint8_t hash_bytes_of[] = {
    [NVME_HASH_SHA256] = 32, [NVME_HASH_SHA384] = 48, [NVME_HASH_SHA512] = 64};
static const uint16_t group_bytes_of[] = {
    [NVME_DH_NONE] = 0,        [NVME_DH_FFDHE2048] = 256, [NVME_DH_FFDHE3072] = 384,
    [NVME_DH_FFDHE4096] = 512, [NVME_DH_FFDHE6144] = 768, [NVME_DH_FFDHE8192] = 1024};

void nvme_entry_authenticate(uint8_t *entry, bool receive, uint32_t data_bytes)
{
    memset(entry, 0, NVME_ENTRY_BYTES);
    entry[0] = NVME_FABRICS;
    entry[4] = receive ? FABRICS_AUTHENTICATION_RECEIVE : FABRICS_AUTHENTICATION_SEND;
    entry[41] = 1;
    entry[42] = 1;
    entry[43] = SECURITY_PROTOCOL;
    nvme_put32(entry + 44, data_bytes);
}

/* ---- encoding -------------------------------------------------------------------------------- */

static void put_header(uint8_t *out, uint8_t type, uint8_t message, uint16_t transaction)
{
    memset(out, 0, HEADER_BYTES);
    out[0] = type;
    out[1] = message;
    nvme_put16(out + 4, transaction);
}

uint32_t nvme_auth_negotiate(uint16_t transaction, uint8_t secure_channel,
                             uint8_t out[NVME_AUTH_BYTES_MAX])
{
    static const uint8_t hashes[] = {NVME_HASH_SHA256, NVME_HASH_SHA384, NVME_HASH_SHA512};
    static const uint8_t groups[] = {NVME_DH_FFDHE2048, NVME_DH_FFDHE3072, NVME_DH_FFDHE4096,
                                     NVME_DH_FFDHE6144, NVME_DH_FFDHE8192, NVME_DH_NONE};
    memset(out, 0, NVME_AUTH_NEGOTIATE_BYTES);
    put_header(out, TYPE_COMMON, MESSAGE_NEGOTIATE, transaction);
    out[6] = secure_channel;
    out[7] = 1; /* descriptors */
    out[DESCRIPTOR_AT] = TYPE_DHCHAP;
    /* The last hash and the last group of these lists generate no TLS key. */
    bool all = secure_channel == NVME_CHANNEL_NONE;
    out[DESCRIPTOR_AT + 2] = all ? sizeof hashes : sizeof hashes - 1;
    out[DESCRIPTOR_AT + 3] = all ? sizeof groups : sizeof groups - 1;
    memcpy(out + DESCRIPTOR_HASHES_AT, hashes, out[DESCRIPTOR_AT + 2]);
    memcpy(out + DESCRIPTOR_GROUPS_AT, groups, out[DESCRIPTOR_AT + 3]);
    return NVME_AUTH_NEGOTIATE_BYTES;
}

uint32_t nvme_auth_reply(uint16_t transaction, const struct nvme_chap_answer *answer,
                         uint8_t out[NVME_AUTH_BYTES_MAX])
{
    uint32_t hash_bytes = answer->hash_bytes;
    put_header(out, TYPE_DHCHAP, MESSAGE_REPLY, transaction);
    out[6] = (uint8_t)hash_bytes;
    out[8] = answer->has_challenge; /* CVALID */
    nvme_put16(out + 10, (uint16_t)answer->public_value_bytes);
    nvme_put32(out + 12, answer->sequence);
    uint8_t *at = out + HEADER_BYTES;
    memcpy(at, answer->response, hash_bytes);
    memcpy(at + hash_bytes, answer->challenge, hash_bytes);
    memcpy(at + (size_t)2 * hash_bytes, answer->public_value, answer->public_value_bytes);
    return HEADER_BYTES + 2 * hash_bytes + answer->public_value_bytes;
}

uint32_t nvme_auth_success2(uint16_t transaction, uint8_t out[NVME_AUTH_BYTES_MAX])
{
    put_header(out, TYPE_DHCHAP, MESSAGE_SUCCESS2, transaction);
    return HEADER_BYTES;
}

uint32_t nvme_auth_failure2(uint16_t transaction, uint8_t explanation,
                            uint8_t out[NVME_AUTH_BYTES_MAX])
{
    put_header(out, TYPE_COMMON, MESSAGE_FAILURE2, transaction);
    out[6] = REASON_FAILED;
    out[7] = explanation;
    return FAILURE_BYTES;
}

/* ---- decoding -------------------------------------------------------------------------------- */

static int refuse(struct nvme_auth_refusal *refusal, uint8_t explanation, const char *reason)
{
    *refusal = (struct nvme_auth_refusal){.explanation = explanation, .reason = reason};
    return DLFS_E_AUTH;
}

static const char *failure_phrase(uint8_t explanation)
{
    static const char *const phrases[] = {
        [NVME_AUTH_FAILED] = "authentication failed: is it the right key?",
        [0x02] = "the authentication protocol is not usable",
        [0x03] = "secure channel concatenation does not match",
        [NVME_AUTH_HASH_UNUSABLE] = "no offered hash is usable",
        [NVME_AUTH_GROUP_UNUSABLE] = "no offered Diffie-Hellman group is usable",
        [NVME_AUTH_BAD_PAYLOAD] = "incorrect payload",
        [NVME_AUTH_BAD_MESSAGE] = "incorrect message",
    };
    bool known = explanation > 0 && explanation < sizeof phrases / sizeof *phrases;
    return known ? phrases[explanation] : "a reason without a name";
}

/* Checks that a message has a type, and the transaction's number; a Failure1 ends all. */
static int check_header(const uint8_t *bytes, size_t count, uint8_t message, uint16_t transaction,
                        struct nvme_auth_refusal *refusal)
{
    if (count < FAILURE_BYTES || nvme_get16(bytes + 4) != transaction) {
        return refuse(refusal, NVME_AUTH_BAD_PAYLOAD,
                      count < FAILURE_BYTES ? "it sent too short a message"
                                            : "it sent a message of another transaction");
    }
    if (bytes[0] == TYPE_COMMON && bytes[1] == MESSAGE_FAILURE1) {
        *refusal = (struct nvme_auth_refusal){
            .by_target = true, .explanation = bytes[7], .reason = failure_phrase(bytes[7])};
        return DLFS_E_AUTH;
    }
    if (bytes[0] != TYPE_DHCHAP || bytes[1] != message) {
        return refuse(refusal, NVME_AUTH_BAD_MESSAGE, "it sent an unexpected message");
    }
    if (count < HEADER_BYTES) {
        return refuse(refusal, NVME_AUTH_BAD_PAYLOAD, "it sent too short a message");
    }
    return 0;
}

int nvme_auth_decode_challenge(const uint8_t *bytes, size_t count, uint16_t transaction,
                               uint8_t secure_channel, struct nvme_chap_challenge *challenge,
                               struct nvme_auth_refusal *refusal)
{
    int code = check_header(bytes, count, MESSAGE_CHALLENGE, transaction, refusal);
    if (code < 0) {
        return code;
    }
    uint32_t hash_bytes = bytes[6];
    uint8_t hash = bytes[8];
    uint8_t group = bytes[9];
    uint32_t public_value_bytes = nvme_get16(bytes + 10);
    uint32_t sequence = nvme_get32(bytes + 12);
    bool all = secure_channel == NVME_CHANNEL_NONE;
    if (hash == NVME_HASH_NONE || hash >= sizeof hash_bytes_of ||
        hash_bytes != hash_bytes_of[hash] || (!all && hash == NVME_HASH_SHA512)) {
        return refuse(refusal, NVME_AUTH_HASH_UNUSABLE,
                      "its challenge has a hash that was not offered");
    }
    if (group >= sizeof group_bytes_of / sizeof *group_bytes_of ||
        public_value_bytes != group_bytes_of[group] || (!all && group == NVME_DH_NONE)) {
        return refuse(refusal, NVME_AUTH_GROUP_UNUSABLE,
                      "its challenge has a Diffie-Hellman group that was not offered");
    }
    if (sequence == 0 || count - HEADER_BYTES < hash_bytes + public_value_bytes) {
        return refuse(refusal, NVME_AUTH_BAD_PAYLOAD,
                      sequence == 0 ? "its challenge has no sequence number"
                                    : "its challenge is too short");
    }
    *challenge = (struct nvme_chap_challenge){.hash = hash,
                                              .group = group,
                                              .sequence = sequence,
                                              .transaction = transaction,
                                              .secure_channel = secure_channel,
                                              .value = bytes + HEADER_BYTES,
                                              .public_value = bytes + HEADER_BYTES + hash_bytes,
                                              .public_value_bytes = public_value_bytes};
    return 0;
}

int nvme_auth_decode_success1(const uint8_t *bytes, size_t count, uint16_t transaction,
                              uint32_t hash_bytes, const uint8_t **response,
                              struct nvme_auth_refusal *refusal)
{
    int code = check_header(bytes, count, MESSAGE_SUCCESS1, transaction, refusal);
    if (code < 0) {
        return code;
    }
    bool has_response = bytes[8] != 0;
    if (has_response && (bytes[6] != hash_bytes || count - HEADER_BYTES < hash_bytes)) {
        return refuse(refusal, NVME_AUTH_BAD_PAYLOAD, "its response is too short");
    }
    *response = has_response ? bytes + HEADER_BYTES : NULL;
    return 0;
}
