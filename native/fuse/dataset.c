/*
 * A user first increments `users` and then reads the state; the withdrawal first sets the state and
 * then reads `users`. So either the user sees that the dataset is withdrawn, or the withdrawal
 * waits for the user.
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

static bool is_number(uint32_t number)
{
    return number >= 1 && number <= DLFS_FUSE_DATASET_MAX;
}

static uint32_t state_of(struct dataset_entry *dataset)
{
    return atomic_load(&dataset->state);
}

/* ---- the mount's side ------------------------------------------------------------------------ */

int dataset_find(struct dataset_table *table, uint32_t number, struct dataset_entry **out)
{
    if (!is_number(number)) {
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

/* ---- the owner's side ------------------------------------------------------------------------ */

int dataset_add(struct dataset_table *table, const dlfs_fuse_dataset *info)
{
    if (!is_number(info->number)) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &table->entries[info->number];
    (void)pthread_mutex_lock(&table->lock);
    if (state_of(dataset) == DATASET_ABSENT) {
        dataset->info = *info;
        atomic_store(&dataset->state, DATASET_REGISTERED);
    }
    (void)pthread_mutex_unlock(&table->lock);
    return 0;
}

int dataset_open(struct dataset_table *table, uint32_t number, const dlfs_directory *directory,
                 dlfs_reader *reader)
{
    if (!is_number(number) || directory == NULL || reader == NULL) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &table->entries[number];
    (void)pthread_mutex_lock(&table->lock);
    uint32_t state = state_of(dataset);
    if (state == DATASET_REGISTERED) {
        dataset->directory = directory;
        dataset->reader = reader;
        dataset->locations = dlfs_directory_locations(directory);
        dataset->count = dlfs_directory_count(directory);
        atomic_store(&dataset->state, DATASET_OPEN);
    }
    (void)pthread_mutex_unlock(&table->lock);
    if (state == DATASET_WITHDRAWN) {
        return -ESTALE;
    }
    return state == DATASET_ABSENT ? -EINVAL : 0;
}

int dataset_withdraw(struct dataset_table *table, uint32_t number)
{
    if (!is_number(number)) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &table->entries[number];
    (void)pthread_mutex_lock(&table->lock);
    atomic_store(&dataset->state, DATASET_WITHDRAWN);
    while (atomic_load(&dataset->users) > 0) {
        (void)pthread_cond_wait(&table->unused, &table->lock);
    }
    (void)pthread_mutex_unlock(&table->lock);
    return 0;
}
