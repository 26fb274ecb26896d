/*
 * The sample cache: a selection that fits is read once, room that is given up is
 * used again, an evicted sample is no longer found, and consumers on several threads share the
 * cache.
 */
#include <dlfs/dlfs.h>

#include <pthread.h>

#include "reader/reader_tests.h"

#define CHOSEN_EVERY 4u
#define CHOSEN (COUNT / CHOSEN_EVERY)

/* Creates the order of an epoch over every fourth sample. */
static dlfs_sequence *selected_order(const struct dataset *dataset, uint64_t *indices,
                                     uint64_t epoch)
{
    for (uint64_t i = 0; i < CHOSEN; i++) {
        indices[i] = i * CHOSEN_EVERY;
    }
    const dlfs_choice choice = {.kind = DLFS_ORDER_SELECTED,
                                .seed = 5,
                                .epoch = epoch,
                                .indices = indices,
                                .count = CHOSEN};
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_choose(dataset->directory, &choice, &sequence), 0);
    return sequence;
}

static void take_all(dlfs_reader *reader, const dlfs_stream_config *config)
{
    dlfs_stream *stream;
    dlfs_batch *batch;
    CHECK_EQ(dlfs_stream_create(reader, config, &stream), 0);
    int code;
    while ((code = dlfs_stream_next(stream, 8, -1, &batch)) == 0) {
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < batch->count; i++) {
            check_sample(batch, i);
        }
        dlfs_batch_release(batch);
    }
    CHECK_EQ(code, DLFS_E_END);
    dlfs_stream_destroy(stream);
}

/* Takes one rank's samples of an epoch. */
static void take(dlfs_reader *reader, const dlfs_sequence *sequence, uint64_t rank, uint64_t ranks)
{
    const dlfs_stream_config config = {
        .sequence = sequence,
        .first = rank,
        .stride = ranks,
        .count = (CHOSEN - rank + ranks - 1) / ranks,
        .plan = DLFS_PLAN_DIRECT,
    };
    take_all(reader, &config);
}

static uint64_t read_bytes(dlfs_reader *reader)
{
    dlfs_reader_stats stats;
    dlfs_reader_get_stats(reader, &stats);
    return stats.read_bytes;
}

static uint64_t epoch_bytes(const struct dataset *dataset, dlfs_reader *reader, uint64_t epoch)
{
    uint64_t indices[CHOSEN];
    uint64_t before = read_bytes(reader);
    dlfs_sequence *sequence = selected_order(dataset, indices, epoch);
    take(reader, sequence, 0, 1);
    dlfs_sequence_destroy(sequence);
    return read_bytes(reader) - before;
}

static uint64_t chosen_bytes(void)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < CHOSEN; i++) {
        bytes += sample_length(i * CHOSEN_EVERY);
    }
    return bytes;
}

/*
 * Checks that the cache with its map, and its bound, stay within the memory. The cache may exceed
 * its bound for a while: a stream's reserve grows with the first batch of the consumer, and slots
 * are evicted only when they are needed.
 */
static void check_bound(dlfs_reader *reader)
{
    const struct cache *cache = &reader->cache;
    pthread_mutex_lock(&reader->arena->lock);
    uint64_t map = cache->map != NULL ? reader->arena->slots[cache->map_slot].run : 0;
    CHECK(cache->slots + map <= reader->slots_max);
    CHECK(cache->slots_max + map <= reader->slots_max);
    pthread_mutex_unlock(&reader->arena->lock);
}

