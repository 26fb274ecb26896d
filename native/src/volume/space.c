/*
 * Reads the chunks of a catalog or a directory (FORMAT.md, section 2) from the copies that exist.
 * The reader reads the chunks of samples.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>

#include "volume/volume.h"

#define DEPTH 16u
#define PIECE_BYTES (256u << 10)

/* The queue pairs of members, each created when it is first needed. */
struct queues {
    const dlfs_volume *volume;
    dlfs_queue *of_member[DLFS_MEMBERS_MAX];
};

uint32_t volume_choice_count(const struct volume_superblock *superblock)
{
    uint32_t replicas = superblock->replicas;
    return replicas == 1 ? 1 : replicas + superblock->member_count;
}

static struct volume_location place_of(const struct volume_superblock *sb, uint64_t chunk,
                                       uint32_t copy)
{
    const dlfs_chunk_group *group = volume_group_of(sb, chunk); /* decoding checked every run */
    uint64_t of_group = chunk - group->first_chunk;
    uint64_t row = copy * group->band_rows + of_group / group->member_count;
    return (struct volume_location){
        .member = group->first_member + (uint32_t)((of_group + copy) % group->member_count),
        .offset_bytes = sb->data_offset_bytes + row * sb->chunk_bytes,
    };
}

static int read_copy(struct queues *queues, const struct volume_location *place, void *memory)
{
    const struct volume_superblock *sb = &queues->volume->superblock;
    dlfs_queue **queue = &queues->of_member[place->member];
    dlfs_device *device = queues->volume->devices[place->member];
    if (device == NULL) {
        return DLFS_E_LOST;
    }
    if (*queue == NULL) {
        int code = dlfs_queue_create(device, DEPTH, queue);
        if (code < 0) {
            return code;
        }
    }
    uint32_t piece_bytes = sb->chunk_bytes < PIECE_BYTES ? sb->chunk_bytes : PIECE_BYTES;
    return dlfs_queue_transfer(*queue, DLFS_OP_READ, memory, place->offset_bytes, sb->chunk_bytes,
                               piece_bytes);
}

/*
 * Reads a chunk from the first copy that can be read. A choice below `replicas` is the copy to
 * begin with; a choice from there on is a member whose copies are tried last.
 */
static int read_chunk(struct queues *queues, uint64_t chunk, uint32_t choice, void *memory,
                      struct volume_location *bad)
{
    const struct volume_superblock *sb = &queues->volume->superblock;
    int code = DLFS_E_LOST;
    bool avoids = choice >= sb->replicas;
    for (uint32_t last = 0; last <= (avoids ? 1u : 0u); last++) {
        for (uint32_t step = 0; step < sb->replicas; step++) {
            uint32_t copy = avoids ? step : (choice + step) % sb->replicas;
            struct volume_location place = place_of(sb, chunk, copy);
            if (avoids && (place.member == choice - sb->replicas) != (last == 1)) {
                continue;
            }
            code = read_copy(queues, &place, memory);
            if (code >= 0) {
                return 0;
            }
            *bad = place;
        }
    }
    return code;
}

int volume_read_space(const dlfs_volume *volume, const struct volume_space *space, uint32_t choice,
                      void *memory, struct volume_location *bad)
{
    struct queues queues = {.volume = volume};
    uint64_t left = space->chunk_count;
    uint8_t *at = memory;
    int code = 0;
    for (uint32_t i = 0; code >= 0 && i < space->run_count; i++) {
        const dlfs_extent *run = &space->runs[i];
        for (uint64_t k = 0; code >= 0 && left && k < run->chunk_count; k++) {
            code = read_chunk(&queues, run->first_chunk + k, choice, at, bad);
            at += volume->superblock.chunk_bytes;
            left--;
        }
    }
    for (uint32_t i = 0; i < DLFS_MEMBERS_MAX; i++) {
        dlfs_queue_destroy(queues.of_member[i]);
    }
    return code < 0 ? code : 0;
}

struct volume_location volume_locate(const dlfs_volume *volume, const struct volume_space *space,
                                     uint64_t position)
{
    const struct volume_superblock *sb = &volume->superblock;
    uint64_t chunk = position / sb->chunk_bytes;
    uint32_t i = 0;
    while (i + 1 < space->run_count && chunk >= space->runs[i].chunk_count) {
        chunk -= space->runs[i++].chunk_count;
    }
    struct volume_location place = place_of(sb, space->runs[i].first_chunk + chunk, 0);
    place.offset_bytes += position % sb->chunk_bytes;
    return place;
}
