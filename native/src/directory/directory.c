/*
 * Opens a directory over its bytes, and answers queries that take one array access.
 *
 * The header states the position of each section but is not trusted: the layout is computed from
 * the number of samples and the length of the names part, and a header that differs is refused.
 * Accesses that are within bounds at open therefore stay within bounds.
 */
#include "directory/directory.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static uint64_t round_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

static void compute_levels(dlfs_directory_layout *layout)
{
    uint64_t keys = layout->leaf_count;
    layout->level_count = 0;
    layout->separator_count = 0;
    while (keys > 0) {
        layout->level_first[layout->level_count] = layout->separator_count;
        layout->level_keys[layout->level_count] = keys;
        layout->level_count++;
        layout->separator_count += round_up(keys, DLFS_DIRECTORY_NODE_KEYS);
        if (keys <= DLFS_DIRECTORY_NODE_KEYS) {
            break;
        }
        keys = (keys + DLFS_DIRECTORY_NODE_KEYS - 1) / DLFS_DIRECTORY_NODE_KEYS;
    }
}

int dlfs_directory_layout_compute(const dlfs_directory_counts *counts,
                                  dlfs_directory_layout *layout)
{
    const uint64_t block = DLFS_DIRECTORY_BLOCK_BYTES;
    const uint64_t keys = DLFS_DIRECTORY_NODE_KEYS;
    const uint64_t sample_count = counts->sample_count;
    const uint64_t names_bytes = counts->names_bytes;

    /* with these limits no sum below comes near 2^64 */
    if (sample_count > DLFS_DIRECTORY_SAMPLES_MAX || names_bytes > DLFS_DIRECTORY_NAMES_BYTES_MAX ||
        counts->part_count > DLFS_ADDRESS_MAX / DLFS_CHUNK_BYTES_MIN ||
        counts->empty_count > DLFS_DIRECTORY_SAMPLES_MAX) {
        return -EINVAL;
    }
    memset(layout, 0, sizeof(*layout));
    layout->sample_count = sample_count;
    layout->names_bytes = names_bytes;
    layout->part_count = counts->part_count;
    layout->empty_count = counts->empty_count;
    layout->index_bytes = sample_count < UINT32_MAX ? 4 : 8;
    layout->leaf_count = (sample_count + keys - 1) / keys;
    layout->leaf_bytes = keys * (sizeof(uint32_t) + layout->index_bytes);
    layout->name_block_count = layout->leaf_count + (counts->empty_count + keys - 1) / keys;
    compute_levels(layout);

    uint64_t locations = round_up(sample_count * sizeof(dlfs_location), block);
    uint64_t order = round_up(sample_count * layout->index_bytes, block);
    uint64_t leaves = round_up(layout->leaf_count * layout->leaf_bytes, block);
    uint64_t separators = round_up(layout->separator_count * sizeof(uint64_t), block);
    uint64_t parts = round_up(layout->part_count * sizeof(uint32_t), block);
    layout->entries_checksum_count = (locations + order + leaves + separators + parts) / block;
    layout->names_checksum_count = names_bytes / block;
    layout->entries_checksums_offset = block;
    layout->names_checksums_offset =
        block + round_up(layout->entries_checksum_count * sizeof(uint32_t), block);
    layout->locations_offset = layout->names_checksums_offset +
                               round_up(layout->names_checksum_count * sizeof(uint32_t), block);
    layout->order_offset = layout->locations_offset + locations;
    layout->leaves_offset = layout->order_offset + order;
    layout->separators_offset = layout->leaves_offset + leaves;
    layout->parts_offset = layout->separators_offset + separators;
    layout->entries_bytes = layout->parts_offset + parts;
    return 0;
}

/*
 * Returns true if the data space consists of chunks, and the table of parts is empty or has an
 * entry for each.
 */
static bool chunks_agree(const dlfs_directory_header *header)
{
    uint32_t chunk = header->chunk_bytes;
    if (chunk < DLFS_CHUNK_BYTES_MIN || chunk > DLFS_CHUNK_BYTES_MAX ||
        (chunk & (chunk - 1)) != 0 || header->data_bytes % chunk != 0) {
        return false;
    }
    return header->part_count == 0 || header->part_count == header->data_bytes / chunk;
}

/*
 * Checks the header alone: its checksum, and that its fields have the values that the format
 * requires.
 */
static int check_header(const dlfs_directory_header *header, dlfs_directory_layout *layout)
{
    if (memcmp(header->magic, DLFS_DIRECTORY_MAGIC, sizeof(header->magic)) != 0) {
        return DLFS_E_FORMAT;
    }
    if (dlfs_crc32c(0, header, offsetof(dlfs_directory_header, header_crc32c)) !=
        header->header_crc32c) {
        return DLFS_E_CHECKSUM;
    }
    if (header->version != DLFS_DIRECTORY_VERSION) {
        return DLFS_E_FORMAT;
    }
    const dlfs_directory_counts counts = {.sample_count = header->sample_count,
                                          .names_bytes = header->names_bytes,
                                          .part_count = header->part_count,
                                          .empty_count = header->empty_count};
    if (dlfs_directory_layout_compute(&counts, layout) < 0) {
        return DLFS_E_FORMAT;
    }
    if (header->header_bytes != sizeof(*header) || header->parts_offset != layout->parts_offset ||
        memcmp((const uint8_t *)header + offsetof(dlfs_directory_header, index_bytes),
               (const uint8_t *)layout + offsetof(dlfs_directory_layout, index_bytes),
               DLFS_DIRECTORY_COMMON_BYTES) != 0 ||
        !chunks_agree(header)) {
        return DLFS_E_FORMAT;
    }
    uint64_t offsets_bytes = (layout->name_block_count + 1) * sizeof(uint64_t);
    if (layout->names_bytes % DLFS_DIRECTORY_BLOCK_BYTES != 0 ||
        layout->names_bytes < offsets_bytes) {
        return DLFS_E_FORMAT;
    }
    return 0;
}

