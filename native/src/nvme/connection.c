/* A TCP connection to a controller; see nvme/connection.h. */
#include "nvme/connection.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

/* First bytes of the alert with which a TLS server answers other protocols (RFC 8446, 5.1). */
#define TLS_ALERT 21
#define TLS_MAJOR 3

/* ---- the byte stream ------------------------------------------------------------------------- */

ssize_t nvme_connection_send(struct nvme_connection *connection, const struct iovec *vectors,
                             size_t count, const char **reason)
{
    if (connection->tls != NULL) {
        return connection->security->tls_send(connection->tls, vectors, count, reason);
    }
    /* sendmsg declares the vectors as not const but does not change them. */
    struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)vectors, .msg_iovlen = count};
    for (;;) {
        ssize_t sent = sendmsg(connection->descriptor, &message, MSG_NOSIGNAL);
        if (sent >= 0) {
            return sent;
        }
        if (errno == ENOBUFS || errno == ENOMEM) {
            (void)poll(NULL, 0, 1); /* no event reports memory: a caller would not sleep */
            return 0;
        }
        if (errno == EAGAIN) {
            return 0;
        }
        if (errno != EINTR) {
            int code = nvme_socket_code(errno);
            *reason = code == DLFS_E_TIMEOUT ? "the network gave up on the target"
                                             : "the target closed the connection";
            return code;
        }
    }
}

/* Receives what has arrived. Returns the bytes, 0 if there were none, or a negative code with
 * *reason. */
static ssize_t receive_vectors(struct nvme_connection *connection, struct iovec *vectors,
                               size_t count, const char **reason)
{
    if (connection->tls != NULL) {
        return connection->security->tls_receive(connection->tls, vectors, count, reason);
    }
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
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
    return got;
}

