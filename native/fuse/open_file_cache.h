/*
 * The open-file cache: whole, verified samples, in the slots of the arena that they were read into.
 *
 * It keeps two kinds of samples: those that programs read in parts, and those that were read ahead.
 * Their batches stay pinned, and so have no memory beside the arena. The batches of a dataset may
 * pin a part of its reader's share; the least recently used sample is evicted first.
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
#include "request.h"

#define FILE_CACHE_BUCKETS 4096u

/* A READ request for a part of a sample. */
struct read_request {
    struct reply_path reply;
    uint64_t offset;
    uint64_t bytes;
    uint32_t moves; /* times that it was read again, since its dataset was moved */
    struct read_request *next;
};

/* What the batches of a dataset pin. Protected by the cache's lock. */
struct pins {
    uint64_t bytes;
};

/* A batch that is pinned as long as samples of it are in the cache. */
struct pinned_batch {
    dlfs_batch *batch; /* NULL while it is being read */
    struct pins *pins;
    uint64_t bytes;            /* what it may pin */
    uint32_t users;            /* samples in the cache, and the thread that reads the batch */
    struct pinned_batch *next; /* of those to be released */
};

enum cached_state { CACHED_LOADING, CACHED_READY };

struct cached_file {
    uint64_t key; /* the inode number of its file */
    uint64_t bytes;
    const uint8_t *data;
    struct pinned_batch *pinned; /* where data lies; NULL while it is being read */
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

struct open_file_cache {
    pthread_mutex_t lock;
    uint64_t bytes;          /* what all batches may pin */
    uint64_t readahead_hits; /* samples that were requested after they were read ahead */
    struct cached_file *newest;
    struct cached_file *oldest;
    struct pinned_batch *unused; /* released as soon as the lock is */
    struct cached_file *buckets[FILE_CACHE_BUCKETS];
};

void file_cache_init(struct open_file_cache *cache);
void file_cache_destroy(struct open_file_cache *cache);

enum file_cache_result {
    FILE_CACHE_MISS,   /* *out was added: the caller reads it, and calls file_cache_finish */
    FILE_CACHE_HIT,    /* *out is the sample, pinned: call file_cache_unpin */
    FILE_CACHE_QUEUED, /* the thread that reads the sample will answer the request */
    FILE_CACHE_NO_MEMORY,
};
/*
 * Finds a sample of so many bytes for a request, which is queued unless it is a hit. Without a
 * request (NULL) the sample is to be read ahead, and nothing is done unless it is a miss.
 */
enum file_cache_result file_cache_find(struct open_file_cache *cache, uint64_t key, uint64_t bytes,
                                       const struct read_request *request,
                                       struct cached_file **out);
/* Returns true if a sample is in the cache or being read into it. */
bool file_cache_has(struct open_file_cache *cache, uint64_t key);

/*
 * Reserves this much of what the batches of a dataset may pin, bytes_max, for a batch that the
 * caller will read; evicts samples of the dataset as needed. Call file_cache_end_batch. Returns
 * NULL if there is no room, or no memory.
 */
struct pinned_batch *file_cache_begin_batch(struct open_file_cache *cache, struct pins *pins,
                                            uint64_t bytes, uint64_t bytes_max);
/* Ends the reading of a batch, which the cache releases once none of its samples is cached. NULL:
 * does nothing. */
void file_cache_end_batch(struct open_file_cache *cache, struct pinned_batch *pinned);
/*
 * Ends the reading of a sample and returns the queued requests, which the caller answers and frees.
 * With a batch, in which its data lies, the sample is cached, and pinned by the caller. With NULL
 * it is gone.
 */
struct read_request *file_cache_finish(struct open_file_cache *cache, struct cached_file *sample,
                                       struct pinned_batch *pinned, const uint8_t *data);
/*
 * Unpins a sample of which sent_bytes more were sent to the kernel. Once all bytes of a sample were
 * sent, the kernel caches it, and it is evicted with its last pin.
 */
void file_cache_unpin(struct open_file_cache *cache, struct cached_file *sample,
                      uint64_t sent_bytes);
/* Evicts samples that were last used at least age_ns ago: those of a dataset, or, with NULL, all.
 */
void file_cache_expire(struct open_file_cache *cache, const struct pins *pins, uint64_t age_ns);
uint64_t file_cache_bytes(struct open_file_cache *cache);

#endif
