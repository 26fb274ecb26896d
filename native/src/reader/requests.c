/*
 * The requests of spans, each for the part of a span in one chunk: which copy of the chunk it
 * reads, and how another copy is read instead if that fails. The first copy is read unless its
 * member is lost or to be avoided. Each copy is tried once. A request that fails on all copies
 * fails its span.
 */
#include "reader/requests.h"

#include <errno.h>
#include <stdlib.h>

#include "reader/fetch_queues.h"
#include "reader/members.h"

#define COPY_NONE UINT32_MAX
/* Penalties of a copy; the copy with the lowest sum is read. */
#define PENALTY_LOST 1u
#define PENALTY_AVOIDED 2u
#define PENALTY_MAX 4u

int requests_create(struct fetch *fetch)
{
    uint32_t count = fetch->reader->config.member_count * fetch->reader->config.depth;
    fetch->requests = calloc(count, sizeof(*fetch->requests));
    if (fetch->requests == NULL) {
        return -ENOMEM;
    }
    for (uint32_t number = 0; number < count; number++) {
        fetch->requests[number].member = MEMBER_NONE;
        fetch->requests[number].next = number + 1 < count ? number + 1 : REQUEST_NONE;
    }
    fetch->unused_requests = 0;
    fetch->resend_requests = REQUEST_NONE;
    uint32_t block_bytes = fetch->reader->config.block_bytes;
    size_t bytes = (size_t)block_bytes * fetch->reader->config.member_count;
    fetch->probe_memory = aligned_alloc(block_bytes, bytes);
    return fetch->probe_memory != NULL ? 0 : -ENOMEM;
}

static uint32_t request_number(const struct fetch *fetch, const struct request *request)
{
    return (uint32_t)(request - fetch->requests);
}

static void add_operation(struct fetch *fetch, uint32_t member, struct request *request,
                          uint8_t *memory, uint64_t offset_bytes)
{
    uint32_t depth = fetch->reader->config.depth;
    uint32_t *count = &fetch->members[member].operation_count;
    fetch->operations[(size_t)member * depth + (*count)++] = (dlfs_operation){
        .buffer = memory,
        .offset_bytes = offset_bytes,
        .length_bytes = request->length,
        .kind = DLFS_OP_READ,
        .tag = request_number(fetch, request),
    };
    request->member = member;
    request->begun_ns = fetch->now_ns;
    fetch->members[member].bytes_in_flight += request->length;
    fetch->stats.reads++;
    fetch->stats.read_bytes += request->length;
}

void member_probe(struct fetch *fetch, uint32_t member, uint64_t offset_bytes)
{
    uint64_t bit = UINT64_C(1) << member;
    uint32_t block_bytes = fetch->reader->config.block_bytes;
    uint32_t number = fetch->unused_requests;
    if ((fetch->probing & bit) != 0 || number == REQUEST_NONE ||
        !member_is_reachable(fetch, member, true) || !member_has_room(fetch, member)) {
        return;
    }
    struct request *request = &fetch->requests[number];
    fetch->unused_requests = request->next;
    fetch->requests_in_flight++;
    fetch->abandoned_requests++;
    fetch->probing |= bit;
    *request = (struct request){.length = block_bytes, .span = SPAN_NONE};
    add_operation(fetch, member, request, fetch->probe_memory + (size_t)block_bytes * member,
                  offset_bytes);
}

/* Returns true if a lost member may be sent a request nevertheless. */
static bool may_ask_lost_member(struct fetch *fetch, uint32_t member, uint64_t offset_bytes,
                                bool *due)
{
    dlfs_reader *reader = fetch->reader;
    *due = member_take_probe(reader, member);
    if (*due && reader->config.replicas > 1) {
        *due = false;
        member_probe(fetch, member, offset_bytes);
    }
    return *due || !member_is_hung(reader, member);
}

