/* XXH64: the sanity vectors of the reference implementation (its tests/sanity_test_vectors.h). */
#include <dlfs/dlfs.h>

#include "check.h"

#define PRIME32 UINT64_C(2654435761)
#define PRIME64 UINT64_C(11400714785074694797)

static uint8_t buffer[256];

static void check(size_t bytes, uint64_t seed, uint64_t expected)
{
    CHECK(dlfs_path_hash(buffer, bytes, seed) == expected);
}

int main(void)
{
    uint64_t generator = PRIME32;
    for (size_t i = 0; i < sizeof buffer; i++) {
        buffer[i] = (uint8_t)(generator >> 56);
        generator *= PRIME64;
    }
    check(0, 0, UINT64_C(0xEF46DB3751D8E999));
    check(0, PRIME32, UINT64_C(0xAC75FDA2929B17EF));
    check(1, 0, UINT64_C(0xE934A84ADB052768));
    check(1, PRIME32, UINT64_C(0x5014607643A9B4C3));
    check(4, 0, UINT64_C(0x9136A0DCA57457EE));
    check(14, 0, UINT64_C(0x8282DCC4994E35C8));
    check(14, PRIME32, UINT64_C(0xC3BD6BF63DEB6DF0));
    check(222, 0, UINT64_C(0xB641AE8CB691C174));
    check(222, PRIME32, UINT64_C(0x20CB8AB7AE10C14A));
    CHECK(dlfs_path_hash(NULL, 0, 0) == UINT64_C(0xEF46DB3751D8E999));
    return 0;
}
