/*
 * Single commands on a connection: after a command was abandoned while half of its answer was
 * received, nothing is written to its buffer, and no other command runs on the connection.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "nvme/controller.h"
#include "nvme/nvme_tests.h"
#include "platform/clock.h"

/* Set: the kernel has no memory for what is sent. sendmsg below takes the place of libc's. */
static int attempts_without_memory;
static bool lacks_memory;

ssize_t sendmsg(int descriptor, const struct msghdr *message, int flags)
{
    if (lacks_memory) {
        attempts_without_memory++;
        errno = ENOBUFS;
        return -1;
    }
    return syscall(SYS_sendmsg, descriptor, message, flags);
}

#define PAGE 4096u
#define STAGING PAGE

/* A connection to a peer that the test plays. */
struct pair {
    struct nvme_connection *connection;
    int peer;
    int wake;
    atomic_bool stop;
    struct nvme_deadline deadline;
};

static void pair_make(struct pair *pair, const struct nvme_terms *terms)
{
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    struct nvme_connection *connection = calloc(1, sizeof *connection + STAGING);
    CHECK(connection != NULL);
    connection->descriptor = ends[0];
    connection->next_cid = 1;
    connection->terms = *terms;
    nvme_receiver_init(&connection->receiver, terms, connection->staging, STAGING);
    pair->connection = connection;
    pair->peer = ends[1];
    pair->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(pair->wake >= 0);
    atomic_init(&pair->stop, true); /* a command ends as soon as it would wait */
    pair->deadline =
        (struct nvme_deadline){.until_ns = UINT64_MAX, .wake = pair->wake, .stop = &pair->stop};
}

static void test_late_data_goes_nowhere(const struct nvme_terms *terms)
{
    struct pair pair;
    pair_make(&pair, terms);
    uint8_t *page = calloc(1, PAGE);
    uint8_t *pdu = malloc(2 * (size_t)PAGE);
    uint8_t *cqe = malloc(2 * (size_t)PAGE);
    CHECK(page != NULL && pdu != NULL && cqe != NULL);
    memset(cqe, 0xAB, PAGE);
    uint32_t length = make_data(terms, pdu, 1, 0, cqe, PAGE, NVME_PDU_LAST, 0);
    struct nvme_exchange identify = {.entry = {NVME_ADMIN_IDENTIFY},
                                     .data = page,
                                     .data_bytes = PAGE,
                                     .direction = DLFS_NVME_DATA_IN};
    struct nvme_text text;
    CHECK_EQ(send(pair.peer, pdu, length / 2, 0), length / 2);
    CHECK_EQ(nvme_connection_run(pair.connection, &identify, &pair.deadline, NULL, &text),
             DLFS_E_CLOSED);
    CHECK_EQ(page[1024], 0xAB);
    free(page); /* the sanitizers detect a later write to it */
    CHECK_EQ(send(pair.peer, pdu + length / 2, length - length / 2, 0), length - length / 2);

    /* The remaining data has arrived, and a completion for the next command. */
    uint8_t own = 0;
    struct nvme_exchange next = {.entry = {NVME_ADMIN_IDENTIFY},
                                 .data = &own,
                                 .data_bytes = sizeof own,
                                 .direction = DLFS_NVME_DATA_IN};
    CHECK_EQ(nvme_connection_run(pair.connection, &next, &pair.deadline, NULL, &text), DLFS_E_LOST);
    CHECK(strstr(text.bytes, "given up") != NULL);
    CHECK_EQ(own, 0);
    struct nvme_admin admin = {.connection = pair.connection};
    nvme_controller_shut_down(&admin, &pair.deadline);
    CHECK(admin.connection == NULL);

    /* The peer received the first command and the end of the stream. */
    uint32_t seen = 0;
    ssize_t got;
    while ((got = recv(pair.peer, cqe, 2 * (size_t)PAGE, 0)) > 0) {
        seen += (uint32_t)got;
    }
    CHECK(got == 0 || errno == ECONNRESET);
    CHECK_EQ(seen, NVME_COMMAND_BYTES + (terms->header_digest ? NVME_DIGEST_BYTES : 0));
    free(pdu);
    free(cqe);
    (void)close(pair.peer);
    (void)close(pair.wake);
}

/* While the kernel has no memory for a send, no event reports any: the sender makes pauses. */
static void test_no_memory(const struct nvme_terms *terms)
{
    struct pair pair;
    struct nvme_text text;
    struct nvme_exchange exchange = {.entry = {NVME_ADMIN_IDENTIFY}};
    pair_make(&pair, terms);
    atomic_store(&pair.stop, false);
    pair.deadline.until_ns = monotonic_ns() + 50 * NVME_NANOSECONDS_PER_MS;
    lacks_memory = true;
    CHECK_EQ(nvme_connection_run(pair.connection, &exchange, &pair.deadline, NULL, &text),
             DLFS_E_TIMEOUT);
    lacks_memory = false;
    CHECK(attempts_without_memory <= 51);
    nvme_connection_abort(pair.connection, false);
    (void)close(pair.peer);
    (void)close(pair.wake);
}

int main(void)
{
    struct nvme_terms plain = make_terms(false, false);
    test_no_memory(&plain);
    for (int digests = 0; digests < 4; digests++) {
        struct nvme_terms terms = make_terms((digests & 1) != 0, (digests & 2) != 0);
        test_late_data_goes_nowhere(&terms);
    }
    return 0;
}
