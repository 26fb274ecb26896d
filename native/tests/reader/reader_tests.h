/* A small dataset on a device in memory, and readers of it, for the tests of readers and streams.
 */
#ifndef DLFS_TESTS_READER_H
#define DLFS_TESTS_READER_H

#include "fault/fault.h"
#include <dlfs/import.h>

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "reader/internal.h"

#define COUNT 500u
#define CHUNK 16384u
#define BLOCK 4096u
#define DATA_OFFSET 65536u
#define DEVICE_BYTES (16u << 20)
#ifndef LARGE_EVERY
#define LARGE_EVERY 97u /* one in so many samples is larger than a chunk */
#endif
#define LENGTH_MAX (CHUNK + 777u * 50)

struct dataset {
    dlfs_device *inner;
    dlfs_device *device; /* inner, or a faulty one over it */
    dlfs_directory *directory;
    dlfs_directory_builder *builder; /* has the memory of entries and names */
    void *entries;
    void *names;
    uint64_t names_bytes;
    uint64_t chunk_count;
};

static uint64_t sample_length(uint64_t index)
{
    return index % LARGE_EVERY == 5 ? CHUNK + 777 * (index % 50) : index * 7919 % 5000;
}

/* Writes the bytes of a sample to memory of one thread, so TSan may ignore it. */
__attribute__((no_sanitize("thread"))) static void sample_fill(uint64_t index, uint8_t *bytes)
{
    uint64_t length = sample_length(index);
    for (uint64_t at = 0; at < length; at++) {
        bytes[at] = (uint8_t)(index * 31 + at * 7 + (at >> 8));
    }
}

/* Compares with memcmp(), which a sanitizer checks once, not once a byte. */
static inline void check_bytes(const uint8_t *bytes, uint64_t index)
{
    uint8_t expected[LENGTH_MAX];
    sample_fill(index, expected);
    CHECK(sample_length(index) == 0 || memcmp(bytes, expected, sample_length(index)) == 0);
}

static inline void check_sample(const dlfs_batch *batch, uint64_t position)
{
    uint64_t index = batch->indices[position];
    CHECK_EQ(batch->lengths[position], sample_length(index));
    check_bytes(batch->base + batch->offsets[position], index);
}

static void dataset_pack(dlfs_location *locations, uint32_t *parts, uint8_t *data,
                         uint64_t data_bytes, uint64_t *used)
{
    int64_t *offsets = calloc(COUNT, sizeof(int64_t));
    int64_t *lengths = calloc(COUNT, sizeof(int64_t));
    uint64_t *order = calloc(COUNT, sizeof(uint64_t));
    uint8_t *source = malloc(data_bytes);
    dlfs_permutation permutation;
    CHECK_EQ(dlfs_permutation_init(&permutation, COUNT, 1, 2), 0);
    CHECK_EQ(dlfs_permutation_map(&permutation, 0, 1, COUNT, order), 0);
    int64_t at = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        offsets[i] = at;
        lengths[i] = (int64_t)sample_length(i);
        sample_fill(i, source + at);
        at += lengths[i];
    }
    dlfs_packing packing = {.chunk_bytes = CHUNK, .block_bytes = BLOCK};
    CHECK_EQ(dlfs_pack(&packing, source, data_bytes, offsets, lengths, order, COUNT, data, 0,
                       data_bytes, locations, parts),
             COUNT);
    *used = packing.address;
    free(offsets);
    free(lengths);
    free(order);
    free(source);
}

static void dataset_directory(struct dataset *dataset, const dlfs_location *locations,
                              const uint32_t *parts)
{
    uint8_t names[COUNT * 8];
    uint64_t offsets[COUNT + 1] = {0};
    for (uint64_t i = 0; i < COUNT; i++) {
        int length = snprintf((char *)names + offsets[i], 8, "%06" PRIu64, i);
        offsets[i + 1] = offsets[i] + (uint64_t)length;
    }
    const dlfs_directory_config config = {
        .data_bytes = dataset->chunk_count * CHUNK, .chunk_bytes = CHUNK, .dataset_uuid = {1}};
    dlfs_directory_segment segment;
    dlfs_path_refusal refusal;
    CHECK_EQ(dlfs_directory_builder_create(&config, &dataset->builder), 0);
    CHECK_EQ(dlfs_directory_builder_add(dataset->builder, names, offsets, locations, NULL, COUNT,
                                        &refusal),
             0);
    CHECK_EQ(dlfs_directory_builder_finish(dataset->builder, parts, dataset->chunk_count, &refusal,
                                           &segment),
             0);
    dataset->entries = segment.entries;
    dataset->names = segment.names;
    dataset->names_bytes = segment.names_bytes;
    CHECK_EQ(dlfs_directory_open(dataset->entries, segment.entries_bytes, &dataset->directory), 0);
}

