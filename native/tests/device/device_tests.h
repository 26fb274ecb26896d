/* Shared by the tests of devices: opens each kind, and runs one operation. */
#ifndef DLFS_TESTS_DEVICE_TESTS_H
#define DLFS_TESTS_DEVICE_TESTS_H

#include "fault/fault.h"
#include <dlfs/dlfs.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "device/file.h"

#define DEVICE_BYTES (4u << 20)

static inline uint8_t *aligned_memory(size_t bytes)
{
    void *memory = NULL;
    CHECK_EQ(posix_memalign(&memory, 4096, bytes), 0);
    memset(memory, 0, bytes);
    return memory;
}

static inline void fill_pattern(uint8_t *memory, size_t bytes, uint32_t seed)
{
    uint32_t state = seed * 2654435761u + 1u;
    for (size_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        memory[i] = (uint8_t)(state >> 24);
    }
}

/* Makes a temporary file of zeros, and writes its name to path. */
static inline void make_file(char *path, size_t path_bytes, off_t bytes)
{
    const char *folder = getenv("TMPDIR");
    int length =
        snprintf(path, path_bytes, "%s/dlfs-device-XXXXXX", folder != NULL ? folder : "/tmp");
    CHECK(length > 0 && (size_t)length < path_bytes);
    int descriptor = mkstemp(path);
    CHECK(descriptor >= 0);
    CHECK_EQ(posix_fallocate(descriptor, 0, bytes), 0);
    CHECK_EQ(close(descriptor), 0);
}

static inline dlfs_device *open_file(const char *path, uint32_t flags, uint32_t engine)
{
    dlfs_device *device = NULL;
    CHECK_EQ(dlfs_device_open_file(path, flags, engine, &device), 0);
    return device;
}

static inline dlfs_device *make_memory(void)
{
    dlfs_device *device = NULL;
    CHECK_EQ(dlfs_device_create_memory(DEVICE_BYTES, 512, &device), 0);
    return device;
}

static inline dlfs_queue *make_queue(dlfs_device *device, uint32_t depth)
{
    dlfs_queue *queue = NULL;
    CHECK_EQ(dlfs_queue_create(device, depth, &queue), 0);
    return queue;
}

/* Submits one operation, waits for it, and returns its result. */
static inline int64_t do_operation(dlfs_queue *queue, uint32_t kind, void *buffer, uint64_t offset,
                                   uint32_t length)
{
    dlfs_operation operation = {
        .buffer = buffer, .offset_bytes = offset, .length_bytes = length, .kind = kind, .tag = 99};
    int accepted = dlfs_queue_submit(queue, &operation, 1);
    if (accepted < 0) {
        return accepted;
    }
    CHECK_EQ(accepted, 1);
    dlfs_completion completion;
    CHECK_EQ(dlfs_queue_poll(queue, &completion, 1, -1), 1);
    CHECK_EQ(completion.tag, 99);
    return completion.result;
}

/* Returns 1 if this kernel lets the test use io_uring. */
static inline int uring_works(void)
{
    return dlfs_uring_probe() == 0;
}

#endif
