/*
 * Encryption of a connection: opens a TLS session over its socket, by libdlfs_security.
 *
 * Threads: any; one at a time uses a session.
 */
#ifndef DLFS_NVME_ENCRYPTION_H
#define DLFS_NVME_ENCRYPTION_H

#include "nvme/security/security.h"
#include "nvme/socket.h"

/*
 * Opens a TLS session over a connected socket, and completes the handshake. Returns 0, or a
 * negative code with a message in text; DLFS_E_AUTH if one side refused, NVME_AUTH_CLOSED if the
 * target closed the connection.
 */
int nvme_encrypt(const struct nvme_security *security, const struct nvme_tls_config *config,
                 int descriptor, const struct nvme_deadline *deadline, struct nvme_tls **out,
                 struct nvme_text *text);
/* Returns true if the peer of a new, connected socket answers a TLS handshake as a TLS server. */
bool nvme_answers_tls(int descriptor, const struct nvme_deadline *deadline);

#endif
