/* Ranges of samples: right with any memory, by many threads at once, and nothing stays pinned. */
#define LARGE_EVERY 7u
#include <pthread.h>

#include "dlfs/part.h"
#include "gate.h"
#include "reader_tests.h"

#define ROUNDS 400u
#define THREADS 4u

struct work {
    dlfs_reader *reader;
    uint32_t seed;
};

static uint32_t draw(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static dlfs_part draw_range(uint32_t *state)
{
    uint64_t index = draw(state) % COUNT;
    index = draw(state) % 2 ? index / LARGE_EVERY * LARGE_EVERY + 5 : index;
    index = index < COUNT ? index : 5;
    uint64_t length = sample_length(index);
    uint64_t offset = draw(state) % (length + 1);
    return (dlfs_part){index, offset, draw(state) % (length - offset + 1)};
}

static void read_range(dlfs_reader *reader, dlfs_part range)
{
    uint8_t expected[LENGTH_MAX];
    uint8_t got[LENGTH_MAX];
    dlfs_failure failure;
    CHECK_EQ(dlfs_reader_read_part(reader, &range, got, &failure), 0);
    CHECK_EQ(failure.code, 0);
    sample_fill(range.index, expected);
    CHECK(memcmp(got, expected + range.offset_bytes, range.length_bytes) == 0);
}

static void *read_ranges(void *argument)
{
    struct work *work = argument;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        dlfs_part range = draw_range(&work->seed);
        if (round % 5 == 0) {
            dlfs_failure failure;
            CHECK_EQ(dlfs_reader_load_part(work->reader, &range, NULL, &failure), 0);
        }
        read_range(work->reader, range);
        if (round % 7 == 0) {
            dlfs_batch *batch;
            CHECK_EQ(dlfs_reader_read(work->reader, &range.index, 1, &batch), 0);
            check_sample(batch, 0);
            dlfs_batch_release(batch);
        }
    }
    return NULL;
}

/* Checks random ranges by several threads, with this much memory. */
static void many_at_once(uint64_t slots)
{
    struct dataset dataset;
    pthread_t threads[THREADS];
    struct work work[THREADS];
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, slots * CHUNK, 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        work[i] = (struct work){reader, i + 1};
        CHECK_EQ(pthread_create(&threads[i], NULL, read_ranges, &work[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    check_memory(&dataset, reader, slots * CHUNK);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that ranges are read while batches have pinned the whole arena. */
static void pinned(void)
{
    struct dataset dataset;
    dlfs_batch *batches[8];
    uint32_t state = 9;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 8 * CHUNK, 0);
    for (uint64_t i = 0; i < 8; i++) {
        uint64_t index = 10 + i;
        CHECK_EQ(dlfs_reader_read(reader, &index, 1, &batches[i]), 0);
    }
    for (uint32_t round = 0; round < ROUNDS; round++) {
        read_range(reader, draw_range(&state));
    }
    for (uint32_t i = 0; i < 8; i++) {
        dlfs_batch_release(batches[i]);
    }
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that what was brought into memory, or read before, is not read again. */
static void parts_stay_cached(void)
{
    struct dataset dataset;
    dlfs_reader_stats before;
    dlfs_reader_stats after;
    dlfs_failure failure;
    dlfs_part whole = {5 + LARGE_EVERY, 0, sample_length(5 + LARGE_EVERY)};
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 64 * CHUNK, 0);
    CHECK_EQ(dlfs_reader_load_part(reader, &whole, NULL, &failure), 0);
    dlfs_reader_get_stats(reader, &before);
    CHECK(before.read_bytes >= whole.length_bytes);
    CHECK_EQ(before.samples, 0);
    for (uint64_t offset = 0; offset < whole.length_bytes; offset += 1000) {
        uint64_t left = whole.length_bytes - offset;
        read_range(reader, (dlfs_part){whole.index, offset, left < 1000 ? left : 1000});
    }
    dlfs_reader_get_stats(reader, &after);
    CHECK_EQ(after.read_bytes, before.read_bytes);
    CHECK_EQ(after.samples, 1);
    CHECK_EQ(after.sample_bytes, whole.length_bytes);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* The calls of a sink, and what it was given. */
struct given {
    uint8_t *next;
    uint32_t calls;
};

static void take_pieces(void *argument, const struct iovec *pieces, uint32_t piece_count)
{
    struct given *given = argument;
    given->calls++;
    for (uint32_t i = 0; i < piece_count; i++) {
        memcpy(given->next, pieces[i].iov_base, pieces[i].iov_len);
        given->next += pieces[i].iov_len;
    }
}

/* Checks that a range that fits the memory comes in one call, another in several, in order. */
static void sent(uint64_t slots, bool at_once)
{
    struct dataset dataset;
    uint8_t expected[LENGTH_MAX];
    uint8_t got[LENGTH_MAX];
    dlfs_failure failure;
    struct given given = {got, 0};
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, slots * CHUNK, 0);
    dlfs_part part = {5, 1, sample_length(5) - 2};
    CHECK_EQ(dlfs_reader_send_part(reader, &part, take_pieces, &given, &failure), 0);
    CHECK_EQ(given.next - got, (int64_t)part.length_bytes);
    CHECK_EQ(given.calls == 1, at_once);
    sample_fill(5, expected);
    CHECK(memcmp(got, expected + 1, part.length_bytes) == 0);
    part.length_bytes++;
    part.offset_bytes++;
    given.calls = 0;
    CHECK_EQ(dlfs_reader_send_part(reader, &part, take_pieces, &given, &failure), -EINVAL);
    CHECK_EQ(given.calls, 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Checks that a range has to lie within its sample. */
static void bounds(void)
{
    struct dataset dataset;
    uint8_t byte[2];
    dlfs_failure failure;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 16 * CHUNK, 0);
    uint64_t length = sample_length(5);
    const dlfs_part bad[] = {
        {COUNT, 0, 1}, {5, length - 1, 2}, {5, UINT64_MAX, 2}, {5, length + 1, 0}};
    for (uint32_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_EQ(dlfs_reader_read_part(reader, &bad[i], byte, &failure), -EINVAL);
    }
    read_range(reader, (dlfs_part){5, length, 0});
    read_range(reader, (dlfs_part){5, length - 1, 1});
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

static void *read_few(void *argument)
{
    struct work *work = argument;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t index = 5 + LARGE_EVERY * (draw(&work->seed) % 4 + 5);
        uint64_t offset = CHUNK * (uint64_t)(draw(&work->seed) % 2);
        offset = offset < sample_length(index) ? offset : 0;
        read_range(work->reader, (dlfs_part){index, offset, sample_length(index) - offset});
    }
    return NULL;
}

/* Checks that threads that wait for each other's parts do not wait for their queue pairs, too. */
static void one_queue_pair(void)
{
    struct dataset dataset;
    pthread_t threads[THREADS];
    struct work work[THREADS];
    struct gate gate = {.queues_max = 1};
    dataset_create(&dataset, NULL);
    gate_put(&gate, dataset.inner);
    dataset.device = gate.device;
    dlfs_reader *reader = reader_over(&dataset, 8 * CHUNK, 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        work[i] = (struct work){reader, i + 1};
        CHECK_EQ(pthread_create(&threads[i], NULL, read_few, &work[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

int main(void)
{
    many_at_once(4);
    many_at_once(24);
    many_at_once(600);
    pinned();
    parts_stay_cached();
    sent(64, true);
    sent(4, false);
    bounds();
    one_queue_pair();
    return 0;
}
