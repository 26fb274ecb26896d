/* Batches on demand, read by many threads from a device that fails, with little or much memory. */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <pthread.h>

#include "platform/clock.h"
#include "reader/fetch_queues.h"
#include "reader/reader_tests.h"

#define THREADS 3
#define BATCH 40u

static void *read_all(void *argument)
{
    dlfs_reader *reader = argument;
    dlfs_permutation permutation;
    CHECK_EQ(dlfs_permutation_init(&permutation, COUNT, (uint64_t)(uintptr_t)&permutation, 0), 0);
    uint64_t indices[BATCH];
    dlfs_batch *pinned = NULL;
    for (uint64_t first = 0; first + BATCH <= COUNT; first += BATCH) {
        dlfs_batch *batch;
        CHECK_EQ(dlfs_permutation_map(&permutation, first, 1, BATCH, indices), 0);
        CHECK_EQ(dlfs_reader_read(reader, indices, BATCH, &batch), 0);
        CHECK_EQ(batch->count, BATCH);
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < BATCH; i++) {
            CHECK_EQ(batch->indices[i], indices[i]);
            check_sample(batch, i);
        }
        if (pinned != NULL) { /* the batch before did not change */
            for (uint64_t i = 0; i < BATCH; i++) {
                check_sample(pinned, i);
            }
            dlfs_batch_release(pinned);
        }
        pinned = batch;
    }
    dlfs_batch_release(pinned);
    return NULL;
}

