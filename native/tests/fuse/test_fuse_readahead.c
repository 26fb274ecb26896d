/* Tests read-ahead of a native mount: the credit of look-ups, and sequential runs. */
#include "check.h"
#include "readahead.h"
#include "readahead_thread.h"

#define SAMPLES 1000u

static dlfs_location locations[SAMPLES];

static struct readahead_plan step(struct readahead *readahead, uint32_t dataset, uint64_t index)
{
    return readahead_advance(readahead, dataset, index, locations, SAMPLES);
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
    uint64_t end = 0;
    uint32_t windows = 0;
    uint32_t longest = 0;
    for (uint64_t index = 100; index < SAMPLES; index++) {
        struct readahead_plan plan = step(readahead, 1, index);
        CHECK_EQ(step(readahead, 1, index).count, 0); /* a look-up and a read are one step */
        if (plan.count == 0) {
            continue;
        }
        CHECK(plan.first == end || end == 0); /* no sample is skipped or read twice */
        CHECK(plan.first > index && plan.count <= READAHEAD_SAMPLES_MAX);
        CHECK(windows > 0 || plan.count == READAHEAD_SAMPLES_FIRST);
        end = plan.first + plan.count;
        longest = plan.count > longest ? plan.count : longest;
        windows++;
    }
    CHECK_EQ(end, SAMPLES);
    CHECK_EQ(longest, READAHEAD_SAMPLES_MAX);
    CHECK(windows < (SAMPLES - 100) / READAHEAD_SAMPLES_FIRST);
}

/* Takes the steps after which the next one begins the second window. */
static struct readahead_plan begin(struct readahead *readahead, uint32_t dataset)
{
    struct readahead_plan plan = {0};
    for (uint64_t index = 0; index <= READAHEAD_STEPS_MIN; index++) {
        plan = step(readahead, dataset, index);
    }
    return plan;
}

/* The first windows are taken from the kernel's cache: the next request is for the end of one. */
static void test_a_window_that_is_not_requested(struct readahead *readahead)
{
    struct readahead_plan plan = begin(readahead, 7);
    CHECK(plan.count > 0);
    uint64_t end = plan.first + plan.count;
    plan = step(readahead, 7, end);
    CHECK(plan.first == end + 1 && plan.count > 0);
}

/* The sample that begins the next window is empty, so that the kernel never requests it. */
static void test_an_empty_sample_delays_no_window(struct readahead *readahead)
{
    struct readahead_plan plan = begin(readahead, 8);
    CHECK(plan.count > 0);
    uint64_t end = plan.first + plan.count;
    plan = step(readahead, 8, plan.first + 1);
    CHECK(plan.first == end && plan.count > 0);
}

static void test_random_order_is_not_read_ahead(struct readahead *readahead)
{
    for (uint64_t index = 0; index < SAMPLES; index++) {
        CHECK_EQ(step(readahead, 2, index * 7919 % SAMPLES).count, 0);
    }
}

static void test_runs_side_by_side(struct readahead *readahead)
{
    uint32_t windows = 0;
    for (uint64_t index = 0; index < 100; index++) {
        for (uint64_t run = 0; run < READAHEAD_RUNS / 2; run++) {
            windows += step(readahead, 3, run * 120 + index).count > 0;
        }
    }
    CHECK(windows >= READAHEAD_RUNS / 2 * 2);
}

static void test_large_samples_are_not_read_ahead(struct readahead *readahead)
{
    for (uint64_t index = 0; index < SAMPLES; index++) {
        locations[index].length_low = READAHEAD_SAMPLE_BYTES_MAX + 1;
    }
    for (uint64_t index = 0; index < 50; index++) {
        CHECK_EQ(step(readahead, 4, index).count, 0);
    }
    for (uint64_t index = 0; index < SAMPLES; index++) {
        locations[index].length_low = READAHEAD_SAMPLE_BYTES_MAX;
    }
    for (uint64_t index = 0; index < 50; index++) {
        CHECK(step(readahead, 5, index).count <= READAHEAD_BYTES / READAHEAD_SAMPLE_BYTES_MAX);
    }
}

#define MIB (UINT64_C(1) << 20)
#define PIECE (UINT64_C(128) << 10)

/* Checks that files that are read in order, in turns, are read ahead once, in windows that grow. */
static void test_large_files(struct readahead *readahead)
{
    uint64_t length = 100 * MIB + 5;
    uint64_t ahead[3] = {PIECE, PIECE, PIECE};
    uint64_t longest = 0;
    for (uint64_t offset = 0; offset < length; offset += PIECE) {
        for (uint64_t file = 0; file < 3; file++) {
            struct file_range range =
                readahead_in_file(readahead, 7, file, offset, PIECE, length, 256 * MIB);
            if (range.bytes > 0) {
                CHECK_EQ(range.index, file);
                CHECK_EQ(range.offset, ahead[file]);
                ahead[file] += range.bytes;
            }
            CHECK(range.bytes <= READAHEAD_RANGE_MAX);
            CHECK(ahead[file] >= length || ahead[file] >= offset + PIECE);
            longest = range.bytes > longest ? range.bytes : longest;
        }
    }
    CHECK_EQ(longest, READAHEAD_RANGE_MAX);
    for (uint32_t file = 0; file < 3; file++) {
        CHECK_EQ(ahead[file], length);
    }
}

/* Checks that nothing is read ahead in a file that is read at random offsets. */
static void test_random_offsets(struct readahead *readahead)
{
    for (uint64_t i = 1; i < 500; i++) {
        uint64_t offset = i * 7919 % 1000 * 5 * MIB + 4096;
        CHECK_EQ(readahead_in_file(readahead, 8, 1, offset, 4096, 5000 * MIB, 256 * MIB).bytes, 0);
    }
}

struct reading {
    struct readahead_thread thread;
    _Atomic bool begun;
};

/* Reads for as long as its thread is to go on. */
static void read_until_the_end(void *owner, const struct readahead_job *job)
{
    struct reading *reading = owner;
    CHECK_EQ(job->dataset, 5);
    atomic_store(&reading->begun, true);
    while (!__atomic_load_n(&reading->thread.ending, __ATOMIC_RELAXED)) {
        (void)sched_yield();
    }
}

/* Checks that a read-ahead under way is notified that its thread is to end. */
static void test_the_end_of_a_thread(void)
{
    struct reading reading = {0};
    readahead_thread_init(&reading.thread);
    CHECK_EQ(readahead_thread_start(&reading.thread, read_until_the_end, &reading), 0);
    readahead_thread_post(&reading.thread, &(struct readahead_job){.dataset = 5});
    while (!atomic_load(&reading.begun)) {
        (void)sched_yield();
    }
    readahead_thread_stop(&reading.thread);
    readahead_thread_destroy(&reading.thread);
}

int main(void)
{
    test_the_end_of_a_thread();
    struct readahead readahead;
    readahead_init(&readahead);
    for (uint64_t index = 0; index < SAMPLES; index++) {
        locations[index].length_low = 100;
    }
    test_lookup_credit(&readahead);
    test_runs(&readahead);
    test_a_window_that_is_not_requested(&readahead);
    test_an_empty_sample_delays_no_window(&readahead);
    test_random_order_is_not_read_ahead(&readahead);
    test_runs_side_by_side(&readahead);
    test_large_samples_are_not_read_ahead(&readahead);
    test_large_files(&readahead);
    test_random_offsets(&readahead);
    readahead_destroy(&readahead);
    return 0;
}
