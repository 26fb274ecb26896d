/*
 * The steps between an address and a controller that is ready: the admin queue, enabling,
 * identifying the controller and its namespace, then one I/O queue at a time. One thread at a time.
 */
#ifndef DLFS_NVME_CONTROLLER_H
#define DLFS_NVME_CONTROLLER_H

#include "nvme/connection.h"

#define NVME_HOST_BYTES 256u
/* A single command moves at most this much, whatever MDTS allows: targets have limits of their own
 * that they do not tell. */
#define NVME_TRANSFER_BYTES_MAX (1u << 20)
/* I/O queues asked for; a controller that grants more is not taken at its word. */
#define NVME_QUEUES_MAX 128u

struct nvme_path {
    char host[NVME_HOST_BYTES];
    uint16_t port;
};

/* dlfs_nvme_config, with its text copied: a plain value. */
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
    bool writable;
};

/* A controller that is ready. */
struct nvme_admin {
    struct nvme_connection *connection; /* of the admin queue; NULL: there is none */
    struct nvme_address address;
    struct nvme_controller controller;
    struct nvme_namespace space; /* zeros without one */
    uint32_t transfer_bytes_max;
    uint32_t command_count_max; /* outstanding on one I/O queue */
    uint32_t queue_count_max;
};

/* -EINVAL for a value out of range. */
int nvme_config_copy(const dlfs_nvme_config *from, struct nvme_config *to);
/*
 * Finds the addresses of a path; how many is returned. At once for numbers; a name takes as long as
 * the resolver does. DLFS_E_NOT_FOUND, DLFS_E_LOST (no answer from the resolver).
 */
#define NVME_ADDRESSES_MAX 4
int nvme_resolve(const struct nvme_path *path, struct nvme_address addresses[NVME_ADDRESSES_MAX],
                 struct nvme_text *text);

/* Makes a controller ready. On failure nothing is left, and text tells why. */
int nvme_controller_open(const struct nvme_config *config, const struct nvme_address *address,
                         const struct nvme_patience *patience, struct nvme_admin *out,
                         struct nvme_text *text);
/*
 * Connects an I/O queue of up to command_count commands. *refused tells a controller that answered
 * "no" from one that did not answer.
 */
int nvme_controller_connect_queue(const struct nvme_config *config, const struct nvme_admin *admin,
                                  uint16_t qid, uint32_t command_count,
                                  const struct nvme_patience *patience,
                                  struct nvme_connection **out, bool *refused,
                                  struct nvme_text *text);
/* Asks the controller anything: 0 when it answers. */
int nvme_controller_check(const struct nvme_admin *admin, const struct nvme_patience *patience,
                          struct nvme_text *text);
int nvme_controller_keep_alive(struct nvme_admin *admin, const struct nvme_patience *patience,
                               struct nvme_text *text);
/* Tells the controller that the host leaves, and closes the admin queue. */
void nvme_controller_shut_down(struct nvme_admin *admin, const struct nvme_patience *patience);

#endif