/* Chooses the copy to read, and finds where it lies. Returns COPY_NONE if none is left. */
static uint32_t choose_copy(struct fetch *fetch, const struct span *span,
                            const struct request *request, struct member_location *location)
{
    dlfs_reader *reader = fetch->reader;
    uint32_t chosen = COPY_NONE;
    uint32_t least = PENALTY_MAX;
    for (uint32_t copy = 0; copy < reader->config.replicas && least > 0; copy++) {
        if (request->tried >> copy & 1) {
            continue;
        }
        struct member_location at = member_locate(reader, request->address, copy);
        bool due = true;
        if (member_is_lost(reader, at.member) &&
            !may_ask_lost_member(fetch, at.member, at.offset_bytes, &due)) {
            continue;
        }
        uint32_t penalty = due ? 0 : PENALTY_LOST;
        penalty += at.member == span->avoided_member ? PENALTY_AVOIDED : 0;
        if (penalty < least && member_is_reachable(fetch, at.member, due)) {
            least = penalty;
            chosen = copy;
            *location = at;
        }
    }
    return chosen;
}

enum assigned { ASSIGNED, ASSIGN_QUEUE_FULL, ASSIGN_NO_COPY };

/* Makes an operation of a request. Notes the member in full_members if its queue is full. */
static enum assigned request_assign(struct fetch *fetch, struct request *request,
                                    uint64_t *full_members)
{
    struct span *span = &fetch->spans[request->span];
    struct member_location at;
    uint32_t copy = choose_copy(fetch, span, request, &at);
    if (copy == COPY_NONE) {
        return ASSIGN_NO_COPY;
    }
    if (!member_has_room(fetch, at.member)) {
        *full_members |= UINT64_C(1) << at.member;
        return ASSIGN_QUEUE_FULL;
    }
    add_operation(fetch, at.member, request, span->memory + (request->address - span->address),
                  at.offset_bytes);
    request->copy = copy;
    span->asked_members |= UINT64_C(1) << at.member;
    fetch->stats.failovers += copy > 0;
    return ASSIGNED;
}

/* Returns why no copy can be read: the code of the member that has the first copy. */
static int absence_code(const dlfs_reader *reader, const struct request *request)
{
    int code = dlfs_reader_member_code(reader, member_locate(reader, request->address, 0).member);
    return code < 0 ? code : DLFS_E_LOST;
}

static void request_recycle(struct fetch *fetch, struct request *request)
{
    fetch->requests_in_flight--;
    request->member = MEMBER_NONE;
    request->next = fetch->unused_requests;
    fetch->unused_requests = request_number(fetch, request);
}

static void request_end(struct fetch *fetch, struct request *request, int code)
{
    struct span *span = &fetch->spans[request->span];
    if (span->abandoned) {
        fetch->abandoned_requests--;
    }
    request_recycle(fetch, request);
    span_request_ended(fetch, span, request, code);
}

bool request_begin(struct fetch *fetch, struct span *span, uint64_t *full_members)
{
    if (fetch->unused_requests == REQUEST_NONE) { /* all wait for room in other queues */
        *full_members = UINT64_MAX;
        return false;
    }
    uint32_t chunk_bytes = fetch->reader->config.chunk_bytes;
    struct request *request = &fetch->requests[fetch->unused_requests];
    fetch->unused_requests =
        request->next; /* before request_assign, which may take one for a probe */
    uint64_t address = span->address + span->submitted_bytes;
    uint64_t length = chunk_bytes - (address & (chunk_bytes - 1));
    uint64_t left = span->length - span->submitted_bytes;
    *request = (struct request){
        .address = address,
        .length = (uint32_t)(length < left ? length : left),
        .span = (uint32_t)(span - fetch->spans),
        .member = MEMBER_NONE,
    };
    enum assigned assigned = request_assign(fetch, request, full_members);
    if (assigned == ASSIGN_QUEUE_FULL) {
        request->next = fetch->unused_requests;
        fetch->unused_requests = request_number(fetch, request);
        return false;
    }
    span->submitted_bytes += request->length;
    span->in_flight++;
    fetch->requests_in_flight++;
    if (assigned == ASSIGN_NO_COPY) {
        request_end(fetch, request, absence_code(fetch->reader, request));
    }
    return true;
}

