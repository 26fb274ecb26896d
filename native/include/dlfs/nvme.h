/*
 * NVMe over TCP: controllers, their namespaces as block devices, and single commands. The
 * conventions are those of dlfs.h.
 */
#ifndef DLFS_PUBLIC_NVME_H
#define DLFS_PUBLIC_NVME_H

#include <dlfs/device.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_NVME_PATHS_MAX 4u
#define DLFS_NVME_NQN_BYTES_MAX 223u
#define DLFS_NVME_DATA_BYTES_MAX 4096u /* of a single command's data */
#define DLFS_NVME_TEXT_BYTES 512u      /* holds any message of this part */

#define DLFS_NVME_HEADER_DIGEST 1u
#define DLFS_NVME_DATA_DIGEST 2u

/*
 * A controller of an NVMe subsystem over TCP, and one namespace of it as a block device. Several
 * paths are several addresses of one subsystem: the first that answers is used, and the others in
 * turn when it is lost.
 *
 * One thread serves a device: it makes all connections, keeps the controller alive, and makes
 * everything anew when something fails. Each queue pair has a connection of its own, which only its
 * user's calls read and write; it costs nothing while idle.
 *
 * Time. A command unanswered for timeout_ms ends all connections to the controller: nobody can tell
 * whether a silent target will still act. Then, as after any other failure, the controller is
 * connected to again, with growing pauses, for up to reconnect_ms. Reads are issued again. A write
 * that met silence may still be executed later, behind newer ones, and ends with DLFS_E_TIMEOUT. A
 * write whose connection was closed or reset may be pending there too: it is issued again once the
 * controller has quiesced, after its Command Quiesce Time, else the keep-alive timeout and a
 * second; with neither, or too little time, it ends with DLFS_E_LOST. Every operation ends within
 * timeout_ms + reconnect_ms of being submitted (counting only while its queue pair is polled): with
 * DLFS_E_TIMEOUT at the latest, with DLFS_E_LOST when the controller could not be reached again. A
 * lost device stays lost for a second; the next operation after that has it looked for once more.
 * A wrong data digest costs only its command another try, one of a header its queue pair a new
 * connection.
 *
 * A flush fails with -EIO when the controller has a volatile write cache and was lost after a write
 * that the flush was to make durable; those that come after it speak for new writes only.
 * Making a queue pair waits for its connection, but not while a controller that was lost is looked
 * for: operations wait then, each for its own time. Where the target has no more of them, readers
 * take turns; others wait 5 s for one, then it is DLFS_E_LIMIT.
 *
 * In a forked child a device connects anew with the first queue pair that the child makes.
 */
typedef struct dlfs_nvme_config {
    const char *hosts[DLFS_NVME_PATHS_MAX]; /* names, or addresses without brackets; copied, as is
                                               all text */
    uint32_t ports[DLFS_NVME_PATHS_MAX];
    uint32_t path_count;
    uint32_t nsid; /* 0: the controller alone, for dlfs_nvme_run; a device of 0 bytes */
    const char *subsystem_nqn;
    const char *host_nqn;
    uint8_t host_id[16];
    uint32_t digests;      /* DLFS_NVME_*_DIGEST: all of them or an error */
    uint32_t timeout_ms;   /* of one command, > 0 */
    uint32_t connect_ms;   /* of one attempt on one path, > 0; names take as long as the system's
                              resolver allows */
    uint32_t keepalive_ms; /* within which the target must hear from us; 0: no keep-alive */
    uint32_t reconnect_ms; /* 0: a device that fails is lost at once */
    uint32_t busy_poll_us; /* poll sleeps when nothing has come for so long; 0: at once */
    uint32_t flags;        /* DLFS_OPEN_WRITE or 0 */
    uint32_t reserved;
} dlfs_nvme_config;

