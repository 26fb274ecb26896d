/*
 * A user first increments `users` and then reads the state; the withdrawal first sets the state and
 * then reads `users`. So either the user sees that the dataset is withdrawn, or the withdrawal
 * waits for the user. Readers are replaced in the same way: a user first counts its read and then
 * reads which reader is present; the replacement first sets the present one and then reads the
 * count.
 */
#include "dataset.h"

#include <errno.h>

void dataset_table_init(struct dataset_table *table, struct upcall_queue *upcalls)
{
    (void)pthread_mutex_init(&table->lock, NULL);
    (void)pthread_cond_init(&table->unused, NULL);
    table->upcalls = upcalls;
}

void dataset_table_destroy(struct dataset_table *table)
{
    (void)pthread_cond_destroy(&table->unused);
    (void)pthread_mutex_destroy(&table->lock);
}

static uint32_t state_of(struct dataset_entry *dataset)
{
    return atomic_load(&dataset->state);
}

bool is_above_datasets(struct dataset_table *table, uint64_t inode)
{
    struct inode parts = inode_unpack(inode);
    return parts.dataset == 0 || (parts.node.depth == DATASET_DEPTH &&
                                  state_of(&table->entries[parts.dataset]) == DATASET_ABSENT);
}

int dataset_find(struct dataset_table *table, uint32_t number, struct dataset_entry **out)
{
    if (!is_dataset_number(number)) {
        return ESTALE;
    }
    struct dataset_entry *dataset = &table->entries[number];
    uint32_t state = state_of(dataset);
    if (state != DATASET_REGISTERED && state != DATASET_OPEN) {
        return ESTALE;
    }
    *out = dataset;
    return 0;
}

int dataset_acquire(struct dataset_table *table, uint32_t number, struct dataset_entry **out)
{
    struct dataset_entry *dataset;
    int error = dataset_find(table, number, &dataset);
    if (error == 0 && state_of(dataset) == DATASET_REGISTERED) {
        struct upcall upcall = {
            .request = {.kind = DLFS_FUSE_UPCALL_OPEN_DATASET, .dataset = number}};
        error = upcall_send(table->upcalls, &upcall);
    }
    if (error != 0) {
        return error;
    }
    (void)atomic_fetch_add(&dataset->users, 1);
    if (state_of(dataset) != DATASET_OPEN) {
        dataset_release(table, dataset);
        return ESTALE;
    }
    *out = dataset;
    return 0;
}

void dataset_release(struct dataset_table *table, struct dataset_entry *dataset)
{
    if (atomic_fetch_sub(&dataset->users, 1) > 1 || state_of(dataset) == DATASET_OPEN) {
        return;
    }
    (void)pthread_mutex_lock(&table->lock);
    (void)pthread_cond_broadcast(&table->unused);
    (void)pthread_mutex_unlock(&table->lock);
}

dlfs_reader *dataset_take_reader(struct dataset_table *table, struct dataset_entry *dataset,
                                 uint32_t *reader_number)
{
    for (;;) {
        uint32_t present = atomic_load(&dataset->reader_number);
        (void)atomic_fetch_add(&dataset->reads[present % 2], 1);
        if (atomic_load(&dataset->reader_number) == present) {
            *reader_number = present;
            return dataset->readers[present % 2];
        }
        dataset_return_reader(table, dataset, present); /* the owner may wait for this count */
    }
}

void dataset_return_reader(struct dataset_table *table, struct dataset_entry *dataset,
                           uint32_t reader_number)
{
    if (atomic_fetch_sub(&dataset->reads[reader_number % 2], 1) > 1 ||
        atomic_load(&dataset->reader_number) == reader_number) {
        return;
    }
    (void)pthread_mutex_lock(&table->lock);
    (void)pthread_cond_broadcast(&table->unused);
    (void)pthread_mutex_unlock(&table->lock);
}

uint64_t dataset_share_bytes(struct dataset_table *table, struct dataset_entry *dataset)
{
    uint32_t number;
    uint64_t bytes = dlfs_reader_share_bytes(dataset_take_reader(table, dataset, &number));
    dataset_return_reader(table, dataset, number);
    return bytes;
}

bool dataset_has_memory(struct dataset_table *table, struct dataset_entry *dataset,
                        const uint8_t *memory)
{
    uint32_t number;
    uint64_t bytes;
    const void *base = NULL;
    int code = dlfs_reader_memory(dataset_take_reader(table, dataset, &number), &base, &bytes);
    dataset_return_reader(table, dataset, number);
    return code == 0 && memory == base;
}
