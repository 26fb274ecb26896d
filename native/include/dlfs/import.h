/*
 * Writing datasets: packing samples into chunks, sorting paths, building their directory, reading
 * many small source files, and filters of HDF5.
 *
 * Used by the dataset writer and by imports (dlfs/_native/packing.py, directory.py, files.py,
 * lzf.py and szip.py); readers do not need it. The conventions are those of dlfs.h.
 */
#ifndef DLFS_IMPORT_H
#define DLFS_IMPORT_H

#include <dlfs/dlfs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- packing --------------------------------------------------------------------------------- */

/*
 * The progress of packing in a dataset's data space. It is a plain value. The caller zeroes it,
 * sets the two sizes (powers of two, block_bytes <= chunk_bytes), and passes it on from window to
 * window.
 */
typedef struct dlfs_packing {
    uint32_t chunk_bytes;
    uint32_t block_bytes;
    uint64_t address;    /* first free byte of the data space */
    uint64_t start;      /* address of the sample that is partly packed */
    uint64_t done_bytes; /* bytes of that sample packed so far */
    uint32_t crc32c;     /* CRC32C of those bytes, combined from those of the parts in chunks */
    uint32_t under_way;  /* 1: the first sample of the next call is already partly packed */
} dlfs_packing;

/*
 * Changes an order of packing slightly so that chunks are filled: where the next sample does not
 * fit in the remainder of a chunk, the longest following candidate that fits is moved before it.
 * order[0..count) holds distinct numbers < length_count. Nothing is packed. -EINVAL: the sizes, a
 * number, or a length < 0.
 */
#define DLFS_PACK_CANDIDATES 64u /* the next sample and those that may be moved before it */
DLFS_API int dlfs_pack_order(const dlfs_packing *packing, const int64_t *lengths,
                             uint64_t length_count, uint64_t *order, uint64_t count);
/*
 * Packs samples by the packing rule of FORMAT.md into window, which is the memory of whole chunks
 * of the data space from window_address on. Copies the samples, computes their checksums, and
 * zeroes the gaps between them, but not the bytes after packing->address. Sample k is
 * source[offsets[k]..offsets[k]+lengths[k]). Samples are taken in the order order[0..count), or
 * 0..count-1 if order is NULL. locations[k] is set when sample k is complete. parts[c] is set for
 * each chunk c of the window that gets a part of a sample larger than a chunk, to the CRC32C of
 * that part.
 *
 * Returns the number of complete samples. It is less than count when the window is full;
 * packing->address is then the window's end, and the caller passes the remaining samples with the
 * next window. Errors: -EINVAL (sizes, ranges; earlier samples of the call may be packed),
 * DLFS_E_LIMIT (addresses over DLFS_ADDRESS_MAX).
 */
DLFS_API int64_t dlfs_pack(dlfs_packing *packing, const uint8_t *source, uint64_t source_bytes,
                           const int64_t *offsets, const int64_t *lengths, const uint64_t *order,
                           uint64_t count, void *window, uint64_t window_address,
                           uint64_t window_bytes, dlfs_location *locations, uint32_t *parts);
/*
 * Computes the CRC32Cs of ranges, whose addresses rise, in a window of the data space: crcs[i] is
 * that of the bytes at locations[i]. Returns the number of ranges that begin before the window's
 * end. Errors: -EINVAL (the window), DLFS_E_FORMAT (a range before the window, or across its end).
 */
DLFS_API int64_t dlfs_pack_verify(const dlfs_location *locations, uint64_t count,
                                  const void *window, uint64_t window_address,
                                  uint64_t window_bytes, uint32_t *crcs);

/* ---- paths ----------------------------------------------------------------------------------- */

/* The rule that a path breaks. */
#define DLFS_PATH_MALFORMED 1u    /* FORMAT.md, section 6; a directory's without a '/' behind it */
#define DLFS_PATH_UNSORTED 2u     /* it is not behind the path before it */
#define DLFS_PATH_REPEATED 3u     /* a sample has this path already */
#define DLFS_PATH_BELOW_SAMPLE 4u /* its first prefix_bytes bytes are the path of a sample */
#define DLFS_PATH_IS_DIRECTORY 5u /* a directory has this path */

