/* Tests each failure of the faulty device, and that a seed repeats them. */
#include "device/device_tests.h"

#define COUNT 256u
#define MILLION 1000000u

/*
 * The results, order and flipped bits of one read of every block of a zeroed device, at depth 16.
 */
struct outcome {
    int64_t results[COUNT];
    uint32_t order[COUNT];
    uint32_t bits[COUNT];
};

static uint32_t count_bits(const uint8_t *memory, size_t bytes)
{
    uint32_t bits = 0;
    for (size_t i = 0; i < bytes; i++) {
        bits += (uint32_t)__builtin_popcount(memory[i]);
    }
    return bits;
}

static void run(const dlfs_fault_config *config, uint32_t kind, struct outcome *outcome)
{
    dlfs_device *inner = make_memory();
    dlfs_device *device = NULL;
    CHECK_EQ(dlfs_device_create_fault(inner, config, &device), 0);
    dlfs_queue *queue = make_queue(device, 16);
    uint8_t *memory = aligned_memory((size_t)COUNT * 1024);
    uint32_t submitted = 0;
    for (uint32_t done = 0; done < COUNT;) {
        while (submitted < COUNT) {
            dlfs_operation operation = {memory + (size_t)submitted * 1024,
                                        (uint64_t)submitted * 1024, 1024, kind, submitted};
            int accepted = dlfs_queue_submit(queue, &operation, 1);
            CHECK(accepted >= 0);
            if (accepted == 0) {
                break;
            }
            submitted++;
        }
        dlfs_completion completions[16];
        int got = dlfs_queue_poll(queue, completions, 16, -1);
        CHECK(got > 0);
        for (int i = 0; i < got; i++) {
            uint64_t tag = completions[i].tag;
            outcome->results[tag] = completions[i].result;
            outcome->bits[tag] = count_bits(memory + tag * 1024, 1024);
            outcome->order[done++] = (uint32_t)tag;
        }
    }
    free(memory);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_flush(device), 0);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    CHECK_EQ(dlfs_device_destroy(inner), 0);
}

static uint32_t count_result(const struct outcome *outcome, int64_t result)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        found += outcome->results[i] == result;
    }
    return found;
}

static void test_rates(void)
{
    struct outcome outcome;
    run(&(dlfs_fault_config){.error_per_million = MILLION}, DLFS_OP_READ, &outcome);
    CHECK_EQ(count_result(&outcome, -EIO), COUNT);
    run(&(dlfs_fault_config){.error_per_million = MILLION}, DLFS_OP_WRITE, &outcome);
    CHECK_EQ(count_result(&outcome, -EIO), COUNT);
    run(&(dlfs_fault_config){.short_per_million = MILLION}, DLFS_OP_READ, &outcome);
    CHECK_EQ(count_result(&outcome, DLFS_E_TRUNCATED), COUNT);
    run(&(dlfs_fault_config){.short_per_million = MILLION}, DLFS_OP_WRITE, &outcome);
    CHECK_EQ(count_result(&outcome, 1024), COUNT);
    run(&(dlfs_fault_config){.flip_per_million = MILLION}, DLFS_OP_READ, &outcome);
    CHECK_EQ(count_result(&outcome, 1024), COUNT);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK_EQ(outcome.bits[i], 1);
        CHECK_EQ(outcome.order[i], i);
    }
    run(&(dlfs_fault_config){.seed = 1, .error_per_million = MILLION / 4}, DLFS_OP_READ, &outcome);
    uint32_t failed = count_result(&outcome, -EIO);
    CHECK(failed > COUNT / 8 && failed < COUNT / 2);
    CHECK_EQ(count_result(&outcome, 1024), COUNT - failed);
}

static void test_bad_range(void)
{
    struct outcome outcome;
    dlfs_fault_config config = {.bad_first_bytes = 10 * 1024 + 1, .bad_length_bytes = 1024};
    run(&config, DLFS_OP_READ, &outcome);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK_EQ(outcome.results[i], i == 10 || i == 11 ? -EIO : 1024);
    }
    run(&config, DLFS_OP_WRITE, &outcome);
    CHECK_EQ(count_result(&outcome, 1024), COUNT);
}

