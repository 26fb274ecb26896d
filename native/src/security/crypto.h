/*
 * Hashes, HMACs and Diffie-Hellman exchanges of libdlfs_security, by OpenSSL's libcrypto.
 *
 * Hashes and groups have the identifiers of nvme/security/security.h. Threads: any at once.
 *
 * Source: FIPS 180-4, RFC 2104, RFC 7919.
 */
#ifndef DLFS_SECURITY_CRYPTO_H
#define DLFS_SECURITY_CRYPTO_H

#include "nvme/security/security.h"

/* Some of the bytes that a hash or an HMAC covers. */
struct security_bytes {
    const void *at;
    size_t count;
};

/* Returns the length of a hash in bytes; 0 if it is unknown. */
uint32_t security_hash_bytes(uint32_t hash);
/* Hashes bytes. Errors: -ENOTSUP (an unknown hash), -EIO (OpenSSL failed). */
int security_hash(uint32_t hash, struct security_bytes input, uint8_t out[NVME_HASH_BYTES_MAX]);
/* Computes the HMAC of the concatenation of parts. Errors: as security_hash. */
int security_hmac(uint32_t hash, struct security_bytes key, const struct security_bytes *parts,
                  size_t count, uint8_t out[NVME_HASH_BYTES_MAX]);
/* Fills bytes with random numbers. Errors: -EIO. */
int security_random(void *bytes, size_t count);

/* Returns the length of a group's public values in bytes; 0 for NVME_DH_NONE and unknown ones. */
uint32_t security_dh_bytes(uint32_t group);
/*
 * Makes a new key pair of a group, and the secret that it shares with the owner of the public value
 * peer. Both results have security_dh_bytes(group) bytes, with leading zeros. Errors: -EBADMSG, the
 * peer's value is not one of the group; -ENOTSUP; -EIO.
 */
int security_dh_agree(uint32_t group, struct security_bytes peer, uint8_t *public_value,
                      uint8_t *shared);

#endif
