/*
 * A small NVMe/TCP target in memory, on 127.0.0.1, for tests of the initiator. It follows the
 * specification except for the faults of struct target. Each connection has a thread, which blocks.
 */
#ifndef DLFS_TESTS_NVME_TARGET_H
#define DLFS_TESTS_NVME_TARGET_H

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "nvme/nvme_tests.h"

#define TARGET_BYTES (4u << 20)
#define TARGET_BLOCK 512u
#define TARGET_NQN "nqn.2024-01.org.example:native"
#define TARGET_EARLY_MAX 16u
#define TARGET_CONNECTIONS_MAX 256u

struct target {
    int listener;
    uint16_t port;
    uint32_t digests;        /* digests that it grants */
    bool success;            /* reads end with the SUCCESS flag, else with a response */
    uint32_t piece_bytes;    /* most data of one C2HData */
    atomic_uint answers;     /* reads and writes answered */
    atomic_uint drop_each;   /* closes the connection instead of every n-th answer; 0: never */
    atomic_bool mute;        /* reads and writes are not answered */
    atomic_uint refuse_io;   /* status for Connect of I/O queues */
    atomic_bool mute_io;     /* Connect of I/O queues is not answered */
    atomic_bool no_identify; /* closes the connection instead of answering Identify Namespace */
    atomic_bool stopping;
    pthread_t acceptor;
    pthread_mutex_t lock;
    uint32_t count;
    int sockets[TARGET_CONNECTIONS_MAX];
    pthread_t threads[TARGET_CONNECTIONS_MAX];
    uint8_t *memory;
};

/* A command that was received while the target waited for data of another one. */
struct early {
    uint8_t header[NVME_HEAD_BYTES_MAX];
    uint8_t data[8192];
    uint32_t data_bytes;
};

/* One connection and its negotiated terms. */
struct peer {
    struct target *target;
    int socket;
    struct nvme_terms terms;
    bool admin;
    uint8_t *out;
    struct early early[TARGET_EARLY_MAX];
    uint32_t early_first;
    uint32_t early_last;
    const struct early *now; /* the present command, if it is one of these */
    uint8_t entry[NVME_ENTRY_BYTES];
    uint16_t cid;
};

static inline bool peer_read(struct peer *peer, void *bytes, size_t count)
{
    return recv(peer->socket, bytes, count, MSG_WAITALL) == (ssize_t)count;
}

static inline bool peer_write(struct peer *peer, const void *bytes, size_t count)
{
    return send(peer->socket, bytes, count, MSG_NOSIGNAL) == (ssize_t)count;
}

static inline bool peer_answer(struct peer *peer, uint16_t status, uint64_t value)
{
    return peer_write(peer, peer->out,
                      make_response(&peer->terms, peer->out, peer->cid, status, value));
}

/* Sends data for the host, and the completion. */
static inline bool peer_give(struct peer *peer, const uint8_t *data, uint32_t bytes)
{
    uint32_t done = 0;
    bool success = peer->target->success && !peer->admin;
    while (done < bytes) {
        uint32_t piece = bytes - done;
        piece = piece < peer->target->piece_bytes ? piece : peer->target->piece_bytes;
        uint8_t flags = done + piece == bytes ? NVME_PDU_LAST : 0;
        flags |= flags != 0 && success ? NVME_PDU_SUCCESS : 0;
        uint32_t length =
            make_data(&peer->terms, peer->out, peer->cid, done, data + done, piece, flags, 0);
        if (!peer_write(peer, peer->out, length)) {
            return false;
        }
        done += piece;
    }
    return success || peer_answer(peer, 0, 0);
}

/* Reads a PDU's data and digest into data. */
static inline bool peer_take(struct peer *peer, uint8_t *data, uint32_t bytes)
{
    uint8_t digest[NVME_DIGEST_BYTES];
    if (!peer_read(peer, data, bytes)) {
        return false;
    }
    if (!peer->terms.data_digest) {
        return true;
    }
    return peer_read(peer, digest, sizeof digest) &&
           nvme_get32(digest) == dlfs_crc32c(0, data, bytes);
}

