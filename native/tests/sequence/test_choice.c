/* Draws by weight: in proportion, none without weight, invalid weights, and fixed values. */
#include "sequence/choice.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"

#define DRAWS UINT64_C(200000)

/* Draws often, and compares the count of each index with its share. */
static void check_shares(const double *weights, uint64_t count)
{
    struct alias *table = NULL;
    CHECK_EQ(alias_create(weights, count, &table), 0);
    uint64_t *seen = calloc(count, sizeof *seen);
    CHECK(seen != NULL);
    double sum = 0;
    for (uint64_t i = 0; i < count; i++) {
        sum += weights[i];
    }
    uint64_t key = choice_key(count, 5);
    for (uint64_t counter = 0; counter < DRAWS; counter++) {
        uint64_t place = alias_draw(table, count, key, counter);
        CHECK(place < count);
        seen[place]++;
    }
    for (uint64_t i = 0; i < count; i++) {
        double share = weights[i] / sum;
        double expected = share * (double)DRAWS;
        double off = (double)seen[i] - expected;
        CHECK(off * off <= 36 * expected * (1 - share) + 1e-9); /* six standard deviations */
        if (weights[i] == 0) {
            CHECK_EQ(seen[i], 0);
        }
    }
    free(seen);
    free(table);
}

static void check_many_shares(void)
{
    double one[] = {0.25};
    double even[] = {1, 1, 1};
    double uneven[] = {0, 1e-3, 5, 0, 100, 3, 3, 0};
    double extreme[] = {1e300, 5e-324, 0, 1e300};
    check_shares(one, 1);
    check_shares(even, 3);
    check_shares(uneven, 8);
    check_shares(extreme, 4);
    double tenths[1000];
    for (uint64_t i = 0; i < 1000; i++) {
        tenths[i] = i % 3 ? 0.1 * (double)(i % 17) : 0;
    }
    check_shares(tenths, 1000);
}

static void check_refusals(void)
{
    struct alias *table = NULL;
    double negative[] = {1, -1};
    double zeros[] = {0, 0};
    double not_a_number[] = {1, NAN};
    double infinite[] = {INFINITY, 1};
    double too_much[] = {1.7e308, 1.7e308};
    CHECK_EQ(alias_create(negative, 2, &table), -EINVAL);
    CHECK_EQ(alias_create(zeros, 2, &table), -EINVAL);
    CHECK_EQ(alias_create(not_a_number, 2, &table), -EINVAL);
    CHECK_EQ(alias_create(infinite, 2, &table), -EINVAL);
    CHECK_EQ(alias_create(too_much, 2, &table), -EINVAL);
    CHECK_EQ(alias_create(zeros, 0, &table), -EINVAL);
    CHECK(table == NULL);
}

static void check_pinned(void)
{
    double weights[] = {1, 2, 3, 4, 5, 6, 7};
    struct alias *table = NULL;
    CHECK_EQ(alias_create(weights, 7, &table), 0);
    uint64_t key = choice_key(42, 7);
    uint64_t pinned[] = {5, 6, 5, 6, 5, 6, 6, 4};
    for (uint64_t i = 0; i < sizeof pinned / sizeof *pinned; i++) {
        CHECK_EQ(alias_draw(table, 7, key, i), pinned[i]);
    }
    CHECK(choice_key(42, 8) != key);
    CHECK(choice_key(43, 7) != key);
    free(table);
}

int main(void)
{
    check_many_shares();
    check_refusals();
    check_pinned();
    return 0;
}
