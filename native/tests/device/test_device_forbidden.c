/* If a seccomp filter refuses io_uring, as in containers, AUTO uses threads and URING returns why
 * not. */
#include "device/device_tests.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static void refuse_uring(uint32_t error)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    CHECK_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    CHECK_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

static void use_without_uring(const char *path, uint32_t error)
{
    refuse_uring(error);
    dlfs_device *device = NULL;
    int expected = uring_works() ? 0 : dlfs_uring_probe();
    CHECK(expected == -(int)error || expected == -ENOSYS); /* ENOSYS: built without liburing */
    CHECK_EQ(dlfs_device_open_file(path, 0, DLFS_ENGINE_URING, &device), expected);
    CHECK(device == NULL);
    device = open_file(path, DLFS_OPEN_WRITE, DLFS_ENGINE_AUTO);
    CHECK(strcmp(dlfs_device_kind(device), "threads") == 0);
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *buffer = aligned_memory(4096);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, buffer, 4096, 4096), 4096);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 4096), 4096);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(buffer);
}

int main(void)
{
    char path[4096];
    make_file(path, sizeof path, DEVICE_BYTES);
    static const uint32_t errors[] = {EPERM, ENOSYS, EACCES};
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            use_without_uring(path, errors[i]);
            _exit(0);
        }
        int status;
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK_EQ(unlink(path), 0);
    return 0;
}
