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
#define DLFS_NVME_DATA_BYTES_MAX 65536u /* most data of one command of dlfs_nvme_run */
#define DLFS_NVME_TEXT_BYTES \
    512u /* room for any message of this header's functions, NUL included */

#define DLFS_NVME_HEADER_DIGEST 1u
#define DLFS_NVME_DATA_DIGEST 2u

/*
 * A controller of an NVMe subsystem over TCP, and one namespace of it as a block device. Several
 * paths are several addresses of one subsystem: the first that answers is used. When it is lost,
 * the others are tried in turn. If the controllers report asymmetric namespace access (ANA), a path
 * with the state optimized is preferred to one with the state non-optimized, and a path in another
 * state is not used. Over a non-optimized path the device looks for an optimized one, after 1 s at
 * first and then up to every 16 s, and moves to it. A device with writes that no flush covers does
 * not move until they are flushed.
 *
 * Events. The controller reports changes of the namespace. Its present size and write protection
 * are in dlfs_nvme_status; the device's size does not change while it is open. Writes to a
 * namespace that has become read-only end with -EROFS. When the namespace shrinks or goes away, all
 * operations end with DLFS_E_LOST at once; an operation that is submitted a second later or more
 * makes the device look for it again.
 *
 * Threads. One thread serves a device: it connects, keeps the controller alive, and reconnects when
 * a connection fails. Each queue pair has its own connection, which only the calls of its user read
 * and write; an idle queue pair costs nothing.
 *
 * Time-outs. A command that is unanswered for timeout_ms ends all connections to the controller,
 * because a silent target may still execute it. After this, as after any other failure, the device
 * reconnects, with growing pauses, for up to reconnect_ms. It then sends reads again. A write whose
 * target fell silent may still be executed after newer writes, so it ends with DLFS_E_TIMEOUT. A
 * write whose connection was closed or reset may be pending at the target too. It is sent again
 * once the controller has quiesced: after its Command Quiesce Time, or else the keep-alive timeout
 * and one second. If neither is known or too little time is left, it ends with DLFS_E_LOST.
 *
 * Every operation ends within timeout_ms + reconnect_ms of its submission, not counting time in
 * which its queue pair is not polled: with DLFS_E_TIMEOUT at the latest, or with DLFS_E_LOST if the
 * controller could not be reached. A lost device stays lost for one second; the next operation
 * after that makes it reconnect. A wrong data digest repeats only its command; a wrong header
 * digest reconnects its queue pair.
 *
 * Flushes. A flush fails with -EIO when the controller has a volatile write cache and was lost
 * after a write that the flush covers. Later flushes cover later writes only.
 *
 * Queue pairs. Creating a queue pair waits for its connection. While a lost controller is being
 * reconnected, the creation does not wait; the operations do, each for its own time. If the target
 * has no more queue pairs, readers share the existing ones; other users wait 5 s for one and then
 * get DLFS_E_LIMIT.
 *
 * Keys. A configuration names keys; libdlfs_security, next to libdlfs, finds and reads them anew at
 * every connection: in $CREDENTIALS_DIRECTORY, in the directory $DLFS_KEYS (else
 * ~/.config/dlfs/keys and /etc/dlfs/keys), in /etc/nvme/config.json. With dhchap_key, every queue
 * is authenticated by DH-HMAC-CHAP, and a target that asks for none is refused. An open fails at
 * once with DLFS_E_AUTH. A reconnect that fails so is tried again for reconnect_ms, since keys may
 * be in rotation; then operations end with DLFS_E_AUTH.
 *
 * Forks. A device in a forked child reconnects when the child creates its first queue pair.
 */
typedef struct dlfs_nvme_config {
    const char *hosts[DLFS_NVME_PATHS_MAX]; /* host names, or addresses without brackets; all text
                                               is copied */
    uint32_t ports[DLFS_NVME_PATHS_MAX];
    uint32_t path_count;
    uint32_t nsid; /* namespace; 0: none, a device of 0 bytes for dlfs_nvme_run */
    const char *subsystem_nqn;
    const char *host_nqn;
    uint8_t host_id[16];
    uint32_t digests;      /* DLFS_NVME_*_DIGEST; opening fails if the target refuses one */
    uint32_t timeout_ms;   /* longest wait for the answer to one command, > 0 */
    uint32_t connect_ms;   /* longest wait for the resolution of a path's host name, and longest
                              connection attempt on each of its addresses, > 0 */
    uint32_t keepalive_ms; /* longest time without a message to the target; 0: no keep-alive */
    uint32_t reconnect_ms; /* longest time spent on reconnecting; 0: a device that fails is lost at
                              once */
    uint32_t busy_poll_us; /* idle time after which a poll stops spinning and sleeps; 0: it sleeps
                              at once */
    uint32_t flags;        /* DLFS_OPEN_WRITE or 0 */
    uint32_t reauth_s;     /* period after which the admin queue is authenticated anew; 0: never */
    uint32_t concat;   /* not 0: secure channel concatenation, TLS with a key that authentication
                          generates; requires dhchap_key and no tls_psk */
    uint32_t reserved; /* 0 */
    const char *dhchap_key;      /* name of this host's key; NULL: no authentication */
    const char *dhchap_ctrl_key; /* name of the controller's key; NULL: it need not prove itself */
    const char *tls_psk;         /* name of the pre-shared key for TLS; NULL: no TLS */
} dlfs_nvme_config;

