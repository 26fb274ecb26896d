/* Slots that own an object or a descriptor. */
#include "dlfs/handle.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "device/device.h"

DLFS_API uint32_t dlfs_handle_process(void)
{
    return dlfs_process();
}

DLFS_API void dlfs_handle_free(void **slot, void (*destroy)(void *object), uint32_t process)
{
    void *object = __atomic_exchange_n(slot, NULL, __ATOMIC_ACQ_REL);
    if (object != NULL && (process == DLFS_PROCESS_ANY || process == dlfs_process())) {
        destroy(object);
    }
}

DLFS_API void dlfs_handle_close(int *descriptor)
{
    int found = __atomic_exchange_n(descriptor, -1, __ATOMIC_ACQ_REL);
    if (found >= 0) {
        (void)close(found);
    }
}

#define RECEIVED_MAX 16u /* descriptors that one message may bring */

/* Puts a descriptor in the first place that is -1. Returns false if there is none. */
static bool place(int descriptor, int *const *descriptors, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (*descriptors[i] < 0) {
            *descriptors[i] = descriptor;
            return true;
        }
    }
    (void)close(descriptor);
    return false;
}

/* Places the descriptors of a message. Returns false if some were left out. */
static bool place_all(struct msghdr *message, int *const *descriptors, uint32_t count)
{
    bool all = (message->msg_flags & MSG_CTRUNC) == 0;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part != NULL;
         part = CMSG_NXTHDR(message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t got = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < got; i++) {
            int descriptor;
            memcpy(&descriptor, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
            all &= place(descriptor, descriptors, count);
        }
    }
    return all;
}

DLFS_API int64_t dlfs_handle_receive(int socket, void *buffer, size_t bytes,
                                     int *const *descriptors, uint32_t count)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(RECEIVED_MAX * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = buffer, .iov_len = bytes};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.space,
                             .msg_controllen = sizeof(control.space)};
    ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0) {
        return -errno;
    }
    return place_all(&message, descriptors, count) ? got : -EMSGSIZE;
}
