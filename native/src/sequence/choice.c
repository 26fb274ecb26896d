/*
 * Draws with replacement, in proportion to weights, by an alias table: a draw reads one or two
 * entries of the table, whatever the number of weights. The random numbers of a draw are a function
 * of a key and the draw's number, so any draw can be computed directly.
 *
 * Source: M. D. Vose, "A linear algorithm for generating random numbers with a given distribution",
 * IEEE Transactions on Software Engineering 17(9), 1991. The numbers are those of splitmix64
 * (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), two for each
 * draw.
 */
#include "sequence/choice.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "platform/mix.h"

#define TWO_64 0x1p64

__extension__ typedef unsigned __int128 uint128;

/* Returns the sum of the weights, or a negative number if they are invalid. */
static double sum_weights(const double *weights, uint64_t count)
{
    double sum = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (!(weights[i] >= 0) || !isfinite(weights[i])) {
            return -1;
        }
        sum += weights[i];
    }
    return isfinite(sum) ? sum : -1;
}

static uint64_t heaviest(const double *weights, uint64_t count)
{
    uint64_t best = 0;
    for (uint64_t i = 1; i < count; i++) {
        if (weights[i] > weights[best]) {
            best = i;
        }
    }
    return best;
}

/* Sets the threshold of an entry to its own share of the entry's draws. */
static void set_threshold(struct alias *entry, double share)
{
    entry->threshold = share >= 1 ? UINT64_MAX : (uint64_t)(share * TWO_64);
}

/*
 * Fills the table. `shares` are the weights, scaled to an average of 1. `work` is scratch memory:
 * entries with a share below 1 are listed from its front, the others from its end.
 */
static void fill_table(struct alias *table, double *shares, uint64_t *work, uint64_t count)
{
    uint64_t small = 0;
    uint64_t large = count;
    for (uint64_t i = 0; i < count; i++) {
        if (shares[i] < 1) {
            work[small++] = i;
        } else {
            work[--large] = i;
        }
    }
    while (small > 0 && large < count) {
        uint64_t less = work[--small];
        uint64_t more = work[large];
        set_threshold(&table[less], shares[less]);
        table[less].other = more;
        shares[more] -= 1 - shares[less];
        if (shares[more] < 1) {
            large++;
            work[small++] = more;
        }
    }
    /* The remaining shares are 1 except for rounding; entries without weight keep a share of 0. */
    while (large < count) {
        table[work[large++]].threshold = UINT64_MAX;
    }
    while (small > 0) {
        uint64_t entry = work[--small];
        if (shares[entry] > 0) {
            table[entry].threshold = UINT64_MAX;
        }
    }
}

int alias_create(const double *weights, uint64_t count, struct alias **out)
{
    double sum = sum_weights(weights, count);
    if (!(sum > 0)) {
        return -EINVAL;
    }
    struct alias *table = malloc(count * sizeof(*table));
    double *shares = malloc(count * sizeof(*shares));
    uint64_t *work = malloc(count * sizeof(*work));
    int code = table != NULL && shares != NULL && work != NULL ? 0 : -ENOMEM;
    if (code == 0) {
        uint64_t fallback = heaviest(weights, count);
        for (uint64_t i = 0; i < count; i++) {
            shares[i] = weights[i] / sum * (double)count;
            table[i] = (struct alias){0, fallback};
        }
        fill_table(table, shares, work, count);
        *out = table;
    } else {
        free(table);
    }
    free(shares);
    free(work);
    return code;
}

uint64_t choice_key(uint64_t seed, uint64_t epoch)
{
    return mix(mix(seed + MIX_GOLDEN) + 3 * mix((epoch ^ MIX_STREAM_SALT) + MIX_GOLDEN));
}

uint64_t alias_draw(const struct alias *table, uint64_t count, uint64_t key, uint64_t counter)
{
    uint64_t place_bits = mix(key + MIX_GOLDEN * (2 * counter + 1));
    uint64_t share_bits = mix(key + MIX_GOLDEN * (2 * counter + 2));
    uint64_t entry = (uint64_t)((uint128)place_bits * count >> 64);
    return share_bits < table[entry].threshold ? entry : table[entry].other;
}
