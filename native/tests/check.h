/*
 * CHECK: like assert, but never compiled out, and it prints the compared values. ROUNDS_OF: how
 * often a test repeats what is random.
 */
#ifndef DLFS_TESTS_CHECK_H
#define DLFS_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: %s: failed: %s\n", __FILE__, __LINE__, __func__, #condition); \
            abort();                                                                              \
        }                                                                                         \
    } while (0)

#define CHECK_EQ(got, expected)                                                             \
    do {                                                                                    \
        long long check_got = (long long)(got), check_expected = (long long)(expected);     \
        if (check_got != check_expected) {                                                  \
            fprintf(stderr, "%s:%d: %s: %s: expected %lld, got %lld\n", __FILE__, __LINE__, \
                    __func__, #got, check_expected, check_got);                             \
            abort();                                                                        \
        }                                                                                   \
    } while (0)

#ifdef __SANITIZE_THREAD__ /* under ThreadSanitizer, a round takes ten or more times as long */
#define ROUNDS_OF(count, with_threads) (with_threads)
#else
#define ROUNDS_OF(count, with_threads) (count)
#endif

#endif
