/* The chunks of a dataset on the members of its volume. */
#ifndef DLFS_CHUNK_MAP_H
#define DLFS_CHUNK_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "dlfs/reader.h"

/* The runs of a dataset and the groups of members that have the chunks. Immutable. */
struct chunk_map {
    uint64_t data_offset_bytes;
    uint64_t extent_count;
    uint32_t chunk_shift; /* log2 of chunk_bytes */
    uint32_t group_count;
    dlfs_chunk_group groups[DLFS_GROUPS_MAX];
    const uint64_t *starts; /* [extent_count + 1] first dataset chunk of each extent */
    dlfs_extent extents[];  /* [extent_count] */
};

/*
 * Creates the map of a reader's configuration. Errors: -EINVAL (a run lies in no group, or groups
 * are malformed), -ENOMEM.
 */
int chunk_map_create(const dlfs_reader_config *config, struct chunk_map **out);
/* Frees a map; NULL is allowed. */
void chunk_map_destroy(struct chunk_map *map);
/* Where a byte lies on a member. */
struct member_location {
    uint32_t member;
    uint64_t offset_bytes;
};
/* Finds a copy of an address of the data space. */
struct member_location chunk_map_locate(const struct chunk_map *map, uint64_t address,
                                        uint32_t copy);

#endif
