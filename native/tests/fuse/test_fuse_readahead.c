/* Tests read-ahead of a native mount: the credit of look-ups, and sequential runs. */
#include "check.h"
#include "readahead.h"

#define SAMPLES 1000u

static dlfs_location locations[SAMPLES];

static uint32_t step(struct readahead *readahead, uint32_t dataset, uint64_t index, uint64_t *first)
{
    return readahead_advance(readahead, dataset, index, locations, SAMPLES, first);
}

static void test_lookup_credit(struct readahead *readahead)
{
    CHECK(readahead_on_lookup(readahead));
    for (uint32_t i = 0; i < 100; i++) { /* look-ups without reads */
        (void)readahead_on_lookup(readahead);
    }
    CHECK(!readahead_on_lookup(readahead));
    for (uint32_t i = 0; i < 20; i++) {
        (void)readahead_on_lookup(readahead);
        readahead_on_read(readahead);
    }
    CHECK(readahead_on_lookup(readahead));
}

static void test_runs(struct readahead *readahead)
{
    uint64_t first = 0;
    uint64_t end = 0;
    uint32_t batches = 0;
    for (uint64_t index = 100; index < SAMPLES; index++) {
        uint32_t samples = step(readahead, 1, index, &first);
        CHECK_EQ(step(readahead, 1, index, &first),
                 0); /* look-up and read of a sample are one step */
        if (samples == 0) {
            continue;
        }
        CHECK(first == end || end == 0); /* no sample is skipped or read twice */
        CHECK(first > index && samples <= READAHEAD_SAMPLES);
        end = first + samples;
        batches++;
    }
    CHECK_EQ(end, SAMPLES);
    CHECK(batches >= (SAMPLES - 100) / READAHEAD_SAMPLES);
}

static void test_random_order_is_not_read_ahead(struct readahead *readahead)
{
    uint64_t first;
    for (uint64_t index = 0; index < SAMPLES; index++) {
        CHECK_EQ(step(readahead, 2, index * 7919 % SAMPLES, &first), 0);
    }
}

static void test_runs_side_by_side(struct readahead *readahead)
{
    uint64_t first;
    uint32_t batches = 0;
    for (uint64_t index = 0; index < 100; index++) {
        for (uint64_t run = 0; run < READAHEAD_RUNS / 2; run++) {
            batches += step(readahead, 3, run * 120 + index, &first) > 0;
        }
    }
    CHECK(batches >= READAHEAD_RUNS / 2 * 3);
}

static void test_large_samples_are_not_read_ahead(struct readahead *readahead)
{
    uint64_t first;
    for (uint64_t index = 0; index < SAMPLES; index++) {
        locations[index].length_low = READAHEAD_SAMPLE_BYTES_MAX + 1;
    }
    for (uint64_t index = 0; index < 50; index++) {
        CHECK_EQ(step(readahead, 4, index, &first), 0);
    }
    for (uint64_t index = 0; index < SAMPLES; index++) {
        locations[index].length_low = READAHEAD_SAMPLE_BYTES_MAX;
    }
    for (uint64_t index = 0; index < 50; index++) {
        CHECK(step(readahead, 5, index, &first) <= READAHEAD_BYTES / READAHEAD_SAMPLE_BYTES_MAX);
    }
}

int main(void)
{
    struct readahead readahead;
    readahead_init(&readahead);
    test_lookup_credit(&readahead);
    test_runs(&readahead);
    test_random_order_is_not_read_ahead(&readahead);
    test_runs_side_by_side(&readahead);
    test_large_samples_are_not_read_ahead(&readahead);
    readahead_destroy(&readahead);
    return 0;
}
