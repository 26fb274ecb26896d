/*
 * The keyed bijection behind every shuffle.
 *
 * A position v < size is the pair (v / b, v % b) in Z_a x Z_b. Even rounds add a function of the
 * right half to the left half, modulo a. Odd rounds add a function of the left half to the right
 * half, modulo b. This is a generalised Feistel network, inverted by subtracting in reverse order.
 * A result at or above size (fewer than 2a of about a^2 values) passes through the network again.
 * Keys depend on size, seed and stream through the finaliser of splitmix64.
 *
 * The product a*b is even: if both were odd, every round would be a set of cycles of odd length,
 * thus an even permutation, and half of all permutations could not occur.
 *
 * Fewer than 65536 samples take more rounds, because a round has fewer values to mix with; the
 * tests compare all permutations of 4, 5 and 6 with the uniform distribution.
 *
 * Sources: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002; Steele, Lea and
 * Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; Lemire, "Fast Random
 * Integer Generation in an Interval", 2019, for the reduction by a multiplication.
 */
#include "dlfs/dlfs.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "platform/mix.h"

#define SIZE_MAX_SAMPLES (UINT64_C(1) << 62)
#define SMALL_SIZE 65536u
#define ROUNDS_SMALL 24u
#define ROUNDS_LARGE 10u
#define LANES 8u /* values permuted in parallel, so that the multiplier is always busy */

_Static_assert(ROUNDS_SMALL <= DLFS_PERMUTATION_ROUNDS_MAX, "keys must have room for all rounds");
_Static_assert(ROUNDS_SMALL % 2 == 0 && ROUNDS_LARGE % 2 == 0, "rounds come in pairs");

__extension__ typedef unsigned __int128 uint128;

/*
 * Returns a function of half and key, uniform on 0..range-1. Only the high bits of the product
 * affect the result.
 */
static inline uint64_t round_function(uint64_t half, uint64_t key, uint64_t range)
{
    uint64_t value = (half + key) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ value >> 32) * UINT64_C(0x94D049BB133111EB);
    value ^= value >> 29;
    return (uint64_t)((uint128)value * range >> 64);
}

static inline uint64_t add_modulo(uint64_t a, uint64_t b, uint64_t modulus)
{
    uint64_t sum = a + b;
    return sum >= modulus ? sum - modulus : sum;
}

static inline uint64_t subtract_modulo(uint64_t a, uint64_t b, uint64_t modulus)
{
    return a >= b ? a - b : a + modulus - b;
}

/* Applies the network, or its inverse, once to LANES values in parallel. */
static inline void apply(const dlfs_permutation *p, bool inverse, uint64_t values[LANES])
{
    uint64_t left[LANES], right[LANES];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        left[lane] = values[lane] / p->right;
        right[lane] = values[lane] % p->right;
    }
    for (uint32_t i = 0; !inverse && i < p->rounds; i += 2) {
        for (uint32_t lane = 0; lane < LANES; lane++) {
            uint64_t term = round_function(right[lane], p->keys[i], p->left);
            left[lane] = add_modulo(left[lane], term, p->left);
            term = round_function(left[lane], p->keys[i + 1], p->right);
            right[lane] = add_modulo(right[lane], term, p->right);
        }
    }
    for (uint32_t i = p->rounds; inverse && i > 0; i -= 2) {
        for (uint32_t lane = 0; lane < LANES; lane++) {
            uint64_t term = round_function(left[lane], p->keys[i - 1], p->right);
            right[lane] = subtract_modulo(right[lane], term, p->right);
            term = round_function(right[lane], p->keys[i - 2], p->left);
            left[lane] = subtract_modulo(left[lane], term, p->left);
        }
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        values[lane] = left[lane] * p->right + right[lane];
    }
}

static bool all_inside(const uint64_t values[LANES], uint64_t size)
{
    bool inside = true;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        inside &= values[lane] < size;
    }
    return inside;
}

/*
 * Applies the network until all lanes are below size, and stores the first `count`. A lane that is
 * below size stays unchanged. This ends because the cycle of each lane returns to its start, which
 * is below size.
 */
static inline void walk(const dlfs_permutation *p, bool inverse, uint64_t values[LANES],
                        size_t count, uint64_t *out)
{
    uint64_t next[LANES];
    apply(p, inverse, values);
    while (!all_inside(values, p->size)) {
        memcpy(next, values, sizeof(next));
        apply(p, inverse, next);
        for (uint32_t lane = 0; lane < LANES; lane++) {
            values[lane] = values[lane] < p->size ? values[lane] : next[lane];
        }
    }
    memcpy(out, values, count * sizeof(*out));
}

/* Returns the smallest a with a * a >= size. */
static uint64_t square_root_up(uint64_t size)
{
    uint64_t low = 1, high = UINT64_C(1) << 31;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (middle * middle >= size) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

int dlfs_permutation_init(dlfs_permutation *permutation, uint64_t size, uint64_t seed,
                          uint64_t stream)
{
    if (size == 0 || size > SIZE_MAX_SAMPLES) {
        return -EINVAL;
    }
    dlfs_permutation made = {.size = size, .left = square_root_up(size)};
    made.right = (size + made.left - 1) / made.left;
    if (made.left % 2 == 1 && made.right % 2 == 1) {
        made.right++;
    }
    made.rounds = size < SMALL_SIZE ? ROUNDS_SMALL : ROUNDS_LARGE;
    for (uint32_t i = 0; i < DLFS_PERMUTATION_ROUNDS_MAX; i++) {
        uint64_t step = MIX_GOLDEN * (i + 1);
        uint64_t from_seed = mix(seed + step);
        uint64_t from_stream = mix((stream ^ MIX_STREAM_SALT) + step);
        made.keys[i] = mix(mix(from_seed + 3 * from_stream) + size);
    }
    *permutation = made;
    return 0;
}

/* Returns true if first, first + stride, ... (count of them) are all below size. */
static bool positions_inside(uint64_t size, uint64_t first, uint64_t stride, size_t count)
{
    if (count == 0) {
        return true;
    }
    uint64_t reach;
    if (__builtin_mul_overflow(stride, (uint64_t)count - 1, &reach)) {
        return false;
    }
    return first < size && reach < size - first;
}

int dlfs_permutation_map(const dlfs_permutation *permutation, uint64_t first, uint64_t stride,
                         size_t count, uint64_t *out)
{
    if (!positions_inside(permutation->size, first, stride, count)) {
        return -EINVAL;
    }
    for (size_t done = 0; done < count; done += LANES) {
        uint64_t values[LANES] = {0};
        size_t now = count - done < LANES ? count - done : LANES;
        for (size_t lane = 0; lane < now; lane++) {
            values[lane] = first + (done + lane) * stride;
        }
        walk(permutation, false, values, now, out + done);
    }
    return 0;
}

int dlfs_permutation_invert(const dlfs_permutation *permutation, const uint64_t *values,
                            size_t count, uint64_t *out)
{
    for (size_t i = 0; i < count; i++) {
        if (values[i] >= permutation->size) {
            return -EINVAL;
        }
    }
    for (size_t done = 0; done < count; done += LANES) {
        uint64_t lanes[LANES] = {0};
        size_t now = count - done < LANES ? count - done : LANES;
        memcpy(lanes, values + done, now * sizeof(*lanes));
        walk(permutation, true, lanes, now, out + done);
    }
    return 0;
}
