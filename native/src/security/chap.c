/* A DH-HMAC-CHAP session of this host; see security/chap.h. */
#include "security/chap.h"

#include <endian.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <openssl/crypto.h>

#include "dlfs/codes.h"
#include "security/crypto.h"
#include "security/secret.h"

#define CHALLENGES_NOTED 256u
#define KEY_PURPOSE "NVMe-over-Fabrics"

int chap_transform_key(const struct security_key *key, const char *nqn,
                       uint8_t out[NVME_HASH_BYTES_MAX])
{
    if (key->hash == NVME_HASH_NONE) {
        memcpy(out, key->bytes, key->count);
        return 0;
    }
    const struct security_bytes parts[] = {{nqn, strlen(nqn)}, {KEY_PURPOSE, strlen(KEY_PURPOSE)}};
    return security_hmac(key->hash, (struct security_bytes){key->bytes, key->count}, parts, 2, out);
}

int chap_compute_response(const struct chap_response *input, uint8_t out[NVME_HASH_BYTES_MAX])
{
    uint32_t hash_bytes = security_hash_bytes(input->hash);
    uint8_t augmented[NVME_HASH_BYTES_MAX];
    struct security_bytes challenge = {input->challenge, hash_bytes};
    if (hash_bytes == 0) {
        return -ENOTSUP;
    }
    int code = 0;
    if (input->session_key != NULL) {
        struct security_bytes key = {input->session_key, hash_bytes};
        code = security_hmac(input->hash, key, &challenge, 1, augmented);
        challenge.at = augmented;
    }
    uint32_t sequence = htole32(input->sequence);
    uint16_t transaction = htole16(input->transaction);
    const uint8_t zero = 0;
    const struct security_bytes parts[] = {
        challenge,
        {&sequence, sizeof sequence},
        {&transaction, sizeof transaction},
        {&input->secure_channel, 1},
        {input->role, strlen(input->role)},
        {input->first_nqn, strlen(input->first_nqn)},
        {&zero, 1},
        {input->second_nqn, strlen(input->second_nqn)},
    };
    if (code == 0) {
        struct security_bytes key = {input->key, input->key_bytes};
        code = security_hmac(input->hash, key, parts, sizeof parts / sizeof *parts, out);
    }
    secret_wipe(augmented, sizeof augmented);
    return code;
}

int chap_generate_psk(uint32_t hash, const uint8_t *session_key, const uint8_t *host_challenge,
                      const uint8_t *controller_challenge, uint8_t out[NVME_HASH_BYTES_MAX])
{
    uint32_t bytes = security_hash_bytes(hash);
    const struct security_bytes parts[] = {{host_challenge, bytes}, {controller_challenge, bytes}};
    return security_hmac(hash, (struct security_bytes){session_key, bytes}, parts, 2, out);
}

/* ---- sessions -------------------------------------------------------------------------------- */

static int find_key(struct nvme_chap *session, enum security_key_kind kind, const char *name,
                    char message[NVME_SECURITY_TEXT_BYTES])
{
    bool is_host = kind == SECURITY_KEY_HOST;
    struct security_key *key = is_host ? &session->host_key : &session->controller_key;
    const struct security_key_query query = {.kind = kind,
                                             .name = name,
                                             .host_nqn = session->host_nqn,
                                             .subsystem_nqn = session->subsystem_nqn};
    int code = security_key_find(&query, key, message);
    if (code < 0) {
        return code;
    }
    code = chap_transform_key(key, is_host ? session->host_nqn : session->subsystem_nqn,
                              is_host ? session->transformed_host_key
                                      : session->transformed_controller_key);
    if (code < 0) {
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES, "key %s: OpenSSL failed", name);
    }
    return code;
}

int chap_open(const struct nvme_chap_config *config, struct nvme_chap **out,
              char message[NVME_SECURITY_TEXT_BYTES])
{
    struct nvme_chap *session = secret_allocate(sizeof *session);
    if (session == NULL) {
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES, "no memory for a key");
        return -ENOMEM;
    }
    (void)snprintf(session->host_nqn, sizeof session->host_nqn, "%s", config->host_nqn);
    (void)snprintf(session->subsystem_nqn, sizeof session->subsystem_nqn, "%s",
                   config->subsystem_nqn);
    int code = find_key(session, SECURITY_KEY_HOST, config->host_key, message);
    if (code == 0 && config->controller_key != NULL) {
        session->has_controller_key = true;
        code = find_key(session, SECURITY_KEY_CONTROLLER, config->controller_key, message);
    }
    if (code < 0) {
        chap_close(session);
        return code;
    }
    *out = session;
    return 0;
}

void chap_close(struct nvme_chap *session)
{
    secret_free(session, sizeof *session);
}

