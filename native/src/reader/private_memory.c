/*
 * Memory of batches that own theirs.
 *
 * What a sample of many MiB needs is a mapping, of huge pages where the machine gives them: to
 * touch fresh pages costs as much as to read into them. So some of it is kept for the next batch.
 */
#include <errno.h>
#include <stdlib.h>

#include "platform/memory.h"
#include "reader/reader.h"
#include "reader/share.h"

#define ALIGN_MIN 4096u
#define MAPPED_BYTES_MIN ((size_t)2 << 20)        /* dlfs_memory_map aligns so much to as much */
#define IDLE_PRIVATE_BYTES_MAX ((size_t)32 << 20) /* of a reader, between batches */

/* Takes one at rest that is large enough, but not far too large. The lock is held. */
static struct private_memory *take_idle(dlfs_reader *reader, size_t mapped_bytes)
{
    struct private_memory **at = &reader->idle_private;
    while (*at != NULL &&
           ((*at)->mapped_bytes < mapped_bytes || (*at)->mapped_bytes / 2 > mapped_bytes)) {
        at = &(*at)->next;
    }
    struct private_memory *private_memory = *at;
    if (private_memory != NULL) {
        *at = private_memory->next;
        reader->idle_private_bytes -= private_memory->mapped_bytes;
    }
    return private_memory;
}

static int allocate(const dlfs_reader *reader, size_t bytes, size_t mapped_bytes,
                    struct private_memory *private_memory)
{
    size_t alignment = reader->config.block_bytes;
    void *base = NULL;
    int code = mapped_bytes > 0
                   ? dlfs_memory_map(mapped_bytes, &base, NULL)
                   : -posix_memalign(&base, alignment > ALIGN_MIN ? alignment : ALIGN_MIN, bytes);
    private_memory->base = base;
    private_memory->mapped_bytes = mapped_bytes;
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
    struct private_memory *private_memory =
        mapped_bytes > 0 ? take_idle(reader, mapped_bytes) : NULL;
    pthread_mutex_unlock(&reader->lock);
    if (private_memory == NULL) {
        private_memory = calloc(1, sizeof(*private_memory));
        if (private_memory == NULL || allocate(reader, bytes, mapped_bytes, private_memory) < 0) {
            free(private_memory);
            share_refund(share, bytes);
            return -ENOMEM;
        }
        private_memory->reader = reader;
    }
    share_reference(share);
    private_memory->share = share;
    private_memory->bytes = bytes;
    private_memory->references = 1;
    *out = private_memory;
    return 0;
}

static void private_memory_free(struct private_memory *private_memory)
{
    if (private_memory->mapped_bytes > 0) {
        dlfs_memory_unmap(private_memory->base, private_memory->mapped_bytes);
    } else {
        free(private_memory->base);
    }
    free(private_memory);
}

void private_memory_release(struct private_memory *private_memory)
{
    if (__atomic_sub_fetch(&private_memory->references, 1, __ATOMIC_ACQ_REL) > 0) {
        return;
    }
    dlfs_reader *reader = private_memory->reader;
    share_refund(private_memory->share, private_memory->bytes);
    dlfs_share_destroy(private_memory->share);
    bool rests = false;
    pthread_mutex_lock(&reader->lock);
    if (private_memory->mapped_bytes > 0 &&
        reader->idle_private_bytes + private_memory->mapped_bytes <= IDLE_PRIVATE_BYTES_MAX) {
        rests = true;
        private_memory->next = reader->idle_private;
        reader->idle_private = private_memory;
        reader->idle_private_bytes += private_memory->mapped_bytes;
    }
    pthread_mutex_unlock(&reader->lock);
    if (!rests) {
        private_memory_free(private_memory);
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
