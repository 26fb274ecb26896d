/*
 * The sample directory of a dataset: paths and locations of its samples. Directories are built with
 * import.h. The conventions are those of dlfs.h.
 */
#ifndef DLFS_PUBLIC_DIRECTORY_H
#define DLFS_PUBLIC_DIRECTORY_H

#include <dlfs/codes.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Place and checksum of one sample: 16 bytes, little-endian, as on media (FORMAT.md). The
 * address counts in the dataset's own data space: chunk number * chunk_bytes + offset in the chunk.
 */
typedef struct dlfs_location {
    uint32_t crc32c;
    uint32_t length_low; /* bits 0..31 of the length */
    uint64_t address;    /* bits 0..55 the address, bits 56..63 are bits 32..39 of the length */
} dlfs_location;
/* Returns the address of the sample's first byte in the dataset's data space. */
static inline uint64_t dlfs_location_address(const dlfs_location *location)
{
    return location->address & DLFS_ADDRESS_MAX;
}
/* Returns the length of the sample, in bytes. */
static inline uint64_t dlfs_location_length(const dlfs_location *location)
{
    return (location->address >> 56) << 32 | location->length_low;
}
/* Returns the CRC32C of the sample's bytes. */
static inline uint32_t dlfs_location_crc32c(const dlfs_location *location)
{
    return location->crc32c;
}

/*
 * The directory of one sealed dataset, over the bytes of its directory segment as on media. The
 * caller owns these bytes (they may be read-only) and keeps them until the directory is closed. The
 * directory must outlive the readers and the sequences that borrow it; batches do not use it.
 * Immutable: any threads at once.
 */
typedef struct dlfs_directory dlfs_directory;

/*
 * Opens a directory over its entries part. Checks the header and the bounds of every section, but
 * not the checksum of every block, which dlfs_directory_verify checks. Errors: DLFS_E_FORMAT,
 * DLFS_E_TRUNCATED, DLFS_E_CHECKSUM.
 */
DLFS_API int dlfs_directory_open(const void *entries, uint64_t entries_bytes, dlfs_directory **out);
/*
 * Opens a directory for reading a part of each sample of `whole`, such as some of its fields. It
 * has the samples of `whole` with other locations, each within that of the sample, and the names
 * that `whole` has. Sequences over it have the order of the whole samples. `whole` must outlive it.
 *
 * locations: [count] in index order, borrowed; their checksums are those of the parts.
 * order: [count] the indices sorted by (address, index), u32 each, or u64 if count >= 2^32 - 1;
 *        borrowed. NULL: as in `whole`.
 *
 * Errors: -EINVAL, -ENOMEM.
 */
DLFS_API int dlfs_directory_open_parts(const dlfs_directory *whole, const dlfs_location *locations,
                                       const void *order, dlfs_directory **out);
/* Frees a directory, but not the bytes that it was opened over, which the caller owns. */
DLFS_API void dlfs_directory_close(dlfs_directory *directory);
/* Gives the directory its names part, once. Until then functions that need names return -EAGAIN. */
DLFS_API int dlfs_directory_attach_names(dlfs_directory *directory, const void *names,
                                         uint64_t names_bytes);
/*
 * Checks every block of a part (0: entries, 1: names), in memory at base, against the checksums in
 * the entries. *bad_block gets the first bad block, as an index of 4096-byte blocks of that part.
 * If base is the memory of the open directory, its storage order is checked too: it must name every
 * sample once, and each must lie in chunks as FORMAT.md, section 5, requires, those larger than a
 * chunk with a table of parts. Errors: DLFS_E_CHECKSUM, DLFS_E_FORMAT (the order, a location).
 */
DLFS_API int dlfs_directory_verify(const dlfs_directory *directory, uint32_t part, const void *base,
                                   uint64_t bytes, uint64_t *bad_block);

DLFS_API uint64_t dlfs_directory_count(const dlfs_directory *directory);
DLFS_API uint64_t dlfs_directory_data_bytes(const dlfs_directory *directory);
/* Returns the length of the names part, as the header states it. */
DLFS_API uint64_t dlfs_directory_names_bytes(const dlfs_directory *directory);
/*
 * Returns the location array, [count] in index order, which stays valid as long as the directory.
 * dlfs_location_address and its siblings read the fields.
 */
