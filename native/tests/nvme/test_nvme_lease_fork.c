/*
 * Writes under a lease. They are sent until its end only and through its controller only; reads
 * need none. A forked child has no lease.
 */
#include <sys/wait.h>

#include "asleep.h"
#include "device/device_tests.h"
#include "nvme/nvme_target.h"
#include "platform/clock.h"

#define LARGE (1u << 20) /* several commands */
#define HOUR_NS UINT64_C(3600000000000)

static uint64_t incarnation_of(dlfs_device *device)
{
    uint64_t incarnation;
    CHECK_EQ(dlfs_device_incarnation(device, &incarnation), 0);
    return incarnation;
}

static void test_writes_end_with_the_lease(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *out = aligned_memory(LARGE);
    uint8_t *in = aligned_memory(LARGE);
    fill_pattern(out, LARGE, 3);
    CHECK_EQ(dlfs_device_limit_writes(device, incarnation_of(device), boottime_ns() + HOUR_NS), 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, out, 0, 4096), 4096);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, out, 0, LARGE), LARGE);
    CHECK(memcmp(target->memory, out, LARGE) == 0);

    CHECK_EQ(dlfs_device_limit_writes(device, incarnation_of(device), 1), 0);
    unsigned answers = atomic_load(&target->answers);
    fill_pattern(in, LARGE, 4);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, in, 0, 4096), -EKEYEXPIRED);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, in, 0, LARGE), -EKEYEXPIRED);
    CHECK_EQ(atomic_load(&target->answers), answers); /* nothing was sent */
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, in, 0, LARGE), LARGE);
    CHECK(memcmp(in, out, LARGE) == 0);

    CHECK_EQ(dlfs_device_limit_writes(device, 0, DLFS_WRITES_FREE), 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, out, LARGE, LARGE), LARGE);
    CHECK(memcmp(target->memory + LARGE, out, LARGE) == 0);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(out);
    free(in);
    target_free(target);
}

/* Reads and writes in a forked child, on a queue pair that it creates. */
static void fork_and_write(dlfs_device *device, dlfs_queue *inherited, int64_t expected)
{
    wait_until_others_sleep();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60); /* a hang must end the test */
        dlfs_queue_destroy(inherited);
        uint8_t *buffer = aligned_memory(4096);
        dlfs_queue *own = make_queue(device, 2);
        CHECK_EQ(do_operation(own, DLFS_OP_READ, buffer, 0, 4096), 4096);
        CHECK_EQ(do_operation(own, DLFS_OP_WRITE, buffer, 8192, 4096), expected);
        dlfs_queue_destroy(own);
        CHECK_EQ(dlfs_device_destroy(device), 0);
        free(buffer);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_a_child_has_no_lease(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *buffer = aligned_memory(4096);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, buffer, 0, 4096), 4096);
    fork_and_write(device, queue, 4096); /* there is no lease, and none is needed */
    CHECK_EQ(dlfs_device_limit_writes(device, incarnation_of(device), boottime_ns() + HOUR_NS), 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, buffer, 0, 4096), 4096);
    fork_and_write(device, queue, -EKEYEXPIRED);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, buffer, 0, 4096), 4096);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(buffer);
    target_free(target);
}

int main(void)
{
    test_writes_end_with_the_lease();
    test_a_child_has_no_lease();
    return 0;
}
