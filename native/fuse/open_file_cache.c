/*
 * The open-file cache: a hash table by key and a list by time of use, under one lock.
 *
 * A batch counts with what it may pin from the moment its reading begins, so a dataset keeps to its
 * bound at all times. Eviction passes over samples that are being read or are pinned. Batches are
 * released without the lock.
 */
#include "open_file_cache.h"

#include <stdlib.h>

#include "platform/clock.h"

void file_cache_init(struct open_file_cache *cache)
{
    (void)pthread_mutex_init(&cache->lock, NULL);
}

/* Gives up the lock, and then releases the batches that no sample in the cache uses. */
static void unlock(struct open_file_cache *cache)
{
    struct pinned_batch *unused = cache->unused;
    cache->unused = NULL;
    (void)pthread_mutex_unlock(&cache->lock);
    while (unused != NULL) {
        struct pinned_batch *next = unused->next;
        dlfs_batch_release(unused->batch);
        free(unused);
        unused = next;
    }
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

static void leave_batch(struct open_file_cache *cache, struct pinned_batch *pinned)
{
    if (pinned != NULL && --pinned->users == 0) {
        cache->bytes -= pinned->bytes;
        pinned->pins->bytes -= pinned->bytes;
        pinned->next = cache->unused;
        cache->unused = pinned;
    }
}

static void remove_sample(struct open_file_cache *cache, struct cached_file *sample)
{
    struct cached_file **at = bucket_of(cache, sample->key);
    while (*at != sample) {
        at = &(*at)->bucket_next;
    }
    *at = sample->bucket_next;
    unlink_sample(cache, sample);
    leave_batch(cache, sample->pinned);
    free(sample);
}

static bool is_evictable(const struct cached_file *sample)
{
    return sample->state == CACHED_READY && sample->pin_count == 0;
}

/* Evicts samples of a dataset until its batches may pin this much more. Returns true if they may.
 */
static bool make_room(struct open_file_cache *cache, const struct pins *pins, uint64_t bytes,
                      uint64_t bytes_max)
{
    struct cached_file *sample = cache->oldest;
    while (sample != NULL && pins->bytes + bytes > bytes_max) {
        struct cached_file *next = sample->newer;
        if (is_evictable(sample) && sample->pinned->pins == pins) {
            remove_sample(cache, sample);
        }
        sample = next;
    }
    return pins->bytes + bytes <= bytes_max;
}

/* ---- the interface --------------------------------------------------------------------------- */

void file_cache_destroy(struct open_file_cache *cache)
{
    (void)pthread_mutex_lock(&cache->lock);
    while (cache->newest != NULL) {
        remove_sample(cache, cache->newest);
    }
    unlock(cache);
    (void)pthread_mutex_destroy(&cache->lock);
}

static bool queue_request(struct cached_file *sample, const struct read_request *request)
{
    struct read_request *copy = malloc(sizeof *copy);
    if (copy != NULL) {
        *copy = *request;
        copy->next = sample->queued;
        sample->queued = copy;
    }
    return copy != NULL;
}

/* Adds a sample that is to be read, with a request. Returns NULL without memory. */
static struct cached_file *add(struct open_file_cache *cache, uint64_t key, uint64_t bytes,
                               const struct read_request *request)
{
    struct cached_file *sample = calloc(1, sizeof *sample);
    if (sample == NULL || (request != NULL && !queue_request(sample, request))) {
        free(sample);
        return NULL;
    }
    sample->key = key;
    sample->bytes = bytes;
    sample->readahead = request == NULL;
    struct cached_file **bucket = bucket_of(cache, key);
    sample->bucket_next = *bucket;
    *bucket = sample;
    link_newest(cache, sample);
    return sample;
}

enum file_cache_result file_cache_find(struct open_file_cache *cache, uint64_t key, uint64_t bytes,
                                       const struct read_request *request, struct cached_file **out)
{
    enum file_cache_result result = FILE_CACHE_QUEUED;
    (void)pthread_mutex_lock(&cache->lock);
    struct cached_file *sample = find(cache, key);
    if (sample == NULL) {
        *out = add(cache, key, bytes, request);
        result = *out != NULL ? FILE_CACHE_MISS : FILE_CACHE_NO_MEMORY;
    } else if (request != NULL) {
        cache->readahead_hits += sample->readahead;
        sample->readahead = false;
        if (sample->state == CACHED_READY) {
            unlink_sample(cache, sample);
            link_newest(cache, sample);
            sample->pin_count++;
            *out = sample;
            result = FILE_CACHE_HIT;
        } else if (!queue_request(sample, request)) {
            result = FILE_CACHE_NO_MEMORY;
        }
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

struct pinned_batch *file_cache_begin_batch(struct open_file_cache *cache, struct pins *pins,
                                            uint64_t bytes, uint64_t bytes_max)
{
    struct pinned_batch *pinned = calloc(1, sizeof *pinned);
    if (pinned == NULL) {
        return NULL;
    }
    *pinned = (struct pinned_batch){.pins = pins, .bytes = bytes, .users = 1};
    (void)pthread_mutex_lock(&cache->lock);
    bool room = make_room(cache, pins, bytes, bytes_max);
    if (room) {
        cache->bytes += bytes;
        pins->bytes += bytes;
    }
    unlock(cache);
    if (!room) {
        free(pinned);
        return NULL;
    }
    return pinned;
}

void file_cache_end_batch(struct open_file_cache *cache, struct pinned_batch *pinned)
{
    (void)pthread_mutex_lock(&cache->lock);
    leave_batch(cache, pinned);
    unlock(cache);
}

struct read_request *file_cache_finish(struct open_file_cache *cache, struct cached_file *sample,
                                       struct pinned_batch *pinned, const uint8_t *data)
{
    (void)pthread_mutex_lock(&cache->lock);
    struct read_request *queued = sample->queued;
    sample->queued = NULL;
    if (pinned != NULL) {
        sample->data = data;
        sample->pinned = pinned;
        pinned->users++;
        sample->state = CACHED_READY;
        sample->pin_count = 1;
    } else {
        remove_sample(cache, sample);
    }
    unlock(cache);
    return queued;
}

void file_cache_unpin(struct open_file_cache *cache, struct cached_file *sample,
                      uint64_t sent_bytes)
{
    (void)pthread_mutex_lock(&cache->lock);
    sample->sent_bytes += sent_bytes;
    if (--sample->pin_count == 0 && sample->sent_bytes >= sample->bytes) {
        remove_sample(cache, sample);
    }
    unlock(cache);
}

void file_cache_expire(struct open_file_cache *cache, const struct pins *pins, uint64_t age_ns)
{
    (void)pthread_mutex_lock(&cache->lock);
    uint64_t now = monotonic_coarse_ns();
    struct cached_file *sample = cache->oldest;
    while (sample != NULL && now - sample->used_ns >= age_ns) {
        struct cached_file *next = sample->newer;
        if (is_evictable(sample) && (pins == NULL || sample->pinned->pins == pins)) {
            remove_sample(cache, sample);
        }
        sample = next;
    }
    unlock(cache);
}

uint64_t file_cache_bytes(struct open_file_cache *cache)
{
    (void)pthread_mutex_lock(&cache->lock);
    uint64_t bytes = cache->bytes;
    (void)pthread_mutex_unlock(&cache->lock);
    return bytes;
}
