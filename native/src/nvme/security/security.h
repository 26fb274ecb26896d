/*
 * Authentication and encryption of NVMe/TCP connections: the functions of libdlfs_security, and
 * their loader.
 *
 * libdlfs is not linked with OpenSSL. A second library, libdlfs_security.so in the folder of
 * libdlfs.so, is. It is loaded when a configuration first names a key, and stays loaded. It finds
 * keys by name and keeps them: no function returns a key or a value from which one follows.
 *
 * Threads: any at once may load the library. One thread at a time uses a session.
 *
 * Source: NVM Express Base Specification 2.1, section 8.3.4 (authentication), 8.3.4.3 (secure
 * channel concatenation), 8.3.4.5 (DH-HMAC-CHAP).
 */
#ifndef DLFS_NVME_SECURITY_H
#define DLFS_NVME_SECURITY_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* Version of struct nvme_security; both libraries must have the same one. */
#define NVME_SECURITY_VERSION 2u
/* The symbol of libdlfs_security that returns its functions. */
#define NVME_SECURITY_SYMBOL "dlfs_security_functions"
/* Room for any message of these functions, NUL included. */
#define NVME_SECURITY_TEXT_BYTES 512u

/*
 * Code of an authentication or TLS handshake in which the target closed the connection in place of
 * an answer. It was restarted, or refused this host: Linux's target closes the connection so soon
 * after Failure1 that this may be lost, and not every TLS server sends an alert. Another attempt
 * tells which.
 */
#define NVME_AUTH_CLOSED (-ECONNABORTED)

/* Identifiers of hashes in messages and keys. */
#define NVME_HASH_NONE 0u
#define NVME_HASH_SHA256 1u
#define NVME_HASH_SHA384 2u
#define NVME_HASH_SHA512 3u
#define NVME_HASH_BYTES_MAX 64u

/* Identifiers of Diffie-Hellman groups in messages: none, and those of RFC 7919. */
#define NVME_DH_NONE 0u
#define NVME_DH_FFDHE2048 1u
#define NVME_DH_FFDHE3072 2u
#define NVME_DH_FFDHE4096 3u
#define NVME_DH_FFDHE6144 4u
#define NVME_DH_FFDHE8192 5u
#define NVME_DH_BYTES_MAX 1024u

/*
 * Secure channel concatenation (SC_C): both sides generate a TLS key from the exchange, on an admin
 * queue without TLS, or one that replaces the key of the admin queue's TLS.
 */
#define NVME_CHANNEL_NONE 0u
#define NVME_CHANNEL_NEW 2u
#define NVME_CHANNEL_REPLACE 3u

/* Longest name of a key, without its NUL. */
#define NVME_KEY_NAME_BYTES_MAX 64u

/* Names of keys and of the two sides: what a DH-HMAC-CHAP session is opened with. */
struct nvme_chap_config {
    const char *host_key;       /* name of this host's key */
    const char *controller_key; /* name of the controller's key; NULL: one-way authentication */
    const char *host_nqn;
    const char *subsystem_nqn;
};

/* The controller's challenge, with lengths that were checked against its hash and group. */
struct nvme_chap_challenge {
    uint32_t hash;     /* NVME_HASH_* */
    uint32_t group;    /* NVME_DH_* */
    uint32_t sequence; /* SEQNUM */
    uint16_t transaction;
    uint8_t secure_channel;      /* SC_C of the negotiation */
    const uint8_t *value;        /* the challenge: as many bytes as the hash has */
    const uint8_t *public_value; /* the controller's Diffie-Hellman value */
    uint32_t public_value_bytes; /* 0 for NVME_DH_NONE */
};

/* This host's answer to a challenge. */
struct nvme_chap_answer {
    uint8_t response[NVME_HASH_BYTES_MAX];
    uint8_t challenge[NVME_HASH_BYTES_MAX]; /* for the controller */
    uint8_t public_value[NVME_DH_BYTES_MAX];
    uint32_t hash_bytes;
    uint32_t public_value_bytes;
    uint32_t sequence;  /* of the challenge that the controller must answer; 0: it need not */
    bool has_challenge; /* for an answer, or for a generated key; else it is zeros */
};

struct nvme_chap;
/* A TLS key that was generated from an exchange, with its identity. */
struct nvme_tls_key;

/* Versions of the identity that names a TLS key in a handshake: 1 has a digest of the key. */
#define NVME_TLS_IDENTITY_MAX 1u

