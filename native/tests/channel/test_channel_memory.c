/*
 * Tests the bounds on the service's memory outside the arena. The arrays of batches, the plans of
 * reads, chosen orders, copies and streams are charged to the client and its user, and discharged.
 */
#include "channel/channel.h"
#include "channel/channel_tests.h"

#define MEMORY (64u * CHUNK)
#define MIB (UINT64_C(1) << 20)
#define LIMIT (64 * MIB)
#define REPEATS (1u << 17) /* repeats of one index: the arrays of such a batch take 3 MiB */
#define BATCHES 64u

static uint64_t repeated[REPEATS]; /* index 0: an empty sample, which pins nothing */

static dlfs_channel_config bounded(const struct service *service, dlfs_share *memory)
{
    dlfs_channel_config config = channel_config(service);
    config.samples_max = REPEATS;
    config.memory = memory;
    return config;
}

static void wait_memory_below(dlfs_channel *channel, uint64_t bytes)
{
    while (stats_of(channel).memory_bytes >= bytes) {
        usleep(1000);
    }
}

/* Reads one sample many times in many batches: few slots, but much memory for arrays. */
static uint32_t take_all(dlfs_client *client, dlfs_batch **batches)
{
    uint32_t count = 0;
    int code = 0;
    while (code == 0 && count < BATCHES) {
        code = dlfs_client_read(client, repeated, REPEATS, &batches[count]);
        count += code == 0;
    }
    CHECK_EQ(code, DLFS_E_LIMIT);
    return count;
}

static void arrays_of_batches_are_charged(struct service *service)
{
    dlfs_batch *batches[BATCHES];
    dlfs_share *memory;
    CHECK_EQ(dlfs_share_create_within(NULL, LIMIT, &memory), 0);
    dlfs_channel_config config = bounded(service, memory);
    struct connection one = connect_with(service, &config, 0);
    uint64_t before = stats_of(one.channel).memory_bytes;
    uint32_t count = take_all(one.client, batches);
    CHECK(count > 2 && count < 24);
    CHECK(stats_of(one.channel).memory_bytes <= LIMIT);
    CHECK(stats_of(one.channel).memory_bytes > count * 3 * MIB);
    CHECK_EQ(share_bytes(memory), stats_of(one.channel).memory_bytes);
    /* The share's other clients get no memory; clients of another share do. */
    struct connection other = connect_with(service, &config, 0);
    dlfs_batch *batch;
    CHECK_EQ(dlfs_client_read(other.client, repeated, REPEATS, &batch), DLFS_E_LIMIT);
    struct connection stranger = connect_to(service);
    check_batch(batch = read_from(stranger.client, 3, 5));
    dlfs_batch_release(batch);
    for (uint32_t i = 0; i < count; i++) {
        dlfs_batch_release(batches[i]);
    }
    wait_batches_out(one.channel, 0);
    /* Memory for the last answer stays until the client has been idle. */
    wait_memory_below(one.channel, before + 5 * MIB);
    dlfs_client_destroy(one.client);
    dlfs_client_destroy(other.client);
    dlfs_client_destroy(stranger.client);
    dlfs_channel_destroy(one.channel);
    dlfs_channel_destroy(other.channel);
    dlfs_channel_destroy(stranger.channel);
    CHECK_EQ(share_bytes(memory), 0);
    dlfs_share_destroy(memory);
}

static void choices_and_streams_are_charged(struct service *service)
{
    dlfs_share *memory;
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_share_create_within(NULL, LIMIT, &memory), 0);
    dlfs_channel_config config = bounded(service, memory);
    struct connection one = connect_with(service, &config, 0);
    uint64_t before = stats_of(one.channel).memory_bytes;
    dlfs_choice choice = {.kind = DLFS_ORDER_LIST, .indices = repeated, .count = REPEATS};
    CHECK_EQ(dlfs_sequence_choose(service->dataset.directory, &choice, &sequence), 0);
    dlfs_stream_config stream = {.sequence = sequence, .stride = 1, .count = REPEATS};
    CHECK(dlfs_client_stream_open(one.client, &stream) >= 0);
    CHECK(stats_of(one.channel).memory_bytes > before + REPEATS * sizeof(uint64_t));
    CHECK_EQ(dlfs_client_stream_close(one.client), 0);
    CHECK_EQ(stats_of(one.channel).memory_bytes, before);
    dlfs_sequence_destroy(sequence);
    dlfs_client_destroy(one.client);
    dlfs_channel_destroy(one.channel);
    dlfs_share_destroy(memory);
}

/* Requests beyond a small bound are refused before any of their work is done. */
static void small_bounds_refuse(struct service *service)
{
    dlfs_share *memory;
    dlfs_sequence *sequence;
    uint8_t buffer[LENGTH_MAX];
    dlfs_failure failure;
    struct connection one = connect_to(service);
    uint64_t before = stats_of(one.channel).memory_bytes;
    dlfs_client_destroy(one.client);
    dlfs_channel_destroy(one.channel);
    CHECK_EQ(dlfs_share_create_within(NULL, before + 8192, &memory), 0);
    dlfs_channel_config config = channel_config(service);
    config.memory = memory;
    one = connect_with(service, &config, 0);
    CHECK_EQ(dlfs_client_get(one.client, 1, buffer, sizeof buffer, 0), DLFS_E_LIMIT);
    dlfs_part part = {.index = 1, .length_bytes = sample_length(1)};
    CHECK(part.length_bytes > 0 && part.length_bytes < 4096);
    CHECK_EQ(dlfs_client_read_part(one.client, &part, buffer, &failure), 0);
    check_bytes(buffer, 1);
    dlfs_choice choice = {.kind = DLFS_ORDER_LIST, .indices = repeated, .count = REPEATS};
    CHECK_EQ(dlfs_sequence_choose(service->dataset.directory, &choice, &sequence), 0);
    dlfs_stream_config stream = {.sequence = sequence, .stride = 1, .count = REPEATS};
    CHECK_EQ(dlfs_client_stream_open(one.client, &stream), DLFS_E_LIMIT);
    CHECK(stats_of(one.channel).memory_bytes <= before + 8192);
    CHECK_EQ(stats_of(one.channel).samples, 0);
    CHECK_EQ(stats_of(one.channel).sample_bytes, part.length_bytes);
    dlfs_sequence_destroy(sequence);
    dlfs_client_destroy(one.client);
    dlfs_channel_destroy(one.channel);
    dlfs_share_destroy(memory);
}

