/* Queue pairs of one device in many threads at once, and one queue pair that moves from thread to
 * thread. */
#include "device/device_tests.h"

#include <pthread.h>

#define THREADS 4u
#define ROUNDS 50u
#define SHARE_BYTES (DEVICE_BYTES / THREADS)

struct worker {
    dlfs_device *device;
    uint32_t number;
};

static void *worker_main(void *argument)
{
    const struct worker *worker = argument;
    dlfs_queue *queue = make_queue(worker->device, 8);
    uint8_t *out = aligned_memory(65536);
    uint8_t *in = aligned_memory(65536);
    uint64_t base = (uint64_t)worker->number * SHARE_BYTES;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t offset = base + (uint64_t)(round % (SHARE_BYTES / 65536)) * 65536;
        fill_pattern(out, 65536, worker->number * 1000 + round);
        CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_WRITE, out, offset, 65536, 4096), 0);
        CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, in, offset, 65536, 8192), 0);
        CHECK(memcmp(in, out, 65536) == 0);
    }
    free(in);
    free(out);
    dlfs_queue_destroy(queue);
    return NULL;
}

static void test_many(dlfs_device *device)
{
    pthread_t threads[THREADS];
    struct worker workers[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){device, i};
        CHECK_EQ(pthread_create(&threads[i], NULL, worker_main, &workers[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
}

struct moved {
    dlfs_queue *queue;
    uint8_t *buffer;
};

static void *submit_main(void *argument)
{
    const struct moved *moved = argument;
    dlfs_operation operations[4];
    for (uint32_t i = 0; i < 4; i++) {
        operations[i] = (dlfs_operation){moved->buffer + (size_t)i * 4096, (uint64_t)i * 4096, 4096,
                                         DLFS_OP_READ, i};
    }
    CHECK_EQ(dlfs_queue_submit(moved->queue, operations, 4), 4);
    return NULL;
}

/* The thread that submits ends before another one polls. */
static void test_moving(dlfs_device *device)
{
    struct moved moved = {make_queue(device, 4), aligned_memory((size_t)4 * 4096)};
    for (uint32_t round = 0; round < 20; round++) {
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, NULL, submit_main, &moved), 0);
        CHECK_EQ(pthread_join(thread, NULL), 0);
        for (int done = 0; done < 4;) {
            dlfs_completion completions[4];
            int got = dlfs_queue_poll(moved.queue, completions, 4, -1);
            CHECK(got > 0);
            for (int i = 0; i < got; i++) {
                CHECK_EQ(completions[i].result, 4096);
            }
            done += got;
        }
    }
    dlfs_queue_destroy(moved.queue);
    free(moved.buffer);
}

static void test_device(dlfs_device *device)
{
    test_many(device);
    test_moving(device);
    CHECK_EQ(dlfs_device_destroy(device), 0);
}

int main(void)
{
    char path[4096];
    make_file(path, sizeof path, DEVICE_BYTES);
    test_device(open_file(path, DLFS_OPEN_WRITE, DLFS_ENGINE_THREADS));
    if (uring_works()) {
        test_device(open_file(path, DLFS_OPEN_WRITE, DLFS_ENGINE_URING));
    }
    test_device(make_memory());
    CHECK_EQ(unlink(path), 0);
    return 0;
}
