/*
 * The datasets of a mount, by number: registered, opened on first use, at last withdrawn.
 *
 * The owner registers a dataset when its name is looked up, opens it when a thread first needs its
 * samples (an upcall), and withdraws it when it was removed from the volume. A withdrawn number is
 * never used again. When the samples were moved to other chunks, the owner replaces the reader;
 * reads under way end with the one before.
 *
 * Threads: any at once. The mount's threads use atomics only; the lock is the owner's and that of
 * the last user of a withdrawn dataset.
 */
#ifndef DLFS_FUSE_DATASET_H
#define DLFS_FUSE_DATASET_H

#include <pthread.h>
#include <stdatomic.h>

#include "dlfs_fuse.h"
#include "inode.h"
#include "open_file_cache.h"
#include "upcall.h"

enum dataset_state { DATASET_ABSENT, DATASET_REGISTERED, DATASET_OPEN, DATASET_WITHDRAWN };

/* One version of a dataset. Each field but those of readers is set before the state says so, and
 * then stays. */
struct dataset_entry {
    _Atomic uint32_t state; /* enum dataset_state */
    _Atomic uint32_t users; /* threads between dataset_acquire and dataset_release */
    uint32_t number;
    uint32_t version;
    uint32_t generation; /* distinguishes it from the same number in another mount */
    int64_t modified_ns; /* since 1970 */
    const dlfs_directory *directory;
    _Atomic uint32_t reader_number; /* of the present reader, counted from 0 */
    _Atomic uint32_t reads[2];      /* reads under way, by reader_number % 2 */
    dlfs_reader *readers[2];        /* the same; only the owner's side writes the other one */
    const dlfs_location *locations;
    uint64_t count;   /* samples */
    struct pins pins; /* of its open files; open_file_cache.c protects them */
};

struct dataset_table {
    pthread_mutex_t lock;
    pthread_cond_t unused; /* a withdrawn dataset has lost its last user */
    struct upcall_queue *upcalls;
    struct dataset_entry entries[DLFS_FUSE_DATASET_MAX + 1];
};

void dataset_table_init(struct dataset_table *table, struct upcall_queue *upcalls);
void dataset_table_destroy(struct dataset_table *table);

/* Functions return 0 or an errno > 0. */

/* Returns true if the owner answers for an inode, which lies above the datasets: the root, the link
 * `incoming`, or the directory of a volume. */
bool is_above_datasets(struct dataset_table *table, uint64_t inode);
/* Gets a registered dataset, of which directory, readers and samples may not
 * be used. ESTALE: unknown or withdrawn. */
int dataset_find(struct dataset_table *table, uint32_t number, struct dataset_entry **out);
/* Gets an open dataset and opens it if necessary. Call dataset_release afterwards. */
int dataset_acquire(struct dataset_table *table, uint32_t number, struct dataset_entry **out);
void dataset_release(struct dataset_table *table, struct dataset_entry *dataset);
/*
 * Gets the present reader of an open dataset, and its number, for one call. Call
 * dataset_return_reader with the number afterwards.
 */
dlfs_reader *dataset_take_reader(struct dataset_table *table, struct dataset_entry *dataset,
                                 uint32_t *reader_number);
void dataset_return_reader(struct dataset_table *table, struct dataset_entry *dataset,
                           uint32_t reader_number);
/* Returns the bytes of the sample memory that the dataset's reader may hold at present. */
uint64_t dataset_share_bytes(struct dataset_table *table, struct dataset_entry *dataset);
/* Returns true if the sample memory of the dataset's reader begins at this address. */
bool dataset_has_memory(struct dataset_table *table, struct dataset_entry *dataset,
                        const uint8_t *memory);
static inline bool is_dataset_number(uint32_t number)
{
    return number >= 1 && number <= DLFS_FUSE_DATASET_MAX;
}
/* Returns true if this is the number of the dataset's present reader. */
static inline bool dataset_has_reader(struct dataset_entry *dataset, uint32_t reader_number)
{
    return atomic_load(&dataset->reader_number) == reader_number;
}
static inline uint64_t dataset_length(const struct dataset_entry *dataset, uint64_t index)
{
    return dlfs_location_length(&dataset->locations[index]);
}

#endif
