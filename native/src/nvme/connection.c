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

/* First bytes of the alert with which a TLS server answers other protocols (RFC 8446, 5.1). */
#define TLS_ALERT 21
#define TLS_MAJOR 3

void nvme_text_format(struct nvme_text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text->bytes, sizeof text->bytes, format, arguments);
    va_end(arguments);
}

int nvme_socket_code(int error)
{
    bool timed_out = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
                     error == EHOSTDOWN || error == ENETDOWN;
    return timed_out ? DLFS_E_TIMEOUT : DLFS_E_LOST;
}

int nvme_wait(const struct nvme_deadline *deadline, int descriptor, short events)
{
    for (;;) {
        if (atomic_load(deadline->stop)) {
            return DLFS_E_CLOSED;
        }
        uint64_t now = monotonic_ns();
        if (now >= deadline->until_ns) {
            return DLFS_E_TIMEOUT;
        }
        uint64_t left_ms = (deadline->until_ns - now) / NVME_NANOSECONDS_PER_MS + 1;
        struct pollfd watched[2] = {{.fd = descriptor, .events = events},
                                    {.fd = deadline->wake, .events = POLLIN}};
        int got = poll(watched, 2, left_ms < INT32_MAX ? (int)left_ms : INT32_MAX);
        if (got > 0 && watched[0].revents != 0) {
            return 0;
        }
        if (got > 0 && watched[1].revents != 0) {
            /* Clears a wake-up that was not a stop; the caller looks for its reason later. */
            uint64_t ignored;
            (void)!read(deadline->wake, &ignored, sizeof ignored);
        }
        if (got < 0 && errno != EINTR) {
            return -errno;
        }
    }
}

/* ---- making a connection --------------------------------------------------------------------- */

static int connect_socket(int descriptor, const struct nvme_address *address,
                          const struct nvme_deadline *deadline, struct nvme_text *text)
{
    int on = 1;
    (void)setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    int error = 0;
    if (connect(descriptor, (const struct sockaddr *)&address->bytes, address->length) != 0) {
        error = errno;
    }
    if (error == EINPROGRESS || error == EINTR) {
        int code = nvme_wait(deadline, descriptor, POLLOUT);
        if (code < 0) {
            nvme_text_format(text, "no answer to the TCP connection");
            return code;
        }
        socklen_t length = sizeof error;
        if (getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &length) != 0) {
            error = errno;
        }
    }
    if (error != 0) {
        nvme_text_format(text, "%s", dlfs_strerror(-error));
        return nvme_socket_code(error);
    }
    return 0;
}