/* Reads a header: its length without the digest, which must be right; 0 at the end. */
static inline uint32_t peer_header(struct peer *peer, uint8_t *bytes)
{
    if (!peer_read(peer, bytes, 8)) {
        return 0;
    }
    CHECK(bytes[2] == NVME_COMMAND_BYTES || bytes[2] == NVME_PDU_HEADER_BYTES);
    if (!peer_read(peer, bytes + 8, bytes[2] - 8u)) {
        return 0;
    }
    uint32_t header = bytes[2];
    uint32_t length = header;
    if (peer->terms.header_digest) {
        if (!peer_read(peer, bytes + header, 4)) {
            return 0;
        }
        CHECK_EQ(nvme_get32(bytes + header), dlfs_crc32c(0, bytes, header));
        length += 4;
    }
    if (bytes[3] > length && !peer_read(peer, bytes + length, bytes[3] - length)) {
        return 0;
    }
    return header;
}

/* Puts a command aside, with the data in its capsule. */
static inline bool peer_put_aside(struct peer *peer, const uint8_t *header)
{
    struct early *early = &peer->early[peer->early_last++ % TARGET_EARLY_MAX];
    CHECK(peer->early_last - peer->early_first <= TARGET_EARLY_MAX);
    CHECK_EQ(header[0], NVME_PDU_COMMAND);
    memcpy(early->header, header, sizeof early->header);
    early->data_bytes = header[3] > 0 ? nvme_get32(header + 8 + 32) : 0;
    CHECK(early->data_bytes <= sizeof early->data);
    return early->data_bytes == 0 || peer_take(peer, early->data, early->data_bytes);
}

/* Asks for the data of a write, in two R2Ts, each answered in PDUs of up to 4096 bytes. */
static inline bool peer_fetch(struct peer *peer, uint8_t *data, uint32_t bytes)
{
    uint8_t header[NVME_HEAD_BYTES_MAX];
    uint32_t half = bytes / 2 / 4 * 4;
    for (uint32_t start = 0; start < bytes; start += start == 0 ? half : bytes) {
        uint32_t end = start == 0 ? half : bytes;
        if (!peer_write(peer, peer->out,
                        make_r2t(&peer->terms, peer->out, peer->cid, 0, start, end - start))) {
            return false;
        }
        for (uint32_t at = start; at < end;) {
            if (peer_header(peer, header) == 0) {
                return false;
            }
            if (header[0] != NVME_PDU_H2C_DATA) {
                if (!peer_put_aside(peer, header)) {
                    return false;
                }
                continue;
            }
            uint32_t piece = nvme_get32(header + 16);
            CHECK(nvme_get32(header + 12) == at && piece > 0 && piece <= end - at);
            CHECK_EQ((header[1] & NVME_PDU_LAST) != 0, at + piece == end);
            if (!peer_take(peer, data + at, piece)) {
                return false;
            }
            at += piece;
        }
    }
    return true;
}

static inline bool peer_identify(struct peer *peer)
{
    uint8_t page[4096] = {0};
    uint8_t what = peer->entry[40];
    if (what == 0 && atomic_load(&peer->target->no_identify)) {
        return false;
    }
    if (what == 1) {
        page[77] = 5; /* MDTS: 128 KiB */
        nvme_put32(page + 516, 1);
        nvme_put16(page + 386, 1); /* CQT: 1 ms */
        page[525] = 1;
        nvme_put32(page + 1792, (8192 + 64) / 16);
        nvme_put32(page + 1796, 1);
    } else if (what == 0 && nvme_get32(peer->entry + 4) == 1) {
        nvme_put64(page, TARGET_BYTES / TARGET_BLOCK);
        page[104] = 7; /* NGUID */
        page[128 + 2] = 9;
    }
    return peer_give(peer, page, sizeof page);
}

