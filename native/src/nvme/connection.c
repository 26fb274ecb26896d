/* A TCP connection to a controller; see nvme/connection.h. */
#include "nvme/connection.h"
#include "platform/clock.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define NANOSECONDS_PER_MS UINT64_C(1000000)

/* How an alert begins with which a TLS server answers what is no TLS (RFC 8446, section 5.1). */
#define TLS_ALERT 21
#define TLS_MAJOR 3

void nvme_say(struct nvme_text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text->bytes, sizeof text->bytes, format, arguments);
    va_end(arguments);
}

int nvme_socket_code(int error)
{
    bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
                  error == EHOSTDOWN || error == ENETDOWN;
    return silent ? DLFS_E_TIMEOUT : DLFS_E_LOST;
}

int nvme_wait(const struct nvme_patience *patience, int descriptor, short events)
{
    for (;;) {
        if (atomic_load(patience->stop)) {
            return DLFS_E_CLOSED;
        }
        uint64_t now = monotonic_ns();
        if (now >= patience->until_ns) {
            return DLFS_E_TIMEOUT;
        }
        uint64_t left_ms = (patience->until_ns - now) / NANOSECONDS_PER_MS + 1;
        struct pollfd watched[2] = {{.fd = descriptor, .events = events},
                                    {.fd = patience->wake, .events = POLLIN}};
        int got = poll(watched, 2, left_ms < INT32_MAX ? (int)left_ms : INT32_MAX);
        if (got > 0 && watched[0].revents != 0) {
            return 0;
        }
        if (got > 0 && watched[1].revents != 0) {
            /* Whoever woke us for another reason is served after this. */
            uint64_t ignored;
            (void)!read(patience->wake, &ignored, sizeof ignored);
        }
        if (got < 0 && errno != EINTR) {
            return -errno;
        }
    }
}

/* ---- making a connection --------------------------------------------------------------------- */

static int connect_socket(int descriptor, const struct nvme_address *address,
                          const struct nvme_patience *patience, struct nvme_text *text)
{
    int on = 1;
    (void)setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    int error = 0;
    if (connect(descriptor, (const struct sockaddr *)&address->bytes, address->length) != 0) {
        error = errno;
    }
    if (error == EINPROGRESS || error == EINTR) {
        int code = nvme_wait(patience, descriptor, POLLOUT);
        if (code < 0) {
            nvme_say(text, "no answer to the TCP connection");
            return code;
        }
        socklen_t length = sizeof error;
        if (getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &length) != 0) {
            error = errno;
        }
    }
    if (error != 0) {
        nvme_say(text, "%s", strerrordesc_np(error));
        return nvme_socket_code(error);
    }
    return 0;
}

static int send_all(int descriptor, struct iovec *vectors, size_t count,
                    const struct nvme_patience *patience)
{
    while (count > 0) {
        struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
        ssize_t sent = sendmsg(descriptor, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) {
            int code = nvme_wait(patience, descriptor, POLLOUT);
            if (code < 0) {
                return code;
            }
            continue;
        }
        if (sent < 0 && errno != EINTR) {
            return nvme_socket_code(errno);
        }
        size_t left = sent > 0 ? (size_t)sent : 0;
        while (count > 0 && left >= vectors->iov_len) {
            left -= vectors->iov_len;
            vectors++;
            count--;
        }
        if (count > 0) {
            vectors->iov_base = (uint8_t *)vectors->iov_base + left;
            vectors->iov_len -= left;
        }
    }
    return 0;
}

static int receive_all(int descriptor, uint8_t *bytes, size_t count,
                       const struct nvme_patience *patience)
{
    while (count > 0) {
        ssize_t got = recv(descriptor, bytes, count, 0);
        if (got == 0) {
            return DLFS_E_LOST;
        }
        if (got < 0 && errno == EAGAIN) {
            int code = nvme_wait(patience, descriptor, POLLIN);
            if (code < 0) {
                return code;
            }
            continue;
        }
        if (got < 0 && errno != EINTR) {
            return nvme_socket_code(errno);
        }
        bytes += got > 0 ? got : 0;
        count -= got > 0 ? (size_t)got : 0;
    }
    return 0;
}

/* Why there is no ICResp; bytes: what came of it, over the ICReq that was sent. */
static const char *why_no_terms(int code, const uint8_t bytes[NVME_IC_BYTES])
{
    if (code == DLFS_E_TIMEOUT) {
        return "no answer to ICReq (is it an NVMe/TCP port?)";
    }
    if (bytes[0] == TLS_ALERT && bytes[1] == TLS_MAJOR) {
        return "the port expects TLS, which DLFS does not speak yet: it answered ICReq with an "
               "alert";
    }
    return "the connection ended before an ICResp: the port may expect TLS, which DLFS does not "
           "speak yet, or speak no NVMe/TCP";
}

