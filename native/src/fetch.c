/*
 * Brings spans of a dataset's data space into memory. A span is cut into pieces at chunk
 * boundaries, each piece goes to its member's queue pair, all queues are kept as full as their
 * depth allows, and a span that failed is tried again as a whole. A span that outlives its deadline
 * is reported with DLFS_E_TIMEOUT while its memory stays referenced until the device has let go of
 * it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "reader.h"

#define DEADLINE_CHECK_NS UINT64_C(100000000)
#define POLL_MS_MAX 100
#define MEMBER_POLL_MS 1 /* on one of several members, before the others are looked at again */

uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static void span_push(struct fetch *fetch, struct span_list *list, uint32_t number)
{
    fetch->spans[number].next = SLOT_NONE;
    if (list->first == SLOT_NONE)
        list->first = number;
    else
        fetch->spans[list->last].next = number;
    list->last = number;
}

static struct span *span_pop(struct fetch *fetch, struct span_list *list)
{
    if (list->first == SLOT_NONE)
        return NULL;
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
    if (!fetch)
        return -ENOMEM;
    int code = -ENOMEM;
    fetch->reader = reader;
    fetch->unused = SLOT_NONE;
    fetch->waiting.first = SLOT_NONE;
    fetch->done.first = SLOT_NONE;
    fetch->queues = calloc(members, sizeof(dlfs_queue *));
    fetch->operations = calloc((size_t)members * depth, sizeof(dlfs_operation));
    fetch->operation_counts = calloc(members, sizeof(uint32_t));
    fetch->completions = calloc(depth, sizeof(dlfs_completion));
    if (!fetch->queues || !fetch->operations || !fetch->operation_counts || !fetch->completions)
        goto failed;
    for (uint32_t member = 0; member < members; member++) {
        code = dlfs_queue_create(reader->devices[member], depth, &fetch->queues[member]);
        if (code < 0)
            goto failed;
    }
    *out = fetch;
    return 0;

failed:
    fetch_destroy(fetch);
    return code;
}

void fetch_destroy(struct fetch *fetch)
{
    if (!fetch)
        return;
    for (uint32_t member = 0; fetch->queues && member < fetch->reader->config.member_count;
         member++)
        dlfs_queue_destroy(fetch->queues[member]);
    for (uint32_t number = 0; number < fetch->span_capacity; number++) {
        struct span *span = &fetch->spans[number];
        if (span->abandoned && span->block)
            block_release(span->block);
        if (span->abandoned && span->slot != SLOT_NONE) {
            pthread_mutex_lock(&fetch->reader->lock);
            arena_release(fetch->reader, span->slot);
            pthread_mutex_unlock(&fetch->reader->lock);
        }
    }
    free(fetch->queues);
    free(fetch->operations);
    free(fetch->operation_counts);
    free(fetch->completions);
    free(fetch->spans);
    free(fetch->wants);
    free(fetch->plan);
    free(fetch);
}

int fetch_reserve_plan(struct fetch *fetch, uint64_t count)
{
    if (count <= fetch->plan_capacity)
        return 0;
    free(fetch->wants);
    free(fetch->plan);
    fetch->plan_capacity = 0;
    fetch->wants = malloc(count * sizeof(*fetch->wants));
    fetch->plan = malloc(count * sizeof(*fetch->plan));
    if (!fetch->wants || !fetch->plan)
        return -ENOMEM;
    fetch->plan_capacity = count;
    return 0;
}

int fetch_reserve(struct fetch *fetch, uint32_t unused)
{
    if (unused <= fetch->unused_count)
        return 0;
    uint32_t count = fetch->span_capacity + unused - fetch->unused_count;
    struct span *spans = realloc(fetch->spans, (size_t)count * sizeof(*spans));
    if (!spans)
        return -ENOMEM;
    memset(spans + fetch->span_capacity, 0, (count - fetch->span_capacity) * sizeof(*spans));
    fetch->spans = spans;
    for (uint32_t number = fetch->span_capacity; number < count; number++) {
        spans[number].next = fetch->unused;
        spans[number].slot = SLOT_NONE;
        fetch->unused = number;
    }
    fetch->unused_count += count - fetch->span_capacity;
    fetch->span_capacity = count;
    return 0;
}

struct span *fetch_span(struct fetch *fetch)
{
    if (fetch->unused == SLOT_NONE)
        return NULL;
    struct span *span = &fetch->spans[fetch->unused];
    fetch->unused = span->next;
    fetch->unused_count--;
    *span = (struct span){.slot = SLOT_NONE};
    return span;
}

