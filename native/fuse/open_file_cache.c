/*
 * The open-file cache: a hash table by key and a list by time of use, under one lock.
 *
 * A sample counts with its whole size from the moment its reading begins, so the budget holds at
 * all times. Eviction passes over samples that are being read or are pinned.
 */
#include "open_file_cache.h"

#include <errno.h>
#include <stdlib.h>

#include "platform/clock.h"

int file_cache_create(uint64_t budget_bytes, struct open_file_cache **out)
{
    struct open_file_cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_init(&cache->lock, NULL);
    (void)pthread_cond_init(&cache->freed, NULL);
    cache->budget_bytes = budget_bytes;
    *out = cache;
    return 0;
}

/* ---- list and hash table; the caller has the lock -------------------------------------------- */

static struct cached_file **bucket_of(struct open_file_cache *cache, uint64_t key)
{
    uint64_t mixed = key * UINT64_C(0x9E3779B97F4A7C15);
    return &cache->buckets[(mixed >> 32) % FILE_CACHE_BUCKETS];
}

static struct cached_file *find(struct open_file_cache *cache, uint64_t key)
{
    struct cached_file *sample = *bucket_of(cache, key);
    while (sample != NULL && sample->key != key) {
        sample = sample->bucket_next;
    }
    return sample;
}

static void unlink_sample(struct open_file_cache *cache, struct cached_file *sample)
{
    *(sample->newer != NULL ? &sample->newer->older : &cache->newest) = sample->older;
    *(sample->older != NULL ? &sample->older->newer : &cache->oldest) = sample->newer;
}

static void link_newest(struct open_file_cache *cache, struct cached_file *sample)
{
    sample->newer = NULL;
    sample->older = cache->newest;
    *(cache->newest != NULL ? &cache->newest->newer : &cache->oldest) = sample;
    cache->newest = sample;
    sample->used_ns = monotonic_coarse_ns();
}

static void remove_sample(struct open_file_cache *cache, struct cached_file *sample)
{
    struct cached_file **at = bucket_of(cache, sample->key);
    while (*at != sample) {
        at = &(*at)->bucket_next;
    }
    *at = sample->bucket_next;
    unlink_sample(cache, sample);
    cache->bytes -= sample->bytes;
    dlfs_batch_release(sample->batch);
    free(sample->copy);
    free(sample);
    (void)pthread_cond_broadcast(&cache->freed);
}

static bool is_evictable(const struct cached_file *sample)
{
    return sample->state == CACHED_READY && sample->pin_count == 0;
}

/* Evicts samples as needed. Returns true if a sample of this size may be added now. */
static bool make_room(struct open_file_cache *cache, uint64_t bytes)
{
    struct cached_file *sample = cache->oldest;
    while (sample != NULL && cache->bytes + bytes > cache->budget_bytes) {
        struct cached_file *next = sample->newer;
        if (is_evictable(sample)) {
            remove_sample(cache, sample);
        }
        sample = next;
    }
    return cache->bytes + bytes <= cache->budget_bytes || cache->bytes == 0;
}

/*
 * Waits until there is memory for a sample, behind threads that came before, or until another
 * thread has added the sample. Returns -EAGAIN instead of waiting for a read-ahead.
 */
static int wait_for_room(struct open_file_cache *cache, uint64_t key, uint64_t bytes,
                         bool readahead)
{
    if (cache->waiters == NULL && make_room(cache, bytes)) {
        return 0;
    }
    if (readahead) {
        return -EAGAIN;
    }
    struct memory_waiter mine = {NULL};
    struct memory_waiter **at = &cache->waiters;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = &mine;
    while (find(cache, key) == NULL && !(cache->waiters == &mine && make_room(cache, bytes))) {
        (void)pthread_cond_wait(&cache->freed, &cache->lock);
    }
    for (at = &cache->waiters; *at != &mine;) {
        at = &(*at)->next;
    }
    *at = mine.next;
    (void)pthread_cond_broadcast(&cache->freed);
    return 0;
}

/* ---- the interface --------------------------------------------------------------------------- */

void file_cache_destroy(struct open_file_cache *cache)
{
    if (cache == NULL) {
        return;
    }
    while (cache->newest != NULL) {
        remove_sample(cache, cache->newest);
    }
    (void)pthread_cond_destroy(&cache->freed);
    (void)pthread_mutex_destroy(&cache->lock);
    free(cache);
}

static enum file_cache_result queue_request(struct cached_file *sample,
                                            const struct read_request *request)
{
    struct read_request *copy = malloc(sizeof *copy);
    if (copy == NULL) {
        return FILE_CACHE_NO_MEMORY;
    }
    *copy = *request;
    copy->next = sample->queued;
    sample->queued = copy;
    return FILE_CACHE_QUEUED;
}

