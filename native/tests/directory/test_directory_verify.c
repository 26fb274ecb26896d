/* Verification of a directory's segment: reports bad blocks, and an order that is not sorted. */
#include <errno.h>

#include "directory/directory_tests.h"

static void test_verify_names_the_bad_block(void)
{
    sample_set set = make_samples(2000);
    segment made = build(&set);
    dlfs_directory *directory = open_segment(&made);
    uint64_t bad = 99;
    for (uint64_t block = 0; block < made.names_bytes / DLFS_DIRECTORY_BLOCK_BYTES; block++) {
        made.names[block * DLFS_DIRECTORY_BLOCK_BYTES + 77] ^= 4;
        CHECK_EQ(dlfs_directory_verify(directory, 1, made.names, made.names_bytes, &bad),
                 DLFS_E_CHECKSUM);
        CHECK_EQ(bad, block);
        made.names[block * DLFS_DIRECTORY_BLOCK_BYTES + 77] ^= 4;
    }
    uint8_t *copy = allocate(made.entries_bytes);
    memcpy(copy, made.entries, made.entries_bytes);
    for (uint64_t block = 0; block < made.entries_bytes / DLFS_DIRECTORY_BLOCK_BYTES; block++) {
        copy[block * DLFS_DIRECTORY_BLOCK_BYTES + 77] ^= 4;
        CHECK_EQ(dlfs_directory_verify(directory, 0, copy, made.entries_bytes, &bad),
                 DLFS_E_CHECKSUM);
        CHECK_EQ(bad, block);
        copy[block * DLFS_DIRECTORY_BLOCK_BYTES + 77] ^= 4;
    }
    CHECK_EQ(dlfs_directory_verify(directory, 0, copy, made.entries_bytes, &bad), 0);
    CHECK_EQ(dlfs_directory_verify(directory, 0, copy, made.entries_bytes - 1, &bad),
             DLFS_E_TRUNCATED);
    CHECK_EQ(dlfs_directory_verify(directory, 2, copy, made.entries_bytes, &bad), -EINVAL);
    free(copy);
    dlfs_directory_close(directory);
    free_segment(&made);
    free_samples(&set);
}

/* Checks that verification refuses a changed order of the samples, with all checksums right. */
static void check_order_refused(segment *made, uint64_t rank, uint32_t index)
{
    uint32_t *order = (uint32_t *)(made->entries + header_of(made)->order_offset);
    uint32_t before = order[rank];
    order[rank] = index;
    seal(made);
    dlfs_directory *directory = open_segment(made);
    uint64_t bytes = made->entries_bytes;
    uint64_t bad = 0;
    CHECK_EQ(dlfs_directory_verify(directory, 0, made->entries, bytes, &bad), DLFS_E_FORMAT);
    uint64_t order_block = header_of(made)->order_offset / DLFS_DIRECTORY_BLOCK_BYTES;
    uint64_t rank_block = rank * sizeof(uint32_t) / DLFS_DIRECTORY_BLOCK_BYTES;
    CHECK(bad == order_block + rank_block || (rank == 1023 && bad == order_block + 1));
    dlfs_directory_close(directory);
    order[rank] = before;
}

/* A sample missing from the order would not be verified with its chunk. */
static void test_verify_refuses_another_order(void)
{
    sample_set set = make_samples(2000);
    set.locations[0].length_low = 0; /* two samples at one address, in the order of their indices */
    set.locations[1].address = 0;
    set.locations[1].length_low = 0;
    segment made = build(&set);
    const uint32_t *order = (const uint32_t *)(made.entries + header_of(&made)->order_offset);
    CHECK(order[0] == 0 && order[1] == 1);
    const uint64_t ranks[] = {0, 1, 2, 1000, 1023, 1024, 1999};
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        uint64_t other = ranks[i] == 1999 ? 1998 : ranks[i] + 1;
        check_order_refused(&made, ranks[i], order[other]);
        check_order_refused(&made, ranks[i], 2000);
        check_order_refused(&made, ranks[i], UINT32_MAX);
    }
    seal(&made);
    dlfs_directory *directory = open_segment(&made);
    uint64_t bad;
    CHECK_EQ(dlfs_directory_verify(directory, 0, made.entries, made.entries_bytes, &bad), 0);
    dlfs_directory_close(directory);
    free_segment(&made);
    free_samples(&set);
}

int main(void)
{
    test_verify_names_the_bad_block();
    test_verify_refuses_another_order();
    return 0;
}
