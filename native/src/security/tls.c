/* TLS sessions over sockets; see security/tls.h. */
#include "security/tls.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <openssl/err.h>
#include <openssl/ssl.h>

#include "dlfs/codes.h"
#include "nvme/socket.h"
#include "security/chap.h"
#include "security/secret.h"

/* Most data of one TLS record (RFC 8446, 5.1). */
#define RECORD_BYTES_MAX 16384u
/* Records after which the keys of this direction are renewed: RFC 8446, 5.5, allows 2^24.5. */
#define RECORDS_BEFORE_UPDATE (UINT32_C(1) << 24)
/* Content types of the records with which a TLS server may answer a ClientHello. */
#define RECORD_CHANGE_CIPHER_SPEC 20u
#define RECORD_HANDSHAKE 22u
/* Alerts by which a peer reports that a record or a key failed its check (RFC 8446, 6.2). */
#define ALERT_BAD_RECORD_MAC 20
#define ALERT_DECRYPT_ERROR 51

struct nvme_tls {
    int descriptor;
    int socket_error; /* errno of the socket's last failure; 0: none */
    bool ended;       /* the socket's stream has ended */
    bool answered;    /* the peer has sent something */
    uint8_t first;    /* the first byte that it sent */
    bool drained;     /* the last receive found no whole record */
    bool wants_room;  /* a message of TLS itself waits for room in the socket */
    uint32_t records; /* records sent with the present keys */
    int failure;      /* < 0: the session has failed with this code, and reason says why */
    BIO_METHOD *method;
    SSL_CTX *context;
    SSL *ssl;
    struct tls_psk psk; /* wiped after the handshake */
    char reason[NVME_SECURITY_TEXT_BYTES];
    uint8_t gathered[RECORD_BYTES_MAX];
};

/* ---- the socket, as OpenSSL uses it ---------------------------------------------------------- */

static int socket_read(BIO *bio, char *bytes, int count)
{
    struct nvme_tls *tls = BIO_get_data(bio);
    ssize_t got;
    BIO_clear_retry_flags(bio);
    do {
        got = recv(tls->descriptor, bytes, (size_t)count, 0);
    } while (got < 0 && errno == EINTR);
    if (got > 0 && !tls->answered) {
        tls->answered = true;
        tls->first = (uint8_t)bytes[0];
    }
    if (got < 0 && errno == EAGAIN) {
        BIO_set_retry_read(bio);
    } else if (got < 0) {
        tls->socket_error = errno;
    }
    tls->ended = tls->ended || got == 0;
    return (int)got;
}

static int socket_write(BIO *bio, const char *bytes, int count)
{
    struct nvme_tls *tls = BIO_get_data(bio);
    ssize_t sent;
    BIO_clear_retry_flags(bio);
    do {
        sent = send(tls->descriptor, bytes, (size_t)count, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0 && (errno == ENOBUFS || errno == ENOMEM)) {
        (void)poll(NULL, 0, 1); /* no event reports memory: a caller would not sleep */
        errno = EAGAIN;
    }
    if (sent < 0 && errno == EAGAIN) {
        BIO_set_retry_write(bio);
    } else if (sent < 0) {
        tls->socket_error = errno;
    }
    return (int)sent;
}

static long socket_control(BIO *bio, int command, long number, void *pointer)
{
    const struct nvme_tls *tls = BIO_get_data(bio);
    (void)number;
    (void)pointer;
    return command == BIO_CTRL_FLUSH || (command == BIO_CTRL_EOF && tls->ended);
}

static BIO *make_bio(struct nvme_tls *tls)
{
    tls->method = BIO_meth_new(BIO_TYPE_SOURCE_SINK, "dlfs socket");
    if (tls->method == NULL || BIO_meth_set_read(tls->method, socket_read) != 1 ||
        BIO_meth_set_write(tls->method, socket_write) != 1 ||
        BIO_meth_set_ctrl(tls->method, socket_control) != 1) {
        return NULL;
    }
    BIO *bio = BIO_new(tls->method);
    if (bio != NULL) {
        BIO_set_data(bio, tls);
        BIO_set_init(bio, 1);
    }
    return bio;
}

/* ---- sessions -------------------------------------------------------------------------------- */

/* Gives OpenSSL the key and its identity. It calls this once, and again after a retry request. */
static int use_psk(SSL *ssl, const EVP_MD *digest, const unsigned char **identity,
                   size_t *identity_bytes, SSL_SESSION **out)
{
    static const unsigned char suites[2][2] = {{0x13, 0x01}, {0x13, 0x02}};
    struct nvme_tls *tls = SSL_get_app_data(ssl);
    const unsigned char *suite = suites[tls->psk.suite == NVME_HASH_SHA384];
    const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, suite);
    SSL_SESSION *session = SSL_SESSION_new();
    if (cipher == NULL || session == NULL || SSL_SESSION_set_cipher(session, cipher) != 1 ||
        SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1 ||
        SSL_SESSION_set1_master_key(session, tls->psk.bytes, tls->psk.count) != 1) {
        SSL_SESSION_free(session);
        return 0;
    }
    if (digest != NULL && SSL_CIPHER_get_handshake_digest(cipher) != digest) {
        SSL_SESSION_free(session); /* the server chose a suite that the key is not for */
        session = NULL;
    }
    *identity = (const unsigned char *)tls->psk.identity;
    *identity_bytes = strlen(tls->psk.identity);
    *out = session;
    return 1;
}

