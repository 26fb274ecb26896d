/*
 * A forked child of a process with NVMe/TCP devices destroys its inherited copies without harm to
 * the parent's connections, and opens new connections for its own queue pairs.
 */
#include <sys/wait.h>

#include "asleep.h"
#include "device/device_tests.h"
#include "nvme/nvme_target.h"

static void child_uses(dlfs_queue *queue, dlfs_device *device)
{
    alarm(60); /* a hang must end the test */
    uint8_t *buffer = aligned_memory(4096);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 4096), DLFS_E_CLOSED);
    CHECK_EQ(dlfs_queue_descriptor(queue), DLFS_E_CLOSED);
    dlfs_queue_destroy(queue);
    dlfs_queue *own = make_queue(device, 2);
    CHECK_EQ(do_operation(own, DLFS_OP_READ, buffer, 4096, 4096), 4096);
    CHECK_EQ(dlfs_device_flush(device), 0);
    dlfs_queue_destroy(own);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(buffer);
}

int main(void)
{
    struct target *target = target_start(0, true, 65536);
    fill_pattern(target->memory, TARGET_BYTES, 9);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    dlfs_queue *queue = make_queue(device, 8);
    uint8_t *in = aligned_memory(8 * 4096);
    CHECK(dlfs_queue_descriptor(queue) >= 0);
    CHECK_EQ(dlfs_device_flush(device), 0); /* creates the internal queue pair, too */
    dlfs_operation operations[8];
    for (uint32_t i = 0; i < 8; i++) {
        operations[i] =
            (dlfs_operation){in + (size_t)i * 4096, (uint64_t)i * 4096, 4096, DLFS_OP_READ, i};
    }
    wait_until_others_sleep();
    CHECK_EQ(dlfs_queue_submit(queue, operations, 8), 8);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        child_uses(queue, device);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    for (uint32_t done = 0; done < 8;) {
        dlfs_completion completions[8];
        int got = dlfs_queue_poll(queue, completions, 8, -1);
        CHECK(got > 0);
        for (int i = 0; i < got; i++) {
            CHECK_EQ(completions[i].result, 4096);
        }
        done += (uint32_t)got;
    }
    CHECK(memcmp(in, target->memory, 8 * 4096) == 0);
    CHECK_EQ(dlfs_device_flush(device), 0);
    dlfs_nvme_status found;
    CHECK_EQ(dlfs_nvme_get_status(device, &found), 0);
    CHECK_EQ(found.reconnects, 0);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(in);
    target_free(target);
    return 0;
}
