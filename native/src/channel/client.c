/*
 * The client's end of a channel: sends requests to the service and waits for their answers.
 *
 * A caller holds call_lock from its request to the answer. state_lock is held only while an entry
 * is put into the ring or a batch changes its list. So any thread can release a batch, even a
 * garbage collector, while another thread waits for an answer. The submission ring has room for the
 * release of every batch that the client can have, and for one request.
 *
 * channel/resident.c reads resident samples without a request; channel/batch_pool.c owns the
 * batches and frees the client.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel/channel.h"
#include "platform/clock.h"

/* Longest time that the bytes of an answer add to the wait for it: a day. */
#define SLOW_NS_MAX (UINT64_C(86400) * 1000000000)

/* ---- create, destroy ------------------------------------------------------------------------- */

DLFS_API int dlfs_client_create(dlfs_arena_view *arena, int memory, int *wake, uint32_t timeout_ms,
                                dlfs_client **out)
{
    if (arena == NULL || wake == NULL || *wake < 0) {
        return -EINVAL;
    }
    dlfs_client *client = calloc(1, sizeof(*client));
    if (client == NULL) {
        return -ENOMEM;
    }
    int code = channel_memory_open(&client->memory, memory, arena->bytes);
    if (code < 0) {
        free(client);
        return code;
    }
    struct channel_memory *channel = &client->memory;
    client->submissions = ring_over(&channel->header->submissions, channel->submissions,
                                    sizeof(struct submission), channel->submission_count);
    client->completions = ring_over(&channel->header->completions, channel->completions,
                                    sizeof(struct completion), COMPLETION_COUNT);
    waiter_init(&client->waiter, &client->submissions, *wake, -1);
    *wake = -1;
    client->timeout_ms = timeout_ms;
    client->references = 1;
    client->arena = arena;
    atomic_fetch_add_explicit(&arena->references, 1, memory_order_relaxed);
    pthread_mutex_init(&client->call_lock, NULL);
    pthread_mutex_init(&client->state_lock, NULL);
    *out = client;
    return 0;
}

/* Puts an entry into the ring. Returns false if the ring is full: the service is broken then. */
static bool submit(dlfs_client *client, const struct submission *entry)
{
    pthread_mutex_lock(&client->state_lock);
    bool put = ring_put(&client->submissions, entry);
    pthread_mutex_unlock(&client->state_lock);
    return put;
}

