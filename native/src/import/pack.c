/*
 * Packs samples into a dataset's data space by the packing rule of FORMAT.md, and verifies packed
 * samples.
 *
 * Both work on a window of the data space in memory, of whole chunks, which advances from call to
 * call. A sample larger than the window passes through it in several calls; dlfs_packing has its
 * state between them. Nothing is allocated. Each source byte is read once: it is copied and added
 * to the checksum in the same pass. That of a sample larger than a chunk is combined from those of
 * its parts in each chunk.
 */
#include <errno.h>
#include <string.h>

#include "directory/directory.h"
#include "dlfs/import.h"

#define PREFETCH_SAMPLES \
    4 /* shuffled sources are not read in address order: fetch the next samples early */

/*
 * Padding is accepted if it makes the sample touch one block less and is at most an eighth of it.
 */
#define PADDING_SHIFT 3

static int packing_check(const dlfs_packing *packing, uint64_t window_address,
                         uint64_t window_bytes)
{
    uint32_t chunk = packing->chunk_bytes;
    uint32_t block = packing->block_bytes;
    if (chunk == 0 || (chunk & (chunk - 1)) != 0 || block == 0 || (block & (block - 1)) != 0 ||
        block > chunk) {
        return -EINVAL;
    }
    if (window_address % chunk != 0 || window_bytes % chunk != 0) {
        return -EINVAL;
    }
    if (window_address > DLFS_ADDRESS_MAX || window_bytes > DLFS_ADDRESS_MAX - window_address) {
        return DLFS_E_LIMIT;
    }
    return 0;
}

/*
 * Returns the address where a sample of length bytes starts, if everything before address is used.
 */
static uint64_t start_address(uint64_t address, uint64_t length, uint64_t chunk, uint64_t block)
{
    if (length == 0) {
        return address;
    }
    uint64_t start = address;
    uint64_t padding = -address & (block - 1);
    uint64_t touched = (address + length - 1) / block - address / block + 1; /* blocks */
    if (touched > (length + block - 1) / block && padding <= length >> PADDING_SHIFT) {
        start = address + padding;
    }
    uint64_t chunk_end = (address + chunk - 1) & ~(chunk - 1);
    if (address == chunk_end || start + length <= chunk_end) {
        return start;
    }
    return address + length <= chunk_end ? address : chunk_end;
}

static dlfs_location location_of(uint64_t address, uint64_t length, uint32_t crc)
{
    return (dlfs_location){
        .crc32c = crc,
        .length_low = (uint32_t)length,
        .address = address | (length >> 32) << 56,
    };
}

/*
 * Copies the bytes of the current sample that fit: a small sample, which lies in one chunk, or the
 * parts of a larger one, which starts a chunk. Returns 1 if the sample is complete, 0 if the window
 * is full.
 */
static int copy_sample(dlfs_packing *packing, const uint8_t *sample, uint64_t length,
                       uint8_t *window, uint64_t window_address, uint64_t window_end,
                       uint32_t *parts)
{
    uint64_t chunk = packing->chunk_bytes;
    while (packing->done_bytes < length && packing->address < window_end) {
        uint64_t left = length - packing->done_bytes;
        uint64_t bytes = left < chunk ? left : chunk;
        uint64_t at = packing->address - window_address;
        uint32_t crc = dlfs_crc32c_copy(0, window + at, sample + packing->done_bytes, bytes);
        if (length > chunk) {
            parts[at / chunk] = crc;
        }
        dlfs_crc32c_combine(&packing->crc32c, &crc, &bytes, 1);
        packing->address += bytes;
        packing->done_bytes += bytes;
    }
    return packing->done_bytes == length;
}

/* Starts a sample and zeroes the gap before it. Returns 0 if it starts beyond the window. */
static int start_sample(dlfs_packing *packing, uint64_t length, uint8_t *window,
                        uint64_t window_address, uint64_t window_end)
{
    uint64_t start =
        start_address(packing->address, length, packing->chunk_bytes, packing->block_bytes);
    memset(window + (packing->address - window_address), 0, start - packing->address);
    packing->address = start;
    if (length != 0 && start == window_end) {
        return 0;
    }
    packing->start = start;
    packing->done_bytes = 0;
    packing->crc32c = 0;
    packing->under_way = 1;
    return 1;
}

/* Ends a sample. The remainder of a large sample's last chunk stays unused. */
static void end_sample(dlfs_packing *packing, uint64_t length, uint8_t *window,
                       uint64_t window_address)
{
    packing->under_way = 0;
    if (length <= packing->chunk_bytes) {
        return;
    }
    uint64_t padding = -packing->address & (uint64_t)(packing->chunk_bytes - 1);
    memset(window + (packing->address - window_address), 0, padding);
    packing->address += padding;
}

