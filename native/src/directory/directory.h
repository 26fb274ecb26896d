/*
 * The sample directory inside the library: the layout of its segment (FORMAT.md, "Directory
 * segment"), and inline access for the reader to locations and to the storage order.
 *
 * The bytes of a segment are untrusted even if their checksums are right. Opening checks that every
 * section lies within the entries part. The content of a section is checked where it is used:
 * indices against the number of samples, name blocks against the names part. Readers check
 * addresses and lengths against dlfs_directory_data_bytes.
 */
#ifndef DLFS_DIRECTORY_H
#define DLFS_DIRECTORY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "dlfs/dlfs.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is read in place");

#define DLFS_DIRECTORY_MAGIC "DLFSDIR1"
#define DLFS_DIRECTORY_VERSION 1u
#define DLFS_DIRECTORY_BLOCK_BYTES 4096u /* unit of checksums and of section alignment */
#define DLFS_DIRECTORY_NODE_KEYS                                     \
    16u /* separators of a node, entries of a leaf, names of a block \
         */
#define DLFS_DIRECTORY_SAMPLES_MAX (UINT64_C(1) << 48)
#define DLFS_DIRECTORY_NAMES_BYTES_MAX (UINT64_C(1) << 61)
#define DLFS_DIRECTORY_LEVELS_MAX 12u /* 16^12 leaves */
#define DLFS_DIRECTORY_ALIGNMENT 64u  /* alignment of the parts in memory */
#define DLFS_DIRECTORY_VARINT_BYTES_MAX 2u

/* The first block of the entries part. */
typedef struct dlfs_directory_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint8_t dataset_uuid[16];
    uint64_t sample_count;
    uint64_t data_bytes;
    uint64_t hash_seed;
    uint32_t index_bytes;
    uint32_t level_count;
    uint64_t entries_bytes;
    uint64_t names_bytes;
    uint64_t entries_checksums_offset;
    uint64_t entries_checksum_count;
    uint64_t names_checksums_offset;
    uint64_t names_checksum_count;
    uint64_t locations_offset;
    uint64_t order_offset;
    uint64_t leaves_offset;
    uint64_t leaf_count;
    uint64_t separators_offset;
    uint64_t separator_count;
    uint64_t name_block_count;
    uint32_t tables_crc32c;
    uint32_t chunk_bytes;
    uint64_t parts_offset;
    uint64_t part_count;
    uint64_t empty_count;
    uint8_t reserved[4092 - 200];
    uint32_t header_crc32c;
} dlfs_directory_header;

_Static_assert(sizeof(dlfs_directory_header) == DLFS_DIRECTORY_BLOCK_BYTES, "one block");
_Static_assert(offsetof(dlfs_directory_header, empty_count) == 192, "as in FORMAT.md");
_Static_assert(offsetof(dlfs_directory_header, header_crc32c) == 4092, "as in FORMAT.md");
_Static_assert(sizeof(dlfs_location) == 16, "as in FORMAT.md");

/* What the positions of all sections follow from. */
typedef struct dlfs_directory_counts {
    uint64_t sample_count;
    uint64_t names_bytes; /* length of the names part */
    uint64_t part_count;  /* entries of the table of parts */
    uint64_t empty_count; /* empty directories */
} dlfs_directory_counts;

/* The positions of all sections. */
typedef struct dlfs_directory_layout {
    uint64_t sample_count;
    uint64_t part_count;
    uint64_t empty_count;
    uint64_t parts_offset;
    uint64_t leaf_bytes; /* bytes of one leaf */
    uint32_t
        index_bytes; /* this field and the next ones, up to level_first, are as in the header */
    uint32_t level_count;
    uint64_t entries_bytes;
    uint64_t names_bytes;
    uint64_t entries_checksums_offset;
    uint64_t entries_checksum_count;
    uint64_t names_checksums_offset;
    uint64_t names_checksum_count;
    uint64_t locations_offset;
    uint64_t order_offset;
    uint64_t leaves_offset;
    uint64_t leaf_count;
    uint64_t separators_offset;
    uint64_t separator_count;
    uint64_t name_block_count; /* leaf_count for samples, and then those of empty directories */
    uint64_t level_first[DLFS_DIRECTORY_LEVELS_MAX]; /* position of a level's first key */
    uint64_t level_keys[DLFS_DIRECTORY_LEVELS_MAX];  /* keys of a level, without padding */
} dlfs_directory_layout;

/* The fields that the header and the layout have in common, from index_bytes on. */
#define DLFS_DIRECTORY_COMMON_BYTES \
    (offsetof(dlfs_directory_header, tables_crc32c) - offsetof(dlfs_directory_header, index_bytes))
