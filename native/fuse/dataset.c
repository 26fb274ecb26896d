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
        dataset->readers[0] = reader;
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

int dataset_replace_reader(struct dataset_table *table, uint32_t number, dlfs_reader *reader)
{
    if (!is_number(number) || reader == NULL) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &table->entries[number];
    (void)pthread_mutex_lock(&table->lock);
    uint32_t next = atomic_load(&dataset->reader_number) + 1;
    while (atomic_load(&dataset->reads[next % 2]) > 0) {
        (void)pthread_cond_wait(&table->unused, &table->lock);
    }
    bool open = state_of(dataset) == DATASET_OPEN;
    if (open) {
        dataset->readers[next % 2] = reader;
        atomic_store(&dataset->reader_number, next);
    }
    (void)pthread_mutex_unlock(&table->lock);
    return open ? 0 : -ESTALE;
}

int dataset_await_reader(struct dataset_table *table, uint32_t number, bool wait)
{
    if (!is_number(number)) {
        return -EINVAL;
    }
    struct dataset_entry *dataset = &table->entries[number];
    (void)pthread_mutex_lock(&table->lock);
    _Atomic uint32_t *before = &dataset->reads[(atomic_load(&dataset->reader_number) + 1) % 2];
    uint32_t reads = atomic_load(before);
    while (wait && reads > 0) {
        (void)pthread_cond_wait(&table->unused, &table->lock);
        reads = atomic_load(before);
    }
    (void)pthread_mutex_unlock(&table->lock);
    return reads > 0 ? 0 : 1;
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