/*
 * Opens a namespace; size and block size are the target's. message, of message_bytes, gets why it
 * failed, in words (may be NULL). Tries each path once. Errors: -EINVAL; -ENOMEM; DLFS_E_LOST,
 * nobody there; DLFS_E_TIMEOUT, no answer; DLFS_E_NOT_FOUND, no such host, subsystem or namespace;
 * -EACCES, the target does not allow this host; -EROFS, it is write-protected; -ENOTSUP, a
 * namespace or target that this initiator cannot use; DLFS_E_PROTOCOL, DLFS_E_DIGEST; other codes
 * of a refusing target.
 */
DLFS_API int dlfs_device_open_nvme(const dlfs_nvme_config *config, char *message,
                                   uint32_t message_bytes, dlfs_device **out);

/* The dwords of a command that a caller decides. */
typedef struct dlfs_nvme_command {
    uint32_t opcode;
    uint32_t nsid;
    uint32_t cdw10;
    uint32_t cdw11;
    uint32_t cdw12;
    uint32_t cdw13;
    uint32_t cdw14;
    uint32_t cdw15;
} dlfs_nvme_command;

typedef struct dlfs_nvme_result {
    uint64_t value;  /* dwords 0 and 1 of the completion */
    uint32_t status; /* status code type << 8 | status code; 0: success */
    uint32_t reserved;
} dlfs_nvme_result;

#define DLFS_NVME_QUEUE_ADMIN 0u
#define DLFS_NVME_QUEUE_IO 1u
#define DLFS_NVME_DATA_NONE 0u
#define DLFS_NVME_DATA_IN 1u  /* data is filled by the controller */
#define DLFS_NVME_DATA_OUT 2u /* data is for the controller */
/*
 * Runs one command and waits, at most as long as an operation may take. What the controller answers
 * is in result, whatever its status. A command whose fate is unknown because its connection was
 * lost is not run again, unless it only reads: DLFS_E_LOST, or DLFS_E_TIMEOUT. -ENOTSUP on other
 * kinds of device, and for I/O commands on a controller without I/O queues. -EINVAL for too much
 * data. Any threads at once.
 */
DLFS_API int dlfs_nvme_run(dlfs_device *device, uint32_t queue, const dlfs_nvme_command *command,
                           void *data, uint32_t data_bytes, uint32_t direction,
                           dlfs_nvme_result *result);

#define DLFS_NVME_ID_NONE 0u
#define DLFS_NVME_ID_EUI64 1u
#define DLFS_NVME_ID_NGUID 2u
#define DLFS_NVME_ID_UUID 3u

/* What is known of a device's target, and what has happened to it so far. */
typedef struct dlfs_nvme_status {
    uint64_t reconnects; /* controllers made anew */
    uint64_t retries;    /* commands issued again */
    uint64_t timeouts;
    uint64_t digest_errors;
    uint64_t protocol_errors;
    uint32_t connected;
    uint32_t path;               /* in use, or used last */
    uint32_t transfer_bytes_max; /* of one command */
    uint32_t queue_count_max;
    uint32_t write_cache; /* 1: writes are durable only after a flush */
    uint32_t controller_id;
    uint32_t id_kind; /* DLFS_NVME_ID_*: the namespace's own identifier, the best there is */
    uint32_t reserved;
    uint8_t id[16];
    char last_error[DLFS_NVME_TEXT_BYTES]; /* empty: none so far */
} dlfs_nvme_status;
/* -ENOTSUP on other kinds of device. Any threads at once. */
DLFS_API int dlfs_nvme_get_status(dlfs_device *device, dlfs_nvme_status *status);
DLFS_API int dlfs_nvme_get_generation(dlfs_device *device, uint64_t *generation);
#define DLFS_NVME_WRITES_FREE INT64_MAX /* no lease */
/* A lease: writes go out through the controller of that generation (get_generation: in use, or made
 * next) and before until_ns of CLOCK_BOOTTIME. Through later ones they wait; from until_ns on
 * nothing of one is sent, and it ends with -EKEYEXPIRED. Over in a forked child. NVMe/TCP, SPDK. */
DLFS_API int dlfs_nvme_limit_writes(dlfs_device *device, uint64_t generation, uint64_t until_ns);

#ifdef __cplusplus
}
#endif

#endif