DLFS_API const dlfs_location *dlfs_directory_locations(const dlfs_directory *directory);
/* Returns the chunk size of the volume, in bytes: a power of two. */
DLFS_API uint64_t dlfs_directory_chunk_bytes(const dlfs_directory *directory);
/*
 * Returns the CRC32Cs of the parts of samples larger than a chunk, [*count] by the number of the
 * chunk in the data space (address / chunk size), 0 for a chunk that has no part of such a sample.
 * Each part is the bytes of the sample in one chunk; the sample starts a chunk, so only the last
 * part is shorter than a chunk. *count is 0 if no sample is larger than a chunk. The array stays
 * valid as long as the directory. Parts are those of whole samples, also in a directory that
 * dlfs_directory_open_parts opened.
 */
DLFS_API const uint32_t *dlfs_directory_parts(const dlfs_directory *directory, uint64_t *count);
/*
 * Checks that the CRC32C of each sample larger than a chunk is that of its parts one after the
 * other. *bad_index gets the first sample of which it is not. Errors: DLFS_E_FORMAT; -EINVAL for a
 * directory of parts.
 */
DLFS_API int dlfs_directory_verify_parts(const dlfs_directory *directory, uint64_t *bad_index);
/*
 * Sets out[i] to the index of the sample at rank first + i in storage order (by address). -EINVAL:
 * out of range.
 */
DLFS_API int dlfs_directory_order(const dlfs_directory *directory, uint64_t first, uint64_t count,
                                  uint64_t *out);
/*
 * Returns the rank, in storage order, of the first sample whose address is >= address; count if
 * there is none.
 */
DLFS_API uint64_t dlfs_directory_rank_at(const dlfs_directory *directory, uint64_t address);

/*
 * Finds samples by path, many at once: out[i] is the index of paths[offsets[i]..offsets[i+1]), or
 * UINT64_MAX if no sample has this path. Hashes select candidates, names decide. Errors: -EAGAIN
 * without names, DLFS_E_FORMAT for a malformed tree.
 */
DLFS_API int dlfs_directory_find(const dlfs_directory *directory, const uint8_t *paths,
                                 const uint64_t *offsets, uint64_t count, uint64_t *out);
/* Finds the first sample whose path is >= path in byte order; count if there is none. */
DLFS_API int dlfs_directory_lower_bound(const dlfs_directory *directory, const uint8_t *path,
                                        uint64_t path_bytes, uint64_t *index);
/*
 * Decodes paths first..first+count-1 into text[0..text_bytes), one after the other, with
 * offsets[0..count] around them. Returns how many fitted: at least 1, unless text_bytes is under
 * DLFS_PATH_BYTES_MAX. Errors: DLFS_E_FORMAT, -EINVAL, -EAGAIN.
 */
DLFS_API int64_t dlfs_directory_names(const dlfs_directory *directory, uint64_t first,
                                      uint64_t count, uint8_t *text, uint64_t text_bytes,
                                      uint64_t *offsets);
/*
 * Returns the number of directories without a sample below them that the dataset has. Only those
 * without another one below them are listed; all directories above them exist, too.
 */
DLFS_API uint64_t dlfs_directory_empty_count(const dlfs_directory *directory);
/*
 * Decodes the paths of empty directories, each with a '/' behind it, in byte order, as
 * dlfs_directory_names those of samples.
 */
DLFS_API int64_t dlfs_directory_empty_names(const dlfs_directory *directory, uint64_t first,
                                            uint64_t count, uint8_t *text, uint64_t text_bytes,
                                            uint64_t *offsets);
/*
 * Finds the first empty directory whose path with a '/' behind it is >= path in byte order; their
 * count if there is none.
 */
DLFS_API int dlfs_directory_empty_lower_bound(const dlfs_directory *directory, const uint8_t *path,
                                              uint64_t path_bytes, uint64_t *number);
/*
 * Decodes the paths of the samples indices[0..count), in any order, as dlfs_directory_names does
 * for a range. Fastest for rising indices.
 */
DLFS_API int64_t dlfs_directory_names_of(const dlfs_directory *directory, const uint64_t *indices,
                                         uint64_t count, uint8_t *text, uint64_t text_bytes,
                                         uint64_t *offsets);

#ifdef __cplusplus
}
#endif

#endif
