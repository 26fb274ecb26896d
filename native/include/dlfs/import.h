/*
 * Importing samples: packing them into chunks, building their directory, and reading many small
 * source files.
 *
 * The writer of a dataset uses it (dlfs/_native/packing.py, dlfs/_native/files.py); readers do not
 * need it. The conventions are those of dlfs.h.
 */
#ifndef DLFS_IMPORT_H
#define DLFS_IMPORT_H

#include <dlfs/dlfs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- packing --------------------------------------------------------------------------------- */

/*
 * Where packing (or its verification) stands in a dataset's data space. A plain value: zero it, set
 * the two sizes (powers of two, block_bytes <= chunk_bytes) and pass it on from window to window.
 */
typedef struct dlfs_packing {
    uint32_t chunk_bytes;
    uint32_t block_bytes;
    uint64_t address;    /* the first free byte of the data space */
    uint64_t start;      /* address of the sample under way */
    uint64_t done_bytes; /* of the sample under way */
    uint32_t crc32c;     /* of these */
    uint32_t under_way;  /* 1: the sample that comes first in the next call has been started */
} dlfs_packing;

/*
 * Changes an order of packing a little so that chunks are filled: where the next sample does not
 * fit in what is left of a chunk, the longest of the following ones that does steps ahead of it.
 * order[0..count) holds different numbers of samples, < length_count. Nothing is packed. Errors:
 * -EINVAL (sizes, a number, a length < 0).
 */
#define DLFS_PACK_CANDIDATES 64u /* the next sample and those that may step ahead of it */
DLFS_API int dlfs_pack_order(const dlfs_packing *packing, const int64_t *lengths,
                             uint64_t length_count, uint64_t *order, uint64_t count);
/*
 * Packs samples by the packing rule of FORMAT.md into window, which stands for the whole chunks of
 * the data space from window_address on: copies, sums, zeroes the gaps between samples (not what
 * follows packing->address). Sample k is source[offsets[k]..offsets[k]+lengths[k]); they are taken
 * in the order order[0..count), or 0..count-1 when order is NULL. locations[k] is set when sample k
 * is complete. Returns how many are; fewer than count when the window is full (packing->address is
 * then its end): call again with the rest and the next window. Errors: -EINVAL (sizes, ranges;
 * earlier samples of the call may be packed), DLFS_E_LIMIT (addresses over DLFS_ADDRESS_MAX).
 */
DLFS_API int64_t dlfs_pack(dlfs_packing *packing, const uint8_t *source, uint64_t source_bytes,
                           const int64_t *offsets, const int64_t *lengths, const uint64_t *order,
                           uint64_t count, void *window, uint64_t window_address,
                           uint64_t window_bytes, dlfs_location *locations);
/*
 * Sums samples order[0..count), which rise by address, in a window of the data space: crcs[i] is
 * that of sample order[i]. Returns how many are complete; fewer when the window ends first: call
 * again with the rest and the next window. packing keeps what a sample has had so far. Errors:
 * -EINVAL, DLFS_E_LIMIT, DLFS_E_FORMAT (an index >= location_count, a sample before the window).
 */
DLFS_API int64_t dlfs_pack_verify(dlfs_packing *packing, const dlfs_location *locations,
                                  uint64_t location_count, const uint64_t *order, uint64_t count,
                                  const void *window, uint64_t window_address,
                                  uint64_t window_bytes, uint32_t *crcs);

/* ---- building a directory ------------------------------------------------------------------- */

/* Sizes of a directory segment's parts, computed from what goes in. */
typedef struct dlfs_directory_plan {
    uint64_t sample_count;
    uint64_t entries_bytes; /* header, locations, order, tree: loaded at open */
    uint64_t names_bytes;   /* name blocks and their offsets: loaded when names are needed */
    uint64_t hash_seed;     /* the smallest seed with which no 16 paths share a hash */
} dlfs_directory_plan;

