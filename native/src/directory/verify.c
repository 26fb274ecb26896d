/*
 * Checks every block of a directory's parts against the checksums in its entries, the storage
 * order, by which the reader finds the samples of a chunk to verify, and that samples lie in chunks
 * as the format requires, so that each part of a large one has its checksum.
 */
#include "directory/directory.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#define PREFETCH_RANKS 32u

/* Checks blocks against a table of checksums. Sets *bad_block, counted from `first`. */
static int verify_blocks(const uint8_t *blocks, const void *checksums, uint64_t count,
                         uint64_t first, uint64_t *bad_block)
{
    const uint32_t *table = checksums;
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *block = blocks + i * DLFS_DIRECTORY_BLOCK_BYTES;
        if (dlfs_crc32c(0, block, DLFS_DIRECTORY_BLOCK_BYTES) != table[i]) {
            *bad_block = first + i;
            return DLFS_E_CHECKSUM;
        }
    }
    return 0;
}

/*
 * Checks the blocks before the locations. All other checks depend on them, so they must equal those
 * that were opened.
 */
static int verify_head(const dlfs_directory *directory, const uint8_t *base, uint64_t *bad_block)
{
    uint64_t blocks = directory->layout.locations_offset / DLFS_DIRECTORY_BLOCK_BYTES;
    const dlfs_directory_header *header = (const dlfs_directory_header *)base;
    if (dlfs_crc32c(0, header, offsetof(dlfs_directory_header, header_crc32c)) !=
        header->header_crc32c) {
        *bad_block = 0;
        return DLFS_E_CHECKSUM;
    }
    uint64_t tables_bytes =
        directory->layout.locations_offset - directory->layout.entries_checksums_offset;
    if (base == directory->entries) {
        /* All tables share one checksum; if it is wrong, their first block is reported. */
        if (dlfs_crc32c(0, base + directory->layout.entries_checksums_offset, tables_bytes) ==
            header->tables_crc32c) {
            return 0;
        }
        *bad_block = 1;
        return DLFS_E_CHECKSUM;
    }
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t offset = i * DLFS_DIRECTORY_BLOCK_BYTES;
        if (memcmp(base + offset, directory->entries + offset, DLFS_DIRECTORY_BLOCK_BYTES) != 0) {
            *bad_block = i;
            return DLFS_E_CHECKSUM;
        }
    }
    return 0;
}

/*
 * Returns the first rank at which the order does not rise by (address, index), or names no sample
 * or one that lies in chunks, or overlaps another, as none may; or else the number of samples. An
 * order that rises over all ranks contains each sample once.
 */
static uint64_t first_bad_rank(const dlfs_directory *directory)
{
    uint64_t count = directory->layout.sample_count;
    uint64_t chunk_bytes = dlfs_directory_chunk_bytes(directory);
    uint64_t address = 0;
    uint64_t index = 0;
    uint64_t end = 0; /* of what belongs to the samples so far */
    for (uint64_t rank = 0; rank < count; rank++) {
        uint64_t last_address = address;
        uint64_t last_index = index;
        if (count - rank > PREFETCH_RANKS) {
            uint64_t later = dlfs_directory_order_at(directory, rank + PREFETCH_RANKS);
            if (later < count) {
                __builtin_prefetch(dlfs_directory_location(directory, later));
            }
        }
        index = dlfs_directory_order_at(directory, rank);
        if (index >= count) {
            return rank;
        }
        const dlfs_location *location = dlfs_directory_location(directory, index);
        address = dlfs_location_address(location);
        bool rises = address > last_address || (address == last_address && index > last_index);
        bool empty = dlfs_location_length(location) == 0;
        bool lacks_parts =
            dlfs_location_length(location) > chunk_bytes && directory->layout.part_count == 0;
        if ((rank > 0 && !rises) || !dlfs_location_fits_chunks(location, chunk_bytes) ||
            lacks_parts || (!empty && address < end)) {
            return rank;
        }
        end = empty ? end : dlfs_location_end(location, chunk_bytes);
    }
    return count;
}

static int verify_entries(const dlfs_directory *directory, const uint8_t *base, uint64_t *bad_block)
{
    const dlfs_directory_layout *layout = &directory->layout;
    int code = verify_head(directory, base, bad_block);
    if (code == 0) {
        code = verify_blocks(base + layout->locations_offset,
                             directory->entries + layout->entries_checksums_offset,
                             layout->entries_checksum_count,
                             layout->locations_offset / DLFS_DIRECTORY_BLOCK_BYTES, bad_block);
    }
    if (code < 0 || base != directory->entries) { /* a copy of the same order */
        return code;
    }
    uint64_t rank = first_bad_rank(directory);
    *bad_block = (layout->order_offset + rank * layout->index_bytes) / DLFS_DIRECTORY_BLOCK_BYTES;
    return rank == layout->sample_count ? 0 : DLFS_E_FORMAT;
}

int dlfs_directory_check_parts(const dlfs_location *location, uint64_t chunk_bytes,
                               const uint32_t *parts, uint64_t part_count)
{
    uint64_t left = dlfs_location_length(location);
    uint64_t chunk = dlfs_location_address(location) / chunk_bytes;
    if (dlfs_location_address(location) % chunk_bytes != 0 || chunk >= part_count ||
        (left - 1) / chunk_bytes >= part_count - chunk) {
        return DLFS_E_FORMAT;
    }
    uint32_t crc = 0;
    for (; left > 0; chunk++) {
        uint64_t bytes = left < chunk_bytes ? left : chunk_bytes;
        dlfs_crc32c_combine(&crc, &parts[chunk], &bytes, 1);
        left -= bytes;
    }
    return crc == dlfs_location_crc32c(location) ? 0 : DLFS_E_FORMAT;
}

int dlfs_directory_verify_parts(const dlfs_directory *directory, uint64_t *bad_index)
{
    uint64_t chunk_bytes = dlfs_directory_chunk_bytes(directory);
    if (bad_index == NULL || directory->whole != NULL) {
        return -EINVAL;
    }
    for (uint64_t index = 0; index < directory->layout.sample_count; index++) {
        const dlfs_location *location = dlfs_directory_location(directory, index);
        if (dlfs_location_length(location) > chunk_bytes &&
            dlfs_directory_check_parts(location, chunk_bytes, directory->parts,
                                       directory->layout.part_count) < 0) {
            *bad_index = index;
            return DLFS_E_FORMAT;
        }
    }
    return 0;
}

int dlfs_directory_verify(const dlfs_directory *directory, uint32_t part, const void *base,
                          uint64_t bytes, uint64_t *bad_block)
{
    if (directory == NULL || base == NULL || bad_block == NULL || part > 1) {
        return -EINVAL;
    }
    if (bytes < (part == 0 ? directory->layout.entries_bytes : directory->layout.names_bytes)) {
        return DLFS_E_TRUNCATED;
    }
    if (part == 0) {
        return verify_entries(directory, base, bad_block);
    }
    return verify_blocks(base, directory->entries + directory->layout.names_checksums_offset,
                         directory->layout.names_checksum_count, 0, bad_block);
}
