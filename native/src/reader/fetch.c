/*
 * The step of a fetch: makes requests of waiting spans, submits them to the members' queue pairs,
 * collects completions, and ends what is past its deadline. All queues are kept as full as their
 * depth and IN_FLIGHT_BYTES_MAX allow. Completions are taken in small groups, and the queues are
 * filled again before the caller looks at a span that is done.
 *
 * Deadlines. Waiting for room in a queue does not count while the members answer: a look-ahead may
 * be larger than what a slow device reads within the timeout. Time between two calls of fetch_step
 * beyond STEP_GAP_NS does not count either: an answer that waits in a socket while the process is
 * stopped is not late.
 */
#include "reader/fetch.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "reader/members.h"
#include "reader/requests.h"

#define DEADLINE_CHECK_NS UINT64_C(100000000)
#define STEP_GAP_NS UINT64_C(1000000000)
#define PAUSE_NS UINT64_C(1000000) /* of a pause that counts as latency of the device */
#define REDIRECT_DOUBLINGS_MAX 4u  /* of the silence after which spans are redirected */
/* Divisor of a read's timeout: the spans of a member that is silent for the result are redirected.
 */
#define SILENT_SHARE 16u
#define POLL_MS_MAX 100
#define MEMBER_POLL_MS 1 /* for a queue without a descriptor, which poll() cannot wait for */
#define GROUPS 4u        /* in which a full queue is emptied */
#define LINE_POLL_MS 5   /* while in line for one queue pair and busy with others */

int fetch_create(dlfs_reader *reader, struct fetch **out)
{
    uint32_t members = reader->config.member_count;
    uint32_t depth = reader->config.depth;
    struct fetch *fetch = calloc(1, sizeof(*fetch));
    if (fetch == NULL) {
        return -ENOMEM;
    }
    fetch->reader = reader;
    fetch->deadline_ns = UINT64_MAX;
    fetch->unused_spans = SPAN_NONE;
    fetch->waiting.first = SPAN_NONE;
    fetch->done.first = SPAN_NONE;
    fetch->group = (depth + GROUPS - 1) / GROUPS;
    fetch->members = calloc(members, sizeof(*fetch->members));
    fetch->operations = calloc((size_t)members * depth, sizeof(*fetch->operations));
    fetch->completions = calloc(fetch->group, sizeof(*fetch->completions));
    if (fetch->members == NULL || fetch->operations == NULL || fetch->completions == NULL ||
        requests_create(fetch) < 0) {
        fetch_destroy(fetch);
        return -ENOMEM;
    }
    *out = fetch;
    return 0;
}