void requests_resend(struct fetch *fetch, uint64_t *full_members)
{
    uint32_t number = fetch->resend_requests;
    fetch->resend_requests = REQUEST_NONE;
    while (number != REQUEST_NONE) {
        struct request *request = &fetch->requests[number];
        const struct span *span = &fetch->spans[request->span];
        uint32_t next = request->next;
        int code = span->abandoned ? DLFS_E_TIMEOUT : span->code;
        enum assigned assigned =
            code < 0 ? ASSIGN_NO_COPY : request_assign(fetch, request, full_members);
        if (assigned == ASSIGN_QUEUE_FULL) {
            request->next = fetch->resend_requests;
            fetch->resend_requests = number;
        } else if (assigned == ASSIGN_NO_COPY) {
            request_end(fetch, request, code < 0 ? code : absence_code(fetch->reader, request));
        }
        number = next;
    }
}

/* Returns the bucket of dlfs_member_stats that counts a latency. */
static uint32_t latency_bucket(uint64_t latency_ns)
{
    uint64_t latency_us = latency_ns / 1000;
    uint32_t bucket = latency_us < 2 ? 0 : 63 - (uint32_t)__builtin_clzll(latency_us);
    return bucket < DLFS_LATENCY_BUCKETS ? bucket : DLFS_LATENCY_BUCKETS - 1;
}

static void count_answer(struct fetch *fetch, const struct request *request, int64_t result)
{
    dlfs_member_stats *stats = &fetch->members[request->member].stats;
    uint64_t latency_ns = fetch->now_ns - request->begun_ns;
    stats->reads++;
    stats->read_bytes += result > 0 ? (uint64_t)result : 0;
    stats->errors += result < 0;
    stats->latency_ns += latency_ns;
    stats->latency[latency_bucket(latency_ns)]++;
}

void request_complete(struct fetch *fetch, uint64_t number, int64_t result)
{
    struct request *request = &fetch->requests[number];
    uint32_t member = request->member;
    fetch->members[member].bytes_in_flight -= request->length;
    count_answer(fetch, request, result);
    if (result >= 0) {
        fetch->members[member].arrived_bytes += request->length;
        member_succeeded(fetch->reader, member);
    } else {
        member_failed(fetch->reader, member, (int)result);
    }
    if (request->span == SPAN_NONE) {
        if (result < 0 && result != DLFS_E_TIMEOUT) {
            member_answered_error(fetch->reader, member);
        }
        fetch->probing &= ~(UINT64_C(1) << member);
        fetch->abandoned_requests--;
        request_recycle(fetch, request);
        return;
    }
    struct span *span = &fetch->spans[request->span];
    if (result >= 0) {
        fetch_credit(fetch, request->length);
        request_end(fetch, request, 0);
        return;
    }
    if (result == DLFS_E_TIMEOUT) {
        span->silent_members |= UINT64_C(1) << member;
    } else {
        span->silent_members &= ~(UINT64_C(1) << member);
    }
    request->tried |= UINT32_C(1) << request->copy;
    bool all_tried = request->tried == (UINT32_C(1) << fetch->reader->config.replicas) - 1;
    if (span->abandoned || span->code < 0 || all_tried) {
        request_end(fetch, request, (int)result);
        return;
    }
    fetch->stats.read_errors++;
    request->member = MEMBER_NONE;
    request->next = fetch->resend_requests;
    fetch->resend_requests = (uint32_t)number;
}

void member_queue_failed(struct fetch *fetch, uint32_t member, int code)
{
    const dlfs_reader_config *config = &fetch->reader->config;
    /* Destroyed first: then no device writes to the memory of its requests any more. */
    dlfs_queue_destroy(fetch->members[member].queue);
    fetch->members[member].queue = NULL;
    fetch->members[member].operation_count = 0;
    for (uint32_t number = 0; number < config->member_count * config->depth; number++) {
        if (fetch->requests[number].member == member) {
            request_complete(fetch, number, code);
        }
    }
    member_set_lost(fetch->reader, member, code);
}

/* ---- members that do not answer -------------------------------------------------------------- */

/* Returns for how long a member has answered nothing that was asked since begun_ns. */
static uint64_t silence_ns(const struct fetch *fetch, uint32_t member, uint64_t begun_ns)
{
    uint64_t answered = fetch->members[member].answered_ns;
    return fetch->now_ns - (answered > begun_ns ? answered : begun_ns);
}

