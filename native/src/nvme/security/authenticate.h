/*
 * Authenticates one connection by DH-HMAC-CHAP: right after Connect, or later on an admin queue.
 *
 * With secure channel concatenation, both sides also generate a TLS key, which the connection keeps
 * for the connections to come (struct nvme_connection).
 *
 * Keys are found anew each time, so that a key may be replaced while connections are open. With a
 * key of this host and none of the controller, only this host proves itself. A configuration with a
 * key never goes on without authentication: a target that asks for none is refused, unless it is a
 * discovery controller.
 */
#ifndef DLFS_NVME_AUTHENTICATE_H
#define DLFS_NVME_AUTHENTICATE_H

#include "nvme/controller.h"

/* Bits 16 to 18 of a Connect's result (AUTHREQ): 16 is reserved, 17 demands authentication, 18
 * also a secure channel. */
#define NVME_CONNECT_AUTHENTICATION UINT64_C(0x70000)
#define NVME_CONNECT_SECURE_CHANNEL UINT64_C(0x40000)

/*
 * Does what a Connect's result and the configuration demand: authenticates, refuses the target, or
 * nothing. Errors, with a message: DLFS_E_AUTH, a side refused the other; NVME_AUTH_CLOSED;
 * -ENOTSUP, libdlfs_security is missing; those of nvme_connection_run.
 */
int nvme_authenticate_connected(struct nvme_connection *connection,
                                const struct nvme_config *config, uint64_t connect_result,
                                const struct nvme_deadline *deadline, struct nvme_text *text);
/*
 * Authenticates an idle connection. Requires a key of this host. secure_channel: NVME_CHANNEL_*;
 * unless it is NVME_CHANNEL_NONE, connection->generated is replaced. Errors: the same.
 */
int nvme_authenticate(struct nvme_connection *connection, const struct nvme_config *config,
                      uint8_t secure_channel, const struct nvme_deadline *deadline,
                      struct nvme_text *text);

#endif
