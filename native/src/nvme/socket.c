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

struct nvme_deadline nvme_deadline_within(const struct nvme_deadline *deadline, uint64_t ns)
{
    struct nvme_deadline limit = *deadline;
    uint64_t until_ns = monotonic_ns() + ns;
    limit.until_ns = until_ns < limit.until_ns ? until_ns : limit.until_ns;
    return limit;
}

int nvme_poll(int wake, int descriptor, short events, uint64_t until_ns)
{
    uint64_t now = monotonic_ns();
    uint64_t left_ms = until_ns > now ? (until_ns - now) / NVME_NANOSECONDS_PER_MS + 1 : 0;
    struct pollfd watched[2] = {{.fd = descriptor, .events = events},
                                {.fd = wake, .events = POLLIN}};
    int got = poll(watched, 2, left_ms < INT32_MAX ? (int)left_ms : -1);
    if (got > 0 && watched[0].revents != 0) {
        return 1;
    }
    if (got > 0) {
        /* Clears a wake-up; the caller looks for its reason. */
        uint64_t ignored;
        (void)!read(wake, &ignored, sizeof ignored);
    }
    return got < 0 && errno != EINTR ? -errno : 0;
}

int nvme_wait(const struct nvme_deadline *deadline, int descriptor, short events)
{
    int ready = 0;
    while (ready == 0) {
        if (atomic_load(deadline->stop)) {
            return DLFS_E_CLOSED;
        }
        if (monotonic_ns() >= deadline->until_ns) {
            return DLFS_E_TIMEOUT;
        }
        ready = nvme_poll(deadline->wake, descriptor, events, deadline->until_ns);
    }
    return ready < 0 ? ready : 0;
}
