/* Fields named reserved: values other than 0 are refused, because a later version may use them. */
#include "reader/reader_tests.h"

#include <errno.h>

static void test_devices(dlfs_device *inner)
{
    dlfs_device *device;
    dlfs_fault_config faults = {.reserved = 1};
    CHECK_EQ(dlfs_device_create_fault(inner, &faults, &device), -EINVAL);
    dlfs_nvme_config nvme = {.hosts = {"127.0.0.1"},
                             .ports = {1},
                             .path_count = 1,
                             .nsid = 1,
                             .subsystem_nqn = "nqn.2024-01.org.example:disk0",
                             .host_nqn = "nqn.2024-01.org.example:host",
                             .timeout_ms = 100,
                             .connect_ms = 100,
                             .dhchap_key = ""};
    CHECK_EQ(dlfs_device_open_nvme(&nvme, NULL, 0, &device), -EINVAL);
    nvme.dhchap_key = NULL;
    nvme.dhchap_ctrl_key = "controller"; /* without a key of this host */
    CHECK_EQ(dlfs_device_open_nvme(&nvme, NULL, 0, &device), -EINVAL);
}

static void test_orders(const struct dataset *dataset, dlfs_reader *reader)
{
    const uint64_t indices[2] = {1, 2};
    dlfs_choice choice = {.kind = DLFS_ORDER_LIST, .indices = indices, .count = 2, .reserved = 1};
    dlfs_sequence *sequence;
    dlfs_stream *stream;
    CHECK_EQ(dlfs_sequence_choose(dataset->directory, &choice, &sequence), -EINVAL);
    choice.reserved = 0;
    CHECK_EQ(dlfs_sequence_choose(dataset->directory, &choice, &sequence), 0);
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = 2, .reserved = 1};
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), -EINVAL);
    config.reserved = 0;
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    dlfs_stream_destroy(stream);
    dlfs_sequence_destroy(sequence);
}

int main(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 32u * CHUNK, 0);
    test_devices(dataset.inner);
    test_orders(&dataset, reader);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
    return 0;
}
