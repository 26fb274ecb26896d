/* CRC32C: published vectors, the instruction against the tables, continuation, copying, blocks. */
#include <dlfs/dlfs.h>

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "platform/crc32c.h"

#define BYTES 20000u

static uint8_t data[BYTES], copy[BYTES + 2];

static void check_vectors(void)
{
    /* RFC 3720, appendix B.4, and the check value of the CRC catalogue. */
    uint8_t bytes[32];
    CHECK_EQ(dlfs_crc32c(0, "123456789", 9), 0xE3069283u);
    memset(bytes, 0, sizeof bytes);
    CHECK_EQ(dlfs_crc32c(0, bytes, 32), 0x8A9136AAu);
    memset(bytes, 0xff, sizeof bytes);
    CHECK_EQ(dlfs_crc32c(0, bytes, 32), 0x62A8AB43u);
    for (uint8_t i = 0; i < 32; i++) {
        bytes[i] = i;
    }
    CHECK_EQ(dlfs_crc32c(0, bytes, 32), 0x46DD794Eu);
    CHECK_EQ(dlfs_crc32c_portable(0, bytes, 32), 0x46DD794Eu);
    CHECK_EQ(dlfs_crc32c(0, NULL, 0), 0);
    CHECK_EQ(dlfs_crc32c_portable(7, NULL, 0), 7);
    CHECK_EQ(dlfs_crc32c_copy(7, NULL, NULL, 0), 7);
}

static void check_length(size_t start, size_t bytes)
{
    uint32_t expected = dlfs_crc32c_portable(5, data + start, bytes);
    CHECK_EQ(dlfs_crc32c(5, data + start, bytes), expected);
    memset(copy, 0xEE, sizeof copy);
    CHECK_EQ(dlfs_crc32c_copy(5, copy + 1, data + start, bytes), expected);
    CHECK(memcmp(copy + 1, data + start, bytes) == 0);
    CHECK(copy[0] == 0xEE && copy[1 + bytes] == 0xEE);
    memset(copy, 0xEE, sizeof copy);
    CHECK_EQ(crc32c_sample(NULL, data + start, bytes, data), dlfs_crc32c(0, data + start, bytes));
    CHECK_EQ(crc32c_sample(copy + 1, data + start, bytes, NULL),
             dlfs_crc32c(0, data + start, bytes));
    CHECK(memcmp(copy + 1, data + start, bytes) == 0);
    size_t cut = bytes / 3;
    uint32_t half = dlfs_crc32c(5, data + start, cut);
    CHECK_EQ(dlfs_crc32c(half, data + start + cut, bytes - cut), expected);
}

static void check_blocks(void)
{
    uint32_t crcs[6] = {0, 0, 0, 0, 0, 99};
    dlfs_crc32c_blocks(data, 4 * 512 + 100, 512, crcs);
    for (size_t i = 0; i < 4; i++) {
        CHECK_EQ(crcs[i], dlfs_crc32c_portable(0, data + i * 512, 512));
    }
    CHECK_EQ(crcs[4], dlfs_crc32c_portable(0, data + (size_t)4 * 512, 100));
    CHECK_EQ(crcs[5], 99);
    dlfs_crc32c_blocks(NULL, 0, 512, crcs);
}

static void check_combinations(void)
{
    uint32_t crcs[64];
    uint32_t following[64];
    uint64_t following_bytes[64];
    for (size_t i = 0; i < 64; i++) {
        following_bytes[i] = i % 2 ? 7 : i * 37;
        crcs[i] = dlfs_crc32c(0, data, i * 5);
        following[i] = dlfs_crc32c(0, data + i * 5, following_bytes[i]);
    }
    dlfs_crc32c_combine(crcs, following, following_bytes, 64);
    for (size_t i = 0; i < 64; i++) {
        CHECK_EQ(crcs[i], dlfs_crc32c(0, data, i * 5 + following_bytes[i]));
    }
    dlfs_crc32c_combine(NULL, NULL, NULL, 0);
}

int main(void)
{
    uint32_t state = 1;
    for (size_t i = 0; i < BYTES; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = (uint8_t)(state >> 24);
    }
    check_vectors();
    check_combinations();
    for (size_t bytes = 0; bytes < 1300; bytes++) {
        check_length(bytes % 9, bytes);
    }
    for (size_t bytes = 1300; bytes < BYTES - 9; bytes += 331) {
        check_length(bytes % 9, bytes);
    }
    check_blocks();
    CHECK(strlen(dlfs_crc32c_kind()) > 0);
    return 0;
}
