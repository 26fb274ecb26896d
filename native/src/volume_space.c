/*
 * Reading a space, what runs of chunks hold (FORMAT.md, section 2), from the copies that are there:
 * catalogs and directories, whole and chunk by chunk. Samples are read by the reader.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

#include "volume.h"

#define DEPTH 16u
#define PIECE_BYTES (256u << 10)

/* The members' queue pairs, made when they are first needed. */
struct queues {
    const dlfs_volume *volume;
    dlfs_queue *of_member[DLFS_MEMBERS_MAX];
};

uint32_t volume_choice_count(const struct volume_superblock *superblock)
{
    uint32_t replicas = superblock->replicas;
    return replicas == 1 ? 1 : replicas + superblock->member_count;
}

static int read_copy(struct queues *queues, uint64_t chunk, uint32_t copy, void *memory)
{
    const struct volume_superblock *sb = &queues->volume->superblock;
    uint32_t member = (uint32_t)((chunk % sb->member_count + copy) % sb->member_count);
    dlfs_device *device = queues->volume->devices[member];
    if (!device)
        return DLFS_E_LOST;
    if (!queues->of_member[member]) {
        int code = dlfs_queue_create(device, DEPTH, &queues->of_member[member]);
        if (code < 0)
            return code;
    }
    uint64_t row = copy * sb->band_rows + chunk / sb->member_count;
    uint64_t offset_bytes = sb->data_offset_bytes + row * sb->chunk_bytes;
    uint32_t piece_bytes = sb->chunk_bytes < PIECE_BYTES ? sb->chunk_bytes : PIECE_BYTES;
    return dlfs_queue_transfer(queues->of_member[member], DLFS_OP_READ, memory, offset_bytes,
                               sb->chunk_bytes, piece_bytes);
}

/*
 * Reads a chunk from the first copy that gives it. A choice under `replicas` is the copy to begin
 * with; one from there on is a member whose copies come last.
 */
static int read_chunk(struct queues *queues, uint64_t chunk, uint32_t choice, void *memory)
{
    const struct volume_superblock *sb = &queues->volume->superblock;
    int code = DLFS_E_LOST;
    bool avoids = choice >= sb->replicas;
    for (uint32_t last = 0; last <= (avoids ? 1u : 0u); last++) {
        for (uint32_t step = 0; step < sb->replicas; step++) {
            uint32_t copy = avoids ? step : (choice + step) % sb->replicas;
            uint64_t member = (chunk % sb->member_count + copy) % sb->member_count;
            if (avoids && (member == choice - sb->replicas) != (last == 1))
                continue;
            code = read_copy(queues, chunk, copy, memory);
            if (code >= 0)
                return 0;
        }
    }
    return code;
}

int volume_read_space(const dlfs_volume *volume, const dlfs_extent *runs, uint32_t run_count,
                      uint64_t chunk_count, uint32_t choice, void *memory)
{
    struct queues queues = {.volume = volume};
    uint8_t *at = memory;
    int code = 0;
    for (uint32_t i = 0; code >= 0 && i < run_count; i++) {
        for (uint64_t k = 0; code >= 0 && chunk_count && k < runs[i].chunk_count; k++) {
            code = read_chunk(&queues, runs[i].first_chunk + k, choice, at);
            at += volume->superblock.chunk_bytes;
            chunk_count--;
        }
    }
    for (uint32_t i = 0; i < DLFS_MEMBERS_MAX; i++)
        dlfs_queue_destroy(queues.of_member[i]);
    return code < 0 ? code : 0;
}

void volume_say(char *message, uint32_t message_bytes, const char *form, ...)
{
    va_list arguments;
    if (!message || message_bytes == 0)
        return;
    va_start(arguments, form);
    (void)vsnprintf(message, message_bytes, form, arguments);
    va_end(arguments);
}
