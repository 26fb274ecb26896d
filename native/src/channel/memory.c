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

/* Offsets of the areas from the base of the memory. */
struct areas {
    size_t submissions;
    size_t completions;
    size_t request;
    size_t offsets; /* the result area begins here */
    size_t lengths;
    size_t indices;
    size_t failures;
    size_t copied;
    size_t end;
};

/* Returns the offset after an area, rounded up to a page. */
static size_t after(size_t start, uint64_t bytes)
{
    return start + ((size_t)bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static struct areas lay_out(const struct channel_memory *memory)
{
    uint64_t samples = memory->samples_max;
    struct areas areas = {.submissions = PAGE_BYTES};
    areas.completions =
        after(areas.submissions, (uint64_t)memory->submission_count * sizeof(struct submission));
    areas.request = after(areas.completions, COMPLETION_COUNT * sizeof(struct completion));
    areas.offsets = after(areas.request, samples * sizeof(uint64_t));
    areas.lengths = after(areas.offsets, samples * sizeof(int64_t));
    areas.indices = after(areas.lengths, samples * sizeof(int64_t));
    areas.failures = after(areas.indices, samples * sizeof(uint64_t));
    areas.copied = after(areas.failures, samples * sizeof(dlfs_failure));
    areas.end = memory_length(after(areas.copied, memory->copied_bytes));
    return areas;
}

static void adopt(struct channel_memory *memory, uint8_t *base, const struct areas *areas)
{
    memory->base = base;
    memory->bytes = areas->end;
    memory->header = (struct channel_header *)(void *)base;
    memory->submissions = base + areas->submissions;
    memory->completions = base + areas->completions;
    memory->request = base + areas->request;
    memory->result = base + areas->offsets;
    memory->result_bytes = areas->copied - areas->offsets;
    memory->offsets = (int64_t *)(void *)(base + areas->offsets);
    memory->lengths = (int64_t *)(void *)(base + areas->lengths);
    memory->indices = (uint64_t *)(void *)(base + areas->indices);
    memory->failures = (dlfs_failure *)(void *)(base + areas->failures);
    memory->copied = base + areas->copied;
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
    struct areas areas = lay_out(memory);
    void *base;
    int code =
        memory_create_shared("dlfs-channel", areas.end, false, MEMORY_ALL_WRITE, &base, descriptor);
    if (code < 0) {
        return code;
    }
    adopt(memory, base, &areas);
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
    struct areas areas = lay_out(memory);
    code = memory_map_shared(descriptor, areas.end, false, MEMORY_ALL_WRITE, &base);
    if (code == 0) {
        adopt(memory, base, &areas);
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
