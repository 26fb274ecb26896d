/*
 * Tests requests that the kernel does not send: truncated ones, names without an end, lengths that
 * are wrong, unknown operations, and random bytes. Each that has an ID gets one reply, and the
 * server goes on. Also what INIT negotiates, and the end by DESTROY.
 *
 * The test is the kernel, at the other end of a socket.
 */
#include <errno.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dlfs_fuse.h"
#include "fuse/owner.h"
#include "inode.h"
#include "reader/reader_tests.h"

#define MESSAGE_BYTES_MAX (1u << 18)
#define RANDOM_REQUESTS 20000u
#define OPCODES 64u

struct served {
    dlfs_fuse *fuse;
    struct dataset dataset;
    dlfs_reader *reader;
    int kernel; /* the test's end of the socket */
    int server;
    uint64_t last_unique;
    int result; /* of dlfs_fuse_run */
    pthread_t runner;
    struct owner owner;
};

struct message {
    struct fuse_in_header header;
    uint8_t body[512];
};

static uint8_t reply[MESSAGE_BYTES_MAX];

static void *run(void *argument)
{
    struct served *served = argument;
    served->result = dlfs_fuse_run(served->fuse);
    return NULL;
}

/* Takes a reply and returns its header; its data is in `reply`. */
static struct fuse_out_header take_reply(struct served *served)
{
    struct fuse_out_header header;
    ssize_t got = recv(served->kernel, reply, sizeof reply, 0);
    CHECK(got >= (ssize_t)sizeof header);
    memcpy(&header, reply, sizeof header);
    CHECK_EQ(header.len, got);
    return header;
}

static void begin(struct served *served, uint32_t minor)
{
    struct request {
        struct fuse_in_header header;
        struct fuse_init_in init;
    } request = {.header = {.len = sizeof request, .opcode = FUSE_INIT, .unique = 2},
                 .init = {.major = FUSE_KERNEL_VERSION,
                          .minor = minor,
                          .max_readahead = 1 << 17,
                          .flags = 0x7fffffff}};
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    served->kernel = ends[0];
    served->server = ends[1];
    served->last_unique = 2;
    const dlfs_fuse_config config = {.file_mode = 0444,
                                     .threads_max = 4,
                                     .flags = DLFS_FUSE_NO_URING | DLFS_FUSE_KEPT,
                                     .kernel = served->server,
                                     .init = (const uint8_t *)&request,
                                     .init_bytes = sizeof request};
    CHECK_EQ(dlfs_fuse_create(&config, &served->fuse), 0);
    CHECK_EQ(dlfs_fuse_add_dataset(served->fuse, DATASET, 1, 0, 0), 0);
    CHECK_EQ(pthread_create(&served->runner, NULL, run, served), 0);
    served->owner = (struct owner){
        .fuse = served->fuse, .directory = served->dataset.directory, .reader = served->reader};
    owner_begin(&served->owner);
}

static void end(struct served *served)
{
    CHECK_EQ(pthread_join(served->runner, NULL), 0);
    owner_end(&served->owner);
    CHECK_EQ(dlfs_fuse_withdraw_dataset(served->fuse, DATASET), 0);
    dlfs_fuse_destroy(served->fuse);
    (void)close(served->kernel);
    (void)close(served->server);
}

/* Sends `bytes` of a request, and returns the error of the reply. */
static int ask(struct served *served, struct message *message, size_t bytes)
{
    served->last_unique += 2;
    message->header.unique = served->last_unique;
    CHECK_EQ(send(served->kernel, message, bytes, 0), bytes);
    struct fuse_out_header header = take_reply(served);
    CHECK_EQ(header.unique, message->header.unique);
    return -header.error;
}

static struct message message_of(uint32_t opcode, uint64_t inode, size_t body_bytes)
{
    return (struct message){
        .header = {.len = (uint32_t)(sizeof(struct fuse_in_header) + body_bytes),
                   .opcode = opcode,
                   .nodeid = inode}};
}

static void check_init(struct served *served)
{
    struct fuse_init_out init;
    struct fuse_out_header header = take_reply(served);
    CHECK(header.unique == 2 && header.error == 0 && header.len == sizeof header + sizeof init);
    memcpy(&init, reply + sizeof header, sizeof init);
    CHECK_EQ(init.major, FUSE_KERNEL_VERSION);
    CHECK_EQ(init.minor, 31);
    CHECK_EQ(init.max_readahead, 1 << 17);
    CHECK_EQ(init.flags, 0x4040a031);
    CHECK_EQ(init.flags2, 0);
    CHECK_EQ(init.max_write, 1 << 20);
    CHECK_EQ(init.max_pages, 256);
    CHECK_EQ(init.max_background, 64);
}

