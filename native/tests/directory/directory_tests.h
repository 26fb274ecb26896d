/* Directory segments in memory, for the tests of the directory. */
#ifndef DLFS_TESTS_DIRECTORY_H
#define DLFS_TESTS_DIRECTORY_H

#include <dlfs/import.h>

#include <string.h>

#include "check.h"
#include "directory/directory.h"

#define TEXT_MAX 64
#define CHUNK_BYTES 65536u
#define SAMPLE_BYTES 128u /* divides a chunk, so that no sample crosses the end of one */

typedef struct sample_set {
    uint64_t count;
    uint8_t *text;
    uint64_t *offsets;
    dlfs_location *locations;
    uint32_t *parts;
    uint64_t part_count;
    uint64_t data_bytes;
} sample_set;

typedef struct segment {
    dlfs_directory_plan plan;
    uint8_t *entries;
    uint8_t *names;
} segment;

static const uint8_t UUID[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

static inline void *allocate(uint64_t bytes)
{
    void *memory = aligned_alloc(DLFS_DIRECTORY_BLOCK_BYTES, bytes);
    CHECK(memory);
    return memory;
}

/* count samples of SAMPLE_BYTES; sample i lies at place (i * 7) mod count, when 7 does not divide
 * count. */
static inline sample_set make_samples(uint64_t count)
{
    uint64_t chunks = (count * SAMPLE_BYTES + CHUNK_BYTES - 1) / CHUNK_BYTES;
    sample_set set = {.count = count, .data_bytes = chunks * CHUNK_BYTES};
    set.text = malloc(count * TEXT_MAX + 1);
    set.offsets = malloc((count + 1) * sizeof(uint64_t));
    set.locations = calloc(count + 1, sizeof(dlfs_location));
    uint64_t used = 0;
    for (uint64_t i = 0; i < count; i++) {
        set.offsets[i] = used;
        used +=
            (uint64_t)snprintf((char *)set.text + used, TEXT_MAX, "train/%03llu/image-%06llu.jpg",
                               (unsigned long long)(i / 100), (unsigned long long)i);
        set.locations[i] = (dlfs_location){
            .crc32c = (uint32_t)i,
            .length_low = SAMPLE_BYTES,
            .address = i * 7 % count * SAMPLE_BYTES,
        };
    }
    set.offsets[count] = used;
    return set;
}

static inline void free_samples(sample_set *set)
{
    free(set->text);
    free(set->offsets);
    free(set->locations);
    free(set->parts);
}

static inline dlfs_directory_content content_of(const sample_set *set)
{
    dlfs_directory_content content = {
        .count = set->count,
        .names = set->text,
        .offsets = set->offsets,
        .locations = set->locations,
        .parts = set->parts,
        .part_count = set->part_count,
        .data_bytes = set->data_bytes,
        .chunk_bytes = CHUNK_BYTES,
    };
    memcpy(content.dataset_uuid, UUID, sizeof(content.dataset_uuid));
    return content;
}

static inline segment build(const sample_set *set)
{
    segment made;
    const dlfs_directory_content content = content_of(set);
    CHECK_EQ(dlfs_directory_plan_build(&content, &made.plan), 0);
    CHECK_EQ(made.plan.entries_bytes % DLFS_DIRECTORY_BLOCK_BYTES, 0);
    CHECK_EQ(made.plan.names_bytes % DLFS_DIRECTORY_BLOCK_BYTES, 0);
    made.entries = allocate(made.plan.entries_bytes);
    made.names = allocate(made.plan.names_bytes);
    CHECK_EQ(dlfs_directory_build(&made.plan, &content, made.entries, made.names), 0);
    return made;
}

/* Builds a set into the memory of a segment that was planned for it. */
static inline int build_again(const sample_set *set, const segment *made)
{
    const dlfs_directory_content content = content_of(set);
    return dlfs_directory_build(&made->plan, &content, made->entries, made->names);
}

static inline dlfs_directory *open_segment(const segment *made)
{
    dlfs_directory *directory;
    CHECK_EQ(dlfs_directory_open(made->entries, made->plan.entries_bytes, &directory), 0);
    CHECK_EQ(dlfs_directory_attach_names(directory, made->names, made->plan.names_bytes), 0);
    return directory;
}

static inline void free_segment(segment *made)
{
    free(made->entries);
    free(made->names);
}

static inline dlfs_directory_header *header_of(segment *made)
{
    return (dlfs_directory_header *)made->entries;
}

/* Corrects every checksum after a change. */
static inline void seal(segment *made)
{
    dlfs_directory_header *header = header_of(made);
    uint64_t tables_bytes = header->locations_offset - header->entries_checksums_offset;
    dlfs_crc32c_blocks(made->entries + header->locations_offset,
                       made->plan.entries_bytes - header->locations_offset,
                       DLFS_DIRECTORY_BLOCK_BYTES,
                       (uint32_t *)(made->entries + header->entries_checksums_offset));
    dlfs_crc32c_blocks(made->names, made->plan.names_bytes, DLFS_DIRECTORY_BLOCK_BYTES,
                       (uint32_t *)(made->entries + header->names_checksums_offset));
    header->tables_crc32c =
        dlfs_crc32c(0, made->entries + header->entries_checksums_offset, tables_bytes);
    header->header_crc32c = dlfs_crc32c(0, header, offsetof(dlfs_directory_header, header_crc32c));
}

#endif
