/*
 * Encodes and decodes the messages of DH-HMAC-CHAP and the commands that transfer them. No I/O.
 *
 * The host sends Negotiate, Reply, and then Success2 if it challenged the controller. The
 * controller sends Challenge and Success1; instead of either, Failure1. The host sends Failure2
 * before it closes a connection on which the controller proved nothing.
 *
 * Source: NVM Express Base Specification 2.1, sections 6.1 and 6.2 (the commands), 8.3.4.4 (common
 * messages), 8.3.4.5 (DH-HMAC-CHAP).
 */
#ifndef DLFS_NVME_AUTH_MESSAGE_H
#define DLFS_NVME_AUTH_MESSAGE_H

#include "nvme/protocol/pdu.h"
#include "nvme/security/security.h"

/* Room for any message. A Reply is the longest: 16 bytes, two hashes and a public value. */
#define NVME_AUTH_BYTES_MAX 4096u
#define NVME_AUTH_NEGOTIATE_BYTES 72u

/* Reason code explanations of Failure1 and Failure2. */
#define NVME_AUTH_FAILED 0x01u
#define NVME_AUTH_HASH_UNUSABLE 0x04u
#define NVME_AUTH_GROUP_UNUSABLE 0x05u
#define NVME_AUTH_BAD_PAYLOAD 0x06u
#define NVME_AUTH_BAD_MESSAGE 0x07u

/* Encodes Authentication Send or Authentication Receive; nvme_entry_finish comes next. */
void nvme_entry_authenticate(uint8_t *entry, bool receive, uint32_t data_bytes);

/* ---- encoding; each function returns the number of bytes that it wrote ---- */

/* Offers all hashes and groups; for a secure channel (NVME_CHANNEL_*), those from which a TLS key
 * can be generated. */
uint32_t nvme_auth_negotiate(uint16_t transaction, uint8_t secure_channel,
                             uint8_t out[NVME_AUTH_BYTES_MAX]);
uint32_t nvme_auth_reply(uint16_t transaction, const struct nvme_chap_answer *answer,
                         uint8_t out[NVME_AUTH_BYTES_MAX]);
uint32_t nvme_auth_success2(uint16_t transaction, uint8_t out[NVME_AUTH_BYTES_MAX]);
uint32_t nvme_auth_failure2(uint16_t transaction, uint8_t explanation,
                            uint8_t out[NVME_AUTH_BYTES_MAX]);

/* ---- decoding ---- */

/* Why the host gives up: words for people, and for the controller. */
struct nvme_auth_refusal {
    bool by_target; /* the controller sent Failure1 */
    uint8_t explanation;
    const char *reason;
};

/*
 * Decodes a Challenge with the transaction's number, to an offer for a secure channel.
 * *challenge points into bytes. Errors: DLFS_E_AUTH, with *refusal.
 */
int nvme_auth_decode_challenge(const uint8_t *bytes, size_t count, uint16_t transaction,
                               uint8_t secure_channel, struct nvme_chap_challenge *challenge,
                               struct nvme_auth_refusal *refusal);
/*
 * Decodes a Success1. *response is NULL, or points to the hash_bytes of the controller's response.
 * Errors: DLFS_E_AUTH, with *refusal.
 */
int nvme_auth_decode_success1(const uint8_t *bytes, size_t count, uint16_t transaction,
                              uint32_t hash_bytes, const uint8_t **response,
                              struct nvme_auth_refusal *refusal);

#endif
