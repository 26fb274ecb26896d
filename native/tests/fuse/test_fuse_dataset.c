/* Tests that the owner, which replaces readers of a dataset, waits for their uses and no longer. */
#include <pthread.h>

#include "check.h"
#include "mount.h"

#define THREADS 3u
#define REPLACEMENTS 200000u

static struct dlfs_fuse fuse;
static struct dataset_table *const table = &fuse.datasets;
static uint32_t readers[2]; /* in the place of readers: whether each one may be used */
static _Atomic bool ended;

static dlfs_reader *reader_of(uint32_t number)
{
    void *reader = &readers[number % 2];
    return reader;
}

static void *use(void *argument)
{
    (void)argument;
    while (!atomic_load(&ended)) {
        uint32_t number;
        dlfs_reader *reader = dataset_take_reader(table, &table->entries[1], &number);
        CHECK(reader == reader_of(number));
        CHECK_EQ(readers[number % 2], 1);
        dataset_return_reader(table, &table->entries[1], number);
    }
    return NULL;
}

static void *replace(void *argument)
{
    CHECK_EQ(dlfs_fuse_replace_reader(&fuse, 2, argument), 0);
    atomic_store(&ended, true);
    return NULL;
}

/* A replacement waits until the place of its reader is free. */
static void test_waiting(void)
{
    pthread_t thread;
    uint32_t number;
    struct dataset_entry *dataset = &table->entries[2];
    dataset->readers[0] = reader_of(0);
    atomic_store(&dataset->state, DATASET_OPEN);
    CHECK(dataset_take_reader(table, dataset, &number) == reader_of(0));
    CHECK_EQ(dlfs_fuse_replace_reader(&fuse, 2, reader_of(1)), 0);
    CHECK_EQ(pthread_create(&thread, NULL, replace, reader_of(0)), 0);
    CHECK(!atomic_load(&ended));
    CHECK_EQ(atomic_load(&dataset->reader_number), 1);
    dataset_return_reader(table, dataset, number);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(atomic_load(&dataset->reader_number), 2);
    atomic_store(&ended, false);
}

int main(void)
{
    pthread_t threads[THREADS];
    dataset_table_init(table, NULL);
    file_cache_init(&fuse.cache);
    test_waiting();
    readers[0] = 1;
    table->entries[1].readers[0] = reader_of(0);
    atomic_store(&table->entries[1].state, DATASET_OPEN);
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, use, NULL), 0);
    }
    for (uint32_t number = 1; number <= REPLACEMENTS; number++) {
        readers[number % 2] = 1;
        /* A thread may just find out that its reader is not the present one. */
        CHECK_EQ(dlfs_fuse_replace_reader(&fuse, 1, reader_of(number)), 0);
        CHECK_EQ(dlfs_fuse_await_reader(&fuse, 1, 1), 1);
        readers[(number + 1) % 2] = 0;
    }
    atomic_store(&ended, true);
    for (uint32_t i = 0; i < THREADS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    file_cache_destroy(&fuse.cache);
    dataset_table_destroy(table);
    return 0;
}
