/*
 * Makes a controller ready, given its address: connects the admin queue, enables the controller,
 * identifies it and its namespace, then connects I/O queues one at a time.
 *
 * Threads: one at a time.
 */
#ifndef DLFS_NVME_CONTROLLER_H
#define DLFS_NVME_CONTROLLER_H

#include "nvme/connection.h"
#include "nvme/protocol/notices.h"
#include "nvme/security/security.h"

#define NVME_HOST_BYTES 256u
/* Most data bytes of one command, whatever MDTS allows: some targets have lower limits than they
 * report. */
#define NVME_TRANSFER_BYTES_MAX (1u << 20)
/* I/O queues requested; also the most that are used if a controller grants more. */
#define NVME_QUEUES_MAX 128u

struct nvme_path {
    char host[NVME_HOST_BYTES];
    uint16_t port;
};

/* A dlfs_nvme_config with copies of its strings, so that it can be assigned. */
struct nvme_config {
    struct nvme_path paths[DLFS_NVME_PATHS_MAX];
    uint32_t path_count;
    uint32_t nsid;
    char subsystem_nqn[DLFS_NVME_NQN_BYTES_MAX + 1];
    char host_nqn[DLFS_NVME_NQN_BYTES_MAX + 1];
    uint8_t host_id[16];
    uint32_t digests;
    uint32_t timeout_ms;
    uint32_t connect_ms;
    uint32_t keepalive_ms;
    uint32_t reconnect_ms;
    uint32_t busy_poll_us;
    uint32_t reauth_s;
    char dhchap_key[NVME_KEY_NAME_BYTES_MAX + 1]; /* names of keys; empty: none */
    char dhchap_ctrl_key[NVME_KEY_NAME_BYTES_MAX + 1];
    char tls_psk[NVME_KEY_NAME_BYTES_MAX + 1];
    uint32_t tls_identity; /* version of the TLS identity that the target accepted last */
    bool concat;           /* generate the TLS key by authentication */
    bool was_connected;    /* a controller was connected with this configuration */
    bool writable;
};

/* A controller that is ready. ana_state is of the namespace's group. */
struct nvme_admin {
    struct nvme_connection *connection; /* the admin queue; NULL: not connected */
    struct nvme_address address;
    struct nvme_controller controller;
    struct nvme_namespace ns; /* zeros if the configuration names no namespace */
    uint32_t ana_state;
    uint32_t transfer_bytes_max;
    uint32_t command_count_max; /* most commands in flight on one I/O queue */
    uint32_t queue_count_max;
};

/* Copies and checks a configuration. Returns 0, or -EINVAL for a value out of range. */
int nvme_config_copy(const dlfs_nvme_config *from, struct nvme_config *to);
/* Copies and checks paths. Returns 0, or -EINVAL. */
int nvme_paths_copy(const char *const *hosts, const uint32_t *ports, uint32_t path_count,
                    struct nvme_path *to);
/* ---- resolve.c ---- */

/*
 * Finds the addresses of a path and returns their number. The system's resolver may take longer
 * than the deadline; it is then left to a thread of its own. Errors: DLFS_E_NOT_FOUND, DLFS_E_LOST
 * (the resolver says that it got no answer), DLFS_E_TIMEOUT, DLFS_E_CLOSED, -errno.
 */
#define NVME_ADDRESSES_MAX 4
int nvme_resolve(const struct nvme_path *path, const struct nvme_deadline *deadline,
                 struct nvme_address addresses[NVME_ADDRESSES_MAX], struct nvme_text *text);

/* ---- controller.c ---- */

/* Connects and initializes a controller. On failure *out is unchanged and text has the reason. */
int nvme_controller_open(const struct nvme_config *config, const struct nvme_address *address,
                         const struct nvme_deadline *deadline, struct nvme_admin *out,
                         struct nvme_text *text);
/*
 * Connects an I/O queue of up to command_count commands. *refused is true if the controller refused
 * the queue, false if it did not answer.
 */
int nvme_controller_connect_queue(const struct nvme_config *config, const struct nvme_admin *admin,
                                  uint16_t qid, uint32_t command_count,
                                  const struct nvme_deadline *deadline,
                                  struct nvme_connection **out, bool *refused,
                                  struct nvme_text *text);
/*
 * Identifies the namespace again and changes admin->ns. Errors: of the namespace, as when a
 * controller is opened, or of the connection, which is then unusable.
 */
int nvme_controller_identify_namespace(const struct nvme_config *config, struct nvme_admin *admin,
                                       const struct nvme_deadline *deadline,
                                       struct nvme_text *text);
/* Reads a property to find out if the controller still answers; returns 0 if it does. */
int nvme_controller_check(const struct nvme_admin *admin, const struct nvme_deadline *deadline,
                          struct nvme_text *text);
int nvme_controller_keep_alive(struct nvme_admin *admin, const struct nvme_deadline *deadline,
                               struct nvme_text *text);
/* Requests a normal shutdown of the controller and closes the admin queue. */
void nvme_controller_shut_down(struct nvme_admin *admin, const struct nvme_deadline *deadline);

#endif
