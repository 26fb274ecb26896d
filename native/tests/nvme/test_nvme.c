/*
 * The initiator against a small target: reads and writes of all sizes, with and without digests and
 * SUCCESS flags; deeper queues than the target has; connections that end during operations; a
 * target that does not answer, or is gone; descriptors to wait on.
 */
#include <poll.h>

#include "device/device_tests.h"
#include "nvme/nvme_target.h"
#include "platform/clock.h"

#define COUNT 64u

static void test_sizes(dlfs_queue *queue)
{
    static const uint32_t sizes[] = {512, 4096, 8192, 8704, 131072, 131584, 1u << 20};
    uint8_t *out = aligned_memory(1u << 20);
    uint8_t *in = aligned_memory(1u << 20);
    for (uint32_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint32_t size = sizes[i];
        fill_pattern(out, size, i);
        CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, out, 512 * i, size), size);
        CHECK_EQ(do_operation(queue, DLFS_OP_READ, in, 512 * i, size), size);
        CHECK(memcmp(in, out, size) == 0);
    }
    free(out);
    free(in);
}

/* Reads count blocks concurrently; each arrives in its buffer even if connections end. */
static void read_all(dlfs_queue *queue, const uint8_t *expected, uint32_t length)
{
    uint8_t *in = aligned_memory((size_t)COUNT * length);
    dlfs_operation operations[COUNT];
    uint32_t submitted = 0;
    uint64_t seen = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        operations[i] = (dlfs_operation){in + (size_t)i * length, (uint64_t)i * length, length,
                                         DLFS_OP_READ, i};
    }
    while (seen != UINT64_MAX) {
        dlfs_completion completions[COUNT];
        int got = dlfs_queue_submit(queue, operations + submitted, COUNT - submitted);
        CHECK(got >= 0);
        submitted += (uint32_t)got;
        got = dlfs_queue_poll(queue, completions, COUNT, -1);
        CHECK(got > 0);
        for (int i = 0; i < got; i++) {
            CHECK_EQ(completions[i].result, length);
            CHECK((seen >> completions[i].tag & 1) == 0);
            seen |= UINT64_C(1) << completions[i].tag;
        }
    }
    CHECK(memcmp(in, expected, (size_t)COUNT * length) == 0);
    free(in);
}

static void test_honest(uint32_t digests, bool success, uint32_t piece_bytes)
{
    struct target *target = target_start(digests, success, piece_bytes);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    CHECK(strcmp(dlfs_device_kind(device), "nvme-tcp") == 0);
    CHECK_EQ(dlfs_device_size_bytes(device), TARGET_BYTES);
    CHECK_EQ(dlfs_device_block_bytes(device), TARGET_BLOCK);
    dlfs_queue *queue = make_queue(device, 40);
    test_sizes(queue);
    fill_pattern(target->memory, TARGET_BYTES, 5);
    read_all(queue, target->memory, 512);
    read_all(queue, target->memory, 65536);
    CHECK_EQ(dlfs_device_flush(device), 0);
    dlfs_nvme_status status;
    CHECK_EQ(dlfs_nvme_get_status(device, &status), 0);
    CHECK_EQ(status.connected, 1);
    CHECK_EQ(status.retries + status.reconnects + status.protocol_errors, 0);
    CHECK_EQ(status.transfer_bytes_max, 131072);
    CHECK_EQ(status.id_kind, DLFS_NVME_ID_NGUID);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    target_free(target);
}

/* The target closes the connection every few answers; all operations still succeed. */
static void test_drops(bool success)
{
    struct target *target = target_start(3, success, 65536);
    fill_pattern(target->memory, TARGET_BYTES, 6);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    dlfs_queue *queue = make_queue(device, 16);
    atomic_store(&target->drop_each, 50);
    for (uint32_t round = 0; round < 4; round++) {
        read_all(queue, target->memory, 4096);
        read_all(queue, target->memory, 65536);
    }
    test_sizes(queue);
    dlfs_nvme_status status;
    CHECK_EQ(dlfs_nvme_get_status(device, &status), 0);
    CHECK(status.reconnects > 0 && status.retries > 0);
    CHECK(status.last_error[0] != '\0');
    CHECK_EQ(status.timeouts + status.protocol_errors + status.digest_errors, 0);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    target_free(target);
}

/* An unanswered write ends in time and is not repeated; a read waits for the target. */
static void test_silence(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    config.timeout_ms = 300;
    config.reconnect_ms = 2500;
    dlfs_device *device = target_open(&config);
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *buffer = aligned_memory(4096);
    atomic_store(&target->mute, true);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, buffer, 0, 4096), DLFS_E_TIMEOUT);
    CHECK_EQ(atomic_load(&target->answers), 1);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 4096), DLFS_E_TIMEOUT);
    CHECK(atomic_load(&target->answers) > 2);
    atomic_store(&target->mute, false);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 4096), 4096);
    dlfs_nvme_status status;
    CHECK_EQ(dlfs_nvme_get_status(device, &status), 0);
    CHECK(status.timeouts >= 2);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(buffer);
    target_free(target);
}