static int agree_on_terms(int descriptor, uint32_t digests, const struct nvme_patience *patience,
                          struct nvme_terms *terms, struct nvme_text *text)
{
    uint8_t bytes[NVME_IC_BYTES];
    bool header_digest = (digests & DLFS_NVME_HEADER_DIGEST) != 0;
    bool data_digest = (digests & DLFS_NVME_DATA_DIGEST) != 0;
    struct iovec vector = {bytes, nvme_encode_icreq(header_digest, data_digest, bytes)};
    int code = send_all(descriptor, &vector, 1, patience);
    if (code == 0) {
        code = receive_all(descriptor, bytes, NVME_IC_BYTES, patience);
    }
    if (code < 0) {
        nvme_say(text, "%s", why_no_terms(code, bytes));
        return code;
    }
    const char *reason = "";
    code = nvme_decode_icresp(bytes, header_digest, data_digest, terms, &reason);
    if (code < 0) {
        nvme_say(text, "%s", reason);
    }
    return code;
}

int nvme_connection_open(const struct nvme_address *address, uint32_t digests,
                         uint32_t staging_bytes, const struct nvme_patience *patience,
                         struct nvme_connection **out, struct nvme_text *text)
{
    struct nvme_terms terms;
    int code = -ENOMEM;
    struct nvme_connection *connection = malloc(sizeof *connection + staging_bytes);
    int descriptor =
        socket(address->bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (descriptor < 0) {
        code = -errno;
    }
    if (connection == NULL || descriptor < 0) {
        nvme_say(text, "make a socket: %s", strerrordesc_np(-code));
        goto failed;
    }
    code = connect_socket(descriptor, address, patience, text);
    if (code == 0) {
        code = agree_on_terms(descriptor, digests, patience, &terms, text);
    }
    if (code < 0) {
        goto failed;
    }
    *connection = (struct nvme_connection){.descriptor = descriptor, .next_cid = 1, .terms = terms};
    nvme_receiver_init(&connection->receiver, &terms, connection->staging, staging_bytes);
    *out = connection;
    return 0;

failed:
    if (descriptor >= 0) {
        (void)close(descriptor);
    }
    free(connection);
    return code;
}

void nvme_connection_abort(struct nvme_connection *connection, bool foreign)
{
    if (connection == NULL) {
        return;
    }
    if (!foreign) {
        /*
         * Dissolving the association sends a reset and drops what waits to be sent, although a
         * forked child may hold a copy of the descriptor: a write given up must not go out later.
         */
        struct sockaddr nobody = {.sa_family = AF_UNSPEC};
        (void)connect(connection->descriptor, &nobody, sizeof nobody);
    }
    (void)close(connection->descriptor);
    free(connection);
}

void nvme_connection_drop(struct nvme_connection **connection)
{
    struct nvme_connection *dropped = *connection;
    *connection = NULL;
    nvme_connection_abort(dropped, false);
}

void nvme_connection_close(struct nvme_connection *connection)
{
    if (connection == NULL) {
        return;
    }
    (void)shutdown(connection->descriptor, SHUT_RDWR);
    (void)close(connection->descriptor);
    free(connection);
}

/* ---- sending and receiving ------------------------------------------------------------------- */

ssize_t nvme_connection_send(struct nvme_connection *connection, const struct iovec *vectors,
                             size_t count)
{
    /* sendmsg takes the vectors as not const, and leaves them alone. */
    struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)vectors, .msg_iovlen = count};
    for (;;) {
        ssize_t sent = sendmsg(connection->descriptor, &message, MSG_NOSIGNAL);
        if (sent >= 0) {
            return sent;
        }
        if (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM) {
            return 0;
        }
        if (errno != EINTR) {
            return nvme_socket_code(errno);
        }
    }
}

ssize_t nvme_connection_receive(struct nvme_connection *connection, uint32_t stage_bytes,
                                const char **reason)
{
    struct iovec vectors[2];
    int count = nvme_receiver_space(&connection->receiver, stage_bytes, vectors);
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = (size_t)count};
    ssize_t got;
    do { /* each call costs less than the one that can do more */
        got = count == 1 ? recv(connection->descriptor, vectors->iov_base, vectors->iov_len, 0)
                         : recvmsg(connection->descriptor, &message, 0);
    } while (got < 0 && errno == EINTR);
    if (got < 0 && errno == EAGAIN) {
        return 0;
    }
    if (got < 0) {
        *reason = strerrordesc_np(errno);
        return nvme_socket_code(errno);
    }
    if (got == 0) {
        *reason = "the target closed the connection";
        return DLFS_E_LOST;
    }
    int code = nvme_receiver_take(&connection->receiver, (size_t)got);
    if (code < 0) {
        *reason = connection->receiver.reason;
        return code;
    }
    return got;
}

/* ---- single commands ------------------------------------------------------------------------- */

