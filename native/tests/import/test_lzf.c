/* LZF: literals, copies that overlap, and streams that are cut, too long or point before the start.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "dlfs/import.h"

/* Decompresses a stream that lies at the end of its memory, into memory of exactly the size. */
static int64_t decompress(const uint8_t *stream, uint64_t stream_bytes, const char *expected,
                          uint64_t target_bytes)
{
    uint8_t *source = malloc(stream_bytes + 1);
    uint8_t *target = malloc(target_bytes + 1);
    CHECK(source != NULL && target != NULL);
    memcpy(source + 1, stream, stream_bytes);
    target[0] = 0xee;
    int64_t length = dlfs_lzf_decompress(source + 1, stream_bytes, target + 1, target_bytes);
    CHECK_EQ(target[0], 0xee);
    if (length >= 0) {
        CHECK_EQ(length, strlen(expected));
        CHECK(memcmp(target + 1, expected, (size_t)length) == 0);
    }
    free(source);
    free(target);
    return length;
}

int main(void)
{
    /* "abc", 3 bytes from 3 before, 10 bytes from 1 before. */
    const uint8_t stream[] = {2, 'a', 'b', 'c', 0x20, 2, 0xe0, 1, 0};
    const char *text = "abcabccccccccccc";
    uint64_t size = strlen(text);
    CHECK_EQ(decompress(stream, sizeof(stream), text, size), size);
    CHECK_EQ(decompress(stream, sizeof(stream), text, size + 9), size);
    CHECK_EQ(decompress(stream, 0, "", 4), 0);
    CHECK_EQ(decompress(stream, 4, "abc", 3), 3);
    CHECK_EQ(decompress(stream, 6, "abcabc", size), 6);
    for (uint64_t room = 0; room < size; room++) {
        CHECK_EQ(decompress(stream, sizeof(stream), text, room), DLFS_E_LIMIT);
    }
    const uint64_t cut[] = {1, 2, 3, 5, 7, 8};
    for (size_t i = 0; i < sizeof(cut) / sizeof(cut[0]); i++) {
        CHECK_EQ(decompress(stream, cut[i], text, size), DLFS_E_FORMAT);
    }
    const uint8_t before[] = {0, 'a', 0x20, 1};
    CHECK_EQ(decompress(before, sizeof(before), "", 99), DLFS_E_FORMAT);
    CHECK_EQ(dlfs_lzf_decompress(stream, 1, NULL, UINT64_MAX), -EINVAL);
    return 0;
}
