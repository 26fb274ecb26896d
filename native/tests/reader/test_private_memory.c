/*
 * Batches that get private memory, since others have pinned the arena: the samples are intact and
 * not cached, and the next batch uses the same memory.
 */
#define LARGE_EVERY 7u /* so that all samples need mapped memory, not malloc's */
#include <errno.h>

#include "reader/reader_tests.h"

#define SLOTS 4u

/* Samples of which each pins a slot of its own. */
static const uint64_t pinned[SLOTS] = {10, 11, 13, 14};

static dlfs_batch *read_samples(dlfs_reader *reader, uint64_t first, uint64_t count)
{
    uint64_t indices[COUNT];
    dlfs_batch *batch;
    for (uint64_t i = 0; i < count; i++) {
        indices[i] = first + i;
    }
    CHECK_EQ(dlfs_reader_read(reader, indices, count, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < count; i++) {
        check_sample(batch, i);
    }
    return batch;
}

/* Creates a reader whose arena is pinned by these batches. */
static dlfs_reader *pinned_reader(const struct dataset *dataset, dlfs_batch **batches)
{
    dlfs_reader *reader = reader_over(dataset, SLOTS * CHUNK, 0);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_EQ(dlfs_reader_read(reader, &pinned[i], 1, &batches[i]), 0);
    }
    return reader;
}

static void release_all(dlfs_batch **batches, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        dlfs_batch_release(batches[i]);
    }
}

static uint64_t private_batches(dlfs_reader *reader)
{
    dlfs_reader_stats stats;
    dlfs_reader_get_stats(reader, &stats);
    return stats.private_batches;
}

static void nothing_is_cached(const struct dataset *dataset)
{
    uint8_t buffer[CHUNK];
    dlfs_batch *pins[SLOTS];
    dlfs_reader *reader = pinned_reader(dataset, pins);
    dlfs_batch *batch = read_samples(reader, 0, COUNT);
    const uint8_t *base = batch->base;
    CHECK_EQ(private_batches(reader), 1);
    CHECK_EQ(dlfs_reader_get(reader, 7, buffer, sizeof buffer, DLFS_GET_CACHED), -EAGAIN);
    dlfs_batch_release(batch);
    batch = read_samples(reader, 0, COUNT);
    CHECK(batch->base == base); /* the same mapping */
    dlfs_batch *other = read_samples(reader, 0, COUNT);
    CHECK(other->base != base);
    dlfs_batch_release(batch);
    release_all(pins, SLOTS);
    check_memory(dataset, reader, SLOTS * CHUNK);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    check_sample(other, COUNT - 1);
    dlfs_batch_release(other);
}

/* Checks that the mappings that were used last are kept, also for smaller batches. */
static void the_last_mappings_stay(const struct dataset *dataset)
{
    enum { MANY = 40 }; /* more than are kept */
    dlfs_batch *pins[SLOTS];
    dlfs_batch *batches[MANY];
    dlfs_reader *reader = pinned_reader(dataset, pins);
    for (uint32_t i = 0; i < MANY; i++) {
        batches[i] = read_samples(reader, 0, COUNT);
    }
    const uint8_t *last = batches[MANY - 1]->base;
    const uint8_t *before_last = batches[MANY - 2]->base;
    release_all(batches, MANY);
    batches[0] = read_samples(reader, 0, COUNT / 2);
    CHECK(batches[0]->base == last);
    batches[1] = read_samples(reader, 0, COUNT);
    CHECK(batches[1]->base == before_last);
    release_all(batches, 2);
    release_all(pins, SLOTS);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
}

int main(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    nothing_is_cached(&dataset);
    the_last_mappings_stay(&dataset);
    dataset_destroy(&dataset);
    return 0;
}
