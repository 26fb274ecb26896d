/*
 * Counts the samples in a stream of szip, a filter of HDF5 files.
 *
 * The library decodes a stream that is cut without an error: what is missing is memory that was
 * not written. So the stream is walked here first. Its blocks follow each other without a size:
 *
 *   option (3 to 5 bits); the reference sample, in the first block of an interval of a stream with
 *   a predictor; then, by the option,
 *     0, and a 0 bit   nothing but zeros: a unary number says in how many blocks
 *     0, and a 1 bit   a unary number for each two samples
 *     all ones         every sample, the reference too, as it is
 *     k + 1            a unary number for each sample, and then the lowest k bits of each
 *
 * A unary number is its zeros and a one.
 *
 * Source: CCSDS 121.0-B-3 with the rules of szip for intervals; libaec 1.0.6, decode.c.
 */
#include <errno.h>
#include <stdbool.h>

#include "dlfs/import.h"

#define BITS_MAX 32u
#define BLOCK_MAX 64u
#define SEGMENT_REMAINDER 5u
#define SEGMENT_BLOCKS 64u
#define PAIRS_MAX 90u

/* A stream, and the number of its bits that are read. */
typedef struct bit_stream {
    const uint8_t *bytes;
    uint64_t bit_count;
    uint64_t used;
} bit_stream;

/* Reads up to 8 bits as a number. Returns false if the stream ends first. */
static bool read_bits(bit_stream *stream, uint32_t count, uint32_t *value)
{
    if (count > stream->bit_count - stream->used) {
        return false;
    }
    *value = 0;
    for (uint32_t i = 0; i < count; i++, stream->used++) {
        uint32_t bit = stream->bytes[stream->used / 8] >> (7 - stream->used % 8) & 1u;
        *value = *value << 1 | bit;
    }
    return true;
}

static bool skip_bits(bit_stream *stream, uint64_t count)
{
    if (count > stream->bit_count - stream->used) {
        return false;
    }
    stream->used += count;
    return true;
}

/* Reads a unary number. Returns false if the stream ends first. */
static bool read_unary(bit_stream *stream, uint64_t *value)
{
    uint64_t first = stream->used;
    uint64_t at = first;
    while (at < stream->bit_count) {
        uint32_t left = stream->bytes[at / 8] & (0xffu >> at % 8);
        if (left != 0) {
            at = at / 8 * 8 + (uint64_t)__builtin_clz(left) - 24;
            *value = at - first;
            stream->used = at + 1;
            return true;
        }
        at = at / 8 * 8 + 8;
    }
    return false;
}

/* Skips unary numbers. Returns 1, 0 if the stream ends first, or an error: one is over the most. */
static int skip_unary(bit_stream *stream, uint32_t count, uint64_t most)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t value;
        if (!read_unary(stream, &value)) {
            return 0;
        }
        if (value > most) {
            return DLFS_E_FORMAT;
        }
    }
    return 1;
}

/* Returns the number of blocks of zeros at a block of an interval, 0 at the end of the stream. */
static int64_t read_zeros(bit_stream *stream, uint64_t block, uint64_t interval_blocks)
{
    uint64_t count;
    if (!read_unary(stream, &count)) {
        return 0;
    }
    count++;
    uint64_t left = interval_blocks - block;
    if (count == SEGMENT_REMAINDER) {
        uint64_t segment = SEGMENT_BLOCKS - block % SEGMENT_BLOCKS;
        count = left < segment ? left : segment;
    } else if (count > SEGMENT_REMAINDER) {
        count--;
    }
    return count > left ? DLFS_E_FORMAT : (int64_t)count;
}

/* Returns the number of blocks that the next option gives, 0 at the end of the stream, an error. */
static int64_t read_blocks(bit_stream *stream, const dlfs_szip *form, uint64_t block)
{
    uint32_t option_bits = form->sample_bits > 16 ? 5 : form->sample_bits > 8 ? 4 : 3;
    uint32_t plain = (1u << option_bits) - 1;
    uint32_t reference = form->has_references && block == 0;
    uint32_t option;
    uint32_t is_paired = 0;
    if (!read_bits(stream, option_bits, &option) ||
        (option == 0 && !read_bits(stream, 1, &is_paired))) {
        return 0;
    }
    if (option == plain) {
        return skip_bits(stream, (uint64_t)form->block_samples * form->sample_bits);
    }
    if (reference && !skip_bits(stream, form->sample_bits)) {
        return 0;
    }
    if (option == 0 && !is_paired) {
        return read_zeros(stream, block, form->interval_blocks);
    }
    if (option == 0) {
        return skip_unary(stream, form->block_samples / 2, PAIRS_MAX);
    }
    uint32_t count = form->block_samples - reference;
    int found = skip_unary(stream, count, UINT64_MAX);
    return found > 0 ? skip_bits(stream, (uint64_t)count * (option - 1)) : found;
}

int64_t dlfs_szip_count(const uint8_t *source, uint64_t source_bytes, const dlfs_szip *form,
                        uint64_t sample_count)
{
    if (form->sample_bits == 0 || form->sample_bits > BITS_MAX || form->block_samples < 2 ||
        form->block_samples > BLOCK_MAX || form->block_samples % 2 != 0 ||
        form->interval_blocks == 0 || source_bytes > INT64_MAX / 8 ||
        sample_count > INT64_MAX / BLOCK_MAX) {
        return -EINVAL;
    }
    bit_stream stream = {source, source_bytes * 8, 0};
    uint64_t block = 0; /* in its interval */
    uint64_t done = 0;
    while (done < sample_count) {
        int64_t blocks = read_blocks(&stream, form, block);
        if (blocks <= 0) {
            return blocks < 0 ? blocks : (int64_t)done;
        }
        block = (block + (uint64_t)blocks) % form->interval_blocks;
        done += (uint64_t)blocks * form->block_samples;
    }
    return (int64_t)sample_count;
}
