/*
 * Tests batches, single samples and streams through channels, a client's limits, and how each end
 * notices the end of the other.
 */
#include "channel/channel_tests.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#define MEMORY (1u << 20)
#define WHOLE (16u << 20) /* memory for the whole dataset */
#define THREADS 3u
#define BATCH 40u

/* ---- the same results as from the reader ----------------------------------------------------- */

static void *read_all(void *argument)
{
    dlfs_client *client = argument;
    dlfs_batch *unreleased = NULL;
    for (uint64_t first = 0; first < 60; first++) {
        dlfs_batch *batch = read_from(client, first * 11, BATCH);
        check_batch(batch);
        if (unreleased != NULL) { /* the previous batch is unchanged */
            check_batch(unreleased);
            dlfs_batch_release(unreleased);
        }
        unreleased = batch;
    }
    dlfs_batch_release(unreleased);
    return NULL;
}

/* Tests threads with separate channels, and threads that share a channel. */
static void many_threads(uint64_t memory_bytes, bool share_one)
{
    struct service service;
    struct connection connections[THREADS];
    pthread_t threads[THREADS];
    unsigned count = share_one ? 1 : THREADS;
    service_start(&service, memory_bytes, memory_bytes / 2, NULL);
    for (unsigned i = 0; i < count; i++) {
        connections[i] = connect_to(&service);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, read_all, connections[i % count].client), 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    for (unsigned i = 0; i < count; i++) {
        wait_batches_out(connections[i].channel, 0);
        CHECK_EQ(stats_of(connections[i].channel).pinned_bytes, 0);
        CHECK_EQ(stats_of(connections[i].channel).samples, THREADS / count * 60 * BATCH);
        dlfs_client_destroy(connections[i].client);
        wait_ended(connections[i].channel, DLFS_E_CLOSED);
        dlfs_channel_destroy(connections[i].channel);
    }
    check_memory(&service.dataset, service.reader, memory_bytes);
    service_stop(&service);
}

static void single_samples(void)
{
    struct service service;
    uint8_t buffer[4 * CHUNK];
    service_start(&service, WHOLE, WHOLE, NULL);
    dlfs_channel_config config = channel_config(&service);
    config.samples_max = 1; /* the result area is small, and some samples are larger */
    struct connection to = connect_with(&service, &config, 0);
    CHECK_EQ(dlfs_client_get(to.client, 1, buffer, sizeof(buffer), DLFS_GET_CACHED), -EAGAIN);
    for (uint64_t index = 0; index < COUNT; index++) {
        uint64_t length = sample_length(index);
        CHECK_EQ(dlfs_client_get(to.client, index, buffer, sizeof(buffer), 0), length);
        check_bytes(buffer, index);
        if (length > 0) {
            CHECK_EQ(dlfs_client_get(to.client, index, buffer, length - 1, 0), -ERANGE);
        }
        int64_t cached = dlfs_client_get(to.client, index, buffer, sizeof(buffer), DLFS_GET_CACHED);
        CHECK(cached == (int64_t)length || (cached == -EAGAIN && length > CHUNK));
    }
    CHECK_EQ(dlfs_client_get(to.client, COUNT, buffer, sizeof(buffer), 0), -EINVAL);
    CHECK_EQ(dlfs_client_get(to.client, 0, buffer, sizeof(buffer), 8), -EINVAL);
    dlfs_reader_stats theirs;
    dlfs_reader_stats ours;
    CHECK_EQ(dlfs_client_reader_stats(to.client, &theirs), 0);
    dlfs_reader_get_stats(service.reader, &ours);
    CHECK_EQ(theirs.samples, ours.samples);
    CHECK_EQ(dlfs_client_member_code(to.client, 0), 0);
    CHECK_EQ(dlfs_client_member_code(to.client, 1), -EINVAL);
    CHECK_EQ(dlfs_client_member_code(to.client, 1u << 20), -EINVAL);
    CHECK_EQ(dlfs_client_lost_members(to.client), 0);
    dlfs_client_destroy(to.client);
    dlfs_channel_destroy(to.channel);
    service_stop(&service);
}

