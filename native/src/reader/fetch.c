/*
 * Brings spans of a dataset's data space into memory. A span is cut into pieces at chunk
 * boundaries, each piece goes to a member's queue pair (reader/pieces.c), all queues are kept as
 * full as their depth allows, and a span that failed is tried again as a whole. A span that
 * outlives its deadline is reported with DLFS_E_TIMEOUT while its memory stays referenced until the
 * device has let go of it. Waiting for others to make room does not count while the members answer:
 * what is read ahead may be more than a slow device gives in that time. Where there are copies, a
 * span is reported so earlier, when its member has been silent for a while and another one is well:
 * the caller then asks for it again, in other memory.
 *
 * A fetch has a clock of its own, which stands still between two calls of fetch_step (but for
 * LOOK_GAP_NS): answers that wait in a socket while the process is stopped are not late.
 *
 * Completions are taken in small groups, and the queues filled again before anybody looks at what
 * has come.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "platform/clock.h"
#include "reader/reader.h"

#define DEADLINE_CHECK_NS UINT64_C(100000000)
#define STEP_GAP_NS UINT64_C(1000000000)
#define REDIRECT_DOUBLINGS_MAX 4u /* that double the time until the next one */
#define SILENT_SHARE \
    16u /* of a read's time-out: a member silent for so long is read around, by other copies */
/* A read that is answered bit by bit may take so much longer: 256 KiB a second. */
#define NS_PER_BYTE 3815u
#define POLL_MS_MAX 100
#define MEMBER_POLL_MS 1 /* on a member that cannot be waited for together with others */
#define GROUPS 4u        /* in which a full queue is emptied */
#define LINE_POLL_MS 5   /* while in line for one, and busy otherwise */

static void span_push(struct fetch *fetch, struct span_list *list, uint32_t number)
{
    fetch->spans[number].next = SLOT_NONE;
    if (list->first == SLOT_NONE) {
        list->first = number;
    } else {
        fetch->spans[list->last].next = number;
    }
    list->last = number;
}

static struct span *span_pop(struct fetch *fetch, struct span_list *list)
{
    if (list->first == SLOT_NONE) {
        return NULL;
    }
    struct span *span = &fetch->spans[list->first];
    list->first = span->next;
    return span;
}

static uint32_t span_number(const struct fetch *fetch, const struct span *span)
{
    return (uint32_t)(span - fetch->spans);
}

int fetch_create(dlfs_reader *reader, struct fetch **out)
{
    uint32_t members = reader->config.member_count;
    uint32_t depth = reader->config.depth;
    struct fetch *fetch = calloc(1, sizeof(*fetch));
    if (fetch == NULL) {
        return -ENOMEM;
    }
    int code = -ENOMEM;
    fetch->reader = reader;
    fetch->deadline_ns = UINT64_MAX;
    fetch->unused_spans = SLOT_NONE;
    fetch->waiting.first = SLOT_NONE;
    fetch->done.first = SLOT_NONE;
    fetch->group = (depth + GROUPS - 1) / GROUPS;
    fetch->queues = calloc(members, sizeof(dlfs_queue *));
    fetch->queue_waiters = calloc(members, sizeof(struct dlfs_queue_waiter));
    fetch->queue_taken_ns = calloc(members, sizeof(uint64_t));
    fetch->waits = calloc(members, sizeof(struct pollfd));
    fetch->operations = calloc((size_t)members * depth, sizeof(dlfs_operation));
    fetch->operation_counts = calloc(members, sizeof(uint32_t));
    fetch->completions = calloc(fetch->group, sizeof(dlfs_completion));
    fetch->member_stats = calloc(members, sizeof(dlfs_member_stats));
    fetch->answered_ns = calloc(members, sizeof(uint64_t));
    if (fetch->queues != NULL && fetch->queue_waiters != NULL && fetch->queue_taken_ns != NULL &&
        fetch->waits != NULL && fetch->operations != NULL && fetch->operation_counts != NULL &&
        fetch->completions != NULL && fetch->member_stats != NULL && fetch->answered_ns != NULL) {
        code = requests_create(fetch);
    }
    if (code < 0) {
        fetch_destroy(fetch);
        return code;
    }
    *out = fetch;
    return 0;
}

