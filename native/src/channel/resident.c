/*
 * Reads resident samples at the client, without a request to the service.
 *
 * A resident chunk stays in its slot of the arena as long as a client has a channel to the reader
 * (reader/residents.c). The arena has an index of these chunks, and the client has the dataset's
 * locations mapped. So the client finds such samples by itself: it pins nothing and has nothing to
 * release. Its batches keep the channel, whose end it closes after the last of them.
 *
 * Only the service writes the index. It writes an entry once, when all samples of the chunk are
 * verified. The client checks that every offset lies in the arena.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>

#include "channel/channel.h"
#include "platform/clock.h"

#define CHECK_NS UINT64_C(1000000) /* time between two checks that the service is alive */

/* Opens the index. Returns false if the directory does not belong to the channel's dataset. */
static bool index_open(struct resident_index *index, const struct channel_header *header,
                       const uint8_t *arena, uint64_t arena_bytes, const dlfs_directory *directory)
{
    uint64_t data_bytes = dlfs_directory_data_bytes(directory);
    uint32_t shift = header->chunk_shift;
    if (header->resident_count == 0 || shift >= 48 ||
        header->resident_offset % sizeof(uint32_t) != 0 || header->resident_offset > arena_bytes ||
        header->resident_count > (arena_bytes - header->resident_offset) / sizeof(uint32_t) ||
        header->resident_count != (data_bytes + (UINT64_C(1) << shift) - 1) >> shift) {
        return false;
    }
    *index = (struct resident_index){
        .slots = (const _Atomic uint32_t *)(const void *)(arena + header->resident_offset),
        .locations = dlfs_directory_locations(directory),
        .sample_count = dlfs_directory_count(directory),
        .data_bytes = data_bytes,
        .arena_bytes = arena_bytes,
        .chunk_shift = shift,
    };
    return true;
}

/* Finds a sample's offset in the arena and its length. Returns false if it is not resident. */
static inline bool locate(const struct resident_index *residents, uint64_t index, int64_t *offset,
                          int64_t *length)
{
    if (index >= residents->sample_count) {
        return false;
    }
    uint64_t address = dlfs_location_address(&residents->locations[index]);
    uint64_t bytes = dlfs_location_length(&residents->locations[index]);
    *offset = 0;
    *length = (int64_t)bytes;
    if (address > residents->data_bytes || bytes > residents->data_bytes - address) {
        return false;
    }
    if (bytes == 0) {
        return true;
    }
    uint64_t chunk_bytes = UINT64_C(1) << residents->chunk_shift;
    uint64_t start = address & (chunk_bytes - 1);
    uint32_t slot = atomic_load_explicit(&residents->slots[address >> residents->chunk_shift],
                                         memory_order_acquire);
    if (slot == 0 || start + bytes > chunk_bytes ||
        slot > residents->arena_bytes >> residents->chunk_shift) {
        return false;
    }
    *offset = (int64_t)(((uint64_t)(slot - 1) << residents->chunk_shift) + start);
    return true;
}

/* Fills the arrays of a batch. Returns false if one of the samples is not resident. */
static bool locate_all(const struct resident_index *residents, struct batch *batch,
                       const uint64_t *indices, uint64_t count, uint64_t *sample_bytes)
{
    uint64_t total = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (indices[i] < residents->sample_count) {
            __builtin_prefetch(&residents->locations[indices[i]]);
        }
    }
    for (uint64_t i = 0; i < count; i++) {
        if (!locate(residents, indices[i], &batch->offsets[i], &batch->lengths[i])) {
            return false;
        }
        batch->indices[i] = indices[i];
        total += (uint64_t)batch->lengths[i];
    }
    *sample_bytes = total;
    return true;
}

DLFS_API int dlfs_client_attach(dlfs_client *client, const dlfs_directory *directory,
                                uint32_t flags)
{
    if (client == NULL || directory == NULL || (flags & ~DLFS_CLIENT_PARTS) != 0) {
        return -EINVAL;
    }
    const struct channel_header *header = client->memory.header;
    const dlfs_arena_view *arena = client->arena;
    if (header->resident_count > 0 && (flags & DLFS_CLIENT_PARTS) == 0 &&
        !index_open(&client->resident, header, arena->base, arena->bytes, directory)) {
        return -EINVAL;
    }
    client->locations = dlfs_directory_locations(directory);
    client->location_count = dlfs_directory_count(directory);
    return 0;
}

/*
 * Returns true if the client has an index and the service is alive. Checks the socket at most once
 * in CHECK_NS.
 */
static bool may_read_resident(dlfs_client *client)
{
    if (client->resident.locations == NULL || client_is_lost(client)) {
        return false;
    }
    uint64_t now = monotonic_ns();
    if (now - atomic_load_explicit(&client->checked_ns, memory_order_relaxed) < CHECK_NS) {
        return true;
    }
    struct pollfd file = {.fd = client->waiter.socket, .events = POLLRDHUP};
    if (poll(&file, 1, 0) > 0) {
        (void)client_lose(client);
        return false;
    }
    atomic_store_explicit(&client->checked_ns, now, memory_order_relaxed);
    return true;
}

static void count_resident_reads(dlfs_client *client, uint64_t samples, uint64_t bytes,
                                 uint64_t batches)
{
    struct resident_counts *counts = &client->memory.header->resident;
    atomic_fetch_add_explicit(&counts->samples, samples, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts->sample_bytes, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts->batches, batches, memory_order_relaxed);
}

static void release_batch(struct batch *batch)
{
    batch_pool_put(batch, NULL);
}

bool resident_read(dlfs_client *client, const uint64_t *indices, uint64_t count, dlfs_batch **out)
{
    uint64_t bytes;
    if (!may_read_resident(client)) {
        return false;
    }
    struct batch *batch = batch_pool_take(client, count);
    if (batch == NULL) {
        return false;
    }
    batch->release = release_batch;
    if (!locate_all(&client->resident, batch, indices, count, &bytes)) {
        batch_pool_put(batch, NULL);
        return false;
    }
    batch->public.base = client->arena->base;
    batch->public.base_bytes = client->arena->bytes;
    batch->public.lost_members =
        atomic_load_explicit(&client->arena->lost_members, memory_order_relaxed);
    count_resident_reads(client, count, bytes, 1);
    *out = &batch->public;
    return true;
}

int64_t resident_get(dlfs_client *client, uint64_t index, void *buffer, uint64_t buffer_bytes)
{
    int64_t offset;
    int64_t length;
    if (!may_read_resident(client) || !locate(&client->resident, index, &offset, &length)) {
        return -EAGAIN;
    }
    if ((uint64_t)length > buffer_bytes) {
        return -ERANGE;
    }
    if (length > 0) {
        memcpy(buffer, client->arena->base + offset, (size_t)length);
    }
    count_resident_reads(client, 1, (uint64_t)length, 0);
    return length;
}
