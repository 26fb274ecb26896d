/*
 * The credit of look-ups rises by two with each file that is read and falls by one with each
 * look-up, between bounds. So it stays high as long as every other file that is looked up is also
 * read.
 */
#include "readahead.h"

#include <string.h>

#define CREDIT_MAX 16
#define CREDIT_FIRST 12
#define CREDIT_ENOUGH 8

void readahead_init(struct readahead *readahead)
{
    memset(readahead, 0, sizeof *readahead);
    (void)pthread_mutex_init(&readahead->lock, NULL);
    atomic_init(&readahead->lookup_credit, CREDIT_FIRST);
}

void readahead_destroy(struct readahead *readahead)
{
    (void)pthread_mutex_destroy(&readahead->lock);
}

/* An update lost between two threads does no harm: the credit is an estimate. */
bool readahead_on_lookup(struct readahead *readahead)
{
    int32_t credit = atomic_load_explicit(&readahead->lookup_credit, memory_order_relaxed);
    if (credit > 0) {
        atomic_store_explicit(&readahead->lookup_credit, credit - 1, memory_order_relaxed);
    }
    return credit >= CREDIT_ENOUGH;
}

void readahead_on_read(struct readahead *readahead)
{
    int32_t credit = atomic_load_explicit(&readahead->lookup_credit, memory_order_relaxed) + 2;
    atomic_store_explicit(&readahead->lookup_credit, credit < CREDIT_MAX ? credit : CREDIT_MAX,
                          memory_order_relaxed);
}

/* An index continues a run if it is the same again, the next one, or not behind what was read
 * ahead.
 */
static bool continues(const struct sequential_run *run, uint32_t dataset, uint64_t index)
{
    return run->dataset == dataset && run->next <= index + 1 && index <= run->end;
}

/* Returns the run that an index continues, or else a new one in place of the least recently used.
 */
static struct sequential_run *run_of(struct readahead *readahead, uint32_t dataset, uint64_t index)
{
    struct sequential_run *oldest = &readahead->runs[0];
    for (uint32_t i = 0; i < READAHEAD_RUNS; i++) {
        struct sequential_run *run = &readahead->runs[i];
        if (continues(run, dataset, index)) {
            return run;
        }
        oldest = run->used_at < oldest->used_at ? run : oldest;
    }
    *oldest = (struct sequential_run){
        .dataset = dataset, .next = index + 1, .samples_max = READAHEAD_SAMPLES_FIRST};
    return oldest;
}

/* Counts the samples from first on that fit one window. */
static uint32_t samples_that_fit(const dlfs_location *locations, uint64_t first, uint64_t count,
                                 uint32_t samples_max)
{
    uint64_t bytes = 0;
    uint32_t samples = 0;
    while (samples < samples_max && first + samples < count) {
        uint64_t length = dlfs_location_length(&locations[first + samples]);
        bytes += length;
        if (length > READAHEAD_SAMPLE_BYTES_MAX || bytes > READAHEAD_BYTES) {
            break;
        }
        samples++;
    }
    return samples;
}

struct readahead_plan readahead_advance(struct readahead *readahead, uint32_t dataset,
                                        uint64_t index, const dlfs_location *locations,
                                        uint64_t count)
{
    struct readahead_plan plan = {0};
    (void)pthread_mutex_lock(&readahead->lock);
    struct sequential_run *run = run_of(readahead, dataset, index);
    run->used_at = ++readahead->clock;
    if (run->next <= index) {
        run->next = index + 1;
        run->steps++;
    }
    if (run->end < index + 1) {
        run->end = index + 1;
    }
    if (run->steps >= READAHEAD_STEPS_MIN && index >= run->trigger) {
        plan.first = run->end;
        plan.count = samples_that_fit(locations, run->end, count, run->samples_max);
        run->end += plan.count;
        run->trigger = plan.first;
        if (plan.count == run->samples_max && plan.count < READAHEAD_SAMPLES_MAX) {
            run->samples_max *= 2;
        }
    }
    (void)pthread_mutex_unlock(&readahead->lock);
    return plan;
}

/* ---- large files ----------------------------------------------------------------------------- */

/* The kernel requests what it reads ahead in pieces of this size, not always in order. */
#define DISORDER_BYTES (UINT64_C(1) << 20)
/* Bytes in order, but for those from the beginning of a file, after which it is read ahead: the
 * kernel requests up to 128 KiB around a page of a mapped file, in several pieces. */
#define IN_ORDER_BYTES_MIN (UINT64_C(512) << 10)

#define ACTIVE_REQUESTS 256u /* a file without one of so many requests is not being read */

/* Returns the run of a file that a request at this offset continues, or else a new one in place of
 * the least recently used. */
static struct file_run *file_run_of(struct readahead *readahead, uint32_t dataset, uint64_t index,
                                    uint64_t offset)
{
    struct file_run *oldest = &readahead->files[0];
    for (uint32_t i = 0; i < READAHEAD_RUNS; i++) {
        struct file_run *run = &readahead->files[i];
        if (run->used_at > 0 && run->dataset == dataset && run->index == index &&
            offset <= run->next + DISORDER_BYTES && run->next <= offset + DISORDER_BYTES) {
            return run;
        }
        oldest = run->used_at < oldest->used_at ? run : oldest;
    }
    *oldest =
        (struct file_run){.dataset = dataset, .index = index, .first = offset, .next = offset};
    return oldest;
}

/* Returns how many files are being read: they had one of the last requests. */
static uint32_t active_files(const struct readahead *readahead)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < READAHEAD_RUNS; i++) {
        const struct file_run *run = &readahead->files[i];
        count += run->used_at > 0 && readahead->clock - run->used_at < ACTIVE_REQUESTS;
    }
    return count > 0 ? count : 1;
}

struct file_range readahead_in_file(struct readahead *readahead, uint32_t dataset, uint64_t index,
                                    uint64_t offset, uint64_t bytes, uint64_t length,
                                    uint64_t memory_bytes)
{
    struct file_range range = {.index = index};
    (void)pthread_mutex_lock(&readahead->lock);
    struct file_run *run = file_run_of(readahead, dataset, index, offset);
    run->used_at = ++readahead->clock;
    run->next = offset + bytes > run->next ? offset + bytes : run->next;
    bool goes_on = run->first == 0 || run->next - run->first >= IN_ORDER_BYTES_MIN;
    run->ahead = run->next > run->ahead ? run->next : run->ahead;
    if (goes_on && run->ahead < length && run->ahead - run->next <= run->window / 2) {
        uint64_t most = memory_bytes / READAHEAD_MEMORY_SHARE / active_files(readahead);
        most = most < READAHEAD_RANGE_MAX ? most : READAHEAD_RANGE_MAX;
        uint64_t doubled = 2 * run->window;
        run->window = doubled < READAHEAD_RANGE_FIRST ? READAHEAD_RANGE_FIRST : doubled;
        run->window = run->window < most ? run->window : most;
        range.offset = run->ahead;
        range.bytes = length - run->ahead < run->window ? length - run->ahead : run->window;
        run->ahead += range.bytes;
    }
    (void)pthread_mutex_unlock(&readahead->lock);
    return range;
}