static inline bool peer_fabrics(struct peer *peer)
{
    uint8_t type = peer->entry[4];
    uint32_t offset = nvme_get32(peer->entry + 44);
    if (type == 0x01) {
        uint8_t data[1024];
        if (!peer_take(peer, data, sizeof data)) {
            return false;
        }
        peer->admin = nvme_get16(peer->entry + 42) == 0;
        uint16_t status = peer->admin ? 0 : (uint16_t)atomic_load(&peer->target->refuse_io);
        if (strcmp((const char *)data + 256, TARGET_NQN) != 0) {
            status = 0x4182;
        }
        if (!peer->admin && atomic_load(&peer->target->mute_io)) {
            return true;
        }
        return peer_answer(peer, status, 1);
    }
    if (type == 0x00) {
        return peer_answer(peer, 0, 0);
    }
    /* CAP: MQES 15, TO 1, NVM command set. */
    return peer_answer(peer, 0, offset == 0 ? 15 | 1u << 24 | UINT64_C(1) << 37 : 1);
}

static inline bool peer_transfer(struct peer *peer, const uint8_t *header)
{
    struct target *target = peer->target;
    uint64_t offset = nvme_get64(peer->entry + 40) * TARGET_BLOCK;
    uint32_t bytes = (nvme_get32(peer->entry + 48) + 1) * TARGET_BLOCK;
    CHECK(offset + bytes <= TARGET_BYTES && bytes <= 131072);
    CHECK_EQ(nvme_get32(peer->entry + 32), bytes);
    unsigned answers = atomic_fetch_add(&target->answers, 1) + 1;
    unsigned each = atomic_load(&target->drop_each);
    if (each > 0 && answers % each == 0) {
        return false;
    }
    uint8_t *data = malloc(bytes);
    CHECK(data != NULL);
    bool fine;
    if (atomic_load(&target->mute)) {
        fine = header[3] == 0 || peer_take(peer, data, bytes);
    } else if (peer->entry[0] == 0x02) {
        (void)pthread_mutex_lock(&target->lock);
        memcpy(data, target->memory + offset, bytes);
        (void)pthread_mutex_unlock(&target->lock);
        fine = peer_give(peer, data, bytes);
    } else {
        if (header[3] == 0) {
            fine = peer_fetch(peer, data, bytes);
        } else if (peer->now != NULL) {
            memcpy(data, peer->now->data, bytes);
            fine = true;
        } else {
            fine = peer_take(peer, data, bytes);
        }
        if (fine) {
            (void)pthread_mutex_lock(&target->lock);
            memcpy(target->memory + offset, data, bytes);
            (void)pthread_mutex_unlock(&target->lock);
            fine = peer_answer(peer, 0, 0);
        }
    }
    free(data);
    return fine;
}

static inline bool peer_command(struct peer *peer, const uint8_t *header)
{
    memcpy(peer->entry, header + 8, NVME_ENTRY_BYTES);
    peer->cid = nvme_get16(peer->entry + 2);
    uint8_t opcode = peer->entry[0];
    if (opcode == 0x7F) {
        return peer_fabrics(peer);
    }
    if (!peer->admin) {
        return opcode == 0 ? peer_answer(peer, 0, 0) : peer_transfer(peer, header);
    }
    switch (opcode) {
    case 0x06:
        return peer_identify(peer);
    case 0x09:
        return peer_answer(peer, 0, 7 | 7 << 16); /* 8 queues */
    default:
        return peer_answer(peer, 0, 0);
    }
}

/* Serves the next command; false at the end. */
static inline bool peer_serve(struct peer *peer, uint8_t *header)
{
    peer->now = NULL;
    if (peer->early_first == peer->early_last) {
        return peer_header(peer, header) > 0 && peer_command(peer, header);
    }
    struct early now = peer->early[peer->early_first++ % TARGET_EARLY_MAX];
    peer->now = &now;
    return peer_command(peer, now.header);
}

static inline void *peer_main(void *argument)
{
    struct peer *peer = argument;
    uint8_t header[NVME_HEAD_BYTES_MAX] = {0};
    peer->out = malloc(TARGET_BYTES);
    CHECK(peer->out != NULL);
    if (peer_read(peer, header, NVME_IC_BYTES)) {
        uint8_t agreed = header[11];
        memset(header, 0, NVME_IC_BYTES);
        header[0] = NVME_PDU_ICRESP;
        header[2] = NVME_IC_BYTES;
        nvme_put32(header + 4, NVME_IC_BYTES);
        header[10] = 7; /* CPDA: 32 bytes */
        header[11] = agreed & (uint8_t)peer->target->digests;
        nvme_put32(header + 12, 4096);
        peer->terms = make_terms((header[11] & 1) != 0, (header[11] & 2) != 0);
        if (peer_write(peer, header, NVME_IC_BYTES)) {
            while (peer_serve(peer, header)) {
            }
        }
    }
    (void)shutdown(peer->socket, SHUT_RDWR);
    free(peer->out);
    free(peer);
    return NULL;
}

