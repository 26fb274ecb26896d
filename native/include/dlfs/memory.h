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

/* How dlfs_memory_map got its pages. */
#define DLFS_MEMORY_PAGES 0u       /* ordinary pages */
#define DLFS_MEMORY_TRANSPARENT 1u /* transparent huge pages were asked for */
#define DLFS_MEMORY_HUGE 2u        /* reserved huge pages (hugetlb) */

/*
 * Maps zeroed memory, private to the process (a fork copies it on write), aligned to 2 MiB when
 * bytes >= 2 MiB, else to the page: reserved huge pages if free ones are there, else transparent
 * ones, else ordinary pages. kind may be NULL. Errors: -EINVAL (bytes 0), -ENOMEM. Any thread.
 */
DLFS_API int dlfs_memory_map(size_t bytes, void **base, uint32_t *kind);
/* Unmaps what dlfs_memory_map mapped, with the same length. base may be NULL. */
DLFS_API void dlfs_memory_unmap(void *base, size_t bytes);

/*
 * CRC32C (Castagnoli, RFC 3720 appendix B.4) of data, continuing from crc (0 to start): the
 * hardware's instruction where the processor has it, found out once. Any thread. data may be NULL
 * when bytes is 0.
 */
DLFS_API uint32_t dlfs_crc32c(uint32_t crc, const void *data, size_t bytes);
/* The same by tables only, for tests and for processors without the instruction. */
DLFS_API uint32_t dlfs_crc32c_portable(uint32_t crc, const void *data, size_t bytes);
/*
 * Copies bytes and returns their CRC32C as dlfs_crc32c would, reading the source once. No overlap.
 */
DLFS_API uint32_t dlfs_crc32c_copy(uint32_t crc, void *destination, const void *source,
                                   size_t bytes);
/* "avx512", "sse4.2", "armv8" or "portable". */
DLFS_API const char *dlfs_crc32c_kind(void);
/* crcs[i] = CRC32C of the i-th block of block_bytes in data[0..bytes); the last may be shorter. */
DLFS_API void dlfs_crc32c_blocks(const void *data, size_t bytes, size_t block_bytes,
                                 uint32_t *crcs);

/* XXH64 of a path with a seed. Any thread. */
DLFS_API uint64_t dlfs_path_hash(const void *path, size_t bytes, uint64_t seed);

#ifdef __cplusplus
}
#endif

#endif