static void a_selection_is_read_once(bool shared)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    uint64_t enough = 2 * chosen_bytes() + 24 * CHUNK;
    dlfs_reader *reader = reader_with(&dataset, enough, 0, shared);
    CHECK(epoch_bytes(&dataset, reader, 0) >= chosen_bytes());
    for (uint64_t epoch = 1; epoch < 4; epoch++) {
        CHECK_EQ(epoch_bytes(&dataset, reader, epoch), 0);
    }
    check_bound(reader);
    empty_cache(reader);
    CHECK(epoch_bytes(&dataset, reader, 4) >= chosen_bytes());
    CHECK_EQ(epoch_bytes(&dataset, reader, 5), 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

static void a_share_is_saved(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    uint64_t before = UINT64_MAX;
    for (uint64_t memory = 16 * CHUNK; memory < chosen_bytes() + 40 * CHUNK; memory += 8 * CHUNK) {
        dlfs_reader *reader = reader_over(&dataset, memory, 0);
        (void)epoch_bytes(&dataset, reader, 0);
        uint64_t bytes = epoch_bytes(&dataset, reader, 1);
        CHECK(bytes <= before || bytes - before <= 4 * CHUNK);
        before = bytes;
        check_bound(reader);
        check_memory(&dataset, reader, memory);
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
    }
    CHECK_EQ(before, 0);
    dataset_destroy(&dataset);
}

static uint64_t chunk_copy_bytes(const struct dataset *dataset, dlfs_reader *reader, uint64_t epoch)
{
    uint64_t before = read_bytes(reader);
    dlfs_sequence *sequence;
    CHECK_EQ(
        dlfs_sequence_create(dataset->directory, CHUNK, DLFS_ORDER_GLOBAL, 3, epoch, 1, &sequence),
        0);
    const dlfs_stream_config config = {
        .sequence = sequence, .stride = 1, .count = COUNT, .plan = DLFS_PLAN_CHUNK_COPY};
    take_all(reader, &config);
    dlfs_sequence_destroy(sequence);
    return read_bytes(reader) - before;
}

/* Checks that reads get a few slots if there are as many slots as chunks, just too few for all. */
static void chunk_copy_has_room(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    for (uint64_t more = 0; more < SLOTS_MIN; more++) {
        dlfs_reader *reader = reader_over(&dataset, (dataset.chunk_count + more) * CHUNK, 0);
        (void)chunk_copy_bytes(&dataset, reader, 0);
        CHECK(reader->cache.slots > dataset.chunk_count * 3 / 4);
        CHECK(reader->cache.slots_max < reader->slots_max);
        CHECK(chunk_copy_bytes(&dataset, reader, 1) < dataset.chunk_count * CHUNK / 2);
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
    }
    dataset_destroy(&dataset);
}

/* Creates a reader with an empty cache of so many slots. Takes the lock. */
static dlfs_reader *locked_reader(const struct dataset *dataset, uint32_t slots_max,
                                  uint32_t packed_run_slots)
{
    dlfs_reader *reader = reader_over(dataset, 32 * CHUNK, 0);
    CHECK(epoch_bytes(dataset, reader, 0) > 0);
    empty_cache(reader);
    pthread_mutex_lock(&reader->arena->lock);
    cache_set_limits(reader, slots_max, packed_run_slots, true);
    cache_reserve_map(reader, 100);
    return reader;
}

/* Reserves room for samples one by one, and abandons, publishes and evicts it. */
static void reserve_and_abandon(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = locked_reader(&dataset, 4, 2);
    uint64_t offsets[3];
    uint64_t again;
    CHECK_EQ(cache_reserve(reader, 1, sample_length(1), &offsets[0]), RESERVE_DONE);
    CHECK_EQ(cache_reserve(reader, 1, sample_length(1), &again), RESERVE_REFUSED);
    CHECK(!reader->cache.full);
    CHECK_EQ(cache_reserve(reader, 2, sample_length(2), &offsets[1]), RESERVE_DONE);
    CHECK(!cache_find(reader, 1, &again)); /* not published yet */
    cache_abandon(reader, 2, offsets[1]);
    CHECK_EQ(cache_reserve(reader, 3, sample_length(3), &offsets[2]), RESERVE_DONE);
    CHECK_EQ(offsets[2], offsets[1]);     /* the room of the last sample is used again */
    cache_abandon(reader, 1, offsets[0]); /* the room of an earlier sample is not */
    cache_publish(reader, 3);
    CHECK(cache_find(reader, 3, &again));
    CHECK_EQ(again, offsets[2]);
    CHECK(!cache_find(reader, 1, &again));
    CHECK_EQ(reader->cache.slots, 2);
    arena_release(reader, slot_of(reader, offsets[2]));
    uint64_t index = 10;
    enum reservation taken;
    while ((taken = cache_reserve(reader, index, sample_length(index), &again)) == RESERVE_DONE) {
        cache_publish(reader, index++);
        arena_release(reader, slot_of(reader, again));
    }
    CHECK_EQ(taken, RESERVE_REFUSED);
    CHECK(reader->cache.full);
    CHECK_EQ(reader->cache.slots, 4);
    arena_evict(reader, reader->cache.idle.first); /* the holes in it are skipped */
    CHECK(!cache_find(reader, 3, &again));
    CHECK(cache_find(reader, index - 1, &again));
    pthread_mutex_unlock(&reader->arena->lock);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that a run with mostly abandoned samples is evicted when others lack room.
 */
static void holes(void)
{
    enum { FIRST = 10, TAKEN = 8, LOOKS = 2 };
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = locked_reader(&dataset, 3, 3);
    uint64_t offsets[TAKEN];
    for (uint64_t i = 0; i < TAKEN; i++) {
        CHECK_EQ(cache_reserve(reader, FIRST + i, sample_length(FIRST + i), &offsets[i]),
                 RESERVE_DONE);
    }
    for (uint64_t i = 0; i < TAKEN - 1; i++) {
        cache_abandon(reader, FIRST + i, offsets[i]);
    }
    cache_publish(reader, FIRST + TAKEN - 1);
    arena_release(reader, slot_of(reader, offsets[TAKEN - 1]));
    for (int look = 0; look < LOOKS; look++) {
        CHECK_EQ(reader->cache.slots, 3);
        reader->cache.lacked_room = true;
        cache_count_given(reader, COUNT);
        cache_begin_epoch(reader, COUNT);
    }
    CHECK_EQ(reader->cache.slots, 0);
    CHECK_EQ(reader->cache.count, 0);
    pthread_mutex_unlock(&reader->arena->lock);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

struct consumer {
    dlfs_reader *reader;
    const dlfs_sequence *sequence;
    uint64_t rank;
    uint64_t ranks;
};

static void *consume(void *argument)
{
    const struct consumer *consumer = argument;
    for (int epoch = 0; epoch < 3; epoch++) {
        take(consumer->reader, consumer->sequence, consumer->rank, consumer->ranks);
        for (uint64_t index = consumer->rank; index < COUNT; index += 37) {
            dlfs_batch *batch;
            CHECK_EQ(dlfs_reader_read(consumer->reader, &index, 1, &batch), 0);
            CHECK_EQ(batch->failure_count, 0);
            check_sample(batch, 0);
            dlfs_batch_release(batch);
        }
    }
    return NULL;
}

/* Runs streams and reads on several threads, with memory for few, some or all samples. */
static void together(uint64_t memory_bytes, const dlfs_fault_config *faults)
{
    enum { RANKS = 3 };
    struct dataset dataset;
    dataset_create(&dataset, faults);
    dlfs_reader *reader = reader_over(&dataset, memory_bytes, 50);
    uint64_t indices[CHOSEN];
    dlfs_sequence *sequence = selected_order(&dataset, indices, 0);
    struct consumer consumers[RANKS];
    pthread_t threads[RANKS];
    for (uint64_t rank = 0; rank < RANKS; rank++) {
        consumers[rank] = (struct consumer){reader, sequence, rank, RANKS};
        CHECK_EQ(pthread_create(&threads[rank], NULL, consume, &consumers[rank]), 0);
    }
    for (uint64_t rank = 0; rank < RANKS; rank++) {
        CHECK_EQ(pthread_join(threads[rank], NULL), 0);
    }
    dlfs_sequence_destroy(sequence);
    check_memory(&dataset, reader, memory_bytes);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

int main(void)
{
    const dlfs_fault_config faults = {
        .seed = 7,
        .error_per_million = 20000,
        .short_per_million = 10000,
        .flip_per_million = 20000,
        .reorder = 1,
    };
    a_selection_is_read_once(false);
    a_selection_is_read_once(true);
    a_share_is_saved();
    chunk_copy_has_room();
    reserve_and_abandon();
    holes();
    const uint64_t memories[] = {8 * CHUNK, 32 * CHUNK, 48 * CHUNK, 64u << 20};
    for (int i = 0; i < 4; i++) {
        together(memories[i], NULL);
        together(memories[i], &faults);
    }
    return 0;
}