static void many_threads(uint64_t memory_bytes)
{
    dlfs_fault_config faults = {
        .seed = 11,
        .error_per_million = 30000,
        .short_per_million = 20000,
        .flip_per_million = 20000,
        .reorder = 1,
    };
    struct dataset dataset;
    dataset_create(&dataset, &faults);
    dlfs_reader *reader = reader_over(&dataset, memory_bytes, 30);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, read_all, reader), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    for (const struct fetch *idle = reader->idle_fetches; idle != NULL; idle = idle->next) {
        CHECK_EQ(idle->members[0].bytes_in_flight, 0);
    }
    dlfs_reader_stats stats;
    dlfs_reader_get_stats(reader, &stats);
    CHECK_EQ(stats.samples, THREADS * (COUNT / BATCH) * BATCH);
    CHECK(stats.retries > 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

static void wrong_calls(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 1 << 20, 0);
    dlfs_batch *batch = NULL;
    uint64_t index = COUNT;
    CHECK_EQ(dlfs_reader_read(reader, &index, 1, &batch), -EINVAL);
    CHECK_EQ(dlfs_reader_read(reader, NULL, 1, &batch), -EINVAL);
    CHECK(batch == NULL);
    uint8_t sample[LENGTH_MAX];
    CHECK_EQ(dlfs_reader_get(reader, COUNT, sample, sizeof(sample), 0), -EINVAL);
    CHECK_EQ(dlfs_reader_get(reader, 0, sample, sizeof(sample), 8), -EINVAL);
    CHECK_EQ(dlfs_reader_get(NULL, 0, sample, sizeof(sample), 0), -EINVAL);
    CHECK_EQ(dlfs_reader_read(reader, NULL, 0, &batch), 0);
    CHECK_EQ(batch->count, 0);
    dlfs_batch_release(batch);
    dlfs_batch_release(NULL);

    dlfs_reader_config config = {.memory_bytes = 1};
    CHECK_EQ(dlfs_reader_create(&config, &reader), -EINVAL);
    CHECK_EQ(dlfs_reader_create(NULL, &reader), -EINVAL);

    /* A batch outlives its reader. */
    uint64_t some[] = {5, 499, 5, 102};
    CHECK_EQ(dlfs_reader_read(reader, some, 4, &batch), 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    for (uint64_t i = 0; i < 4; i++) {
        check_sample(batch, i);
    }
    uint8_t gathered[4];
    uint64_t offsets[4] = {0};
    CHECK_EQ(dlfs_batch_gather(batch, gathered, sizeof(gathered), offsets), DLFS_E_LIMIT);
    dlfs_batch_release(batch);
    dataset_destroy(&dataset);
}

static void *release(void *batch)
{
    dlfs_batch_release(batch);
    return NULL;
}

/* Releases the last batch while its reader is being closed, or before, or after. */
static void closed_by_two(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    for (uint64_t index = 0; index < 200; index++) {
        dlfs_reader *reader = reader_over(&dataset, 4 * CHUNK, 0);
        dlfs_batch *batch;
        pthread_t thread;
        CHECK_EQ(dlfs_reader_read(reader, &index, 1, &batch), 0);
        CHECK_EQ(pthread_create(&thread, NULL, release, batch), 0);
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
        CHECK_EQ(pthread_join(thread, NULL), 0);
    }
    dataset_destroy(&dataset);
}

static void damage_is_reported(void)
{
    dlfs_fault_config faults = {.seed = 1, .flip_per_million = 1000000};
    struct dataset dataset;
    dataset_create(&dataset, &faults);
    dlfs_reader *reader = reader_over(&dataset, 1 << 20, 2);
    dlfs_batch *batch;
    uint64_t index = 5; /* larger than a chunk: every read of it has a flipped bit */
    uint64_t bad = 0;
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(dlfs_reader_read(reader, &index, 1, &batch), 0);
        bad += batch->failure_count;
        if (batch->failure_count > 0) {
            CHECK_EQ(batch->failures[0].code, DLFS_E_CHECKSUM);
            CHECK_EQ(batch->failures[0].index, 5);
            CHECK_EQ(batch->lengths[0], -1);
            CHECK(batch->failures[0].crc_expected != batch->failures[0].crc_got);
        } else {
            check_sample(batch, 0);
        }
        dlfs_batch_release(batch);
    }
    CHECK(bad > 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* A thread that reads once from a stalling device, at the same time as others. */
struct stalled {
    dlfs_reader *reader;
    pthread_barrier_t *start;
    uint64_t index;
};

static void *read_stalled(void *argument)
{
    const struct stalled *stalled = argument;
    dlfs_batch *batch;
    (void)pthread_barrier_wait(stalled->start);
    CHECK_EQ(dlfs_reader_read(stalled->reader, &stalled->index, 1, &batch), 0);
    CHECK_EQ(batch->failure_count, 1);
    CHECK_EQ(batch->failures[0].code, DLFS_E_TIMEOUT);
    dlfs_batch_release(batch);
    return NULL;
}

static uint32_t pinned_slots(dlfs_reader *reader)
{
    uint32_t count = 0;
    pthread_mutex_lock(&reader->arena->lock);
    for (uint32_t slot = 0; slot < reader->slots_max; slot++) {
        count += reader->arena->slots[slot].references > 0;
    }
    pthread_mutex_unlock(&reader->arena->lock);
    return count;
}

/* Checks that memory of abandoned reads is reclaimed by reads of other threads. */
static void abandoned_memory_comes_back(void)
{
    enum { EMPTY = 0 };
    dlfs_fault_config faults = {.stall_per_million = 1000000, .stall_ms = 400};
    struct dataset dataset;
    struct stalled stalled[THREADS];
    pthread_t threads[THREADS];
    pthread_barrier_t start;
    dataset_create(&dataset, &faults);
    dlfs_reader *reader = reader_as(
        &dataset, (dlfs_reader_config){.depth = 2, .memory_bytes = 64 * CHUNK, .timeout_ms = 20});
    CHECK_EQ(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (uint64_t i = 0; i < THREADS; i++) {
        stalled[i] = (struct stalled){reader, &start, 20 * i + 1};
        CHECK_EQ(pthread_create(&threads[i], NULL, read_stalled, &stalled[i]), 0);
    }
    for (uint64_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK(pinned_slots(reader) > 1);
    uint64_t until_ns = monotonic_ns() + UINT64_C(20000000000);
    while (pinned_slots(reader) > 0) {
        uint64_t index = EMPTY; /* a sample without bytes: the device gets no new request */
        dlfs_batch *batch;
        CHECK_EQ(dlfs_reader_read(reader, &index, 1, &batch), 0);
        dlfs_batch_release(batch);
        CHECK(monotonic_ns() < until_ns);
    }
    (void)pthread_barrier_destroy(&start);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Changes a byte of a sample on the device. */
static void damage(const struct dataset *dataset, uint64_t address)
{
    uint8_t *block;
    uint64_t start = DATA_OFFSET + address / BLOCK * BLOCK;
    dlfs_queue *queue;
    CHECK_EQ(posix_memalign((void **)&block, BLOCK, BLOCK), 0);
    CHECK_EQ(dlfs_queue_create(dataset->inner, 1, &queue), 0);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, block, start, BLOCK, BLOCK), 0);
    block[address % BLOCK] ^= 1;
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_WRITE, block, start, BLOCK, BLOCK), 0);
    dlfs_queue_destroy(queue);
    free(block);
}

/* Checks that a cached chunk knows its corrupt samples, so that look-ups need not verify. */
static void bad_samples_are_known(void)
{
    enum { BAD = 123, OTHER = 124 };
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 64u << 20, 0);
    struct location location;
    CHECK(reader_locate(reader, BAD, &location) && location.length > 0);
    damage(&dataset, location.address);
    uint64_t indices[COUNT];
    for (uint64_t i = 0; i < COUNT; i++) {
        indices[i] = i;
    }
    for (int round = 0; round < 2; round++) {
        dlfs_batch *batch;
        CHECK_EQ(dlfs_reader_read(reader, indices, COUNT, &batch), 0);
        CHECK_EQ(batch->failure_count, 1);
        CHECK_EQ(batch->failures[0].index, BAD);
        CHECK_EQ(batch->failures[0].code, DLFS_E_CHECKSUM);
        for (uint64_t i = 0; i < COUNT; i++) {
            if (i != BAD) {
                check_sample(batch, i);
            }
        }
        dlfs_batch_release(batch);
        const struct slot *slot = &reader->arena->slots[arena_find(reader, location.chunk)];
        CHECK(slot->bad != NULL);
        CHECK_EQ(slot->bad->count, 1);
        CHECK_EQ(slot->bad->addresses[0], location.address);
    }
    uint64_t offset;
    CHECK(!arena_holds(reader, arena_find(reader, location.chunk), &location, &offset));
    CHECK(reader_locate(reader, OTHER, &location));
    CHECK(arena_holds(reader, arena_find(reader, location.chunk), &location, &offset));
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Returns true if a sample lies in the bad block. */
static bool touches(const struct location *location, uint64_t bad)
{
    return location->length > 0 && location->address / BLOCK <= bad / BLOCK &&
           (location->address + location->length - 1) / BLOCK >= bad / BLOCK;
}

/* Checks that an unreadable sector fails the samples in its block, and no others. */
static void bad_sector(uint64_t slots)
{
    struct dataset dataset;
    struct location location;
    dataset_create(&dataset, NULL);
    dlfs_reader *sound = reader_over(&dataset, slots * CHUNK, 0);
    CHECK(reader_locate(sound, 123, &location) && location.length > 0);
    uint64_t bad = location.address;
    dlfs_fault_config faults = {.bad_first_bytes = DATA_OFFSET + bad, .bad_length_bytes = 1};
    CHECK_EQ(dlfs_device_create_fault(dataset.inner, &faults, &dataset.device), 0);
    dlfs_reader *reader = reader_over(&dataset, slots * CHUNK, 1);
    uint64_t indices[COUNT];
    for (uint64_t i = 0; i < COUNT; i++) {
        indices[i] = i;
    }
    for (int round = 0; round < 2; round++) {
        dlfs_batch *batch;
        CHECK_EQ(dlfs_reader_read(reader, indices, COUNT, &batch), 0);
        for (uint64_t i = 0; i < COUNT; i++) {
            CHECK(reader_locate(reader, i, &location));
            if (touches(&location, bad)) {
                CHECK_EQ(batch->lengths[i], -1);
            } else {
                check_sample(batch, i);
            }
        }
        CHECK(batch->failure_count > 0);
        for (uint64_t i = 0; i < batch->failure_count; i++) {
            CHECK_EQ(batch->failures[i].code, -EIO);
        }
        dlfs_batch_release(batch);
    }
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    CHECK_EQ(dlfs_reader_destroy(sound), 0);
    dataset_destroy(&dataset);
}

/* Checks that samples that are read one by one fail in time when the device is lost. */
static void lost_between(void)
{
    uint64_t indices[COUNT];
    for (uint64_t i = 0; i < COUNT; i++) {
        indices[i] = i;
    }
    for (uint64_t from = 1; from < 200; from += 7) {
        dlfs_fault_config faults = {.bad_first_bytes = DATA_OFFSET,
                                    .bad_length_bytes = DEVICE_BYTES - DATA_OFFSET,
                                    .lost_from = from};
        struct dataset dataset;
        dataset_create(&dataset, &faults);
        dlfs_reader *reader = reader_over(&dataset, 64u << 20, 0);
        dlfs_batch *batch;
        CHECK_EQ(dlfs_reader_read(reader, indices, COUNT, &batch), 0);
        for (uint64_t i = 0; i < COUNT; i++) {
            CHECK_EQ(batch->lengths[i], sample_length(i) > 0 ? -1 : 0);
        }
        dlfs_batch_release(batch);
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
        dataset_destroy(&dataset);
    }
}

/* Reads a batch of hits, misses and repetitions that takes several steps of the lock. */
static void large_batch(void)
{
    enum { LARGE = 5000 };
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    for (uint64_t slots = 8; slots <= 4096; slots *= 8) {
        dlfs_reader *reader = reader_over(&dataset, slots * CHUNK, 0);
        uint64_t indices[LARGE];
        for (uint64_t i = 0; i < LARGE; i++) {
            indices[i] = i * 13 % COUNT;
        }
        for (uint64_t count = 1023; count <= LARGE; count += count < 1026 ? 1 : LARGE - count) {
            dlfs_batch *batch;
            CHECK_EQ(dlfs_reader_read(reader, indices, count, &batch), 0);
            CHECK_EQ(batch->failure_count, 0);
            for (uint64_t i = 0; i < count; i++) {
                check_sample(batch, i);
            }
            dlfs_batch_release(batch);
            if (count == LARGE) {
                break;
            }
        }
        check_memory(&dataset, reader, slots * CHUNK);
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
    }
    dataset_destroy(&dataset);
}

static void count(void *argument)
{
    ++*(uint32_t *)argument;
}

static void busy_wait(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 1 << 20, 0);
    const uint64_t indices[] = {3, 200, 5};
    uint32_t slept = 0;
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read_polling(reader, indices, 3, 0, count, &slept, &batch), 0);
    CHECK_EQ(slept, 1);
    check_sample(batch, 1);
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_read_polling(reader, indices, 3, 100000000, count, &slept, &batch), 0);
    CHECK_EQ(slept, 1); /* it polled long enough */
    check_sample(batch, 2);
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_read_polling(reader, indices, 3, 0, NULL, NULL, &batch), 0);
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that no more of a chunk is read than holds samples, and each chunk once. */
static void padding_is_not_read(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 64u << 20, 0);
    uint64_t *ends = calloc(dataset.chunk_count, sizeof *ends);
    uint64_t indices[COUNT];
    uint64_t count = 0;
    uint64_t expected = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        struct location location;
        CHECK(reader_locate(reader, i, &location));
        uint64_t end = location.address + location.length;
        while (location.length > 0 && location.chunk < (end - 1) / CHUNK) { /* larger than one */
            ends[location.chunk++] = CHUNK;
        }
        uint64_t in_chunk = end - location.chunk * CHUNK;
        if (location.length > 0 && in_chunk > ends[location.chunk]) {
            ends[location.chunk] = in_chunk;
        }
    }
    for (uint64_t i = 0; i < COUNT; i++) {
        struct location location;
        CHECK(reader_locate(reader, i, &location));
        if (location.length > 0 && location_in_one_chunk(reader, &location)) {
            indices[count++] = i;
            expected += (ends[location.chunk] + BLOCK - 1) / BLOCK * BLOCK;
            ends[location.chunk] = 0;
        }
    }
    for (uint64_t first = 0; first < count; first += BATCH) {
        dlfs_batch *batch;
        uint64_t size = count - first < BATCH ? count - first : BATCH;
        CHECK_EQ(dlfs_reader_read(reader, indices + first, size, &batch), 0);
        for (uint64_t i = 0; i < size; i++) {
            check_sample(batch, i);
        }
        dlfs_batch_release(batch);
    }
    dlfs_reader_stats stats;
    dlfs_reader_get_stats(reader, &stats);
    CHECK_EQ(stats.read_bytes, expected);
    CHECK(expected < dataset.chunk_count * CHUNK);
    free(ends);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that a member gets no more requests than it needs to be busy. */
static void bytes_in_flight_are_bounded(void)
{
    struct dataset dataset;
    struct fetch *fetch;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 1 << 20, 0);
    CHECK_EQ(reader_take_fetch(reader, &fetch), 0);
    CHECK_EQ(fetch_prepare(fetch, 0, NULL), 0);
    CHECK(member_has_room(fetch, 0));
    fetch->members[0].bytes_in_flight = IN_FLIGHT_BYTES_MAX - 1;
    CHECK(member_has_room(fetch, 0));
    fetch->members[0].bytes_in_flight = IN_FLIGHT_BYTES_MAX;
    CHECK(!member_has_room(fetch, 0));
    fetch->members[0].bytes_in_flight = 0;
    reader_return_fetch(reader, fetch);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

int main(void)
{
    busy_wait();
    padding_is_not_read();
    bytes_in_flight_are_bounded();
    many_threads(4 * CHUNK);
    many_threads(20 * CHUNK);
    many_threads(64u << 20);
    wrong_calls();
    closed_by_two();
    damage_is_reported();
    abandoned_memory_comes_back();
    bad_samples_are_known();
    large_batch();
    bad_sector(4096);
    bad_sector(8); /* in private memory: the batch is larger */
    lost_between();
    return 0;
}