static bool configure(struct nvme_tls *tls, uint32_t receive_bytes)
{
    const char *suites =
        tls->psk.suite == NVME_HASH_SHA384 ? "TLS_AES_256_GCM_SHA384" : "TLS_AES_128_GCM_SHA256";
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    tls->context = context;
    if (context == NULL || SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_ciphersuites(context, suites) != 1) {
        return false;
    }
    (void)SSL_CTX_set_mode(context,
                           SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    (void)SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL); /* without roots: refuses certificates */
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, receive_bytes);
    SSL_CTX_set_psk_use_session_callback(context, use_psk);
    tls->ssl = SSL_new(context);
    BIO *bio = tls->ssl != NULL ? make_bio(tls) : NULL;
    if (bio == NULL || SSL_set_app_data(tls->ssl, tls) != 1) {
        BIO_free(bio);
        return false;
    }
    SSL_set_bio(tls->ssl, bio, bio);
    SSL_set_connect_state(tls->ssl);
    return true;
}

int tls_create(int descriptor, const struct tls_psk *psk, uint32_t receive_bytes,
               struct nvme_tls **out)
{
    /* No handler at exit: a thread may still use a session while the process ends. */
    if (OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT | OPENSSL_INIT_LOAD_SSL_STRINGS, NULL) != 1) {
        return -ENOMEM;
    }
    struct nvme_tls *tls = secret_allocate(sizeof *tls);
    if (tls == NULL) {
        return -ENOMEM;
    }
    tls->descriptor = descriptor;
    tls->psk = *psk;
    if (!configure(tls, receive_bytes)) {
        tls_close(tls, false);
        return -ENOMEM;
    }
    *out = tls;
    return 0;
}

int tls_open(const struct nvme_tls_config *config, int descriptor, struct nvme_tls **out,
             char message[NVME_SECURITY_TEXT_BYTES])
{
    const struct security_key_query query = {.kind = SECURITY_KEY_TLS,
                                             .name = config->key,
                                             .host_nqn = config->host_nqn,
                                             .subsystem_nqn = config->subsystem_nqn};
    const struct tls_names names = {config->host_nqn, config->subsystem_nqn};
    struct secrets {
        struct security_key key;
        struct tls_psk psk;
    } * secrets;
    int code = -ENOMEM;
    (void)snprintf(message, NVME_SECURITY_TEXT_BYTES, "no memory for a TLS session");
    if (config->generated != NULL) {
        return tls_create(descriptor, &config->generated->psk, config->receive_bytes, out);
    }
    secrets = secret_allocate(sizeof *secrets);
    if (secrets != NULL) {
        code = security_key_find(&query, &secrets->key, message);
    }
    if (code == 0) {
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES,
                       "TLS identity of version %u: the NQNs are too long, or OpenSSL failed",
                       config->identity);
        code = tls_psk_derive(&secrets->key, &names, config->identity, &secrets->psk);
    }
    if (code == 0) {
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES, "no memory for a TLS session");
        code = tls_create(descriptor, &secrets->psk, config->receive_bytes, out);
    }
    secret_free(secrets, sizeof *secrets);
    return code;
}

void tls_close(struct nvme_tls *tls, bool orderly)
{
    if (tls == NULL) {
        return;
    }
    ERR_clear_error();
    if (orderly) {
        (void)SSL_shutdown(tls->ssl); /* sends close_notify, as far as the socket takes it */
    }
    SSL_free(tls->ssl);
    SSL_CTX_free(tls->context);
    BIO_meth_free(tls->method);
    ERR_clear_error();
    secret_free(tls, sizeof *tls);
}

/* ---- failures -------------------------------------------------------------------------------- */

