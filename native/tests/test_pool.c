/* The pool: every buffer once, wrong releases refused, many threads at once. */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "check.h"

#define COUNT 8u
#define BYTES 1536u
#define THREADS 4
#define TURNS 5000

static void one_thread(void)
{
    dlfs_pool *pool;
    CHECK_EQ(dlfs_pool_create(BYTES, COUNT, &pool), 0);
    uint8_t *base = dlfs_pool_base(pool);
    CHECK_EQ(dlfs_pool_bytes(pool), BYTES * COUNT);
    void *buffers[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK_EQ(dlfs_pool_free_count(pool), COUNT - i);
        CHECK_EQ(dlfs_pool_acquire(pool, &buffers[i]), 0);
        CHECK((uint8_t *)buffers[i] == base + i * BYTES);
    }
    void *none = base;
    CHECK_EQ(dlfs_pool_acquire(pool, &none), -EAGAIN);
    CHECK(none == base);
    CHECK_EQ(dlfs_pool_release(pool, base + 1), -EINVAL);
    CHECK_EQ(dlfs_pool_release(pool, base - BYTES), -EINVAL);
    CHECK_EQ(dlfs_pool_release(pool, base + COUNT * BYTES), -EINVAL);
    CHECK_EQ(dlfs_pool_release(pool, NULL), -EINVAL);
    CHECK_EQ(dlfs_pool_release(pool, buffers[3]), 0);
    CHECK_EQ(dlfs_pool_release(pool, buffers[3]), -EINVAL);
    CHECK_EQ(dlfs_pool_acquire(pool, &none), 0);
    CHECK(none == buffers[3]);
    dlfs_pool_destroy(pool);
}

static void *take_and_give(void *argument)
{
    dlfs_pool *pool = argument;
    for (int turn = 0; turn < TURNS; turn++) {
        uint8_t *buffer;
        if (dlfs_pool_acquire(pool, (void **)&buffer) == 0) {
            memset(buffer, turn & 0xff, BYTES);
            CHECK(buffer[0] == (turn & 0xff) && buffer[BYTES - 1] == (turn & 0xff));
            CHECK_EQ(dlfs_pool_release(pool, buffer), 0);
        }
    }
    return NULL;
}

static void many_threads(void)
{
    dlfs_pool *pool;
    CHECK_EQ(dlfs_pool_create(BYTES, THREADS - 1, &pool), 0);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, take_and_give, pool), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_EQ(dlfs_pool_free_count(pool), THREADS - 1);
    dlfs_pool_destroy(pool);
}

int main(void)
{
    dlfs_pool *pool = NULL;
    CHECK_EQ(dlfs_pool_create(0, 1, &pool), -EINVAL);
    CHECK_EQ(dlfs_pool_create(100, 1, &pool), -EINVAL);
    CHECK_EQ(dlfs_pool_create(512, 0, &pool), -EINVAL);
    CHECK_EQ(dlfs_pool_create((size_t)1 << 60, 1u << 31, &pool), -ENOMEM);
    CHECK_EQ(dlfs_pool_create((size_t)1 << 60, 1, &pool), -ENOMEM);
    CHECK(pool == NULL);
    dlfs_pool_destroy(NULL);
    one_thread();
    many_threads();
    return 0;
}
