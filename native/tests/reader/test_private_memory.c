/*
 * Reads into private memory: the samples are intact and not cached, the next batch uses the same
 * memory, and samples in the arena are copied.
 */
#define LARGE_EVERY 7u /* so that all samples need mapped memory, not malloc's */
#include <errno.h>

#include "reader/reader_tests.h"

static dlfs_batch *read_apart(dlfs_reader *reader, uint64_t first, uint64_t count)
{
    uint64_t indices[COUNT];
    dlfs_batch *batch;
    for (uint64_t i = 0; i < count; i++) {
        indices[i] = first + i;
    }
    CHECK_EQ(dlfs_reader_read_apart(reader, indices, count, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < count; i++) {
        check_sample(batch, i);
    }
    return batch;
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
    dlfs_reader *reader = reader_over(dataset, 64u << 20, 0);
    dlfs_batch *batch = read_apart(reader, 0, COUNT);
    const uint8_t *base = batch->base;
    CHECK_EQ(dlfs_reader_get(reader, 7, buffer, sizeof buffer, DLFS_GET_CACHED), -EAGAIN);
    dlfs_batch_release(batch);
    batch = read_apart(reader, 0, COUNT);
    CHECK(batch->base == base); /* the same mapping */
    dlfs_batch *other = read_apart(reader, 0, COUNT);
    CHECK(other->base != base);
    CHECK_EQ(private_batches(reader), 0); /* none for lack of room */
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    check_sample(other, COUNT - 1);
    dlfs_batch_release(other);
}

/* Checks that the mappings that were used last are kept, also for smaller batches. */
static void the_last_mappings_stay(const struct dataset *dataset)
{
    enum { MANY = 40 }; /* more than are kept */
    dlfs_reader *reader = reader_over(dataset, 8 * CHUNK, 0);
    dlfs_batch *batches[MANY];
    for (uint32_t i = 0; i < MANY; i++) {
        batches[i] = read_apart(reader, 0, COUNT);
    }
    const uint8_t *last = batches[MANY - 1]->base;
    const uint8_t *before_last = batches[MANY - 2]->base;
    for (uint32_t i = 0; i < MANY; i++) {
        dlfs_batch_release(batches[i]);
    }
    batches[0] = read_apart(reader, 0, COUNT / 2);
    CHECK(batches[0]->base == last);
    batches[1] = read_apart(reader, 0, COUNT);
    CHECK(batches[1]->base == before_last);
    dlfs_batch_release(batches[0]);
    dlfs_batch_release(batches[1]);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
}

static void samples_in_memory_are_used(const struct dataset *dataset)
{
    uint64_t some[] = {3, 5, 7, 400};
    dlfs_reader *reader = reader_over(dataset, 64u << 20, 0);
    dlfs_batch *batch;
    dlfs_reader_stats stats;
    CHECK_EQ(dlfs_reader_read(reader, some, 4, &batch), 0);
    dlfs_batch_release(batch);
    dlfs_batch_release(read_apart(reader, 0, 10)); /* some samples are in the arena */
    dlfs_reader_get_stats(reader, &stats);
    uint64_t reads = stats.reads;
    dlfs_batch_release(read_apart(reader, 5, 1)); /* the sample is in the arena */
    dlfs_reader_get_stats(reader, &stats);
    CHECK_EQ(stats.reads, reads);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
}

static void a_small_budget_is_not_used(const struct dataset *dataset)
{
    dlfs_reader *reader = reader_over(dataset, 4 * CHUNK, 0);
    dlfs_batch *batches[40];
    for (uint64_t i = 0; i < 40; i++) {
        batches[i] = read_apart(reader, 10 * i, 10);
    }
    check_memory(dataset, reader, 4 * CHUNK);
    for (uint64_t i = 0; i < 40; i++) {
        dlfs_batch_release(batches[i]);
    }
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
}

int main(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    nothing_is_cached(&dataset);
    the_last_mappings_stay(&dataset);
    samples_in_memory_are_used(&dataset);
    a_small_budget_is_not_used(&dataset);
    dataset_destroy(&dataset);
    return 0;
}
