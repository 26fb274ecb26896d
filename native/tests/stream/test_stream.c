/*
 * Streams: an epoch gives every sample once and intact, with every plan, while batches stay pinned,
 * and when the consumer leaves early.
 */
#include <dlfs/dlfs.h>

#include <errno.h>

#include "directory/directory.h"
#include "reader/reader_tests.h"

#define PINNED_MAX 6

static uint64_t take_epoch(dlfs_reader *reader, const dlfs_sequence *sequence, uint32_t plan,
                           uint64_t size, uint64_t stop)
{
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT, .plan = plan};
    dlfs_stream *stream;
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    uint8_t seen[COUNT] = {0};
    dlfs_batch *pinned[PINNED_MAX] = {NULL};
    uint64_t taken = 0;
    uint64_t indices[COUNT];
    CHECK_EQ(dlfs_sequence_fill(sequence, 0, 1, COUNT, indices), 0);
    for (int round = 0; taken < stop; round++) {
        dlfs_batch *batch;
        int code = dlfs_stream_next(stream, size, -1, &batch);
        if (code == DLFS_E_END) {
            break;
        }
        CHECK_EQ(code, 0);
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < batch->count; i++) {
            CHECK_EQ(batch->indices[i], indices[taken + i]);
            CHECK_EQ(seen[batch->indices[i]]++, 0);
            check_sample(batch, i);
        }
        taken += batch->count;
        dlfs_batch_release(pinned[round % PINNED_MAX]);
        pinned[round % PINNED_MAX] = batch;
    }
    dlfs_stream_destroy(stream);
    for (int i = 0; i < PINNED_MAX; i++) {
        for (uint64_t at = 0; pinned[i] != NULL && at < pinned[i]->count; at++) {
            check_sample(pinned[i], at);
        }
        dlfs_batch_release(pinned[i]);
    }
    return taken;
}

static void every_plan(uint64_t memory_bytes, const dlfs_fault_config *faults)
{
    struct dataset dataset;
    dataset_create(&dataset, faults);
    for (uint32_t plan = DLFS_PLAN_AUTO; plan <= DLFS_PLAN_CHUNK_COPY; plan++) {
        for (uint32_t order = DLFS_ORDER_STORAGE; order <= DLFS_ORDER_CHUNK; order++) {
            dlfs_reader *reader = reader_over(&dataset, memory_bytes, 50);
            dlfs_sequence *sequence;
            CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, order, 3, order, 4, &sequence),
                     0);
            CHECK_EQ(take_epoch(reader, sequence, plan, 16, COUNT), COUNT);
            CHECK_EQ(take_epoch(reader, sequence, plan, 7, 50), 56);
            CHECK_EQ(take_epoch(reader, sequence, plan, COUNT, COUNT), COUNT);
            dlfs_sequence_destroy(sequence);
            CHECK_EQ(dlfs_reader_destroy(reader), 0);
        }
    }
    dataset_destroy(&dataset);
}

/* Checks consumers that share the batches of a rank: each gets its own groups, the last one short.
 */
static void groups(uint32_t plan, uint32_t kind, uint64_t consumers)
{
    enum { GROUP = 7, STRIDE = 2 };
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 1 << 20, 0);
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, kind, 3, 1, 4, &sequence), 0);
    uint64_t total = (COUNT - 1 + STRIDE - 1) / STRIDE; /* from position 1 on */
    uint64_t expected[COUNT];
    CHECK_EQ(dlfs_sequence_fill(sequence, 1, STRIDE, total, expected), 0);
    uint64_t taken = 0;
    for (uint64_t consumer = 0; consumer < consumers; consumer++) {
        uint64_t ordinal = consumer * GROUP;
        dlfs_stream_config config = {
            .sequence = sequence,
            .first = 1 + ordinal * STRIDE,
            .stride = STRIDE,
            .group = GROUP,
            .group_stride = GROUP * STRIDE * consumers,
            .plan = plan,
        };
        for (uint64_t at = ordinal; at < total; at += GROUP * consumers) {
            config.count += total - at < GROUP ? total - at : GROUP;
        }
        dlfs_stream *stream;
        dlfs_batch *batch;
        CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
        for (; dlfs_stream_next(stream, GROUP, -1, &batch) == 0; ordinal += GROUP * consumers) {
            for (uint64_t i = 0; i < batch->count; i++) {
                CHECK_EQ(batch->indices[i], expected[ordinal + i]);
                check_sample(batch, i);
            }
            taken += batch->count;
            dlfs_batch_release(batch);
        }
        dlfs_stream_destroy(stream);
        config.count++;
        CHECK_EQ(dlfs_stream_create(reader, &config, &stream), -EINVAL);
    }
    CHECK_EQ(taken, total);
    dlfs_sequence_destroy(sequence);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

static void wrong_groups(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 1 << 20, 0);
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 0, 0, 1, &sequence),
             0);
    static const uint64_t wrong[][4] = {
        /* stride, count, group, group_stride */
        {1, 2, 1, 0},                 /* groups without distance */
        {1, 8, 4, 3},                 /* groups that overlap */
        {2, 8, 4, 6},                 /* groups that share a sample */
        {1, 2, 1, COUNT},             /* past the end */
        {1, 3, 2, COUNT - 1},         /* past the end by the second sample of the last group */
        {UINT64_MAX, 2, 2, 10},       /* a stride that overflows */
        {1, 3, 1, UINT64_MAX / 2 + 1} /* groups that overflow */
    };
    dlfs_stream *stream;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        dlfs_stream_config config = {
            .sequence = sequence,
            .first = i == 4,
            .stride = wrong[i][0],
            .count = wrong[i][1],
            .group = wrong[i][2],
            .group_stride = wrong[i][3],
        };
        CHECK_EQ(dlfs_stream_create(reader, &config, &stream), -EINVAL);
    }
    dlfs_sequence_destroy(sequence);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks a directory whose order has some samples twice and others not at all. */
