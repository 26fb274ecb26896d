/*
 * A fetch: the reading of spans into memory by one thread, through the queue pairs of the members.
 * Its layers, from the bottom: reader/members.c, span.c, fetch_queues.c, requests.c, fetch.c.
 */
#ifndef DLFS_FETCH_H
#define DLFS_FETCH_H

#include "platform/clock.h"
#include "reader/fetch_queues.h"
#include "reader/reader.h"
#include "reader/span.h"

int fetch_create(dlfs_reader *reader, struct fetch **out);
/* Waits for all requests in flight, and frees the fetch. */
void fetch_destroy(struct fetch *fetch);
/* Makes room for a plan of this many misses. */
int fetch_reserve_plan(struct fetch *fetch, uint64_t count);
void fetch_free_plan(struct fetch *fetch);
_Static_assert(PLAN_BYTES_PER_SAMPLE == 2 * sizeof(struct miss) + sizeof(struct plan_span),
               "what a plan has for each sample");
/* Returns the memory of the plan in bytes. */
static inline size_t fetch_plan_bytes(const struct fetch *fetch)
{
    return fetch->plan_capacity * PLAN_BYTES_PER_SAMPLE;
}
/* Submits what the queues take and collects completions. Waits up to timeout_ms for the first. */
void fetch_step(struct fetch *fetch, int timeout_ms);
/* Goes on after time in which the thread did not step: deadlines and latencies leave it out, but
 * for a millisecond. */
void fetch_resume(struct fetch *fetch);
/* Reads the clock, and adds the time since its last reading to a counter. */
static inline void fetch_add_time(struct fetch *fetch, uint64_t *counter_ns)
{
    uint64_t now = monotonic_ns();
    *counter_ns += now - fetch->now_ns;
    fetch->now_ns = now;
}

#endif
