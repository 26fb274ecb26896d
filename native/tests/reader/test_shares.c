/* Readers that share an arena: each has its share, by need, and all that is given is right. */
#define LARGE_EVERY 9u

#include <sched.h>
#include <string.h>

#include "reader/reader_tests.h"
#include "sequence/sequence.h"
#include "stream/stream.h"

#define SLOTS 64u
#define BATCH 24u
#define READERS 5u
#define EPOCHS ROUNDS_OF(2u, 1u)

static dlfs_arena *arena_of(uint64_t slots)
{
    const dlfs_arena_config config = {.memory_bytes = slots * CHUNK, .chunk_bytes = CHUNK};
    dlfs_arena *arena;
    CHECK_EQ(dlfs_arena_create(&config, &arena), 0);
    return arena;
}

static dlfs_reader *sharer(const struct dataset *dataset, dlfs_arena *arena)
{
    return reader_as(
        dataset,
        (dlfs_reader_config){
            .depth = 8, .arena = arena, .gap_bytes = 8192, .retry_count = 2, .timeout_ms = 20000});
}

static uint64_t slots_used(dlfs_arena *arena)
{
    dlfs_arena_stats stats;
    dlfs_arena_get_stats(arena, &stats);
    CHECK_EQ(stats.memory_bytes, (uint64_t)arena->slot_count * CHUNK);
    return stats.held_bytes / CHUNK;
}

/* Checks that what readers hold adds up, and that none took more than its share. */
static void check_slots_used(dlfs_arena *arena)
{
    uint64_t used = 0;
    pthread_mutex_lock(&arena->lock);
    for (const dlfs_reader *reader = arena->readers; reader != NULL; reader = reader->share.next) {
        used += reader->share.slots_used;
    }
    CHECK_EQ(used, arena->slot_count - arena->free_slots.count);
    pthread_mutex_unlock(&arena->lock);
}

static void read_some(dlfs_reader *reader, uint64_t first, uint64_t count, uint64_t step)
{
    uint64_t indices[COUNT];
    dlfs_batch *batch;
    for (uint64_t i = 0; i < count; i++) {
        indices[i] = (first + i * step) % COUNT;
    }
    CHECK_EQ(dlfs_reader_read(reader, indices, count, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < count; i++) {
        check_sample(batch, i);
    }
    dlfs_batch_release(batch);
}

static dlfs_stream *begin(dlfs_reader *reader, const dlfs_sequence *sequence)
{
    dlfs_stream_config config = {
        .sequence = sequence, .stride = 1, .count = sequence_count(sequence)};
    dlfs_stream *stream;
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    return stream;
}

/* Takes the next batch. Returns false at the end. */
static bool take_next(dlfs_stream *stream)
{
    dlfs_batch *batch;
    int code = dlfs_stream_next(stream, BATCH, -1, &batch);
    if (code == DLFS_E_END) {
        return false;
    }
    CHECK_EQ(code, 0);
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < batch->count; i++) {
        check_sample(batch, i);
    }
    dlfs_batch_release(batch);
    return true;
}

static dlfs_sequence *order(const struct dataset *dataset, uint64_t seed)
{
    dlfs_sequence *sequence;
    CHECK_EQ(
        dlfs_sequence_create(dataset->directory, CHUNK, DLFS_ORDER_GLOBAL, seed, 0, 4, &sequence),
        0);
    return sequence;
}

/* ---- shares ---------------------------------------------------------------------------------- */

static void shares_follow_need(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    CHECK(dataset.chunk_count > SLOTS);
    dlfs_arena *arena = arena_of(SLOTS);
    dlfs_reader *one = sharer(&dataset, arena);
    dlfs_reader *other = sharer(&dataset, arena);
    read_some(one, 0, 64, 7);
    CHECK_EQ(one->slots_max, SLOTS);
    CHECK_EQ(other->share.slots_used, 0);
    uint8_t buffer[LENGTH_MAX];
    CHECK_EQ(dlfs_reader_get(other, 1, buffer, LENGTH_MAX, DLFS_GET_CACHED), -EAGAIN);
    read_some(other, 3, 64, 5);
    CHECK_EQ(one->slots_max, SLOTS / 2);
    CHECK_EQ(other->slots_max, SLOTS / 2);
    /* One that is not read while the slots are taken once over leaves its share. */
    for (uint64_t i = 0; one->slots_max > SLOTS_MIN; i++) {
        CHECK(i < UINT64_C(1) << 16);
        read_some(other, i, 64, 11);
    }
    CHECK_EQ(other->slots_max, SLOTS);
    read_some(one, 1, 64, 13);
    CHECK_EQ(one->slots_max, SLOTS / 2);
    check_slots_used(arena);
    CHECK_EQ(dlfs_reader_destroy(one), 0);
    CHECK_EQ(other->slots_max, SLOTS);
    read_some(other, 0, COUNT, 1);
    check_slots_used(arena);
    CHECK_EQ(dlfs_reader_destroy(other), 0);
    CHECK_EQ(slots_used(arena), 0);
    dlfs_arena_destroy(arena);
    dataset_destroy(&dataset);
}

