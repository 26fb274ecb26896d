/* Waits and messages of sockets; see nvme/socket.h. */
#include "nvme/socket.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "platform/clock.h"

void nvme_text_format(struct nvme_text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text->bytes, sizeof text->bytes, format, arguments);
    va_end(arguments);
}

int nvme_socket_code(int error)
{
    bool timed_out = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
                     error == EHOSTDOWN || error == ENETDOWN;
    return timed_out ? DLFS_E_TIMEOUT : DLFS_E_LOST;
}

int nvme_wait(const struct nvme_deadline *deadline, int descriptor, short events)
{
    for (;;) {
        if (atomic_load(deadline->stop)) {
            return DLFS_E_CLOSED;
        }
        uint64_t now = monotonic_ns();
        if (now >= deadline->until_ns) {
            return DLFS_E_TIMEOUT;
        }
        uint64_t left_ms = (deadline->until_ns - now) / NVME_NANOSECONDS_PER_MS + 1;
        struct pollfd watched[2] = {{.fd = descriptor, .events = events},
                                    {.fd = deadline->wake, .events = POLLIN}};
        int got = poll(watched, 2, left_ms < INT32_MAX ? (int)left_ms : INT32_MAX);
        if (got > 0 && watched[0].revents != 0) {
            return 0;
        }
        if (got > 0 && watched[1].revents != 0) {
            /* Clears a wake-up that was not a stop; the caller looks for its reason later. */
            uint64_t ignored;
            (void)!read(deadline->wake, &ignored, sizeof ignored);
        }
        if (got < 0 && errno != EINTR) {
            return -errno;
        }
    }
}
