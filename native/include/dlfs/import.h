/*
 * Writing datasets: packing samples into chunks, building their directory, sorting paths, reading
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

/* ---- building a directory ------------------------------------------------------------------- */

/*
 * The content of a directory segment to be built; borrowed. The paths of samples are
 * names[offsets[i]..offsets[i+1]), in strictly rising byte order; those of directories without
 * samples below them, likewise, each with a '/' behind it. No two are alike, and none lies below
 * another.
 */
typedef struct dlfs_directory_content {
    uint64_t count;
    const uint8_t *names;
    const uint64_t *offsets;        /* [count + 1] */
    const dlfs_location *locations; /* [count] */
    const uint32_t *parts;          /* [part_count], as dlfs_directory_parts returns them */
    uint64_t part_count; /* data_bytes / chunk_bytes if a sample is larger than a chunk, else 0 */
    uint64_t data_bytes; /* size of the data space, a multiple of chunk_bytes */
    const uint8_t *empty_names;    /* NULL without any */
    const uint64_t *empty_offsets; /* [empty_count + 1] */
    uint64_t empty_count;
    uint32_t chunk_bytes; /* chunk size of the volume, a power of two */
    uint8_t dataset_uuid[16];
} dlfs_directory_content;

/* Sizes of the parts of a directory segment. */
typedef struct dlfs_directory_plan {
    uint64_t sample_count;
    uint64_t entries_bytes; /* all but the names: loaded when the dataset is opened */
    uint64_t names_bytes;   /* name blocks and their offsets: loaded when names are needed */
    uint64_t hash_seed;     /* smallest seed with which no 16 paths share a hash */
} dlfs_directory_plan;

/*
 * Plan, then encode, the directory of a dataset. entries and names are written completely:
 * plan->entries_bytes and names_bytes, both multiples of 4096. Errors: -EINVAL (paths out of order
 * or over the limits; locations over data_bytes, overlapping, or in chunks as none may be; a
 * CRC32C that is not that of the sample's parts; other counts or sizes than the content requires),
 * -ENOMEM.
 */
DLFS_API int dlfs_directory_plan_build(const dlfs_directory_content *content,
                                       dlfs_directory_plan *plan);
DLFS_API int dlfs_directory_build(const dlfs_directory_plan *plan,
                                  const dlfs_directory_content *content, void *entries,
                                  void *names);

/* ---- paths ----------------------------------------------------------------------------------- */

/*
 * Sorts paths names[offsets[i]..offsets[i+1]): order[k] gets the number of the k-th path in byte
 * order. Equal paths keep their order. Takes 8 bytes of memory a path, unless they are sorted
 * already. Errors: -EINVAL, -ENOMEM.
 */
DLFS_API int dlfs_paths_sort(const uint8_t *names, const uint64_t *offsets, uint64_t count,
                             uint64_t *order);

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
 * range. Allocates nothing. Any threads at once, each with its own files and buffer.
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
