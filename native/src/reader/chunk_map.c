/* Finds the copies of a dataset's chunks (FORMAT.md, section 2). */
#include "reader/chunk_map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CHUNKS_UNBOUNDED UINT64_MAX

/* Returns the number of the chunk after the group's last one. */
static uint64_t group_end(const dlfs_chunk_group *group)
{
    return group->band_rows == CHUNKS_UNBOUNDED
               ? CHUNKS_UNBOUNDED
               : group->first_chunk + group->band_rows * group->member_count;
}

static bool group_is_valid(const dlfs_chunk_group *group, const dlfs_reader_config *config)
{
    uint64_t room = UINT64_MAX - group->first_chunk;
    return group->member_count >= config->replicas && group->member_count <= config->member_count &&
           group->first_member <= config->member_count - group->member_count &&
           group->band_rows <= room / group->member_count;
}

/* Copies the groups, or makes one of all members. Groups rise by their chunks. */
static bool copy_groups(struct chunk_map *map, const dlfs_reader_config *config)
{
    if (config->group_count == 0) {
        /* With one copy no chunk is outside a band. */
        uint64_t rows = config->replicas > 1 ? config->band_rows : CHUNKS_UNBOUNDED;
        map->group_count = 1;
        map->groups[0] =
            (dlfs_chunk_group){.band_rows = rows, .member_count = config->member_count};
        return true;
    }
    if (config->group_count > DLFS_GROUPS_MAX || config->groups == NULL) {
        return false;
    }
    map->group_count = config->group_count;
    memcpy(map->groups, config->groups, config->group_count * sizeof(*map->groups));
    for (uint32_t i = 0; i < map->group_count; i++) {
        if (!group_is_valid(&map->groups[i], config) ||
            (i > 0 && map->groups[i].first_chunk < group_end(&map->groups[i - 1]))) {
            return false;
        }
    }
    return true;
}

/* Returns the group of a chunk; the last one for a chunk of no group. */
static const dlfs_chunk_group *group_of(const struct chunk_map *map, uint64_t chunk)
{
    uint32_t i = 0;
    while (i + 1 < map->group_count && chunk >= group_end(&map->groups[i])) {
        i++;
    }
    return &map->groups[i];
}

static bool has_run(const struct chunk_map *map, const dlfs_extent *run)
{
    const dlfs_chunk_group *group = group_of(map, run->first_chunk);
    uint64_t end = group_end(group);
    return run->first_chunk >= group->first_chunk && run->first_chunk <= end &&
           run->chunk_count <= end - run->first_chunk;
}

int chunk_map_create(const dlfs_reader_config *config, struct chunk_map **out)
{
    uint64_t count = config->extent_count;
    struct chunk_map *map = calloc(1, sizeof(*map) + count * sizeof(dlfs_extent));
    uint64_t *starts = calloc(count + 1, sizeof(*starts));
    if (map == NULL || starts == NULL) {
        free(map);
        free(starts);
        return -ENOMEM;
    }
    map->starts = starts;
    map->extent_count = count;
    map->data_offset_bytes = config->data_offset_bytes;
    map->chunk_shift = (uint32_t)__builtin_ctz(config->chunk_bytes);
    bool valid = copy_groups(map, config);
    for (uint64_t i = 0; valid && i < count; i++) {
        map->extents[i] = config->extents[i];
        valid = has_run(map, &map->extents[i]);
        starts[i + 1] = starts[i] + map->extents[i].chunk_count;
    }
    if (!valid) {
        chunk_map_destroy(map);
        return -EINVAL;
    }
    *out = map;
    return 0;
}

void chunk_map_destroy(struct chunk_map *map)
{
    if (map != NULL) {
        free((void *)map->starts);
        free(map);
    }
}

/* Returns the volume's chunk that holds a chunk of the data space. */
static uint64_t volume_chunk(const struct chunk_map *map, uint64_t chunk)
{
    uint64_t low = 0;
    uint64_t high = map->extent_count;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (map->starts[middle] <= chunk) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return map->extents[low].first_chunk + chunk - map->starts[low];
}

struct member_location chunk_map_locate(const struct chunk_map *map, uint64_t address,
                                        uint32_t copy)
{
    uint64_t number = volume_chunk(map, address >> map->chunk_shift);
    const dlfs_chunk_group *group = group_of(map, number);
    uint64_t chunk = number - group->first_chunk;
    uint64_t row = chunk / group->member_count;
    if (copy > 0) {
        row += copy * group->band_rows;
    }
    return (struct member_location){
        .member = group->first_member + (uint32_t)((chunk + copy) % group->member_count),
        .offset_bytes = map->data_offset_bytes + (row << map->chunk_shift) +
                        (address & ((UINT64_C(1) << map->chunk_shift) - 1)),
    };
}
