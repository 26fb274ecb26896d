/*
 * The life of a span: unused, waiting for its requests, in flight, done.
 *
 * A span that failed is started again as a whole, while retries and time are left. A span that
 * outlives its deadline is done with DLFS_E_TIMEOUT, but its memory stays referenced until the
 * device has answered all its requests (abandoned). Where there are copies, a span whose member is
 * silent ends earlier, so that the caller reads it again from another copy into other memory
 * (redirected).
 */
#include "reader/span.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "arena/private_memory.h"
#include "platform/clock.h"
#include "reader/members.h"
#include "reader/state.h"

/* Additional time for each byte of a read that has arrived, since a slow answer is not a silent
 * member: the time of 256 KiB a second. Bytes to come get none: a member that sends a few now and
 * then moves the end by what these few are worth. */
#define NS_PER_BYTE 3815u
/* Times that the bytes queued before a span may arrive until it is late: a device that works at
 * many requests at once answers them in another order. */
#define QUEUE_TURNS 2u

uint64_t reader_timeout_ns(const dlfs_reader *reader)
{
    return (uint64_t)reader->config.timeout_ms * 1000000;
}

uint64_t reader_slow_ns(uint64_t bytes)
{
    return bytes < UINT64_MAX / 2 / NS_PER_BYTE ? bytes * NS_PER_BYTE : UINT64_MAX / 2;
}

void fetch_credit(struct fetch *fetch, uint64_t bytes)
{
    fetch->arrived_bytes += bytes;
    uint64_t slow = bytes < fetch->slow_bytes ? bytes : fetch->slow_bytes;
    fetch->slow_bytes -= slow;
    if (fetch->deadline_ns < UINT64_MAX / 2) {
        fetch->deadline_ns += reader_slow_ns(slow);
    }
}

uint64_t span_timeout_ns(const dlfs_reader *reader)
{
    return reader_timeout_ns(reader) / reader->config.replicas;
}

uint64_t span_deadline_ns(const struct fetch *fetch)
{
    uint64_t at_ns = fetch->now_ns + span_timeout_ns(fetch->reader);
    return at_ns < fetch->deadline_ns ? at_ns : fetch->deadline_ns;
}

void span_begun(const struct fetch *fetch, struct span *span)
{
    span->begun = true;
    span->begun_ns = fetch->now_ns;
    span->deadline_ns = span_deadline_ns(fetch);
    span->queued_member = MEMBER_NONE;
    if (span->asked_members != 0) {
        uint32_t member = (uint32_t)__builtin_ctzll(span->asked_members);
        uint64_t queued = fetch->members[member].bytes_in_flight + span->length;
        span->queued_member = member;
        span->queued_from = fetch->members[member].arrived_bytes;
        span->queued_until = span->queued_from + QUEUE_TURNS * queued;
    }
}

/*
 * Returns true if the member of a span's first request answers what was queued before the span, or
 * the span itself, no slower than a slow device may.
 */
static bool is_served_slowly(const struct fetch *fetch, const struct span *span)
{
    uint32_t member = span->queued_member;
    if (member == MEMBER_NONE || fetch->members[member].arrived_bytes >= span->queued_until) {
        return false;
    }
    uint64_t timeout_ns = span_timeout_ns(fetch->reader);
    uint64_t slow_ns = reader_slow_ns(fetch->members[member].arrived_bytes - span->queued_from);
    return fetch->now_ns < fetch->members[member].answered_ns + timeout_ns &&
           fetch->now_ns - span->begun_ns < timeout_ns + slow_ns;
}

bool span_is_late(const struct fetch *fetch, const struct span *span, uint64_t queued_until_ns)
{
    if (fetch->now_ns < span->deadline_ns) {
        return false;
    }
    return span->begun ? !is_served_slowly(fetch, span) : fetch->now_ns >= queued_until_ns;
}

void span_push(struct fetch *fetch, struct span_list *list, uint32_t number)
{
    fetch->spans[number].next = SPAN_NONE;
    if (list->first == SPAN_NONE) {
        list->first = number;
    } else {
        fetch->spans[list->last].next = number;
    }
    list->last = number;
}

struct span *span_pop(struct fetch *fetch, struct span_list *list)
{
    if (list->first == SPAN_NONE) {
        return NULL;
    }
    struct span *span = &fetch->spans[list->first];
    list->first = span->next;
    return span;
}

int fetch_reserve_spans(struct fetch *fetch, uint32_t unused)
{
    if (unused <= fetch->unused_span_count) {
        return 0;
    }
    uint32_t count = fetch->span_capacity + unused - fetch->unused_span_count;
    struct span *spans = realloc(fetch->spans, (size_t)count * sizeof(*spans));
    if (spans == NULL) {
        return -ENOMEM;
    }
    memset(spans + fetch->span_capacity, 0, (count - fetch->span_capacity) * sizeof(*spans));
    fetch->spans = spans;
    for (uint32_t number = fetch->span_capacity; number < count; number++) {
        spans[number].next = fetch->unused_spans;
        spans[number].slot = SLOT_NONE;
        fetch->unused_spans = number;
    }
    fetch->unused_span_count += count - fetch->span_capacity;
    fetch->span_capacity = count;
    return 0;
}

