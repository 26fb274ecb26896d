/*
 * The name and ID of this host towards NVMe-oF targets: those that dlfs/block/host.py finds, so
 * that a target which allows one program of a machine allows the others.
 */
#ifndef DLFS_HOST_H
#define DLFS_HOST_H

#include "dlfs/dlfs.h"

struct host_identity {
    char nqn[DLFS_NVME_NQN_BYTES_MAX + 1];
    uint8_t id[16];
};

/*
 * Finds both in a folder, /etc: nvme/hostnqn and nvme/hostid where these are valid, else derived
 * from machine-id. On a machine without one they are random, and the same for the whole process.
 * Any thread.
 */
void host_identity_read(const char *folder, struct host_identity *out);

#endif
