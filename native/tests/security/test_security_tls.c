/*
 * TLS sessions of this host against OpenSSL's server: both suites, streams in odd pieces, key
 * updates, and every way in which one side refuses or a stream ends.
 */
#include "security/tls_server.h"

#include "dlfs/codes.h"

#define RECEIVE_BYTES 65536u
#define STREAM_BYTES 1000000u

struct pair {
    struct nvme_tls *client;
    struct tls_server server;
    int ends[2];
    char message[NVME_SECURITY_TEXT_BYTES];
};

static struct tls_psk make_psk(uint32_t hash, const char *subsystem_nqn)
{
    struct security_key key = {.hash = hash, .count = hash == NVME_HASH_SHA384 ? 48 : 32};
    struct tls_psk psk;
    memset(key.bytes, 0x5A, key.count);
    CHECK_EQ(tls_psk_derive(&key, &(struct tls_names){"nqn.host", subsystem_nqn}, 1, &psk), 0);
    return psk;
}

/* Makes a client and a server with keys, and completes the handshake. Returns the result.
 * behavior: a server that has not been started. */
static int pair_make_with(struct pair *pair, struct tls_server behavior,
                          const struct tls_psk *client, const struct tls_psk *server)
{
    *pair = (struct pair){.server = behavior};
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair->ends), 0);
    pair->server.no_psk = server == NULL;
    if (server != NULL) {
        pair->server.psk = *server;
    }
    server_start(&pair->server, pair->ends[1]);
    CHECK_EQ(tls_create(pair->ends[0], client, RECEIVE_BYTES, &pair->client), 0);
    return server_handshake(&pair->server, pair->client, pair->message);
}

static int pair_make(struct pair *pair, const struct tls_psk *client, const struct tls_psk *server)
{
    return pair_make_with(pair, (struct tls_server){.no_psk = false}, client, server);
}

static void pair_connect(struct pair *pair)
{
    struct tls_psk psk = make_psk(NVME_HASH_SHA256, "nqn.subsystem");
    CHECK_EQ(pair_make(pair, &psk, &psk), 0);
}

static void pair_free(struct pair *pair)
{
    tls_close(pair->client, false);
    server_stop(&pair->server);
    (void)close(pair->ends[0]);
    if (pair->ends[1] >= 0) {
        (void)close(pair->ends[1]);
    }
}

static ssize_t receive(struct pair *pair, void *bytes, size_t count, const char **reason)
{
    struct iovec vector = {bytes, count};
    return tls_receive(pair->client, &vector, 1, reason);
}

/* Checks that the next receive fails with a code and a reason. */
static void check_failure(struct pair *pair, int code, const char *expected)
{
    uint8_t bytes[16];
    const char *reason = "";
    CHECK_EQ(receive(pair, bytes, sizeof bytes, &reason), code);
    CHECK(strstr(reason, expected) != NULL);
    CHECK(tls_has_buffered(pair->client)); /* a thread that waits asks for the failure */
    struct iovec vector = {bytes, sizeof bytes};
    CHECK_EQ(tls_send(pair->client, &vector, 1, &reason), code);
}

/* Returns the byte of the stream at an offset. */
static uint8_t stream_byte(size_t at)
{
    return (uint8_t)(at * 31 + (at >> 12));
}

/* Sends a stream in vectors of changing sizes over a socket with little room. */
static void send_stream(struct pair *pair)
{
    static const size_t sizes[] = {72, 16384, 1, 40000, 4096, 8, 128000, 72, 72, 0, 5};
    static uint8_t stream[STREAM_BYTES];
    static uint8_t got[STREAM_BYTES];
    size_t sent = 0;
    size_t arrived = 0;
    for (size_t i = 0; i < sizeof stream; i++) {
        stream[i] = stream_byte(i);
    }
    while (arrived < sizeof stream) {
        struct iovec vectors[sizeof sizes / sizeof *sizes];
        size_t count = 0;
        size_t end = 0;
        for (size_t start = 0; count < sizeof sizes / sizeof *sizes; count++, start = end) {
            size_t size =
                sizes[count] < sizeof stream - start ? sizes[count] : sizeof stream - start;
            end = start + size;
            vectors[count] = (struct iovec){stream + start, size};
        }
        /* Drop the sent bytes from the vectors, as a queue pair does. */
        size_t first = 0;
        size_t skip = sent % end;
        while (skip > 0 && skip >= vectors[first].iov_len) {
            skip -= vectors[first++].iov_len;
        }
        vectors[first].iov_base = (uint8_t *)vectors[first].iov_base + skip;
        vectors[first].iov_len -= skip;
        for (size_t i = first; i < count; i++) {
            size_t offset = sent - sent % end + (size_t)((uint8_t *)vectors[i].iov_base - stream);
            size_t left = offset < sizeof stream ? sizeof stream - offset : 0;
            vectors[i].iov_base = stream + (left > 0 ? offset : 0);
            vectors[i].iov_len = vectors[i].iov_len < left ? vectors[i].iov_len : left;
        }
        const char *reason = "";
        ssize_t done = tls_send(pair->client, vectors + first, count - first, &reason);
        CHECK(done >= 0);
        sent += (size_t)done;
        server_take(&pair->server);
        int bytes;
        while ((bytes = SSL_read(pair->server.ssl, got + arrived, (int)(sizeof got - arrived))) >
               0) {
            arrived += (size_t)bytes;
        }
    }
    CHECK_EQ(sent, sizeof stream);
    CHECK(memcmp(stream, got, sizeof stream) == 0);
}

