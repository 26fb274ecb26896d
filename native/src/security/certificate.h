/*
 * A certificate for one run of a server, which its clients know by its fingerprint.
 *
 * Source: RFC 5280 (X.509), RFC 7468 (PEM).
 */
#ifndef DLFS_SECURITY_CERTIFICATE_H
#define DLFS_SECURITY_CERTIFICATE_H

#include <stddef.h>

/*
 * Generates a key on the curve P-256 and a certificate that it signs itself, both as PEM, each with
 * a terminating zero. The caller wipes the key.
 *
 * Errors: -EIO, OpenSSL failed; -ENOSPC, a buffer is too short: 4096 bytes are enough.
 */
int dlfs_security_make_certificate(char *certificate, size_t certificate_bytes, char *key,
                                   size_t key_bytes);

#endif
