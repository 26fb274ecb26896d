/*
 * Streams of every plan and reads on demand at the same time on one reader, from a device that
 * fails, with little memory and pinned batches; a seed determines everything. The command line asks
 * for more rounds: first seed, number of seeds.
 */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>

#include "reader/reader_tests.h"

#define WORKERS 4
#define PINNED_MAX 5u
#define SEEDS 6u

struct worker {
    dlfs_reader *reader;
    const dlfs_directory *directory;
    uint32_t plans; /* as bits */
    uint64_t random;
    pthread_t thread;
};

/* splitmix64 */
static uint64_t random_below(uint64_t *state, uint64_t end)
{
    uint64_t value = (*state += UINT64_C(0x9e3779b97f4a7c15));
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (value ^ (value >> 31)) % end;
}

static void check_batch(const dlfs_batch *batch)
{
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < batch->count; i++) {
        check_sample(batch, i);
    }
}

/* Pins a batch in place of another one, which is checked once more and released. */
static void pin(struct worker *worker, dlfs_batch **pinned, uint64_t pins, dlfs_batch *batch)
{
    uint64_t place = random_below(&worker->random, pins);
    if (pinned[place] != NULL) {
        check_batch(pinned[place]);
    }
    dlfs_batch_release(pinned[place]);
    pinned[place] = batch;
}

static void read_some(struct worker *worker, dlfs_batch **pinned, uint64_t pins)
{
    uint64_t indices[64];
    uint64_t count = random_below(&worker->random, 64);
    for (uint64_t i = 0; i < count; i++) {
        indices[i] = random_below(&worker->random, COUNT);
    }
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read(worker->reader, indices, count, &batch), 0);
    CHECK_EQ(batch->count, count);
    check_batch(batch);
    pin(worker, pinned, pins, batch);
}

/* Takes an epoch, or the beginning of one, with reads on demand between its batches. */
static void take_some(struct worker *worker, dlfs_batch **pinned, uint64_t pins)
{
    uint64_t *random = &worker->random;
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(worker->directory, CHUNK, (uint32_t)random_below(random, 3),
                                  random_below(random, 4), 0, 3, &sequence),
             0);
    dlfs_stream_config config = {
        .sequence = sequence,
        .first = random_below(random, 40),
        .stride = 1 + random_below(random, 3),
    };
    do {
        config.plan = (uint32_t)random_below(random, 4);
    } while (!(worker->plans >> config.plan & 1));
    config.count = (COUNT - 1 - config.first) / config.stride + 1;
    dlfs_stream *stream;
    CHECK_EQ(dlfs_stream_create(worker->reader, &config, &stream), 0);
    uint64_t size = 1 + random_below(random, random_below(random, 8) ? 40 : COUNT);
    uint64_t stop = random_below(random, 3) ? COUNT : random_below(random, COUNT);
    uint64_t taken = 0;
    while (taken < config.count && taken < stop) {
        dlfs_batch *batch;
        int code = dlfs_stream_next(stream, size, (int)random_below(random, 3) * 10 - 1, &batch);
        if (code == -EAGAIN) {
            continue;
        }
        CHECK_EQ(code, 0);
        check_batch(batch);
        for (uint64_t i = 0; i < batch->count; i++, taken++) {
            uint64_t index;
            uint64_t position = config.first + taken * config.stride;
            CHECK_EQ(dlfs_sequence_fill(sequence, position, 1, 1, &index), 0);
            CHECK_EQ(batch->indices[i], index);
        }
        pin(worker, pinned, pins, batch);
        if (random_below(random, 8) == 0) {
            read_some(worker, pinned, pins);
        }
    }
    dlfs_stream_destroy(stream);
    dlfs_sequence_destroy(sequence);
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    dlfs_batch *pinned[PINNED_MAX] = {NULL};
    uint64_t pins = 1 + random_below(&worker->random, PINNED_MAX);
    for (int turn = 0; turn < 3; turn++) {
        take_some(worker, pinned, pins);
    }
    for (uint64_t i = 0; i < PINNED_MAX; i++) {
        if (pinned[i] != NULL) {
            check_batch(pinned[i]);
        }
        dlfs_batch_release(pinned[i]);
    }
    return NULL;
}

static void together(uint64_t seed)
{
    uint64_t random = seed;
    static const uint64_t memories[] = {4, 5, 8, 20, 40, 1000};
    dlfs_fault_config faults = {
        .seed = seed,
        .error_per_million = (uint32_t)random_below(&random, 3) * 20000,
        .short_per_million = (uint32_t)random_below(&random, 2) * 10000,
        .flip_per_million = (uint32_t)random_below(&random, 3) * 20000,
        .stall_per_million = (uint32_t)random_below(&random, 3) * 100000,
        .stall_ms = (uint32_t)random_below(&random, 4),
        .reorder = (uint32_t)random_below(&random, 2),
    };
    uint32_t plans = random_below(&random, 2) ? 15 : 1u << random_below(&random, 4);
    uint64_t memory_bytes = memories[random_below(&random, 6)] * CHUNK;
    printf("seed %" PRIu64 ": %" PRIu64 " bytes, plans %x\n", seed, memory_bytes, plans);
    (void)fflush(stdout);
    struct dataset dataset;
    dataset_create(&dataset, &faults);
    dlfs_reader *reader = reader_over(&dataset, memory_bytes, 50);
    struct worker workers[WORKERS];
    for (uint64_t i = 0; i < WORKERS; i++) {
        workers[i] = (struct worker){reader, dataset.directory, plans, seed * WORKERS + i, 0};
        CHECK_EQ(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (uint64_t i = 0; i < WORKERS; i++) {
        CHECK_EQ(pthread_join(workers[i].thread, NULL), 0);
    }
    check_memory(&dataset, reader, memory_bytes);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

int main(int count, char **arguments)
{
    uint64_t first = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    uint64_t seeds = count > 2 ? strtoull(arguments[2], NULL, 10) : SEEDS;
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        together(seed);
    }
    return 0;
}
