/*
 * The name (NQN) and ID of this host, which it states to NVMe-oF targets. They are the same as
 * those of dlfs/block/host.py, so that a target which allows one program of a machine allows the
 * others.
 */
#ifndef DLFS_HOST_H
#define DLFS_HOST_H

#include "dlfs/dlfs.h"

struct host_identity {
    char nqn[DLFS_NVME_NQN_BYTES_MAX + 1];
    uint8_t id[16];
};

/*
 * Finds both in a folder, usually /etc: nvme/hostnqn and nvme/hostid if these are valid, else
 * derived from machine-id. On a machine without machine-id they are random, and the same for the
 * whole process. Any thread.
 */
void host_identity_read(const char *folder, struct host_identity *out);

#endif