static void epoch(const struct service *service, dlfs_client *client, uint32_t kind)
{
    dlfs_sequence *sequence;
    uint64_t expected[COUNT];
    const dlfs_directory *directory = service->dataset.directory;
    CHECK_EQ(dlfs_sequence_create(directory, CHUNK, kind, 3, 4, 2, &sequence), 0);
    CHECK_EQ(dlfs_sequence_fill(sequence, 1, 3, COUNT / 3, expected), 0);
    dlfs_stream_config config = {.sequence = sequence, .first = 1, .stride = 3, .count = COUNT / 3};
    int plan = dlfs_client_stream_open(client, &config);
    CHECK(plan >= (int)DLFS_PLAN_DIRECT && plan <= (int)DLFS_PLAN_CHUNK_COPY);
    CHECK_EQ(dlfs_client_stream_open(client, &config), -EBUSY);
    dlfs_batch *batch;
    uint64_t at = 0;
    int code;
    while ((code = dlfs_client_stream_next(client, 17, -1, &batch)) == 0) {
        check_batch(batch);
        for (uint64_t i = 0; i < batch->count; i++) {
            CHECK_EQ(batch->indices[i], expected[at++]);
        }
        dlfs_batch_release(batch);
    }
    CHECK_EQ(code, DLFS_E_END);
    CHECK_EQ(at, COUNT / 3);
    CHECK_EQ(dlfs_client_stream_close(client), 0);
    dlfs_sequence_destroy(sequence);
}

static void streams(void)
{
    struct service service;
    service_start(&service, MEMORY, MEMORY / 2, NULL);
    struct connection to = connect_to(&service);
    for (uint32_t kind = DLFS_ORDER_STORAGE; kind <= DLFS_ORDER_CHUNK; kind++) {
        epoch(&service, to.client, kind);
    }
    dlfs_sequence *sequence;
    const dlfs_directory *directory = service.dataset.directory;
    CHECK_EQ(dlfs_sequence_create(directory, 2 * CHUNK, 1, 3, 4, 2, &sequence), 0);
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT};
    CHECK_EQ(dlfs_client_stream_open(to.client, &config),
             -EINVAL); /* not the service's chunk size */
    dlfs_sequence_destroy(sequence);
    CHECK_EQ(dlfs_sequence_create(directory, CHUNK, 1, 3, 4, 2, &sequence), 0);
    config = (dlfs_stream_config){.sequence = sequence, .stride = 1, .count = COUNT + 1};
    CHECK_EQ(dlfs_client_stream_open(to.client, &config), -EINVAL);
    config.count = COUNT;
    CHECK(dlfs_client_stream_open(to.client, &config) > 0);
    dlfs_sequence_destroy(sequence);
    dlfs_client_destroy(to.client); /* while its stream is open */
    wait_ended(to.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(to.channel);
    check_memory(&service.dataset, service.reader, MEMORY);
    service_stop(&service);
}

