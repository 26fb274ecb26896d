/*
 * Devices that hang instead of failing. A read ends within one timeout, however many requests it
 * has, and later reads fail at once. Where there is another copy, it is read long before. A stream
 * or channel that is closed does not wait. A device that answers again is used again.
 */
#include <dlfs/dlfs.h>
#include <dlfs/part.h>

#include <errno.h>

#include "asleep.h"
#include "channel/channel_tests.h"
#include "platform/clock.h"
#include "platform/thread.h"
#include "reader/copies_tests.h"
#include "reader/gate.h"

#define SAMPLES 24u
#define TIMEOUT_MS 1000u
#define LONG_MS 64000u /* longer than any test takes */
#define SEVERAL                                                                       \
    4u /* timeouts: fewer than SAMPLES, and more than a busy machine stretches one to \
        */

/* ---- one copy -------------------------------------------------------------------------------- */

static void gate_dataset(struct dataset *dataset, struct gate *gate)
{
    dataset_create(dataset, NULL);
    gate_put(gate, dataset->inner);
    dataset->device = gate->device;
}

/* Creates a reader with one operation in flight at a time, which merges no samples. */
static dlfs_reader *narrow_reader(const struct dataset *dataset, uint32_t timeout_ms)
{
    dlfs_arena *arena = shared_arena(8u << 20);
    dlfs_reader *reader = reader_as(
        dataset, (dlfs_reader_config){
                     .depth = 1, .arena = arena, .retry_count = 2, .timeout_ms = timeout_ms});
    dlfs_arena_destroy(arena);
    return reader;
}

/* Reads samples from the whole dataset, all of which fail. Returns the time in nanoseconds. */
static uint64_t read_in_vain(dlfs_reader *reader, uint64_t first, uint64_t count)
{
    uint64_t indices[SAMPLES];
    dlfs_batch *batch;
    for (uint64_t i = 0; i < count; i++) {
        indices[i] = (first + i) * 19 % COUNT | 1; /* odd samples are not empty */
    }
    uint64_t before = monotonic_ns();
    CHECK_EQ(dlfs_reader_read(reader, indices, count, &batch), 0);
    uint64_t taken_ns = monotonic_ns() - before;
    CHECK_EQ(batch->failure_count, count);
    for (uint64_t i = 0; i < count; i++) {
        CHECK_EQ(batch->failures[i].code, DLFS_E_TIMEOUT);
    }
    dlfs_batch_release(batch);
    return taken_ns;
}

static void read_well(const struct dataset *dataset, dlfs_reader *reader)
{
    (void)dataset;
    uint64_t indices[COUNT];
    dlfs_batch *batch;
    for (uint64_t index = 0; index < COUNT; index++) {
        indices[index] = index;
    }
    CHECK_EQ(dlfs_reader_read(reader, indices, COUNT, &batch), 0);
    for (uint64_t i = 0; i < COUNT; i++) {
        if (batch->lengths[i] >= 0) {
            check_sample(batch, i);
        }
    }
    dlfs_batch_release(batch);
}

