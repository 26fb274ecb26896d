/*
 * One TCP connection to a controller: making it, ICReq and ICResp, single commands for which the
 * caller waits, and what queue pairs need of sending and receiving.
 *
 * Sockets do not block. Whoever waits does so in poll(2) and can be stopped.
 */
#ifndef DLFS_NVME_CONNECTION_H
#define DLFS_NVME_CONNECTION_H

#include <netinet/in.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "device/device.h"
#include "nvme/command.h"
#include "nvme/receiver.h"

/* Why something failed, in words. */
struct nvme_text {
    char bytes[DLFS_NVME_TEXT_BYTES];
};
__attribute__((format(printf, 2, 3))) void nvme_say(struct nvme_text *text, const char *format,
                                                    ...);

/* How long to wait, and how it can be stopped: by setting *stop and then making wake readable. */
struct nvme_patience {
    uint64_t until_ns;
    int wake; /* an eventfd */
    const atomic_bool *stop;
};
/*
 * Waits until the descriptor has one of the events: 0, DLFS_E_TIMEOUT, DLFS_E_CLOSED when stopped.
 */
int nvme_wait(const struct nvme_patience *patience, int descriptor, short events);

struct nvme_address {
    struct sockaddr_storage bytes;
    socklen_t length;
};

struct nvme_connection {
    int descriptor;
    uint16_t next_cid;   /* of commands that nvme_connection_run issues */
    bool given_up;       /* a command that nvme_connection_run issued: nothing else may run */
    uint64_t generation; /* of the association that it belongs to */
    /* Of an I/O queue: */
    uint32_t command_count;      /* outstanding at once */
    uint32_t transfer_bytes_max; /* of one command */
    uint32_t capsule_bytes_max;  /* of data in its capsule */
    /* After its end, until no command of it takes effect any more; 0: unknown. */
    uint64_t quiesce_ms;
    struct nvme_terms terms;
    struct nvme_receiver receiver;
    uint8_t staging[]; /* the receiver's */
};

/*
 * Connects, and agrees on the terms. Errors: DLFS_E_LOST, DLFS_E_TIMEOUT, DLFS_E_CLOSED (stopped),
 * DLFS_E_PROTOCOL, -ENOTSUP, -ENOMEM, -errno, with the text of why.
 */
int nvme_connection_open(const struct nvme_address *address, uint32_t digests,
                         uint32_t staging_bytes, const struct nvme_patience *patience,
                         struct nvme_connection **out, struct nvme_text *text);
/* Says nothing to the controller, and drops what was not sent yet. In a forked child it closes the
 * child's copy only. */
void nvme_connection_abort(struct nvme_connection *connection, bool foreign);
/*
 * Forgets a connection, and then aborts it: a child that is forked meanwhile must not find what is
 * freed already.
 */
void nvme_connection_drop(struct nvme_connection **connection);
/* Ends the stream in order. */
void nvme_connection_close(struct nvme_connection *connection);

/* One command with at most one buffer of data, which goes in its capsule when it goes out. */
struct nvme_exchange {
    uint8_t entry[NVME_ENTRY_BYTES];
    void *data;
    uint32_t data_bytes;
    uint32_t direction; /* DLFS_NVME_DATA_* */
    struct nvme_answer answer;
};
/*
 * Runs a command on a connection that nothing else is under way on. 0 when the controller answered,
 * whatever the status; else the connection is of no use any more: the command's answer may still
 * come, whose data must not reach the caller's memory, and every later command is DLFS_E_LOST.
 */
int nvme_connection_run(struct nvme_connection *connection, struct nvme_exchange *exchange,
                        const struct nvme_patience *patience, struct nvme_text *text);

/*
 * Takes what has come, with one system call: its length; 0 when nothing has; negative when the
 * connection is of no use any more, with *reason.
 */
ssize_t nvme_connection_receive(struct nvme_connection *connection, uint32_t stage_bytes,
                                const char **reason);
/* Sends what the socket takes: its length, 0 for nothing, DLFS_E_LOST or -errno. */
ssize_t nvme_connection_send(struct nvme_connection *connection, const struct iovec *vectors,
                             size_t count);
/* DLFS_E_TIMEOUT where a socket's error means that the other end fell silent, else DLFS_E_LOST. */
int nvme_socket_code(int error);

#endif
