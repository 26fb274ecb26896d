/* A reader with a shared arena, and channels to it, all in one process. */
#ifndef DLFS_TESTS_CHANNEL_H
#define DLFS_TESTS_CHANNEL_H

#include <dlfs/channel.h>

#include <sched.h>
#include <unistd.h>

#include "arena/share.h"
#include "channel/channel.h"
#include "reader/reader_tests.h"

struct service {
    struct dataset dataset;
    dlfs_reader *reader;
    dlfs_share *share;
    dlfs_arena_view *arena;
};

/* Returns the bytes that are charged to a share now. */
static inline uint64_t share_bytes(const dlfs_share *share)
{
    return atomic_load(&share->bytes);
}

struct connection {
    dlfs_channel *channel;
    dlfs_client *client;
};

static inline void service_start(struct service *service, uint64_t memory_bytes,
                                 uint64_t pinned_bytes_max, const dlfs_fault_config *faults)
{
    int descriptor;
    uint64_t bytes;
    dataset_create(&service->dataset, faults);
    service->reader = reader_with(&service->dataset, memory_bytes, 2, true);
    CHECK_EQ(dlfs_share_create_within(NULL, pinned_bytes_max, &service->share), 0);
    CHECK_EQ(dlfs_reader_arena(service->reader, &descriptor, &bytes), 0);
    CHECK_EQ(dlfs_arena_view_map(descriptor, bytes, &service->arena), 0);
}

/* Destroys the service; all channels must have ended and unpinned their batches. */
static inline void service_stop(struct service *service)
{
    CHECK_EQ(share_bytes(service->share), 0);
    dlfs_arena_view_unmap(service->arena);
    dlfs_share_destroy(service->share);
    CHECK_EQ(dlfs_reader_destroy(service->reader), 0);
    dataset_destroy(&service->dataset);
}

static inline dlfs_channel_config channel_config(const struct service *service)
{
    return (dlfs_channel_config){
        .reader = service->reader,
        .share = service->share,
        .copied_bytes_max = 8 << 20,
        .samples_max = COUNT,
        .batches_max = 64,
    };
}

static inline struct connection connect_with(const struct service *service,
                                             const dlfs_channel_config *config, uint32_t timeout_ms)
{
    struct connection made;
    int memory;
    int wake;
    CHECK_EQ(dlfs_channel_create(config, &made.channel, &memory, &wake), 0);
    CHECK_EQ(dlfs_client_create(service->arena, memory, &wake, timeout_ms, &made.client), 0);
    close(memory);
    return made;
}

static inline struct connection connect_to(const struct service *service)
{
    dlfs_channel_config config = channel_config(service);
    return connect_with(service, &config, 0);
}

static inline dlfs_channel_stats stats_of(dlfs_channel *channel)
{
    dlfs_channel_stats stats;
    dlfs_channel_get_stats(channel, &stats);
    return stats;
}

/* Waits until a client has exactly `batches` batches that are not released. */
static inline void wait_batches_out(dlfs_channel *channel, uint64_t batches)
{
    while (stats_of(channel).batches_out != batches) {
        sched_yield();
    }
}

/* Waits for a channel's end, checks that it released everything, and returns its code. */
static inline int wait_end(dlfs_channel *channel)
{
    dlfs_channel_stats stats;
    do {
        sched_yield();
        stats = stats_of(channel);
    } while (stats.ended == 0);
    CHECK_EQ(stats.batches_out, 0);
    CHECK_EQ(stats.pinned_bytes, 0);
    CHECK_EQ(stats.copied_bytes, 0);
    return stats.ended;
}

static inline void wait_ended(dlfs_channel *channel, int code)
{
    CHECK_EQ(wait_end(channel), code);
}

static inline void check_batch(const dlfs_batch *batch)
{
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < batch->count; i++) {
        check_sample(batch, i);
    }
}

static inline dlfs_batch *read_from(dlfs_client *client, uint64_t first, uint64_t count)
{
    uint64_t indices[COUNT];
    for (uint64_t i = 0; i < count; i++) {
        indices[i] = (first + 7 * i) % COUNT;
    }
    dlfs_batch *batch;
    CHECK_EQ(dlfs_client_read(client, indices, count, &batch), 0);
    CHECK_EQ(batch->count, count);
    for (uint64_t i = 0; i < count; i++) {
        CHECK_EQ(batch->indices[i], indices[i]);
    }
    return batch;
}

#endif
