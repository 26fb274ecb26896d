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
    uint8_t *entries;
    uint8_t *names;
    uint64_t entries_bytes;
    uint64_t names_bytes;
    uint64_t hash_seed;
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

static inline dlfs_directory_builder *builder_of(uint64_t data_bytes)
{
    dlfs_directory_config config = {.data_bytes = data_bytes, .chunk_bytes = CHUNK_BYTES};
    dlfs_directory_builder *builder;
    memcpy(config.dataset_uuid, UUID, sizeof(config.dataset_uuid));
    CHECK_EQ(dlfs_directory_builder_create(&config, &builder), 0);
    return builder;
}

/* Adds the samples first..first+count-1 of a set. */
static inline int add_samples(dlfs_directory_builder *builder, const sample_set *set,
                              uint64_t first, uint64_t count, dlfs_path_refusal *refusal)
{
    return dlfs_directory_builder_add(builder, set->text, set->offsets + first,
                                      set->locations + first, NULL, count, refusal);
}

/* Completes a segment and copies it. The builder is destroyed. */
static inline int finish(dlfs_directory_builder *builder, const sample_set *set, segment *made)
{
    dlfs_path_refusal refusal;
    dlfs_directory_segment built;
    int code =
        dlfs_directory_builder_finish(builder, set->parts, set->part_count, &refusal, &built);
    CHECK_EQ(refusal.rule, 0);
    if (code == 0) {
        CHECK_EQ(built.entries_bytes % DLFS_DIRECTORY_BLOCK_BYTES, 0);
        CHECK_EQ(built.names_bytes % DLFS_DIRECTORY_BLOCK_BYTES, 0);
        *made = (segment){.entries = allocate(built.entries_bytes),
                          .names = allocate(built.names_bytes),
                          .entries_bytes = built.entries_bytes,
                          .names_bytes = built.names_bytes,
                          .hash_seed = built.hash_seed};
        memcpy(made->entries, built.entries, built.entries_bytes);
        memcpy(made->names, built.names, built.names_bytes);
    }
    dlfs_directory_builder_destroy(builder);
    return code;
}

/* Builds the segment of a set. */
static inline int try_build(const sample_set *set, segment *made)
{
    dlfs_directory_builder *builder = builder_of(set->data_bytes);
    dlfs_path_refusal refusal;
    CHECK_EQ(add_samples(builder, set, 0, set->count, &refusal), 0);
    return finish(builder, set, made);
}

static inline segment build(const sample_set *set)
{
    segment made;
    CHECK_EQ(try_build(set, &made), 0);
    return made;
}

static inline void free_segment(segment *made)
{
    free(made->entries);
    free(made->names);
}

/* Returns the code of building a set's segment. */
static inline int build_code(const sample_set *set)
{
    segment made;
    int code = try_build(set, &made);
    if (code == 0) {
        free_segment(&made);
    }
    return code;
}

static inline dlfs_directory *open_segment(const segment *made)
{
    dlfs_directory *directory;
    CHECK_EQ(dlfs_directory_open(made->entries, made->entries_bytes, &directory), 0);
    CHECK_EQ(dlfs_directory_attach_names(directory, made->names, made->names_bytes), 0);
    return directory;
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
                       made->entries_bytes - header->locations_offset, DLFS_DIRECTORY_BLOCK_BYTES,
                       (uint32_t *)(made->entries + header->entries_checksums_offset));
    dlfs_crc32c_blocks(made->names, made->names_bytes, DLFS_DIRECTORY_BLOCK_BYTES,
                       (uint32_t *)(made->entries + header->names_checksums_offset));
    header->tables_crc32c =
        dlfs_crc32c(0, made->entries + header->entries_checksums_offset, tables_bytes);
    header->header_crc32c = dlfs_crc32c(0, header, offsetof(dlfs_directory_header, header_crc32c));
}

#endif
