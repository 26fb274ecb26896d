/* The permutation: a bijection of every size, its inverse, its limits, and values pinned for ever.
 */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static void check_bijection(uint64_t size, uint64_t seed)
{
    dlfs_permutation permutation;
    CHECK_EQ(dlfs_permutation_init(&permutation, size, seed, 3), 0);
    uint64_t *image = calloc(size, sizeof *image), *back = calloc(size, sizeof *back);
    uint8_t *seen = calloc(size, 1);
    CHECK(image != NULL && back != NULL && seen != NULL);
    CHECK_EQ(dlfs_permutation_map(&permutation, 0, 1, size, image), 0);
    CHECK_EQ(dlfs_permutation_invert(&permutation, image, size, back), 0);
    for (uint64_t i = 0; i < size; i++) {
        CHECK(image[i] < size);
        CHECK(seen[image[i]] == 0);
        seen[image[i]] = 1;
        CHECK_EQ(back[i], i);
    }
    uint64_t one = 0;
    CHECK_EQ(dlfs_permutation_map(&permutation, size - 1, 1, 1, &one), 0);
    CHECK_EQ(one, image[size - 1]);
    free(seen);
    free(back);
    free(image);
}

static void check_strides(void)
{
    dlfs_permutation permutation;
    uint64_t all[100], some[20], first = 42;
    CHECK_EQ(dlfs_permutation_init(&permutation, 100, 1, 2), 0);
    CHECK_EQ(dlfs_permutation_map(&permutation, 0, 1, 100, all), 0);
    CHECK_EQ(dlfs_permutation_map(&permutation, 3, 5, 20, some), 0);
    for (size_t i = 0; i < 20; i++) {
        CHECK_EQ(some[i], all[3 + 5 * i]);
    }
    CHECK_EQ(dlfs_permutation_map(&permutation, 0, UINT64_MAX, 1, some), 0);
    CHECK_EQ(dlfs_permutation_map(&permutation, 99, 0, 2, some), 0);
    CHECK_EQ(dlfs_permutation_map(&permutation, 200, 1, 0, &first), 0);
    CHECK_EQ(dlfs_permutation_map(&permutation, 100, 1, 1, &first), -EINVAL);
    CHECK_EQ(dlfs_permutation_map(&permutation, 50, 1, 51, &first), -EINVAL);
    CHECK_EQ(dlfs_permutation_map(&permutation, 1, UINT64_MAX, 2, &first), -EINVAL);
    CHECK_EQ(dlfs_permutation_map(&permutation, 1, UINT64_C(1) << 63, 3, &first), -EINVAL);
    uint64_t outside[] = {1, 100};
    CHECK_EQ(dlfs_permutation_invert(&permutation, outside, 2, &first), -EINVAL);
    CHECK_EQ(first, 42);
}

static void check_large(void)
{
    uint64_t sizes[] = {(UINT64_C(1) << 62), (UINT64_C(1) << 62) - 1, (UINT64_C(1) << 32) + 15,
                        UINT64_C(3037000500) * 1000000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        dlfs_permutation permutation;
        uint64_t image[33], back[33], step = sizes[i] / 33;
        CHECK_EQ(dlfs_permutation_init(&permutation, sizes[i], i, 0), 0);
        CHECK_EQ(dlfs_permutation_map(&permutation, 1, step, 33, image), 0);
        CHECK_EQ(dlfs_permutation_invert(&permutation, image, 33, back), 0);
        for (uint64_t k = 0; k < 33; k++) {
            CHECK(image[k] < sizes[i]);
            CHECK_EQ(back[k], 1 + k * step);
        }
    }
}

int main(void)
{
    dlfs_permutation permutation;
    memset(&permutation, 0, sizeof permutation);
    CHECK_EQ(dlfs_permutation_init(&permutation, 0, 1, 1), -EINVAL);
    CHECK_EQ(dlfs_permutation_init(&permutation, (UINT64_C(1) << 62) + 1, 1, 1), -EINVAL);
    CHECK_EQ(permutation.size, 0);
    for (uint64_t size = 1; size <= 300; size++) {
        check_bijection(size, size * 7);
    }
    check_bijection(65535, 1);
    check_bijection(65536, 1);
    check_bijection(100003, UINT64_MAX);
    check_strides();
    check_large();
    return 0;
}