static void copies_are_charged(struct service *service)
{
    uint64_t indices[COUNT];
    dlfs_share *memory;
    dlfs_share *nothing;
    dlfs_batch *batch;
    CHECK_EQ(dlfs_share_create_within(NULL, LIMIT, &memory), 0);
    CHECK_EQ(dlfs_share_create_within(NULL, 0, &nothing), 0);
    dlfs_channel_config config = bounded(service, memory);
    config.share = nothing; /* so that every batch is copied */
    struct connection one = connect_with(service, &config, 0);
    uint64_t before = stats_of(one.channel).memory_bytes;
    for (uint64_t i = 0; i < COUNT; i++) {
        indices[i] = i;
    }
    CHECK_EQ(dlfs_client_read(one.client, indices, COUNT, &batch), 0);
    uint64_t bytes = stats_of(one.channel).copied_bytes;
    CHECK(bytes > 0);
    CHECK(stats_of(one.channel).memory_bytes >= before + bytes);
    dlfs_batch_release(batch);
    wait_batches_out(one.channel, 0);
    wait_memory_below(one.channel, before + MIB);
    dlfs_client_destroy(one.client);
    dlfs_channel_destroy(one.channel);
    dlfs_share_destroy(memory);
    dlfs_share_destroy(nothing);
}

/* Two clients of one user stay together within the user's bound. */
static void users_are_bounded(struct service *service)
{
    dlfs_batch *batches[2][BATCHES];
    dlfs_share *user;
    dlfs_share *shares[2];
    struct connection clients[2];
    uint32_t counts[2];
    CHECK_EQ(dlfs_share_create_within(NULL, LIMIT, &user), 0);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(dlfs_share_create_within(user, LIMIT, &shares[i]), 0);
        dlfs_channel_config config = bounded(service, shares[i]);
        clients[i] = connect_with(service, &config, 0);
    }
    for (uint32_t i = 0; i < 2; i++) {
        counts[i] = take_all(clients[i].client, batches[i]);
    }
    CHECK(counts[0] > counts[1]);
    CHECK(share_bytes(user) <= LIMIT);
    dlfs_share_allow(user, 2 * LIMIT);
    dlfs_batch *more;
    CHECK_EQ(dlfs_client_read(clients[1].client, repeated, REPEATS, &more), 0);
    dlfs_batch_release(more);
    for (uint32_t i = 0; i < 2; i++) {
        for (uint32_t k = 0; k < counts[i]; k++) {
            dlfs_batch_release(batches[i][k]);
        }
        dlfs_client_destroy(clients[i].client);
        dlfs_channel_destroy(clients[i].channel);
        CHECK_EQ(share_bytes(shares[i]), 0);
        dlfs_share_destroy(shares[i]);
    }
    CHECK_EQ(share_bytes(user), 0);
    dlfs_share_destroy(user);
}

/* An idle channel retains little of the memory for large batches. */
static void scratch_comes_back(struct service *service)
{
    const dlfs_reader *reader = service->reader;
    CHECK(reader->idle_batches_bytes <= 16 * MIB);
    CHECK(reader->idle_plans_bytes <= 32 * MIB);
}

/* The limits allow this many references to a slot: 2^16 batches of 2^20 samples. */
static void references_do_not_wrap(struct service *service)
{
    dlfs_reader *reader = service->reader;
    dlfs_batch *batch;
    uint64_t index = 7;
    CHECK_EQ(dlfs_reader_read(reader, &index, 1, &batch), 0);
    CHECK(batch->lengths[0] > 0);
    pthread_mutex_lock(&reader->arena->lock);
    uint32_t number = arena_head(reader, slot_of(reader, (uint64_t)batch->offsets[0]));
    struct slot *slot = &reader->arena->slots[number];
    slot->references += UINT32_MAX;
    arena_reference(reader, number);
    CHECK(slot->references > UINT32_MAX);
    arena_release(reader, number);
    CHECK(slot->state != SLOT_FREE);
    slot->references -= UINT32_MAX;
    pthread_mutex_unlock(&reader->arena->lock);
    check_batch(batch);
    dlfs_batch_release(batch);
}

int main(void)
{
    struct service service;
    service_start(&service, MEMORY, 8 * MIB, NULL);
    arrays_of_batches_are_charged(&service);
    choices_and_streams_are_charged(&service);
    small_bounds_refuse(&service);
    copies_are_charged(&service);
    users_are_bounded(&service);
    scratch_comes_back(&service);
    references_do_not_wrap(&service);
    service_stop(&service);
    return 0;
}
