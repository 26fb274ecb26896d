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
#define MAPPED_BYTES_MIN ((size_t)2 << 20) /* dlfs_memory_map aligns so much to as much */
#define REST_BYTES_MAX ((size_t)32 << 20)  /* of a reader, between batches */

/* Takes one at rest that is large enough, but not far too large. The lock is held. */
static struct block *take_resting(dlfs_reader *reader, size_t mapped_bytes)
{
    struct block **at = &reader->blocks;
    while (*at != NULL &&
           ((*at)->mapped_bytes < mapped_bytes || (*at)->mapped_bytes / 2 > mapped_bytes)) {
        at = &(*at)->next;
    }
    struct block *block = *at;
    if (block != NULL) {
        *at = block->next;
        reader->blocks_bytes -= block->mapped_bytes;
    }
    return block;
}

static int allocate(const dlfs_reader *reader, size_t bytes, size_t mapped_bytes,
                    struct block *block)
{
    size_t alignment = reader->config.block_bytes;
    void *base = NULL;
    int code = mapped_bytes > 0
                   ? dlfs_memory_map(mapped_bytes, &base, NULL)
                   : -posix_memalign(&base, alignment > ALIGN_MIN ? alignment : ALIGN_MIN, bytes);
    block->base = base;
    block->mapped_bytes = mapped_bytes;
    return code;
}

int block_take(dlfs_reader *reader, size_t bytes, struct dlfs_share *share, struct block **out)
{
    size_t mapped_bytes = bytes < MAPPED_BYTES_MIN ? 0 : memory_length(bytes);
    if (!share_take(share, bytes)) {
        return DLFS_E_LIMIT;
    }
    pthread_mutex_lock(&reader->lock);
    struct block *block = mapped_bytes > 0 ? take_resting(reader, mapped_bytes) : NULL;
    pthread_mutex_unlock(&reader->lock);
    if (block == NULL) {
        block = calloc(1, sizeof(*block));
        if (block == NULL || allocate(reader, bytes, mapped_bytes, block) < 0) {
            free(block);
            share_give(share, bytes);
            return -ENOMEM;
        }
        block->reader = reader;
    }
    share_hold(share);
    block->share = share;
    block->bytes = bytes;
    block->references = 1;
    *out = block;
    return 0;
}

static void block_free(struct block *block)
{
    if (block->mapped_bytes > 0) {
        dlfs_memory_unmap(block->base, block->mapped_bytes);
    } else {
        free(block->base);
    }
    free(block);
}

void block_release(struct block *block)
{
    if (__atomic_sub_fetch(&block->references, 1, __ATOMIC_ACQ_REL) > 0) {
        return;
    }
    dlfs_reader *reader = block->reader;
    share_give(block->share, block->bytes);
    dlfs_share_destroy(block->share);
    bool rests = false;
    pthread_mutex_lock(&reader->lock);
    if (block->mapped_bytes > 0 && reader->blocks_bytes + block->mapped_bytes <= REST_BYTES_MAX) {
        rests = true;
        block->next = reader->blocks;
        reader->blocks = block;
        reader->blocks_bytes += block->mapped_bytes;
    }
    pthread_mutex_unlock(&reader->lock);
    if (!rests) {
        block_free(block);
    }
}

void block_free_all(dlfs_reader *reader)
{
    while (reader->blocks != NULL) {
        struct block *next = reader->blocks->next;
        block_free(reader->blocks);
        reader->blocks = next;
    }
}