enum file_cache_result file_cache_find(struct open_file_cache *cache, uint64_t key,
                                       const struct read_request *request, bool *was_readahead,
                                       struct cached_file **out)
{
    enum file_cache_result result = FILE_CACHE_MISS;
    (void)pthread_mutex_lock(&cache->lock);
    struct cached_file *sample = find(cache, key);
    *was_readahead = sample != NULL && sample->readahead;
    if (sample != NULL && sample->state == CACHED_READY) {
        unlink_sample(cache, sample);
        link_newest(cache, sample);
        sample->pin_count++;
        *out = sample;
        result = FILE_CACHE_HIT;
    } else if (sample != NULL) {
        result = queue_request(sample, request);
    }
    if (sample != NULL) {
        sample->readahead = false;
    }
    (void)pthread_mutex_unlock(&cache->lock);
    return result;
}

bool file_cache_has(struct open_file_cache *cache, uint64_t key)
{
    (void)pthread_mutex_lock(&cache->lock);
    bool found = find(cache, key) != NULL;
    (void)pthread_mutex_unlock(&cache->lock);
    return found;
}

struct cached_file *file_cache_find_unrequested(struct open_file_cache *cache, uint64_t key)
{
    (void)pthread_mutex_lock(&cache->lock);
    struct cached_file *sample = find(cache, key);
    if (sample != NULL && (!sample->readahead || sample->state != CACHED_READY)) {
        sample = NULL;
    }
    if (sample != NULL) {
        sample->pin_count++;
    }
    (void)pthread_mutex_unlock(&cache->lock);
    return sample;
}

static int begin(struct open_file_cache *cache, uint64_t key, uint64_t bytes, bool readahead,
                 struct cached_file **out)
{
    int code = find(cache, key) == NULL ? wait_for_room(cache, key, bytes, readahead) : -EEXIST;
    if (code == 0 && find(cache, key) != NULL) {
        code = -EEXIST;
    }
    if (code < 0) {
        return code;
    }
    struct cached_file *sample = calloc(1, sizeof *sample);
    bool copied = bytes <= FILE_CACHE_COPY_BYTES_MAX;
    uint8_t *copy = copied ? malloc(bytes + 1) : NULL;
    if (sample == NULL || (copied && copy == NULL)) {
        free(sample);
        free(copy);
        return -ENOMEM;
    }
    sample->key = key;
    sample->bytes = bytes;
    sample->data = sample->copy = copy;
    sample->readahead = readahead;
    struct cached_file **bucket = bucket_of(cache, key);
    sample->bucket_next = *bucket;
    *bucket = sample;
    link_newest(cache, sample);
    cache->bytes += bytes;
    *out = sample;
    return 0;
}

int file_cache_begin(struct open_file_cache *cache, uint64_t key, uint64_t bytes, bool readahead,
                     struct cached_file **out)
{
    (void)pthread_mutex_lock(&cache->lock);
    int code = begin(cache, key, bytes, readahead, out);
    (void)pthread_mutex_unlock(&cache->lock);
    return code;
}

struct read_request *file_cache_finish(struct open_file_cache *cache, struct cached_file *sample,
                                       bool loaded)
{
    (void)pthread_mutex_lock(&cache->lock);
    struct read_request *queued = sample->queued;
    sample->queued = NULL;
    if (loaded) {
        sample->state = CACHED_READY;
        sample->pin_count = 1;
    } else {
        remove_sample(cache, sample);
    }
    (void)pthread_mutex_unlock(&cache->lock);
    return queued;
}

void file_cache_unpin(struct open_file_cache *cache, struct cached_file *sample,
                      uint64_t sent_bytes)
{
    (void)pthread_mutex_lock(&cache->lock);
    sample->sent_bytes += sent_bytes;
    if (--sample->pin_count == 0) {
        if (sample->sent_bytes >= sample->bytes) {
            remove_sample(cache, sample);
        } else {
            (void)pthread_cond_broadcast(&cache->freed);
        }
    }
    (void)pthread_mutex_unlock(&cache->lock);
}

void file_cache_expire(struct open_file_cache *cache, uint64_t age_ns)
{
    (void)pthread_mutex_lock(&cache->lock);
    uint64_t now = monotonic_coarse_ns();
    struct cached_file *sample = cache->oldest;
    while (sample != NULL && now - sample->used_ns >= age_ns) {
        struct cached_file *next = sample->newer;
        if (is_evictable(sample)) {
            remove_sample(cache, sample);
        }
        sample = next;
    }
    (void)pthread_mutex_unlock(&cache->lock);
}

uint64_t file_cache_bytes(struct open_file_cache *cache)
{
    (void)pthread_mutex_lock(&cache->lock);
    uint64_t bytes = cache->bytes;
    (void)pthread_mutex_unlock(&cache->lock);
    return bytes;
}
