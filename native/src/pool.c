/*
 * A pool of equal buffers in one mapping: a stack of free numbers and a byte of state for each,
 * under one mutex.
 *
 * The last buffer given back is the first handed out again, while its bytes are still in the
 * processor's cache.
 */
#include "dlfs/dlfs.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#define BUFFER_UNIT_BYTES 512u

struct dlfs_pool {
    pthread_mutex_t lock;
    uint8_t *base;
    size_t buffer_bytes;
    uint32_t buffer_count;
    uint32_t free_count;
    uint32_t *free; /* [free_count] numbers of free buffers, a stack */
    bool *taken;    /* [buffer_count] */
};

static int pool_allocate(dlfs_pool *pool)
{
    pool->free = calloc(pool->buffer_count, sizeof *pool->free);
    pool->taken = calloc(pool->buffer_count, sizeof *pool->taken);
    if (pool->free == NULL || pool->taken == NULL) {
        return -ENOMEM;
    }
    void *base;
    int code = dlfs_memory_map(pool->buffer_bytes * pool->buffer_count, &base, NULL);
    if (code == 0) {
        pool->base = base;
    }
    return code;
}

int dlfs_pool_create(size_t buffer_bytes, uint32_t buffer_count, dlfs_pool **out)
{
    if (buffer_bytes == 0 || buffer_bytes % BUFFER_UNIT_BYTES != 0 || buffer_count == 0) {
        return -EINVAL;
    }
    if (buffer_bytes > SIZE_MAX / 2 / buffer_count) {
        return -ENOMEM;
    }
    dlfs_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL) {
        return -ENOMEM;
    }
    pthread_mutex_init(&pool->lock, NULL); /* cannot fail with default attributes on Linux */
    pool->buffer_bytes = buffer_bytes;
    pool->buffer_count = buffer_count;
    int code = pool_allocate(pool);
    if (code < 0) {
        dlfs_pool_destroy(pool);
        return code;
    }
    /* The lowest numbers on top: a pool used lightly touches few pages. */
    for (uint32_t i = 0; i < buffer_count; i++) {
        pool->free[i] = buffer_count - 1 - i;
    }
    pool->free_count = buffer_count;
    *out = pool;
    return 0;
}

void dlfs_pool_destroy(dlfs_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    dlfs_memory_unmap(pool->base, dlfs_pool_bytes(pool));
    pthread_mutex_destroy(&pool->lock);
    free(pool->taken);
    free(pool->free);
    free(pool);
}

int dlfs_pool_acquire(dlfs_pool *pool, void **buffer)
{
    int code = -EAGAIN;
    pthread_mutex_lock(&pool->lock);
    if (pool->free_count > 0) {
        uint32_t number = pool->free[--pool->free_count];
        pool->taken[number] = true;
        *buffer = pool->base + (size_t)number * pool->buffer_bytes;
        code = 0;
    }
    pthread_mutex_unlock(&pool->lock);
    return code;
}

int dlfs_pool_release(dlfs_pool *pool, void *buffer)
{
    /* Wraps to a huge offset when the buffer lies before the pool. */
    uintptr_t offset = (uintptr_t)buffer - (uintptr_t)pool->base;
    if (offset >= dlfs_pool_bytes(pool) || offset % pool->buffer_bytes != 0) {
        return -EINVAL;
    }
    uint32_t number = (uint32_t)(offset / pool->buffer_bytes);
    int code = -EINVAL;
    pthread_mutex_lock(&pool->lock);
    if (pool->taken[number]) {
        pool->taken[number] = false;
        pool->free[pool->free_count++] = number;
        code = 0;
    }
    pthread_mutex_unlock(&pool->lock);
    return code;
}

void *dlfs_pool_base(const dlfs_pool *pool)
{
    return pool->base;
}

size_t dlfs_pool_bytes(const dlfs_pool *pool)
{
    return pool->buffer_bytes * pool->buffer_count;
}

uint32_t dlfs_pool_free_count(dlfs_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    uint32_t count = pool->free_count;
    pthread_mutex_unlock(&pool->lock);
    return count;
}
