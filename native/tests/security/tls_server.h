/*
 * The server's side of a TLS 1.3 session with a pre-shared key, in the thread of the test: OpenSSL
 * with buffers in memory. The test moves their bytes from and to the client's socket, and may
 * change them on the way.
 */
#ifndef DLFS_TESTS_TLS_SERVER_H
#define DLFS_TESTS_TLS_SERVER_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include "check.h"
#include "security/tls.h"

struct tls_server {
    struct tls_psk psk;
    bool no_psk;   /* knows no key, but has a certificate */
    bool is_old;   /* speaks TLS 1.2 only */
    bool tampered; /* the last byte of everything that it sends is changed on its way */
    SSL_CTX *context;
    SSL *ssl;
    int socket; /* leads to the client */
};

static inline int server_find_psk(SSL *ssl, const unsigned char *identity, size_t identity_bytes,
                                  SSL_SESSION **out)
{
    const struct tls_server *server = SSL_get_app_data(ssl);
    static const unsigned char suites[2][2] = {{0x13, 0x01}, {0x13, 0x02}};
    *out = NULL;
    if (server->no_psk) {
        return 1;
    }
    if (identity_bytes != strlen(server->psk.identity) ||
        memcmp(identity, server->psk.identity, identity_bytes) != 0) {
        return 0;
    }
    SSL_SESSION *session = SSL_SESSION_new();
    const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, suites[server->psk.suite == NVME_HASH_SHA384]);
    CHECK(session != NULL && SSL_SESSION_set_cipher(session, cipher) == 1);
    CHECK_EQ(SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION), 1);
    CHECK_EQ(SSL_SESSION_set1_master_key(session, server->psk.bytes, server->psk.count), 1);
    *out = session;
    return 1;
}

static inline void server_use_certificate(SSL_CTX *context)
{
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *certificate = X509_new();
    CHECK(key != NULL && certificate != NULL);
    CHECK(X509_gmtime_adj(X509_getm_notBefore(certificate), -60) != NULL);
    CHECK(X509_gmtime_adj(X509_getm_notAfter(certificate), 3600) != NULL);
    CHECK_EQ(X509_set_pubkey(certificate, key), 1);
    CHECK(X509_sign(certificate, key, EVP_sha256()) > 0);
    CHECK_EQ(SSL_CTX_use_certificate(context, certificate), 1);
    CHECK_EQ(SSL_CTX_use_PrivateKey(context, key), 1);
    X509_free(certificate);
    EVP_PKEY_free(key);
}

static inline void server_start(struct tls_server *server, int socket)
{
    server->socket = socket;
    server->context = SSL_CTX_new(TLS_server_method());
    CHECK(server->context != NULL);
    int version = server->is_old ? TLS1_2_VERSION : TLS1_3_VERSION;
    CHECK_EQ(SSL_CTX_set_min_proto_version(server->context, version), 1);
    CHECK_EQ(SSL_CTX_set_max_proto_version(server->context, version), 1);
    SSL_CTX_set_psk_find_session_callback(server->context, server_find_psk);
    if (server->no_psk) {
        server_use_certificate(server->context);
    }
    server->ssl = SSL_new(server->context);
    CHECK(server->ssl != NULL && SSL_set_app_data(server->ssl, server) == 1);
    SSL_set_bio(server->ssl, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    SSL_set_accept_state(server->ssl);
}

static inline void server_stop(struct tls_server *server)
{
    SSL_free(server->ssl);
    SSL_CTX_free(server->context);
    ERR_clear_error();
}

/* Gives OpenSSL what the client has sent. */
static inline void server_take(struct tls_server *server)
{
    uint8_t bytes[65536];
    ssize_t got;
    while ((got = recv(server->socket, bytes, sizeof bytes, MSG_DONTWAIT)) > 0) {
        CHECK_EQ(BIO_write(SSL_get_rbio(server->ssl), bytes, (int)got), got);
    }
}

/* Takes up to `room` bytes that OpenSSL wants to send; returns their number. */
static inline int server_output(struct tls_server *server, uint8_t *bytes, int room)
{
    int got = BIO_read(SSL_get_wbio(server->ssl), bytes, room);
    return got > 0 ? got : 0;
}

/* Sends to the client what OpenSSL wants to send. */
static inline void server_give(struct tls_server *server)
{
    uint8_t bytes[65536];
    int count;
    while ((count = server_output(server, bytes, sizeof bytes)) > 0) {
        bytes[count - 1] ^= server->tampered;
        CHECK_EQ(send(server->socket, bytes, (size_t)count, MSG_NOSIGNAL), count);
    }
}

/* Runs the handshake between a client and a server until either side ends it. Returns the client's
 * result. */
static inline int server_handshake(struct tls_server *server, struct nvme_tls *client,
                                   char message[NVME_SECURITY_TEXT_BYTES])
{
    for (int round = 0; round < 10; round++) {
        int result = tls_handshake(client, message);
        if (result <= 0 && round > 0) {
            server_take(server);
            (void)SSL_do_handshake(server->ssl);
            server_give(server); /* tickets */
            return result;
        }
        CHECK_EQ(result, POLLIN);
        server_take(server);
        (void)SSL_do_handshake(server->ssl);
        server_give(server);
    }
    CHECK(false);
    return -1;
}

#endif
