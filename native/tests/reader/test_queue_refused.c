/*
 * A queue pair that cannot be created. If this process lacks memory or descriptors, the read ends
 * with that error, and a later one succeeds. Any other error is one of the member.
 */
#include <dlfs/dlfs.h>

#include "reader/gate.h"
#include "reader/reader_tests.h"

static dlfs_reader *gate_reader(struct dataset *dataset, struct gate *gate)
{
    dataset_create(dataset, NULL);
    gate_put(gate, dataset->inner);
    dataset->device = gate->device;
    return reader_over(dataset, 8u << 20, 0);
}

static void check_read(dlfs_reader *reader)
{
    uint64_t indices[] = {1, 7, 301};
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read(reader, indices, 3, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < 3; i++) {
        check_sample(batch, i);
    }
    dlfs_batch_release(batch);
}

static void errors_of_this_process(void)
{
    static const int codes[] = {-ENOMEM, -EMFILE, -ENFILE};
    struct dataset dataset;
    struct gate gate = {.closed = false};
    dlfs_reader *reader = gate_reader(&dataset, &gate);
    for (uint32_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        uint64_t indices[] = {1, 7, 301};
        uint8_t buffer[LENGTH_MAX];
        dlfs_batch *batch = NULL;
        atomic_store(&gate.refusal, codes[i]);
        CHECK_EQ(dlfs_reader_read(reader, indices, 3, &batch), codes[i]);
        CHECK(batch == NULL);
        CHECK_EQ(dlfs_reader_get(reader, 1, buffer, sizeof buffer, 0), codes[i]);
        CHECK_EQ(dlfs_reader_lost_members(reader), 0);
        CHECK_EQ(dlfs_reader_member_code(reader, 0), 0);
    }
    atomic_store(&gate.refusal, 0);
    check_read(reader);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

static void errors_of_the_member(void)
{
    struct dataset dataset;
    struct gate gate = {.refusal = DLFS_E_LOST};
    dlfs_reader *reader = gate_reader(&dataset, &gate);
    uint64_t indices[] = {1, 7, 301};
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read(reader, indices, 3, &batch), 0);
    CHECK_EQ(batch->failure_count, 3);
    for (uint64_t i = 0; i < 3; i++) {
        CHECK_EQ(batch->failures[i].code, DLFS_E_LOST);
        CHECK_EQ(batch->failures[i].member, 0);
    }
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_lost_members(reader), 1);
    CHECK_EQ(dlfs_reader_member_code(reader, 0), DLFS_E_LOST);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

int main(void)
{
    errors_of_this_process();
    errors_of_the_member();
    return 0;
}
