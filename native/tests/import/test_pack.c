/* Packing: the rule of placement, windows of any size, sums that find a flipped bit, arguments
 * refused. */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "dlfs/import.h"

#define CHUNK 4096u
#define BLOCK 512u
#define SAMPLES 300u
#define CHUNKS_MAX 1024u

static uint64_t next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

struct source {
    uint8_t *bytes;
    uint64_t size;
    int64_t offsets[SAMPLES];
    int64_t lengths[SAMPLES];
    uint64_t order[SAMPLES];
};

static void make_source(struct source *source, uint64_t seed)
{
    source->size = 0;
    for (uint64_t i = 0; i < SAMPLES; i++) {
        uint64_t top = next_random(&seed) % 8 == 0 ? 5 * CHUNK : 700;
        source->offsets[i] = (int64_t)source->size;
        source->lengths[i] = (int64_t)(next_random(&seed) % top);
        source->size += (uint64_t)source->lengths[i];
        source->order[i] = (i * 7) % SAMPLES;
    }
    source->bytes = malloc(source->size);
    CHECK(source->bytes != NULL);
    for (uint64_t i = 0; i < source->size; i++) {
        source->bytes[i] = (uint8_t)(1 + next_random(&seed) % 255);
    }
}

/*
 * Packs all samples through windows, each in memory of exactly its size; returns the data space.
 * parts gets those of all its chunks.
 */
static uint8_t *pack_all(const struct source *source, bool ordered, uint64_t window_chunks,
                         dlfs_location *locations, uint32_t *parts, uint64_t *space_bytes)
{
    dlfs_packing packing = {.chunk_bytes = CHUNK, .block_bytes = BLOCK};
    uint64_t window_bytes = window_chunks * CHUNK;
    uint8_t *space = NULL;
    uint64_t address = 0;
    uint64_t done = 0;
    for (;;) {
        uint8_t *window = malloc(window_bytes);
        CHECK(window != NULL);
        memset(window, 0xee, window_bytes);
        const uint64_t *order = ordered ? source->order + done : NULL;
        uint64_t skip = ordered ? 0 : done;
        int64_t count = dlfs_pack(&packing, source->bytes, source->size, source->offsets + skip,
                                  source->lengths + skip, order, SAMPLES - done, window, address,
                                  window_bytes, locations + skip, parts + address / CHUNK);
        CHECK(count >= 0);
        done += (uint64_t)count;
        uint64_t used = packing.address - address;
        memset(window + used, 0, window_bytes - used);
        space = realloc(space, address + window_bytes);
        CHECK(space != NULL);
        memcpy(space + address, window, window_bytes);
        free(window);
        address += window_bytes;
        if (done == SAMPLES) {
            break;
        }
        CHECK_EQ(packing.address, address);
    }
    *space_bytes = address;
    return space;
}

/* The parts of large samples have the checksums of their bytes, and all other chunks have none. */
static void check_parts(const struct source *source, const dlfs_location *locations,
                        const uint32_t *parts)
{
    uint32_t expected[CHUNKS_MAX] = {0};
    for (uint64_t i = 0; i < SAMPLES; i++) {
        uint64_t length = dlfs_location_length(&locations[i]);
        uint64_t first = dlfs_location_address(&locations[i]) / CHUNK;
        for (uint64_t at = 0; length > CHUNK && at < length; at += CHUNK) {
            uint64_t bytes = length - at < CHUNK ? length - at : CHUNK;
            expected[first + at / CHUNK] =
                dlfs_crc32c(0, source->bytes + source->offsets[i] + at, bytes);
        }
    }
    CHECK(memcmp(parts, expected, sizeof(expected)) == 0);
}