_Static_assert(offsetof(dlfs_directory_layout, level_first) -
                       offsetof(dlfs_directory_layout, index_bytes) ==
                   DLFS_DIRECTORY_COMMON_BYTES,
               "as in the header");

struct dlfs_directory {
    const dlfs_directory *whole; /* the directory whose samples this one has parts of, or NULL */
    dlfs_directory_layout layout;
    uint64_t data_bytes;
    uint64_t hash_seed;
    uint32_t chunk_shift; /* the chunk size is 1 << chunk_shift */
    const uint8_t *entries;
    const dlfs_location *locations;
    const void *order;
    const uint8_t *leaves;
    const uint64_t *separators;
    const uint32_t *parts;          /* [layout.part_count] */
    _Atomic(const uint8_t *) names; /* NULL until attached */
};

/* Returns the names part, of the whole directory if this one is of parts; NULL until attached. */
static inline const uint8_t *dlfs_directory_attached_names(const dlfs_directory *directory)
{
    directory = directory->whole != NULL ? directory->whole : directory;
    return atomic_load_explicit(&directory->names, memory_order_acquire);
}

/* Computes the layout. -EINVAL: a count is over its limit. */
int dlfs_directory_layout_compute(const dlfs_directory_counts *counts,
                                  dlfs_directory_layout *layout);

/*
 * Returns true if the bytes of a location lie in chunks as FORMAT.md, section 5, requires: in one
 * chunk, or from the start of a chunk on.
 */
static inline bool dlfs_location_fits_chunks(const dlfs_location *location, uint64_t chunk_bytes)
{
    uint64_t length = dlfs_location_length(location);
    uint64_t offset = dlfs_location_address(location) & (chunk_bytes - 1);
    return length == 0 || offset == 0 || offset + length <= chunk_bytes;
}
/* Returns the address behind what belongs to a sample that has bytes: of one larger than a chunk,
 * all of its last chunk. */
static inline uint64_t dlfs_location_end(const dlfs_location *location, uint64_t chunk_bytes)
{
    uint64_t length = dlfs_location_length(location);
    uint64_t end = dlfs_location_address(location) + length;
    return length > chunk_bytes ? (end + chunk_bytes - 1) & ~(chunk_bytes - 1) : end;
}
/* Compares paths like memcmp over the shorter length, then by length: <0, 0, >0. */
static inline int dlfs_compare_paths(const uint8_t *a, uint64_t a_bytes, const uint8_t *b,
                                     uint64_t b_bytes)
{
    uint64_t shorter = a_bytes < b_bytes ? a_bytes : b_bytes;
    int order = shorter > 0 ? memcmp(a, b, shorter) : 0;
    return order != 0 ? order : (a_bytes > b_bytes) - (a_bytes < b_bytes);
}
/*
 * Checks a sample larger than a chunk against the CRC32Cs of its parts: it starts a chunk, its
 * chunks are in the table, and its CRC32C is that of its parts one after the other. Errors:
 * DLFS_E_FORMAT.
 */
int dlfs_directory_check_parts(const dlfs_location *location, uint64_t chunk_bytes,
                               const uint32_t *parts, uint64_t part_count);

/* An iteration over the names of one block, in order. */
typedef struct dlfs_name_cursor {
    const uint8_t *at;
    const uint8_t *end;
    uint32_t bytes; /* length of `name` */
    uint8_t name[DLFS_PATH_BYTES_MAX];
} dlfs_name_cursor;

/* Finds the bytes of a name block. DLFS_E_FORMAT: they are not inside the names part. */
int dlfs_directory_name_block(const dlfs_directory *directory, const uint8_t *names, uint64_t block,
                              const uint8_t **begin, const uint8_t **end);
/*
 * Returns 1 if the path of sample `index` (< sample_count) equals the given one, else 0. Errors:
 * DLFS_E_FORMAT.
 */
int dlfs_directory_name_equals(const dlfs_directory *directory, const uint8_t *names,
                               uint64_t index, const uint8_t *path, uint64_t path_bytes);

/* ---- for the reader -------------------------------------------------------------------------- */

/*
 * Returns the location of an index < count, as found on media: the caller checks address and length
 * against data_bytes.
 */
static inline const dlfs_location *dlfs_directory_location(const dlfs_directory *directory,
                                                           uint64_t index)
{
    return &directory->locations[index];
}

/*
 * Returns the index at a rank < count, as found on media: the caller checks it against the count.
 */
static inline uint64_t dlfs_directory_order_at(const dlfs_directory *directory, uint64_t rank)
{
    if (directory->layout.index_bytes == sizeof(uint32_t)) {
        return ((const uint32_t *)directory->order)[rank];
    }
    return ((const uint64_t *)directory->order)[rank];
}

#endif