/* Makes a Diffie-Hellman key pair; sets the session key to the hash of the shared secret. */
static int agree(struct nvme_chap *session, const struct nvme_chap_challenge *challenge,
                 struct nvme_chap_answer *answer)
{
    uint32_t bytes = security_dh_bytes(challenge->group);
    const struct security_bytes peer = {challenge->public_value, challenge->public_value_bytes};
    int code = security_dh_agree(challenge->group, peer, answer->public_value, session->shared);
    if (code == 0) {
        code = security_hash(challenge->hash, (struct security_bytes){session->shared, bytes},
                             session->session_key);
    }
    secret_wipe(session->shared, sizeof session->shared);
    answer->public_value_bytes = bytes;
    session->session_key_bytes = session->hash_bytes;
    return code == -EBADMSG ? DLFS_E_AUTH : code;
}

/* Makes a challenge for the controller, and computes the response that it owes if it has a key. */
static int challenge_controller(struct nvme_chap *session, struct chap_response input,
                                struct nvme_chap_answer *answer)
{
    int code = security_random(session->controller_challenge, session->hash_bytes);
    memcpy(answer->challenge, session->controller_challenge, session->hash_bytes);
    answer->has_challenge = true;
    if (!session->has_controller_key) {
        return code;
    }
    do {
        code = code < 0 ? code : security_random(&answer->sequence, sizeof answer->sequence);
    } while (code == 0 && answer->sequence == 0); /* 0 means that no answer is wanted */
    input.key = session->transformed_controller_key;
    input.key_bytes = session->controller_key.count;
    input.challenge = session->controller_challenge;
    input.sequence = answer->sequence;
    input.role = "Controller";
    input.first_nqn = session->subsystem_nqn;
    input.second_nqn = session->host_nqn;
    return code < 0 ? code : chap_compute_response(&input, session->expected);
}

/*
 * Returns true if a challenge is one of the last ones that this process answered: a target makes
 * each one at random, so it was recorded and is replayed. Threads may note challenges at once.
 */
static bool was_used(const uint8_t *value)
{
    static _Atomic uint64_t used[CHALLENGES_NOTED];
    static _Atomic uint32_t next;
    uint64_t first; /* 64 random bits do not repeat by chance */
    memcpy(&first, value, sizeof first);
    for (size_t i = 0; i < CHALLENGES_NOTED; i++) {
        if (atomic_load(&used[i]) == first) {
            return true;
        }
    }
    atomic_store(&used[atomic_fetch_add(&next, 1) % CHALLENGES_NOTED], first);
    return false;
}

int chap_answer(struct nvme_chap *session, const struct nvme_chap_challenge *challenge,
                struct nvme_chap_answer *answer)
{
    memset(answer, 0, sizeof *answer);
    session->hash = challenge->hash;
    session->hash_bytes = security_hash_bytes(challenge->hash);
    session->session_key_bytes = 0;
    if (session->hash_bytes == 0) {
        return -ENOTSUP;
    }
    if (was_used(challenge->value)) {
        return DLFS_E_AUTH;
    }
    answer->hash_bytes = session->hash_bytes;
    memcpy(session->host_challenge, challenge->value, session->hash_bytes);
    int code = challenge->group != NVME_DH_NONE ? agree(session, challenge, answer) : 0;
    const struct chap_response input = {
        .hash = challenge->hash,
        .key = session->transformed_host_key,
        .key_bytes = session->host_key.count,
        .session_key = session->session_key_bytes > 0 ? session->session_key : NULL,
        .challenge = challenge->value,
        .sequence = challenge->sequence,
        .transaction = challenge->transaction,
        .secure_channel = challenge->secure_channel,
        .role = "HostHost",
        .first_nqn = session->host_nqn,
        .second_nqn = session->subsystem_nqn,
    };
    if (code == 0) {
        code = chap_compute_response(&input, answer->response);
    }
    if (code == 0 &&
        (session->has_controller_key || challenge->secure_channel != NVME_CHANNEL_NONE)) {
        code = challenge_controller(session, input, answer);
    }
    return code;
}

bool chap_verify(const struct nvme_chap *session, const uint8_t *response)
{
    return session->has_controller_key && session->hash_bytes > 0 &&
           CRYPTO_memcmp(session->expected, response, session->hash_bytes) == 0;
}

int chap_generate_tls_key(const struct nvme_chap *session, struct nvme_tls_key **out)
{
    uint8_t psk[NVME_HASH_BYTES_MAX];
    const struct tls_names names = {session->host_nqn, session->subsystem_nqn};
    if (session->session_key_bytes == 0) {
        return -ENOTSUP; /* without a group, any owner of the keys could compute it */
    }
    struct nvme_tls_key *key = secret_allocate(sizeof *key);
    if (key == NULL) {
        return -ENOMEM;
    }
    int code = chap_generate_psk(session->hash, session->session_key, session->host_challenge,
                                 session->controller_challenge, psk);
    if (code == 0) {
        code = tls_psk_derive_generated(session->hash, psk, &names, &key->psk);
    }
    secret_wipe(psk, sizeof psk);
    if (code < 0) {
        tls_key_free(key);
        return code;
    }
    *out = key;
    return 0;
}

void tls_key_free(struct nvme_tls_key *key)
{
    secret_free(key, sizeof *key);
}
