/* Draws in proportion to weights, each a function of a key and a counter. */
#ifndef DLFS_CHOICE_H
#define DLFS_CHOICE_H

#include <stdint.h>

/* A place of an alias table: itself below the threshold, else the other one. */
struct alias {
    uint64_t threshold;
    uint64_t other;
};

/*
 * Makes the table of count weights, to be freed. Errors: -EINVAL: a weight is negative or not
 * finite, their sum is not finite, or none is positive; -ENOMEM.
 */
int alias_create(const double *weights, uint64_t count, struct alias **out);
/* The key of the draws of an epoch. */
uint64_t choice_key(uint64_t seed, uint64_t epoch);
/* Draw number `counter`: a place 0..count-1. */
uint64_t alias_draw(const struct alias *table, uint64_t count, uint64_t key, uint64_t counter);

#endif
