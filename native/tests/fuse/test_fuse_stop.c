/*
 * Tests that a mount which is being stopped answers requests until no thread pushes samples into
 * the kernel's cache: the kernel lets that thread wait for them.
 *
 * The test is the kernel. It takes no messages for a while, as a kernel whose page is locked.
 * Exits with 77 (skipped) if libfuse is too old for a mount of the owner.
 */
#include <errno.h>
#include <linux/fuse.h>
#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "asleep.h"
#include "dlfs_fuse.h"
#include "fuse/owner.h"
#include "inode.h"
#include "mount.h"
#include "reader/reader_tests.h"

#define SKIPPED 77
#define SOCKET_BYTES 16384 /* the kernel doubles it: a few messages */
#define MESSAGE_BYTES_MAX (1u << 16)
#define READ_BYTES 32768u
#define WAIT_MS 20000

struct mount {
    dlfs_fuse *fuse;
    struct dataset dataset;
    dlfs_reader *reader;
    int kernel; /* the test's end of the socket */
    int server; /* the other one */
    uint64_t requests;
    pthread_t runner;
    struct owner owner;
    _Atomic bool ended;
};

static void *run(void *argument)
{
    struct mount *mount = argument;
    CHECK_EQ(dlfs_fuse_run(mount->fuse), 0);
    atomic_store(&mount->ended, true);
    (void)shutdown(mount->server, SHUT_RDWR);
    return NULL;
}

/* Takes a message. Returns its ID, 0 for a notification. */
static uint64_t take_message(struct mount *mount)
{
    static uint8_t message[MESSAGE_BYTES_MAX];
    struct fuse_out_header header;
    ssize_t got = recv(mount->kernel, message, sizeof message, 0);
    CHECK(got >= (ssize_t)sizeof header);
    memcpy(&header, message, sizeof header);
    CHECK_EQ(header.len, got);
    return header.unique;
}

static void mount_begin(struct mount *mount)
{
    struct request {
        struct fuse_in_header header;
        struct fuse_init_in init;
    } request = {.header = {.len = sizeof request, .opcode = FUSE_INIT, .unique = 2},
                 .init = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION}};
    const dlfs_fuse_dataset info = {.number = DATASET, .version = 1};
    int ends[2];
    const int room = SOCKET_BYTES;
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    CHECK_EQ(setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room), 0);
    mount->kernel = ends[0];
    mount->server = ends[1];
    const dlfs_fuse_config config = {.mountpoint = "/",
                                     .options = "ro",
                                     .file_mode = 0444,
                                     .threads_max = 4,
                                     .flags = DLFS_FUSE_NO_URING,
                                     .kernel = mount->server,
                                     .init = (const uint8_t *)&request,
                                     .init_bytes = sizeof request};
    CHECK_EQ(dlfs_fuse_mount(&config, &mount->fuse), 0);
    CHECK_EQ(take_message(mount), 2);
    CHECK_EQ(dlfs_fuse_add_dataset(mount->fuse, &info), 0);
    CHECK_EQ(pthread_create(&mount->runner, NULL, run, mount), 0);
    mount->owner = (struct owner){mount->fuse, mount->dataset.directory, mount->reader, false, 0};
    owner_begin(&mount->owner);
}

static uint64_t request_file(struct mount *mount, uint64_t index)
{
    struct request {
        struct fuse_in_header header;
        struct fuse_read_in read;
    } request = {.header = {.len = sizeof request,
                            .opcode = FUSE_READ,
                            .unique = 4 + 2 * mount->requests++,
                            .nodeid = inode_pack(DATASET, (struct tree_node){FILE_DEPTH, index})},
                 .read = {.size = READ_BYTES}};
    CHECK_EQ(send(mount->kernel, &request, sizeof request, 0), sizeof request);
    return request.header.unique;
}

/* Returns the memory of messages that the other end has not taken. */
static int sent_bytes(int end)
{
    int bytes = 0;
    CHECK_EQ(ioctl(end, SIOCOUTQ, &bytes), 0);
    return bytes;
}

static bool is_pushing(struct mount *mount)
{
    (void)pthread_mutex_lock(&mount->fuse->lock);
    bool pushing = mount->fuse->pushing;
    (void)pthread_mutex_unlock(&mount->fuse->lock);
    return pushing;
}

/*
 * Reads files in their order until a thread pushes others, and waits since the socket is full. A
 * file is requested when all threads sleep: most of what is read ahead is in memory by then, and
 * whether a thread pushes does not change until a message is taken.
 */
static void have_it_push(struct mount *mount)
{
    for (uint64_t index = 0; !is_pushing(mount); index++) {
        uint64_t unique = request_file(mount, index);
        while (take_message(mount) != unique) {
        }
        wait_until_others_sleep();
    }
}

/* Waits until the server has received all requests, or has ended since no thread pushes. */
static bool are_received(struct mount *mount)
{
    for (uint32_t tries = 0; tries < WAIT_MS; tries++) {
        if (sent_bytes(mount->kernel) == 0 || atomic_load(&mount->ended)) {
            return true;
        }
        (void)poll(NULL, 0, 1);
    }
    return false;
}

static void *stop(void *argument)
{
    struct mount *mount = argument;
    while (!atomic_load(&mount->ended)) {
        dlfs_fuse_stop(mount->fuse);
    }
    return NULL;
}

int main(void)
{
    pthread_t stopping;
    static struct mount mount;
    uint8_t message[MESSAGE_BYTES_MAX];
    if (dlfs_fuse_takes_connections() == 0) {
        return SKIPPED;
    }
    dataset_create(&mount.dataset, NULL);
    CHECK_EQ(dlfs_directory_attach_names(mount.dataset.directory, mount.dataset.names,
                                         mount.dataset.names_bytes),
             0);
    mount.reader = reader_over(&mount.dataset, 1 << 20, 8);
    mount_begin(&mount);
    have_it_push(&mount);
    dlfs_fuse_stop(mount.fuse);
    (void)request_file(&mount, COUNT / 2);
    CHECK(are_received(&mount));
    CHECK_EQ(pthread_create(&stopping, NULL, stop, &mount), 0);
    while (recv(mount.kernel, message, sizeof message, 0) > 0) {
    }
    CHECK_EQ(pthread_join(stopping, NULL), 0);
    CHECK_EQ(pthread_join(mount.runner, NULL), 0);
    owner_end(&mount.owner);
    CHECK_EQ(dlfs_fuse_withdraw_dataset(mount.fuse, DATASET), 0);
    dlfs_fuse_destroy(mount.fuse);
    CHECK_EQ(dlfs_reader_destroy(mount.reader), 0);
    dataset_destroy(&mount.dataset);
    (void)close(mount.kernel);
    (void)close(mount.server);
    return 0;
}