static void test_truncated(struct served *served)
{
    const size_t head = sizeof(struct fuse_in_header);
    uint64_t file = inode_pack(DATASET, (struct tree_node){FILE_DEPTH, 1});
    uint64_t top = inode_pack(DATASET, (struct tree_node){DATASET_DEPTH, 0});
    struct message message = message_of(FUSE_READ, file, sizeof(struct fuse_read_in));
    const struct fuse_read_in read = {.size = 4096};
    memcpy(message.body, &read, sizeof read);
    CHECK_EQ(ask(served, &message, message.header.len), 0);
    for (size_t bytes = head; bytes < message.header.len; bytes++) {
        CHECK_EQ(ask(served, &message, bytes), EINVAL);
    }
    for (size_t body = 0; body < sizeof read; body++) {
        message.header.len = (uint32_t)(head + body);
        CHECK_EQ(ask(served, &message, head + body), EINVAL);
    }
    message.header.len = UINT32_MAX;
    CHECK_EQ(ask(served, &message, head + sizeof read), EINVAL);
    message = message_of(FUSE_LOOKUP, top, 300);
    memset(message.body, 'x', sizeof message.body);
    CHECK_EQ(ask(served, &message, message.header.len), EINVAL); /* no end */
    message.body[299] = 0;
    CHECK_EQ(ask(served, &message, message.header.len), ENAMETOOLONG);
    message.body[0] = 0;
    CHECK_EQ(ask(served, &message, message.header.len), EINVAL); /* empty */
    message = message_of(FUSE_LOOKUP, top, 0);
    CHECK_EQ(ask(served, &message, message.header.len), EINVAL);
    message = message_of(FUSE_GETXATTR, top, sizeof(struct fuse_getxattr_in));
    CHECK_EQ(ask(served, &message, message.header.len), EINVAL);
    message = message_of(FUSE_WRITE, file, 0);
    CHECK_EQ(ask(served, &message, message.header.len), EROFS);
    message = message_of(1000, file, 0);
    CHECK_EQ(ask(served, &message, message.header.len), ENOSYS);
    CHECK_EQ(send(served->kernel, &message, head - 1, 0), head - 1); /* gets no reply */
    message = message_of(FUSE_FORGET, file, 0);
    CHECK_EQ(send(served->kernel, &message, head, 0), head); /* nor does this */
}

static uint64_t next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407;
    return *state >> 33;
}

static bool has_reply(uint32_t opcode)
{
    return opcode != FUSE_FORGET && opcode != FUSE_BATCH_FORGET && opcode != FUSE_INTERRUPT &&
           opcode != FUSE_NOTIFY_REPLY && opcode != FUSE_DESTROY;
}

static void test_random_bytes(struct served *served)
{
    uint64_t state = 7;
    for (uint32_t i = 0; i < RANDOM_REQUESTS; i++) {
        struct message message;
        for (size_t at = 0; at < sizeof message.body; at++) {
            message.body[at] = (uint8_t)next_random(&state);
        }
        uint64_t node = next_random(&state) << 31 ^ next_random(&state);
        uint32_t depth = (uint32_t)(next_random(&state) % 3);
        struct tree_node known = {depth, next_random(&state) % (2 * COUNT)};
        size_t body = next_random(&state) % 64;
        uint32_t opcode = (uint32_t)(next_random(&state) % OPCODES);
        message.header =
            message_of(opcode, i % 2 == 0 ? inode_pack(DATASET, known) : node, body).header;
        if (i % 4 == 1) { /* a reply of moderate length */
            memset(message.body + 20, 0, 4);
        }
        if (has_reply(opcode)) {
            (void)ask(served, &message, message.header.len);
        }
    }
}

int main(void)
{
    static struct served served;
    dataset_create(&served.dataset, NULL);
    CHECK_EQ(dlfs_directory_attach_names(served.dataset.directory, served.dataset.names,
                                         served.dataset.names_bytes),
             0);
    served.reader = reader_over(&served.dataset, 1 << 20, 8);
    begin(&served, 45);
    check_init(&served);
    test_truncated(&served);
    test_random_bytes(&served);
    struct message message = message_of(FUSE_DESTROY, 0, 0);
    CHECK_EQ(ask(&served, &message, message.header.len), 0);
    end(&served);
    CHECK_EQ(served.result, 0);
    begin(&served, 22); /* too old */
    CHECK_EQ(take_reply(&served).error, -EPROTO);
    end(&served);
    CHECK_EQ(served.result, -EPROTO);
    CHECK_EQ(dlfs_reader_destroy(served.reader), 0);
    dataset_destroy(&served.dataset);
    return 0;
}