static void check_placed(const struct source *source, const dlfs_location *locations,
                         uint8_t *space, uint64_t space_bytes)
{
    for (uint64_t i = 0; i < SAMPLES; i++) {
        uint64_t address = dlfs_location_address(&locations[i]);
        uint64_t length = dlfs_location_length(&locations[i]);
        CHECK_EQ(length, source->lengths[i]);
        CHECK(address + length <= space_bytes);
        const uint8_t *sample = source->bytes + source->offsets[i];
        CHECK(memcmp(space + address, sample, length) == 0);
        CHECK_EQ(locations[i].crc32c, dlfs_crc32c(0, sample, length));
        if (length > CHUNK) {
            CHECK_EQ(address % CHUNK, 0);
        } else if (length != 0) {
            CHECK_EQ(address / CHUNK, (address + length - 1) / CHUNK);
        }
    }
    /* Bytes outside of samples are zero; samples have no zeros. */
    for (uint64_t i = 0; i < SAMPLES; i++) {
        memset(space + dlfs_location_address(&locations[i]), 0,
               dlfs_location_length(&locations[i]));
    }
    for (uint64_t at = 0; at < space_bytes; at++) {
        CHECK_EQ(space[at], 0);
    }
}

static void test_windows(void)
{
    for (uint64_t seed = 1; seed <= 5; seed++) {
        struct source source;
        make_source(&source, seed);
        for (int ordered = 0; ordered < 2; ordered++) {
            dlfs_location first[SAMPLES];
            for (uint64_t window_chunks = 1; window_chunks <= 8; window_chunks += 3) {
                dlfs_location locations[SAMPLES];
                memset(locations, 0, sizeof(locations));
                uint64_t space_bytes = 0;
                uint32_t parts[CHUNKS_MAX] = {0};
                uint8_t *space =
                    pack_all(&source, ordered != 0, window_chunks, locations, parts, &space_bytes);
                CHECK(space_bytes <= UINT64_C(1) * CHUNKS_MAX * CHUNK);
                check_placed(&source, locations, space, space_bytes);
                check_parts(&source, locations, parts);
                if (window_chunks == 1) {
                    memcpy(first, locations, sizeof(first));
                }
                CHECK(memcmp(first, locations, sizeof(first)) == 0);
                free(space);
            }
        }
        free(source.bytes);
    }
}

static uint64_t place_after(uint64_t first, uint64_t second)
{
    static uint8_t window[4 * CHUNK];
    static uint8_t bytes[2 * CHUNK];
    int64_t offsets[2] = {0, 0};
    int64_t lengths[2] = {(int64_t)first, (int64_t)second};
    dlfs_location locations[2];
    uint32_t parts[4];
    dlfs_packing packing = {.chunk_bytes = CHUNK, .block_bytes = BLOCK};
    CHECK_EQ(dlfs_pack(&packing, bytes, sizeof(bytes), offsets, lengths, NULL, 2, window, 0,
                       sizeof(window), locations, parts),
             2);
    return dlfs_location_address(&locations[1]);
}

static void test_rule(void)
{
    CHECK_EQ(place_after(100, 100), 100);    /* one block either way */
    CHECK_EQ(place_after(500, 512), 512);    /* 12 bytes of padding save a block */
    CHECK_EQ(place_after(400, 512), 400);    /* 112 would cost more than an eighth */
    CHECK_EQ(place_after(448, 512), 512);    /* 64: exactly an eighth */
    CHECK_EQ(place_after(3500, 513), 3500);  /* two blocks either way */
    CHECK_EQ(place_after(3500, 597), CHUNK); /* does not fit */
    CHECK_EQ(place_after(3500, 596), 3500);  /* fits to the byte */
    CHECK_EQ(place_after(100, CHUNK), CHUNK);
    CHECK_EQ(place_after(CHUNK + 1, 1), 2 * CHUNK); /* a large sample owns its last chunk */
    CHECK_EQ(place_after(CHUNK, 1), CHUNK);
    CHECK_EQ(place_after(100, 0), 100);
    CHECK_EQ(place_after(500, 3584), 512); /* fits after the padding, to the byte */
    CHECK_EQ(place_after(510, 3585), 510); /* fits only without the padding */
}