/* Receives a stream into two vectors, as a receiver does: data, then headers of the next. */
static void receive_stream(struct pair *pair)
{
    static uint8_t stream[STREAM_BYTES];
    size_t given = 0;
    size_t arrived = 0;
    for (size_t i = 0; i < sizeof stream; i++) {
        stream[i] = stream_byte(i);
    }
    while (arrived < sizeof stream) {
        uint8_t data[20000];
        uint8_t heads[128];
        struct iovec vectors[2] = {{data, sizeof data}, {heads, sizeof heads}};
        size_t piece = given * 7 % 50000 + 1;
        piece = piece < sizeof stream - given ? piece : sizeof stream - given;
        if (piece > 0 && given - arrived < 60000) {
            CHECK_EQ(SSL_write(pair->server.ssl, stream + given, (int)piece), piece);
            server_give(&pair->server);
            given += piece;
        }
        const char *reason = "";
        ssize_t got = tls_receive(pair->client, vectors, 2, &reason);
        CHECK(got >= 0);
        for (size_t i = 0; i < (size_t)got; i++) {
            uint8_t byte = i < sizeof data ? data[i] : heads[i - sizeof data];
            CHECK_EQ(byte, stream_byte(arrived + i));
        }
        arrived += (size_t)got;
    }
    CHECK(!tls_has_buffered(pair->client));
}