void fetch_destroy(struct fetch *fetch)
{
    if (fetch == NULL) {
        return;
    }
    for (uint32_t member = 0; fetch->queues != NULL && member < fetch->reader->config.member_count;
         member++) {
        dlfs_queue_destroy(fetch->queues[member]);
    }
    for (uint32_t number = 0; number < fetch->span_capacity; number++) {
        struct span *span = &fetch->spans[number];
        if (span->abandoned && span->private_memory != NULL) {
            private_memory_release(span->private_memory);
        }
        if (span->abandoned && span->slot != SLOT_NONE) {
            pthread_mutex_lock(&fetch->reader->lock);
            arena_release(fetch->reader, span->slot);
            pthread_mutex_unlock(&fetch->reader->lock);
        }
    }
    free(fetch->queues);
    free(fetch->queue_waiters);
    free(fetch->queue_taken_ns);
    free(fetch->waits);
    free(fetch->requests);
    free(fetch->operations);
    free(fetch->operation_counts);
    free(fetch->completions);
    free(fetch->member_stats);
    free(fetch->answered_ns);
    free(fetch->probe_memory);
    free(fetch->spans);
    fetch_free_plan(fetch);
    free(fetch);
}

void fetch_free_plan(struct fetch *fetch)
{
    free(fetch->misses);
    free(fetch->sort_scratch);
    free(fetch->plan);
    fetch->misses = NULL;
    fetch->sort_scratch = NULL;
    fetch->plan = NULL;
    fetch->plan_capacity = 0;
}

int fetch_reserve_plan(struct fetch *fetch, uint64_t count)
{
    if (count <= fetch->plan_capacity) {
        return 0;
    }
    fetch_free_plan(fetch);
    fetch->misses = malloc(count * sizeof(*fetch->misses));
    fetch->sort_scratch = malloc(count * sizeof(*fetch->sort_scratch));
    fetch->plan = malloc(count * sizeof(*fetch->plan));
    if (fetch->misses == NULL || fetch->sort_scratch == NULL || fetch->plan == NULL) {
        return -ENOMEM;
    }
    fetch->plan_capacity = count;
    return 0;
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
    if (fetch->unused_spans == SLOT_NONE) {
        return NULL;
    }
    struct span *span = &fetch->spans[fetch->unused_spans];
    fetch->unused_spans = span->next;
    fetch->unused_span_count--;
    *span = (struct span){.slot = SLOT_NONE, .avoided_member = MEMBER_NONE};
    return span;
}

uint64_t reader_timeout_ns(const dlfs_reader *reader, uint64_t bytes)
{
    uint64_t more_ns = bytes < UINT64_MAX / 2 / NS_PER_BYTE ? bytes * NS_PER_BYTE : UINT64_MAX / 2;
    return (uint64_t)reader->config.timeout_ms * 1000000 + more_ns;
}

/* A span that outlives this is read from another copy, by a span of its own. */
static uint64_t timeout_ns(const dlfs_reader *reader)
{
    return reader_timeout_ns(reader, 0) / reader->config.replicas;
}