static int send_all(int descriptor, struct iovec *vectors, size_t count,
                    const struct nvme_deadline *deadline)
{
    while (count > 0) {
        struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
        ssize_t sent = sendmsg(descriptor, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) {
            int code = nvme_wait(deadline, descriptor, POLLOUT);
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
                       const struct nvme_deadline *deadline)
{
    while (count > 0) {
        ssize_t got = recv(descriptor, bytes, count, 0);
        if (got == 0) {
            return DLFS_E_LOST;
        }
        if (got < 0 && errno == EAGAIN) {
            int code = nvme_wait(deadline, descriptor, POLLIN);
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

/* Returns a message for a missing ICResp. bytes: what was received, over the ICReq sent before. */
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

static int agree_on_terms(int descriptor, uint32_t digests, const struct nvme_deadline *deadline,
                          struct nvme_terms *terms, struct nvme_text *text)
{
    uint8_t bytes[NVME_IC_BYTES];
    bool header_digest = (digests & DLFS_NVME_HEADER_DIGEST) != 0;
    bool data_digest = (digests & DLFS_NVME_DATA_DIGEST) != 0;
    struct iovec vector = {bytes, nvme_encode_icreq(header_digest, data_digest, bytes)};
    int code = send_all(descriptor, &vector, 1, deadline);
    if (code == 0) {
        code = receive_all(descriptor, bytes, NVME_IC_BYTES, deadline);
    }
    if (code < 0) {
        nvme_text_format(text, "%s", why_no_terms(code, bytes));
        return code;
    }
    const char *reason = "";
    code = nvme_decode_icresp(bytes, header_digest, data_digest, terms, &reason);
    if (code < 0) {
        nvme_text_format(text, "%s", reason);
    }
    return code;
}

int nvme_connection_open(const struct nvme_address *address, uint32_t digests,
                         uint32_t staging_bytes, const struct nvme_deadline *deadline,
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
        nvme_text_format(text, "make a socket: %s", dlfs_strerror(code));
        goto failed;
    }
    code = connect_socket(descriptor, address, deadline, text);
    if (code == 0) {
        code = agree_on_terms(descriptor, digests, deadline, &terms, text);
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

void nvme_connection_abort(struct nvme_connection *connection, bool in_child)
{
    if (connection == NULL) {
        return;
    }
    if (!in_child) {
        /*
         * Connecting to AF_UNSPEC sends a reset and drops unsent data, even while a forked child
         * holds a copy of the descriptor: an abandoned write must not be sent later.
         */
        struct sockaddr unspecified = {.sa_family = AF_UNSPEC};
        (void)connect(connection->descriptor, &unspecified, sizeof unspecified);
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
    /* sendmsg declares the vectors as not const but does not change them. */
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
    do { /* recv costs less than recvmsg */
        got = count == 1 ? recv(connection->descriptor, vectors->iov_base, vectors->iov_len, 0)
                         : recvmsg(connection->descriptor, &message, 0);
    } while (got < 0 && errno == EINTR);
    if (got < 0 && errno == EAGAIN) {
        return 0;
    }
    if (got < 0) {
        *reason = dlfs_strerror(-errno);
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

/* The command in flight of nvme_connection_run: the context of its sink. */
struct single {
    struct nvme_exchange *exchange;
    uint16_t cid;
    uint32_t received_bytes;
    bool last_seen; /* a C2HData with the LAST flag was received */
    bool done;
};

static int protocol_error(const char **reason, const char *text)
{
    *reason = text;
    return DLFS_E_PROTOCOL;
}

static int single_begin_data(void *context, const struct nvme_pdu *pdu, uint8_t **destination,
                             const char **reason)
{
    struct single *single = context;
    const struct nvme_exchange *exchange = single->exchange;
    if (pdu->cid != single->cid || single->done || single->last_seen ||
        exchange->direction != DLFS_NVME_DATA_IN) {
        return protocol_error(reason, "data for a command that is not under way");
    }
    if (pdu->offset_bytes != single->received_bytes ||
        pdu->data_bytes > exchange->data_bytes - single->received_bytes) {
        return protocol_error(reason, "data beyond what a command asked for");
    }
    *destination = (uint8_t *)exchange->data + pdu->offset_bytes;
    return 0;
}

static int single_end_data(void *context, const struct nvme_pdu *pdu, bool digest_valid,
                           const char **reason)
{
    struct single *single = context;
    if (!digest_valid) {
        *reason = "a data digest does not match";
        return DLFS_E_DIGEST;
    }
    single->received_bytes += pdu->data_bytes;
    single->last_seen = (pdu->flags & NVME_PDU_LAST) != 0;
    if ((pdu->flags & NVME_PDU_SUCCESS) != 0) {
        single->exchange->cqe = (struct nvme_cqe){.cid = single->cid};
        single->done = true;
    }
    return 0;
}

static int single_on_cqe(void *context, const struct nvme_pdu *pdu, const char **reason)
{
    struct single *single = context;
    if (pdu->cid != single->cid || single->done) {
        return protocol_error(reason, "a completion of a command that is not under way");
    }
    single->exchange->cqe = pdu->cqe;
    single->done = true;
    return 0;
}

static int single_on_r2t(void *context, const struct nvme_pdu *r2t, const char **reason)
{
    (void)context;
    (void)r2t;
    return protocol_error(reason, "an R2T for a command whose data was in its capsule");
}

static const struct nvme_sink single_sink = {.begin_data = single_begin_data,
                                             .end_data = single_end_data,
                                             .on_cqe = single_on_cqe,
                                             .on_r2t = single_on_r2t};

static int single_send(struct nvme_connection *connection, const struct single *single,
                       const struct nvme_deadline *deadline)
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
    return send_all(connection->descriptor, vectors, count, deadline);
}

int nvme_connection_run(struct nvme_connection *connection, struct nvme_exchange *exchange,
                        const struct nvme_deadline *deadline, struct nvme_text *text)
{
    if (connection->unusable) {
        nvme_text_format(text, "an earlier command on the connection was given up");
        return DLFS_E_LOST;
    }
    struct single single = {.exchange = exchange, .cid = connection->next_cid++};
    const char *reason = "the connection ended";
    connection->receiver.sink = &single_sink;
    connection->receiver.context = &single;
    int code = single_send(connection, &single, deadline);
    while (code == 0 && !single.done) {
        ssize_t got =
            nvme_connection_receive(connection, connection->receiver.staging_bytes, &reason);
        code = got < 0   ? (int)got
               : got > 0 ? 0
                         : nvme_wait(deadline, connection->descriptor, POLLIN);
    }
    if (code == 0 && !nvme_receiver_is_empty(&connection->receiver)) {
        reason = "bytes that nothing asked for";
        code = DLFS_E_PROTOCOL;
    }
    connection->receiver.sink = NULL;
    connection->receiver.context = NULL;
    connection->unusable = code < 0;
    if (code < 0) {
        nvme_text_format(text, "%s", code == DLFS_E_TIMEOUT ? "no answer in time" : reason);
    }
    return code;
}