ssize_t nvme_connection_receive(struct nvme_connection *connection, uint32_t stage_bytes,
                                const char **reason)
{
    struct iovec vectors[2];
    int count = nvme_receiver_space(&connection->receiver, stage_bytes, vectors);
    ssize_t got = receive_vectors(connection, vectors, (size_t)count, reason);
    if (got <= 0) {
        return got;
    }
    int code = nvme_receiver_take(&connection->receiver, (size_t)got);
    if (code < 0) {
        *reason = connection->receiver.reason;
        return code;
    }
    return got;
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

static int send_all(struct nvme_connection *connection, struct iovec *vectors, size_t count,
                    const struct nvme_deadline *deadline, const char **reason)
{
    while (count > 0) {
        ssize_t sent = nvme_connection_send(connection, vectors, count, reason);
        if (sent < 0) {
            return (int)sent;
        }
        size_t left = (size_t)sent;
        while (count > 0 && left >= vectors->iov_len) {
            left -= vectors->iov_len;
            vectors++;
            count--;
        }
        if (count > 0) {
            vectors->iov_base = (uint8_t *)vectors->iov_base + left;
            vectors->iov_len -= left;
        }
        int code = sent == 0 ? nvme_wait(deadline, connection->descriptor, POLLOUT) : 0;
        if (code < 0) {
            return code;
        }
    }
    return 0;
}

/* Waits until there is something to receive. */
static int wait_to_receive(const struct nvme_connection *connection,
                           const struct nvme_deadline *deadline)
{
    short events = nvme_connection_wants_room(connection) ? POLLIN | POLLOUT : POLLIN;
    return nvme_wait(deadline, connection->descriptor, events);
}

static int receive_all(struct nvme_connection *connection, uint8_t *bytes, size_t count,
                       const struct nvme_deadline *deadline, const char **reason)
{
    while (count > 0) {
        struct iovec vector = {bytes, count};
        ssize_t got = receive_vectors(connection, &vector, 1, reason);
        int code = got < 0 ? (int)got : got == 0 ? wait_to_receive(connection, deadline) : 0;
        if (code < 0) {
            return code;
        }
        bytes += got;
        count -= (size_t)got;
    }
    return 0;
}

/* Returns the code for a missing ICResp of a stream without encryption, and its message. bytes:
 * what was received, over the ICReq sent before. */
static int explain_no_terms(int code, const uint8_t bytes[NVME_IC_BYTES], const char **reason)
{
    if (bytes[0] == TLS_ALERT && bytes[1] == TLS_MAJOR) {
        *reason = "the port demands TLS, and no tls_psk names a key for it";
        return DLFS_E_AUTH;
    }
    if (code == DLFS_E_LOST) {
        *reason = "the connection ended before an ICResp: the port may demand TLS, for which no "
                  "tls_psk names a key, or speak no NVMe/TCP";
    }
    return code;
}

static int agree_on_terms(struct nvme_connection *connection, uint32_t digests,
                          const struct nvme_deadline *deadline, struct nvme_text *text)
{
    uint8_t bytes[NVME_IC_BYTES];
    const char *reason = "";
    bool header_digest = (digests & DLFS_NVME_HEADER_DIGEST) != 0;
    bool data_digest = (digests & DLFS_NVME_DATA_DIGEST) != 0;
    struct iovec vector = {bytes, nvme_encode_icreq(header_digest, data_digest, bytes)};
    int code = send_all(connection, &vector, 1, deadline, &reason);
    if (code == 0) {
        code = receive_all(connection, bytes, NVME_IC_BYTES, deadline, &reason);
    }
    if (code == DLFS_E_TIMEOUT) {
        reason = "no answer to ICReq (is it an NVMe/TCP port?)";
    }
    if (code < 0 && connection->tls == NULL) {
        code = explain_no_terms(code, bytes, &reason);
    }
    if (code == 0) {
        code = nvme_decode_icresp(bytes, header_digest, data_digest, &connection->terms, &reason);
    }
    if (code < 0) {
        nvme_text_format(text, "%s", reason);
    }
    return code;
}

/* Opens and connects a socket. */
static int open_socket(struct nvme_connection *connection, const struct nvme_address *address,
                       const struct nvme_deadline *deadline, struct nvme_text *text)
{
    connection->descriptor =
        socket(address->bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connection->descriptor < 0) {
        int code = -errno;
        nvme_text_format(text, "make a socket: %s", dlfs_strerror(code));
        return code;
    }
    return connect_socket(connection->descriptor, address, deadline, text);
}

/* Frees the TLS session. orderly: tells the target first that the stream ends. */
static void end_encryption(struct nvme_connection *connection, bool orderly)
{
    if (connection->tls != NULL) {
        connection->security->tls_close(connection->tls, orderly);
        connection->tls = NULL;
    }
}

/* Ends the TLS session, and closes the socket. */
static void close_socket(struct nvme_connection *connection)
{
    end_encryption(connection, false);
    if (connection->generated != NULL) {
        connection->security->tls_key_free(connection->generated);
        connection->generated = NULL;
    }
    if (connection->descriptor >= 0) {
        (void)close(connection->descriptor);
    }
    connection->descriptor = -1;
}

/*
 * Connects and encrypts. If one version of the identity is refused, or the target closes the
 * connection, connects again and offers the other one, since a handshake has one identity. The
 * message of the version to offer first is kept. A generated key has one identity only.
 */
static int connect_encrypted(struct nvme_connection *connection, const struct nvme_address *address,
                             struct nvme_tls_config tls, const struct nvme_deadline *deadline,
                             struct nvme_text *text)
{
    int code = 0;
    uint32_t last = tls.generated != NULL ? 0 : NVME_TLS_IDENTITY_MAX;
    for (uint32_t attempt = 0; attempt <= last; attempt++) {
        struct nvme_text other;
        struct nvme_text *message = attempt == 0 ? text : &other;
        tls.identity = attempt == 0 ? tls.identity : 1 - tls.identity;
        close_socket(connection);
        int found = open_socket(connection, address, deadline, message);
        if (found == 0) {
            found = nvme_encrypt(connection->security, &tls, connection->descriptor, deadline,
                                 &connection->tls, message);
        }
        connection->tls_identity = tls.identity;
        code = attempt == 0 || found == 0 || found == DLFS_E_CLOSED ? found : code;
        if (code != DLFS_E_AUTH && code != NVME_AUTH_CLOSED) {
            break;
        }
    }
    return code;
}

int nvme_connection_open(const struct nvme_address *address, uint32_t digests,
                         const struct nvme_security *security, const struct nvme_tls_config *tls,
                         uint32_t staging_bytes, const struct nvme_deadline *deadline,
                         struct nvme_connection **out, struct nvme_text *text)
{
    struct nvme_connection *connection = malloc(sizeof *connection + staging_bytes);
    if (connection == NULL) {
        nvme_text_format(text, "no memory for a connection");
        return -ENOMEM;
    }
    *connection = (struct nvme_connection){.descriptor = -1, .next_cid = 1, .security = security};
    int code = tls == NULL ? open_socket(connection, address, deadline, text)
                           : connect_encrypted(connection, address, *tls, deadline, text);
    if (code == 0) {
        code = agree_on_terms(connection, digests, deadline, text);
    }
    if (code < 0) {
        close_socket(connection);
        free(connection);
        return code;
    }
    nvme_receiver_init(&connection->receiver, &connection->terms, connection->staging,
                       staging_bytes);
    *out = connection;
    return 0;
}

bool nvme_connection_demands_tls(const struct nvme_address *address,
                                 const struct nvme_deadline *deadline)
{
    struct nvme_connection connection = {.descriptor = -1};
    struct nvme_text ignored;
    bool answers = open_socket(&connection, address, deadline, &ignored) == 0 &&
                   nvme_answers_tls(connection.descriptor, deadline);
    close_socket(&connection);
    return answers;
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
    close_socket(connection);
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
    end_encryption(connection, true);
    (void)shutdown(connection->descriptor, SHUT_RDWR);
    close_socket(connection);
    free(connection);
}

/* ---- single commands ------------------------------------------------------------------------- */

/* The command in flight of nvme_connection_run: the context of its sink. */
struct single {
    struct nvme_connection *connection;
    struct nvme_exchange *exchange; /* NULL: there is no command */
    uint16_t cid;
    uint32_t received_bytes;
    bool last_seen; /* a C2HData with the LAST flag was received */
    bool done;
};

static int single_begin_data(void *context, const struct nvme_pdu *pdu, uint8_t **destination,
                             const char **reason)
{
    struct single *single = context;
    const struct nvme_exchange *exchange = single->exchange;
    if (pdu->cid != single->cid || single->done || single->last_seen ||
        exchange->direction != DLFS_NVME_DATA_IN) {
        return nvme_protocol_error(reason, "data for a command that is not under way");
    }
    if (pdu->offset_bytes != single->received_bytes ||
        pdu->data_bytes > exchange->data_bytes - single->received_bytes) {
        return nvme_protocol_error(reason, "data beyond what a command asked for");
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
    single->exchange->received_bytes = single->received_bytes;
    single->last_seen = (pdu->flags & NVME_PDU_LAST) != 0;
    if ((pdu->flags & NVME_PDU_SUCCESS) != 0) {
        single->exchange->cqe = (struct nvme_cqe){.cid = single->cid};
        single->done = true;
    }
    return 0;
}

/* Notes the completion of an Asynchronous Event Request. Without success there is no event, and no
 * further request is sent. */
static void take_event(struct nvme_connection *connection, const struct nvme_cqe *cqe)
{
    connection->event_requested = false;
    connection->event_arrived = (cqe->status & NVME_STATUS_CODE) == 0;
    connection->event = (uint32_t)cqe->value;
}

static int single_on_cqe(void *context, const struct nvme_pdu *pdu, const char **reason)
{
    struct single *single = context;
    if (single->connection->event_requested && pdu->cid == NVME_EVENT_CID) {
        take_event(single->connection, &pdu->cqe);
        return 0;
    }
    if (pdu->cid != single->cid || single->done) {
        return nvme_protocol_error(reason, "a completion of a command that is not under way");
    }
    single->exchange->cqe = pdu->cqe;
    single->done = true;
    return 0;
}

static int single_on_r2t(void *context, const struct nvme_pdu *r2t, const char **reason)
{
    (void)context;
    (void)r2t;
    return nvme_protocol_error(reason, "an R2T for a command whose data was in its capsule");
}

static const struct nvme_sink single_sink = {.begin_data = single_begin_data,
                                             .end_data = single_end_data,
                                             .on_cqe = single_on_cqe,
                                             .on_r2t = single_on_r2t};

static int single_send(struct nvme_connection *connection, const struct single *single,
                       const struct nvme_deadline *deadline, const char **reason)
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
    return send_all(connection, vectors, count, deadline, reason);
}

static int run_single(struct nvme_connection *connection, struct nvme_exchange *exchange,
                      const struct nvme_deadline *deadline, const char **reason)
{
    if (connection->unusable) {
        *reason = "an earlier command on the connection was given up";
        return DLFS_E_LOST;
    }
    struct single single = {
        .connection = connection, .exchange = exchange, .cid = connection->next_cid};
    *reason = "the connection ended";
    connection->next_cid = single.cid + 1u < NVME_EVENT_CID ? (uint16_t)(single.cid + 1) : 1;
    connection->receiver.sink = &single_sink;
    connection->receiver.context = &single;
    int code = single_send(connection, &single, deadline, reason);
    while (code == 0 && !single.done) {
        ssize_t got =
            nvme_connection_receive(connection, connection->receiver.staging_bytes, reason);
        code = got < 0 ? (int)got : got > 0 ? 0 : wait_to_receive(connection, deadline);
    }
    if (code == 0 && !connection->event_requested &&
        !nvme_receiver_is_empty(&connection->receiver)) {
        code = nvme_protocol_error(reason, "bytes that nothing asked for");
    }
    connection->receiver.sink = NULL;
    connection->receiver.context = NULL;
    connection->unusable = code < 0;
    exchange->status = exchange->cqe.status & NVME_STATUS_CODE;
    return code;
}

int nvme_connection_run(struct nvme_connection *connection, struct nvme_exchange *exchange,
                        const struct nvme_deadline *deadline, const char *what,
                        struct nvme_text *text)
{
    const char *reason;
    int code = run_single(connection, exchange, deadline, &reason);
    if (code < 0) {
        nvme_text_format(text, "%s%s%s", what != NULL ? what : "", what != NULL ? ": " : "",
                         code == DLFS_E_TIMEOUT ? "no answer in time" : reason);
    }
    return code;
}

int nvme_connection_fetch(struct nvme_connection *connection, struct nvme_exchange *exchange,
                          const struct nvme_deadline *deadline, const char *what,
                          struct nvme_text *text)
{
    exchange->direction = DLFS_NVME_DATA_IN;
    memset(exchange->data, 0, exchange->data_bytes);
    int code = nvme_connection_run(connection, exchange, deadline, what, text);
    if (code == 0 && exchange->status != 0) {
        memset(exchange->data, 0, exchange->data_bytes);
    }
    return code;
}

/* ---- events ---------------------------------------------------------------------------------- */

int nvme_connection_request_event(struct nvme_connection *connection,
                                  const struct nvme_deadline *deadline, struct nvme_text *text)
{
    uint8_t head[NVME_HEAD_BYTES_MAX];
    uint8_t entry[NVME_ENTRY_BYTES];
    if (connection->unusable) {
        nvme_text_format(text, "an earlier command on the connection was given up");
        return DLFS_E_LOST;
    }
    nvme_entry_command(entry, &(dlfs_nvme_command){.opcode = NVME_ADMIN_ASYNC_EVENT});
    nvme_entry_finish(entry, NVME_EVENT_CID, NVME_NO_DATA, 0);
    struct iovec vector = {head, nvme_encode_command(&connection->terms, entry, 0, head)};
    const char *reason = "no answer in time";
    connection->event_requested = true;
    int code = send_all(connection, &vector, 1, deadline, &reason);
    connection->unusable = code < 0;
    if (code < 0) {
        nvme_text_format(text, "send an Asynchronous Event Request: %s", reason);
    }
    return code;
}

int nvme_connection_receive_event(struct nvme_connection *connection, const char **reason)
{
    if (connection->unusable) {
        *reason = "an earlier command on the connection was given up";
        return DLFS_E_LOST;
    }
    struct single none = {.connection = connection, .done = true};
    connection->receiver.sink = &single_sink;
    connection->receiver.context = &none;
    bool expected = connection->event_requested;
    ssize_t got;
    do {
        got = nvme_connection_receive(connection, connection->receiver.staging_bytes, reason);
        if (got > 0 && !expected) {
            *reason = "the target spoke on the admin queue unasked";
            got = DLFS_E_PROTOCOL;
        }
    } while (got > 0);
    connection->receiver.sink = NULL;
    connection->receiver.context = NULL;
    connection->unusable = got < 0;
    return (int)got;
}
