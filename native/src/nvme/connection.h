/*
 * One TCP connection to a controller: opens it, exchanges ICReq and ICResp, runs single commands
 * and waits for their answers, and sends and receives for queue pairs.
 *
 * The byte stream is the socket's, or that of a TLS session over it (nvme/security/encryption.c).
 *
 * Sockets are non-blocking. A thread that waits does so in poll(2), and can be stopped there.
 *
 * Threads: one at a time uses a connection.
 */
#ifndef DLFS_NVME_CONNECTION_H
#define DLFS_NVME_CONNECTION_H

#include "device/device.h"
#include "nvme/protocol/command.h"
#include "nvme/protocol/receiver.h"
#include "nvme/security/encryption.h"

/* Command ID of Asynchronous Event Requests; nvme_connection_run uses lower ones. */
#define NVME_EVENT_CID 0x8000u

struct nvme_connection {
    int descriptor;
    struct nvme_tls *tls; /* NULL: the stream is not encrypted */
    const struct nvme_security *security;
    struct nvme_tls_key *generated; /* on an admin queue with secure channel concatenation: the TLS
                                       key of further connections; else NULL */
    uint32_t tls_identity;          /* version of the identity that the target accepted */
    uint16_t next_cid;              /* command ID of the next nvme_connection_run */
    bool unusable;                  /* nvme_connection_run failed: no other command may run */
    /* The following three fields are used on admin queues only. */
    bool event_requested; /* the controller has an Asynchronous Event Request */
    bool event_arrived;   /* the controller completed it; the connection's user clears this */
    uint32_t event;       /* dword 0 of its completion */
    uint64_t incarnation; /* incarnation of the controller that it leads to */
    /* The following fields are set for I/O queues only. */
    uint32_t command_count;      /* most commands in flight */
    uint32_t transfer_bytes_max; /* most data bytes of one command */
    uint32_t capsule_bytes_max;  /* most data bytes in a command capsule */
    /* Time after the connection's end from which on none of its commands takes effect; 0: unknown.
     */
    uint64_t quiesce_ms;
    struct nvme_terms terms;
    struct nvme_receiver receiver;
    uint8_t staging[]; /* the receiver's staging buffer */
};

/*
 * Connects the socket, begins encryption unless tls is NULL, and negotiates the terms. Errors:
 * DLFS_E_LOST, DLFS_E_TIMEOUT, DLFS_E_CLOSED (stopped), DLFS_E_PROTOCOL, DLFS_E_AUTH,
 * NVME_AUTH_CLOSED, -ENOTSUP, -ENOMEM, -errno, with a message in text.
 */
int nvme_connection_open(const struct nvme_address *address, uint32_t digests,
                         const struct nvme_security *security, const struct nvme_tls_config *tls,
                         uint32_t staging_bytes, const struct nvme_deadline *deadline,
                         struct nvme_connection **out, struct nvme_text *text);
/*
 * Returns true if a port answers a TLS handshake: it demands TLS of a connection that it ended
 * before an ICResp. Sends no byte of NVMe.
 */
bool nvme_connection_demands_tls(const struct nvme_address *address,
                                 const struct nvme_deadline *deadline);
/*
 * Resets the connection, drops what was not sent yet and frees it. in_child: it belongs to the
 * parent process; only this process's copy of the descriptor is closed.
 */
void nvme_connection_abort(struct nvme_connection *connection, bool in_child);
/*
 * Sets *connection to NULL, then aborts the connection: in this order, a child that is forked
 * meanwhile never finds a pointer to freed memory.
 */
void nvme_connection_drop(struct nvme_connection **connection);
/* Shuts the stream down in good order and frees the connection. */
void nvme_connection_close(struct nvme_connection *connection);

/* One command with at most one data buffer, which is sent in the command's capsule. */
struct nvme_exchange {
    uint8_t entry[NVME_ENTRY_BYTES];
    void *data;
    uint32_t data_bytes;
    uint32_t direction;      /* DLFS_NVME_DATA_* */
    uint32_t received_bytes; /* data bytes that the controller sent */
    struct nvme_cqe cqe;
    uint16_t status; /* that of the CQE, without DNR and More */
};
/*
 * Runs a command on a connection with no other command in flight and waits for its CQE. what: its
 * name in messages, or NULL. Returns 0 when the controller answered, whatever the status. On
 * failure the connection is unusable, since data of a late answer must not reach the caller's
 * buffer: later commands return DLFS_E_LOST.
 */
int nvme_connection_run(struct nvme_connection *connection, struct nvme_exchange *exchange,
                        const struct nvme_deadline *deadline, const char *what,
                        struct nvme_text *text);

/*
 * Runs a command that fills exchange->data as nvme_connection_run does. The caller judges
 * exchange->status; the data is zeros unless that is 0.
 */
int nvme_connection_fetch(struct nvme_connection *connection, struct nvme_exchange *exchange,
                          const struct nvme_deadline *deadline, const char *what,
                          struct nvme_text *text);

/*
 * Sends an Asynchronous Event Request, and returns without an answer: event_arrived is set by a
 * later call of nvme_connection_run or nvme_connection_receive_event. Errors as for
 * nvme_connection_run.
 */
int nvme_connection_request_event(struct nvme_connection *connection,
                                  const struct nvme_deadline *deadline, struct nvme_text *text);
/*
 * Receives what an admin queue without a command in flight has sent, which can only be the
 * completion of an Asynchronous Event Request. Returns 0, or the negative code and *reason why the
 * connection must be closed.
 */
int nvme_connection_receive_event(struct nvme_connection *connection, const char **reason);

/*
 * Receives with one system call. Returns the bytes received, 0 if there were none, or the negative
 * code and *reason why the connection must be closed.
 */
ssize_t nvme_connection_receive(struct nvme_connection *connection, uint32_t stage_bytes,
                                const char **reason);
/*
 * Sends as much as the socket takes. Returns the bytes, 0 if it is full, or a negative code with
 * *reason. Bytes that were not sent must be the first ones of the next call.
 */
ssize_t nvme_connection_send(struct nvme_connection *connection, const struct iovec *vectors,
                             size_t count, const char **reason);
/*
 * Returns true if received bytes wait in the TLS session, where poll(2) does not find them. A
 * thread that waits for the descriptor asks this first.
 */
static inline bool nvme_connection_has_buffered(const struct nvme_connection *connection)
{
    return connection->tls != NULL && connection->security->tls_has_buffered(connection->tls);
}
/* Returns true if a receive needs room in the socket: the TLS session has to answer the target. */
static inline bool nvme_connection_wants_room(const struct nvme_connection *connection)
{
    return connection->tls != NULL && connection->security->tls_wants_room(connection->tls);
}

#endif
