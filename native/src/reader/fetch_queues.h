/* The queue pairs of a fetch: taken from the members' devices, and released for other threads. */
#ifndef DLFS_FETCH_QUEUES_H
#define DLFS_FETCH_QUEUES_H

#include "reader/busy_wait.h"
#include "reader/span.h"

/*
 * Bytes in flight that keep a member busy: what a device of 16 GB/s reads in a millisecond. A
 * device that works on all requests at once would answer more of them later, and none of them soon,
 * while the caller has nothing to verify.
 */
#define IN_FLIGHT_BYTES_MAX (UINT64_C(16) << 20)

/*
 * Takes a queue pair of a member, or lines up for one. Returns a negative code if this process has
 * no resources for it. A member that fails is marked as lost instead, and its reads report that;
 * one that cannot be connected in time is marked as hung.
 */
int member_connect(struct fetch *fetch, uint32_t member);
/* Returns true if requests can be sent to a member, at once or later. A member without a queue pair
 * is connected only if it is `due` and fetch_may_connect. */
bool member_is_reachable(struct fetch *fetch, uint32_t member, bool due);
/* Returns true if the member's queue takes another request now. */
bool member_has_room(const struct fetch *fetch, uint32_t member);
/*
 * Makes room for so many spans, as fetch_reserve_spans, and takes or lines up for queue pairs of
 * all members that are not lost. Announces to busy_wait, or NULL, that it is about to connect one,
 * which may take long. If the read is stopped then, it connects none and returns DLFS_E_TIMEOUT.
 */
int fetch_prepare(struct fetch *fetch, uint32_t spans, struct busy_wait *busy_wait);
/* Releases the queue pairs with nothing in flight, and leaves the lines. */
void fetch_release_queues(struct fetch *fetch);
/* Returns true if fetch_release_queues has anything to release or to leave. */
bool fetch_has_idle_queues(const struct fetch *fetch);
/*
 * Releases queue pairs that other threads wait for. One with requests in flight gets no more of
 * them after SLICE_NS, and is released when the last one has ended.
 */
void fetch_yield_queues(struct fetch *fetch);
/* Returns the fetch's first place in line for a queue pair, or NULL. */
struct dlfs_queue_waiter *fetch_queue_waiter(const struct fetch *fetch);
/* Returns true if a queue pair has requests in flight. */
bool fetch_any_in_flight(const struct fetch *fetch);

#endif