static void a_read_takes_its_time_once(void)
{
    struct dataset dataset;
    struct gate gate = {.closed = true};
    gate_dataset(&dataset, &gate);
    dlfs_reader *alone = narrow_reader(&dataset, TIMEOUT_MS);
    uint64_t one_ns = read_in_vain(alone, 0, 1);
    CHECK(one_ns >= TIMEOUT_MS * UINT64_C(1000000));
    dlfs_reader *reader = narrow_reader(&dataset, TIMEOUT_MS);
    CHECK(read_in_vain(reader, 0, SAMPLES) < SEVERAL * one_ns);

    /* Reads fail at once now, but for a probe now and then. */
    uint32_t before = atomic_load(&gate.operation_count);
    for (uint64_t i = 1; i < 100; i++) {
        (void)read_in_vain(reader, i, SAMPLES);
    }
    CHECK(atomic_load(&gate.operation_count) < before + 10);
    CHECK_EQ(dlfs_reader_lost_members(reader), 1);

    atomic_store(&gate.closed, false);
    while (dlfs_reader_lost_members(reader) != 0) {
        read_well(&dataset, reader);
    }
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read(reader, (const uint64_t[]){1}, 1, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_destroy(alone), 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that every batch of an epoch ends in time, with memory for few samples. */
static void a_batch_takes_its_time_once(uint32_t plan)
{
    struct dataset dataset;
    struct gate gate = {.closed = false};
    dlfs_sequence *sequence;
    dlfs_stream *stream;
    gate_dataset(&dataset, &gate);
    dlfs_reader *reader = reader_as(
        &dataset,
        (dlfs_reader_config){.depth = 4, .memory_bytes = 12 * CHUNK, .timeout_ms = TIMEOUT_MS});
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 3, 0, 1, &sequence),
             0);
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT, .plan = plan};
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    uint64_t longest_ns = 0;
    uint64_t failed = 0;
    uint64_t seen = 0;
    while (seen < COUNT) {
        dlfs_batch *batch;
        uint64_t before = monotonic_ns();
        int code; /* in steps, as a caller that handles signals meanwhile */
        while ((code = dlfs_stream_next(stream, 64, 50, &batch)) == -EAGAIN) {
        }
        CHECK_EQ(code, 0);
        uint64_t taken_ns = monotonic_ns() - before;
        longest_ns = taken_ns > longest_ns ? taken_ns : longest_ns;
        seen += batch->count;
        failed += batch->failure_count;
        for (uint64_t i = 0; i < batch->count; i++) {
            if (batch->lengths[i] >= 0) {
                check_sample(batch, i);
            }
        }
        dlfs_batch_release(batch);
        atomic_store(&gate.closed, true);
    }
    CHECK(failed > COUNT / 4);
    CHECK(longest_ns < SEVERAL * TIMEOUT_MS * UINT64_C(1000000));
    atomic_store(&gate.closed, false);
    dlfs_stream_destroy(stream);
    dlfs_sequence_destroy(sequence);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* ---- two copies ------------------------------------------------------------------------------ */

static void *open_later(void *argument)
{
    struct gate *gates = argument;
    while (atomic_load(&gates[0].operation_count) == 0 ||
           atomic_load(&gates[1].operation_count) == 0 ||
           atomic_load(&gates[2].operation_count) == 0) {
        sched_yield();
    }
    nanosleep(&(struct timespec){.tv_sec = 2}, NULL);
    for (uint32_t i = 0; i < MEMBERS; i++) {
        atomic_store(&gates[i].closed, false);
    }
    return NULL;
}

/* Reads everything while some members are silent, within a share of a read's timeout. */
static void another_copy_is_read(uint32_t silent)
{
    const dlfs_fault_config none[MEMBERS] = {0};
    for (uint32_t plan = DLFS_PLAN_DIRECT; plan <= DLFS_PLAN_CHUNK_COPY + 1; plan++) {
        struct volume volume;
        struct gate gate = {.closed = true};
        volume_create(&volume, none);
        dlfs_device *sound = volume.devices[silent];
        gate_put(&gate, sound);
        volume.devices[silent] = gate.device;
        dlfs_reader *reader = copies_reader(&volume, MEMBERS, 20 * CHUNK, LONG_MS / 4);
        uint64_t before = monotonic_ns();
        if (plan <= DLFS_PLAN_CHUNK_COPY) {
            read_stream(&volume, reader, plan);
        } else {
            read_batches(reader);
        }
        CHECK(monotonic_ns() - before < LONG_MS / 8 * UINT64_C(1000000));
        CHECK_EQ(dlfs_reader_lost_members(reader), UINT64_C(1) << silent);
        CHECK_EQ(dlfs_reader_member_code(reader, silent), DLFS_E_TIMEOUT);
        atomic_store(&gate.closed, false);
        while (dlfs_reader_lost_members(reader) != 0) {
            read_batches(reader);
        }
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
        CHECK_EQ(dlfs_device_destroy(gate.device), 0);
        volume.devices[silent] = sound;
        volume_destroy(&volume);
    }
}

