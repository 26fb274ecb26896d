/*
 * The open-file cache: whole, verified samples in memory.
 *
 * It keeps two kinds of samples: those that programs read in parts, and those that were read ahead.
 * Both share one budget; the least recently used sample is evicted first.
 *
 * A thread that requests a sample which another thread is reading does not wait. It queues its
 * request with the sample, and the reading thread answers all queued requests. So the first thread
 * is free for the next request, and the bytes wake no thread.
 *
 * Threads: any at once; one lock protects the whole cache.
 */
#ifndef DLFS_FUSE_OPEN_FILE_CACHE_H
#define DLFS_FUSE_OPEN_FILE_CACHE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "dlfs/dlfs.h"

#define FILE_CACHE_BUCKETS 4096u
/* Largest sample that is copied out of its batch; a larger one stays in the batch. */
#define FILE_CACHE_COPY_BYTES_MAX (UINT64_C(1) << 20)

/* A READ request for a part of a sample. */
struct read_request {
    void *request; /* the fuse_req_t to answer */
    uint64_t offset;
    uint64_t bytes;
    uint32_t moves; /* times that it was read again, since its dataset was moved */
    struct read_request *next;
};

enum cached_state { CACHED_LOADING, CACHED_READY };

struct cached_file {
    uint64_t key; /* the inode number of its file */
    uint64_t bytes;
    const uint8_t *data;
    uint8_t *copy; /* the memory behind data; NULL if data lies in the batch */
    dlfs_batch *batch;
    enum cached_state state;
    bool readahead;              /* it was read ahead and has not been requested yet */
    uint32_t pin_count;          /* threads that use the data */
    uint64_t sent_bytes;         /* bytes sent to the kernel so far */
    uint64_t used_ns;            /* time of the last use, by the monotonic clock */
    struct read_request *queued; /* requests to answer once it is loaded */
    struct cached_file *bucket_next;
    struct cached_file *newer;
    struct cached_file *older;
};

/* A thread that waits for memory; lies on the stack of that thread. */
struct memory_waiter {
    struct memory_waiter *next;
};

struct open_file_cache {
    pthread_mutex_t lock;
    pthread_cond_t freed;
    struct memory_waiter *waiters; /* in order of arrival: the first gets memory first */
    uint64_t budget_bytes;
    uint64_t bytes;
    struct cached_file *newest;
    struct cached_file *oldest;
    struct cached_file *buckets[FILE_CACHE_BUCKETS];
};

int file_cache_create(uint64_t budget_bytes, struct open_file_cache **out);
void file_cache_destroy(struct open_file_cache *cache);

enum file_cache_result {
    FILE_CACHE_MISS,   /* not in the cache */
    FILE_CACHE_HIT,    /* *out is the sample, pinned: call file_cache_unpin */
    FILE_CACHE_QUEUED, /* the thread that reads the sample will answer the request */
    FILE_CACHE_NO_MEMORY,
};
/* Finds a sample for a request. *was_readahead: this is the first request for a sample read ahead.
 */
enum file_cache_result file_cache_find(struct open_file_cache *cache, uint64_t key,
                                       const struct read_request *request, bool *was_readahead,
                                       struct cached_file **out);
/* Returns true if a sample is in the cache or being read into it. */
bool file_cache_has(struct open_file_cache *cache, uint64_t key);
/* Returns a sample that was read ahead and not requested yet, pinned: call file_cache_unpin. NULL:
 * there is none. */
struct cached_file *file_cache_find_unrequested(struct open_file_cache *cache, uint64_t key);
/*
 * Adds a sample that the caller will read: into copy, or, if copy is NULL (the sample is large, or
 * in_place), by setting data and batch. Then call file_cache_finish. When memory is short, a
 * read-ahead fails and any other call waits in order of arrival; so a sample larger than the
 * budget, which is cached alone, is not overtaken by small ones without end. Errors: -EEXIST, the
 * sample is in the cache by now; -EAGAIN, no memory for a read-ahead; -ENOMEM.
 */
int file_cache_begin(struct open_file_cache *cache, uint64_t key, uint64_t bytes, bool readahead,
                     struct cached_file **out);
/*
 * Ends the reading of a sample and returns the queued requests, which the caller answers and frees.
 * If it was read (loaded), the caller has pinned it. If not, the sample is gone.
 */
struct read_request *file_cache_finish(struct open_file_cache *cache, struct cached_file *sample,
                                       bool loaded);
/*
 * Unpins a sample of which sent_bytes more were sent to the kernel. Once all bytes of a sample were
 * sent, the kernel caches it, and it is freed with its last pin.
 */
void file_cache_unpin(struct open_file_cache *cache, struct cached_file *sample,
                      uint64_t sent_bytes);
/* Frees samples that were last used at least age_ns ago. */
void file_cache_expire(struct open_file_cache *cache, uint64_t age_ns);
uint64_t file_cache_bytes(struct open_file_cache *cache);

#endif
