/*
 * Tests the open-file cache: hits, queued requests, eviction, failures, and threads that together
 * need more than the budget.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "open_file_cache.h"

#define BUDGET 1000u

static struct cached_file *begin(struct open_file_cache *cache, uint64_t key, uint64_t bytes)
{
    struct cached_file *sample = NULL;
    CHECK_EQ(file_cache_begin(cache, key, bytes, false, &sample), 0);
    memset(sample->copy, (int)key, bytes);
    return sample;
}

static void load(struct open_file_cache *cache, uint64_t key, uint64_t bytes)
{
    struct cached_file *sample = begin(cache, key, bytes);
    CHECK(file_cache_finish(cache, sample, true) == NULL);
    file_cache_unpin(cache, sample, 0);
}

static enum file_cache_result find(struct open_file_cache *cache, uint64_t key,
                                   struct cached_file **sample)
{
    const struct read_request request = {.offset = key, .bytes = 10};
    bool was_readahead;
    return file_cache_find(cache, key, &request, &was_readahead, sample);
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
    file_cache_expire(cache, 0);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

static void test_unrequested_samples_are_found(struct open_file_cache *cache)
{
    struct cached_file *sample = NULL;
    struct cached_file *again = NULL;
    CHECK_EQ(file_cache_begin(cache, 1, 400, true, &sample), 0);
    CHECK(file_cache_find_unrequested(cache, 1) == NULL); /* not read yet */
    (void)file_cache_finish(cache, sample, true);
    file_cache_unpin(cache, sample, 0);
    CHECK(file_cache_find_unrequested(cache, 1) == sample);
    CHECK_EQ(find(cache, 1, &again), FILE_CACHE_HIT);
    CHECK(file_cache_find_unrequested(cache, 1) == NULL); /* requested by now */
    file_cache_unpin(cache, again, 0);
    file_cache_unpin(cache, sample, 400);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