/* A stream that has read ahead into the whole arena gives up what another one needs. */
static void what_was_read_ahead_is_given_up(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_arena *arena = arena_of(SLOTS);
    dlfs_reader *readers[2] = {sharer(&dataset, arena), sharer(&dataset, arena)};
    dlfs_sequence *sequences[2] = {order(&dataset, 1), order(&dataset, 2)};
    dlfs_stream *first = begin(readers[0], sequences[0]);
    CHECK(take_next(first));
    while (slots_used(arena) <= SLOTS / 2 + 8) {
        sched_yield();
    }
    dlfs_stream *second = begin(readers[1], sequences[1]);
    dlfs_reader_stats stats;
    for (uint32_t i = 0; i < 15; i++) {
        CHECK(take_next(second));
    }
    dlfs_reader_get_stats(readers[1], &stats);
    CHECK(stats.private_batches < 10); /* the first ones may come too early */
    CHECK(readers[0]->share.slots_used <= SLOTS / 2);
    while (take_next(first)) {
    }
    while (take_next(second)) {
    }
    dlfs_stream_destroy(first);
    dlfs_stream_destroy(second);
    check_slots_used(arena);
    for (uint32_t i = 0; i < 2; i++) {
        dlfs_sequence_destroy(sequences[i]);
        CHECK_EQ(dlfs_reader_destroy(readers[i]), 0);
    }
    CHECK_EQ(slots_used(arena), 0);
    dlfs_arena_destroy(arena);
    dataset_destroy(&dataset);
}

/* ---- many at once ---------------------------------------------------------------------------- */

struct worker {
    const struct dataset *dataset;
    dlfs_arena *arena;
    uint64_t seed;
};

/* Reads epochs and batches in turn, with readers that come and go. */
static void *work(void *argument)
{
    const struct worker *worker = argument;
    dlfs_reader *reader = sharer(worker->dataset, worker->arena);
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        dlfs_sequence *sequence = order(worker->dataset, worker->seed + epoch);
        dlfs_stream *stream = begin(reader, sequence);
        while (take_next(stream)) {
        }
        dlfs_stream_destroy(stream);
        dlfs_sequence_destroy(sequence);
        for (uint64_t first = 0; first < COUNT; first += BATCH) {
            read_some(reader, first + worker->seed, BATCH, 17);
        }
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
        reader = sharer(worker->dataset, worker->arena);
    }
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    return NULL;
}

static void many_at_once(uint64_t slots)
{
    struct dataset dataset;
    struct worker workers[READERS];
    pthread_t threads[READERS];
    dataset_create(&dataset, NULL);
    dlfs_arena *arena = arena_of(slots);
    for (uint64_t i = 0; i < READERS; i++) {
        workers[i] = (struct worker){&dataset, arena, 100 * i};
        CHECK_EQ(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (uint64_t i = 0; i < READERS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQ(slots_used(arena), 0);
    dlfs_arena_destroy(arena);
    dataset_destroy(&dataset);
}

/* ---- lives ----------------------------------------------------------------------------------- */

/* A batch keeps its reader and the arena, in any order of their ends. */
static void a_batch_outlives_them(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_arena *arena = arena_of(SLOTS);
    dlfs_reader *reader = sharer(&dataset, arena);
    uint64_t index = 2;
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read(reader, &index, 1, &batch), 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dlfs_arena_destroy(arena);
    check_sample(batch, 0);
    dlfs_batch_release(batch);
    dataset_destroy(&dataset);
}

static void bad_configs(void)
{
    dlfs_arena *arena;
    dlfs_arena_config config = {.memory_bytes = 3 * CHUNK, .chunk_bytes = CHUNK};
    CHECK_EQ(dlfs_arena_create(NULL, &arena), -EINVAL);
    CHECK_EQ(dlfs_arena_create(&config, &arena), DLFS_E_LIMIT);
    config.memory_bytes = UINT64_MAX;
    CHECK_EQ(dlfs_arena_create(&config, &arena), DLFS_E_LIMIT);
    config.chunk_bytes = CHUNK + 1;
    CHECK_EQ(dlfs_arena_create(&config, &arena), -EINVAL);
    config = (dlfs_arena_config){.memory_bytes = 8 * CHUNK, .chunk_bytes = CHUNK, .flags = 2};
    CHECK_EQ(dlfs_arena_create(&config, &arena), -EINVAL);
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    const dlfs_arena_config twice = {.memory_bytes = 16 * CHUNK, .chunk_bytes = 2 * CHUNK};
    CHECK_EQ(dlfs_arena_create(&twice, &arena), 0);
    dlfs_extent extent = {0, dataset.chunk_count};
    dlfs_reader_config other = {.devices = &dataset.device,
                                .member_count = 1,
                                .chunk_bytes = CHUNK,
                                .block_bytes = BLOCK,
                                .depth = 1,
                                .data_offset_bytes = DATA_OFFSET,
                                .extents = &extent,
                                .extent_count = 1,
                                .directory = dataset.directory,
                                .arena = arena,
                                .replicas = 1};
    dlfs_reader *reader;
    CHECK_EQ(dlfs_reader_create(&other, &reader), -EINVAL); /* of other chunks */
    dlfs_arena_destroy(arena);
    dlfs_arena_destroy(NULL);
    dataset_destroy(&dataset);
}

int main(void)
{
    shares_follow_need();
    what_was_read_ahead_is_given_up();
    many_at_once(SLOTS);
    many_at_once(READERS * SLOTS_MIN);
    many_at_once(8);
    many_at_once(4096);
    a_batch_outlives_them();
    bad_configs();
    return 0;
}
