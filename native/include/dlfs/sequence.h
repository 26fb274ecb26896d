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
 * walked until the value falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
 * CT-RSA 2002, method 3). A plain value: copy it freely. Constant memory, any position computable,
 * inverse too.
 */
#define DLFS_PERMUTATION_ROUNDS_MAX 24u
typedef struct dlfs_permutation {
    uint64_t size;  /* samples */
    uint64_t left;  /* a */
    uint64_t right; /* b */
    uint32_t rounds;
    uint32_t reserved;
    uint64_t keys[DLFS_PERMUTATION_ROUNDS_MAX];
} dlfs_permutation;
/*
 * Errors: -EINVAL when size is 0 or above 2^62. The same (size, seed, stream) gives the same
 * bijection for ever.
 */
DLFS_API int dlfs_permutation_init(dlfs_permutation *permutation, uint64_t size, uint64_t seed,
                                   uint64_t stream);
/*
 * out[i] = image of first + i*stride, for i in 0..count-1. All positions must be < size, else
 * -EINVAL.
 */
DLFS_API int dlfs_permutation_map(const dlfs_permutation *permutation, uint64_t first,
                                  uint64_t stride, size_t count, uint64_t *out);
/* out[i] = the position whose image is values[i]. -EINVAL when a value is >= size. */
DLFS_API int dlfs_permutation_invert(const dlfs_permutation *permutation, const uint64_t *values,
                                     size_t count, uint64_t *out);

#define DLFS_ORDER_STORAGE 0u /* storage order */
#define DLFS_ORDER_GLOBAL 1u  /* one permutation of all samples */
#define DLFS_ORDER_CHUNK 2u   /* chunks permuted, then the samples within each window of chunks */

typedef struct dlfs_sequence dlfs_sequence;
/*
 * The order of one epoch over the whole dataset: a function of (directory, chunk_bytes, kind, seed,
 * epoch, window). Borrows the directory. Immutable: any threads at once. window_chunks matters for
 * DLFS_ORDER_CHUNK only. Memory: constant, but 24 bytes a chunk for DLFS_ORDER_CHUNK.
 */
DLFS_API int dlfs_sequence_create(const dlfs_directory *directory, uint32_t chunk_bytes,
                                  uint32_t kind, uint64_t seed, uint64_t epoch,
                                  uint32_t window_chunks, dlfs_sequence **out);

/* Orders over chosen samples. */
#define DLFS_ORDER_LIST 3u     /* as they stand; one may stand there more than once */
#define DLFS_ORDER_SELECTED 4u /* a permutation of them */
#define DLFS_ORDER_WEIGHTED 5u /* draws from them with replacement, in proportion to weights */
typedef struct dlfs_choice {
    uint32_t kind;
    uint32_t reserved;
    uint64_t seed; /* of DLFS_ORDER_SELECTED and DLFS_ORDER_WEIGHTED */
    uint64_t epoch;
    const uint64_t *indices; /* [count] borrowed until the sequence is destroyed */
    const double *weights;   /* [count] of DLFS_ORDER_WEIGHTED; not kept */
    uint64_t count;
    uint64_t draws; /* of DLFS_ORDER_WEIGHTED: positions of the order */
} dlfs_choice;
/*
 * As dlfs_sequence_create, over chosen samples. Memory: 16 bytes a weight. Errors: -EINVAL: an
 * index is out of range, a weight is negative or not finite, or none is positive; -ENOMEM.
 */
DLFS_API int dlfs_sequence_choose(const dlfs_directory *directory, const dlfs_choice *choice,
                                  dlfs_sequence **out);
DLFS_API void dlfs_sequence_destroy(dlfs_sequence *sequence);
/* out[i] = the index at global position first + i*stride. -EINVAL past the end. */
DLFS_API int dlfs_sequence_fill(const dlfs_sequence *sequence, uint64_t first, uint64_t stride,
                                uint64_t count, uint64_t *out);

#ifdef __cplusplus
}
#endif

#endif
