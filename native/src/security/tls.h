/*
 * TLS 1.3 with a pre-shared key over a connected, non-blocking socket: the client's side, by
 * OpenSSL.
 *
 * OpenSSL reads and writes the socket through a BIO of its own kind, so that a closed connection
 * raises no SIGPIPE, and to distinguish an error of the socket from one of TLS. The BIO
 * receives many records with one system call.
 *
 * OpenSSL's client offers one external key in a handshake. Its identity has one of two versions; a
 * caller whose target refuses one version opens another connection for the other.
 *
 * No certificate is accepted: a handshake without the pre-shared key fails. There is no session
 * resumption, so tickets of the server are ignored. A key update of the server is answered.
 *
 * Threads: one at a time uses a session.
 *
 * Source: RFC 8446; NVM Express TCP Transport Specification 1.1, section 3.6.1.
 */
#ifndef DLFS_SECURITY_TLS_H
#define DLFS_SECURITY_TLS_H

#include "nvme/security/security.h"
#include "security/tls_psk.h"

/* These functions are members of struct nvme_security, which describes them. */
int tls_open(const struct nvme_tls_config *config, int descriptor, struct nvme_tls **out,
             char message[NVME_SECURITY_TEXT_BYTES]);
int tls_handshake(struct nvme_tls *tls, char message[NVME_SECURITY_TEXT_BYTES]);
ssize_t tls_send(struct nvme_tls *tls, const struct iovec *vectors, size_t count,
                 const char **reason);
ssize_t tls_receive(struct nvme_tls *tls, const struct iovec *vectors, size_t count,
                    const char **reason);
bool tls_has_buffered(const struct nvme_tls *tls);
bool tls_wants_room(const struct nvme_tls *tls);
void tls_close(struct nvme_tls *tls, bool orderly);

/* Creates a session that offers a key. receive_bytes: most bytes of one system call. -ENOMEM. */
int tls_create(int descriptor, const struct tls_psk *psk, uint32_t receive_bytes,
               struct nvme_tls **out);

#endif
