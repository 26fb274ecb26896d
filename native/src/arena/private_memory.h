/* Memory of batches that do not lie in the arena. */
#ifndef DLFS_PRIVATE_MEMORY_H
#define DLFS_PRIVATE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "dlfs/dlfs.h"

struct dlfs_share;

struct private_memory {
    uint8_t *base;
    size_t bytes;        /* that were asked for */
    size_t mapped_bytes; /* length of the mapping; 0 if the memory is malloc's */
    dlfs_arena *arena;
    struct dlfs_share *share; /* the budget that is charged, or NULL */
    uint32_t references;
    struct private_memory *next; /* in the arena's list of idle ones */
};

/*
 * Allocates at least one byte, aligned for every device, with one reference. Charges the share,
 * unless it is NULL. Returns DLFS_E_LIMIT if the share's budget is exceeded, or -ENOMEM.
 */
int private_memory_take(dlfs_reader *reader, size_t bytes, struct dlfs_share *share,
                        struct private_memory **out);
/* Gives up a reference. */
void private_memory_release(struct private_memory *memory);
/* Frees the idle ones. */
void private_memory_free_all(dlfs_arena *arena);

#endif
