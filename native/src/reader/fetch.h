/*
 * Bringing spans of a dataset's data space into memory: what reader/fetch.c, reader/fetch_queues.c,
 * reader/pieces.c and reader/members.c give each other and the rest of the reader. Included by
 * reader.h, which has the types.
 */
#ifndef DLFS_FETCH_H
#define DLFS_FETCH_H

#include "platform/clock.h"

/* reader/fetch.c */
int fetch_create(dlfs_reader *reader, struct fetch **out);
/* Waits for what is in flight. */
void fetch_destroy(struct fetch *fetch);
/* Room for so many spans, beside abandoned ones; nothing else may be under way. */
int fetch_reserve_spans(struct fetch *fetch, uint32_t unused);
/* Room for a plan of count wants. */
int fetch_reserve_plan(struct fetch *fetch, uint64_t count);
void fetch_free_plan(struct fetch *fetch);
#define PLAN_BYTES_PER_SAMPLE (2 * sizeof(struct miss) + sizeof(struct plan_span))
static inline size_t fetch_plan_bytes(const struct fetch *fetch)
{
    return fetch->plan_capacity * PLAN_BYTES_PER_SAMPLE;
}
/* A span to fill in and hand to fetch_start, or NULL when all are under way. */
struct span *span_take(struct fetch *fetch);
void span_start(struct fetch *fetch, struct span *span);
/* Submits what the queues take and collects completions, waiting up to timeout_ms for the first. */
void fetch_step(struct fetch *fetch, int timeout_ms);
/*
 * The next span that ended (its code is set), or NULL. The caller recycles it, or starts it again.
 */
struct span *fetch_take_done(struct fetch *fetch);
/* What fetch_done will give next, or NULL. */
const struct span *fetch_peek_done(const struct fetch *fetch);
void span_recycle(struct fetch *fetch, struct span *span);
/*
 * Starts a span again whose bytes are wrong: without each of the members in waiter that they came
 * from, then as before while retries are left. False when there is nothing left to try.
 */
bool span_retry(struct fetch *fetch, struct span *span);
bool fetch_is_idle(const struct fetch *fetch);
/* Ends a span that is under way so that another copy can be asked. */
void span_redirect(struct fetch *fetch, struct span *span);
/* A piece of a span has ended: the span goes on or ends with it. */
void span_request_ended(struct fetch *fetch, struct span *span, const struct request *request,
                        int code);

/* Looks at the clock, and adds the time since the last look to a counter. */
static inline void fetch_add_time(struct fetch *fetch, uint64_t *counter_ns)
{
    uint64_t now = monotonic_ns();
    *counter_ns += now - fetch->now_ns;
    fetch->now_ns = now;
}

/* reader/fetch_queues.c */
/*
 * Takes a queue pair of a member, or a place in line for one. A code when this machine has no
 * resources for it; where the member fails, it counts as lost, and reads will tell.
 */
int member_connect(struct fetch *fetch, uint32_t member);
/* Whether a member can be asked at all, perhaps later; without a queue pair or a place in line for
 * one, only if it is `due` to get one. */
bool member_is_reachable(struct fetch *fetch, uint32_t member, bool due);
/* Whether it can be asked for something more now. */
bool member_has_room(const struct fetch *fetch, uint32_t member);
/* Takes queue pairs of all members that are well, or places in line for them. */
int fetch_prepare(struct fetch *fetch);
/* Gives back those with nothing in flight, and places in line. */
void fetch_release_queues(struct fetch *fetch);
/* Whether there are any. */
bool fetch_has_idle_queues(const struct fetch *fetch);
/*
 * Gives back the queue pairs that others stand in line for: at once if nothing is in flight, else
 * when that has come, after a while of which nothing more is asked.
 */
void fetch_yield_queues(struct fetch *fetch);
/* The waiter of a fetch that is in line for some queue pair, or NULL. */
struct dlfs_queue_waiter *fetch_queue_waiter(const struct fetch *fetch);
bool fetch_any_in_flight(const struct fetch *fetch);

/* reader/pieces.c */
int requests_create(struct fetch *fetch);
/*
 * Turns the next piece of a span into an operation: true, also when no member can be asked and it
 * failed. False when the member to ask has no room, which is noted.
 */
bool request_begin(struct fetch *fetch, struct span *span, uint64_t *full_members);
/* Asks again, of other members, for what some did not give. */
void requests_resend(struct fetch *fetch, uint64_t *full_members);
/* Takes what a member answered to a piece. */
void request_complete(struct fetch *fetch, uint64_t number, int64_t result);
/* A member's queue pair failed as a whole: what was asked of it is asked of others. */
void member_queue_failed(struct fetch *fetch, uint32_t member, int code);
/* Draws the conclusions for members that owe pieces of a span whose time has passed. */
void span_mark_late_members(struct fetch *fetch, const struct span *span);
/*
 * Counts members as lost that answered nothing for so long, and turns the spans that wait for them
 * to other copies where these can be had.
 */
void requests_redirect_silent(struct fetch *fetch, uint64_t timeout_ns);
/* Whether the next piece of a span can only be asked of hung members (member_hang). */
bool span_is_unreachable(const struct fetch *fetch, const struct span *span);

/* reader/members.c */
int members_create(dlfs_reader *reader);
/* Where a copy of an address lies: member and byte offset on it. */
void member_locate(const dlfs_reader *reader, uint64_t address, uint32_t copy, uint32_t *member,
                   uint64_t *offset_bytes);
/* A member answered well, or did not. */
void member_succeeded(dlfs_reader *reader, uint32_t member);
void member_failed(dlfs_reader *reader, uint32_t member, int code);
static inline bool member_is_lost(const dlfs_reader *reader, uint32_t member)
{
    return atomic_load_explicit(&reader->members[member].lost_until_ns, memory_order_relaxed) != 0;
}
/* A member that cannot be had at all now. */
void member_set_lost(dlfs_reader *reader, uint32_t member, int code);
/* Notes that a member left a read without an answer for all its time: until it answers, or a probe
 * is due, reads that need it fail at once. */
void member_set_hung(dlfs_reader *reader, uint32_t member);
static inline bool member_is_hung(const dlfs_reader *reader, uint32_t member)
{
    return member_is_lost(reader, member) &&
           atomic_load_explicit(&reader->members[member].hung, memory_order_relaxed);
}
/* Whether it is time to find out whether a lost member is back. */
static inline bool member_probe_is_due(const dlfs_reader *reader, uint32_t member)
{
    return monotonic_ns() >= atomic_load(&reader->members[member].lost_until_ns);
}
/* The same, and the caller's waiter. */
bool member_take_probe(dlfs_reader *reader, uint32_t member);

#endif