/* A command under way; what nvme_connection_run's sink works on. */
struct single {
    struct nvme_exchange *exchange;
    uint16_t cid;
    uint32_t received_bytes;
    bool ended; /* by LAST */
    bool done;
};

static int broken(const char **reason, const char *text)
{
    *reason = text;
    return DLFS_E_PROTOCOL;
}

static int single_place(void *context, const struct nvme_pdu *pdu, uint8_t **destination,
                        const char **reason)
{
    struct single *single = context;
    const struct nvme_exchange *exchange = single->exchange;
    if (pdu->cid != single->cid || single->done || single->ended ||
        exchange->direction != DLFS_NVME_DATA_IN) {
        return broken(reason, "data for a command that is not under way");
    }
    if (pdu->offset_bytes != single->received_bytes ||
        pdu->data_bytes > exchange->data_bytes - single->received_bytes) {
        return broken(reason, "data beyond what a command asked for");
    }
    *destination = (uint8_t *)exchange->data + pdu->offset_bytes;
    return 0;
}

static int single_arrived(void *context, const struct nvme_pdu *pdu, bool sound,
                          const char **reason)
{
    struct single *single = context;
    if (!sound) {
        *reason = "a data digest does not match";
        return DLFS_E_DIGEST;
    }
    single->received_bytes += pdu->data_bytes;
    single->ended = (pdu->flags & NVME_PDU_LAST) != 0;
    if ((pdu->flags & NVME_PDU_SUCCESS) != 0) {
        single->exchange->answer = (struct nvme_answer){.cid = single->cid};
        single->done = true;
    }
    return 0;
}

static int single_response(void *context, const struct nvme_pdu *pdu, const char **reason)
{
    struct single *single = context;
    if (pdu->cid != single->cid || single->done) {
        return broken(reason, "a completion of a command that is not under way");
    }
    single->exchange->answer = pdu->answer;
    single->done = true;
    return 0;
}

static int single_ready(void *context, const struct nvme_pdu *r2t, const char **reason)
{
    (void)context;
    (void)r2t;
    return broken(reason, "an R2T for a command whose data was in its capsule");
}

static const struct nvme_sink single_sink = {.place = single_place,
                                             .arrived = single_arrived,
                                             .response = single_response,
                                             .ready = single_ready};

static int single_send(struct nvme_connection *connection, const struct single *single,
                       const struct nvme_patience *patience)
{
    struct nvme_exchange *exchange = single->exchange;
    bool out = exchange->direction == DLFS_NVME_DATA_OUT && exchange->data_bytes > 0;
    bool in = exchange->direction == DLFS_NVME_DATA_IN && exchange->data_bytes > 0;
    enum nvme_transfer transfer = out ? NVME_IN_CAPSULE : in ? NVME_TO_HOST : NVME_NO_DATA;
    uint8_t head[NVME_HEAD_BYTES_MAX];
    uint8_t digest[NVME_DIGEST_BYTES];
    nvme_entry_finish(exchange->entry, single->cid, transfer,
                      transfer == NVME_NO_DATA ? 0 : exchange->data_bytes);
    uint32_t head_bytes = nvme_encode_command(&connection->terms, exchange->entry,
                                              out ? exchange->data_bytes : 0, head);
    struct iovec vectors[3] = {{head, head_bytes}};
    size_t count = 1;
    if (out) {
        vectors[count++] = (struct iovec){exchange->data, exchange->data_bytes};
        if (connection->terms.data_digest) {
            nvme_put32(digest, dlfs_crc32c(0, exchange->data, exchange->data_bytes));
            vectors[count++] = (struct iovec){digest, sizeof digest};
        }
    }
    return send_all(connection->descriptor, vectors, count, patience);
}

int nvme_connection_run(struct nvme_connection *connection, struct nvme_exchange *exchange,
                        const struct nvme_patience *patience, struct nvme_text *text)
{
    if (connection->given_up) {
        nvme_say(text, "an earlier command on the connection was given up");
        return DLFS_E_LOST;
    }
    struct single single = {.exchange = exchange, .cid = connection->next_cid++};
    const char *reason = "the connection ended";
    connection->receiver.sink = &single_sink;
    connection->receiver.context = &single;
    int code = single_send(connection, &single, patience);
    while (code == 0 && !single.done) {
        ssize_t got =
            nvme_connection_receive(connection, connection->receiver.staging_bytes, &reason);
        code = got < 0   ? (int)got
               : got > 0 ? 0
                         : nvme_wait(patience, connection->descriptor, POLLIN);
    }
    if (code == 0 && !nvme_receiver_is_empty(&connection->receiver)) {
        reason = "bytes that nothing asked for";
        code = DLFS_E_PROTOCOL;
    }
    connection->receiver.sink = NULL;
    connection->receiver.context = NULL;
    connection->given_up = code < 0;
    if (code < 0) {
        nvme_say(text, "%s", code == DLFS_E_TIMEOUT ? "no answer in time" : reason);
    }
    return code;
}
