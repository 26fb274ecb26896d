/*
 * A forked child may destroy queue pairs and devices that it inherited, with operations in flight
 * too, without waiting and without harm to the parent; anything else with them is refused.
 */
#include "asleep.h"
#include "device/device_tests.h"

#include <sys/wait.h>

#define COUNT 8u

/* ThreadSanitizer cannot follow threads that a forked child of a process with threads starts. */
#ifdef __SANITIZE_THREAD__
#define CHILD_MAY_START_THREADS 0
#else
#define CHILD_MAY_START_THREADS 1
#endif

static void child_uses(dlfs_queue *queue, dlfs_device *device)
{
    alarm(60); /* a hang must end the test */
    uint8_t *buffer = aligned_memory(4096);
    dlfs_completion completion;
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 4096), DLFS_E_CLOSED);
    CHECK_EQ(dlfs_queue_poll(queue, &completion, 1, -1), DLFS_E_CLOSED);
    CHECK_EQ(dlfs_queue_register(queue, buffer, 4096), DLFS_E_CLOSED);
    CHECK_EQ(dlfs_queue_descriptor(queue), DLFS_E_CLOSED);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, buffer, 0, 4096, 4096), DLFS_E_CLOSED);
    dlfs_queue_destroy(queue);
    if (CHILD_MAY_START_THREADS || strcmp(dlfs_device_kind(device), "threads") != 0) {
        dlfs_queue *own =
            make_queue(device, 2); /* a queue pair of the inherited device may be created */
        CHECK_EQ(do_operation(own, DLFS_OP_READ, buffer, 4096, 4096), 4096);
        dlfs_queue_destroy(own);
    }
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(buffer);
}

static void test_device(dlfs_device *device)
{
    dlfs_queue *queue = make_queue(device, COUNT);
    uint8_t *out = aligned_memory((size_t)COUNT * 4096);
    uint8_t *in = aligned_memory((size_t)COUNT * 4096);
    fill_pattern(out, (size_t)COUNT * 4096, 3);
    CHECK_EQ(dlfs_queue_register(queue, in, (size_t)COUNT * 4096), 0);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_WRITE, out, 0, (size_t)COUNT * 4096, 4096), 0);
    dlfs_operation operations[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        operations[i] =
            (dlfs_operation){in + (size_t)i * 4096, (uint64_t)i * 4096, 4096, DLFS_OP_READ, i};
    }
    wait_until_others_sleep();
    CHECK_EQ(dlfs_queue_submit(queue, operations, COUNT), COUNT);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        child_uses(queue, device);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    for (uint32_t done = 0; done < COUNT;) {
        dlfs_completion completions[COUNT];
        int got = dlfs_queue_poll(queue, completions, COUNT, -1);
        CHECK(got > 0);
        for (int i = 0; i < got; i++) {
            CHECK_EQ(completions[i].result, 4096);
        }
        done += (uint32_t)got;
    }
    CHECK(memcmp(in, out, (size_t)COUNT * 4096) == 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, in, 0, 4096), 4096);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(in);
    free(out);
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
