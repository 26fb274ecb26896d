/*
 * Batches that are released by another thread than the one that reads, while it goes on reading,
 * and after their reader, its directory and its devices are gone.
 */
#include "reader/reader_tests.h"

#include <pthread.h>

#define MEMORY (32u * CHUNK)
#define BATCH 10u
#define BATCHES 400u
#define QUEUE 4u

/* Batches on their way from the reading thread to the releasing one. */
struct channel {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    dlfs_batch *batches[QUEUE];
    uint32_t count;
    bool ended;
};

static void put(struct channel *channel, dlfs_batch *batch)
{
    pthread_mutex_lock(&channel->lock);
    while (channel->count == QUEUE) {
        pthread_cond_wait(&channel->changed, &channel->lock);
    }
    if (batch != NULL) {
        channel->batches[channel->count++] = batch;
    } else {
        channel->ended = true;
    }
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->lock);
}

/* Returns the batch that was added last; NULL at the end. */
static dlfs_batch *take(struct channel *channel)
{
    dlfs_batch *batch = NULL;
    pthread_mutex_lock(&channel->lock);
    while (channel->count == 0 && !channel->ended) {
        pthread_cond_wait(&channel->changed, &channel->lock);
    }
    if (channel->count > 0) {
        batch = channel->batches[--channel->count];
    }
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->lock);
    return batch;
}

static void check_batch(const dlfs_batch *batch)
{
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < batch->count; i++) {
        check_sample(batch, i);
    }
}

static void *release_all(void *argument)
{
    dlfs_batch *batch;
    while ((batch = take(argument)) != NULL) {
        check_batch(batch);
        dlfs_batch_release(batch);
    }
    return NULL;
}

static dlfs_batch *read_some(dlfs_reader *reader, uint64_t number)
{
    uint64_t indices[BATCH];
    dlfs_batch *batch;
    for (uint64_t i = 0; i < BATCH; i++) {
        indices[i] = (number * 37 + i * 11) % COUNT;
    }
    CHECK_EQ(dlfs_reader_read(reader, indices, BATCH, &batch), 0);
    return batch;
}

int main(void)
{
    struct dataset dataset;
    struct channel channel = {.lock = PTHREAD_MUTEX_INITIALIZER,
                              .changed = PTHREAD_COND_INITIALIZER};
    pthread_t threads[2];
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, MEMORY, 0);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, release_all, &channel), 0);
    }
    for (uint64_t number = 0; number < BATCHES; number++) {
        put(&channel, read_some(reader, number));
    }
    dlfs_batch *last[2] = {read_some(reader, 1), read_some(reader, 2)};
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
    for (uint32_t i = 0; i < 2; i++) {
        put(&channel, last[i]);
    }
    put(&channel, NULL);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    dlfs_batch_release(NULL);
    return 0;
}