void fetch_destroy(struct fetch *fetch)
{
    if (fetch == NULL) {
        return;
    }
    uint32_t members = fetch->members != NULL ? fetch->reader->config.member_count : 0;
    for (uint32_t member = 0; member < members; member++) {
        dlfs_queue_destroy(fetch->members[member].queue);
    }
    for (uint32_t number = 0; number < fetch->span_capacity; number++) {
        if (fetch->spans[number].abandoned) {
            span_release_memory(fetch, &fetch->spans[number]);
        }
    }
    free(fetch->members);
    free(fetch->requests);
    free(fetch->operations);
    free(fetch->completions);
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

/* Makes the remaining requests of a span. Returns false, and notes the member, if a queue is full.
 */
static bool span_begin(struct fetch *fetch, struct span *span, uint64_t *full_members)
{
    if (span->in_flight == 0 && span->code == 0 && span_is_unreachable(fetch, span)) {
        span_abandon(fetch, span);
    }
    while (span->submitted_bytes < span->length && span->code == 0) {
        if (!request_begin(fetch, span, full_members)) {
            return false;
        }
        if (!span->begun) {
            span_begun(fetch, span);
        }
    }
    span->state = SPAN_IN_FLIGHT;
    if (span->in_flight == 0) {
        span_end(fetch, span);
    }
    return true;
}

/*
 * Sends failed requests again, and makes the requests of waiting spans in their order. A span whose
 * member has no room is passed over, so that a slow member does not delay the spans of the others.
 */
static void fill_operations(struct fetch *fetch)
{
    struct span_list passed_over = {SPAN_NONE, SPAN_NONE};
    uint64_t full_members = 0;
    uint64_t all = UINT64_MAX >> (DLFS_MEMBERS_MAX - fetch->reader->config.member_count);
    uint64_t lost = fetch->waiting.first != SPAN_NONE ? dlfs_reader_lost_members(fetch->reader) : 0;
    struct span *span;
    requests_resend(fetch, &full_members);
    while ((full_members == 0 || ((full_members | lost) & all) != all) &&
           (span = span_pop(fetch, &fetch->waiting)) != NULL) {
        if (!span_begin(fetch, span, &full_members)) {
            span_push(fetch, &passed_over, span_number(fetch, span));
        }
    }
    if (passed_over.first == SPAN_NONE) {
        return;
    }
    if (fetch->waiting.first == SPAN_NONE) {
        fetch->waiting = passed_over;
    } else {
        fetch->spans[passed_over.last].next = fetch->waiting.first;
        fetch->waiting.first = passed_over.first;
    }
}

/* Submits the operations of a member. An operation that the queue rejects fails by itself. */
static void submit(struct fetch *fetch, uint32_t member)
{
    dlfs_operation *operations = &fetch->operations[(size_t)member * fetch->reader->config.depth];
    uint32_t count = fetch->members[member].operation_count;
    uint32_t sent = 0;
    while (sent < count) {
        int accepted =
            dlfs_queue_submit(fetch->members[member].queue, operations + sent, count - sent);
        if (accepted < 0 && count - sent > 1) { /* one invalid operation must not fail the others */
            accepted = dlfs_queue_submit(fetch->members[member].queue, operations + sent, 1);
        }
        if (accepted == 0) {
            break;
        }
        if (accepted < 0) {
            request_complete(fetch, operations[sent].tag, accepted);
        }
        sent += accepted < 0 ? 1 : (uint32_t)accepted;
    }
    fetch->members[member].operation_count = count - sent;
    memmove(operations, operations + sent, (count - sent) * sizeof(*operations));
}

/* Fills all queues. */
static void push(struct fetch *fetch)
{
    fetch_yield_queues(fetch);
    if (fetch->waiting.first != SPAN_NONE || fetch->resend_requests != SPAN_NONE) {
        fill_operations(fetch);
    }
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        if (fetch->members[member].operation_count > 0) {
            submit(fetch, member);
        }
    }
}