static void failures(void)
{
    dlfs_fault_config faults = {
        .seed = 5, .bad_first_bytes = DATA_OFFSET + CHUNK, .bad_length_bytes = 2 * CHUNK};
    struct service service;
    service_start(&service, MEMORY, MEMORY / 2, &faults);
    struct connection to = connect_to(&service);
    uint64_t indices[COUNT];
    dlfs_batch *got;
    dlfs_batch *expected;
    for (uint64_t i = 0; i < COUNT; i++) {
        indices[i] = i;
    }
    CHECK_EQ(dlfs_client_read(to.client, indices, COUNT, &got), 0);
    CHECK_EQ(dlfs_reader_read(service.reader, indices, COUNT, &expected), 0);
    CHECK(got->failure_count > 0 && got->failure_count < COUNT);
    CHECK_EQ(got->failure_count, expected->failure_count);
    for (uint64_t i = 0; i < COUNT; i++) {
        CHECK_EQ(got->lengths[i], expected->lengths[i]);
        if (got->lengths[i] >= 0) {
            check_sample(got, i);
        }
    }
    for (uint64_t i = 0; i < got->failure_count; i++) {
        CHECK_EQ(got->lengths[got->failures[i].position], -1);
    }
    dlfs_batch_release(got);
    dlfs_batch_release(expected);
    indices[0] = COUNT;
    CHECK_EQ(dlfs_client_read(to.client, indices, 1, &got), -EINVAL);
    CHECK_EQ(dlfs_client_read(to.client, NULL, 1, &got), -EINVAL);
    CHECK_EQ(dlfs_client_read(to.client, NULL, 0, &got), 0);
    CHECK_EQ(got->count, 0);
    dlfs_batch_release(got);
    dlfs_client_destroy(to.client);
    dlfs_channel_destroy(to.channel);
    service_stop(&service);
}

/* ---- limits ---------------------------------------------------------------------------------- */

/* A client beyond its share gets copies, and then DLFS_E_LIMIT. Other clients are not affected. */
static void greedy_client(uint64_t memory_bytes)
{
    struct service service;
    dlfs_batch *batches[64];
    uint64_t count = 0;
    uint64_t indices[BATCH];
    int code = 0;
    service_start(&service, memory_bytes, memory_bytes / 4, NULL);
    dlfs_channel_config config = channel_config(&service);
    config.copied_bytes_max = 2 << 20;
    struct connection greedy = connect_with(&service, &config, 0);
    struct connection modest = connect_to(&service);
    dlfs_batch *other = read_from(modest.client, 0, 4);
    while (code == 0) {
        for (uint64_t i = 0; i < BATCH; i++) {
            indices[i] = (BATCH * count + i) % COUNT;
        }
        CHECK(count < 64);
        code = dlfs_client_read(greedy.client, indices, BATCH, &batches[count]);
        count += code == 0;
        CHECK(stats_of(greedy.channel).pinned_bytes <= memory_bytes / 4);
        CHECK(share_bytes(service.share) <= memory_bytes / 4);
    }
    CHECK_EQ(code, DLFS_E_LIMIT);
    CHECK(stats_of(greedy.channel).copied_batches > 0);
    CHECK(stats_of(greedy.channel).refusals > 0);
    for (uint64_t i = 0; i < count; i++) {
        check_batch(batches[i]);
    }
    check_batch(other);
    dlfs_batch_release(batches[--count]); /* frees memory for the next read */
    wait_batches_out(greedy.channel, count);
    CHECK_EQ(dlfs_client_read(greedy.client, indices, 8, &batches[count]), 0);
    uint8_t copy[8 * 2 * CHUNK];
    uint64_t offsets[8];
    for (uint64_t i = 0; i < 8; i++) {
        offsets[i] = i * 2 * CHUNK;
    }
    CHECK_EQ(dlfs_batch_gather(batches[count], copy, sizeof(copy), offsets), 0);
    dlfs_batch_release(other);
    for (uint64_t i = 0; i <= count; i++) {
        dlfs_batch_release(batches[i]);
    }
    wait_batches_out(greedy.channel, 0);
    CHECK_EQ(stats_of(greedy.channel).copied_bytes, 0);
    dlfs_client_destroy(greedy.client);
    dlfs_client_destroy(modest.client);
    dlfs_channel_destroy(greedy.channel);
    dlfs_channel_destroy(modest.channel);
    service_stop(&service);
}

