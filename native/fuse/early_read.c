/*
 * The early read: one read under a lock. It is given up under that lock, which needs no wait: so
 * when early_read_drop returns, no thread uses the reader for it any more.
 */
#include "early_read.h"

void early_read_init(struct early_read *early, struct dataset_table *datasets)
{
    (void)pthread_mutex_init(&early->lock, NULL);
    atomic_init(&early->present, false);
    early->datasets = datasets;
}

void early_read_destroy(struct early_read *early)
{
    early_read_drop(early);
    (void)pthread_mutex_destroy(&early->lock);
}

/* Puts a read in the place of the present one, which it gives up. The lock is held. */
static void replace(struct early_read *early, struct begun with)
{
    struct begun before = early->begun;
    early->begun = with;
    atomic_store_explicit(&early->present, with.read != NULL, memory_order_relaxed);
    if (before.read != NULL) {
        dlfs_begun_read_cancel(before.read);
        dataset_return_reader(early->datasets, before.dataset, before.reader);
    }
}

bool early_read_begin(struct early_read *early, struct dataset_entry *dataset, uint64_t index)
{
    early_read_drop(early); /* also for its queue pair */
    struct begun begun = {.dataset = dataset, .index = index};
    dlfs_reader *reader = dataset_take_reader(early->datasets, dataset, &begun.reader);
    if (dlfs_reader_begin(reader, index, &begun.read) < 0) {
        dataset_return_reader(early->datasets, dataset, begun.reader);
        return false;
    }
    (void)pthread_mutex_lock(&early->lock);
    replace(early, begun);
    (void)pthread_mutex_unlock(&early->lock);
    if (!dataset_has_reader(dataset, begun.reader)) {
        early_read_drop(early); /* its replacement has looked before: it waits for this reader */
    }
    return true;
}

dlfs_begun_read *early_read_take(struct early_read *early, const struct dataset_entry *dataset,
                                 uint64_t index, uint32_t *reader)
{
    if (!atomic_load_explicit(&early->present, memory_order_relaxed)) {
        return NULL;
    }
    dlfs_begun_read *read = NULL;
    (void)pthread_mutex_lock(&early->lock);
    struct begun *begun = &early->begun;
    if (begun->dataset == dataset && begun->index == index) {
        *reader = begun->reader;
        read = begun->read;
        begun->read = NULL;
    }
    replace(early, (struct begun){0});
    (void)pthread_mutex_unlock(&early->lock);
    return read;
}

void early_read_drop(struct early_read *early)
{
    (void)pthread_mutex_lock(&early->lock);
    replace(early, (struct begun){0});
    (void)pthread_mutex_unlock(&early->lock);
}
