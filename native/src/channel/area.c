/*
 * Memory for answers: the pages of a channel's result area, and the indices of the current request.
 *
 * It stays from one answer to the next, so that ordinary batches touch no fresh pages. The pages of
 * a large answer are freed when the client has read the answer and is idle.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "channel/channel.h"

/* Memory for each sample of a batch: its arrays, a failure, and its index in two places. */
#define SAMPLE_BYTES (4 * sizeof(uint64_t) + sizeof(dlfs_failure) + sizeof(uint64_t))
#define RETAINED_BYTES (UINT64_C(4) << 20) /* memory that stays as long as the channel */

static uint64_t charged_bytes(uint64_t samples, uint64_t bytes)
{
    return samples * SAMPLE_BYTES + bytes;
}

bool area_reserve(dlfs_channel *channel, uint64_t samples, uint64_t bytes)
{
    samples = samples > channel->area_samples ? samples : channel->area_samples;
    bytes = bytes > channel->area_bytes ? bytes : channel->area_bytes;
    uint64_t before = charged_bytes(channel->area_samples, channel->area_bytes);
    uint64_t more = charged_bytes(samples, bytes) - before;
    if (more == 0) {
        return true;
    }
    if (!charge(channel, more)) {
        return false;
    }
    uint64_t *indices = realloc(channel->indices, (samples + 1) * sizeof(*indices));
    if (indices == NULL) {
        discharge(channel, more);
        return false;
    }
    channel->indices = indices;
    channel->area_samples = samples;
    channel->area_bytes = bytes;
    return true;
}

void area_trim(dlfs_channel *channel)
{
    struct channel_memory *memory = &channel->memory;
    uint64_t charged = charged_bytes(channel->area_samples, channel->area_bytes);
    if (charged <= RETAINED_BYTES) {
        return;
    }
    (void)madvise(memory->result, memory->result_bytes, MADV_REMOVE);
    free(channel->indices);
    channel->indices = NULL;
    channel->area_samples = 0;
    channel->area_bytes = 0;
    discharge(channel, charged);
}