DLFS_API void dlfs_client_destroy(dlfs_client *client)
{
    if (client == NULL) {
        return;
    }
    struct submission close_stream = {.operation = OPERATION_CLOSE};
    if (!client_is_lost(client) && submit(client, &close_stream)) {
        ring_wake(&client->submissions, &client->waiter);
    }
    client_release(client);
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Returns the length of a sample; if it is not known, another length. */
static uint64_t sample_bytes(const dlfs_client *client, uint64_t index, uint64_t otherwise)
{
    return index < client->location_count ? dlfs_location_length(&client->locations[index])
                                          : otherwise;
}

/* Returns the bytes of samples that a request asks for, as far as their lengths are known. */
static uint64_t requested_bytes(const dlfs_client *client, const struct submission *request)
{
    const uint64_t *indices = (const uint64_t *)(const void *)client->memory.request;
    uint64_t bytes = 0;
    switch (request->operation) {
    case OPERATION_GET:
        return sample_bytes(client, request->value, request->limit);
    case OPERATION_PART:
        return ((const dlfs_part *)(const void *)client->memory.request)->length_bytes;
    case OPERATION_READ:
        for (uint64_t i = 0; i < request->value; i++) {
            bytes += sample_bytes(client, indices[i], 0);
        }
        return bytes;
    default:
        return 0;
    }
}

/*
 * Waits for the answer to a request: the longer, the more bytes the service may have to read.
 * Leaves *answer unchanged after an error.
 */
static int await_answer(dlfs_client *client, const struct submission *request,
                        struct completion *answer)
{
    uint64_t until = UINT64_MAX;
    bool extended = false;
    if (client->timeout_ms > 0) {
        until = monotonic_ns() + (uint64_t)client->timeout_ms * UINT64_C(1000000);
    }
    for (;;) {
        struct completion next;
        int taken = ring_take(&client->completions, &next);
        if (taken > 0 && next.tag == client->tag) {
            *answer = next;
            return 0;
        }
        if (taken < 0) {
            return client_lose(client);
        }
        if (taken > 0) {
            continue;
        }
        int64_t left_ms = -1;
        if (until != UINT64_MAX) {
            left_ms = ((int64_t)until - (int64_t)monotonic_ns() + 999999) / 1000000;
        }
        if (until != UINT64_MAX && left_ms <= 0 && !extended) {
            /* Only now, because few requests wait so long. */
            uint64_t slow_ns = reader_slow_ns(requested_bytes(client, request));
            until += slow_ns < SLOW_NS_MAX ? slow_ns : SLOW_NS_MAX;
            extended = true;
            continue;
        }
        if (until != UINT64_MAX && left_ms <= 0) {
            return client_lose(client);
        }
        if (ring_wait(&client->completions, &client->waiter, (int)left_ms) == WAIT_GONE) {
            return client_lose(client);
        }
    }
}

/* Ends a call, and tells the service that the client has read the result area of the answer. */
static void end_call(dlfs_client *client)
{
    atomic_store_explicit(&client->memory.header->resident.taken, client->tag,
                          memory_order_release);
    pthread_mutex_unlock(&client->call_lock);
}

/* Sends a request and waits for its answer. Returns a code or the answer's result. The caller holds
 * call_lock. */
static int64_t send_request(dlfs_client *client, struct submission *request,
                            struct completion *answer)
{
    *answer = (struct completion){0};
    if (client_is_lost(client)) {
        return DLFS_E_SERVICE;
    }
    request->tag = ++client->tag;
    if (!submit(client, request)) {
        return client_lose(client);
    }
    atomic_fetch_add_explicit(&client->requests, 1, memory_order_relaxed);
    ring_wake(&client->submissions, &client->waiter);
    int code = await_answer(client, request, answer);
    if (code < 0) {
        return code;
    }
    atomic_store_explicit(&client->arena->lost_members, answer->lost_members, memory_order_relaxed);
    return answer->result;
}

/* Sends a request without further arguments. Returns a code or the answer's result; if that is 0,
 * `out` gets the structure that the service has written to the result area. */
static int request_value(dlfs_client *client, uint32_t operation, uint64_t value, void *out,
                         size_t bytes)
{
    struct submission request = {.operation = operation, .value = value};
    struct completion answer;
    pthread_mutex_lock(&client->call_lock);
    int64_t result = send_request(client, &request, &answer);
    if (result == 0 && bytes > 0) {
        memcpy(out, client->memory.result, bytes);
    }
    end_call(client);
    return (int)result;
}

/* ---- batches --------------------------------------------------------------------------------- */

static void release_batch(struct batch *batch)
{
    struct submission released = {.operation = OPERATION_RELEASE, .value = batch->number};
    batch_pool_put(batch, &released);
}

/* Returns true if an answer describes a batch of at most `count` samples in memory for batches. */
static bool is_valid_answer(const dlfs_client *client, const struct completion *answer,
                            uint64_t count)
{
    const struct channel_memory *memory = &client->memory;
    if (answer->result < 0 || (uint64_t)answer->result > count ||
        answer->failure_count > (uint64_t)answer->result) {
        return false;
    }
    if (answer->memory == BATCH_IN_ARENA) {
        return answer->base_bytes <= client->arena->bytes && answer->base_offset == 0;
    }
    return answer->memory == BATCH_COPIED && answer->base_bytes <= memory->copied_bytes &&
           answer->base_offset <= memory->copied_bytes - answer->base_bytes;
}

/* Fills a batch as the answer describes. `indices` are those of a read; NULL for a stream. */
static int fill(dlfs_client *client, struct batch *batch, const struct completion *answer,
                const uint64_t *indices)
{
    const struct channel_memory *memory = &client->memory;
    uint64_t count = (uint64_t)answer->result;
    uint64_t failures = answer->failure_count;
    if (batch_reserve_failures(batch, failures) < 0) {
        return -ENOMEM;
    }
    if (failures > 0) {
        memcpy(batch->failures, memory->failures, failures * sizeof(dlfs_failure));
    }
    if (count > 0) {
        memcpy(batch->offsets, memory->offsets, count * sizeof(int64_t));
        memcpy(batch->lengths, memory->lengths, count * sizeof(int64_t));
        memcpy(batch->indices, indices != NULL ? indices : memory->indices,
               count * sizeof(uint64_t));
    }
    batch->release = release_batch;
    batch->number = answer->number;
    batch->public.base = answer->memory == BATCH_IN_ARENA ? client->arena->base
                                                          : memory->copied + answer->base_offset;
    batch->public.base_bytes = answer->base_bytes;
    batch->public.failure_count = failures;
    batch->public.lost_members = answer->lost_members;
    return 0;
}

/* Makes the batch of an answer. The caller holds call_lock. */
static int take_batch(dlfs_client *client, const struct completion *answer, uint64_t count,
                      const uint64_t *indices, dlfs_batch **out)
{
    if (!is_valid_answer(client, answer, count)) {
        return client_lose(client);
    }
    struct batch *batch = batch_pool_take(client, (uint64_t)answer->result);
    int code = batch != NULL ? fill(client, batch, answer, indices) : -ENOMEM;
    if (code < 0) {
        if (batch != NULL) {
            batch_pool_put(batch, NULL);
        }
        return client_lose(client); /* otherwise the service would keep a batch without a user */
    }
    *out = &batch->public;
    return 0;
}

static int request_batch(dlfs_client *client, struct submission *request, const uint64_t *indices,
                         dlfs_batch **out)
{
    struct completion answer;
    int64_t result = send_request(client, request, &answer);
    bool failed = result < 0 && answer.memory == BATCH_NONE;
    return failed ? (int)result : take_batch(client, &answer, request->value, indices, out);
}

DLFS_API int dlfs_client_read(dlfs_client *client, const uint64_t *indices, uint64_t count,
                              dlfs_batch **out)
{
    if (client == NULL || (indices == NULL && count > 0)) {
        return -EINVAL;
    }
    if (count > client->memory.samples_max) {
        return DLFS_E_LIMIT;
    }
    if (resident_read(client, indices, count, out)) {
        return 0;
    }
    struct submission request = {.operation = OPERATION_READ, .value = count};
    pthread_mutex_lock(&client->call_lock);
    if (count > 0) {
        memcpy(client->memory.request, indices, count * sizeof(*indices));
    }
    int code = request_batch(client, &request, indices, out);
    end_call(client);
    return code;
}

/* ---- single samples -------------------------------------------------------------------------- */

/* Reads a sample that is larger than the result area, as a batch. */
static int64_t get_large(dlfs_client *client, uint64_t index, void *buffer, uint64_t buffer_bytes)
{
    dlfs_batch *batch;
    dlfs_failure failure;
    int code = dlfs_client_read(client, &index, 1, &batch);
    return code < 0 ? code : batch_take_sample(batch, buffer, buffer_bytes, &failure);
}

DLFS_API int64_t dlfs_client_get(dlfs_client *client, uint64_t index, void *buffer,
                                 uint64_t buffer_bytes, uint32_t flags)
{
    if (client == NULL || (flags & ~DLFS_GET_CACHED) != 0) {
        return -EINVAL;
    }
    int64_t found = resident_get(client, index, buffer, buffer_bytes);
    if (found != -EAGAIN) {
        return found;
    }
    struct submission request = {
        .operation = OPERATION_GET, .flags = flags, .value = index, .limit = buffer_bytes};
    struct completion answer;
    uint64_t room = client->memory.result_bytes;
    room = room < GET_BYTES_MAX ? room : GET_BYTES_MAX;
    room = room < buffer_bytes ? room : buffer_bytes;
    pthread_mutex_lock(&client->call_lock);
    int64_t result = send_request(client, &request, &answer);
    if (result > (int64_t)room) {
        result = client_lose(client);
    }
    if (result > 0) {
        memcpy(buffer, client->memory.result, (size_t)result);
    }
    end_call(client);
    if (result != -ERANGE || room == buffer_bytes) {
        return result;
    }
    return flags & DLFS_GET_CACHED ? -EAGAIN : get_large(client, index, buffer, buffer_bytes);
}

/* Requests a part that fits in the result area. */
static int request_part(dlfs_client *client, const dlfs_part *part, uint8_t *buffer,
                        dlfs_failure *failure)
{
    struct submission request = {.operation = OPERATION_PART};
    struct completion answer;
    pthread_mutex_lock(&client->call_lock);
    memcpy(client->memory.request, part, sizeof(*part));
    int code = (int)send_request(client, &request, &answer);
    if (code < 0 && answer.failure_count > 0) {
        memcpy(failure, client->memory.result, sizeof(*failure));
        failure->index = part->index;
        failure->code = code;
    }
    if (code == 0 && buffer != NULL && part->length_bytes > 0) {
        memcpy(buffer, client->memory.result, part->length_bytes);
    }
    end_call(client);
    return code;
}

DLFS_API int dlfs_client_read_part(dlfs_client *client, const dlfs_part *part, void *buffer,
                                   dlfs_failure *failure)
{
    if (client == NULL || part == NULL || failure == NULL ||
        (buffer == NULL && part->length_bytes > 0)) {
        return -EINVAL;
    }
    uint64_t room = client->memory.result_bytes;
    room = room < PART_BYTES_MAX ? room : PART_BYTES_MAX;
    uint64_t done = 0;
    int code = 0;
    *failure = (dlfs_failure){.index = part->index};
    do {
        dlfs_part window = *part;
        uint64_t left = part->length_bytes - done;
        window.length_bytes = left < room ? left : room;
        if (__builtin_add_overflow(part->offset_bytes, done, &window.offset_bytes)) {
            return -EINVAL;
        }
        code = request_part(client, &window, (uint8_t *)buffer + done, failure);
        done += window.length_bytes;
    } while (code == 0 && done < part->length_bytes);
    return code;
}

/* ---- statistics --------------------------------------------------------------------------------
 */

DLFS_API int dlfs_client_reader_stats(dlfs_client *client, dlfs_reader_stats *stats)
{
    return request_value(client, OPERATION_STATS, 0, stats, sizeof(*stats));
}

DLFS_API int dlfs_client_member_stats(dlfs_client *client, uint32_t member,
                                      dlfs_member_stats *stats)
{
    return request_value(client, OPERATION_MEMBER_STATS, member, stats, sizeof(*stats));
}

DLFS_API int dlfs_client_member_code(dlfs_client *client, uint32_t member)
{
    return request_value(client, OPERATION_MEMBER, member, NULL, 0);
}

DLFS_API uint64_t dlfs_client_samples_max(const dlfs_client *client)
{
    return client->memory.samples_max;
}

/* ---- streams --------------------------------------------------------------------------------- */

/* Sends the indices of a stream over a chosen order. The caller holds call_lock. */
static int send_chosen(dlfs_client *client, const dlfs_stream_config *config)
{
    uint64_t most = client->memory.samples_max;
    int code = stream_fits(config, sequence_count(config->sequence)) ? 0 : -EINVAL;
    for (uint64_t at = 0; code == 0 && at < config->count; at += most) {
        struct submission request = {.operation = OPERATION_CHOOSE};
        struct completion answer;
        request.value = config->count - at < most ? config->count - at : most;
        uint64_t *indices = (uint64_t *)(void *)client->memory.request;
        code = stream_indices(config, at, request.value, indices);
        if (code == 0) {
            code = (int)send_request(client, &request, &answer);
        }
    }
    return code;
}

/*
 * Describes a stream to the service. A stream over a chosen order becomes one over the list of
 * indices that send_chosen sent, from its start.
 */
static struct stream_request describe(const dlfs_stream_config *config, bool chosen)
{
    struct stream_request request = {.config = *config};
    sequence_describe(config->sequence, &request.sequence);
    request.config.sequence = NULL;
    if (chosen) {
        request.sequence =
            (struct sequence_parameters){.kind = DLFS_ORDER_LIST, .count = config->count};
        request.config =
            (dlfs_stream_config){.count = config->count, .plan = config->plan, .stride = 1};
    }
    return request;
}

DLFS_API int dlfs_client_stream_open(dlfs_client *client, const dlfs_stream_config *config)
{
    if (client == NULL || config == NULL || config->sequence == NULL || config->stride == 0) {
        return -EINVAL;
    }
    bool chosen = sequence_kind(config->sequence) >= DLFS_ORDER_LIST;
    struct stream_request stream = describe(config, chosen);
    struct submission request = {.operation = OPERATION_OPEN};
    struct completion answer;
    pthread_mutex_lock(&client->call_lock);
    int code = chosen ? send_chosen(client, config) : 0;
    if (code == 0) {
        memcpy(client->memory.request, &stream, sizeof(stream));
        code = (int)send_request(client, &request, &answer);
    }
    if (code < 0 && chosen) { /* have the service drop the indices, unless a stream uses them */
        request.operation = OPERATION_CLOSE;
        if (code != -EBUSY) {
            (void)send_request(client, &request, &answer);
        }
    }
    end_call(client);
    return code;
}

DLFS_API int dlfs_client_stream_next(dlfs_client *client, uint64_t count, int timeout_ms,
                                     dlfs_batch **out)
{
    if (client == NULL || count == 0) {
        return -EINVAL;
    }
    if (count > client->memory.samples_max) {
        return DLFS_E_LIMIT;
    }
    uint64_t until = timeout_ms < 0 ? UINT64_MAX : monotonic_ns() + (uint64_t)timeout_ms * 1000000;
    int code = -EAGAIN;
    pthread_mutex_lock(&client->call_lock);
    do {
        uint64_t now = monotonic_ns();
        uint64_t left_ms = now < until ? (until - now + 999999) / 1000000 : 0;
        struct submission request = {.operation = OPERATION_NEXT, .value = count, .limit = left_ms};
        code = request_batch(client, &request, NULL, out);
    } while (code == -EAGAIN && monotonic_ns() < until);
    end_call(client);
    return code;
}

DLFS_API int dlfs_client_stream_close(dlfs_client *client)
{
    return request_value(client, OPERATION_CLOSE, 0, NULL, 0);
}

DLFS_API void dlfs_client_get_stats(const dlfs_client *client, dlfs_client_stats *stats)
{
    *stats = (dlfs_client_stats){
        .requests = atomic_load_explicit(&client->requests, memory_order_relaxed),
        .wakes = atomic_load_explicit(&client->waiter.wakes, memory_order_relaxed),
        .sleeps = atomic_load_explicit(&client->waiter.sleeps, memory_order_relaxed),
    };
}
