/*
 * What a native mount reads before it is asked for: the belief in look-ups, and runs of indices.
 */
#include "ahead.h"
#include "check.h"

#define SAMPLES 1000u

static dlfs_location locations[SAMPLES];

static uint32_t step(struct ahead *ahead, uint32_t slot, uint64_t index, uint64_t *first)
{
    return ahead_follow(ahead, slot, index, locations, SAMPLES, first);
}

static void test_belief(struct ahead *ahead)
{
    CHECK(ahead_looked_up(ahead));
    for (uint32_t i = 0; i < 100; i++) { /* looking, never reading */
        (void)ahead_looked_up(ahead);
    }
    CHECK(!ahead_looked_up(ahead));
    for (uint32_t i = 0; i < 20; i++) {
        (void)ahead_looked_up(ahead);
        ahead_was_read(ahead);
    }
    CHECK(ahead_looked_up(ahead));
}

static void test_runs(struct ahead *ahead)
{
    uint64_t first = 0;
    uint64_t until = 0;
    uint32_t readings = 0;
    for (uint64_t index = 100; index < SAMPLES; index++) {
        uint32_t samples = step(ahead, 1, index, &first);
        CHECK_EQ(step(ahead, 1, index, &first), 0); /* looked up, then read: one step */
        if (samples == 0) {
            continue;
        }
        CHECK(first == until || until == 0); /* none left out, none twice */
        CHECK(first > index && samples <= AHEAD_SAMPLES);
        until = first + samples;
        readings++;
    }
    CHECK_EQ(until, SAMPLES);
    CHECK(readings >= (SAMPLES - 100) / AHEAD_SAMPLES);
}

static void test_no_run(struct ahead *ahead)
{
    uint64_t first;
    for (uint64_t index = 0; index < SAMPLES; index++) {
        CHECK_EQ(step(ahead, 2, index * 7919 % SAMPLES, &first), 0);
    }
}

static void test_runs_side_by_side(struct ahead *ahead)
{
    uint64_t first;
    uint32_t readings = 0;
    for (uint64_t index = 0; index < 100; index++) {
        for (uint64_t run = 0; run < AHEAD_RUNS / 2; run++) {
            readings += step(ahead, 3, run * 120 + index, &first) > 0;
        }
    }
    CHECK(readings >= AHEAD_RUNS / 2 * 3);
}

static void test_large_samples_are_left(struct ahead *ahead)
{
    uint64_t first;
    for (uint64_t index = 0; index < SAMPLES; index++) {
        locations[index].length_low = AHEAD_SAMPLE_BYTES_MAX + 1;
    }
    for (uint64_t index = 0; index < 50; index++) {
        CHECK_EQ(step(ahead, 4, index, &first), 0);
    }
    for (uint64_t index = 0; index < SAMPLES; index++) {
        locations[index].length_low = AHEAD_SAMPLE_BYTES_MAX;
    }
    for (uint64_t index = 0; index < 50; index++) {
        CHECK(step(ahead, 5, index, &first) <= AHEAD_BYTES / AHEAD_SAMPLE_BYTES_MAX);
    }
}

int main(void)
{
    struct ahead ahead;
    ahead_init(&ahead);
    test_belief(&ahead);
    test_runs(&ahead);
    test_no_run(&ahead);
    test_runs_side_by_side(&ahead);
    test_large_samples_are_left(&ahead);
    ahead_destroy(&ahead);
    return 0;
}
