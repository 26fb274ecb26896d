/*
 * Memory of batches that do not lie in the arena.
 *
 * Samples of many MiB are read into mappings, of huge pages where the system has them. To touch
 * fresh pages costs as much as to read into them, so the reader keeps some mappings for the next
 * batch.
 */
#include "reader/private_memory.h"

#include <errno.h>
#include <stdlib.h>

#include "platform/memory.h"
#include "reader/share.h"
#include "reader/state.h"

#define ALIGN_MIN 4096u
#define MAPPED_BYTES_MIN ((size_t)2 << 20)        /* larger memory is a mapping, aligned to this */
#define IDLE_PRIVATE_BYTES_MAX ((size_t)36 << 20) /* kept between batches: one of 32 MiB */

/* Takes an idle mapping that is large enough, but less than twice as large. The lock is held. */
static struct private_memory *take_idle(dlfs_reader *reader, size_t mapped_bytes)
{
    struct private_memory **at = &reader->idle_private;
    while (*at != NULL &&
           ((*at)->mapped_bytes < mapped_bytes || (*at)->mapped_bytes / 2 > mapped_bytes)) {
        at = &(*at)->next;
    }
    struct private_memory *memory = *at;
    if (memory != NULL) {
        *at = memory->next;
        reader->idle_private_bytes -= memory->mapped_bytes;
    }
    return memory;
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
    size_t mapped_bytes = bytes < MAPPED_BYTES_MIN ? 0 : memory_length(bytes);
    if (!share_charge(share, bytes)) {
        return DLFS_E_LIMIT;
    }
    pthread_mutex_lock(&reader->lock);
    struct private_memory *memory = mapped_bytes > 0 ? take_idle(reader, mapped_bytes) : NULL;
    pthread_mutex_unlock(&reader->lock);
    if (memory == NULL) {
        memory = calloc(1, sizeof(*memory));
        if (memory == NULL || allocate(reader, bytes, mapped_bytes, memory) < 0) {
            free(memory);
            share_refund(share, bytes);
            return -ENOMEM;
        }
        memory->reader = reader;
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
    dlfs_reader *reader = memory->reader;
    share_refund(memory->share, memory->bytes);
    dlfs_share_destroy(memory->share);
    bool stays_idle = false;
    pthread_mutex_lock(&reader->lock);
    if (memory->mapped_bytes > 0 &&
        reader->idle_private_bytes + memory->mapped_bytes <= IDLE_PRIVATE_BYTES_MAX) {
        stays_idle = true;
        memory->next = reader->idle_private;
        reader->idle_private = memory;
        reader->idle_private_bytes += memory->mapped_bytes;
    }
    pthread_mutex_unlock(&reader->lock);
    if (!stays_idle) {
        private_memory_free(memory);
    }
}

void private_memory_free_all(dlfs_reader *reader)
{
    while (reader->idle_private != NULL) {
        struct private_memory *next = reader->idle_private->next;
        private_memory_free(reader->idle_private);
        reader->idle_private = next;
    }
}