/* Checks that a read waits for its whole timeout if all copies are on silent members. */
static void all_silent_for_a_while(void)
{
    const dlfs_fault_config none[MEMBERS] = {0};
    struct volume volume;
    struct gate gates[MEMBERS] = {{.closed = true}, {.closed = true}, {.closed = true}};
    dlfs_device *sound[MEMBERS];
    pthread_t thread;
    volume_create(&volume, none);
    for (uint32_t i = 0; i < MEMBERS; i++) {
        sound[i] = volume.devices[i];
        gate_put(&gates[i], sound[i]);
        volume.devices[i] = gates[i].device;
    }
    dlfs_reader *reader = copies_reader(&volume, MEMBERS, 20 * CHUNK, LONG_MS / 4);
    CHECK_EQ(thread_start(&thread, NULL, open_later, gates), 0);
    read_batches(reader);
    pthread_join(thread, NULL);
    read_stream(&volume, reader, DLFS_PLAN_DIRECT);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    for (uint32_t i = 0; i < MEMBERS; i++) {
        CHECK_EQ(dlfs_device_destroy(gates[i].device), 0);
        volume.devices[i] = sound[i];
    }
    volume_destroy(&volume);
}

/* Checks that reads do not switch between copies again and again if all members are slow. */
static void slow_members_are_waited_for(void)
{
    dlfs_fault_config slow = {.stall_per_million = MILLION, .stall_ms = LONG_MS / 20};
    const dlfs_fault_config faults[MEMBERS] = {slow, slow, slow};
    struct volume volume;
    dlfs_batch *batch;
    volume_create(&volume, faults);
    dlfs_reader *reader = copies_reader(&volume, MEMBERS, 20 * CHUNK, LONG_MS / 4);
    CHECK_EQ(dlfs_reader_read(reader, (const uint64_t[]){1, 100, 200, 300}, 4, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < 4; i++) {
        check_sample(batch, i);
    }
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    volume_destroy(&volume);
}

/* ---- ending ---------------------------------------------------------------------------------- */

static void *ask_channel(void *argument)
{
    struct connection *connection = argument;
    dlfs_batch *batch;
    if (dlfs_client_read(connection->client, (const uint64_t[]){1, 2, 3}, 3, &batch) == 0) {
        dlfs_batch_release(batch);
    }
    return NULL;
}

/* Checks that a stream ends at once, however long its reads under way may take. */
static void a_stream_ends_quickly(void)
{
    struct dataset dataset;
    struct gate gate = {.closed = true};
    dlfs_sequence *sequence;
    dlfs_stream *stream;
    gate_dataset(&dataset, &gate);
    dlfs_reader *reader = narrow_reader(&dataset, LONG_MS);
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 3, 0, 1, &sequence),
             0);
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT};
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    while (atomic_load(&gate.operation_count) == 0) {
        sched_yield();
    }
    uint64_t before = monotonic_ns();
    dlfs_stream_destroy(stream);
    CHECK(monotonic_ns() - before < LONG_MS / 8 * UINT64_C(1000000));
    dlfs_sequence_destroy(sequence);
    atomic_store(&gate.closed, false);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that a channel ends at once likewise. */
static void a_channel_ends_quickly(void)
{
    struct service service;
    struct gate gate = {.closed = true};
    pthread_t thread;
    int descriptor;
    uint64_t bytes;
    gate_dataset(&service.dataset, &gate);
    service.reader = narrow_reader(&service.dataset, LONG_MS);
    CHECK_EQ(dlfs_share_create_within(NULL, 1 << 20, &service.share), 0);
    CHECK_EQ(dlfs_reader_arena(service.reader, &descriptor, &bytes), 0);
    CHECK_EQ(dlfs_arena_view_map(descriptor, bytes, &service.arena), 0);
    struct connection connection = connect_to(&service);
    CHECK_EQ(thread_start(&thread, NULL, ask_channel, &connection), 0);
    while (atomic_load(&gate.operation_count) == 0) {
        sched_yield();
    }
    uint64_t before = monotonic_ns();
    dlfs_channel_destroy(connection.channel);
    CHECK(monotonic_ns() - before < LONG_MS / 8 * UINT64_C(1000000));
    pthread_join(thread, NULL);
    dlfs_client_destroy(connection.client);
    atomic_store(&gate.closed, false);
    service_stop(&service);
}

/* Checks that a reader ends although a device, which cannot drop its reads, hangs: the device and
 * the memory of the reads are freed when it has answered. */
