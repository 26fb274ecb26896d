/* A queue pair across incarnations: link updates, and operations that start again. */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "asleep.h"
#include "check.h"
#include "nvme/recovery.h"

static struct nvme_association *make_association(void)
{
    struct nvme_config config = {.path_count = 1, .timeout_ms = 1000, .connect_ms = 1000};
    struct nvme_association *association;
    CHECK_EQ(nvme_association_create(&config, &association), 0);
    association->links = calloc(1, sizeof *association->links);
    CHECK(association->links != NULL);
    association->links->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(association->links->wake >= 0);
    return association;
}

/* ---- link updates ---------------------------------------------------------------------------- */

struct reader {
    struct nvme_association *association;
    _Atomic pid_t id;
};

static void *take_update(void *argument)
{
    struct reader *reader = argument;
    atomic_store(&reader->id, gettid());
    (void)nvme_link_take_update(reader->association, reader->association->links, 0);
    return NULL;
}

/* Taking an update clears the signal and its wake-up, even if it waits between the two. */
static void test_a_wake_up_is_taken_with_its_signal(void)
{
    struct reader reader = {.association = make_association()};
    struct nvme_link *link = reader.association->links;
    pthread_t thread;
    (void)pthread_mutex_lock(&reader.association->lock);
    CHECK_EQ(pthread_create(&thread, NULL, take_update, &reader), 0);
    while (atomic_load(&reader.id) == 0) {
    }
    wait_until_asleep(reader.id); /* it waits for the lock */
    nvme_link_signal(link);
    (void)pthread_mutex_unlock(&reader.association->lock);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(link->signal, 0);
    struct pollfd watched = {.fd = link->wake, .events = POLLIN};
    CHECK_EQ(poll(&watched, 1, 0), 0);
    nvme_association_destroy(reader.association);
}

/* ---- operations ------------------------------------------------------------------------------ */

static struct nvme_connection *make_connection(int *other)
{
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    struct nvme_connection *connection = calloc(1, sizeof *connection);
    CHECK(connection != NULL);
    connection->descriptor = ends[0];
    *other = ends[1];
    return connection;
}

/*
 * A write of which one command has completed and the next is not sent yet starts again from its
 * beginning: the completed part may be lost with the volatile cache of its controller.
 */
static void test_a_write_starts_again_from_its_beginning(void)
{
    struct nvme_operation operation = {.kind = DLFS_OP_WRITE, .length_bytes = 8192};
    struct nvme_command command = {.in_flight = false};
    struct nvme_queue *queue = calloc(1, sizeof *queue);
    int other;
    CHECK(queue != NULL);
    queue->association = make_association();
    queue->connection = make_connection(&other);
    queue->operations = &operation;
    queue->commands = &command;
    queue->command_count = 1;
    queue->epoll = -1;
    nvme_list_clear(&queue->waiting);
    nvme_list_clear(&queue->delayed);
    nvme_operation_enqueue(queue, 0);
    operation.issued_bytes = 4096;
    nvme_queue_fail(queue, DLFS_E_LOST, "a test");
    CHECK(queue->connection == NULL);
    CHECK_EQ(queue->waiting.first, 0);
    CHECK_EQ(operation.issued_bytes, 0);
    nvme_association_destroy(queue->association);
    (void)close(other);
    free(queue);
}

int main(void)
{
    test_a_wake_up_is_taken_with_its_signal();
    test_a_write_starts_again_from_its_beginning();
    return 0;
}