/* A path that was refused. */
typedef struct dlfs_path_refusal {
    uint64_t index;        /* number of the path in the call; of a directory, among all of them */
    uint32_t rule;         /* DLFS_PATH_*; 0: no path was refused */
    uint32_t prefix_bytes; /* length of the sample's path that the refused one lies below, or is */
    uint32_t is_directory; /* 1: a directory was refused, else a sample */
    uint32_t reserved;
} dlfs_path_refusal;

/*
 * Sorts paths names[offsets[i]..offsets[i+1]): order[k] gets the number of the k-th path in byte
 * order. Equal paths keep their order. Takes 8 bytes of memory a path, unless they are sorted
 * already. Errors: -EINVAL, -ENOMEM.
 */
DLFS_API int dlfs_paths_sort(const uint8_t *names, const uint64_t *offsets, uint64_t count,
                             uint64_t *order);

/* Samples in rising order of their paths: a source of a merge, of which some are taken already. */
typedef struct dlfs_path_source {
    const uint8_t *names;
    const uint64_t *offsets; /* [count + 1] */
    const dlfs_location *locations;
    const uint64_t *rows;
    uint64_t next; /* the first that is not taken; count: it takes no part */
    uint64_t count;
} dlfs_path_source;

/* Memory for merged samples. */
typedef struct dlfs_path_target {
    uint8_t *names;
    uint64_t *offsets; /* [capacity + 1] */
    dlfs_location *locations;
    uint64_t *rows;
    uint64_t names_bytes;
    uint64_t capacity;
} dlfs_path_target;

/*
 * Merges samples of sources in the order of their paths, until all of one source are taken, or the
 * target is full. Returns their number. Errors: -EEXIST (the next path of sources[*repeated] is the
 * last one taken), -EINVAL (also: the target has no room for one path), -ENOMEM.
 */
DLFS_API int64_t dlfs_paths_merge(dlfs_path_source *sources, uint32_t source_count,
                                  const dlfs_path_target *target, uint32_t *repeated);

/*
 * The samples of a dataset that is being written, in the order that they were added in: paths,
 * locations, and an index that finds a path. It takes 24 bytes a sample and its path, and for the
 * index 9.5 to 14.5 bytes a sample and 26 to 31 a directory. Memory grows without a copy. Not
 * thread-safe.
 */
typedef struct dlfs_path_table dlfs_path_table;

/* Errors: -ENOMEM. */
DLFS_API int dlfs_path_table_create(dlfs_path_table **out);
/* Frees the table. table may be NULL. */
DLFS_API void dlfs_path_table_destroy(dlfs_path_table *table);
/*
 * Adds samples: all or none. Paths may come in any order, names[offsets[i]..offsets[i+1]). With
 * locations NULL, they are only checked. Errors: -EINVAL (*refusal has the first path that breaks a
 * rule: malformed, repeated, a directory, below a sample; or else an argument is NULL, or the
 * offsets fall), -ENOMEM.
 */
DLFS_API int dlfs_path_table_add(dlfs_path_table *table, const uint8_t *names,
                                 const uint64_t *offsets, const dlfs_location *locations,
                                 uint64_t count, dlfs_path_refusal *refusal);
/*
 * Adds a directory, without a '/' behind it, which need not have samples below it. One that exists
 * stays as it is. Errors: -EINVAL (*refusal has the rule; DLFS_PATH_BELOW_SAMPLE with the whole
 * path as prefix: a sample has this path), -ENOMEM.
 */
DLFS_API int dlfs_path_table_add_directory(dlfs_path_table *table, const uint8_t *path,
                                           uint64_t bytes, dlfs_path_refusal *refusal);
/*
 * Finds a sample: returns 1 and sets *row to its number, in the order that samples were added in,
 * or returns 0. Errors: -ENOMEM (after dlfs_path_table_shrink).
 */
DLFS_API int dlfs_path_table_find(dlfs_path_table *table, const uint8_t *path, uint64_t bytes,
                                  uint64_t *row);

/* The content of a table; valid until the next call that changes the table. */
typedef struct dlfs_path_table_view {
    uint64_t count;
    const uint8_t *names;
    const uint64_t *offsets; /* [count + 1] */
    const dlfs_location *locations;
} dlfs_path_table_view;

DLFS_API void dlfs_path_table_get_view(const dlfs_path_table *table, dlfs_path_table_view *view);
/*
 * Copies the added directories that contain neither samples nor other directories, with a '/'
 * behind each, in no order. Returns their number, and sets *bytes to the length of their text; if
 * that is over names_bytes, or the number over capacity, nothing is copied.
 */