void fetch_start(struct fetch *fetch, struct span *span)
{
    span->submitted = 0;
    span->code = 0;
    span->state = SPAN_WAITING;
    if (span->deadline_ns == 0)
        span->deadline_ns = clock_ns() + (uint64_t)fetch->reader->config.timeout_ms * 1000000;
    span_push(fetch, &fetch->waiting, span_number(fetch, span));
}

void fetch_locate(const dlfs_reader *reader, uint64_t address, uint32_t *member,
                  uint64_t *offset_bytes)
{
    uint64_t chunk = address >> reader->chunk_shift;
    uint64_t low = 0;
    uint64_t high = reader->config.extent_count;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (reader->extent_starts[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    uint64_t volume_chunk = reader->extents[low].first_chunk + chunk - reader->extent_starts[low];
    uint64_t row = volume_chunk / reader->config.member_count;
    *member = (uint32_t)(volume_chunk % reader->config.member_count);
    *offset_bytes = reader->config.data_offset_bytes + (row << reader->chunk_shift) +
                    (address & (reader->config.chunk_bytes - 1));
}

/* A span ended, with its last piece back: again, or done. */
static void span_end(struct fetch *fetch, struct span *span)
{
    if (span->abandoned) {
        if (span->block) {
            block_release(span->block);
        } else {
            pthread_mutex_lock(&fetch->reader->lock);
            arena_release(fetch->reader, span->slot);
            pthread_mutex_unlock(&fetch->reader->lock);
        }
        span->abandoned = false;
        if (span->state == SPAN_UNUSED)
            fetch_recycle(fetch, span);
        return;
    }
    if (span->code < 0)
        fetch->stats.read_errors++;
    if (span->code < 0 && span->attempts < fetch->reader->config.retry_count &&
        clock_ns() < span->deadline_ns) {
        span->attempts++;
        fetch->stats.retries++;
        fetch_start(fetch, span);
        return;
    }
    span->state = SPAN_DONE;
    span_push(fetch, &fetch->done, span_number(fetch, span));
}

static void piece_end(struct fetch *fetch, uint64_t tag, int64_t result)
{
    struct span *span = &fetch->spans[tag];
    fetch->pieces_in_flight--;
    if (span->abandoned)
        fetch->abandoned_pieces--;
    if (result < 0 && span->code == 0)
        span->code = (int)result;
    bool all_submitted = span->submitted == span->length || span->code < 0;
    if (--span->in_flight == 0 && all_submitted && span->state != SPAN_WAITING)
        span_end(fetch, span);
}

/* Turns the next piece of a span into an operation; false when its member's queue is full. */
static bool piece_begin(struct fetch *fetch, struct span *span, uint64_t *full_members)
{
    const dlfs_reader *reader = fetch->reader;
    uint32_t member;
    uint64_t offset;
    uint64_t address = span->address + span->submitted;
    fetch_locate(reader, address, &member, &offset);
    uint32_t *count = &fetch->operation_counts[member];
    if (dlfs_queue_in_flight(fetch->queues[member]) + *count >= reader->config.depth) {
        *full_members |= UINT64_C(1) << member;
        return false;
    }
    uint64_t length = reader->config.chunk_bytes - (address & (reader->config.chunk_bytes - 1));
    if (length > span->length - span->submitted)
        length = span->length - span->submitted;
    fetch->operations[(size_t)member * reader->config.depth + (*count)++] = (dlfs_operation){
        .buffer = span->memory + span->submitted,
        .offset_bytes = offset,
        .length_bytes = (uint32_t)length,
        .kind = DLFS_OP_READ,
        .tag = span_number(fetch, span),
    };
    span->submitted += length;
    span->in_flight++;
    fetch->pieces_in_flight++;
    fetch->stats.reads++;
    fetch->stats.read_bytes += length;
    return true;
}

/* Begins what a span still lacks; false when a member's queue, which is noted, is full. */
static bool span_begin(struct fetch *fetch, struct span *span, uint64_t *full_members)
{
    while (span->submitted < span->length && span->code == 0)
        if (!piece_begin(fetch, span, full_members))
            return false;
    span->state = SPAN_IN_FLIGHT;
    if (span->in_flight == 0)
        span_end(fetch, span);
    return true;
}

/*
 * Begins waiting spans in their order; those whose member has no room are passed over, so that a
 * member that stalls holds up nobody else's.
 */
static void fill_operations(struct fetch *fetch)
{
    struct span_list held = {SLOT_NONE, SLOT_NONE};
    uint64_t full_members = 0;
    int members = (int)fetch->reader->config.member_count;
    struct span *span;
    while (__builtin_popcountll(full_members) < members &&
           (span = span_pop(fetch, &fetch->waiting)))
        if (!span_begin(fetch, span, &full_members))
            span_push(fetch, &held, span_number(fetch, span));
    if (held.first == SLOT_NONE)
        return;
    if (fetch->waiting.first == SLOT_NONE) {
        fetch->waiting = held;
    } else {
        fetch->spans[held.last].next = fetch->waiting.first;
        fetch->waiting.first = held.first;
    }
}

static void submit(struct fetch *fetch, uint32_t member)
{
    dlfs_operation *operations = &fetch->operations[(size_t)member * fetch->reader->config.depth];
    uint32_t count = fetch->operation_counts[member];
    uint32_t gone = 0;
    while (gone < count) {
        int accepted = dlfs_queue_submit(fetch->queues[member], operations + gone, count - gone);
        if (accepted < 0 && count - gone > 1) /* one that is wrong must not fail the others */
            accepted = dlfs_queue_submit(fetch->queues[member], operations + gone, 1);
        if (accepted == 0)
            break;
        if (accepted < 0)
            piece_end(fetch, operations[gone].tag, accepted);
        gone += accepted < 0 ? 1 : (uint32_t)accepted;
    }
    fetch->operation_counts[member] = count - gone;
    memmove(operations, operations + gone, (count - gone) * sizeof(*operations));
}

static int collect(struct fetch *fetch, uint32_t member, int timeout_ms)
{
    int count = dlfs_queue_poll(fetch->queues[member], fetch->completions,
                                fetch->reader->config.depth, timeout_ms);
    for (int i = 0; i < count; i++)
        piece_end(fetch, fetch->completions[i].tag, fetch->completions[i].result);
    return count;
}

/*
 * Reports a span that is under way as failed, and keeps the memory that a device may still write
 * to.
 */
static void abandon(struct fetch *fetch, struct span *span, int code)
{
    span->code = code;
    if (span->state == SPAN_WAITING)
        return; /* fill_operations takes it from its list */
    span->abandoned = true;
    fetch->abandoned_pieces += span->in_flight;
    fetch->stats.read_errors++;
    pthread_mutex_lock(&fetch->reader->lock);
    if (span->block)
        __atomic_add_fetch(&span->block->references, 1, __ATOMIC_RELAXED);
    else
        arena_reference(fetch->reader, span->slot);
    pthread_mutex_unlock(&fetch->reader->lock);
    span->state = SPAN_DONE;
    span_push(fetch, &fetch->done, span_number(fetch, span));
}

/*
 * Abandons all that is under way when the device failed as a whole, else what is past its deadline.
 */
static void check_spans(struct fetch *fetch, int device_code)
{
    uint64_t now = clock_ns();
    if (device_code == 0 && now - fetch->checked_ns < DEADLINE_CHECK_NS)
        return;
    fetch->checked_ns = now;
    for (uint32_t number = 0; number < fetch->span_capacity; number++) {
        struct span *span = &fetch->spans[number];
        bool under_way = span->state == SPAN_WAITING || span->state == SPAN_IN_FLIGHT;
        if (under_way && device_code < 0)
            abandon(fetch, span, device_code);
        else if (under_way && now >= span->deadline_ns)
            abandon(fetch, span, DLFS_E_TIMEOUT);
    }
}

void fetch_step(struct fetch *fetch, int timeout_ms)
{
    uint32_t members = fetch->reader->config.member_count;
    fill_operations(fetch);
    for (uint32_t member = 0; member < members; member++)
        submit(fetch, member);
    if (fetch->done.first != SLOT_NONE)
        timeout_ms = 0;
    if (timeout_ms < 0 || timeout_ms > POLL_MS_MAX)
        timeout_ms = POLL_MS_MAX;
    int total = 0;
    for (uint32_t member = 0; members > 1 && total >= 0 && member < members; member++) {
        int count = collect(fetch, member, 0);
        total = count < 0 ? count : total + count;
    }
    if (members > 1 && timeout_ms > MEMBER_POLL_MS)
        timeout_ms = MEMBER_POLL_MS;
    for (uint32_t member = 0; total == 0 && member < members; member++)
        if (dlfs_queue_in_flight(fetch->queues[member]) > 0)
            total = collect(fetch, member, timeout_ms);
    check_spans(fetch, total < 0 ? total : 0);
}

struct span *fetch_done(struct fetch *fetch)
{
    return span_pop(fetch, &fetch->done);
}

void fetch_recycle(struct fetch *fetch, struct span *span)
{
    span->state = SPAN_UNUSED;
    if (span->abandoned)
        return; /* span_end does it when the device has let go */
    span->next = fetch->unused;
    fetch->unused = span_number(fetch, span);
    fetch->unused_count++;
}

bool fetch_idle(const struct fetch *fetch)
{
    return fetch->pieces_in_flight == fetch->abandoned_pieces &&
           fetch->waiting.first == SLOT_NONE && fetch->done.first == SLOT_NONE;
}