static void test_queued_requests_are_returned(struct open_file_cache *cache)
{
    struct cached_file *other;
    struct cached_file *sample = begin(cache, 5, 10);
    CHECK_EQ(find(cache, 5, &other), FILE_CACHE_QUEUED);
    CHECK_EQ(find(cache, 5, &other), FILE_CACHE_QUEUED);
    CHECK_EQ(file_cache_begin(cache, 5, 10, false, &other), -EEXIST);
    struct read_request *queued = file_cache_finish(cache, sample, true);
    CHECK(queued != NULL && queued->next != NULL && queued->next->next == NULL);
    CHECK_EQ(queued->offset, 5);
    free(queued->next);
    free(queued);
    file_cache_unpin(cache, sample, 20);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

static void test_failures_are_not_cached(struct open_file_cache *cache)
{
    struct cached_file *other;
    struct cached_file *sample = begin(cache, 6, 10);
    CHECK_EQ(find(cache, 6, &other), FILE_CACHE_QUEUED);
    struct read_request *request = file_cache_finish(cache, sample, false);
    CHECK(request != NULL);
    free(request);
    CHECK_EQ(find(cache, 6, &other), FILE_CACHE_MISS);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

static void test_budget(struct open_file_cache *cache)
{
    struct cached_file *large = begin(cache, 7, 2 * BUDGET); /* alone */
    struct cached_file *sample;
    CHECK_EQ(file_cache_begin(cache, 8, 1, true, &sample), -EAGAIN);
    CHECK(file_cache_finish(cache, large, true) == NULL);
    CHECK_EQ(file_cache_begin(cache, 8, 1, true, &sample), -EAGAIN); /* it is pinned */
    file_cache_unpin(cache, large, 0);
    load(cache, 8, 1);
    CHECK_EQ(file_cache_bytes(cache), 1);
    bool was_readahead;
    CHECK_EQ(file_cache_begin(cache, 9, 1, true, &sample), 0);
    CHECK(file_cache_finish(cache, sample, true) == NULL);
    file_cache_unpin(cache, sample, 0);
    for (int first = 1; first >= 0;
         first--) { /* only the first request sees that it was read ahead */
        CHECK_EQ(file_cache_find(cache, 9, &(struct read_request){0}, &was_readahead, &sample),
                 FILE_CACHE_HIT);
        CHECK_EQ(was_readahead, first);
        file_cache_unpin(cache, sample, 0);
    }
    file_cache_expire(cache, 0);
}

/* Large samples are not copied: they stay in their batch. */
static void test_large(struct open_file_cache *cache)
{
    struct cached_file *sample;
    CHECK_EQ(file_cache_begin(cache, 20, FILE_CACHE_COPY_BYTES_MAX, false, &sample), 0);
    CHECK(sample->copy != NULL);
    CHECK(file_cache_finish(cache, sample, false) == NULL);
    CHECK_EQ(file_cache_begin(cache, 20, FILE_CACHE_COPY_BYTES_MAX + 1, false, &sample), 0);
    CHECK(sample->copy == NULL && sample->data == NULL);
    CHECK(file_cache_finish(cache, sample, false) == NULL);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

static void *load_large_sample(void *argument)
{
    load(argument, 11, 2 * BUDGET);
    return NULL;
}

/* A thread that waits for much memory is not overtaken by threads that need less. */
static void test_order_of_waiters(struct open_file_cache *cache)
{
    pthread_t thread;
    struct cached_file *other;
    struct cached_file *sample = begin(cache, 10, 10);
    CHECK_EQ(pthread_create(&thread, NULL, load_large_sample, cache), 0);
    for (bool waits = false; !waits;) {
        (void)pthread_mutex_lock(&cache->lock);
        waits = cache->waiters != NULL;
        (void)pthread_mutex_unlock(&cache->lock);
    }
    CHECK_EQ(file_cache_begin(cache, 12, 10, true, &other), -EAGAIN);
    CHECK(file_cache_finish(cache, sample, true) == NULL);
    file_cache_unpin(cache, sample, sample->bytes);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(cache->waiters == NULL);
    load(cache, 12, 10);
    file_cache_expire(cache, 0);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

/* ---- threads --------------------------------------------------------------------------------- */

#define THREADS 4u
#define ROUNDS 3000u
#define KEYS 24u

static uint64_t bytes_of(uint64_t key)
{
    return 100 + key * 50; /* the largest exceed the budget */
}

static void use(struct open_file_cache *cache, uint64_t key)
{
    struct cached_file *sample;
    enum file_cache_result result = find(cache, key, &sample);
    if (result == FILE_CACHE_MISS) {
        int code = file_cache_begin(cache, key, bytes_of(key), key % 3 == 0, &sample);
        if (code < 0) {
            CHECK(code == -EEXIST || code == -EAGAIN);
            return;
        }
        memset(sample->copy, (int)key, sample->bytes);
        struct read_request *request = file_cache_finish(cache, sample, key % 7 != 0);
        while (request != NULL) {
            struct read_request *next = request->next;
            CHECK_EQ(request->offset, key);
            free(request);
            request = next;
        }
        if (key % 7 == 0) {
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
    file_cache_expire(cache, 0);
    CHECK_EQ(file_cache_bytes(cache), 0);
}

int main(void)
{
    struct open_file_cache *cache;
    CHECK_EQ(file_cache_create(BUDGET, &cache), 0);
    test_hits_until_eviction(cache);
    test_unrequested_samples_are_found(cache);
    test_queued_requests_are_returned(cache);
    test_failures_are_not_cached(cache);
    test_budget(cache);
    test_large(cache);
    test_order_of_waiters(cache);
    test_threads_share(cache);
    load(cache, 1, 10); /* freed by file_cache_destroy */
    file_cache_destroy(cache);
    file_cache_destroy(NULL);
    return 0;
}