DLFS_API uint64_t dlfs_path_table_empty_directories(const dlfs_path_table *table, uint8_t *names,
                                                    uint64_t names_bytes, uint64_t *offsets,
                                                    uint64_t capacity, uint64_t *bytes);
/* Frees the index, which the next call that needs it makes again. */
DLFS_API void dlfs_path_table_shrink(dlfs_path_table *table);

/* ---- building a directory ------------------------------------------------------------------- */

/* Those fields of a directory segment's header that do not follow from the samples. */
typedef struct dlfs_directory_config {
    uint64_t data_bytes;  /* size of the data space, a multiple of chunk_bytes */
    uint32_t chunk_bytes; /* chunk size of the volume, a power of two */
    uint8_t dataset_uuid[16];
    uint32_t reserved;
} dlfs_directory_config;

/* A directory segment. The memory is the builder's. */
typedef struct dlfs_directory_segment {
    uint8_t *entries;       /* all but the names: loaded when the dataset is opened */
    uint8_t *names;         /* name blocks and their offsets: loaded when names are needed */
    uint64_t entries_bytes; /* both are multiples of 4096, as are the addresses */
    uint64_t names_bytes;
    uint64_t sample_count;
    uint64_t sample_bytes; /* sum of the lengths of the samples */
    uint64_t empty_count;  /* empty directories */
    uint64_t hash_seed;    /* smallest seed with which no 16 paths share a hash */
} dlfs_directory_segment;

/*
 * Builds a directory segment from paths in rising order. Names are encoded as they come. Beside the
 * segment it takes half a byte a sample; in dlfs_directory_builder_finish 16 bytes a sample, and as
 * much for each in that of 2,048 ranges of addresses or hashes which has the most.
 * Not thread-safe. After an error, a builder may only be destroyed.
 */
typedef struct dlfs_directory_builder dlfs_directory_builder;

/* Errors: -EINVAL (a size), -ENOMEM. */
DLFS_API int dlfs_directory_builder_create(const dlfs_directory_config *config,
                                           dlfs_directory_builder **out);
/* Frees the builder and the segment. builder may be NULL. */
DLFS_API void dlfs_directory_builder_destroy(dlfs_directory_builder *builder);
/*
 * Adds directories, names[offsets[i]..offsets[i+1]) with a '/' behind each, in strictly rising byte
 * order over all calls, before any samples. Those that samples or other directories lie below are
 * left out of the segment, which has them anyway. Errors: -EINVAL (*refusal has the path:
 * malformed, unsorted), -ENOMEM.
 */
DLFS_API int dlfs_directory_builder_add_directories(dlfs_directory_builder *builder,
                                                    const uint8_t *names, const uint64_t *offsets,
                                                    uint64_t count, dlfs_path_refusal *refusal);
/*
 * Adds samples, in strictly rising byte order over all calls: of the paths
 * names[offsets[i]..offsets[i+1]) and their locations those with the numbers order[0..count), or
 * 0..count-1 if order is NULL. Errors: -EINVAL (*refusal has the number k in 0..count-1 of the
 * first path that breaks a rule, or a directory below a sample), -ENOMEM.
 */
DLFS_API int dlfs_directory_builder_add(dlfs_directory_builder *builder, const uint8_t *names,
                                        const uint64_t *offsets, const dlfs_location *locations,
                                        const uint64_t *order, uint64_t count,
                                        dlfs_path_refusal *refusal);
/*
 * Sets the size of the data space, for a caller that did not know it when it made the builder.
 * Errors: -EINVAL (not a multiple of chunk_bytes, or the builder has ended).
 */
DLFS_API int dlfs_directory_builder_resize(dlfs_directory_builder *builder, uint64_t data_bytes);
/*
 * Completes the segment. parts[0..part_count) are the CRC32Cs of the parts in the first chunks of
 * the data space, as dlfs_directory_parts returns them; those of other chunks are 0. They are used
 * if a sample is larger than a chunk. Errors: -EINVAL (*refusal has a directory below a sample; or
 * its rule is 0: locations over data_bytes, overlapping, or in chunks as none may be, or a CRC32C
 * that is not that of the sample's parts), -ENOMEM.
 */
