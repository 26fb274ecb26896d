/*
 * Tests the open-file cache: hits, queued requests, eviction, failures, the bounds of datasets, and
 * threads that together need more than a bound.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "device/device.h"
#include "open_file_cache.h"
#include "reader/state.h"

#define BOUND 1000u

static _Atomic uint32_t batches; /* that were read and not released yet */
static struct pins pins;

static void release(struct batch *batch)
{
    (void)atomic_fetch_sub(&batches, 1);
    free((void *)(uintptr_t)batch->public.base);
    free(batch);
}

/* Returns a batch whose bytes all have one value. */
static dlfs_batch *read_batch(uint64_t bytes, int value)
{
    struct batch *batch = calloc(1, sizeof *batch);
    uint8_t *data = malloc(bytes + 1);
    CHECK(batch != NULL && data != NULL);
    memset(data, value, bytes);
    batch->public.base = data;
    batch->release = release;
    batch->process = dlfs_process();
    (void)atomic_fetch_add(&batches, 1);
    return &batch->public;
}

static struct pinned_batch *reserve(struct open_file_cache *cache, struct pins *of, uint64_t bytes)
{
    return file_cache_begin_batch(cache, of, bytes, BOUND);
}

static struct cached_file *begin(struct open_file_cache *cache, uint64_t key, uint64_t bytes)
{
    struct cached_file *sample = NULL;
    CHECK_EQ(file_cache_find(cache, key, bytes, NULL, &sample), FILE_CACHE_MISS);
    return sample;
}

/* Ends the reading of a sample with a batch of its own. Returns the queued requests. */
static struct read_request *finish(struct open_file_cache *cache, struct cached_file *sample,
                                   struct pinned_batch *pinned)
{
    pinned->batch = read_batch(sample->bytes, (int)sample->key);
    struct read_request *queued = file_cache_finish(cache, sample, pinned, pinned->batch->base);
    file_cache_end_batch(cache, pinned);
    return queued;
}

static void load_of(struct open_file_cache *cache, struct pins *of, uint64_t key, uint64_t bytes)
{
    struct pinned_batch *pinned = reserve(cache, of, bytes);
    CHECK(pinned != NULL);
    struct cached_file *sample = begin(cache, key, bytes);
    CHECK(finish(cache, sample, pinned) == NULL);
    file_cache_unpin(cache, sample, 0);
}

static void load(struct open_file_cache *cache, uint64_t key, uint64_t bytes)
{
    load_of(cache, &pins, key, bytes);
}

static enum file_cache_result find(struct open_file_cache *cache, uint64_t key,
                                   struct cached_file **sample)
{
    const struct read_request request = {.offset = key, .bytes = 10};
    enum file_cache_result result = file_cache_find(cache, key, 10, &request, sample);
    if (result == FILE_CACHE_MISS) { /* which this test does not read */
        struct read_request *queued = file_cache_finish(cache, *sample, NULL, NULL);
        CHECK(queued != NULL && queued->next == NULL);
        free(queued);
    }
    return result;
}

static void test_hits_until_eviction(struct open_file_cache *cache)
{
    struct cached_file *sample;
    CHECK_EQ(find(cache, 1, &sample), FILE_CACHE_MISS);
    load(cache, 1, 400);
    load(cache, 2, 400);
    CHECK_EQ(find(cache, 1, &sample), FILE_CACHE_HIT); /* so 2 is the least recently used */
    CHECK(sample->data[399] == 1);
    file_cache_unpin(cache, sample, 0);
    load(cache, 3, 400);
    CHECK_EQ(find(cache, 2, &sample), FILE_CACHE_MISS);
    CHECK_EQ(find(cache, 1, &sample), FILE_CACHE_HIT);
    CHECK_EQ(file_cache_bytes(cache), 800);
    file_cache_unpin(cache, sample, 399);
    CHECK_EQ(find(cache, 1, &sample), FILE_CACHE_HIT);
    file_cache_unpin(cache, sample, 1); /* all bytes were sent: freed at once */
    CHECK_EQ(find(cache, 1, &sample), FILE_CACHE_MISS);
    CHECK_EQ(file_cache_bytes(cache), 400);
    file_cache_expire(cache, NULL, 0);
    CHECK_EQ(file_cache_bytes(cache), 0);
    CHECK_EQ(batches, 0);
}

