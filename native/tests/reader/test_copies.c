/*
 * Two copies of every chunk on three members. If one member is missing, lost, fails, returns
 * corrupt data or stalls, every sample is read intact, by batches and by streams of every plan.
 * With two such members, samples fail with the right code and member.
 */
#include <dlfs/dlfs.h>

#include "reader/copies_tests.h"

/* Reads everything in every way while the member `bad` has a fault, or no device if `absent`. */
static void survives(uint32_t bad, const dlfs_fault_config *fault, bool absent, uint32_t timeout_ms)
{
    for (uint32_t plan = DLFS_PLAN_DIRECT; plan <= DLFS_PLAN_CHUNK_COPY + 1; plan++) {
        dlfs_fault_config faults[MEMBERS] = {{.seed = 1}, {.seed = 2}, {.seed = 3}};
        struct volume volume;
        faults[bad] = *fault;
        volume_create(&volume, faults);
        dlfs_reader *reader =
            copies_reader(&volume, absent ? bad : MEMBERS,
                          plan == DLFS_PLAN_CHUNKS ? 8 << 20 : 20 * CHUNK, timeout_ms);
        if (plan <= DLFS_PLAN_CHUNK_COPY) {
            read_stream(&volume, reader, plan);
        } else {
            read_batches(reader);
        }
        dlfs_reader_stats stats;
        dlfs_reader_get_stats(reader, &stats);
        CHECK(stats.failovers > 0);
        if (fault->lost_from > 0 && !absent) {
            CHECK_EQ(dlfs_reader_lost_members(reader), UINT64_C(1) << bad);
            CHECK_EQ(dlfs_reader_member_code(reader, bad), DLFS_E_LOST);
        }
        if (fault->stall_per_million > 0) {
            CHECK_EQ(dlfs_reader_member_code(reader, bad), DLFS_E_TIMEOUT);
        }
        CHECK_EQ(dlfs_reader_member_code(reader, (bad + 1) % MEMBERS), 0);
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
        volume_destroy(&volume);
    }
}

/* Checks that with two members lost only chunks with both copies on these fail. */
static void two_are_too_many(void)
{
    dlfs_fault_config faults[MEMBERS] = {{.seed = 1}, {.lost_from = 1}, {.lost_from = 1}};
    struct volume volume;
    volume_create(&volume, faults);
    dlfs_reader *reader = copies_reader(&volume, MEMBERS, 20 * CHUNK, 20000);
    uint64_t indices[COUNT];
    dlfs_batch *batch;
    for (uint64_t i = 0; i < COUNT; i++) {
        indices[i] = i;
    }
    CHECK_EQ(dlfs_reader_read(reader, indices, COUNT, &batch), 0);
    CHECK(batch->failure_count > COUNT / 10 && batch->failure_count < COUNT);
    for (uint64_t i = 0; i < batch->failure_count; i++) {
        CHECK_EQ(batch->failures[i].code, DLFS_E_LOST);
        CHECK_EQ(batch->failures[i].member, 1); /* has the first copy; member 2 has the second */
    }
    for (uint64_t i = 0; i < COUNT; i++) {
        if (batch->lengths[i] >= 0) {
            check_sample(batch, i);
        }
    }
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_lost_members(reader), 6);
    CHECK_EQ(dlfs_reader_member_code(reader, MEMBERS), -EINVAL);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    volume_destroy(&volume);
}

/* Checks that a lost member is used again when it is back. */
static void comes_back(uint32_t lost_polls)
{
    dlfs_fault_config faults[MEMBERS] = {
        {.lost_from = 5, .lost_polls = lost_polls}, {.seed = 2}, {.seed = 3}};
    struct volume volume;
    volume_create(&volume, faults);
    dlfs_reader *reader = copies_reader(&volume, MEMBERS, 20 * CHUNK, 20000);
    read_batches(reader);
    CHECK_EQ(dlfs_reader_lost_members(reader), 1);
    CHECK_EQ(dlfs_device_fault_lose(volume.devices[0], 0), 0);
    while (dlfs_reader_lost_members(reader) != 0) {
        read_batches(reader);
    }
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

/* Returns the code for a new reader with that many members and copies of each chunk. */
static int create_with(uint32_t members, uint32_t replicas)
{
    struct volume volume;
    volume_create(&volume, (dlfs_fault_config[MEMBERS]){{.seed = 1}, {.seed = 2}, {.seed = 3}});
    dlfs_device *devices[DLFS_REPLICAS_MAX + 1];
    for (uint32_t i = 0; i < members; i++) {
        devices[i] = volume.devices[0];
    }
    dlfs_extent extent = {0, volume.dataset->chunk_count};
    dlfs_reader_config config = {
        .devices = devices,
        .member_count = members,
        .chunk_bytes = CHUNK,
        .block_bytes = BLOCK,
        .depth = 4,
        .data_offset_bytes = DATA_OFFSET,
        .extents = &extent,
        .extent_count = 1,
        .directory = volume.dataset->directory,
        .memory_bytes = 8 << 20,
        .timeout_ms = 20000,
        .replicas = replicas,
        .band_rows = ROWS,
    };
    dlfs_reader *reader = NULL;
    int code = dlfs_reader_create(&config, &reader);
    if (code == 0) {
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
    }
    volume_destroy(&volume);
    return code;
}

static void numbers_of_copies(void)
{
    CHECK_EQ(create_with(DLFS_REPLICAS_MAX + 1, DLFS_REPLICAS_MAX), 0);
    CHECK_EQ(create_with(DLFS_REPLICAS_MAX, DLFS_REPLICAS_MAX), 0);
    CHECK_EQ(create_with(DLFS_REPLICAS_MAX + 1, DLFS_REPLICAS_MAX + 1), -EINVAL);
    CHECK_EQ(create_with(DLFS_REPLICAS_MAX - 1, DLFS_REPLICAS_MAX), -EINVAL);
    CHECK_EQ(create_with(1, 1), 0);
    CHECK_EQ(create_with(1, 0), -EINVAL);
}

int main(void)
{
    copies_create();
    numbers_of_copies();
    for (uint32_t bad = 0; bad < ROUNDS_OF(MEMBERS, 1u); bad++) {
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