static void wrong_order(uint32_t plan, uint32_t kind, uint64_t memory_bytes)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    const dlfs_directory_header *header = dataset.entries;
    uint32_t *order = (uint32_t *)((uint8_t *)dataset.entries + header->order_offset);
    for (uint64_t rank = 0; rank + 2 < COUNT; rank += 3) {
        order[rank + 1] = order[rank];
    }
    dlfs_reader *reader = reader_over(&dataset, memory_bytes, 0);
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, kind, 1, 0, 4, &sequence), 0);
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT, .plan = plan};
    dlfs_stream *stream;
    dlfs_batch *batch;
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    for (uint64_t taken = 0; taken < COUNT; taken += 10) {
        CHECK_EQ(dlfs_stream_next(stream, 10, -1, &batch), 0);
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < batch->count; i++) {
            check_sample(batch, i);
        }
        dlfs_batch_release(batch);
    }
    dlfs_stream_destroy(stream);
    dlfs_sequence_destroy(sequence);
    check_memory(&dataset, reader, memory_bytes);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

static void wrong_calls(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 1 << 20, 0);
    dlfs_sequence *sequence;
    dlfs_stream *stream;
    dlfs_batch *batch;
    uint64_t index;
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, 9, 0, 0, 1, &sequence), -EINVAL);
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_CHUNK, 0, 0, 0, &sequence),
             -EINVAL);
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 0, 0, 1, &sequence),
             0);
    CHECK_EQ(dlfs_sequence_fill(sequence, COUNT, 1, 1, &index), -EINVAL);
    CHECK_EQ(dlfs_sequence_fill(sequence, 0, 0, 1, &index), -EINVAL);
    CHECK_EQ(dlfs_sequence_fill(sequence, COUNT, 1, 0, &index), 0);
    dlfs_sequence *chunks;
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_CHUNK, 0, 0, 4, &chunks), 0);
    CHECK_EQ(dlfs_sequence_fill(chunks, 5, UINT64_MAX, 1, &index), 0);
    dlfs_sequence_destroy(chunks);
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT + 1};
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), -EINVAL);
    config.count = 0;
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    CHECK_EQ(dlfs_stream_next(stream, 0, -1, &batch), -EINVAL);
    CHECK_EQ(dlfs_stream_next(stream, 1, 0, &batch), DLFS_E_END);
    CHECK_EQ(dlfs_reader_destroy(reader), -EBUSY);
    dlfs_stream_destroy(stream);
    dlfs_stream_destroy(NULL);
    dlfs_sequence_destroy(sequence);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

static uint64_t read_bytes(dlfs_reader *reader)
{
    dlfs_reader_stats stats;
    dlfs_reader_get_stats(reader, &stats);
    return stats.read_bytes;
}

/* Batches that are larger than the memory are read on demand. Nothing is read ahead for the next
 * one, which would read it again. */
static void batches_beyond_memory(uint32_t plan)
{
    enum { SIZE = 50, MEMORY = 4 * CHUNK };
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, MEMORY, 0);
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 3, 0, 1, &sequence),
             0);
    for (uint64_t first = 0; first < COUNT; first += SIZE) {
        uint64_t indices[SIZE];
        dlfs_batch *batch;
        CHECK_EQ(dlfs_sequence_fill(sequence, first, 1, SIZE, indices), 0);
        CHECK_EQ(dlfs_reader_read(reader, indices, SIZE, &batch), 0);
        dlfs_batch_release(batch);
    }
    uint64_t needed = read_bytes(reader);
    CHECK_EQ(take_epoch(reader, sequence, plan, SIZE, COUNT), COUNT);
    /* The stream reads ahead until it knows the size of a batch. */
    CHECK(read_bytes(reader) - needed <= needed + MEMORY);
    dlfs_sequence_destroy(sequence);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

int main(void)
{
    dlfs_fault_config faults = {
        .seed = 5,
        .error_per_million = 20000,
        .short_per_million = 10000,
        .flip_per_million = 20000,
        .stall_per_million = 2000,
        .stall_ms = 1,
        .reorder = 1,
    };
    const uint64_t memories[] = {4 * CHUNK, 24 * CHUNK, 64u << 20};
    for (uint32_t i = ROUNDS_OF(0u, 1u); i < ROUNDS_OF(3u, 2u); i++) {
        every_plan(memories[i], NULL);
        every_plan(memories[i], &faults);
    }
    for (uint32_t plan = DLFS_PLAN_DIRECT; plan <= DLFS_PLAN_CHUNK_COPY; plan++) {
        wrong_order(plan, DLFS_ORDER_GLOBAL, 24 * CHUNK);
        wrong_order(plan, DLFS_ORDER_STORAGE, 24 * CHUNK);
    }
    for (uint32_t plan = DLFS_PLAN_AUTO; plan <= DLFS_PLAN_CHUNK_COPY; plan++) {
        for (uint64_t consumers = 1; consumers <= 3; consumers++) {
            groups(plan, plan % 3, consumers); /* DLFS_ORDER_*, each at least once */
        }
    }
    for (uint32_t plan = DLFS_PLAN_DIRECT; plan <= DLFS_PLAN_CHUNK_COPY; plan++) {
        batches_beyond_memory(plan);
    }
    wrong_groups();
    wrong_calls();
    return 0;
}
