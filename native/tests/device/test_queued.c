/*
 * A device that takes longer for all that is read ahead than a read may take, but answers all the
 * time: reads that wait for their turn are not late, by streams and by batches. One that answers
 * no more: they are.
 */
#include <dlfs/dlfs.h>

#include "reader/reader_tests.h"

#define MEMORY_BYTES (8u << 20)
#define MILLION 1000000u
#define STALL_MS 20u
#define TIMEOUT_MS 1000u

/* The device below reads that hang when their reader is destroyed: it stays. */
static dlfs_device *below;

/* Creates a reader that has one operation in flight at a time. */
static dlfs_reader *reader_of(const struct dataset *dataset, uint32_t timeout_ms)
{
    return reader_as(dataset, (dlfs_reader_config){
                                  .depth = 1,
                                  .memory_bytes = MEMORY_BYTES,
                                  .timeout_ms = timeout_ms,
                              });
}

/* Reads samples of an epoch as one batch; returns how many could not be read in time. */
static uint64_t read_ahead(const struct dataset *dataset, dlfs_reader *reader)
{
    dlfs_sequence *sequence;
    dlfs_stream *stream;
    dlfs_batch *batch;
    CHECK_EQ(
        dlfs_sequence_create(dataset->directory, CHUNK, DLFS_ORDER_STORAGE, 0, 0, 1, &sequence), 0);
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT};
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    CHECK_EQ(dlfs_stream_next(stream, COUNT, -1, &batch), 0);
    uint64_t failed = batch->failure_count;
    for (uint64_t i = 0; i < failed; i++) {
        CHECK_EQ(batch->failures[i].code, DLFS_E_TIMEOUT);
    }
    for (uint64_t i = 0; i < batch->count; i++) {
        if (batch->lengths[i] >= 0) {
            check_sample(batch, i);
        }
    }
    dlfs_batch_release(batch);
    dlfs_stream_destroy(stream);
    dlfs_sequence_destroy(sequence);
    return failed;
}

static void slow(void)
{
    struct dataset dataset;
    dlfs_fault_config stalls = {.stall_per_million = MILLION, .stall_ms = STALL_MS};
    dataset_create(&dataset, &stalls);
    CHECK(dataset.chunk_count * STALL_MS > TIMEOUT_MS);
    dlfs_reader *reader = reader_of(&dataset, TIMEOUT_MS);
    CHECK_EQ(read_ahead(&dataset, reader), 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);

    reader = reader_of(&dataset, TIMEOUT_MS);
    uint64_t indices[COUNT];
    dlfs_batch *batch;
    for (uint64_t index = 0; index < COUNT; index++) {
        indices[index] = index;
    }
    CHECK_EQ(dlfs_reader_read(reader, indices, COUNT, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* No operation completes in time: neither those in flight nor those that wait for a queue pair. */
static void silent(void)
{
    struct dataset dataset;
    dlfs_fault_config stalls = {.stall_per_million = MILLION, .stall_ms = 2 * TIMEOUT_MS};
    dataset_create(&dataset, &stalls);
    dlfs_reader *reader = reader_of(&dataset, TIMEOUT_MS / 10);
    uint64_t failed = read_ahead(&dataset, reader);
    uint64_t empty = 0;
    for (uint64_t index = 0; index < COUNT; index++) {
        empty += sample_length(index) == 0;
    }
    CHECK_EQ(failed, COUNT - empty);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    below = dataset.inner;
    dataset.inner = NULL;
    dataset_destroy(&dataset);
}

int main(void)
{
    slow();
    silent();
    return 0;
}
