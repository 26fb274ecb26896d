/*
 * Two copies of every chunk on three members, one of which is not there, is lost on the way, fails,
 * lies or stalls: every sample arrives right, by batches and by streams of every plan. Two such
 * members, and samples fail with the right code and member.
 */
#include <dlfs/dlfs.h>

#include <errno.h>

#include "reader_tests.h"

#define MEMBERS 3u
#define ROWS 48u
#define MILLION 1000000u

/* The dataset and its members, made once; every volume has its own faults over them. */
struct copies {
    struct dataset dataset;
    dlfs_device *members[MEMBERS];
};

struct volume {
    const struct dataset *dataset;
    dlfs_device *devices[MEMBERS]; /* faulty ones */
};

static struct copies copies;

static void copy_chunk(dlfs_queue *from, dlfs_queue *const *to, uint64_t chunk, void *memory)
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

static void copies_create(void)
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
    for (uint64_t chunk = 0; chunk < dataset->chunk_count; chunk++)
        copy_chunk(from, queues, chunk, memory);
    dlfs_queue_destroy(from);
    for (uint32_t i = 0; i < MEMBERS; i++)
        dlfs_queue_destroy(queues[i]);
    dlfs_memory_unmap(memory, CHUNK);
}

static void copies_destroy(void)
{
    for (uint32_t i = 0; i < MEMBERS; i++)
        CHECK_EQ(dlfs_device_destroy(copies.members[i]), 0);
    dataset_destroy(&copies.dataset);
}

/* The dataset with two copies; each member has its faults. */
static void volume_create(struct volume *volume, const dlfs_fault_config *faults)
{
    volume->dataset = &copies.dataset;
    for (uint32_t i = 0; i < MEMBERS; i++)
        CHECK_EQ(dlfs_device_create_fault(copies.members[i], &faults[i], &volume->devices[i]), 0);
}

static void volume_destroy(struct volume *volume)
{
    for (uint32_t i = 0; i < MEMBERS; i++)
        CHECK_EQ(dlfs_device_destroy(volume->devices[i]), 0);
}

static dlfs_reader *reader_of(const struct volume *volume, uint32_t absent, uint64_t memory_bytes,
                              uint32_t timeout_ms)
{
    dlfs_extent extent = {0, volume->dataset->chunk_count};
    dlfs_device *devices[MEMBERS];
    memcpy(devices, volume->devices, sizeof(devices));
    if (absent < MEMBERS)
        devices[absent] = NULL;
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
    config.replicas = 1; /* then no member may be absent */
    if (absent < MEMBERS)
        CHECK_EQ(dlfs_reader_create(&config, &reader), -EINVAL);
    config.replicas = MEMBERS + 1;
    CHECK_EQ(dlfs_reader_create(&config, &reader), -EINVAL);
    config.replicas = 2;
    config.band_rows = volume->dataset->chunk_count / MEMBERS - 1; /* bands would overlap */
    CHECK_EQ(dlfs_reader_create(&config, &reader), -EINVAL);
    return reader;
}

static void read_batches(dlfs_reader *reader)
{
    for (uint64_t first = 0; first < COUNT; first += 50) {
        uint64_t indices[50];
        dlfs_batch *batch;
        for (uint64_t i = 0; i < 50; i++)
            indices[i] = (first + i) * 7 % COUNT;
        CHECK_EQ(dlfs_reader_read(reader, indices, 50, &batch), 0);
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < 50; i++)
            check_sample(batch, i);
        dlfs_batch_release(batch);
    }
}

static void read_stream(const struct volume *volume, dlfs_reader *reader, uint32_t plan)
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
        for (uint64_t i = 0; i < batch->count; i++)
            check_sample(batch, i);
        seen += batch->count;
        dlfs_batch_release(batch);
    }
    CHECK_EQ(code, DLFS_E_END);
    CHECK_EQ(seen, COUNT);
    dlfs_stream_destroy(stream);
    dlfs_sequence_destroy(sequence);
}