/* Until when a span is waited for that is asked for now. */
static uint64_t span_deadline_ns(const struct fetch *fetch)
{
    uint64_t alone_ns = fetch->now_ns + timeout_ns(fetch->reader);
    return alone_ns < fetch->deadline_ns ? alone_ns : fetch->deadline_ns;
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

/* A span ended, with its last piece back: again, or done. */
static void span_end(struct fetch *fetch, struct span *span)
{
    if (span->abandoned) {
        if (span->private_memory != NULL) {
            private_memory_release(span->private_memory);
        } else {
            pthread_mutex_lock(&fetch->reader->lock);
            arena_release(fetch->reader, span->slot);
            pthread_mutex_unlock(&fetch->reader->lock);
        }
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

/*
 * Reports a span that is under way as timed out, and keeps the memory that a device may still write
 * to.
 */
static void abandon(struct fetch *fetch, struct span *span)
{
    span->code = DLFS_E_TIMEOUT;
    span->deadline_ns = 0; /* it is not tried again by itself */
    if (span->state == SPAN_WAITING) {
        return; /* fill_operations takes it from its list */
    }
    span->abandoned = true;
    fetch->abandoned_requests += span->in_flight;
    fetch->stats.read_errors++;
    pthread_mutex_lock(&fetch->reader->lock);
    if (span->private_memory != NULL) {
        __atomic_add_fetch(&span->private_memory->references, 1, __ATOMIC_RELAXED);
    } else {
        arena_reference(fetch->reader, span->slot);
    }
    pthread_mutex_unlock(&fetch->reader->lock);
    span->state = SPAN_DONE;
    span_push(fetch, &fetch->done, span_number(fetch, span));
}

/* Begins what a span still lacks; false when a member's queue, which is noted, is full. */
static bool span_begin(struct fetch *fetch, struct span *span, uint64_t *full_members)
{
    if (span->in_flight == 0 && span->code == 0 && span_is_unreachable(fetch, span)) {
        abandon(fetch, span);
    }
    while (span->submitted_bytes < span->length && span->code == 0) {
        if (!request_begin(fetch, span, full_members)) {
            return false;
        }
        if (!span->begun) {
            span->deadline_ns = span_deadline_ns(fetch);
        }
        span->begun = true;
    }
    span->state = SPAN_IN_FLIGHT;
    if (span->in_flight == 0) {
        span_end(fetch, span);
    }
    return true;
}

/* The members that nothing is asked of just now. */
static uint64_t lost_members(const dlfs_reader *reader)
{
    uint64_t lost = 0;
    for (uint32_t member = 0; member < reader->config.member_count; member++) {
        lost |= (uint64_t)member_is_lost(reader, member) << member;
    }
    return lost;
}

/*
 * Asks again for pieces, and begins waiting spans in their order; those whose member has no room
 * are passed over, so that a member that stalls holds up nobody else's.
 */
static void fill_operations(struct fetch *fetch)
{
    struct span_list passed_over = {SLOT_NONE, SLOT_NONE};
    uint64_t full_members = 0;
    uint64_t all = UINT64_MAX >> (DLFS_MEMBERS_MAX - fetch->reader->config.member_count);
    uint64_t lost = fetch->waiting.first != SLOT_NONE ? lost_members(fetch->reader) : 0;
    struct span *span;
    requests_resend(fetch, &full_members);
    while ((full_members == 0 || ((full_members | lost) & all) != all) &&
           (span = span_pop(fetch, &fetch->waiting)) != NULL) {
        if (!span_begin(fetch, span, &full_members)) {
            span_push(fetch, &passed_over, span_number(fetch, span));
        }
    }
    if (passed_over.first == SLOT_NONE) {
        return;
    }
    if (fetch->waiting.first == SLOT_NONE) {
        fetch->waiting = passed_over;
    } else {
        fetch->spans[passed_over.last].next = fetch->waiting.first;
        fetch->waiting.first = passed_over.first;
    }
}

static void submit(struct fetch *fetch, uint32_t member)
{
    dlfs_operation *operations = &fetch->operations[(size_t)member * fetch->reader->config.depth];
    uint32_t count = fetch->operation_counts[member];
    uint32_t gone = 0;
    while (gone < count) {
        int accepted = dlfs_queue_submit(fetch->queues[member], operations + gone, count - gone);
        if (accepted < 0 && count - gone > 1) { /* one that is wrong must not fail the others */
            accepted = dlfs_queue_submit(fetch->queues[member], operations + gone, 1);
        }
        if (accepted == 0) {
            break;
        }
        if (accepted < 0) {
            request_complete(fetch, operations[gone].tag, accepted);
        }
        gone += accepted < 0 ? 1 : (uint32_t)accepted;
    }
    fetch->operation_counts[member] = count - gone;
    memmove(operations, operations + gone, (count - gone) * sizeof(*operations));
}

/* Has the queues take all that they have room for. */
static void push(struct fetch *fetch)
{
    fetch_yield_queues(fetch);
    if (fetch->waiting.first != SLOT_NONE || fetch->resend_requests != SLOT_NONE) {
        fill_operations(fetch);
    }
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        if (fetch->operation_counts[member] > 0) {
            submit(fetch, member);
        }
    }
}

/* Takes a group of completions of a member; returns how many. */
static int collect(struct fetch *fetch, uint32_t member, int timeout_ms)
{
    if (fetch->queues[member] == NULL || dlfs_queue_in_flight(fetch->queues[member]) == 0) {
        return 0;
    }
    int count =
        dlfs_queue_poll(fetch->queues[member], fetch->completions, fetch->group, timeout_ms);
    if (count != 0) {
        fetch_add_time(fetch, &fetch->stats.device_ns);
    }
    if (count > 0) {
        fetch->answered_ns[member] = fetch->now_ns;
    }
    for (int i = 0; i < count; i++) {
        request_complete(fetch, fetch->completions[i].tag, fetch->completions[i].result);
    }
    if (count < 0) {
        member_queue_failed(fetch, member, count);
    }
    return count < 0 ? 1 : count;
}

static int collect_all(struct fetch *fetch)
{
    int total = 0;
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        total += collect(fetch, member, 0);
    }
    return total;
}

/*
 * Waits until one of several members may have something to tell. One alone is waited for by its
 * own queue; one without a descriptor likewise, briefly, before the others are looked at again.
 */
static int wait_members(struct fetch *fetch, int timeout_ms)
{
    uint32_t alone = MEMBER_NONE;
    uint32_t busy = 0;
    nfds_t count = 0;
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        dlfs_queue *queue = fetch->queues[member];
        if (queue == NULL || dlfs_queue_in_flight(queue) == 0) {
            continue;
        }
        int descriptor = dlfs_queue_descriptor(queue);
        if (descriptor >= 0) {
            fetch->waits[count++] = (struct pollfd){.fd = descriptor, .events = POLLIN};
        }
        if (descriptor < 0 || busy == 0) {
            alone = member;
        }
        busy++;
    }
    if (busy == 0) {
        return 0;
    }
    if (busy == 1 || count < busy) {
        int wait_ms = busy == 1 || timeout_ms < MEMBER_POLL_MS ? timeout_ms : MEMBER_POLL_MS;
        return collect(fetch, alone, wait_ms);
    }
    (void)poll(fetch->waits, count, timeout_ms); /* a signal, or nothing: look all the same */
    return collect_all(fetch);
}

