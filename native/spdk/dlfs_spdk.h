/*
 * libdlfs_spdk: NVMe namespaces through SPDK, as devices of libdlfs: over PCIe from user space, and
 * over RDMA. TCP serves tests and benchmarks, which could run no other transport so far; users
 * have nvme-tcp: (dlfs/nvme.h).
 *
 * It is a separate library because it needs SPDK's libraries at run time. It is not linked with
 * libdlfs: dlfs_spdk_open returns a struct dlfs_external for dlfs_device_create_external.
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

#include "dlfs/external.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this header's structures and functions. */
#define DLFS_SPDK_VERSION 1u

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
    uint64_t size_bytes;
    uint32_t block_bytes;
    uint32_t max_transfer_bytes; /* SPDK splits longer requests */
    uint8_t nguid[16];           /* as in Identify; zeros if the namespace has none */
    uint8_t uuid[16];
    uint8_t eui64[8];
    char model[41]; /* text of Identify Controller without trailing spaces */
    char serial[21];
    char firmware[9];
    char subsystem_nqn[224];
    uint8_t reserved[1];
} dlfs_spdk_info;

/* A command to a controller and its completion. */
typedef struct dlfs_spdk_command {
    uint32_t opcode;
    uint32_t nsid;
    uint32_t cdw[6];    /* dwords 10 to 15 */
    uint32_t to_device; /* 1: its data goes to the controller, 0: to the host */
    uint32_t status;    /* out: status code type << 8 | status code */
    uint64_t value;     /* out: dwords 0 and 1 of the completion */
} dlfs_spdk_command;

#define DLFS_SPDK_COMMAND_BYTES_MAX 4096u

#define DLFS_SPDK_ADMIN 0u
#define DLFS_SPDK_IO 1u

/* DLFS_SPDK_VERSION of the loaded library. Any thread. */
DLFS_API uint32_t dlfs_spdk_version(void);
/* Returns SPDK's version, such as "SPDK v26.05". Static storage. Any thread. */
DLFS_API const char *dlfs_spdk_build(void);

/*
 * Opens a namespace. Connects to its controller unless this process is connected already. *out is
 * for dlfs_device_create_external, whose device then owns it; before that, dlfs_spdk_close frees
 * it. On failure message has SPDK's error messages; it always ends with a NUL.
 *
 * Errors: DLFS_E_LOST (no connection), DLFS_E_NOT_FOUND (no such namespace), DLFS_E_CLOSED (a
 * forked child), -EINVAL (the transport ID; a namespace with metadata or an unsupported block
 * size), -EBUSY (the environment or the controller is in use with other options), -ENOMEM, and the
 * errors of starting the environment. Any threads at once.
 */
DLFS_API int dlfs_spdk_open(const dlfs_spdk_config *config, char *message, size_t message_bytes,
                            struct dlfs_external **out);
/* Closes a namespace that no dlfs_device owns. external may be NULL. */
DLFS_API void dlfs_spdk_close(struct dlfs_external *external);
/* Returns the properties of an open namespace. Any threads at once. */
DLFS_API void dlfs_spdk_describe(const struct dlfs_external *external, dlfs_spdk_info *info);
/*
 * Runs one command on the admin queue or on an I/O queue of the device and waits for its
 * completion. data: NULL, or a buffer of data_bytes (up to DLFS_SPDK_COMMAND_BYTES_MAX, a multiple
 * of 4), which the controller fills or reads. Errors:
 * -EINVAL, DLFS_E_LOST, DLFS_E_TIMEOUT, DLFS_E_CLOSED, -ENOMEM. Any threads at once.
 */
DLFS_API int dlfs_spdk_run(struct dlfs_external *external, uint32_t queue,
                           dlfs_spdk_command *command, void *data, uint32_t data_bytes);

#ifdef __cplusplus
}
#endif

#endif
