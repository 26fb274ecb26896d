/*
 * libdlfs_spdk: NVMe namespaces through SPDK, as devices of libdlfs: over PCIe from user space, and
 * over RDMA. TCP serves tests and benchmarks, which could run no other transport so far; users
 * have nvme-tcp: (dlfs/nvme.h).
 *
 * It is a separate library because it needs SPDK's libraries at run time. It is not linked with
 * libdlfs: the caller of dlfs_spdk_open gives it the function of libdlfs that it needs.
 *
 * A process has one SPDK environment (memory, cores). The first open starts it, and it ends with
 * the process. It does not survive fork: in a child, every function returns DLFS_E_CLOSED.
 *
 * Conventions are those of dlfs.h. SPDK's error messages are not printed but returned in message.
 */
#ifndef DLFS_SPDK_H
#define DLFS_SPDK_H

#include <stddef.h>
#include <stdint.h>

#include "dlfs/nvme.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this header's structures and functions. */
#define DLFS_SPDK_VERSION 2u

#define DLFS_SPDK_WRITE 1u /* else read-only */
/* Copy all data through SPDK's memory, even if the transport does not need that. */
#define DLFS_SPDK_BOUNCE 2u

#define DLFS_SPDK_UNSET (-1)

typedef struct dlfs_spdk_config {
    const char *transport_id; /* SPDK's transport ID: trtype:TCP traddr:... and so on */
    const char *host_nqn;
    const char *cores; /* CPUs of SPDK's lcore, as "0-3,8"; NULL: all that are allowed */
    uint32_t nsid;
    uint32_t flags;        /* DLFS_SPDK_* */
    uint32_t timeout_ms;   /* time limit of one command */
    uint32_t connect_ms;   /* time limit of one attempt to connect */
    uint32_t reconnect_ms; /* time without a connection after which a controller is lost */
    uint32_t keepalive_ms; /* keep-alive timeout of the controller; 0: no keep-alive */
    uint32_t memory_mib;   /* memory of the environment */
    int32_t huge;          /* 1: huge pages, 0: none, DLFS_SPDK_UNSET: as the transport needs */
    int32_t shm_id;        /* ID by which SPDK processes share memory; DLFS_SPDK_UNSET: private */
    uint8_t host_id[16];
    uint32_t reserved;
} dlfs_spdk_config;

typedef struct dlfs_spdk_info {
    uint32_t max_transfer_bytes; /* SPDK splits longer requests */
    uint8_t nguid[16];           /* as in Identify; zeros if the namespace has none */
    uint8_t uuid[16];
    uint8_t eui64[8];
    char serial[21]; /* text of Identify Controller without trailing spaces */
    char subsystem_nqn[224];
    uint8_t reserved[3];
} dlfs_spdk_info;

/* DLFS_SPDK_VERSION of the loaded library. Any thread. */
DLFS_API uint32_t dlfs_spdk_version(void);

/* dlfs_device_create_external. */
typedef int dlfs_spdk_create(dlfs_device *external, dlfs_device **out);
/*
 * Opens a namespace as a device of libdlfs, and describes it in *info. Connects to its controller
 * unless this process is connected already. On failure message has SPDK's error messages; it always
 * ends with a NUL.
 *
 * Errors: DLFS_E_LOST (no connection), DLFS_E_NOT_FOUND (no such namespace), DLFS_E_CLOSED (a
 * forked child), -EINVAL (the transport ID; a namespace with metadata or an unsupported block
 * size), -EBUSY (the environment or the controller is in use with other options), -ENOMEM, the
 * errors of starting the environment and those of dlfs_device_create_external. Any threads at once.
 */
DLFS_API int dlfs_spdk_open(const dlfs_spdk_config *config, char *message, size_t message_bytes,
                            dlfs_spdk_info *info, dlfs_spdk_create *create, dlfs_device **out);
/*
 * Runs one command as dlfs_nvme_run does. data_bytes: a multiple of 4. Errors: -EINVAL,
 * DLFS_E_LOST, DLFS_E_TIMEOUT, DLFS_E_CLOSED, -ENOMEM. Any threads at once.
 */
DLFS_API int dlfs_spdk_run(dlfs_device *device, uint32_t queue, const dlfs_nvme_command *command,
                           void *data, uint32_t data_bytes, uint32_t direction,
                           dlfs_nvme_result *result);

#ifdef __cplusplus
}
#endif

#endif