void span_redirect(struct fetch *fetch, struct span *span)
{
    span->redirected = true;
    fetch->redirected++;
    abandon(fetch, span);
}

/* When the one of the members with work answered last that has been silent for longest; 0: never.
 */
static uint64_t all_answered_ns(const struct fetch *fetch)
{
    uint64_t oldest = UINT64_MAX;
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        const dlfs_queue *queue = fetch->queues[member];
        if (queue != NULL && dlfs_queue_in_flight(queue) > 0 &&
            fetch->answered_ns[member] < oldest) {
            oldest = fetch->answered_ns[member];
        }
    }
    return oldest == UINT64_MAX ? 0 : oldest;
}

/* Moves all deadlines by the time for which fetch_step was not called. */
static void forgive(struct fetch *fetch, uint64_t gap_ns)
{
    const dlfs_reader_config *config = &fetch->reader->config;
    if (fetch->deadline_ns < UINT64_MAX - gap_ns) {
        fetch->deadline_ns += gap_ns;
    }
    for (uint32_t number = 0; number < fetch->span_capacity; number++) {
        fetch->spans[number].deadline_ns += gap_ns;
    }
    for (uint32_t number = 0; number < config->member_count * config->depth; number++) {
        fetch->requests[number].begun_ns += gap_ns;
    }
}

/* Ends a span that is under way if it is late, or `over` tells that all of them are. */
static void check_span(struct fetch *fetch, struct span *span, uint64_t queued_until_ns, bool over)
{
    bool late =
        fetch->now_ns >= span->deadline_ns && (span->begun || fetch->now_ns >= queued_until_ns);
    if (late) {
        span_mark_late_members(fetch, span);
    }
    if (late && !over && fetch->reader->config.replicas > 1) {
        span_redirect(fetch, span);
    } else if (late || over || (span->state == SPAN_WAITING && span_is_unreachable(fetch, span))) {
        abandon(fetch, span);
    }
}