/* The two sides of a TLS session, and the name of their key. */
struct nvme_tls_config {
    const char *key; /* name of the pre-shared key; not used if there is a generated one */
    const struct nvme_tls_key *generated; /* NULL: none */
    const char *host_nqn;
    const char *subsystem_nqn;
    uint32_t identity;      /* version of the identity, up to NVME_TLS_IDENTITY_MAX */
    uint32_t receive_bytes; /* most bytes that one system call receives */
};

/* A TLS 1.3 session over a connected, non-blocking socket. */
struct nvme_tls;

/* The functions of libdlfs_security. They return 0 or a negative code. */
struct nvme_security {
    uint32_t version; /* NVME_SECURITY_VERSION */
    uint32_t reserved;
    /*
     * Finds and reads the keys anew, and creates a session. message gets the reason of a failure,
     * with no part of a key. Errors: DLFS_E_AUTH (no such key, a malformed or exposed one),
     * -ENOMEM.
     */
    int (*chap_open)(const struct nvme_chap_config *config, struct nvme_chap **out,
                     char message[NVME_SECURITY_TEXT_BYTES]);
    /* Wipes and frees a session; NULL does nothing. */
    void (*chap_close)(struct nvme_chap *session);
    /*
     * Computes the answer to a challenge. Errors: DLFS_E_AUTH (a public value that is not valid),
     * -EIO (OpenSSL failed).
     */
    int (*chap_answer)(struct nvme_chap *session, const struct nvme_chap_challenge *challenge,
                       struct nvme_chap_answer *answer);
    /* Returns true if a response of as many bytes as the hash has proves the controller's key. */
    bool (*chap_verify)(const struct nvme_chap *session, const uint8_t *response);
    /*
     * Generates the TLS key of an exchange that has succeeded, with a secure channel. Errors:
     * -ENOTSUP (no Diffie-Hellman group, or a hash that no cipher suite has), -ENOMEM, -EINVAL,
     * -EIO.
     */
    int (*chap_generate_tls_key)(const struct nvme_chap *session, struct nvme_tls_key **out);
    /* Wipes and frees a generated key; NULL does nothing. */
    void (*tls_key_free)(struct nvme_tls_key *key);
    /*
     * Finds and reads the key anew unless it was generated, and creates a session; the caller keeps
     * the descriptor, and the generated key until the handshake is complete. message
     * gets the reason of a failure. Errors: DLFS_E_AUTH (no such key, a malformed or exposed one),
     * -EINVAL (names that are too long for the identity), -ENOMEM, -EIO (OpenSSL failed).
     */
    int (*tls_open)(const struct nvme_tls_config *config, int descriptor, struct nvme_tls **out,
                    char message[NVME_SECURITY_TEXT_BYTES]);
    /*
     * Continues the handshake. Returns 0 when it is complete, POLLIN or POLLOUT to be called again
     * when the socket is ready, or a negative code with the reason in message: DLFS_E_AUTH (one
     * side refused the other), NVME_AUTH_CLOSED, DLFS_E_LOST (the connection was reset),
     * DLFS_E_TIMEOUT (the network gave up).
     */
    int (*tls_handshake)(struct nvme_tls *tls, char message[NVME_SECURITY_TEXT_BYTES]);
    /*
     * Sends as much as the socket takes. Returns the bytes, 0 if it is full, or a negative code
     * with *reason, which lives as long as the session. Bytes that were not sent must be the first
     * ones of the next call.
     */
    ssize_t (*tls_send)(struct nvme_tls *tls, const struct iovec *vectors, size_t count,
                        const char **reason);
    /*
     * Receives into the vectors. Returns the bytes, 0 if no record has arrived, or a negative code
     * with *reason: DLFS_E_AUTH (a record was changed on its way), DLFS_E_LOST, DLFS_E_TIMEOUT,
     * DLFS_E_PROTOCOL.
     */
    ssize_t (*tls_receive)(struct nvme_tls *tls, const struct iovec *vectors, size_t count,
                           const char **reason);
    /* Returns true if a receive may succeed although the socket is not readable. */
    bool (*tls_has_buffered)(const struct nvme_tls *tls);
    /* Returns true if the session has a message of its own to send, for which it needs a receive
     * when the socket has room. */
    bool (*tls_wants_room)(const struct nvme_tls *tls);
    /* Frees a session; NULL does nothing. orderly: tells the target first that the stream ends. */
    void (*tls_close)(struct nvme_tls *tls, bool orderly);
};

/*
 * Returns the functions of libdlfs_security, which is loaded on the first call. Errors: -ENOTSUP,
 * with the reason in message.
 */
int nvme_security_load(const struct nvme_security **out, char message[NVME_SECURITY_TEXT_BYTES]);

#endif