int dlfs_directory_open(const void *entries, uint64_t entries_bytes, dlfs_directory **out)
{
    const dlfs_directory_header *header = entries;
    dlfs_directory_layout layout;

    if (entries_bytes < sizeof(*header)) {
        return DLFS_E_TRUNCATED;
    }
    if (entries == NULL || out == NULL || (uintptr_t)entries % DLFS_DIRECTORY_ALIGNMENT != 0) {
        return -EINVAL;
    }
    int code = check_header(header, &layout);
    if (code < 0) {
        return code;
    }
    if (entries_bytes < layout.entries_bytes) {
        return DLFS_E_TRUNCATED;
    }
    const uint8_t *base = entries;
    const uint8_t *tables = base + layout.entries_checksums_offset;
    if (dlfs_crc32c(0, tables, layout.locations_offset - layout.entries_checksums_offset) !=
        header->tables_crc32c) {
        return DLFS_E_CHECKSUM;
    }

    dlfs_directory *directory = calloc(1, sizeof(*directory));
    if (directory == NULL) {
        return -ENOMEM;
    }
    directory->layout = layout;
    directory->data_bytes = header->data_bytes;
    directory->hash_seed = header->hash_seed;
    directory->chunk_shift = (uint32_t)__builtin_ctz(header->chunk_bytes);
    directory->entries = base;
    directory->locations = (const dlfs_location *)(base + layout.locations_offset);
    directory->order = base + layout.order_offset;
    directory->leaves = base + layout.leaves_offset;
    directory->separators = (const uint64_t *)(base + layout.separators_offset);
    directory->parts = (const uint32_t *)(base + layout.parts_offset);
    atomic_init(&directory->names, NULL);
    *out = directory;
    return 0;
}

int dlfs_directory_open_parts(const dlfs_directory *whole, const dlfs_location *locations,
                              const void *order, dlfs_directory **out)
{
    if (whole == NULL || whole->whole != NULL || out == NULL ||
        (locations == NULL && whole->layout.sample_count > 0)) {
        return -EINVAL;
    }
    dlfs_directory *directory = calloc(1, sizeof(*directory));
    if (directory == NULL) {
        return -ENOMEM;
    }
    directory->whole = whole;
    directory->layout = whole->layout;
    directory->data_bytes = whole->data_bytes;
    directory->hash_seed = whole->hash_seed;
    directory->chunk_shift = whole->chunk_shift;
    directory->entries = whole->entries;
    directory->locations = locations;
    directory->order = order != NULL ? order : whole->order;
    directory->leaves = whole->leaves;
    directory->separators = whole->separators;
    directory->parts = whole->parts;
    *out = directory;
    return 0;
}

void dlfs_directory_close(dlfs_directory *directory)
{
    free(directory);
}

int dlfs_directory_attach_names(dlfs_directory *directory, const void *names, uint64_t names_bytes)
{
    const uint8_t *none = NULL;

    if (directory == NULL || names == NULL || (uintptr_t)names % DLFS_DIRECTORY_ALIGNMENT != 0) {
        return -EINVAL;
    }
    if (names_bytes < directory->layout.names_bytes) {
        return DLFS_E_TRUNCATED;
    }
    if (!atomic_compare_exchange_strong(&directory->names, &none, names)) {
        return -EALREADY;
    }
    return 0;
}

uint64_t dlfs_directory_count(const dlfs_directory *directory)
{
    return directory->layout.sample_count;
}

uint64_t dlfs_directory_data_bytes(const dlfs_directory *directory)
{
    return directory->data_bytes;
}

uint64_t dlfs_directory_names_bytes(const dlfs_directory *directory)
{
    return directory->layout.names_bytes;
}

const dlfs_location *dlfs_directory_locations(const dlfs_directory *directory)
{
    return directory->locations;
}

uint64_t dlfs_directory_chunk_bytes(const dlfs_directory *directory)
{
    return UINT64_C(1) << directory->chunk_shift;
}

const uint32_t *dlfs_directory_parts(const dlfs_directory *directory, uint64_t *count)
{
    *count = directory->layout.part_count;
    return directory->parts;
}

int dlfs_directory_order(const dlfs_directory *directory, uint64_t first, uint64_t count,
                         uint64_t *out)
{
    uint64_t sample_count = directory->layout.sample_count;
    if (first > sample_count || count > sample_count - first) {
        return -EINVAL;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint64_t index = dlfs_directory_order_at(directory, first + i);
        if (index >= sample_count) {
            return DLFS_E_FORMAT;
        }
        out[i] = index;
    }
    return 0;
}

uint64_t dlfs_directory_rank_at(const dlfs_directory *directory, uint64_t address)
{
    uint64_t sample_count = directory->layout.sample_count;
    uint64_t low = 0;
    uint64_t high = sample_count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        uint64_t index = dlfs_directory_order_at(directory, middle);
        /*
         * An invalid index ends the search early; the caller finds the same error in the order
         * itself.
         */
        if (index < sample_count &&
            dlfs_location_address(dlfs_directory_location(directory, index)) < address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}
