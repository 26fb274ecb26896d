/* Szip: the samples of a stream by each option, of streams that are cut, and forms that are none.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "dlfs/import.h"

/* Counts the samples of a stream that lies at the end of its memory. Given in bits and spaces. */
static int64_t count(const char *bits, const dlfs_szip *form, uint64_t most)
{
    uint64_t bit_count = 0;
    for (const char *at = bits; *at != 0; at++) {
        bit_count += *at != ' ';
    }
    uint64_t size = (bit_count + 7) / 8;
    uint8_t *stream = malloc(size + 1);
    CHECK(stream != NULL);
    memset(stream, 0, size + 1);
    uint64_t i = 0;
    for (; *bits != 0; bits++) {
        if (*bits != ' ') {
            stream[1 + i / 8] |= (uint8_t)((*bits == '1') << (7 - i % 8));
            i++;
        }
    }
    int64_t found = dlfs_szip_count(stream + 1, size, form, most);
    free(stream);
    return found;
}

int main(void)
{
    dlfs_szip plain = {.sample_bits = 8, .block_samples = 4, .interval_blocks = 2};
    dlfs_szip with = plain;
    with.has_references = 1;
    /* Samples as they are: 32 bits after the option. */
    CHECK_EQ(count("111 00000000 00000000 00000000 00000000", &plain, 99), 4);
    CHECK_EQ(count("111 00000000 00000000 00000000 00000", &plain, 99), 0);
    CHECK_EQ(count("111 00000000 00000000 00000000 00000000", &with, 99), 4);
    /* Unary numbers, and two more bits of each: 3 + (1 + 2 + 1 + 1) + 8 = 16. */
    CHECK_EQ(count("011 10111 00011011", &plain, 99), 4);
    CHECK_EQ(count("011 10111", &plain, 99), 0);
    CHECK_EQ(count("011 00000", &plain, 99), 0);
    /* With a reference, three of them. */
    CHECK_EQ(count("011 11111111 111 000110", &with, 99), 4);
    CHECK_EQ(count("011 11111111 111", &with, 99), 0);
    /* Two blocks of zeros, then an interval begins; and those of an interval's rest. */
    CHECK_EQ(count("0000 01", &plain, 99), 8);
    CHECK_EQ(count("0000 01", &plain, 5), 5);
    CHECK_EQ(count("0000 00001", &plain, 99), 8);
    CHECK_EQ(count("0000 001", &plain, 99), DLFS_E_FORMAT);
    CHECK_EQ(count("0000 1 0000 01", &plain, 99), DLFS_E_FORMAT);
    CHECK_EQ(count("0000 10101010 01", &with, 99), 8);
    CHECK_EQ(count("0000", &plain, 99), 0);
    /* A unary number for each two; the first of an interval also with a reference. */
    CHECK_EQ(count("0001 01 01", &plain, 99), 4);
    CHECK_EQ(count("0001 10101010 01 01", &with, 99), 4);
    CHECK_EQ(count("0001 01", &plain, 99), 0);
    char many[128] = "0001";
    memset(many + 4, '0', 91);
    memcpy(many + 95, "101", 4);
    CHECK_EQ(count(many, &plain, 99), DLFS_E_FORMAT);
    /* Nothing is read beyond the samples wanted, and options have 4 and 5 bits. */
    CHECK_EQ(count("", &plain, 0), 0);
    CHECK_EQ(count("", &plain, 1), 0);
    dlfs_szip wide = {.sample_bits = 16, .block_samples = 2, .interval_blocks = 1};
    CHECK_EQ(count("0001 1 1 00", &wide, 99), 2);
    wide.sample_bits = 24;
    CHECK_EQ(count("00001 1 1 0", &wide, 99), 2);
    const dlfs_szip wrong[] = {{0, 4, 1, 0}, {33, 4, 1, 0}, {8, 0, 1, 0},
                               {8, 3, 1, 0}, {8, 66, 1, 0}, {8, 4, 0, 0}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        CHECK_EQ(count("", &wrong[i], 1), -EINVAL);
    }
    CHECK_EQ(count("", &plain, UINT64_MAX), -EINVAL);
    CHECK_EQ(dlfs_szip_count(NULL, UINT64_MAX, &plain, 1), -EINVAL);
    return 0;
}
