/* Files alone: opening other objects, read-only, ends that are not whole blocks, files
 * that shrink. */
#include "device/device_tests.h"

#include <sys/stat.h>

static void test_open_errors(void)
{
    dlfs_device *device = NULL;
    CHECK_EQ(dlfs_device_open_file(NULL, 0, DLFS_ENGINE_AUTO, &device), -EINVAL);
    CHECK_EQ(dlfs_device_open_file("/dev/null", 0, 9, &device), -EINVAL);
    CHECK_EQ(dlfs_device_open_file("/dev/null", 4, DLFS_ENGINE_AUTO, &device), -EINVAL);
    CHECK_EQ(dlfs_device_open_file("/nonexistent/file", 0, DLFS_ENGINE_AUTO, &device), -ENOENT);
    CHECK_EQ(dlfs_device_open_file("/dev/null", 0, DLFS_ENGINE_AUTO, &device), -ENOTBLK);
    CHECK_EQ(dlfs_device_open_file(".", 0, DLFS_ENGINE_AUTO, &device), -ENOTBLK);
    CHECK_EQ(dlfs_device_open_file(".", DLFS_OPEN_WRITE, DLFS_ENGINE_AUTO, &device), -EISDIR);
    char path[4096];
    make_file(path, sizeof path, 4096);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(mkfifo(path, 0600), 0);
    CHECK_EQ(dlfs_device_open_file(path, 0, DLFS_ENGINE_AUTO, &device), -ENOTBLK);
    CHECK_EQ(unlink(path), 0);
    CHECK(device == NULL);
}

static void test_read_only(const char *path, uint32_t engine)
{
    dlfs_device *device = open_file(path, 0, engine);
    dlfs_queue *queue = make_queue(device, 2);
    uint8_t *buffer = aligned_memory(4096);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, buffer, 0, 4096), -EROFS);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_WRITE, buffer, 0, 4096, 4096), -EROFS);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 4096), 4096);
    free(buffer);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
}

/* The last, incomplete block of the file is not part of the device. */
static void test_odd_size(const char *path, uint32_t engine)
{
    CHECK_EQ(truncate(path, DEVICE_BYTES + 100), 0);
    dlfs_device *device = open_file(path, 0, engine);
    CHECK_EQ(dlfs_device_size_bytes(device), DEVICE_BYTES);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    CHECK_EQ(truncate(path, 0), 0);
    device = open_file(path, 0, engine);
    CHECK_EQ(dlfs_device_size_bytes(device), 0);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    CHECK_EQ(truncate(path, DEVICE_BYTES), 0);
}

static void test_shrunken(const char *path, uint32_t engine, off_t left)
{
    dlfs_device *device = open_file(path, 0, engine);
    dlfs_queue *queue = make_queue(device, 8);
    uint8_t *buffer = aligned_memory(DEVICE_BYTES);
    CHECK_EQ(truncate(path, left), 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 1u << 20, 8192), DLFS_E_TRUNCATED);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 2u << 20, 8192), DLFS_E_TRUNCATED);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, buffer, 0, DEVICE_BYTES, 65536),
             DLFS_E_TRUNCATED);
    CHECK_EQ(dlfs_queue_in_flight(queue), 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 4096), 4096);
    CHECK_EQ(truncate(path, DEVICE_BYTES), 0);
    free(buffer);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
}

static void test_poll_times(const char *path, uint32_t engine)
{
    dlfs_device *device = open_file(path, 0, engine);
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *buffer = aligned_memory(4096);
    dlfs_operation operation = {buffer, 0, 4096, DLFS_OP_READ, 7};
    dlfs_completion completion;
    CHECK_EQ(dlfs_queue_poll(queue, &completion, 1, 0), 0);
    for (int timeout_ms = -1; timeout_ms < 3; timeout_ms++) {
        CHECK_EQ(dlfs_queue_submit(queue, &operation, 1), 1);
        CHECK_EQ(dlfs_queue_poll(queue, &completion, 0, -1), 0);
        int got = 0;
        while (got == 0) {
            got = dlfs_queue_poll(queue, &completion, 1, timeout_ms);
        }
        CHECK_EQ(got, 1);
        CHECK_EQ(completion.tag, 7);
    }
    free(buffer);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
}

int main(void)
{
    char path[4096];
    make_file(path, sizeof path, DEVICE_BYTES);
    test_open_errors();
    uint32_t first = uring_works() ? DLFS_ENGINE_URING : DLFS_ENGINE_THREADS;
    for (uint32_t engine = first; engine <= DLFS_ENGINE_THREADS; engine++) {
        test_read_only(path, engine);
        test_odd_size(path, engine);
        test_shrunken(path, engine, (1 << 20) + 4096);
        test_shrunken(path, engine, (1 << 20) + 100);
        test_poll_times(path, engine);
    }
    CHECK_EQ(unlink(path), 0);
    return 0;
}
