/* A dataset with two copies of every chunk on three members, and functions that read all of it. */
#ifndef DLFS_TESTS_COPIES_H
#define DLFS_TESTS_COPIES_H

#include <errno.h>

#include "reader/reader_tests.h"

#define MEMBERS 3u
#define ROWS 48u
#define MILLION 1000000u

/* The dataset and its members, created once. Every volume injects faults of its own. */
struct copies {
    struct dataset dataset;
    dlfs_device *members[MEMBERS];
};

struct volume {
    const struct dataset *dataset;
    dlfs_device *devices[MEMBERS]; /* faulty ones */
};

static struct copies copies;

static inline void copy_chunk(dlfs_queue *from, dlfs_queue *const *to, uint64_t chunk, void *memory)
{
    CHECK_EQ(
        dlfs_queue_transfer(from, DLFS_OP_READ, memory, DATA_OFFSET + chunk * CHUNK, CHUNK, CHUNK),
        0);
    for (uint32_t copy = 0; copy < 2; copy++) {
        uint64_t row = copy * ROWS + chunk / MEMBERS;
        CHECK_EQ(dlfs_queue_transfer(to[(chunk + copy) % MEMBERS], DLFS_OP_WRITE, memory,
                                     DATA_OFFSET + row * CHUNK, CHUNK, CHUNK),
                 0);
    }
}

static inline void copies_create(void)
{
    struct dataset *dataset = &copies.dataset;
    void *memory;
    dlfs_queue *queues[MEMBERS];
    dlfs_queue *from;
    dataset_create(dataset, NULL);
    CHECK(dataset->chunk_count <= (uint64_t)ROWS * MEMBERS);
    CHECK_EQ(dlfs_memory_map(CHUNK, &memory, NULL), 0);
    CHECK_EQ(dlfs_queue_create(dataset->inner, 4, &from), 0);
    for (uint32_t i = 0; i < MEMBERS; i++) {
        CHECK_EQ(dlfs_device_create_memory(DEVICE_BYTES, 512, &copies.members[i]), 0);
        CHECK_EQ(dlfs_queue_create(copies.members[i], 4, &queues[i]), 0);
    }
    for (uint64_t chunk = 0; chunk < dataset->chunk_count; chunk++) {
        copy_chunk(from, queues, chunk, memory);
    }
    dlfs_queue_destroy(from);
    for (uint32_t i = 0; i < MEMBERS; i++) {
        dlfs_queue_destroy(queues[i]);
    }
    dlfs_memory_unmap(memory, CHUNK);
}

static inline void copies_destroy(void)
{
    for (uint32_t i = 0; i < MEMBERS; i++) {
        CHECK_EQ(dlfs_device_destroy(copies.members[i]), 0);
    }
    dataset_destroy(&copies.dataset);
}

/* Creates a volume whose members have these faults. */
static inline void volume_create(struct volume *volume, const dlfs_fault_config *faults)
{
    volume->dataset = &copies.dataset;
    for (uint32_t i = 0; i < MEMBERS; i++) {
        CHECK_EQ(dlfs_device_create_fault(copies.members[i], &faults[i], &volume->devices[i]), 0);
    }
}

static inline void volume_destroy(struct volume *volume)
{
    for (uint32_t i = 0; i < MEMBERS; i++) {
        CHECK_EQ(dlfs_device_destroy(volume->devices[i]), 0);
    }
}

static inline dlfs_reader *copies_reader(const struct volume *volume, uint32_t absent,
                                         uint64_t memory_bytes, uint32_t timeout_ms)
{
    dlfs_extent extent = {0, volume->dataset->chunk_count};
    dlfs_device *devices[MEMBERS];
    memcpy(devices, volume->devices, sizeof(devices));
    if (absent < MEMBERS) {
        devices[absent] = NULL;
    }
    dlfs_reader_config config = {
        .devices = devices,
        .member_count = MEMBERS,
        .chunk_bytes = CHUNK,
        .block_bytes = BLOCK,
        .depth = 4,
        .data_offset_bytes = DATA_OFFSET,
        .extents = &extent,
        .extent_count = 1,
        .directory = volume->dataset->directory,
        .memory_bytes = memory_bytes,
        .gap_bytes = 8192,
        .timeout_ms = timeout_ms,
        .replicas = 2,
        .band_rows = ROWS,
    };
    dlfs_reader *reader;
    CHECK_EQ(dlfs_reader_create(&config, &reader), 0);
    config.replicas = 1; /* without a copy no member may be absent */
    if (absent < MEMBERS) {
        CHECK_EQ(dlfs_reader_create(&config, &reader), -EINVAL);
    }
    config.replicas = MEMBERS + 1;
    CHECK_EQ(dlfs_reader_create(&config, &reader), -EINVAL);
    config.replicas = 2;
    config.band_rows = volume->dataset->chunk_count / MEMBERS - 1; /* bands would overlap */
    CHECK_EQ(dlfs_reader_create(&config, &reader), -EINVAL);
    return reader;
}

static inline void read_batches(dlfs_reader *reader)
{
    for (uint64_t first = 0; first < COUNT; first += 50) {
        uint64_t indices[50];
        dlfs_batch *batch;
        for (uint64_t i = 0; i < 50; i++) {
            indices[i] = (first + i) * 7 % COUNT;
        }
        CHECK_EQ(dlfs_reader_read(reader, indices, 50, &batch), 0);
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < 50; i++) {
            check_sample(batch, i);
        }
        dlfs_batch_release(batch);
    }
}

static inline void read_stream(const struct volume *volume, dlfs_reader *reader, uint32_t plan)
{
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(volume->dataset->directory, CHUNK, DLFS_ORDER_GLOBAL, plan, 0, 1,
                                  &sequence),
             0);
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT, .plan = plan};
    dlfs_stream *stream;
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    uint64_t seen = 0;
    dlfs_batch *batch;
    int code;
    while ((code = dlfs_stream_next(stream, 32, -1, &batch)) == 0) {
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < batch->count; i++) {
            check_sample(batch, i);
        }
        seen += batch->count;
        dlfs_batch_release(batch);
    }
    CHECK_EQ(code, DLFS_E_END);
    CHECK_EQ(seen, COUNT);
    dlfs_stream_destroy(stream);
    dlfs_sequence_destroy(sequence);
}

#endif