struct span *span_take(struct fetch *fetch)
{
    if (fetch->unused_spans == SPAN_NONE) {
        return NULL;
    }
    struct span *span = &fetch->spans[fetch->unused_spans];
    fetch->unused_spans = span->next;
    fetch->unused_span_count--;
    *span = (struct span){.slot = SLOT_NONE, .avoided_member = MEMBER_NONE};
    return span;
}

void span_start(struct fetch *fetch, struct span *span)
{
    span->submitted_bytes = 0;
    span->asked_members = 0;
    span->code = 0;
    span->state = SPAN_WAITING;
    if (span->deadline_ns == 0) {
        span->deadline_ns = span_deadline_ns(fetch);
    }
    if (fetch_is_idle(fetch)) {
        fetch->checked_ns = fetch->now_ns;
        fetch->connect_ns = 0;
    }
    span_push(fetch, &fetch->waiting, span_number(fetch, span));
}

bool span_retry(struct fetch *fetch, struct span *span)
{
    if (!span->was_corrupt && fetch->reader->config.replicas > 1) {
        span->suspect_members = span->asked_members;
    }
    span->was_corrupt = true;
    if (span->suspect_members != 0) {
        span->avoided_member = (uint32_t)__builtin_ctzll(span->suspect_members);
        span->suspect_members &= span->suspect_members - 1;
    } else if (span->attempts < fetch->reader->config.retry_count) {
        span->avoided_member = MEMBER_NONE;
        span->attempts++;
    } else {
        return false;
    }
    fetch->stats.retries++;
    span_start(fetch, span);
    return true;
}

void span_release_memory(struct fetch *fetch, const struct span *span)
{
    if (span->private_memory != NULL) {
        private_memory_release(span->private_memory);
        return;
    }
    pthread_mutex_lock(&fetch->reader->arena->lock);
    arena_release(fetch->reader, span->slot);
    pthread_mutex_unlock(&fetch->reader->arena->lock);
}

/* Marks members as hung that left a span unanswered for good. */
static void mark_hung(struct fetch *fetch, uint64_t members)
{
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        if (members >> member & 1) {
            member_set_hung(fetch->reader, member);
        }
    }
}

void span_end(struct fetch *fetch, struct span *span)
{
    if (span->abandoned) {
        span_release_memory(fetch, span);
        span->abandoned = false;
        if (span->state == SPAN_UNUSED) {
            span_recycle(fetch, span);
        }
        return;
    }
    if (span->code < 0) {
        fetch->stats.read_errors++;
    }
    if (span->code < 0 && span->attempts < fetch->reader->config.retry_count &&
        monotonic_ns() < span->deadline_ns) {
        span->attempts++;
        fetch->stats.retries++;
        span_start(fetch, span);
        return;
    }
    if (span->code == DLFS_E_TIMEOUT) {
        mark_hung(fetch, span->silent_members);
    }
    span->state = SPAN_DONE;
    span_push(fetch, &fetch->done, span_number(fetch, span));
}

void span_request_ended(struct fetch *fetch, struct span *span, const struct request *request,
                        int code)
{
    if (code < 0 && span->code == 0) {
        span->code = code;
        span->bad_address = request->address;
    }
    bool all_submitted = span->submitted_bytes == span->length || span->code < 0;
    if (--span->in_flight == 0 && all_submitted && span->state != SPAN_WAITING) {
        span_end(fetch, span);
    }
}

void span_abandon(struct fetch *fetch, struct span *span)
{
    span->code = DLFS_E_TIMEOUT;
    span->deadline_ns = 0; /* span_end does not start it again */
    if (span->state == SPAN_WAITING) {
        return; /* it ends when it is its turn to make requests */
    }
    span->abandoned = true;
    fetch->abandoned_requests += span->in_flight;
    fetch->stats.read_errors += !fetch_is_stopped(fetch);
    pthread_mutex_lock(&fetch->reader->arena->lock);
    if (span->private_memory != NULL) {
        __atomic_add_fetch(&span->private_memory->references, 1, __ATOMIC_RELAXED);
    } else {
        arena_reference(fetch->reader, span->slot);
    }
    pthread_mutex_unlock(&fetch->reader->arena->lock);
    span->state = SPAN_DONE;
    span_push(fetch, &fetch->done, span_number(fetch, span));
}

void span_redirect(struct fetch *fetch, struct span *span)
{
    span->redirected = true;
    fetch->redirected++;
    span_abandon(fetch, span);
}

void span_recycle(struct fetch *fetch, struct span *span)
{
    span->state = SPAN_UNUSED;
    if (span->abandoned) {
        return; /* span_end recycles it after its last request */
    }
    span->next = fetch->unused_spans;
    fetch->unused_spans = span_number(fetch, span);
    fetch->unused_span_count++;
}