/* Takes a group of completions of a member, and returns their number. */
static int collect(struct fetch *fetch, uint32_t member, int timeout_ms)
{
    if (fetch->members[member].queue == NULL ||
        dlfs_queue_in_flight(fetch->members[member].queue) == 0) {
        return 0;
    }
    int count =
        dlfs_queue_poll(fetch->members[member].queue, fetch->completions, fetch->group, timeout_ms);
    if (count != 0) {
        fetch_add_time(fetch, &fetch->stats.device_ns);
    }
    for (int i = 0; i < count; i++) {
        if (fetch->completions[i].result != DLFS_E_TIMEOUT) {
            fetch->members[member].answered_ns = fetch->now_ns;
        }
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
 * Waits until one of several members may have completions. A single one is waited for by its own
 * queue. One without a descriptor is waited for briefly, before the others are polled again.
 */
static int wait_members(struct fetch *fetch, int timeout_ms)
{
    struct pollfd waits[DLFS_MEMBERS_MAX];
    uint32_t alone = MEMBER_NONE;
    uint32_t busy = 0;
    nfds_t count = 0;
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        dlfs_queue *queue = fetch->members[member].queue;
        if (queue == NULL || dlfs_queue_in_flight(queue) == 0) {
            continue;
        }
        int descriptor = dlfs_queue_descriptor(queue);
        if (descriptor >= 0) {
            waits[count++] = (struct pollfd){.fd = descriptor, .events = POLLIN};
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
    (void)poll(waits, count, timeout_ms); /* collects also after a signal or a timeout */
    return collect_all(fetch);
}

/* Returns the last answer of the member that has been silent for longest, of those with requests in
 * flight; 0 if there is none. */
static uint64_t all_answered_ns(const struct fetch *fetch)
{
    uint64_t oldest = UINT64_MAX;
    for (uint32_t member = 0; member < fetch->reader->config.member_count; member++) {
        const dlfs_queue *queue = fetch->members[member].queue;
        if (queue != NULL && dlfs_queue_in_flight(queue) > 0 &&
            fetch->members[member].answered_ns < oldest) {
            oldest = fetch->members[member].answered_ns;
        }
    }
    return oldest == UINT64_MAX ? 0 : oldest;
}

/* Moves all deadlines by the time for which fetch_step was not called. That of the whole read
 * includes the time of connecting devices. */
static void move_deadlines(struct fetch *fetch, uint64_t gap_ns)
{
    const dlfs_reader_config *config = &fetch->reader->config;
    uint64_t idle_ns = gap_ns > fetch->connect_ns ? gap_ns - fetch->connect_ns : 0;
    if (fetch->deadline_ns < UINT64_MAX - idle_ns) {
        fetch->deadline_ns += idle_ns;
    }
    for (uint32_t number = 0; number < fetch->span_capacity; number++) {
        fetch->spans[number].deadline_ns += gap_ns;
        fetch->spans[number].begun_ns += gap_ns;
    }
    for (uint32_t number = 0; number < config->member_count * config->depth; number++) {
        fetch->requests[number].begun_ns += gap_ns;
    }
}

void fetch_resume(struct fetch *fetch)
{
    uint64_t before_ns = fetch->now_ns;
    fetch->now_ns = monotonic_ns();
    uint64_t pause_ns = fetch->now_ns - before_ns;
    if (pause_ns > PAUSE_NS) {
        move_deadlines(fetch, pause_ns - PAUSE_NS);
        fetch->checked_ns += pause_ns - PAUSE_NS;
    }
}

/* Ends a span that is late, or any span if the whole read is `over`. */
static void check_span(struct fetch *fetch, struct span *span, uint64_t queued_until_ns, bool over)
{
    bool late = span_is_late(fetch, span, queued_until_ns);
    if (late && !over && fetch->reader->config.replicas > 1) {
        span_redirect(fetch, span);
    } else if (late || over || (span->state == SPAN_WAITING && span_is_unreachable(fetch, span))) {
        span_abandon(fetch, span);
    }
}

/*
 * Redirects the spans of silent members. The silence is doubled each time, within the timeout of a
 * read: all members may be slow rather than silent, and none would be given enough time.
 */
static void redirect_spans(struct fetch *fetch)
{
    uint32_t before = fetch->redirected;
    uint64_t whole_ns = reader_timeout_ns(fetch->reader);
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

/* Returns true if a span under way has outlived its deadline. */
static bool any_late(const struct fetch *fetch, uint64_t queued_until_ns)
{
    bool late = false;
    for (uint32_t number = 0; number < fetch->span_capacity && !late; number++) {
        const struct span *span = &fetch->spans[number];
        late = span_is_under_way(span) && span_is_late(fetch, span, queued_until_ns);
    }
    return late;
}

/* Ends the spans that are past their deadline. */
static void check_spans(struct fetch *fetch)
{
    const dlfs_reader *reader = fetch->reader;
    bool stopped = fetch_is_stopped(fetch);
    uint64_t gap_ns = fetch->now_ns - fetch->checked_ns;
    if (gap_ns < DEADLINE_CHECK_NS && !stopped) {
        return;
    }
    if (gap_ns > STEP_GAP_NS) {
        move_deadlines(fetch, gap_ns - STEP_GAP_NS);
    }
    fetch->checked_ns = fetch->now_ns;
    fetch->connect_ns = 0;
    if (reader->config.replicas > 1) {
        redirect_spans(fetch);
    }
    bool over = stopped || fetch->now_ns >= fetch->deadline_ns;
    uint64_t queued_until_ns = all_answered_ns(fetch) + span_timeout_ns(reader);
    if (any_late(fetch, queued_until_ns)) {
        requests_mark_late_members(fetch, queued_until_ns);
    }
    for (uint32_t number = 0; number < fetch->span_capacity; number++) {
        struct span *span = &fetch->spans[number];
        if (span_is_under_way(span)) {
            check_span(fetch, span, queued_until_ns, over);
        }
    }
    requests_abandon_hung(fetch);
}

void fetch_step(struct fetch *fetch, int timeout_ms)
{
    fetch->now_ns = monotonic_ns();
    push(fetch);
    struct dlfs_queue_waiter *waiter = fetch_queue_waiter(fetch);
    if (waiter != NULL && (timeout_ms < 0 || timeout_ms > LINE_POLL_MS)) {
        timeout_ms = LINE_POLL_MS;
    }
    if (fetch->done.first != SPAN_NONE) {
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