DLFS_API int dlfs_directory_builder_finish(dlfs_directory_builder *builder, const uint32_t *parts,
                                           uint64_t part_count, dlfs_path_refusal *refusal,
                                           dlfs_directory_segment *segment);

/* ---- files ----------------------------------------------------------------------------------- */

#define DLFS_FILES_NOFOLLOW 1u /* fail with -ELOOP on a path that ends in a symbolic link */
#define DLFS_FILES_THREADS_MAX 64u

/* One file to read whole, or one range of an open file. */
typedef struct dlfs_file {
    uint64_t position; /* files: offset of its NUL-terminated path in paths; ranges: offset in the
                          open file, in bytes */
    uint64_t buffer_offset; /* offset of its bytes in the buffer */
    uint64_t length_bytes;  /* expected length */
    int64_t modified_ns; /* files: expected time of the last change of the data, since 1970; ranges:
                            unused */
    int32_t descriptor;  /* ranges: the open file; files: unused */
    int32_t code; /* result: 0, -errno, -ESTALE (a file has changed), DLFS_E_TRUNCATED (a range) */
} dlfs_file;

/*
 * Reads count whole files into one buffer with thread_count threads (1..DLFS_FILES_THREADS_MAX,
 * including the caller's; fewer if the system refuses more). Paths are relative to the open
 * directory. A file whose size or time of change differs from the expected one, before or after the
 * read, gets -ESTALE. The code of each file is set; the bytes of failed files are undefined.
 * Returns the number of files that failed (at most INT_MAX). -EINVAL, with nothing read: a range
 * exceeds the buffer, a path is not NUL-terminated within paths_bytes, or thread_count is out of
 * range. Each thread has at most 8 files open at a time, fewer if the system allows no more.
 * Allocates nothing. Any threads at once, each with its own files and buffer.
 */
DLFS_API int dlfs_files_read(int directory, const char *paths, uint64_t paths_bytes,
                             dlfs_file *files, uint64_t count, void *buffer, uint64_t buffer_bytes,
                             uint32_t flags, uint32_t thread_count);
/*
 * Fills in the present length_bytes and modified_ns of count files, for a later dlfs_files_read.
 * Codes of files: 0; -EACCES (it may not be read); -ESTALE (it is not a regular file); -errno.
 * Otherwise like dlfs_files_read.
 */
DLFS_API int dlfs_files_stat(int directory, const char *paths, uint64_t paths_bytes,
                             dlfs_file *files, uint64_t count, uint32_t flags,
                             uint32_t thread_count);
/*
 * Reads ranges of files that are open already, like dlfs_files_read. A range that ends after the
 * end of its file gets DLFS_E_TRUNCATED.
 */
DLFS_API int dlfs_ranges_read(dlfs_file *ranges, uint64_t count, void *buffer,
                              uint64_t buffer_bytes, uint32_t thread_count);

/* ---- filters --------------------------------------------------------------------------------- */

/*
 * Decompresses a stream of LZF, as HDF5 files of h5py have it, into target. Returns the number of
 * bytes. DLFS_E_FORMAT: the stream is cut or malformed; DLFS_E_LIMIT: it has more bytes than
 * target_bytes; -EINVAL: target_bytes > INT64_MAX. A part may be written then. Allocates nothing.
 * Any threads at once.
 */
DLFS_API int64_t dlfs_lzf_decompress(const uint8_t *source, uint64_t source_bytes, uint8_t *target,
                                     uint64_t target_bytes);

/* The parameters of a stream of szip, as HDF5 files have them. */
typedef struct dlfs_szip {
    uint32_t sample_bits;     /* 1..32 */
    uint32_t block_samples;   /* even, 2..64 */
    uint32_t interval_blocks; /* >= 1; a reference begins an interval */
    uint32_t has_references;  /* 1: the samples are differences from a predictor */
} dlfs_szip;

/*
 * Counts the samples in a stream of szip, at most sample_count. Returns fewer if the stream is cut;
 * those of a block that is cut do not count. DLFS_E_FORMAT: the stream is malformed; -EINVAL: form,
 * or a size over what 64 bits can count. Allocates nothing. Any threads at once.
 */
DLFS_API int64_t dlfs_szip_count(const uint8_t *source, uint64_t source_bytes,
                                 const dlfs_szip *form, uint64_t sample_count);

#ifdef __cplusplus
}
#endif

#endif
