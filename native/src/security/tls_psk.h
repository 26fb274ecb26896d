/*
 * Pre-shared keys of TLS connections: from the key that an administrator gives both sides to the
 * key and the identity of one TLS handshake.
 *
 * A configured key belongs to a host; its hash says how the retained key of this host follows from
 * it. The TLS key and its identity follow from the retained key, both NQNs and the cipher suite. A
 * key of 32 bytes is for TLS_AES_128_GCM_SHA256, one of 48 bytes for TLS_AES_256_GCM_SHA384.
 *
 * Threads: any at once.
 *
 * Source: NVM Express TCP Transport Specification 1.1, sections 3.6.1.2 to 3.6.1.5; RFC 5869
 * (HKDF); RFC 8446 section 7.1 (HKDF-Expand-Label).
 */
#ifndef DLFS_SECURITY_TLS_PSK_H
#define DLFS_SECURITY_TLS_PSK_H

#include "security/key.h"

#define TLS_PSK_BYTES_MAX 48u
/* Two NQNs of 223 bytes, the prefix "NVMe1R01", a digest of 64 characters, 3 spaces, a NUL. */
#define TLS_IDENTITY_BYTES_MAX 522u
/* Versions of PSK identities; version 1 names a digest of the key in addition. */
#define TLS_IDENTITY_VERSION_MAX 1u

/* The names of both sides: at most 223 bytes each. */
struct tls_names {
    const char *host_nqn;
    const char *subsystem_nqn;
};

/* A TLS key and the identity that names it in a handshake. */
struct tls_psk {
    uint32_t suite; /* hash of the cipher suite: NVME_HASH_SHA256 or NVME_HASH_SHA384 */
    uint32_t count;
    uint8_t bytes[TLS_PSK_BYTES_MAX];
    char identity[TLS_IDENTITY_BYTES_MAX];
};

/*
 * Derives the TLS key and its identity from a configured key. Errors: -EINVAL (the key's length
 * does not fit its hash, an unknown version, NQNs that are too long for version 0), -EIO (OpenSSL
 * failed).
 */
int tls_psk_derive(const struct security_key *configured, const struct tls_names *names,
                   uint32_t version, struct tls_psk *out);

#endif