static void counted_batches(void)
{
    struct service service;
    service_start(&service, WHOLE, WHOLE, NULL);
    dlfs_channel_config config = channel_config(&service);
    config.batches_max = 2;
    config.samples_max = 10;
    struct connection to = connect_with(&service, &config, 0);
    uint64_t indices[11] = {0};
    dlfs_batch *batches[2];
    dlfs_batch *third;
    CHECK_EQ(dlfs_client_samples_max(to.client), 10);
    CHECK_EQ(dlfs_client_read(to.client, indices, 11, &third), DLFS_E_LIMIT);
    CHECK_EQ(dlfs_client_stream_next(to.client, 11, -1, &third), DLFS_E_LIMIT);
    for (int round = 0; round < 3; round++) {
        batches[0] = read_from(to.client, 1, 10);
        batches[1] = read_from(to.client, 2, 10);
        CHECK_EQ(dlfs_client_read(to.client, indices, 1, &third), DLFS_E_LIMIT);
        check_batch(batches[0]);
        dlfs_batch_release(batches[0]);
        dlfs_batch_release(batches[1]);
    }
    dlfs_client_destroy(to.client);
    dlfs_channel_destroy(to.channel);
    service_stop(&service);
}

/* A stream's batch that cannot be delivered for want of memory is delivered later. */
static void withheld_batch(void)
{
    struct service service;
    service_start(&service, MEMORY, CHUNK, NULL);
    dlfs_channel_config config = channel_config(&service);
    config.copied_bytes_max = 256 << 10;
    struct connection to = connect_with(&service, &config, 0);
    dlfs_sequence *sequence;
    uint64_t expected[COUNT];
    CHECK_EQ(dlfs_sequence_create(service.dataset.directory, CHUNK, 1, 3, 4, 2, &sequence), 0);
    CHECK_EQ(dlfs_sequence_fill(sequence, 0, 1, COUNT, expected), 0);
    dlfs_stream_config stream = {.sequence = sequence, .stride = 1, .count = COUNT};
    CHECK(dlfs_client_stream_open(to.client, &stream) > 0);
    dlfs_batch *unreleased[COUNT];
    uint64_t at = 0;
    uint64_t count = 0;
    uint64_t refused = 0;
    int code = 0;
    while (at < COUNT) {
        code = dlfs_client_stream_next(to.client, 20, -1, &unreleased[count]);
        if (code == 0) {
            check_batch(unreleased[count]);
            for (uint64_t i = 0; i < unreleased[count]->count; i++) {
                CHECK_EQ(unreleased[count]->indices[i], expected[at++]);
            }
            count++;
            continue;
        }
        CHECK_EQ(code, DLFS_E_LIMIT);
        refused++;
        CHECK_EQ(dlfs_client_stream_next(to.client, 19, -1, &unreleased[count]),
                 count > 0 ? -EINVAL : DLFS_E_LIMIT);
        while (count > 0) {
            dlfs_batch_release(unreleased[--count]);
        }
    }
    CHECK(refused > 0);
    while (count > 0) {
        dlfs_batch_release(unreleased[--count]);
    }
    dlfs_sequence_destroy(sequence);
    dlfs_client_destroy(to.client);
    dlfs_channel_destroy(to.channel);
    service_stop(&service);
}

/* ---- the end of a side ----------------------------------------------------------------------- */

struct sleeper {
    dlfs_client *client;
    int code;
};

static void *sleep_in_call(void *argument)
{
    struct sleeper *sleeper = argument;
    uint64_t index = 1;
    dlfs_batch *batch = NULL;
    do {
        if (batch != NULL) {
            dlfs_batch_release(batch);
        }
        sleeper->code = dlfs_client_read(sleeper->client, &index, 1, &batch);
    } while (sleeper->code == 0);
    return NULL;
}

