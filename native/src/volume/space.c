/*
 * Reads the chunks of a catalog or a directory (FORMAT.md, section 2) from the copies that exist.
 * The reader reads the chunks of samples.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>

#include "volume/source.h"

#define DEPTH 16u
#define COPIES_SHARES 16u /* of the time left, of which a member gets one where copies are */

/* The sources of members, each opened when it is first needed. */
struct sources {
    const dlfs_volume *volume;
    struct volume_limit *limit;
    struct volume_source of_member[DLFS_MEMBERS_MAX];
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

static int read_copy(struct sources *sources, const struct volume_location *place, void *memory)
{
    const struct volume_superblock *sb = &sources->volume->superblock;
    struct volume_source *source = &sources->of_member[place->member];
    struct volume_limit *limit = sources->limit;
    dlfs_device *device = sources->volume->devices[place->member];
    uint64_t bit = UINT64_C(1) << place->member;
    if (device == NULL) {
        return DLFS_E_LOST;
    }
    if ((limit->silent_members & bit) != 0) {
        return DLFS_E_TIMEOUT;
    }
    volume_limit_admit(limit, device);
    uint64_t until_ns = volume_limit_device_ns(limit, sb->replicas > 1 ? COPIES_SHARES : 1);
    int code = 0;
    if (source->queue == NULL) {
        code = volume_source_open(source, device, DEPTH, sb->chunk_bytes, until_ns);
    }
    if (code >= 0) {
        code = volume_source_read(source, limit, place->offset_bytes, sb->chunk_bytes, until_ns);
    }
    if (code >= 0) {
        memcpy(memory, source->memory, sb->chunk_bytes);
    } else if (code == DLFS_E_TIMEOUT) {
        limit->silent_members |= bit;
    }
    return code;
}

/*
 * Reads a chunk from the first copy that can be read. A choice below `replicas` is the copy to
 * begin with; a choice from there on is a member whose copies are tried last.
 */
static int read_chunk(struct sources *sources, uint64_t chunk, uint32_t choice, void *memory,
                      struct volume_location *bad)
{
    const struct volume_superblock *sb = &sources->volume->superblock;
    int code = DLFS_E_LOST;
    bool avoids = choice >= sb->replicas;
    for (uint32_t last = 0; last <= (avoids ? 1u : 0u); last++) {
        for (uint32_t step = 0; step < sb->replicas; step++) {
            uint32_t copy = avoids ? step : (choice + step) % sb->replicas;
            struct volume_location place = place_of(sb, chunk, copy);
            if (avoids && (place.member == choice - sb->replicas) != (last == 1)) {
                continue;
            }
            code = read_copy(sources, &place, memory);
            if (code >= 0) {
                return 0;
            }
            *bad = place;
        }
    }
    return code;
}

int volume_read_space(const dlfs_volume *volume, struct volume_limit *limit,
                      const struct volume_space *space, uint32_t choice, void *memory,
                      struct volume_location *bad)
{
    struct sources sources = {.volume = volume, .limit = limit};
    uint64_t left = space->chunk_count;
    uint8_t *at = memory;
    int code = 0;
    for (uint32_t i = 0; code >= 0 && i < space->run_count; i++) {
        const dlfs_extent *run = &space->runs[i];
        for (uint64_t k = 0; code >= 0 && left && k < run->chunk_count; k++) {
            code = read_chunk(&sources, run->first_chunk + k, choice, at, bad);
            at += volume->superblock.chunk_bytes;
            left--;
        }
    }
    for (uint32_t i = 0; i < DLFS_MEMBERS_MAX; i++) {
        volume_source_close(&sources.of_member[i]);
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