/* Returns true if a sample at this address would end in the current chunk. */
static int fits_here(const dlfs_packing *packing, uint64_t address, uint64_t length)
{
    uint64_t mask = packing->chunk_bytes - 1;
    uint64_t chunk_end = (address + mask) & ~mask;
    return address == chunk_end || length == 0 ||
           start_address(address, length, packing->chunk_bytes, packing->block_bytes) < chunk_end;
}

/*
 * Returns the first candidate if it fits in the current chunk, else the longest one that fits, else
 * the first.
 */
static uint32_t choose_next(const dlfs_packing *packing, uint64_t address, const int64_t *lengths,
                            const uint64_t *candidates, uint32_t count)
{
    if (fits_here(packing, address, (uint64_t)lengths[candidates[0]])) {
        return 0;
    }
    uint32_t best = 0;
    int64_t best_length = -1;
    for (uint32_t i = 1; i < count; i++) {
        int64_t length = lengths[candidates[i]];
        if (length > best_length && fits_here(packing, address, (uint64_t)length)) {
            best = i;
            best_length = length;
        }
    }
    return best;
}

/* Returns the first free byte after a sample that starts at `start`. */
static uint64_t address_behind(const dlfs_packing *packing, uint64_t start, uint64_t length)
{
    uint64_t mask = packing->chunk_bytes - 1;
    uint64_t end = start + length;
    return length > packing->chunk_bytes ? (end + mask) & ~mask : end;
}

int dlfs_pack_order(const dlfs_packing *packing, const int64_t *lengths, uint64_t length_count,
                    uint64_t *order, uint64_t count)
{
    uint64_t candidates[DLFS_PACK_CANDIDATES];
    uint32_t candidate_count = 0;
    uint64_t taken = 0;
    uint64_t address = packing->address;
    int code = packing_check(packing, 0, 0);
    for (uint64_t i = 0; code == 0 && i < count; i++) {
        if (order[i] >= length_count || lengths[order[i]] < 0) {
            code = -EINVAL;
        }
    }
    for (uint64_t given = 0; code == 0 && given < count; given++) {
        while (candidate_count < DLFS_PACK_CANDIDATES && taken < count) {
            candidates[candidate_count++] = order[taken++];
        }
        uint32_t chosen = choose_next(packing, address, lengths, candidates, candidate_count);
        uint64_t sample = candidates[chosen];
        candidate_count--;
        memmove(&candidates[chosen], &candidates[chosen + 1],
                (candidate_count - chosen) * sizeof(*candidates));
        uint64_t length = (uint64_t)lengths[sample];
        uint64_t start = start_address(address, length, packing->chunk_bytes, packing->block_bytes);
        address = address_behind(packing, start, length);
        order[given] = sample;
    }
    return code;
}

int64_t dlfs_pack(dlfs_packing *packing, const uint8_t *source, uint64_t source_bytes,
                  const int64_t *offsets, const int64_t *lengths, const uint64_t *order,
                  uint64_t count, void *window, uint64_t window_address, uint64_t window_bytes,
                  dlfs_location *locations, uint32_t *parts)
{
    int code = packing_check(packing, window_address, window_bytes);
    if (code != 0) {
        return code;
    }
    uint64_t window_end = window_address + window_bytes;
    if (packing->address < window_address || packing->address > window_end) {
        return -EINVAL;
    }
    uint64_t i = 0;
    for (; i < count; i++) {
        uint64_t sample = order != NULL ? order[i] : i;
        uint64_t offset = (uint64_t)offsets[sample];
        uint64_t length = (uint64_t)lengths[sample];
        if (offset > source_bytes || length > source_bytes - offset ||
            length > DLFS_SAMPLE_BYTES_MAX) {
            return -EINVAL;
        }
        if (order != NULL && i + PREFETCH_SAMPLES < count) {
            __builtin_prefetch(source + offsets[order[i + PREFETCH_SAMPLES]]);
        }
        if (!packing->under_way &&
            !start_sample(packing, length, window, window_address, window_end)) {
            break;
        }
        if (!copy_sample(packing, source + offset, length, window, window_address, window_end,
                         parts)) {
            break;
        }
        locations[sample] = location_of(packing->start, length, packing->crc32c);
        end_sample(packing, length, window, window_address);
    }
    return (int64_t)i;
}

int64_t dlfs_pack_verify(const dlfs_location *locations, uint64_t count, const void *window,
                         uint64_t window_address, uint64_t window_bytes, uint32_t *crcs)
{
    const uint8_t *bytes = window;
    uint64_t i = 0;
    if (window_bytes > UINT64_MAX - window_address) {
        return -EINVAL;
    }
    for (; i < count; i++) {
        uint64_t address = dlfs_location_address(&locations[i]);
        uint64_t length = dlfs_location_length(&locations[i]);
        if (address >= window_address + window_bytes) {
            break;
        }
        if (address < window_address || length > window_bytes - (address - window_address)) {
            return DLFS_E_FORMAT;
        }
        crcs[i] = dlfs_crc32c(0, bytes + (address - window_address), length);
    }
    return (int64_t)i;
}
