/* Planning: misses are sorted by address, whatever order they come in. */
#include <string.h>

#include "check.h"
#include "reader/plan.h"

#define MISSES_MAX 3000u

static struct miss misses[MISSES_MAX], scratch[MISSES_MAX];
static uint64_t state = 88172645463325252u;

static uint64_t random_bits(void)
{
    state ^= state << 13; /* xorshift64 */
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

/* Sorts misses whose addresses have random bits under a mask, and checks that none is lost. */
static void sort_masked(uint64_t count, uint64_t mask)
{
    static uint64_t addresses[MISSES_MAX];
    static bool seen[MISSES_MAX];
    memset(seen, 0, sizeof seen);
    for (uint64_t i = 0; i < count; i++) {
        addresses[i] = random_bits() & mask;
        misses[i] = (struct miss){addresses[i], 1, i, (uint32_t)i, 0};
    }
    plan_sort(misses, scratch, count);
    for (uint64_t i = 0; i < count; i++) {
        CHECK(i == 0 || misses[i - 1].address <= misses[i].address);
        CHECK(misses[i].position < count && !seen[misses[i].position]);
        seen[misses[i].position] = true;
        CHECK(misses[i].address == addresses[misses[i].position]);
        CHECK(misses[i].crc32c == (uint32_t)misses[i].position);
    }
}

static void test_sorts(void)
{
    static const uint64_t counts[] = {0, 1, 2, 23, 24, 25, 26, 100, 512, 1024, MISSES_MAX};
    static const uint64_t masks[] = {
        0,          1,          0xFFF,           0x7FFFF000,          0xF0000000000F,
        UINT64_MAX, 1ull << 63, 0xFF00000000ull, 0x8000000000000001u,
    };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        for (size_t j = 0; j < sizeof masks / sizeof masks[0]; j++) {
            sort_masked(counts[i], masks[j]);
        }
    }
}

static void test_leaves_what_is_sorted(void)
{
    for (uint64_t i = 0; i < MISSES_MAX; i++) {
        misses[i] = (struct miss){i / 2 * 4096, 1, i, 0, 0};
    }
    plan_sort(misses, scratch, MISSES_MAX);
    for (uint64_t i = 0; i < MISSES_MAX; i++) {
        CHECK(misses[i].position == i);
    }
}

int main(void)
{
    test_sorts();
    test_leaves_what_is_sorted();
    return 0;
}
