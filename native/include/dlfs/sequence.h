/*
 * The order of an epoch: permutations, and sequences of sample indices. The conventions are those
 * of dlfs.h.
 */
#ifndef DLFS_PUBLIC_SEQUENCE_H
#define DLFS_PUBLIC_SEQUENCE_H

#include <dlfs/directory.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A keyed bijection on 0..size-1: a generalised Feistel network over Z_a x Z_b with a*b >= size,
 * applied until the value is below size (Black and Rogaway, "Ciphers with Arbitrary Finite
 * Domains", CT-RSA 2002, method 3). It takes constant memory, and both the image of any position
 * and its inverse can be computed directly. It is a plain value, which may be copied.
 */
#define DLFS_PERMUTATION_ROUNDS_MAX 24u
typedef struct dlfs_permutation {
    uint64_t size;  /* samples */
    uint64_t left;  /* a, the range of the left half */
    uint64_t right; /* b, the range of the right half */
    uint32_t rounds;
    uint32_t reserved;
    uint64_t keys[DLFS_PERMUTATION_ROUNDS_MAX];
} dlfs_permutation;
/*
 * Initialises a permutation. The same (size, seed, stream) give the same bijection in all versions.
 * -EINVAL: size is 0 or above 2^62.
 */
DLFS_API int dlfs_permutation_init(dlfs_permutation *permutation, uint64_t size, uint64_t seed,
                                   uint64_t stream);
/*
 * Sets out[i] to the image of first + i*stride, for i in 0..count-1. -EINVAL: a position is >=
 * size.
 */
DLFS_API int dlfs_permutation_map(const dlfs_permutation *permutation, uint64_t first,
                                  uint64_t stride, size_t count, uint64_t *out);
/* Sets out[i] to the position whose image is values[i]. -EINVAL: a value is >= size. */
DLFS_API int dlfs_permutation_invert(const dlfs_permutation *permutation, const uint64_t *values,
                                     size_t count, uint64_t *out);

#define DLFS_ORDER_STORAGE 0u /* storage order */
#define DLFS_ORDER_GLOBAL 1u  /* one permutation of all samples */
#define DLFS_ORDER_CHUNK \
    2u /* chunks permuted, then the samples within each window of chunks permuted */

typedef struct dlfs_sequence dlfs_sequence;
/*
 * Creates the order of one epoch over the whole dataset. The order is a function of (directory,
 * chunk_bytes, kind, seed, epoch, window_chunks); window_chunks is used by DLFS_ORDER_CHUNK only.
 * The sequence borrows the directory. It is immutable: any threads at once. It takes constant
 * memory, or 24 bytes a chunk for DLFS_ORDER_CHUNK.
 */
DLFS_API int dlfs_sequence_create(const dlfs_directory *directory, uint32_t chunk_bytes,
                                  uint32_t kind, uint64_t seed, uint64_t epoch,
                                  uint32_t window_chunks, dlfs_sequence **out);

/* Orders over chosen samples, for dlfs_sequence_choose. */
#define DLFS_ORDER_LIST 3u     /* the given indices in their own order; an index may be repeated */
#define DLFS_ORDER_SELECTED 4u /* a permutation of the given indices */
#define DLFS_ORDER_WEIGHTED 5u /* draws with replacement, in proportion to weights */
typedef struct dlfs_choice {
    uint32_t kind;
    uint32_t reserved;
    uint64_t seed; /* for DLFS_ORDER_SELECTED and DLFS_ORDER_WEIGHTED */
    uint64_t epoch;
    const uint64_t *indices; /* [count], must outlive the sequence */
    const double *weights;   /* [count], for DLFS_ORDER_WEIGHTED; not used after the call */
    uint64_t count;
    uint64_t draws; /* number of positions in the order, for DLFS_ORDER_WEIGHTED */
} dlfs_choice;
/*
 * Creates the order of one epoch over chosen samples. It takes 16 bytes of memory a weight. Errors:
 * -EINVAL (an index is out of range, a weight is negative or not finite, or no weight is positive),
 * -ENOMEM.
 */
DLFS_API int dlfs_sequence_choose(const dlfs_directory *directory, const dlfs_choice *choice,
                                  dlfs_sequence **out);
DLFS_API void dlfs_sequence_destroy(dlfs_sequence *sequence);
/* Sets out[i] to the sample index at global position first + i*stride. -EINVAL past the end. */
DLFS_API int dlfs_sequence_fill(const dlfs_sequence *sequence, uint64_t first, uint64_t stride,
                                uint64_t count, uint64_t *out);

#ifdef __cplusplus
}
#endif

#endif