static void service_ends(void)
{
    struct service service;
    service_start(&service, MEMORY, MEMORY / 2, NULL);
    struct connection to = connect_to(&service);
    dlfs_batch *unreleased = read_from(to.client, 0, BATCH);
    struct sleeper sleeper = {.client = to.client};
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, sleep_in_call, &sleeper), 0);
    while (stats_of(to.channel).batches < 10) {
        sched_yield();
    }
    dlfs_channel_destroy(to.channel);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(sleeper.code, DLFS_E_SERVICE);
    CHECK(client_is_lost(to.client));
    uint64_t index = 0;
    dlfs_batch *batch;
    dlfs_reader_stats stats;
    CHECK_EQ(dlfs_client_read(to.client, &index, 1, &batch), DLFS_E_SERVICE);
    CHECK_EQ(dlfs_client_get(to.client, 0, &index, sizeof(index), 0), DLFS_E_SERVICE);
    CHECK_EQ(dlfs_client_stream_next(to.client, 1, -1, &batch), DLFS_E_SERVICE);
    CHECK_EQ(dlfs_client_stream_close(to.client), DLFS_E_SERVICE);
    CHECK_EQ(dlfs_client_reader_stats(to.client, &stats), DLFS_E_SERVICE);
    CHECK_EQ(dlfs_client_member_code(to.client, 0), DLFS_E_SERVICE);
    check_batch(unreleased);
    dlfs_client_destroy(to.client);
    dlfs_batch_release(unreleased);
    service_stop(&service);
}