static void test_seed_repeats(void)
{
    struct outcome first = {0};
    struct outcome second = {0};
    struct outcome other = {0};
    dlfs_fault_config config = {.seed = 42,
                                .error_per_million = MILLION / 10,
                                .short_per_million = MILLION / 10,
                                .flip_per_million = MILLION / 10,
                                .reorder = 1};
    run(&config, DLFS_OP_READ, &first);
    run(&config, DLFS_OP_READ, &second);
    CHECK(memcmp(&first, &second, sizeof first) == 0);
    config.seed = 43;
    run(&config, DLFS_OP_READ, &other);
    CHECK(memcmp(&first, &other, sizeof first) != 0);
    uint32_t moved = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        moved += first.order[i] != i;
    }
    CHECK(moved > 0);
}

static void test_stall(void)
{
    struct outcome outcome;
    dlfs_fault_config config = {.seed = 3, .stall_per_million = MILLION / 50, .stall_ms = 1};
    run(&config, DLFS_OP_READ, &outcome);
    CHECK_EQ(count_result(&outcome, 1024), COUNT);
    /* A stall longer than the poll: the poll gives up, and destroying the queue pair sees it
     * through. */
    dlfs_device *inner = make_memory();
    dlfs_device *device = NULL;
    config = (dlfs_fault_config){.stall_per_million = MILLION, .stall_ms = 1500};
    CHECK_EQ(dlfs_device_create_fault(inner, &config, &device), 0);
    dlfs_queue *queue = make_queue(device, 1);
    uint8_t *memory = aligned_memory(1024);
    dlfs_operation operation = {memory, 0, 1024, DLFS_OP_READ, 1};
    dlfs_completion completion;
    CHECK_EQ(dlfs_queue_submit(queue, &operation, 1), 1);
    CHECK_EQ(dlfs_queue_poll(queue, &completion, 1, 0), 0);
    CHECK_EQ(dlfs_queue_in_flight(queue), 1);
    dlfs_queue_destroy(queue);
    free(memory);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    CHECK_EQ(dlfs_device_destroy(inner), 0);
}

/* Loses the device at an operation, by completions or by polls, and makes it reachable again. */
static void test_loss(uint32_t lost_polls)
{
    dlfs_device *inner = make_memory();
    dlfs_device *device = NULL;
    dlfs_queue *other = NULL;
    dlfs_fault_config config = {.lost_from = 3, .lost_polls = lost_polls};
    CHECK_EQ(dlfs_device_create_fault(inner, &config, &device), 0);
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *memory = aligned_memory(1024);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, memory, 0, 1024), 1024);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, memory, 0, 1024), 1024);
    dlfs_operation operation = {memory, 0, 1024, DLFS_OP_READ, 1};
    dlfs_completion completion;
    CHECK_EQ(dlfs_queue_submit(queue, &operation, 1), 1);
    if (lost_polls != 0) {
        CHECK_EQ(dlfs_queue_poll(queue, &completion, 1, -1), DLFS_E_LOST);
    } else {
        CHECK_EQ(dlfs_queue_poll(queue, &completion, 1, -1), 1);
        CHECK_EQ(completion.result, DLFS_E_LOST);
    }
    CHECK_EQ(dlfs_queue_create(device, 1, &other), DLFS_E_LOST);
    CHECK_EQ(dlfs_device_flush(device), DLFS_E_LOST);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_fault_lose(device, 2), -EINVAL);
    CHECK_EQ(dlfs_device_fault_lose(inner, 0), -EINVAL);
    CHECK_EQ(dlfs_device_fault_lose(NULL, 0), -EINVAL);
    CHECK_EQ(dlfs_device_fault_lose(device, 0), 0);
    queue = make_queue(device, 4);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, memory, 0, 1024), 1024);
    CHECK_EQ(dlfs_device_fault_lose(device, 1), 0);
    CHECK_EQ(dlfs_device_flush(device), DLFS_E_LOST);
    dlfs_queue_destroy(queue);
    free(memory);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    CHECK_EQ(dlfs_device_destroy(inner), 0);
}

int main(void)
{
    dlfs_device *inner = make_memory();
    dlfs_device *device = NULL;
    CHECK_EQ(dlfs_device_create_fault(NULL, &(dlfs_fault_config){0}, &device), -EINVAL);
    CHECK_EQ(dlfs_device_create_fault(inner, NULL, &device), -EINVAL);
    CHECK_EQ(dlfs_device_create_fault(inner, &(dlfs_fault_config){.flip_per_million = MILLION + 1},
                                      &device),
             -EINVAL);
    CHECK_EQ(dlfs_device_create_fault(inner, &(dlfs_fault_config){.lost_polls = 2}, &device),
             -EINVAL);
    CHECK_EQ(dlfs_device_destroy(inner), 0);
    test_rates();
    test_bad_range();
    test_seed_repeats();
    test_stall();
    test_loss(0);
    test_loss(1);
    return 0;
}
