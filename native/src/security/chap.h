/*
 * A DH-HMAC-CHAP session of this host: its keys, and what one exchange computes from them.
 *
 * It lives in memory of secret_allocate. Messages are encoded and decoded by libdlfs
 * (nvme/security/authenticate.c), which sees challenges, responses and public values only.
 *
 * Source: NVM Express Base Specification 2.1, section 8.3.4.5.
 */
#ifndef DLFS_SECURITY_CHAP_H
#define DLFS_SECURITY_CHAP_H

#include "security/tls_psk.h"

struct nvme_chap {
    struct security_key host_key;
    struct security_key controller_key;
    bool has_controller_key;
    char host_nqn[224];
    char subsystem_nqn[224];
    uint8_t transformed_host_key[NVME_HASH_BYTES_MAX];
    uint8_t transformed_controller_key[NVME_HASH_BYTES_MAX];
    /* The following fields are set by each exchange. */
    uint32_t hash;
    uint32_t hash_bytes;
    uint32_t session_key_bytes; /* 0 without a Diffie-Hellman group */
    uint8_t session_key[NVME_HASH_BYTES_MAX];
    uint8_t host_challenge[NVME_HASH_BYTES_MAX];       /* C1, from the controller */
    uint8_t controller_challenge[NVME_HASH_BYTES_MAX]; /* C2, from this host */
    uint8_t expected[NVME_HASH_BYTES_MAX];             /* the response that the controller owes */
    uint8_t shared[NVME_DH_BYTES_MAX];
};

/* Transforms a key with an NQN; a key without a hash stays as it is. Errors: -EIO. */
int chap_transform_key(const struct security_key *key, const char *nqn,
                       uint8_t out[NVME_HASH_BYTES_MAX]);

/* The inputs of a response. */
struct chap_response {
    uint32_t hash;
    const uint8_t *key; /* transformed */
    size_t key_bytes;
    const uint8_t *session_key; /* NULL without a Diffie-Hellman group */
    const uint8_t *challenge;
    uint32_t sequence;
    uint16_t transaction;
    uint8_t secure_channel;
    const char *role; /* "HostHost" or "Controller" */
    const char *first_nqn;
    const char *second_nqn;
};
/* Computes a response of as many bytes as the hash has. Errors: -ENOTSUP, -EIO. */
int chap_compute_response(const struct chap_response *input, uint8_t out[NVME_HASH_BYTES_MAX]);

/*
 * Generates a key for TLS from the session key and both challenges, all of as many bytes as the
 * hash has. Errors: -ENOTSUP, -EIO.
 */
int chap_generate_psk(uint32_t hash, const uint8_t *session_key, const uint8_t *host_challenge,
                      const uint8_t *controller_challenge, uint8_t out[NVME_HASH_BYTES_MAX]);

/* A generated TLS key, in memory of secret_allocate. */
struct nvme_tls_key {
    struct tls_psk psk;
};

/* These functions are members of struct nvme_security, which describes them. */
int chap_open(const struct nvme_chap_config *config, struct nvme_chap **out,
              char message[NVME_SECURITY_TEXT_BYTES]);
void chap_close(struct nvme_chap *session);
int chap_answer(struct nvme_chap *session, const struct nvme_chap_challenge *challenge,
                struct nvme_chap_answer *answer);
bool chap_verify(const struct nvme_chap *session, const uint8_t *response);
int chap_generate_tls_key(const struct nvme_chap *session, struct nvme_tls_key **out);
void tls_key_free(struct nvme_tls_key *key);

#endif