/* Returns the number of the alert that the peer sent, or -1. */
static int received_alert(unsigned long error)
{
    int reason = ERR_GET_REASON(error);
    return reason > SSL_AD_REASON_OFFSET && reason < SSL_AD_REASON_OFFSET + 256
               ? reason - SSL_AD_REASON_OFFSET
               : -1;
}

/*
 * Returns the code of an error after the handshake, and writes tls->reason. OpenSSL's first error
 * is the cause: after it, the alert that it sends may fail at the socket too.
 */
static int explain_failure(struct nvme_tls *tls, int kind)
{
    unsigned long error = ERR_peek_error();
    int alert = received_alert(error);
    char *reason = tls->reason;
    size_t room = sizeof tls->reason;
    if (kind == SSL_ERROR_ZERO_RETURN) {
        (void)snprintf(reason, room, "the target closed the connection");
        return DLFS_E_LOST;
    }
    if (ERR_GET_REASON(error) == SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC) {
        (void)snprintf(reason, room, "this host refused a TLS record that was changed on its way");
        return DLFS_E_AUTH;
    }
    if (alert >= 0) {
        (void)snprintf(reason, room, "the target ended the TLS session (alert: %s)",
                       SSL_alert_desc_string_long(alert));
        return alert == ALERT_BAD_RECORD_MAC || alert == ALERT_DECRYPT_ERROR ? DLFS_E_AUTH
                                                                             : DLFS_E_LOST;
    }
    if (tls->ended) {
        (void)snprintf(reason, room, "the target closed the connection within the TLS stream");
        return DLFS_E_LOST;
    }
    if (tls->socket_error != 0) {
        (void)snprintf(reason, room, "%s", strerror(tls->socket_error));
        return nvme_socket_code(tls->socket_error);
    }
    const char *why = ERR_reason_error_string(error);
    (void)snprintf(reason, room, "the target violates TLS: %s", why != NULL ? why : "unknown");
    return DLFS_E_PROTOCOL;
}

/* Returns the code of a handshake that failed, and writes the reason: which side refused, and why.
 */
static int handshake_failure(const struct nvme_tls *tls, int kind,
                             char message[NVME_SECURITY_TEXT_BYTES])
{
    size_t room = NVME_SECURITY_TEXT_BYTES;
    unsigned long error = ERR_peek_error();
    int alert = received_alert(error);
    if (tls->answered &&
        (tls->first < RECORD_CHANGE_CIPHER_SPEC || tls->first > RECORD_HANDSHAKE)) {
        (void)snprintf(message, room,
                       "this host refused: the port answered a TLS handshake without TLS");
    } else if (alert >= 0) {
        (void)snprintf(message, room,
                       "the target refused identity %.8s: it has no TLS key for this host and "
                       "subsystem, or another one (alert: %s)",
                       tls->psk.identity, SSL_alert_desc_string_long(alert));
    } else if (tls->socket_error != 0) {
        (void)snprintf(message, room,
                       "%s in the TLS handshake: the target was restarted, or refuses TLS on this "
                       "port",
                       strerror(tls->socket_error));
        return nvme_socket_code(tls->socket_error);
    } else if (kind == SSL_ERROR_ZERO_RETURN || tls->ended) {
        (void)snprintf(message, room,
                       "the target refused identity %.8s, or was restarted: it closed the "
                       "connection in the TLS handshake (another TLS key, no key for this host and "
                       "subsystem, or a port without TLS)",
                       tls->psk.identity);
        return NVME_AUTH_CLOSED;
    } else {
        const char *why = ERR_reason_error_string(error);
        (void)snprintf(message, room,
                       "this host refused: the target does not prove that it has the TLS key (%s)",
                       why != NULL ? why : "unknown");
    }
    return DLFS_E_AUTH;
}

int tls_handshake(struct nvme_tls *tls, char message[NVME_SECURITY_TEXT_BYTES])
{
    ERR_clear_error();
    int result = SSL_do_handshake(tls->ssl);
    int kind = result == 1 ? SSL_ERROR_NONE : SSL_get_error(tls->ssl, result);
    if (kind == SSL_ERROR_WANT_READ) {
        return POLLIN;
    }
    if (kind == SSL_ERROR_WANT_WRITE) {
        return POLLOUT;
    }
    if (kind != SSL_ERROR_NONE) {
        return handshake_failure(tls, kind, message);
    }
    if (SSL_session_reused(tls->ssl) != 1) { /* true of a handshake with a pre-shared key only */
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES,
                       "this host refused: the target completed the handshake without the TLS key");
        return DLFS_E_AUTH;
    }
    static const unsigned char zeros[TLS_PSK_BYTES_MAX];
    (void)SSL_SESSION_set1_master_key(SSL_get_session(tls->ssl), zeros, tls->psk.count);
    secret_wipe(tls->psk.bytes, sizeof tls->psk.bytes);
    return 0;
}