static void a_reader_ends_quickly(void)
{
    struct dataset dataset;
    struct gate gate = {.closed = true};
    gate_dataset(&dataset, &gate);
    dlfs_reader *reader = narrow_reader(&dataset, TIMEOUT_MS);
    (void)read_in_vain(reader, 0, 1);
    uint64_t before = monotonic_ns();
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    CHECK_EQ(dlfs_device_destroy(gate.device), 0);
    CHECK(monotonic_ns() - before < LONG_MS / 4 * UINT64_C(1000000));
    CHECK_EQ(atomic_load(&gate.destroyed_devices), 0);
    atomic_store(&gate.closed, false);
    while (atomic_load(&gate.destroyed_devices) == 0) {
        sched_yield();
    }
    CHECK_EQ(atomic_load(&gate.queues), 0);
    dataset.device = dataset.inner;
    dataset_destroy(&dataset);
}

struct load {
    dlfs_reader *reader;
    bool stop;
};

static void *load_large(void *argument)
{
    struct load *load = argument;
    dlfs_failure failure;
    const dlfs_part part = {5, 0, sample_length(5)};
    CHECK_EQ(dlfs_reader_load_part(load->reader, &part, &load->stop, &failure), DLFS_E_TIMEOUT);
    return NULL;
}

/* Checks that a load that is stopped ends although its device hangs, before its timeout. */
static void a_stopped_load_ends(void)
{
    struct dataset dataset;
    struct gate gate = {.closed = true};
    pthread_t thread;
    gate_dataset(&dataset, &gate);
    struct load load = {.reader = narrow_reader(&dataset, LONG_MS)};
    uint64_t before = monotonic_ns();
    CHECK_EQ(pthread_create(&thread, NULL, load_large, &load), 0);
    while (atomic_load(&gate.operation_count) == 0) {
        sched_yield();
    }
    __atomic_store_n(&load.stop, true, __ATOMIC_RELAXED);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(monotonic_ns() - before < LONG_MS / 4 * UINT64_C(1000000));
    atomic_store(&gate.closed, false);
    CHECK_EQ(dlfs_reader_destroy(load.reader), 0);
    dataset_destroy(&dataset);
}

static void *read_large_well(void *reader)
{
    uint8_t bytes[LENGTH_MAX];
    dlfs_failure failure;
    const dlfs_part part = {5, 0, sample_length(5)};
    CHECK_EQ(dlfs_reader_read_part(reader, &part, bytes, &failure), 0);
    check_bytes(bytes, 5);
    return NULL;
}

/* Checks that calls whose part another one failed to read read it at once, and do not wait for each
 * other in turn. */
static void no_call_waits_for_a_part_twice(void)
{
    struct dataset dataset;
    struct gate gate = {.closed = true};
    pthread_t threads[SAMPLES];
    gate_dataset(&dataset, &gate);
    struct load load = {.reader = narrow_reader(&dataset, LONG_MS)};
    CHECK_EQ(pthread_create(&threads[0], NULL, load_large, &load), 0);
    while (atomic_load(&gate.operation_count) == 0) {
        sched_yield();
    }
    for (uint32_t i = 1; i < SAMPLES; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, read_large_well, load.reader), 0);
    }
    wait_until_others_sleep();
    uint32_t before = atomic_load(&gate.operation_count);
    __atomic_store_n(&load.stop, true, __ATOMIC_RELAXED);
    while (atomic_load(&gate.operation_count) < before + SAMPLES - 1) {
        sched_yield();
    }
    atomic_store(&gate.closed, false);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQ(dlfs_reader_destroy(load.reader), 0);
    dataset_destroy(&dataset);
}

int main(void)
{
    copies_create();
    no_call_waits_for_a_part_twice();
    a_stopped_load_ends();
    a_reader_ends_quickly();
    a_read_takes_its_time_once();
    for (uint32_t plan = DLFS_PLAN_DIRECT; plan <= DLFS_PLAN_CHUNK_COPY; plan++) {
        a_batch_takes_its_time_once(plan);
    }
    another_copy_is_read(1);
    all_silent_for_a_while();
    slow_members_are_waited_for();
    a_stream_ends_quickly();
    a_channel_ends_quickly();
    copies_destroy();
    return 0;
}
