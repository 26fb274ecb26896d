/*
 * The objects that outlive a client's calls: its batches, its references, and its arena.
 *
 * A batch refers to memory of its client, so the client lives until its owner and its last batch
 * have released it. Only then does the service see the client's end of the sockets closed: earlier,
 * the service would use the memory of the batches again. Released batches stay in a free list, so
 * that reading allocates nothing.
 *
 * Threads: any at once; state_lock protects the free list and the reference count.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "channel/channel.h"
#include "platform/memory.h"

/* ---- the arena ------------------------------------------------------------------------------- */

DLFS_API int dlfs_arena_view_map(int descriptor, uint64_t bytes, dlfs_arena_view **out)
{
    if (bytes == 0 || bytes > SIZE_MAX / 2) {
        return -EINVAL;
    }
    dlfs_arena_view *arena = calloc(1, sizeof(*arena));
    if (arena == NULL) {
        return -ENOMEM;
    }
    void *base;
    arena->bytes = bytes;
    atomic_init(&arena->references, 1);
    int code = memory_map_shared(descriptor, arena->bytes, true, MEMORY_OWNER_WRITES, &base);
    if (code < 0) {
        free(arena);
        return code;
    }
    arena->base = base;
    *out = arena;
    return 0;
}

DLFS_API void dlfs_arena_view_memory(const dlfs_arena_view *arena, const void **base,
                                     uint64_t *bytes)
{
    *base = arena->base;
    *bytes = arena->bytes;
}

DLFS_API void dlfs_arena_view_unmap(dlfs_arena_view *arena)
{
    if (arena == NULL ||
        atomic_fetch_sub_explicit(&arena->references, 1, memory_order_acq_rel) > 1) {
        return;
    }
    munmap(arena->base, arena->bytes);
    free(arena);
}

DLFS_API uint64_t dlfs_client_lost_members(const dlfs_client *client)
{
    return atomic_load_explicit(&client->arena->lost_members, memory_order_relaxed);
}

/* ---- references ------------------------------------------------------------------------------ */

static void client_free(dlfs_client *client)
{
    while (client->batches != NULL) {
        struct batch *next = client->batches->next;
        batch_free(client->batches);
        client->batches = next;
    }
    if (client->waiter.socket >= 0) {
        close(client->waiter.socket);
    }
    channel_memory_unmap(&client->memory);
    dlfs_arena_view_unmap(client->arena);
    pthread_mutex_destroy(&client->call_lock);
    pthread_mutex_destroy(&client->state_lock);
    free(client);
}

/* Drops a reference and unlocks state_lock. */
static void unlock_release(dlfs_client *client)
{
    bool last = --client->references == 0;
    pthread_mutex_unlock(&client->state_lock);
    if (last) {
        client_free(client);
    }
}

void client_release(dlfs_client *client)
{
    pthread_mutex_lock(&client->state_lock);
    unlock_release(client);
}

/* ---- batches --------------------------------------------------------------------------------- */

struct batch *batch_pool_take(dlfs_client *client, uint64_t count)
{
    pthread_mutex_lock(&client->state_lock);
    struct batch *batch = client->batches;
    if (batch != NULL) {
        client->batches = batch->next;
    }
    client->references++;
    pthread_mutex_unlock(&client->state_lock);
    batch = batch_prepare(batch, count);
    if (batch != NULL) {
        batch->client = client;
    } else {
        client_release(client);
    }
    return batch;
}

void batch_pool_put(struct batch *batch, const struct submission *entry)
{
    dlfs_client *client = batch->client;
    pthread_mutex_lock(&client->state_lock);
    if (entry != NULL) {
        (void)ring_put(&client->submissions, entry); /* the ring has room for every release */
    }
    batch->next = client->batches;
    client->batches = batch;
    unlock_release(client);
}
