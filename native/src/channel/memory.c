/*
 * The layout of a channel's memory: a page of header, the two rings, the request area, the result
 * area, and the memory for copied batches. Each area begins at a page boundary. The client computes
 * the same layout from the header and checks that the file is as long.
 */
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "channel/channel.h"
#include "platform/memory.h"

#define PAGE_BYTES 4096u

/* Takes the next whole pages of a memory. Returns NULL if it is not mapped yet. */
static void *take_area(uint8_t *base, size_t *end, uint64_t bytes)
{
    size_t start = *end;
    *end += ((size_t)bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    return base != NULL ? base + start : NULL;
}

/* Lays out the areas of a memory at its base, or only computes its length if that is NULL. */
static void lay_out(struct channel_memory *memory, uint8_t *base)
{
    uint64_t samples = memory->samples_max;
    size_t end = 0;
    memory->base = base;
    memory->header = take_area(base, &end, PAGE_BYTES);
    memory->submissions =
        take_area(base, &end, (uint64_t)memory->submission_count * sizeof(struct submission));
    memory->completions = take_area(base, &end, COMPLETION_COUNT * sizeof(struct completion));
    memory->request = take_area(base, &end, samples * sizeof(uint64_t));
    size_t result = end;
    memory->offsets = take_area(base, &end, samples * sizeof(int64_t));
    memory->lengths = take_area(base, &end, samples * sizeof(int64_t));
    memory->indices = take_area(base, &end, samples * sizeof(uint64_t));
    memory->failures = take_area(base, &end, samples * sizeof(dlfs_failure));
    memory->result = (uint8_t *)memory->offsets;
    memory->result_bytes = end - result;
    memory->copied = take_area(base, &end, memory->copied_bytes);
    memory->bytes = memory_length(end);
}

static uint32_t power_of_two(uint32_t value)
{
    uint32_t power = 1;
    while (power < value) {
        power *= 2;
    }
    return power;
}

int channel_memory_create(struct channel_memory *memory, const dlfs_channel_config *config,
                          const struct residents *residents, int *descriptor)
{
    *memory = (struct channel_memory){
        .copied_bytes = config->copied_bytes_max / COPIED_UNIT * COPIED_UNIT,
        .samples_max = config->samples_max,
        .submission_count = power_of_two(config->batches_max + SUBMISSIONS_SPARE),
    };
    lay_out(memory, NULL);
    void *base;
    int code = memory_create_shared("dlfs-channel", memory->bytes, false, MEMORY_ALL_WRITE, &base,
                                    descriptor);
    if (code < 0) {
        return code;
    }
    lay_out(memory, base);
    struct channel_header *header = memory->header;
    header->magic = CHANNEL_MAGIC;
    header->layout = CHANNEL_LAYOUT;
    header->version = DLFS_VERSION;
    header->failure_bytes = sizeof(dlfs_failure);
    header->stats_bytes = sizeof(dlfs_reader_stats);
    header->member_stats_bytes = sizeof(dlfs_member_stats);
    header->samples_max = memory->samples_max;
    header->submission_count = memory->submission_count;
    header->copied_bytes = memory->copied_bytes;
    struct reader_geometry geometry = reader_geometry(config->reader);
    header->arena_bytes = geometry.arena_bytes;
    header->resident_offset = residents->offset;
    header->resident_count = residents->count;
    header->chunk_shift = geometry.chunk_shift;
    return 0;
}

static bool header_matches(const struct channel_header *header, uint64_t arena_bytes)
{
    return header->magic == CHANNEL_MAGIC && header->layout == CHANNEL_LAYOUT &&
           header->version == DLFS_VERSION && header->failure_bytes == sizeof(dlfs_failure) &&
           header->stats_bytes == sizeof(dlfs_reader_stats) &&
           header->member_stats_bytes == sizeof(dlfs_member_stats) &&
           header->arena_bytes == arena_bytes && header->samples_max > 0 &&
           header->samples_max <= DLFS_CHANNEL_SAMPLES_MAX &&
           header->submission_count <= 2 * (DLFS_CHANNEL_BATCHES_MAX + SUBMISSIONS_SPARE) &&
           header->submission_count == power_of_two(header->submission_count) &&
           header->copied_bytes <= COPIED_BYTES_MAX;
}

int channel_memory_open(struct channel_memory *memory, int descriptor, uint64_t arena_bytes)
{
    void *base;
    size_t page = memory_length(sizeof(struct channel_header));
    int code = memory_map_shared(descriptor, page, false, MEMORY_OWNER_WRITES, &base);
    if (code < 0) {
        return code;
    }
    const struct channel_header *header = base;
    bool matches = header_matches(header, arena_bytes);
    *memory = (struct channel_memory){
        .copied_bytes = header->copied_bytes,
        .samples_max = header->samples_max,
        .submission_count = header->submission_count,
    };
    munmap(base, page);
    if (!matches) {
        return DLFS_E_FORMAT;
    }
    lay_out(memory, NULL);
    code = memory_map_shared(descriptor, memory->bytes, false, MEMORY_ALL_WRITE, &base);
    if (code == 0) {
        lay_out(memory, base);
    }
    return code;
}

void channel_memory_unmap(struct channel_memory *memory)
{
    if (memory->base != NULL) {
        munmap(memory->base, memory->bytes);
    }
    memory->base = NULL;
}