/* If a target is gone for longer than the time limit, all operations in flight end as lost. */
static void test_loss(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    config.reconnect_ms = 100;
    dlfs_device *device = target_open(&config);
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *buffer = aligned_memory(16384);
    atomic_store(&target->mute, true);
    dlfs_operation operations[4];
    for (uint32_t i = 0; i < 4; i++) {
        operations[i] = (dlfs_operation){buffer + (size_t)i * 4096, 0, 4096, i % 2, i};
    }
    CHECK_EQ(dlfs_queue_submit(queue, operations, 4), 4);
    target_stop(target);
    uint32_t ended = 0;
    while (ended < 4) {
        dlfs_completion completions[4];
        int got = dlfs_queue_poll(queue, completions, 4, -1);
        CHECK(got > 0);
        for (int i = 0; i < got; i++) {
            CHECK_EQ(completions[i].result, DLFS_E_LOST);
        }
        ended += (uint32_t)got;
    }
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 4096), DLFS_E_LOST);
    CHECK_EQ(dlfs_device_flush(device), DLFS_E_LOST);
    dlfs_queue *other;
    CHECK_EQ(dlfs_queue_create(device, 4, &other), DLFS_E_LOST);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    char message[DLFS_NVME_TEXT_BYTES];
    CHECK_EQ(dlfs_device_open_nvme(&config, message, sizeof message, &device), DLFS_E_LOST);
    CHECK(strstr(message, "Connection refused") != NULL);
    free(buffer);
    target_free(target);
}

static void *stop_soon(void *stop)
{
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    atomic_store((_Atomic bool *)stop, true);
    return NULL;
}

/* A queue pair that is no longer wanted is not waited for, nor at the device's end. */
static void test_stopped_queue(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    _Atomic bool stop = false;
    pthread_t thread;
    dlfs_queue *queue;
    atomic_store(&target->mute_io, true);
    CHECK_EQ(pthread_create(&thread, NULL, stop_soon, &stop), 0);
    uint64_t before_ns = monotonic_ns();
    struct dlfs_connect_limit limit = {.stop = &stop};
    CHECK_EQ(dlfs_queue_make(device, 4, &limit, &queue), DLFS_E_TIMEOUT);
    CHECK_EQ(dlfs_queue_make(device, 4, &limit, &queue), DLFS_E_TIMEOUT);
    limit = (struct dlfs_connect_limit){.until_ns = monotonic_ns() + UINT64_C(1000000)};
    CHECK_EQ(dlfs_queue_make(device, 4, &limit, &queue), DLFS_E_TIMEOUT);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    CHECK(monotonic_ns() - before_ns < config.connect_ms / 2 * UINT64_C(1000000));
    CHECK_EQ(pthread_join(thread, NULL), 0);
    target_free(target);
}

/* A refused queue pair does not affect the others. */
static void test_refused_queue(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *buffer = aligned_memory(4096);
    atomic_store(&target->refuse_io, 0x4101);
    dlfs_queue *other;
    CHECK_EQ(dlfs_queue_create(device, 4, &other), -EREMOTEIO);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 4096), 4096);
    atomic_store(&target->refuse_io, 0);
    dlfs_queue *queues[7];
    for (uint32_t i = 0; i < 7; i++) {
        queues[i] = make_queue(device, 4);
    }
    CHECK_EQ(dlfs_queue_create(device, 4, &other), DLFS_E_LIMIT);
    for (uint32_t i = 0; i < 7; i++) {
        CHECK_EQ(do_operation(queues[i], DLFS_OP_READ, buffer, 0, 4096), 4096);
        dlfs_queue_destroy(queues[i]);
    }
    dlfs_nvme_status status;
    CHECK_EQ(dlfs_nvme_get_status(device, &status), 0);
    CHECK_EQ(status.reconnects, 0);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(buffer);
    target_free(target);
}

/* Waits on the descriptor only, while connections end. */
static void test_descriptor(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *buffer = aligned_memory(4096);
    struct pollfd waited = {.fd = dlfs_queue_descriptor(queue), .events = POLLIN};
    CHECK(waited.fd >= 0);
    CHECK_EQ(dlfs_queue_descriptor(queue), waited.fd);
    for (uint32_t round = 0; round < 60; round++) {
        dlfs_completion completion;
        dlfs_operation operation = {buffer, 0, 4096, DLFS_OP_READ, round};
        CHECK_EQ(dlfs_queue_submit(queue, &operation, 1), 1);
        if (round % 20 == 10) {
            target_drop(target);
        }
        int got = 0;
        while (got == 0) {
            CHECK(poll(&waited, 1, -1) == 1 || errno == EINTR);
            got = dlfs_queue_poll(queue, &completion, 1, 0);
        }
        CHECK_EQ(got, 1);
        CHECK_EQ(completion.tag, round);
        CHECK_EQ(completion.result, 4096);
    }
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(buffer);
    target_free(target);
}

int main(void)
{
    for (uint32_t digests = 0; digests < 4; digests++) {
        test_honest(digests, digests % 2 == 0, 1000 * 4);
        test_honest(digests, digests % 2 == 1, 65536);
    }
    test_drops(true);
    test_drops(false);
    test_silence();
    test_loss();
    test_refused_queue();
    test_stopped_queue();
    test_descriptor();
    return 0;
}