/* Marks the member of a request as hung or lost, whose span is late. */
static void mark_late_member(struct fetch *fetch, const struct request *request,
                             const struct span *span)
{
    /* A device that gave up in between, and was asked again, has been silent since the first time.
     */
    bool gave_up = (span->silent_members >> request->member & 1) != 0;
    uint64_t since_ns = gave_up ? span->begun_ns : request->begun_ns;
    uint64_t half_ns = reader_timeout_ns(fetch->reader) / 2;
    if (silence_ns(fetch, request->member, since_ns) >= half_ns) {
        member_set_hung(fetch->reader, request->member);
    } else if (fetch->reader->config.replicas > 1) {
        member_set_lost(fetch->reader, request->member, DLFS_E_TIMEOUT);
    }
}

/* Returns the span that a request under way reads a part of; NULL if there is none. */
static struct span *span_asked_for(const struct fetch *fetch, const struct request *request)
{
    bool none = request->member == MEMBER_NONE || request->span == SPAN_NONE;
    return none ? NULL : &fetch->spans[request->span];
}

void requests_mark_late_members(struct fetch *fetch, uint64_t queued_until_ns)
{
    const dlfs_reader_config *config = &fetch->reader->config;
    for (uint32_t number = 0; number < config->member_count * config->depth; number++) {
        const struct request *request = &fetch->requests[number];
        const struct span *span = span_asked_for(fetch, request);
        if (span != NULL && span_is_under_way(span) && span_is_late(fetch, span, queued_until_ns)) {
            mark_late_member(fetch, request, span);
        }
    }
}

/* Returns true if another copy of a request can be read. Also probes lost members that are due. */
static bool request_has_other_copy(struct fetch *fetch, const struct request *request)
{
    dlfs_reader *reader = fetch->reader;
    bool found = false;
    for (uint32_t copy = 0; copy < reader->config.replicas; copy++) {
        struct member_location at = member_locate(reader, request->address, copy);
        if (at.member == request->member) {
            continue;
        }
        if (!member_is_lost(reader, at.member)) {
            found = true;
        } else if (member_take_probe(reader, at.member)) {
            member_probe(fetch, at.member, at.offset_bytes);
        }
    }
    return found;
}

void requests_redirect_silent(struct fetch *fetch, uint64_t silence_max_ns)
{
    const dlfs_reader_config *config = &fetch->reader->config;
    for (uint32_t number = 0; number < config->member_count * config->depth; number++) {
        const struct request *request = &fetch->requests[number];
        struct span *span = span_asked_for(fetch, request);
        if (span == NULL || span->abandoned ||
            silence_ns(fetch, request->member, request->begun_ns) < silence_max_ns) {
            continue;
        }
        member_set_lost(fetch->reader, request->member, DLFS_E_TIMEOUT);
        if (request_has_other_copy(fetch, request)) {
            span_redirect(fetch, span);
        }
    }
}

bool span_is_unreachable(const struct fetch *fetch, const struct span *span)
{
    const dlfs_reader *reader = fetch->reader;
    if (dlfs_reader_lost_members(reader) == 0) {
        return false;
    }
    for (uint32_t copy = 0; copy < reader->config.replicas; copy++) {
        uint64_t address = span->address + span->submitted_bytes;
        if (!member_is_hung(reader, member_locate(reader, address, copy).member)) {
            return false;
        }
    }
    return true;
}

void requests_abandon_hung(struct fetch *fetch)
{
    const dlfs_reader *reader = fetch->reader;
    if (dlfs_reader_lost_members(reader) == 0 || reader->config.replicas > 1) {
        return;
    }
    uint32_t count = reader->config.member_count * reader->config.depth;
    for (uint32_t number = 0; number < count; number++) {
        const struct request *request = &fetch->requests[number];
        if (request->member == MEMBER_NONE || request->span == SPAN_NONE ||
            !member_is_hung(reader, request->member)) {
            continue;
        }
        struct span *span = &fetch->spans[request->span];
        if (span->state == SPAN_IN_FLIGHT) {
            span_abandon(fetch, span);
        }
    }
}
