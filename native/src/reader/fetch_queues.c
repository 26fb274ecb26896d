/*
 * The queue pairs of a fetch. They are taken when there are requests for a member. They are
 * released when there are none, or when other threads have waited for them for a while
 * (device/queues.c).
 */
#include "reader/fetch_queues.h"

#include <errno.h>

#include "device/device.h"
#include "reader/members.h"

#define SLICE_NS \
    UINT64_C(10000000) /* for which a queue pair is used while other threads wait for it */
/* Divisors of a read's timeout: the time for connecting a queue pair, without and with copies. */
#define CONNECT_SHARE 2u
#define CONNECT_SHARE_COPIES 8u

/* Returns when to give up connecting a device: other members wait meanwhile, and the read ends. */
static uint64_t connect_until_ns(const struct fetch *fetch, uint64_t now_ns)
{
    bool has_copies = fetch->reader->config.replicas > 1;
    uint64_t whole_ns = reader_timeout_ns(fetch->reader);
    uint64_t until_ns = now_ns + whole_ns / (has_copies ? CONNECT_SHARE_COPIES : CONNECT_SHARE);
    until_ns = until_ns < fetch->deadline_ns ? until_ns : fetch->deadline_ns;
    return until_ns > 0 ? until_ns : 1; /* 0 is no limit */
}

int member_connect(struct fetch *fetch, uint32_t member)
{
    dlfs_reader *reader = fetch->reader;
    struct dlfs_queue_waiter *waiter = &fetch->members[member].waiter;
    if (!dlfs_queue_waiter_is_due(waiter, fetch->now_ns)) {
        return 0;
    }
    uint64_t before_ns = monotonic_ns();
    uint64_t until_ns = connect_until_ns(fetch, before_ns);
    waiter->limit =
        (struct dlfs_connect_limit){.stop = fetch_connect_stop(fetch), .until_ns = until_ns};
    int code = dlfs_queue_acquire(reader->devices[member], reader->config.depth, waiter,
                                  &fetch->members[member].queue);
    uint64_t after_ns = monotonic_ns();
    fetch->connect_ns += after_ns - before_ns;
    fetch->members[member].taken_ns = fetch->now_ns;
    if (code == -EAGAIN) {
        return 0;
    }
    if (code == -ENOMEM || code == -EMFILE || code == -ENFILE || code == DLFS_E_CLOSED) {
        return code;
    }
    if (code < 0 && fetch_may_connect(fetch)) { /* a stop says nothing about the member */
        if (code == DLFS_E_TIMEOUT && after_ns >= until_ns) {
            member_set_hung(reader, member);
        } else {
            member_set_lost(reader, member, code);
        }
    }
    return 0;
}

bool member_is_reachable(struct fetch *fetch, uint32_t member, bool due)
{
    bool in_line = fetch->members[member].waiter.state != DLFS_WAITER_NONE;
    if (fetch->members[member].queue == NULL && (due || in_line) && fetch_may_connect(fetch)) {
        (void)member_connect(fetch, member);
    }
    return fetch->members[member].queue != NULL ||
           fetch->members[member].waiter.state != DLFS_WAITER_NONE;
}

bool member_has_room(const struct fetch *fetch, uint32_t member)
{
    if (fetch->members[member].queue == NULL || (fetch->yielding >> member & 1)) {
        return false;
    }
    uint32_t taken =
        dlfs_queue_in_flight(fetch->members[member].queue) + fetch->members[member].operation_count;
    return taken < fetch->reader->config.depth &&
           fetch->members[member].bytes_in_flight < IN_FLIGHT_BYTES_MAX;
}

int fetch_prepare(struct fetch *fetch, uint32_t spans, struct busy_wait *busy_wait)
{
    const dlfs_reader *reader = fetch->reader;
    int code = fetch_reserve_spans(fetch, spans);
    for (uint32_t member = 0; code == 0 && member < reader->config.member_count; member++) {
        if (fetch->members[member].queue != NULL ||
            (member_is_lost(reader, member) && reader->config.replicas > 1) ||
            member_is_hung(reader, member)) {
            continue;
        }
        const dlfs_device *device = reader->devices[member];
        if (busy_wait != NULL && device != NULL && dlfs_queues_idle(device) == 0) {
            busy_wait_announce(busy_wait);
            if (fetch_is_stopped(fetch)) {
                return DLFS_E_TIMEOUT;
            }
        }
        code = member_connect(fetch, member);
    }
    return code;
}

/* Releases a member's queue pair, which has nothing in flight. */
static void release_queue(struct fetch *fetch, uint32_t member)
{
    dlfs_queue_release(fetch->members[member].queue);
    fetch->members[member].queue = NULL;
    fetch->yielding &= ~(UINT64_C(1) << member);
}

/* Returns true if a member has a queue pair with nothing in flight. */
static bool queue_is_idle(const struct fetch *fetch, uint32_t member)
{
    const dlfs_queue *queue = fetch->members[member].queue;
    return queue != NULL && dlfs_queue_in_flight(queue) == 0 &&
           fetch->members[member].operation_count == 0;
}

void fetch_release_queues(struct fetch *fetch)
{
    const dlfs_reader *reader = fetch->reader;
    for (uint32_t member = 0; member < reader->config.member_count; member++) {
        if (fetch->members[member].waiter.state != DLFS_WAITER_NONE) {
            dlfs_queue_waiter_leave(reader->devices[member], &fetch->members[member].waiter);
        }
        if (queue_is_idle(fetch, member)) {
            release_queue(fetch, member);
        }
    }
}

bool fetch_has_idle_queues(const struct fetch *fetch)
{
    bool any = false;
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        any |=
            queue_is_idle(fetch, member) || fetch->members[member].waiter.state != DLFS_WAITER_NONE;
    }
    return any;
}

void fetch_yield_queues(struct fetch *fetch)
{
    const dlfs_reader *reader = fetch->reader;
    for (uint32_t member = 0; member < reader->config.member_count; member++) {
        dlfs_queue *queue = fetch->members[member].queue;
        if (queue == NULL) {
            continue;
        }
        if (!dlfs_queues_wanted(reader->devices[member])) {
            fetch->yielding &= ~(UINT64_C(1) << member);
        } else if (queue_is_idle(fetch, member)) {
            release_queue(fetch, member);
        } else if (fetch->now_ns - fetch->members[member].taken_ns >= SLICE_NS) {
            fetch->yielding |= UINT64_C(1) << member;
        }
    }
}

struct dlfs_queue_waiter *fetch_queue_waiter(const struct fetch *fetch)
{
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        if (fetch->members[member].waiter.state != DLFS_WAITER_NONE) {
            return &fetch->members[member].waiter;
        }
    }
    return NULL;
}

bool fetch_any_in_flight(const struct fetch *fetch)
{
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        if (fetch->members[member].queue != NULL &&
            dlfs_queue_in_flight(fetch->members[member].queue) > 0) {
            return true;
        }
    }
    return false;
}