static inline void *acceptor_main(void *argument)
{
    struct target *target = argument;
    while (!atomic_load(&target->stopping)) {
        int accepted = accept(target->listener, NULL, NULL);
        if (accepted < 0) {
            continue;
        }
        struct peer *peer = calloc(1, sizeof *peer);
        int on = 1;
        CHECK_EQ(setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), 0);
        CHECK(peer != NULL && target->count < TARGET_CONNECTIONS_MAX);
        *peer = (struct peer){.target = target, .socket = accepted};
        (void)pthread_mutex_lock(&target->lock);
        target->sockets[target->count] = accepted;
        CHECK_EQ(pthread_create(&target->threads[target->count++], NULL, peer_main, peer), 0);
        (void)pthread_mutex_unlock(&target->lock);
    }
    return NULL;
}

static inline struct target *target_start(uint32_t digests, bool success, uint32_t piece_bytes)
{
    struct target *target = calloc(1, sizeof *target);
    CHECK(target != NULL);
    target->memory = calloc(1, TARGET_BYTES);
    CHECK(target->memory != NULL);
    target->digests = digests;
    target->success = success;
    target->piece_bytes = piece_bytes;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    target->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(target->listener >= 0);
    CHECK_EQ(bind(target->listener, (struct sockaddr *)&address, length), 0);
    CHECK_EQ(listen(target->listener, 64), 0);
    CHECK_EQ(getsockname(target->listener, (struct sockaddr *)&address, &length), 0);
    target->port = ntohs(address.sin_port);
    CHECK_EQ(pthread_mutex_init(&target->lock, NULL), 0);
    CHECK_EQ(pthread_create(&target->acceptor, NULL, acceptor_main, target), 0);
    return target;
}

/* Ends all connections there are. */
static inline void target_drop(struct target *target)
{
    (void)pthread_mutex_lock(&target->lock);
    for (uint32_t i = 0; i < target->count; i++) {
        (void)shutdown(target->sockets[i], SHUT_RDWR);
    }
    (void)pthread_mutex_unlock(&target->lock);
}

/* Refuses connections from now on, and ends those there are. */
static inline void target_stop(struct target *target)
{
    atomic_store(&target->stopping, true);
    (void)shutdown(target->listener, SHUT_RDWR);
    (void)pthread_join(target->acceptor, NULL);
    (void)close(target->listener);
    target_drop(target);
}

static inline void target_free(struct target *target)
{
    if (!atomic_load(&target->stopping)) {
        target_stop(target);
    }
    for (uint32_t i = 0; i < target->count; i++) {
        (void)pthread_join(target->threads[i], NULL);
        (void)close(target->sockets[i]);
    }
    (void)pthread_mutex_destroy(&target->lock);
    free(target->memory);
    free(target);
}

/* Returns the configuration with which tests open it. */
static inline dlfs_nvme_config target_config(const struct target *target)
{
    return (dlfs_nvme_config){
        .hosts = {"127.0.0.1"},
        .ports = {target->port},
        .path_count = 1,
        .nsid = 1,
        .subsystem_nqn = TARGET_NQN,
        .host_nqn = "nqn.2014-08.org.nvmexpress:uuid:6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a",
        .host_id = {1},
        .digests = target->digests,
        .timeout_ms = 10000,
        .connect_ms = 10000,
        .keepalive_ms = 15000,
        .reconnect_ms = 20000,
        .flags = DLFS_OPEN_WRITE};
}

static inline dlfs_device *target_open(const dlfs_nvme_config *config)
{
    char message[DLFS_NVME_TEXT_BYTES] = "";
    dlfs_device *device = NULL;
    int code = dlfs_device_open_nvme(config, message, sizeof message, &device);
    if (code < 0) {
        fprintf(stderr, "open: %d, %s\n", code, message);
    }
    CHECK_EQ(code, 0);
    return device;
}

#endif
