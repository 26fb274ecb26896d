/*
 * Decompresses LZF, the filter of HDF5 files that h5py brings.
 *
 * A stream is a row of tokens. A first byte below 32 begins a literal of one more byte than it
 * says. Any other is a copy of bytes before: its upper three bits are the length minus 2, or if all
 * are set the next byte is added; its lower five bits and the last byte of the token are the
 * distance minus 1.
 *
 * Source: liblzf 3.6, lzf_d.c.
 */
#include <errno.h>
#include <string.h>

#include "dlfs/import.h"

#define LITERALS 32u
#define LONGEST 7u
#define FAR_BITS 0x1fu

/* Copies bytes from a distance behind the end; the ranges may overlap, and then repeat. */
static void repeat(uint8_t *end, uint64_t distance, uint64_t length)
{
    const uint8_t *from = end - distance;
    for (uint64_t i = 0; i < length; i++) {
        end[i] = from[i];
    }
}

int64_t dlfs_lzf_decompress(const uint8_t *source, uint64_t source_bytes, uint8_t *target,
                            uint64_t target_bytes)
{
    if (target_bytes > INT64_MAX) {
        return -EINVAL;
    }
    uint64_t at = 0;
    uint64_t used = 0;
    while (at < source_bytes) {
        uint64_t first = source[at++];
        if (first < LITERALS) {
            uint64_t length = first + 1;
            if (length > source_bytes - at) {
                return DLFS_E_FORMAT;
            }
            if (length > target_bytes - used) {
                return DLFS_E_LIMIT;
            }
            memcpy(target + used, source + at, length);
            at += length;
            used += length;
            continue;
        }
        uint64_t length = first >> 5;
        uint64_t extra = length == LONGEST;
        if (extra + 1 > source_bytes - at) {
            return DLFS_E_FORMAT;
        }
        if (extra) {
            length += source[at++];
        }
        length += 2;
        uint64_t distance = ((first & FAR_BITS) << 8 | source[at++]) + 1;
        if (distance > used) {
            return DLFS_E_FORMAT;
        }
        if (length > target_bytes - used) {
            return DLFS_E_LIMIT;
        }
        repeat(target + used, distance, length);
        used += length;
    }
    return (int64_t)used;
}
