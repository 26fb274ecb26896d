/*
 * Addresses, deadlines of waits and messages of errors, which all code of NVMe/TCP sockets uses.
 *
 * Threads: any.
 */
#ifndef DLFS_NVME_SOCKET_H
#define DLFS_NVME_SOCKET_H

#include <errno.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "dlfs/dlfs.h"

#define NVME_NANOSECONDS_PER_MS UINT64_C(1000000)

/* An error message. */
struct nvme_text {
    char bytes[DLFS_NVME_TEXT_BYTES];
};
__attribute__((format(printf, 2, 3))) void nvme_text_format(struct nvme_text *text,
                                                            const char *format, ...);

/* When a wait ends, and a flag that ends it early: set *stop, then make wake readable. */
struct nvme_deadline {
    uint64_t until_ns; /* CLOCK_MONOTONIC */
    int wake;          /* an eventfd */
    const atomic_bool *stop;
};
/*
 * Sleeps until poll(2) reports one of the events for the descriptor, until a time, or until wake,
 * an eventfd, is readable, which is cleared. Returns 1 in the first case, else 0, or -errno.
 */
int nvme_poll(int wake, int descriptor, short events, uint64_t until_ns);
/* Returns a deadline at most ns from now. */
struct nvme_deadline nvme_deadline_within(const struct nvme_deadline *deadline, uint64_t ns);
/*
 * Waits until poll(2) reports one of the events for the descriptor. Returns 0, DLFS_E_TIMEOUT, or
 * DLFS_E_CLOSED if *stop was set.
 */
int nvme_wait(const struct nvme_deadline *deadline, int descriptor, short events);

struct nvme_address {
    struct sockaddr_storage bytes;
    socklen_t length;
};

/* Returns DLFS_E_TIMEOUT for a socket error that means an unreachable peer, else DLFS_E_LOST. */
static inline int nvme_socket_code(int error)
{
    bool timed_out = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
                     error == EHOSTDOWN || error == ENETDOWN;
    return timed_out ? DLFS_E_TIMEOUT : DLFS_E_LOST;
}

#endif