/* Batches outlive their destroyed client; the channel ends when the last one is released. */
static void client_ends(void)
{
    struct service service;
    service_start(&service, MEMORY, MEMORY / 2, NULL);
    struct connection to = connect_to(&service);
    dlfs_batch *first = read_from(to.client, 0, BATCH);
    dlfs_batch *second = read_from(to.client, 5, BATCH);
    dlfs_client_destroy(to.client);
    dlfs_batch_release(first);
    wait_batches_out(to.channel, 1);
    CHECK_EQ(stats_of(to.channel).ended, 0);
    check_batch(second);
    dlfs_batch_release(second);
    wait_ended(to.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(to.channel);
    check_memory(&service.dataset, service.reader, MEMORY);
    service_stop(&service);
}

/* A service that does not answer within the timeout counts as lost. */
static void no_answer(void)
{
    dlfs_fault_config faults = {.seed = 1, .stall_per_million = 1000000, .stall_ms = 1500};
    struct service service;
    service_start(&service, MEMORY, MEMORY / 2, &faults);
    dlfs_channel_config config = channel_config(&service);
    struct connection to = connect_with(&service, &config, 1);
    uint64_t index = 3;
    dlfs_batch *batch;
    CHECK_EQ(dlfs_client_read(to.client, &index, 1, &batch), DLFS_E_SERVICE);
    CHECK(client_is_lost(to.client));
    dlfs_client_destroy(to.client);
    wait_ended(to.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(to.channel);
    service_stop(&service);
}

/* ---- wrong calls ----------------------------------------------------------------------------- */

static void wrong_calls(void)
{
    struct service service;
    service_start(&service, MEMORY, MEMORY / 2, NULL);
    dlfs_channel_config config = channel_config(&service);
    dlfs_channel *channel;
    int memory;
    int wake;
    config.samples_max = 0;
    CHECK_EQ(dlfs_channel_create(&config, &channel, &memory, &wake), -EINVAL);
    config.samples_max = DLFS_CHANNEL_SAMPLES_MAX + 1;
    CHECK_EQ(dlfs_channel_create(&config, &channel, &memory, &wake), -EINVAL);
    config = channel_config(&service);
    config.batches_max = 0;
    CHECK_EQ(dlfs_channel_create(&config, &channel, &memory, &wake), -EINVAL);
    config.batches_max = DLFS_CHANNEL_BATCHES_MAX + 1;
    CHECK_EQ(dlfs_channel_create(&config, &channel, &memory, &wake), -EINVAL);
    CHECK_EQ(dlfs_channel_create(NULL, &channel, &memory, &wake), -EINVAL);
    dlfs_reader *own = reader_over(&service.dataset, MEMORY, 0);
    config = channel_config(&service);
    config.reader = own; /* its memory is not shared */
    CHECK_EQ(dlfs_channel_create(&config, &channel, &memory, &wake), -EINVAL);
    CHECK_EQ(dlfs_reader_destroy(own), 0);
    dlfs_channel_destroy(NULL);
    dlfs_client_destroy(NULL);
    dlfs_share_destroy(NULL);
    dlfs_arena_view_unmap(NULL);

    dlfs_client *client;
    dlfs_arena_view *arena;
    int arena_memory;
    uint64_t arena_bytes;
    config = channel_config(&service);
    CHECK_EQ(dlfs_channel_create(&config, &channel, &memory, &wake), 0);
    CHECK_EQ(dlfs_reader_arena(service.reader, &arena_memory, &arena_bytes), 0);
    CHECK_EQ(dlfs_client_create(service.arena, arena_memory, &wake, 0, &client), DLFS_E_FORMAT);
    CHECK_EQ(dlfs_client_create(service.arena, wake, &wake, 0, &client), -EINVAL);
    CHECK_EQ(dlfs_client_create(NULL, memory, &wake, 0, &client), -EINVAL);
    CHECK_EQ(dlfs_arena_view_map(arena_memory, arena_bytes + 1, &arena), -EINVAL);
    CHECK_EQ(dlfs_arena_view_map(arena_memory, 0, &arena), -EINVAL);
    CHECK_EQ(dlfs_arena_view_map(-1, arena_bytes, &arena), -EBADF);
    CHECK_EQ(dlfs_arena_view_map(arena_memory, arena_bytes / 2, &arena), 0);
    CHECK_EQ(dlfs_client_create(arena, memory, &wake, 0, &client), DLFS_E_FORMAT);
    dlfs_arena_view_unmap(arena);
    close(memory);
    close(wake);
    wait_ended(channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(channel);
    service_stop(&service);
}

/* A client with a timeout waits until it ends. */
static void patient_client(void)
{
    struct service service;
    dlfs_fault_config faults = {.seed = 1, .stall_per_million = 1000000, .stall_ms = 20};
    service_start(&service, MEMORY, MEMORY / 2, &faults);
    dlfs_channel_config config = channel_config(&service);
    struct connection to = connect_with(&service, &config, 600000);
    dlfs_batch *batch = read_from(to.client, 0, 10);
    check_batch(batch);
    dlfs_batch_release(batch);
    CHECK(!client_is_lost(to.client));
    dlfs_client_destroy(to.client);
    wait_ended(to.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(to.channel);
    service_stop(&service);
}

/* The largest batches that any configuration may have. */
static void largest_channel(void)
{
    struct service service;
    service_start(&service, MEMORY, MEMORY / 2, NULL);
    dlfs_channel_config config = channel_config(&service);
    config.samples_max = DLFS_CHANNEL_SAMPLES_MAX;
    config.batches_max = DLFS_CHANNEL_BATCHES_MAX;
    struct connection to = connect_with(&service, &config, 0);
    dlfs_batch_release(read_from(to.client, 0, 10));
    dlfs_client_destroy(to.client);
    wait_ended(to.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(to.channel);
    service_stop(&service);
}

/* A client can neither write to the arena nor shorten it. */
static void arena_is_read_only(void)
{
    struct service service;
    int memory;
    uint64_t bytes;
    char path[64];
    service_start(&service, MEMORY, MEMORY / 2, NULL);
    CHECK_EQ(dlfs_reader_arena(service.reader, &memory, &bytes), 0);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", memory);
    int again = open(path, O_RDWR);
    CHECK(again >= 0);
    CHECK(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0) == MAP_FAILED);
    CHECK_EQ(write(again, path, 1), -1);
    CHECK_EQ(ftruncate(again, 0), -1);
    close(again);
    service_stop(&service);
}

int main(void)
{
    many_threads(MEMORY, false);
    many_threads(WHOLE, true);
    single_samples();
    streams();
    failures();
    greedy_client(MEMORY);
    greedy_client(WHOLE);
    counted_batches();
    withheld_batch();
    service_ends();
    client_ends();
    no_answer();
    patient_client();
    wrong_calls();
    largest_channel();
    arena_is_read_only();
    return 0;
}