/*
 * Turns to other copies, the next time after twice the time, for as long as a read may take: all
 * members may be slow rather than silent, and none would ever be waited for long enough.
 */
static void redirect_spans(struct fetch *fetch)
{
    uint32_t before = fetch->redirected;
    uint64_t whole_ns = reader_timeout_ns(fetch->reader, 0);
    if (fetch->now_ns - fetch->redirected_ns > whole_ns) {
        fetch->redirect_rounds = 0;
    }
    uint32_t doublings = fetch->redirect_rounds < REDIRECT_DOUBLINGS_MAX ? fetch->redirect_rounds
                                                                         : REDIRECT_DOUBLINGS_MAX;
    requests_redirect_silent(fetch, whole_ns / SILENT_SHARE << doublings);
    if (fetch->redirected == before) {
        return;
    }
    fetch->redirect_rounds++;
    fetch->redirected_ns = fetch->now_ns;
}

/* Abandons what is past its deadline. */
static void check_spans(struct fetch *fetch)
{
    const dlfs_reader *reader = fetch->reader;
    bool stopped = fetch->stop != NULL && atomic_load_explicit(fetch->stop, memory_order_relaxed);
    uint64_t gap_ns = fetch->now_ns - fetch->checked_ns;
    if (gap_ns < DEADLINE_CHECK_NS && !stopped) {
        return;
    }
    if (gap_ns > STEP_GAP_NS) {
        forgive(fetch, gap_ns - STEP_GAP_NS);
    }
    fetch->checked_ns = fetch->now_ns;
    if (reader->config.replicas > 1) {
        redirect_spans(fetch);
    }
    bool over = stopped || fetch->now_ns >= fetch->deadline_ns;
    uint64_t queued_until_ns = all_answered_ns(fetch) + timeout_ns(reader);
    for (uint32_t number = 0; number < fetch->span_capacity; number++) {
        struct span *span = &fetch->spans[number];
        if (span->state == SPAN_WAITING || span->state == SPAN_IN_FLIGHT) {
            check_span(fetch, span, queued_until_ns, over);
        }
    }
}

void fetch_step(struct fetch *fetch, int timeout_ms)
{
    fetch->now_ns = monotonic_ns();
    push(fetch);
    struct dlfs_queue_waiter *waiter = fetch_queue_waiter(fetch);
    if (waiter != NULL && (timeout_ms < 0 || timeout_ms > LINE_POLL_MS)) {
        timeout_ms = LINE_POLL_MS;
    }
    if (fetch->done.first != SLOT_NONE) {
        timeout_ms = 0;
    }
    if (timeout_ms < 0 || timeout_ms > POLL_MS_MAX) {
        timeout_ms = POLL_MS_MAX;
    }
    int total;
    if (fetch->reader->config.member_count == 1) {
        total = collect(fetch, 0, timeout_ms);
    } else {
        total = collect_all(fetch);
        if (total == 0 && timeout_ms > 0) {
            total = wait_members(fetch, timeout_ms);
        }
    }
    if (total > 0) {
        push(fetch);
    } else if (waiter != NULL && timeout_ms > 0 && !fetch_any_in_flight(fetch)) {
        dlfs_queue_waiter_wait(waiter, timeout_ms);
    }
    fetch_add_time(fetch, &fetch->stats.device_ns);
    check_spans(fetch);
}

struct span *fetch_take_done(struct fetch *fetch)
{
    return span_pop(fetch, &fetch->done);
}

const struct span *fetch_peek_done(const struct fetch *fetch)
{
    return fetch->done.first == SLOT_NONE ? NULL : &fetch->spans[fetch->done.first];
}

void span_recycle(struct fetch *fetch, struct span *span)
{
    span->state = SPAN_UNUSED;
    if (span->abandoned) {
        return; /* span_end does it when the device has let go */
    }
    span->next = fetch->unused_spans;
    fetch->unused_spans = span_number(fetch, span);
    fetch->unused_span_count++;
}

bool fetch_is_idle(const struct fetch *fetch)
{
    return fetch->requests_in_flight == fetch->abandoned_requests &&
           fetch->waiting.first == SLOT_NONE && fetch->done.first == SLOT_NONE;
}