/*
 * Opens a namespace; the device takes its size and block size from the target. Tries each path
 * once. message gets the reason of a failure in words, in message_bytes; it may be NULL. Errors:
 * -EINVAL; -ENOMEM; DLFS_E_LOST, no target listens at the address; DLFS_E_TIMEOUT, the target does
 * not answer; DLFS_E_NOT_FOUND, no such host, subsystem or namespace; -EACCES, the target does not
 * allow this host; DLFS_E_AUTH, a key was refused or not found; -EROFS, the namespace is
 * write-protected; -ENOTSUP, this initiator cannot use the namespace or target; DLFS_E_PROTOCOL,
 * DLFS_E_DIGEST; other codes for the status of a target that refuses.
 */
DLFS_API int dlfs_device_open_nvme(const dlfs_nvme_config *config, char *message,
                                   uint32_t message_bytes, dlfs_device **out);

/* The dwords of a command that the caller of dlfs_nvme_run sets. */
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
#define DLFS_NVME_DATA_IN 1u  /* the controller fills the data */
#define DLFS_NVME_DATA_OUT 2u /* the controller reads the data */
/*
 * Runs one command and waits, at most as long as an operation may take. result gets the completion,
 * whatever its status. If the connection is lost before the answer, only a command that reads is
 * run again; any other ends with DLFS_E_LOST or DLFS_E_TIMEOUT. -ENOTSUP on other kinds of device,
 * and for I/O commands on a controller without I/O queues. -EINVAL for too much data. Any threads
 * at once.
 */
DLFS_API int dlfs_nvme_run(dlfs_device *device, uint32_t queue, const dlfs_nvme_command *command,
                           void *data, uint32_t data_bytes, uint32_t direction,
                           dlfs_nvme_result *result);

/*
 * Authenticates the admin queue anew, with the present keys, and waits. A failure ends all
 * connections, and the device reconnects. Errors: DLFS_E_AUTH; -ENOTSUP on other kinds of device
 * and without dhchap_key; those of a lost connection. Any threads at once.
 */
DLFS_API int dlfs_nvme_authenticate(dlfs_device *device);

#define DLFS_NVME_ID_NONE 0u
#define DLFS_NVME_ID_EUI64 1u
#define DLFS_NVME_ID_NGUID 2u
#define DLFS_NVME_ID_UUID 3u

#define DLFS_NVME_EVENT_BYTES 128u /* room for the description of an event, NUL included */
#define DLFS_NVME_ANA_NONE 0u      /* the controller reports no asymmetric namespace access */
#define DLFS_NVME_ANA_OPTIMIZED 1u
#define DLFS_NVME_ANA_NON_OPTIMIZED 2u
#define DLFS_NVME_ANA_INACCESSIBLE 3u
#define DLFS_NVME_ANA_PERSISTENT_LOSS 4u
#define DLFS_NVME_ANA_CHANGE 15u

/* The state of a device's connection to its target, and the events since the device was opened. */
typedef struct dlfs_nvme_status {
    uint64_t reconnects; /* connections to a new controller after a loss */
    uint64_t retries;    /* commands sent again */
    uint64_t timeouts;
    uint64_t digest_errors;
    uint64_t protocol_errors;
    uint32_t connected;
    uint32_t path;               /* number of the path in use, or used last */
    uint32_t transfer_bytes_max; /* most bytes that one command transfers */
    uint32_t queue_count_max;
    uint32_t write_cache; /* 1: writes are durable only after a flush */
    uint32_t controller_id;
    uint32_t id_kind; /* DLFS_NVME_ID_*: the kind of `id`, the most specific identifier that the
                         namespace reports */
    uint32_t reserved;
    uint8_t id[16];
    char last_error[DLFS_NVME_TEXT_BYTES]; /* empty if there was none */
    uint64_t path_moves;                   /* reconnects that changed the path */
    uint64_t events;           /* asynchronous events of all kinds that the controller reported */
    uint64_t namespace_events; /* a namespace was added, removed or changed */
    uint64_t ana_events;
    uint64_t discovery_events; /* the discovery log changed */
    uint64_t health_events;    /* critical warnings, and firmware activations */
    uint64_t namespace_bytes;  /* present size of the namespace; the device's size is constant */
    uint32_t write_protected;  /* 1: the namespace is read-only */
    uint32_t ana_state;        /* DLFS_NVME_ANA_*: state of the namespace on the path in use */
    uint32_t ana_group;        /* ANA group of the namespace; 0: none */
    uint32_t health_warnings;  /* critical warnings of the last health event, as bits of the health
                                  log */
    char last_event[DLFS_NVME_EVENT_BYTES]; /* description of the last event; empty: none */
} dlfs_nvme_status;
/* Fills the status. -ENOTSUP on other kinds of device. Any threads at once. */
DLFS_API int dlfs_nvme_get_status(dlfs_device *device, dlfs_nvme_status *status);
/*
 * Replaces the paths of an open device, as after a discovery log has changed. The path in use stays
 * in use until it is lost, even if it is not among the new ones. A child that is forked later uses
 * the paths from the open. -EINVAL as for dlfs_device_open_nvme; -ENOTSUP on other kinds of device.
 * Any threads at once.
 */
DLFS_API int dlfs_nvme_set_paths(dlfs_device *device, const char *const *hosts,
                                 const uint32_t *ports, uint32_t path_count);

#ifdef __cplusplus
}
#endif

#endif