static void dataset_create(struct dataset *dataset, const dlfs_fault_config *faults)
{
    uint64_t data_bytes = DEVICE_BYTES - DATA_OFFSET;
    void *data;
    uint64_t used;
    dlfs_location *locations = calloc(COUNT, sizeof(*locations));
    CHECK_EQ(dlfs_memory_map(data_bytes, &data, NULL), 0);
    uint32_t *parts = calloc(data_bytes / CHUNK, sizeof(*parts));
    dataset_pack(locations, parts, data, data_bytes, &used);
    dataset->chunk_count = (used + CHUNK - 1) / CHUNK;
    CHECK_EQ(dlfs_device_create_memory(DEVICE_BYTES, 512, &dataset->inner), 0);
    dlfs_queue *queue;
    CHECK_EQ(dlfs_queue_create(dataset->inner, 4, &queue), 0);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_WRITE, data, DATA_OFFSET,
                                 dataset->chunk_count * CHUNK, 1 << 20),
             0);
    dlfs_queue_destroy(queue);
    dlfs_memory_unmap(data, data_bytes);
    dataset_directory(dataset, locations, parts);
    free(locations);
    free(parts);
    dataset->device = dataset->inner;
    if (faults != NULL) {
        CHECK_EQ(dlfs_device_create_fault(dataset->inner, faults, &dataset->device), 0);
    }
}

static void dataset_destroy(struct dataset *dataset)
{
    dlfs_directory_close(dataset->directory);
    dlfs_directory_builder_destroy(dataset->builder);
    if (dataset->device != dataset->inner) {
        CHECK_EQ(dlfs_device_destroy(dataset->device), 0);
    }
    CHECK_EQ(dlfs_device_destroy(dataset->inner), 0);
}

/* Creates a reader of the dataset with the depth, memory, gap, retries, timeout and flags of
 * `config`. */
static inline dlfs_reader *reader_as(const struct dataset *dataset, dlfs_reader_config config)
{
    dlfs_extent extent = {0, dataset->chunk_count};
    config.devices = &dataset->device;
    config.member_count = 1;
    config.chunk_bytes = CHUNK;
    config.block_bytes = BLOCK;
    config.data_offset_bytes = DATA_OFFSET;
    config.extents = &extent;
    config.extent_count = 1;
    config.directory = dataset->directory;
    config.replicas = 1;
    dlfs_reader *reader;
    CHECK_EQ(dlfs_reader_create(&config, &reader), 0);
    return reader;
}

static inline dlfs_reader *reader_over(const struct dataset *dataset, uint64_t memory_bytes,
                                       uint32_t retries)
{
    return reader_as(dataset, (dlfs_reader_config){
                                  .depth = 8,
                                  .memory_bytes = memory_bytes,
                                  .gap_bytes = 8192,
                                  .retry_count = retries,
                                  .timeout_ms = 20000,
                              });
}

/* Creates an arena that other processes can map. */
static inline dlfs_arena *shared_arena(uint64_t memory_bytes)
{
    const dlfs_arena_config config = {
        .memory_bytes = memory_bytes, .chunk_bytes = CHUNK, .flags = DLFS_ARENA_SHARED};
    dlfs_arena *arena;
    CHECK_EQ(dlfs_arena_create(&config, &arena), 0);
    return arena;
}

/* Creates a reader in an arena. */
static inline dlfs_reader *reader_in(const struct dataset *dataset, dlfs_arena *arena,
                                     uint32_t retries)
{
    return reader_as(dataset, (dlfs_reader_config){
                                  .depth = 8,
                                  .arena = arena,
                                  .gap_bytes = 8192,
                                  .retry_count = retries,
                                  .timeout_ms = 20000,
                              });
}

/* Creates a reader with an arena of its own, which other processes can map on request. */
static inline dlfs_reader *reader_with(const struct dataset *dataset, uint64_t memory_bytes,
                                       uint32_t retries, bool shared)
{
    if (!shared) {
        return reader_over(dataset, memory_bytes, retries);
    }
    dlfs_arena *arena = shared_arena(memory_bytes);
    dlfs_reader *reader = reader_in(dataset, arena, retries);
    dlfs_arena_destroy(arena);
    return reader;
}

/* Checks that the cache can be emptied once all batches were released. */
static inline void empty_cache(dlfs_reader *reader)
{
    pthread_mutex_lock(&reader->arena->lock);
    while (reader->cache.idle.count > 0) {
        arena_evict(reader, reader->cache.idle.first);
    }
    CHECK_EQ(reader->cache.slots, 0);
    CHECK_EQ(reader->cache.count, 0);
    pthread_mutex_unlock(&reader->arena->lock);
}

/* Checks that batches can pin the whole memory of a reader again. */
static inline void check_memory(const struct dataset *dataset, dlfs_reader *reader,
                                uint64_t memory_bytes)
{
    dlfs_reader_stats before;
    dlfs_reader_stats after;
    dlfs_batch *batches[COUNT];
    uint64_t slots = memory_bytes / CHUNK;
    uint64_t enough = dataset->chunk_count + dataset->chunk_count / 4;
    uint64_t count = 0;
    empty_cache(reader);
    dlfs_reader_get_stats(reader, &before);
    for (uint64_t index = 0; index < COUNT && count < slots && count < enough; index++) {
        if (sample_length(index) > 0 && sample_length(index) <= CHUNK) {
            CHECK_EQ(dlfs_reader_read(reader, &index, 1, &batches[count++]), 0);
        }
    }
    dlfs_reader_get_stats(reader, &after);
    CHECK_EQ(after.private_batches, before.private_batches);
    while (count > 0) {
        dlfs_batch_release(batches[--count]);
    }
}

#endif
