/*
 * The memory for samples that readers share. The conventions are those of dlfs.h.
 */
#ifndef DLFS_PUBLIC_ARENA_H
#define DLFS_PUBLIC_ARENA_H

#include <dlfs/codes.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_ARENA_SHARED 1u /* other processes can map it (channel.h) */

typedef struct dlfs_arena_config {
    uint64_t memory_bytes; /* bound of the memory, at least four chunks */
    uint32_t chunk_bytes;  /* of the volume whose readers share it */
    uint32_t flags;        /* DLFS_ARENA_* */
} dlfs_arena_config;

/*
 * An arena: one mapping, cut into slots of a chunk, for what its readers cache, read ahead, or have
 * pinned by batches. Each reader has a share of the slots, by need: one that needs less than an
 * equal share leaves the rest to the others. Readers that are not read give their slots to those
 * that are. Any threads at once.
 */
typedef struct dlfs_arena dlfs_arena;
/* Creates an arena, which maps no memory until a reader's first read. Errors: -EINVAL, -ENOMEM,
 * DLFS_E_LIMIT (less than four chunks, or more than can be numbered). */
DLFS_API int dlfs_arena_create(const dlfs_arena_config *config, dlfs_arena **out);
/* Gives up the caller's reference. The arena is freed with its last reader. */
DLFS_API void dlfs_arena_destroy(dlfs_arena *arena);

typedef struct dlfs_arena_stats {
    uint64_t memory_bytes; /* its bound, in whole slots */
    uint64_t held_bytes;   /* of slots that readers hold at present */
    uint64_t readers;      /* that have read */
} dlfs_arena_stats;
DLFS_API void dlfs_arena_get_stats(dlfs_arena *arena, dlfs_arena_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
