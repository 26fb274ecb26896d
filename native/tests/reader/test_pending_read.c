/*
 * Reads that one call begins and another one finishes or gives up: by any thread, at any time, with
 * devices that hang meanwhile.
 */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <sched.h>
#include <time.h>

#include "platform/clock.h"
#include "platform/thread.h"
#include "reader/copies_tests.h"
#include "reader/gate.h"

#define DEPTH 4u
#define TIMEOUT_MS 200u
#define PAUSE_MS 500u /* longer than the timeout */
#define LONG_MS 64000u
#define NS_PER_MS UINT64_C(1000000)

static void sleep_ms(uint32_t ms)
{
    const struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static void gate_dataset(struct dataset *dataset, struct gate *gate)
{
    dataset_create(dataset, NULL);
    gate_put(gate, dataset->inner);
    dataset->device = gate->device;
}

/* Creates a reader that is connected to the device. */
static dlfs_reader *connected_reader(const struct dataset *dataset, uint64_t memory_bytes,
                                     uint32_t timeout_ms)
{
    dlfs_reader *reader = reader_as(dataset, (dlfs_reader_config){.depth = DEPTH,
                                                                  .memory_bytes = memory_bytes,
                                                                  .timeout_ms = timeout_ms});
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read(reader, (const uint64_t[]){1}, 1, &batch), 0);
    dlfs_batch_release(batch);
    return reader;
}

static void finish_well(dlfs_pending_read *pending, uint64_t index)
{
    dlfs_batch *batch;
    CHECK_EQ(dlfs_pending_read_finish(pending, index % 2 * 100, NULL, NULL, &batch), 0);
    CHECK_EQ(batch->count, 1);
    CHECK_EQ(batch->indices[0], index);
    CHECK_EQ(batch->failure_count, 0);
    check_sample(batch, 0);
    dlfs_batch_release(batch);
}