/* Only the first request sees that a sample was read ahead. */
static void test_first_request_of_a_read_ahead(struct open_file_cache *cache)
{
    uint64_t before = cache->readahead_hits;
    struct cached_file *sample = begin(cache, 9, 1);
    CHECK(finish(cache, sample, reserve(cache, &pins, 1)) == NULL);
    file_cache_unpin(cache, sample, 0);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(find(cache, 9, &sample), FILE_CACHE_HIT);
        CHECK_EQ(cache->readahead_hits, before + 1);
        file_cache_unpin(cache, sample, 0);
    }
    file_cache_expire(cache, NULL, 0);
}

static void test_queued_requests_are_returned(struct open_file_cache *cache)
{
    struct cached_file *other;
    struct cached_file *sample = begin(cache, 5, 10);
    CHECK_EQ(find(cache, 5, &other), FILE_CACHE_QUEUED);
    CHECK_EQ(find(cache, 5, &other), FILE_CACHE_QUEUED);
    CHECK_EQ(file_cache_find(cache, 5, 10, NULL, &other), FILE_CACHE_QUEUED);
    struct read_request *queued = finish(cache, sample, reserve(cache, &pins, 10));
    CHECK(queued != NULL && queued->next != NULL && queued->next->next == NULL);
    CHECK_EQ(queued->offset, 5);
    free(queued->next);
    free(queued);
    file_cache_unpin(cache, sample, 20);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

/* Without a batch: it has failed, or its batch is not pinned. */
static void test_samples_without_a_batch_are_not_cached(struct open_file_cache *cache)
{
    struct cached_file *other;
    struct cached_file *sample = begin(cache, 6, 10);
    CHECK_EQ(find(cache, 6, &other), FILE_CACHE_QUEUED);
    struct pinned_batch *pinned = reserve(cache, &pins, 10);
    struct read_request *request = file_cache_finish(cache, sample, NULL, NULL);
    CHECK(request != NULL);
    free(request);
    CHECK_EQ(find(cache, 6, &other), FILE_CACHE_MISS);
    CHECK_EQ(file_cache_bytes(cache), 10);
    file_cache_end_batch(cache, pinned);
    file_cache_end_batch(cache, NULL);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

/* The last sample of a batch releases it. */
static void test_samples_of_one_batch(struct open_file_cache *cache)
{
    struct cached_file *samples[3];
    struct pinned_batch *pinned = reserve(cache, &pins, 900);
    for (uint64_t i = 0; i < 3; i++) {
        samples[i] = begin(cache, 20 + i, 300);
    }
    pinned->batch = read_batch(900, 20);
    CHECK(file_cache_finish(cache, samples[0], NULL, NULL) == NULL); /* it has failed */
    for (uint64_t i = 1; i < 3; i++) {
        CHECK(file_cache_finish(cache, samples[i], pinned, pinned->batch->base) == NULL);
    }
    file_cache_end_batch(cache, pinned);
    file_cache_unpin(cache, samples[1], 300);
    CHECK_EQ(batches, 1);
    CHECK_EQ(file_cache_bytes(cache), 900);
    CHECK(samples[2]->data[299] == 20);
    file_cache_unpin(cache, samples[2], 300);
    CHECK_EQ(batches, 0);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

static void test_bounds(struct open_file_cache *cache)
{
    struct pins others = {0};
    struct cached_file *sample;
    CHECK(reserve(cache, &pins, BOUND + 1) == NULL);
    load_of(cache, &others, 7, BOUND);
    load(cache, 8, BOUND / 2); /* each dataset has its bound */
    struct pinned_batch *pinned = reserve(cache, &pins, BOUND / 2);
    CHECK(pinned != NULL && file_cache_bytes(cache) == 2 * BOUND);
    CHECK_EQ(find(cache, 8, &sample), FILE_CACHE_HIT);
    CHECK(reserve(cache, &pins, 1) == NULL); /* one is being read, one is in use */
    file_cache_unpin(cache, sample, 0);
    struct pinned_batch *more = reserve(cache, &pins, 1);
    CHECK(more != NULL);
    CHECK_EQ(find(cache, 8, &sample), FILE_CACHE_MISS);
    file_cache_end_batch(cache, more);
    file_cache_end_batch(cache, pinned);
    load(cache, 8, 1);
    file_cache_expire(cache, &others, 0);
    CHECK_EQ(file_cache_bytes(cache), 1);
    CHECK_EQ(others.bytes, 0);
    file_cache_expire(cache, NULL, 0);
    CHECK_EQ(batches, 0);
}

/* ---- threads --------------------------------------------------------------------------------- */

#define THREADS 4u
#define ROUNDS 3000u
#define KEYS 24u

static uint64_t bytes_of(uint64_t key)
{
    return 100 + key * 50; /* the largest exceed the bound */
}

static void use(struct open_file_cache *cache, uint64_t key)
{
    struct cached_file *sample;
    const struct read_request asked = {.offset = key};
    enum file_cache_result result = FILE_CACHE_QUEUED;
    if (key % 3 == 0) { /* as a read-ahead */
        result = file_cache_find(cache, key, bytes_of(key), NULL, &sample);
    }
    if (result != FILE_CACHE_MISS) {
        result = file_cache_find(cache, key, bytes_of(key), &asked, &sample);
    }
    if (result == FILE_CACHE_MISS) {
        struct pinned_batch *pinned = reserve(cache, &pins, bytes_of(key));
        bool stays = pinned != NULL && key % 7 != 0;
        struct read_request *request =
            stays ? finish(cache, sample, pinned) : file_cache_finish(cache, sample, NULL, NULL);
        while (request != NULL) {
            struct read_request *next = request->next;
            CHECK_EQ(request->offset, key);
            free(request);
            request = next;
        }
        if (!stays) {
            file_cache_end_batch(cache, pinned);
            return;
        }
    } else if (result == FILE_CACHE_QUEUED) {
        return;
    }
    for (uint64_t at = 0; at < sample->bytes; at++) {
        CHECK(sample->data[at] == (uint8_t)key);
    }
    file_cache_unpin(cache, sample, key % 5 == 0 ? sample->bytes : 0);
}

static void *work(void *argument)
{
    struct open_file_cache *cache = argument;
    uint64_t random = (uint64_t)(uintptr_t)&random >> 4;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        random = random * UINT64_C(6364136223846793005) + 1442695040888963407u;
        use(cache, (random >> 33) % KEYS);
    }
    return NULL;
}

static void test_threads_share(struct open_file_cache *cache)
{
    pthread_t threads[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, work, cache), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    file_cache_expire(cache, NULL, 0);
    CHECK_EQ(file_cache_bytes(cache), 0);
    CHECK_EQ(pins.bytes, 0);
    CHECK_EQ(batches, 0);
}

int main(void)
{
    static struct open_file_cache cache;
    file_cache_init(&cache);
    test_hits_until_eviction(&cache);
    test_first_request_of_a_read_ahead(&cache);
    test_queued_requests_are_returned(&cache);
    test_samples_without_a_batch_are_not_cached(&cache);
    test_samples_of_one_batch(&cache);
    test_bounds(&cache);
    test_threads_share(&cache);
    load(&cache, 1, 10); /* released by file_cache_destroy */
    file_cache_destroy(&cache);
    CHECK_EQ(batches, 0);
    return 0;
}