/* ---- data ------------------------------------------------------------------------------------ */

/*
 * Notes a failure of SSL_read or SSL_write: of lack of bytes or room, or the end of the session.
 * Bytes that were moved before it are reported first, and the failure at the next call.
 */
static void note_failure(struct nvme_tls *tls, int kind)
{
    if (kind != SSL_ERROR_WANT_READ && kind != SSL_ERROR_WANT_WRITE) {
        tls->failure = explain_failure(tls, kind);
    }
}

/*
 * Returns the bytes of the next record: those of a large vector, or a copy of the bytes of several.
 * After a record was not sent for want of room, OpenSSL requires the same bytes again, perhaps with
 * more behind them. This holds, since vectors are only added at the end.
 */
static struct iovec next_record(struct nvme_tls *tls, const struct iovec *vectors, size_t count,
                                size_t skipped)
{
    struct iovec first = {(uint8_t *)vectors->iov_base + skipped, vectors->iov_len - skipped};
    if (count == 1 || first.iov_len >= RECORD_BYTES_MAX) {
        return first;
    }
    size_t used = 0;
    for (size_t i = 0; i < count && used < RECORD_BYTES_MAX; i++) {
        struct iovec part = i == 0 ? first : vectors[i];
        size_t room = RECORD_BYTES_MAX - used;
        size_t bytes = part.iov_len < room ? part.iov_len : room;
        memcpy(tls->gathered + used, part.iov_base, bytes);
        used += bytes;
    }
    return (struct iovec){tls->gathered, used};
}

ssize_t tls_send(struct nvme_tls *tls, const struct iovec *vectors, size_t count,
                 const char **reason)
{
    size_t total = 0;
    size_t skipped = 0; /* bytes of the first vector that are sent */
    ERR_clear_error();
    while (count > 0 && tls->failure == 0) {
        struct iovec record = next_record(tls, vectors, count, skipped);
        size_t sent = 0;
        if (record.iov_len > 0 &&
            SSL_write_ex(tls->ssl, record.iov_base, record.iov_len, &sent) != 1) {
            note_failure(tls, SSL_get_error(tls->ssl, 0));
            break;
        }
        if (++tls->records == RECORDS_BEFORE_UPDATE) {
            tls->records = 0;
            (void)SSL_key_update(tls->ssl, SSL_KEY_UPDATE_NOT_REQUESTED);
        }
        total += sent;
        skipped += sent;
        while (count > 0 && skipped >= vectors->iov_len) {
            skipped -= vectors->iov_len;
            vectors++;
            count--;
        }
    }
    *reason = tls->reason;
    return total > 0 || tls->failure == 0 ? (ssize_t)total : tls->failure;
}

/* Reads into a vector until it is full or no record is left. Returns true if it is full. */
static bool fill_vector(struct nvme_tls *tls, const struct iovec *vector, size_t *total)
{
    size_t used = 0;
    while (used < vector->iov_len) {
        size_t got = 0;
        if (SSL_read_ex(tls->ssl, (uint8_t *)vector->iov_base + used, vector->iov_len - used,
                        &got) != 1) {
            int kind = SSL_get_error(tls->ssl, 0);
            tls->drained = true;
            tls->wants_room = kind == SSL_ERROR_WANT_WRITE;
            note_failure(tls, kind);
            return false;
        }
        used += got;
        *total += got;
        if (used < vector->iov_len && SSL_has_pending(tls->ssl) == 0) {
            return false; /* another system call would mostly find nothing */
        }
    }
    return true;
}

ssize_t tls_receive(struct nvme_tls *tls, const struct iovec *vectors, size_t count,
                    const char **reason)
{
    size_t total = 0;
    ERR_clear_error();
    tls->drained = false;
    tls->wants_room = false;
    for (size_t i = 0; i < count && tls->failure == 0; i++) {
        if (!fill_vector(tls, &vectors[i], &total)) {
            break;
        }
    }
    *reason = tls->reason;
    return total > 0 || tls->failure == 0 ? (ssize_t)total : tls->failure;
}

bool tls_has_buffered(const struct nvme_tls *tls)
{
    bool pending = tls->ssl != NULL && !tls->drained && SSL_has_pending(tls->ssl) == 1;
    return pending || tls->failure < 0;
}

bool tls_wants_room(const struct nvme_tls *tls)
{
    return tls->wants_room;
}