/* Everything is read in every way although `bad` fails as it does; absent: it has no device. */
static void survives(uint32_t bad, const dlfs_fault_config *fault, bool absent, uint32_t timeout_ms)
{
    for (uint32_t plan = DLFS_PLAN_DIRECT; plan <= DLFS_PLAN_HARVEST + 1; plan++) {
        dlfs_fault_config faults[MEMBERS] = {{.seed = 1}, {.seed = 2}, {.seed = 3}};
        struct volume volume;
        faults[bad] = *fault;
        volume_create(&volume, faults);
        dlfs_reader *reader =
            reader_of(&volume, absent ? bad : MEMBERS,
                      plan == DLFS_PLAN_CHUNKS ? 8 << 20 : 20 * CHUNK, timeout_ms);
        if (plan <= DLFS_PLAN_HARVEST)
            read_stream(&volume, reader, plan);
        else
            read_batches(reader);
        dlfs_reader_stats stats;
        dlfs_reader_get_stats(reader, &stats);
        CHECK(stats.failovers > 0);
        if (fault->lost_from > 0 && !absent) {
            CHECK_EQ(dlfs_reader_lost_members(reader), UINT64_C(1) << bad);
            CHECK_EQ(dlfs_reader_member_code(reader, bad), DLFS_E_LOST);
        }
        if (fault->stall_per_million > 0)
            CHECK_EQ(dlfs_reader_member_code(reader, bad), DLFS_E_TIMEOUT);
        CHECK_EQ(dlfs_reader_member_code(reader, (bad + 1) % MEMBERS), 0);
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
        volume_destroy(&volume);
    }
}

/* With two members lost, what they share fails, and names one of them; the rest is read. */
static void two_are_too_many(void)
{
    dlfs_fault_config faults[MEMBERS] = {{.seed = 1}, {.lost_from = 1}, {.lost_from = 1}};
    struct volume volume;
    volume_create(&volume, faults);
    dlfs_reader *reader = reader_of(&volume, MEMBERS, 20 * CHUNK, 20000);
    uint64_t indices[COUNT];
    dlfs_batch *batch;
    for (uint64_t i = 0; i < COUNT; i++)
        indices[i] = i;
    CHECK_EQ(dlfs_reader_read(reader, indices, COUNT, &batch), 0);
    CHECK(batch->failure_count > COUNT / 10 && batch->failure_count < COUNT);
    for (uint64_t i = 0; i < batch->failure_count; i++) {
        CHECK_EQ(batch->failures[i].code, DLFS_E_LOST);
        CHECK_EQ(batch->failures[i].member, 1); /* its first copy; the second one is on member 2 */
    }
    for (uint64_t i = 0; i < COUNT; i++)
        if (batch->lengths[i] >= 0)
            check_sample(batch, i);
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_lost_members(reader), 6);
    CHECK_EQ(dlfs_reader_member_code(reader, MEMBERS), -EINVAL);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    volume_destroy(&volume);
}

/* A lost member that is back is found out about, and used again. */
static void comes_back(uint32_t lost_polls)
{
    dlfs_fault_config faults[MEMBERS] = {
        {.lost_from = 5, .lost_polls = lost_polls}, {.seed = 2}, {.seed = 3}};
    struct volume volume;
    volume_create(&volume, faults);
    dlfs_reader *reader = reader_of(&volume, MEMBERS, 20 * CHUNK, 20000);
    read_batches(reader);
    CHECK_EQ(dlfs_reader_lost_members(reader), 1);
    CHECK_EQ(dlfs_device_fault_lose(volume.devices[0], 0), 0);
    while (dlfs_reader_lost_members(reader) != 0)
        read_batches(reader);
    dlfs_reader_stats before;
    dlfs_reader_stats after;
    dlfs_reader_get_stats(reader, &before);
    read_batches(reader);
    dlfs_reader_get_stats(reader, &after);
    CHECK(after.reads > before.reads);
    CHECK_EQ(after.failovers, before.failovers);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    volume_destroy(&volume);
}

int main(void)
{
    copies_create();
    for (uint32_t bad = 0; bad < MEMBERS; bad++) {
        survives(bad, &(dlfs_fault_config){0}, true, 20000);
        survives(bad, &(dlfs_fault_config){.lost_from = 1}, false, 20000);
        survives(bad, &(dlfs_fault_config){.lost_from = 20}, false, 20000);
        survives(bad, &(dlfs_fault_config){.lost_from = 20, .lost_polls = 1}, false, 20000);
        survives(bad, &(dlfs_fault_config){.error_per_million = MILLION}, false, 20000);
        survives(bad, &(dlfs_fault_config){.short_per_million = MILLION / 2}, false, 20000);
        survives(bad, &(dlfs_fault_config){.flip_per_million = MILLION}, false, 20000);
    }
    survives(1, &(dlfs_fault_config){.stall_per_million = MILLION, .stall_ms = 1800}, false, 2000);
    two_are_too_many();
    comes_back(0);
    comes_back(1);
    copies_destroy();
    return 0;
}