static void test_streams(uint32_t hash)
{
    struct tls_psk psk = make_psk(hash, "nqn.subsystem");
    struct pair pair;
    int room = 30000;
    CHECK_EQ(pair_make(&pair, &psk, &psk), 0);
    CHECK(strcmp(SSL_get_cipher_name(pair.server.ssl),
                 hash == NVME_HASH_SHA384 ? "TLS_AES_256_GCM_SHA384" : "TLS_AES_128_GCM_SHA256") ==
          0);
    CHECK_EQ(setsockopt(pair.ends[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room), 0);
    send_stream(&pair);
    receive_stream(&pair);
    /* Key updates of both directions, which the server asks for. */
    CHECK_EQ(SSL_key_update(pair.server.ssl, SSL_KEY_UPDATE_REQUESTED), 1);
    receive_stream(&pair);
    send_stream(&pair);
    CHECK_EQ(SSL_get_key_update_type(pair.server.ssl), SSL_KEY_UPDATE_NONE);
    pair_free(&pair);
}

/* The server asks for a key update while this host has a record that the socket did not take. */
static void test_key_update_while_full(void)
{
    static uint8_t sent[STREAM_BYTES];
    static uint8_t got[STREAM_BYTES];
    struct pair pair;
    const char *reason = "";
    int room = 30000;
    size_t given = 0;
    size_t arrived = 0;
    uint8_t byte = 0;
    pair_connect(&pair);
    CHECK_EQ(setsockopt(pair.ends[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room), 0);
    for (size_t i = 0; i < sizeof sent; i++) {
        sent[i] = stream_byte(i);
    }
    while (arrived < sizeof sent) {
        struct iovec vector = {sent + given, sizeof sent - given};
        ssize_t done = 1;
        while (done > 0 && vector.iov_len > 0) {
            done = tls_send(pair.client, &vector, 1, &reason);
            CHECK(done >= 0);
            given += (size_t)done;
            vector = (struct iovec){sent + given, sizeof sent - given};
        }
        CHECK_EQ(SSL_key_update(pair.server.ssl, SSL_KEY_UPDATE_REQUESTED), 1);
        CHECK_EQ(SSL_write(pair.server.ssl, "x", 1), 1);
        server_give(&pair.server);
        CHECK_EQ(receive(&pair, &byte, 1, &reason), 1);
        CHECK_EQ(byte, 'x');
        server_take(&pair.server);
        int bytes;
        while ((bytes = SSL_read(pair.server.ssl, got + arrived, (int)(sizeof got - arrived))) >
               0) {
            arrived += (size_t)bytes;
        }
    }
    CHECK(memcmp(sent, got, sizeof sent) == 0);
    pair_free(&pair);
}

static void test_buffered(void)
{
    static uint8_t record[16000];
    struct pair pair;
    const char *reason = "";
    pair_connect(&pair);
    CHECK_EQ(SSL_write(pair.server.ssl, record, sizeof record), sizeof record);
    CHECK_EQ(SSL_write(pair.server.ssl, record, sizeof record), sizeof record);
    uint8_t bytes[40000];
    int count = server_output(&pair.server, bytes, sizeof bytes);
    /* All but the last byte: the second record is not whole. */
    CHECK_EQ(send(pair.ends[1], bytes, (size_t)count - 1, 0), count - 1);
    CHECK_EQ(receive(&pair, record, 100, &reason), 100);
    CHECK(tls_has_buffered(pair.client));
    CHECK_EQ(receive(&pair, record, sizeof record, &reason), sizeof record - 100);
    CHECK(!tls_has_buffered(pair.client)); /* a thread sleeps until the rest comes */
    CHECK_EQ(receive(&pair, record, sizeof record, &reason), 0);
    CHECK_EQ(send(pair.ends[1], bytes + count - 1, 1, 0), 1);
    CHECK_EQ(receive(&pair, record, sizeof record, &reason), sizeof record);
    pair_free(&pair);
}

static void test_refusals(void)
{
    struct tls_psk psk = make_psk(NVME_HASH_SHA256, "nqn.subsystem");
    struct tls_psk other = make_psk(NVME_HASH_SHA256, "nqn.other");
    struct tls_psk wrong = psk;
    struct tls_psk longer = make_psk(NVME_HASH_SHA384, "nqn.subsystem");
    struct pair pair;
    wrong.bytes[0] ^= 1;
    const struct tls_psk *keys[] = {&other, &wrong, &longer};
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQ(pair_make(&pair, &psk, keys[i]), DLFS_E_AUTH);
        CHECK(strstr(pair.message, "the target refused identity NVMe1R01") != NULL);
        pair_free(&pair);
    }
    CHECK_EQ(pair_make(&pair, &psk, NULL), DLFS_E_AUTH);
    CHECK(strstr(pair.message, "this host refused") != NULL);
    pair_free(&pair);
}

/* A target that knows TLS 1.2 only, and a handshake that is changed on its way. */
static void test_downgrade_and_tampering(void)
{
    struct tls_psk psk = make_psk(NVME_HASH_SHA256, "nqn.subsystem");
    for (int tampered = 0; tampered < 2; tampered++) {
        struct pair pair;
        struct tls_server behavior = {.is_old = tampered == 0, .tampered = tampered == 1};
        const struct tls_psk *known = tampered == 1 ? &psk : NULL;
        CHECK_EQ(pair_make_with(&pair, behavior, &psk, known), DLFS_E_AUTH);
        CHECK(strstr(pair.message, tampered == 1 ? "this host refused" : "protocol version") !=
              NULL);
        pair_free(&pair);
    }
}

/* Answers a ClientHello with other bytes and closes the connection. */
static void test_no_tls(const void *answer, size_t count, int code, const char *expected)
{
    struct tls_psk psk = make_psk(NVME_HASH_SHA256, "nqn.subsystem");
    char message[NVME_SECURITY_TEXT_BYTES] = "";
    struct nvme_tls *client = NULL;
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    CHECK_EQ(tls_create(ends[0], &psk, RECEIVE_BYTES, &client), 0);
    CHECK_EQ(tls_handshake(client, message), POLLIN);
    CHECK_EQ(send(ends[1], answer, count, 0), count);
    CHECK_EQ(shutdown(ends[1], SHUT_WR), 0);
    CHECK_EQ(tls_handshake(client, message), code);
    CHECK(strstr(message, expected) != NULL);
    tls_close(client, true);
    (void)close(ends[0]);
    (void)close(ends[1]);
}

/* The target ends without reading the ClientHello, as one does that is restarted: a reset. */
static void test_reset(void)
{
    struct tls_psk psk = make_psk(NVME_HASH_SHA256, "nqn.subsystem");
    char message[NVME_SECURITY_TEXT_BYTES] = "";
    struct nvme_tls *client = NULL;
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    CHECK_EQ(tls_create(ends[0], &psk, RECEIVE_BYTES, &client), 0);
    CHECK_EQ(tls_handshake(client, message), POLLIN);
    (void)close(ends[1]);
    CHECK_EQ(tls_handshake(client, message), DLFS_E_LOST);
    CHECK(strstr(message, "Connection reset by peer in the TLS handshake") != NULL);
    tls_close(client, false);
    (void)close(ends[0]);
}

static void test_ends(void)
{
    struct pair pair;
    uint8_t bytes[256];
    pair_connect(&pair);
    CHECK_EQ(SSL_write(pair.server.ssl, "tampered", 8), 8);
    int count = server_output(&pair.server, bytes, sizeof bytes);
    bytes[count - 1] ^= 1;
    CHECK_EQ(send(pair.ends[1], bytes, (size_t)count, 0), count);
    check_failure(&pair, DLFS_E_AUTH, "this host refused a TLS record");
    pair_free(&pair);

    pair_connect(&pair); /* data, then an end within the next record */
    CHECK_EQ(SSL_write(pair.server.ssl, "cut short", 9), 9);
    server_give(&pair.server);
    CHECK_EQ(SSL_write(pair.server.ssl, "cut short", 9), 9);
    count = server_output(&pair.server, bytes, sizeof bytes);
    CHECK_EQ(send(pair.ends[1], bytes, (size_t)count / 2, 0), count / 2);
    CHECK_EQ(close(pair.ends[1]), 0);
    pair.ends[1] = -1;
    const char *reason = "";
    CHECK_EQ(receive(&pair, bytes, sizeof bytes, &reason), 9);
    check_failure(&pair, DLFS_E_LOST, "within the TLS stream");
    pair_free(&pair);

    pair_connect(&pair);
    CHECK_EQ(SSL_shutdown(pair.server.ssl), 0);
    server_give(&pair.server);
    check_failure(&pair, DLFS_E_LOST, "the target closed the connection");
    pair_free(&pair);

    pair_connect(&pair); /* a record that this host sends is changed on its way */
    struct iovec vector = {bytes, 100};
    CHECK_EQ(tls_send(pair.client, &vector, 1, &reason), 100);
    CHECK_EQ(recv(pair.ends[1], bytes, sizeof bytes, 0), 100 + 5 + 17);
    bytes[50] ^= 1;
    CHECK_EQ(BIO_write(SSL_get_rbio(pair.server.ssl), bytes, 122), 122);
    CHECK(SSL_read(pair.server.ssl, bytes, sizeof bytes) < 0);
    server_give(&pair.server);
    check_failure(&pair, DLFS_E_AUTH, "the target ended the TLS session (alert: bad record mac)");
    pair_free(&pair);

    pair_connect(&pair); /* this host closes in good order */
    server_take(&pair.server);
    tls_close(pair.client, true);
    pair.client = NULL;
    server_take(&pair.server);
    CHECK(SSL_read(pair.server.ssl, bytes, sizeof bytes) <= 0);
    CHECK((SSL_get_shutdown(pair.server.ssl) & SSL_RECEIVED_SHUTDOWN) != 0);
    pair_free(&pair);
}

int main(void)
{
    static const uint8_t terminate[24] = {3, 0, 24};
    static const uint8_t close_notify[] = {21, 3, 3, 0, 2, 1, 0};
    test_streams(NVME_HASH_SHA256);
    test_streams(NVME_HASH_SHA384);
    test_key_update_while_full();
    test_buffered();
    test_refusals();
    test_downgrade_and_tampering();
    test_no_tls(terminate, sizeof terminate, DLFS_E_AUTH, "answered a TLS handshake without TLS");
    test_no_tls("", 0, NVME_AUTH_CLOSED, "closed the connection in the TLS handshake");
    test_no_tls(close_notify, sizeof close_notify, NVME_AUTH_CLOSED,
                "closed the connection in the TLS handshake");
    test_reset();
    test_ends();
    return 0;
}
