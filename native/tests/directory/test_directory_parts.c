/* The table of parts: what is built is found and verified, and wrong parts are refused. */
#include <errno.h>

#include "directory/directory_tests.h"

/* Three samples: one of two chunks and a bit, a small one, and one of a chunk and a byte. */
static sample_set make_large_samples(void)
{
    sample_set set = make_samples(3);
    set.data_bytes = UINT64_C(6) * CHUNK_BYTES;
    set.part_count = 6;
    set.parts = calloc(6, sizeof(*set.parts));
    uint8_t *bytes = calloc(2, CHUNK_BYTES);
    for (uint32_t i = 0; i < 2 * CHUNK_BYTES; i++) {
        bytes[i] = (uint8_t)(i * 7 + i / 256);
    }
    set.parts[0] = dlfs_crc32c(0, bytes, CHUNK_BYTES);
    set.parts[1] = dlfs_crc32c(0, bytes + CHUNK_BYTES, CHUNK_BYTES);
    set.parts[2] = dlfs_crc32c(0, bytes, 10);
    set.parts[4] = set.parts[0];
    set.parts[5] = dlfs_crc32c(0, bytes + CHUNK_BYTES, 1);
    set.locations[0] = (dlfs_location){
        .crc32c = dlfs_crc32c(dlfs_crc32c(0, bytes, UINT64_C(2) * CHUNK_BYTES), bytes, 10),
        .length_low = 2 * CHUNK_BYTES + 10,
    };
    set.locations[1].address = 3 * CHUNK_BYTES;
    set.locations[2] = (dlfs_location){
        .crc32c = dlfs_crc32c(0, bytes, CHUNK_BYTES + 1),
        .length_low = CHUNK_BYTES + 1,
        .address = 4 * CHUNK_BYTES,
    };
    free(bytes);
    return set;
}

static void test_parts_are_found_and_verified(void)
{
    sample_set set = make_large_samples();
    segment made = build(&set);
    dlfs_directory *directory = open_segment(&made);
    dlfs_directory *parts;
    dlfs_directory *directory_of_parts;
    uint64_t count = 0;
    uint64_t bad = 99;
    const uint32_t *found = dlfs_directory_parts(directory, &count);
    CHECK_EQ(dlfs_directory_chunk_bytes(directory), CHUNK_BYTES);
    CHECK_EQ(count, set.part_count);
    CHECK(memcmp(found, set.parts, count * sizeof(*found)) == 0);
    CHECK_EQ(dlfs_directory_verify(directory, 0, made.entries, made.entries_bytes, &bad), 0);
    CHECK_EQ(dlfs_directory_verify_parts(directory, &bad), 0);
    CHECK_EQ(dlfs_directory_open_parts(directory, set.locations, NULL, &parts), 0);
    CHECK_EQ(dlfs_directory_open_parts(parts, set.locations, NULL, &directory_of_parts), -EINVAL);
    CHECK(dlfs_directory_parts(parts, &count) == found && count == set.part_count);
    CHECK_EQ(dlfs_directory_verify_parts(parts, &bad), -EINVAL);
    dlfs_directory_close(parts);
    uint32_t *stored = (uint32_t *)(made.entries + header_of(&made)->parts_offset);
    stored[5] ^= 1;
    CHECK_EQ(dlfs_directory_verify(directory, 0, made.entries, made.entries_bytes, &bad),
             DLFS_E_CHECKSUM);
    CHECK_EQ(bad, header_of(&made)->parts_offset / DLFS_DIRECTORY_BLOCK_BYTES);
    seal(&made);
    CHECK_EQ(dlfs_directory_verify(directory, 0, made.entries, made.entries_bytes, &bad), 0);
    CHECK_EQ(dlfs_directory_verify_parts(directory, &bad), DLFS_E_FORMAT);
    CHECK_EQ(bad, 2);
    dlfs_directory_close(directory);
    free_segment(&made);
    free_samples(&set);
}

static void test_a_sample_in_the_chunks_of_a_large_one_is_refused(void)
{
    sample_set set = make_large_samples();
    segment made = build(&set);
    dlfs_directory *directory = open_segment(&made);
    uint64_t bad = 99;
    dlfs_location *stored = (dlfs_location *)(made.entries + header_of(&made)->locations_offset);
    const uint64_t addresses[] = {CHUNK_BYTES + 512, 2 * CHUNK_BYTES + 4096};
    for (uint32_t i = 0; i < 2; i++) {
        stored[1].address = addresses[i];
        seal(&made);
        CHECK_EQ(dlfs_directory_verify(directory, 0, made.entries, made.entries_bytes, &bad),
                 DLFS_E_FORMAT);
        CHECK_EQ(bad, header_of(&made)->order_offset / DLFS_DIRECTORY_BLOCK_BYTES);
    }
    dlfs_directory_close(directory);
    free_segment(&made);
    free_samples(&set);
}

static void test_wrong_parts_are_refused(void)
{
    sample_set set = make_large_samples();
    set.parts[1] ^= 1; /* the sample's CRC32C is not that of its parts */
    CHECK_EQ(build_code(&set), -EINVAL);
    set.parts[1] ^= 1;
    set.part_count = 5; /* the last chunk's is missing */
    CHECK_EQ(build_code(&set), -EINVAL);
    set.part_count = 0;
    CHECK_EQ(build_code(&set), -EINVAL);
    set.part_count = 6;
    set.locations[2].address += 1; /* starts no chunk */
    CHECK_EQ(build_code(&set), -EINVAL);
    set.locations[2].address -= 1;
    set.locations[1].address = 2 * CHUNK_BYTES + 4096; /* in the last chunk of another */
    CHECK_EQ(build_code(&set), -EINVAL);
    set.locations[1].address = 3 * CHUNK_BYTES;
    CHECK_EQ(build_code(&set), 0);
    set.locations[0].length_low = 0; /* parts without a sample larger than a chunk */
    set.locations[2].length_low = 0;
    segment made = build(&set);
    CHECK_EQ(header_of(&made)->part_count, 0);
    free_segment(&made);
    free_samples(&set);
}

int main(void)
{
    test_parts_are_found_and_verified();
    test_a_sample_in_the_chunks_of_a_large_one_is_refused();
    test_wrong_parts_are_refused();
    return 0;
}
