/*
 * Draws in proportion to weights, each a function of a key and a counter. Internal to the part
 * "sequence".
 */
#ifndef DLFS_CHOICE_H
#define DLFS_CHOICE_H

#include <stdint.h>

/* An entry of an alias table. A draw returns the entry itself below the threshold, else `other`. */
struct alias {
    uint64_t threshold;
    uint64_t other;
};

/*
 * Creates the table of count weights, which the caller frees. Errors: -EINVAL (a weight is negative
 * or not finite, their sum is not finite, or none is positive), -ENOMEM.
 */
int alias_create(const double *weights, uint64_t count, struct alias **out);
/* Returns the key of all draws of an epoch. */
uint64_t choice_key(uint64_t seed, uint64_t epoch);
/* Returns draw number `counter`, in 0..count-1. */
uint64_t alias_draw(const struct alias *table, uint64_t count, uint64_t key, uint64_t counter);

#endif
