/*
 * Memory in huge pages, checksums (CRC32C) and the hash of paths. The conventions are those of
 * dlfs.h.
 */
#ifndef DLFS_PUBLIC_MEMORY_H
#define DLFS_PUBLIC_MEMORY_H

#include <dlfs/codes.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The kind of pages that dlfs_memory_map got. */
#define DLFS_MEMORY_PAGES 0u       /* ordinary pages */
#define DLFS_MEMORY_TRANSPARENT 1u /* the kernel was advised to use transparent huge pages */
#define DLFS_MEMORY_HUGE 2u        /* reserved huge pages (hugetlb) */

/*
 * Maps zeroed memory that is private to the process; a fork copies it on write. It takes reserved
 * huge pages if any are free, else transparent huge pages, else ordinary ones. The address is
 * aligned to 2 MiB when bytes >= 2 MiB, else to a page. kind may be NULL. Errors: -EINVAL (bytes is
 * 0), -ENOMEM. Any threads at once.
 */
DLFS_API int dlfs_memory_map(size_t bytes, void **base, uint32_t *kind);
/* Unmaps memory of dlfs_memory_map, given the same length. base may be NULL. */
DLFS_API void dlfs_memory_unmap(void *base, size_t bytes);

/*
 * Computes the CRC32C (Castagnoli, RFC 3720 appendix B.4) of data, continuing from crc (0 to
 * start). Uses the processor's instruction if it has one. data may be NULL when bytes is 0. Any
 * threads at once.
 */
DLFS_API uint32_t dlfs_crc32c(uint32_t crc, const void *data, size_t bytes);
/* Computes the same by tables only, for tests and for processors without the instruction. */
DLFS_API uint32_t dlfs_crc32c_portable(uint32_t crc, const void *data, size_t bytes);
/*
 * Copies bytes and returns their CRC32C like dlfs_crc32c, reading the source only once. The ranges
 * must not overlap.
 */
DLFS_API uint32_t dlfs_crc32c_copy(uint32_t crc, void *destination, const void *source,
                                   size_t bytes);
/* Returns the implementation in use: "avx512", "avx2", "sse4.2", "armv8" or "portable". */
DLFS_API const char *dlfs_crc32c_kind(void);
/*
 * Sets crcs[i] to the CRC32C of the i-th block of block_bytes in data[0..bytes); the last block may
 * be shorter.
 */
DLFS_API void dlfs_crc32c_blocks(const void *data, size_t bytes, size_t block_bytes,
                                 uint32_t *crcs);
/*
 * Sets crcs[i] to the CRC32C of two ranges of bytes, one after the other, computed from the CRC32C
 * of each: crcs[i] of the first range, and following[i] of the second one, which is
 * following_bytes[i] long.
 */
DLFS_API void dlfs_crc32c_combine(uint32_t *crcs, const uint32_t *following,
                                  const uint64_t *following_bytes, uint64_t count);

/* Computes the XXH64 of a path with a seed. Any threads at once. */
DLFS_API uint64_t dlfs_path_hash(const void *path, size_t bytes, uint64_t seed);

#ifdef __cplusplus
}
#endif

#endif
