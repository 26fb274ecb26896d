/*
 * Memory of batches that do not lie in the arena.
 *
 * Samples of many MiB are read into mappings, of huge pages where the system has them. To touch
 * fresh pages costs as much as to read into them, so the arena keeps the mappings that were used
 * last for the next batches.
 */
#include "arena/private_memory.h"

#include <errno.h>
#include <stdlib.h>

#include "arena/share.h"
#include "platform/memory.h"
#include "reader/state.h"

#define ALIGN_MIN 4096u
#define MAPPED_BYTES_MIN ((size_t)2 << 20) /* larger memory is a mapping, aligned to this */
/* Bounds of what is kept between batches: a quarter of the arena. */
#define IDLE_BYTES_LEAST ((size_t)36 << 20) /* one mapping of 32 MiB */
#define IDLE_BYTES_MOST ((size_t)128 << 20)
#define WASTE_MAX 4u /* a mapping is at most so many times as large as what it is used for */

static size_t idle_bytes_max(const dlfs_arena *arena)
{
    uint64_t bytes = ((uint64_t)arena->slot_count << arena->chunk_shift) / 4;
    bytes = bytes < IDLE_BYTES_LEAST ? IDLE_BYTES_LEAST : bytes;
    return bytes > IDLE_BYTES_MOST ? IDLE_BYTES_MOST : (size_t)bytes;
}

/* Takes a mapping out of the list of idle ones. The lock is held. */
static struct private_memory *unlink_idle(dlfs_arena *arena, struct private_memory **place)
{
    struct private_memory *memory = *place;
    *place = memory->next;
    arena->idle_private_bytes -= memory->mapped_bytes;
    return memory;
}

/* Takes the smallest idle mapping that fits; NULL if there is none. The lock is held. */
static struct private_memory *take_idle(dlfs_arena *arena, size_t mapped_bytes)
{
    struct private_memory **best = NULL;
    for (struct private_memory **at = &arena->idle_private; *at != NULL; at = &(*at)->next) {
        bool fits =
            (*at)->mapped_bytes >= mapped_bytes && (*at)->mapped_bytes / WASTE_MAX <= mapped_bytes;
        if (fits && (best == NULL || (*at)->mapped_bytes < (*best)->mapped_bytes)) {
            best = at;
        }
    }
    return best == NULL ? NULL : unlink_idle(arena, best);
}

/*
 * Takes the mapping that was idle for longest, the last of the list, if more is idle than is kept;
 * NULL otherwise. The lock is held.
 */
static struct private_memory *take_excess(dlfs_arena *arena)
{
    if (arena->idle_private_bytes <= idle_bytes_max(arena)) {
        return NULL;
    }
    struct private_memory **last = &arena->idle_private;
    while ((*last)->next != NULL) {
        last = &(*last)->next;
    }
    return unlink_idle(arena, last);
}

static int allocate(const dlfs_reader *reader, size_t bytes, size_t mapped_bytes,
                    struct private_memory *memory)
{
    size_t alignment = reader->config.block_bytes;
    void *base = NULL;
    int code = mapped_bytes > 0
                   ? dlfs_memory_map(mapped_bytes, &base, NULL)
                   : -posix_memalign(&base, alignment > ALIGN_MIN ? alignment : ALIGN_MIN, bytes);
    memory->base = base;
    memory->mapped_bytes = mapped_bytes;
    return code;
}

int private_memory_take(dlfs_reader *reader, size_t bytes, struct dlfs_share *share,
                        struct private_memory **out)
{
    dlfs_arena *arena = reader->arena;
    size_t mapped_bytes = bytes < MAPPED_BYTES_MIN ? 0 : memory_length(bytes);
    if (!share_charge(share, bytes)) {
        return DLFS_E_LIMIT;
    }
    pthread_mutex_lock(&arena->lock);
    struct private_memory *memory = mapped_bytes > 0 ? take_idle(arena, mapped_bytes) : NULL;
    pthread_mutex_unlock(&arena->lock);
    if (memory == NULL) {
        memory = calloc(1, sizeof(*memory));
        if (memory == NULL || allocate(reader, bytes, mapped_bytes, memory) < 0) {
            free(memory);
            share_refund(share, bytes);
            return -ENOMEM;
        }
        memory->arena = arena;
    }
    share_reference(share);
    memory->share = share;
    memory->bytes = bytes;
    memory->references = 1;
    *out = memory;
    return 0;
}

static void private_memory_free(struct private_memory *memory)
{
    if (memory->mapped_bytes > 0) {
        dlfs_memory_unmap(memory->base, memory->mapped_bytes);
    } else {
        free(memory->base);
    }
    free(memory);
}

void private_memory_release(struct private_memory *memory)
{
    if (__atomic_sub_fetch(&memory->references, 1, __ATOMIC_ACQ_REL) > 0) {
        return;
    }
    dlfs_arena *arena = memory->arena;
    share_refund(memory->share, memory->bytes);
    dlfs_share_destroy(memory->share);
    if (memory->mapped_bytes == 0 || memory->mapped_bytes > idle_bytes_max(arena)) {
        private_memory_free(memory);
        return;
    }
    pthread_mutex_lock(&arena->lock);
    memory->next = arena->idle_private;
    arena->idle_private = memory;
    arena->idle_private_bytes += memory->mapped_bytes;
    while ((memory = take_excess(arena)) != NULL) {
        pthread_mutex_unlock(&arena->lock);
        private_memory_free(memory);
        pthread_mutex_lock(&arena->lock);
    }
    pthread_mutex_unlock(&arena->lock);
}

void private_memory_free_all(dlfs_arena *arena)
{
    while (arena->idle_private != NULL) {
        struct private_memory *next = arena->idle_private->next;
        private_memory_free(arena->idle_private);
        arena->idle_private = next;
    }
}
