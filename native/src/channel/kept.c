/*
 * Samples that a client finds by itself, in chunks that stay where they are: reader/arena.c, "kept
 * for good". The client has the dataset's locations mapped, and in the arena an index of those
 * chunks: nobody is asked, nothing is pinned, nothing has to be given back.
 *
 * The index is written by the service alone, and an entry only once, when all samples of the chunk
 * have been verified. The client believes it as far as it stays in the memory that it has mapped.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>

#include "channel/client.h"
#include "platform/clock.h"

#define LOOK_NS UINT64_C(1000000) /* the service is looked after this often */

/* False when the directory is not of the channel's dataset. */
static bool view_open(struct kept_view *view, const struct channel_header *header,
                      const uint8_t *arena, uint64_t arena_bytes, const dlfs_directory *directory)
{
    uint64_t data_bytes = dlfs_directory_data_bytes(directory);
    uint32_t shift = header->chunk_shift;
    if (header->kept_count == 0 || shift >= 48 || header->kept_offset % sizeof(uint32_t) != 0 ||
        header->kept_offset > arena_bytes ||
        header->kept_count > (arena_bytes - header->kept_offset) / sizeof(uint32_t) ||
        header->kept_count != (data_bytes + (UINT64_C(1) << shift) - 1) >> shift) {
        return false;
    }
    *view = (struct kept_view){
        .slots = (const _Atomic uint32_t *)(const void *)(arena + header->kept_offset),
        .locations = dlfs_directory_locations(directory),
        .sample_count = dlfs_directory_count(directory),
        .data_bytes = data_bytes,
        .arena_bytes = header->kept_offset,
        .chunk_shift = shift,
    };
    return true;
}

/* Whether a sample lies in such a chunk; and where in the arena. */
static inline bool find(const struct kept_view *view, uint64_t index, int64_t *offset,
                        int64_t *length)
{
    if (index >= view->sample_count) {
        return false;
    }
    uint64_t address = dlfs_location_address(&view->locations[index]);
    uint64_t bytes = dlfs_location_length(&view->locations[index]);
    *offset = 0;
    *length = (int64_t)bytes;
    if (address > view->data_bytes || bytes > view->data_bytes - address) {
        return false;
    }
    if (bytes == 0) {
        return true;
    }
    uint64_t chunk_bytes = UINT64_C(1) << view->chunk_shift;
    uint64_t start = address & (chunk_bytes - 1);
    uint32_t slot =
        atomic_load_explicit(&view->slots[address >> view->chunk_shift], memory_order_acquire);
    if (slot == 0 || start + bytes > chunk_bytes || slot > view->arena_bytes >> view->chunk_shift) {
        return false;
    }
    *offset = (int64_t)(((uint64_t)(slot - 1) << view->chunk_shift) + start);
    return true;
}

/* Fills the arrays of a batch; false when the service must be asked for one of the samples. */
static bool find_all(const struct kept_view *view, struct batch *batch, const uint64_t *indices,
                     uint64_t count, uint64_t *sample_bytes)
{
    uint64_t total = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (indices[i] < view->sample_count) {
            __builtin_prefetch(&view->locations[indices[i]]);
        }
    }
    for (uint64_t i = 0; i < count; i++) {
        if (!find(view, indices[i], &batch->offsets[i], &batch->lengths[i])) {
            return false;
        }
        batch->indices[i] = indices[i];
        total += (uint64_t)batch->lengths[i];
    }
    *sample_bytes = total;
    return true;
}

DLFS_API int dlfs_client_attach(dlfs_client *client, const dlfs_directory *directory)
{
    if (client == NULL || directory == NULL) {
        return -EINVAL;
    }
    const struct channel_header *header = client->memory.header;
    const dlfs_arena *arena = client->arena;
    if (header->kept_count > 0 &&
        !view_open(&client->kept, header, arena->base, arena->bytes, directory)) {
        return -EINVAL;
    }
    return 0;
}

/*
 * Whether the client may read by itself: the service has not hung up, as far as is known from a
 * look in the last LOOK_NS.
 */
static bool may_find(dlfs_client *client)
{
    if (client->kept.locations == NULL || client_is_lost(client)) {
        return false;
    }
    uint64_t now = monotonic_ns();
    if (now - atomic_load_explicit(&client->looked_ns, memory_order_relaxed) < LOOK_NS) {
        return true;
    }
    struct pollfd file = {.fd = client->waiter.socket, .events = POLLRDHUP};
    if (poll(&file, 1, 0) > 0) {
        (void)client_lose(client);
        return false;
    }
    atomic_store_explicit(&client->looked_ns, now, memory_order_relaxed);
    return true;
}

static void count_kept(dlfs_client *client, uint64_t samples, uint64_t bytes, uint64_t batches)
{
    struct kept_counts *counts = &client->memory.header->kept;
    atomic_fetch_add_explicit(&counts->samples, samples, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts->sample_bytes, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts->batches, batches, memory_order_relaxed);
}

static void rest_batch(struct batch *batch)
{
    dlfs_client *client = batch->client;
    pthread_mutex_lock(&client->lock);
    batch->next = client->batches;
    client->batches = batch;
    client_unlock_release(client);
}

bool client_find_batch(dlfs_client *client, const uint64_t *indices, uint64_t count,
                       dlfs_batch **out)
{
    uint64_t bytes;
    if (!may_find(client)) {
        return false;
    }
    struct batch *batch = client_rested_batch(client, count);
    if (batch == NULL) {
        return false;
    }
    pthread_mutex_lock(&client->lock);
    client->holds++;
    pthread_mutex_unlock(&client->lock);
    batch->client = client;
    batch->release = rest_batch;
    if (!find_all(&client->kept, batch, indices, count, &bytes)) {
        rest_batch(batch);
        return false;
    }
    batch->public = (dlfs_batch){
        .base = client->arena->base,
        .base_bytes = client->arena->bytes,
        .count = count,
        .offsets = batch->offsets,
        .lengths = batch->lengths,
        .indices = batch->indices,
        .failures = batch->failures,
        .lost_members = dlfs_client_lost_members(client),
    };
    count_kept(client, count, bytes, 1);
    *out = &batch->public;
    return true;
}

int64_t client_copy_found(dlfs_client *client, uint64_t index, void *buffer, uint64_t buffer_bytes)
{
    int64_t offset;
    int64_t length;
    if (!may_find(client) || !find(&client->kept, index, &offset, &length)) {
        return -EAGAIN;
    }
    if ((uint64_t)length > buffer_bytes) {
        return -ERANGE;
    }
    if (length > 0) {
        memcpy(buffer, client->arena->base + offset, (size_t)length);
    }
    count_kept(client, 1, (uint64_t)length, 0);
    return length;
}