/* Checks every sample, with memory for a few of them and for all. */
static void every_sample(uint64_t memory_bytes)
{
    struct dataset dataset;
    dlfs_pending_read *pending;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = connected_reader(&dataset, memory_bytes, LONG_MS);
    for (uint64_t index = 0; index < COUNT; index++) {
        CHECK_EQ(dlfs_reader_begin(reader, index, &pending), 0);
        if (index % 5 == 4) {
            dlfs_pending_read_cancel(pending);
        } else {
            finish_well(pending, index);
        }
    }
    CHECK_EQ(dlfs_reader_begin(reader, COUNT, &pending), -EINVAL);
    CHECK_EQ(dlfs_reader_begin(NULL, 0, &pending), -EINVAL);
    dlfs_pending_read_cancel(NULL);
    check_memory(&dataset, reader, memory_bytes);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that nothing is begun if a device would have to be connected. */
static void a_device_that_is_not_connected(void)
{
    struct dataset dataset;
    struct gate gate = {.closed = true};
    dlfs_pending_read *pending;
    gate_dataset(&dataset, &gate);
    dlfs_reader *reader =
        reader_as(&dataset, (dlfs_reader_config){.depth = DEPTH, .memory_bytes = 8 * CHUNK});
    CHECK_EQ(dlfs_reader_begin(reader, 1, &pending), -EAGAIN);
    CHECK_EQ(atomic_load(&gate.queues), 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that neither to begin nor to give up a read waits for a silent device, whose
 * late answer harms nothing. */
static void a_silent_device(void)
{
    struct dataset dataset;
    struct gate gate = {.closed = false};
    dlfs_pending_read *pending;
    gate_dataset(&dataset, &gate);
    dlfs_reader *reader = connected_reader(&dataset, 8 * CHUNK, LONG_MS);
    atomic_store(&gate.closed, true);
    uint64_t before_ns = monotonic_ns();
    uint32_t operations = atomic_load(&gate.operation_count);
    for (uint64_t index = 301; index < 331; index += 2) { /* more than the depth */
        CHECK_EQ(dlfs_reader_begin(reader, index, &pending), 0);
        dlfs_pending_read_cancel(pending);
    }
    CHECK_EQ(atomic_load(&gate.operation_count), operations + DEPTH);
    CHECK(monotonic_ns() - before_ns < LONG_MS / 4 * NS_PER_MS);
    CHECK_EQ(dlfs_reader_lost_members(reader), 0);
    atomic_store(&gate.closed, false);
    for (uint64_t index = 0; index < COUNT; index++) {
        CHECK_EQ(dlfs_reader_begin(reader, index, &pending), 0);
        finish_well(pending, index);
    }
    check_memory(&dataset, reader, 8 * CHUNK);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

static void *read_one(void *reader)
{
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read(reader, (const uint64_t[]){201}, 1, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    check_sample(batch, 0);
    dlfs_batch_release(batch);
    return NULL;
}

/* Checks that a read gets the only queue pair soon after the read that holds it was given up. */
static void the_only_queue_pair(void)
{
    struct dataset dataset;
    struct gate gate = {.closed = false, .queues_max = 1};
    dlfs_pending_read *pending;
    dlfs_pending_read *second;
    pthread_t thread;
    gate_dataset(&dataset, &gate);
    dlfs_reader *reader = connected_reader(&dataset, 8 * CHUNK, LONG_MS);
    atomic_store(&gate.closed, true);
    CHECK_EQ(dlfs_reader_begin(reader, 301, &pending), 0);
    CHECK_EQ(dlfs_reader_begin(reader, 303, &second), -EAGAIN);
    CHECK_EQ(thread_start(&thread, NULL, read_one, reader), 0);
    while (!dlfs_queues_wanted(gate.device)) {
        sched_yield();
    }
    dlfs_pending_read_cancel(pending);
    CHECK_EQ(dlfs_reader_begin(reader, 303, &second), -EAGAIN); /* others are in line */
    uint64_t before_ns = monotonic_ns();
    atomic_store(&gate.closed, false);
    pthread_join(thread, NULL);
    CHECK(monotonic_ns() - before_ns < LONG_MS / 4 * NS_PER_MS);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

static void *finish_one(void *pending)
{
    finish_well(pending, 301);
    return NULL;
}

/* Checks that a pause between the two calls is neither time of the read nor of the device, and that
 * another thread may finish. */
static void a_pause(void)
{
    struct dataset dataset;
    struct gate gate = {.closed = false};
    dlfs_pending_read *pending;
    dlfs_member_stats before;
    dlfs_member_stats after;
    pthread_t thread;
    gate_dataset(&dataset, &gate);
    dlfs_reader *reader = connected_reader(&dataset, 8 * CHUNK, TIMEOUT_MS);
    CHECK_EQ(dlfs_reader_get_member_stats(reader, 0, &before), 0);
    atomic_store(&gate.closed, true);
    uint64_t used_ns = monotonic_ns();
    CHECK_EQ(dlfs_reader_begin(reader, 301, &pending), 0);
    used_ns = monotonic_ns() - used_ns;
    sleep_ms(PAUSE_MS);
    atomic_store(&gate.closed, false);
    uint64_t finish_ns = monotonic_ns();
    CHECK_EQ(thread_start(&thread, NULL, finish_one, pending), 0);
    pthread_join(thread, NULL);
    used_ns += monotonic_ns() - finish_ns;
    CHECK_EQ(dlfs_reader_get_member_stats(reader, 0, &after), 0);
    CHECK_EQ(after.reads, before.reads + 1);
    CHECK(after.latency_ns - before.latency_ns <= used_ns + 2 * NS_PER_MS);
    CHECK_EQ(dlfs_reader_lost_members(reader), 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that another copy is read if a member falls silent after reads were begun. */
static void another_copy(uint32_t silent)
{
    const dlfs_fault_config none[MEMBERS] = {0};
    struct volume volume;
    struct gate gate = {.closed = false};
    volume_create(&volume, none);
    dlfs_device *sound = volume.devices[silent];
    gate_put(&gate, sound);
    volume.devices[silent] = gate.device;
    dlfs_reader *reader = copies_reader(&volume, MEMBERS, 20 * CHUNK, LONG_MS / 4);
    read_batches(reader); /* connects all members */
    atomic_store(&gate.closed, true);
    for (uint64_t index = 1; index < COUNT && dlfs_reader_lost_members(reader) == 0; index += 7) {
        dlfs_pending_read *pending;
        CHECK_EQ(dlfs_reader_begin(reader, index, &pending), 0);
        finish_well(pending, index);
    }
    CHECK_EQ(dlfs_reader_lost_members(reader), UINT64_C(1) << silent);
    atomic_store(&gate.closed, false);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    CHECK_EQ(dlfs_device_destroy(gate.device), 0);
    volume.devices[silent] = sound;
    volume_destroy(&volume);
}

/* Checks that a sample that cannot be read is a failure of the batch. */
static void a_failing_device(void)
{
    const dlfs_fault_config faults = {.seed = 1, .flip_per_million = MILLION};
    struct dataset dataset;
    dlfs_pending_read *pending;
    dlfs_batch *batch;
    dataset_create(&dataset, &faults);
    dlfs_reader *reader = connected_reader(&dataset, 8 * CHUNK, LONG_MS);
    CHECK_EQ(dlfs_reader_begin(reader, 301, &pending), 0);
    CHECK_EQ(dlfs_pending_read_finish(pending, 0, NULL, NULL, &batch), 0);
    CHECK_EQ(batch->failure_count, 1);
    CHECK_EQ(batch->failures[0].code, DLFS_E_CHECKSUM);
    CHECK_EQ(batch->failures[0].index, 301);
    dlfs_batch_release(batch);
    check_memory(&dataset, reader, 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

int main(void)
{
    every_sample(8 * CHUNK);
    every_sample(16u << 20);
    a_device_that_is_not_connected();
    a_silent_device();
    the_only_queue_pair();
    a_pause();
    a_failing_device();
    copies_create();
    another_copy(1);
    copies_destroy();
    return 0;
}