/*
 * Plans, then encodes, the directory of count samples whose paths, in strictly rising byte order,
 * are names[offsets[i]..offsets[i+1]). entries and names are written whole: plan->entries_bytes and
 * names_bytes, both multiples of 4096. Errors: -EINVAL for paths out of order or over the limits,
 * locations over data_bytes or overlapping; -ENOMEM.
 */
DLFS_API int dlfs_directory_plan_build(const uint8_t *names, const uint64_t *offsets,
                                       uint64_t count, dlfs_directory_plan *plan);
DLFS_API int dlfs_directory_build(const dlfs_directory_plan *plan, const uint8_t *names,
                                  const uint64_t *offsets, const dlfs_location *locations,
                                  const uint8_t dataset_uuid[16], uint64_t data_bytes,
                                  void *entries, void *names_out);

/* ---- paths ----------------------------------------------------------------------------------- */

/*
 * Sorts paths names[offsets[i]..offsets[i+1]): order[k] is the number of the one that comes k-th in
 * byte order; equal ones stay in theirs. Takes 8 bytes of memory a path unless they are in order.
 * Errors: -EINVAL, -ENOMEM.
 */
DLFS_API int dlfs_paths_sort(const uint8_t *names, const uint64_t *offsets, uint64_t count,
                             uint64_t *order);

/* ---- files ----------------------------------------------------------------------------------- */

#define DLFS_FILES_NOFOLLOW 1u /* a path that ends in a symbolic link is an error: -ELOOP */
#define DLFS_FILES_THREADS_MAX 64u

/* One file to read whole, or one range of an open file. */
typedef struct dlfs_file {
    uint64_t position; /* files: of its NUL-terminated path in paths; ranges: in the open file, in
                          bytes */
    uint64_t buffer_offset; /* where in the buffer its bytes go */
    uint64_t length_bytes;  /* expected */
    int64_t modified_ns; /* files: expected time of the last change of the data, since 1970; ranges:
                            unused */
    int32_t descriptor;  /* ranges: the open file; files: unused */
    int32_t
        code; /* out: 0, -errno, -ESTALE (a file other than expected), DLFS_E_TRUNCATED (a range) */
} dlfs_file;

/*
 * Reads count whole files into their places in one buffer, by thread_count threads
 * (1..DLFS_FILES_THREADS_MAX, the caller's among them; fewer when the system gives no more). Paths
 * are relative to the open directory. A file whose size or time of change is not the expected one,
 * before or after the reading, gets -ESTALE. Each file's code is written; the bytes of those that
 * failed are undefined. Returns the number of files that failed (at most INT_MAX). Errors: -EINVAL,
 * with nothing read, when a place exceeds the buffer, a path is not NUL-terminated within
 * paths_bytes or thread_count is out of range. Allocates nothing. Any threads at once, each with
 * its own files and buffer.
 */
DLFS_API int dlfs_files_read(int directory, const char *paths, uint64_t paths_bytes,
                             dlfs_file *files, uint64_t count, void *buffer, uint64_t buffer_bytes,
                             uint32_t flags, uint32_t thread_count);
/*
 * Fills in length_bytes and modified_ns of count files as they are now, for dlfs_files_read later.
 * Codes of files: 0; -EACCES when it may not be read; -ESTALE when it is not a regular file;
 * -errno. Everything else as for dlfs_files_read.
 */
DLFS_API int dlfs_files_stat(int directory, const char *paths, uint64_t paths_bytes,
                             dlfs_file *files, uint64_t count, uint32_t flags,
                             uint32_t thread_count);
/*
 * dlfs_files_read for ranges of files that are open already; a range that the file ends within gets
 * DLFS_E_TRUNCATED.
 */
DLFS_API int dlfs_ranges_read(dlfs_file *ranges, uint64_t count, void *buffer,
                              uint64_t buffer_bytes, uint32_t thread_count);

#ifdef __cplusplus
}
#endif

#endif
