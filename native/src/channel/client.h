/* The client's end of a channel, for channel/client.c and channel/kept.c. */
#ifndef DLFS_CHANNEL_CLIENT_H
#define DLFS_CHANNEL_CLIENT_H

#include "channel/channel.h"

struct dlfs_arena {
    uint8_t *base;
    size_t bytes;
    _Atomic uint32_t holds;
    _Atomic uint64_t lost_members; /* as of the last answer to any client: some never ask again */
};

/* Where a client finds samples in chunks that are kept for good. */
struct kept_view {
    const _Atomic uint32_t *slots; /* [chunks] slot + 1, or 0 while a chunk is not kept so */
    const dlfs_location *locations;
    uint64_t sample_count;
    uint64_t data_bytes;
    uint64_t arena_bytes; /* that slots lie in */
    uint32_t chunk_shift;
};

struct dlfs_client {
    dlfs_arena *arena;
    struct channel_memory memory;
    struct waiter waiter;
    struct ring completions;
    uint32_t timeout_ms;
    pthread_mutex_t turn;       /* of callers */
    uint64_t tag;               /* of the call under way */
    struct kept_view kept;      /* without locations: nothing is found */
    _Atomic uint64_t looked_ns; /* when the service was last seen to be there */
    _Atomic bool lost;
    _Atomic uint64_t requests;
    pthread_mutex_t lock; /* around what follows */
    struct ring submissions;
    struct batch *batches; /* at rest */
    uint64_t holds;        /* the owner's and each batch's */
};

/* channel/client.c */
static inline bool client_is_lost(const dlfs_client *client)
{
    return atomic_load_explicit(&client->lost, memory_order_relaxed);
}
/*
 * The channel is of no more use, but for releasing its batches: they stay as they are until its end
 * is hung up. Returns DLFS_E_SERVICE.
 */
int client_lose(dlfs_client *client);
/* A batch at rest, or a new one, with room for count samples; NULL: no memory. */
struct batch *client_rested_batch(dlfs_client *client, uint64_t count);
/* Ends one hold on the client, and the lock's; the last hold frees it. */
void client_unlock_release(dlfs_client *client);

/* channel/kept.c */
/* Makes a batch of samples that the client finds by itself; false: the service must be asked. */
bool client_find_batch(dlfs_client *client, const uint64_t *indices, uint64_t count,
                       dlfs_batch **out);
/* Copies such a sample; returns its length, -ERANGE, or -EAGAIN: the service must be asked. */
int64_t client_copy_found(dlfs_client *client, uint64_t index, void *buffer, uint64_t buffer_bytes);

#endif