/* A flipped bit changes the sum of its range alone, and every range belongs to one window. */
static void test_sums(void)
{
    struct source source;
    make_source(&source, 9);
    dlfs_location locations[SAMPLES];
    uint32_t parts[CHUNKS_MAX] = {0};
    uint32_t crcs[SAMPLES];
    uint64_t space_bytes = 0;
    uint8_t *space = pack_all(&source, false, 4, locations, parts, &space_bytes);
    uint64_t count = 0;
    for (uint64_t i = 0; i < SAMPLES; i++) { /* those of at most a chunk, in rising order */
        if (dlfs_location_length(&locations[i]) <= CHUNK) {
            locations[count++] = locations[i];
        }
    }
    const uint64_t victim = count / 2;
    CHECK(dlfs_location_length(&locations[victim]) > 3);
    space[dlfs_location_address(&locations[victim]) + 3] ^= 4;
    uint64_t done = 0;
    for (uint64_t address = 0; address < space_bytes; address += UINT64_C(2) * CHUNK) {
        int64_t got = dlfs_pack_verify(locations + done, count - done, space + address, address,
                                       2 * CHUNK, crcs + done);
        CHECK(got >= 0);
        done += (uint64_t)got;
    }
    CHECK_EQ(done, count);
    for (uint64_t i = 0; i < count; i++) {
        CHECK((crcs[i] == locations[i].crc32c) == (i != victim));
    }
    free(space);
    free(source.bytes);
}

static void test_refused(void)
{
    uint8_t bytes[16] = {0};
    static uint8_t window[CHUNK];
    int64_t offset = 0, length = 16;
    dlfs_location location;
    uint32_t part;
    dlfs_packing good = {.chunk_bytes = CHUNK, .block_bytes = BLOCK};
    dlfs_packing bad[] = {
        {.chunk_bytes = 0, .block_bytes = BLOCK},
        {.chunk_bytes = CHUNK, .block_bytes = 0},
        {.chunk_bytes = 3000, .block_bytes = BLOCK},
        {.chunk_bytes = CHUNK, .block_bytes = 2 * CHUNK},
        {.chunk_bytes = CHUNK, .block_bytes = BLOCK, .address = 2 * CHUNK},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_EQ(dlfs_pack(&bad[i], bytes, 16, &offset, &length, NULL, 1, window, 0, CHUNK,
                           &location, &part),
                 -EINVAL);
    }
    CHECK_EQ(
        dlfs_pack(&good, bytes, 15, &offset, &length, NULL, 1, window, 0, CHUNK, &location, &part),
        -EINVAL);
    CHECK_EQ(
        dlfs_pack(&good, bytes, 16, &offset, &length, NULL, 1, window, 0, 100, &location, &part),
        -EINVAL);
    offset = -1;
    CHECK_EQ(
        dlfs_pack(&good, bytes, 16, &offset, &length, NULL, 1, window, 0, CHUNK, &location, &part),
        -EINVAL);
    offset = 0;
    dlfs_packing far = {
        .chunk_bytes = CHUNK, .block_bytes = BLOCK, .address = (DLFS_ADDRESS_MAX + 1) - CHUNK};
    CHECK_EQ(dlfs_pack(&far, bytes, 16, &offset, &length, NULL, 1, window, far.address, CHUNK,
                       &location, &part),
             DLFS_E_LIMIT);
    uint32_t crc;
    location = (dlfs_location){.length_low = 16, .address = 0};
    CHECK_EQ(dlfs_pack_verify(&location, 1, window, CHUNK, CHUNK, &crc), DLFS_E_FORMAT);
    location.address = CHUNK - 15;
    CHECK_EQ(dlfs_pack_verify(&location, 1, window, 0, CHUNK, &crc), DLFS_E_FORMAT);
    CHECK_EQ(dlfs_pack_verify(&location, 1, window, UINT64_MAX, CHUNK, &crc), -EINVAL);
}

int main(void)
{
    test_windows();
    test_rule();
    test_sums();
    test_refused();
    return 0;
}
