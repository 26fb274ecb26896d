/*
 * The name (NQN) and ID of this host, which it states to NVMe-oF targets. They are the same as
 * those of dlfs/block/host.py, so that a target which allows one program of a machine allows the
 * others. Both exist since programs in C connect without Python, which has the better messages.
 */
#ifndef DLFS_HOST_H
#define DLFS_HOST_H

#include "dlfs/dlfs.h"

struct host_identity {
    char nqn[DLFS_NVME_NQN_BYTES_MAX + 1];
    uint8_t id[16];
};

/*
 * Finds both in a folder, usually /etc: those of nvme/hostnqn and nvme/hostid, one of them in the
 * UUID form of the other, or derived from machine-id. nqn and id are what the caller gave, or NULL.
 * Errors: -EINVAL, with the reason in message: the machine has no identity, or a file is malformed.
 * Any thread.
 */
int host_identity_read(const char *folder, const char *nqn, const uint8_t *id,
                       struct host_identity *out, char *message, uint32_t message_bytes);

#endif
