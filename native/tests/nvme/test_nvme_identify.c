/* Identify Namespace: formats, limits, identifiers, and namespaces that cannot be used. */
#include <errno.h>

#include "check.h"
#include "nvme/protocol/command.h"
#include "nvme/protocol/pdu.h"

#include <dlfs/dlfs.h>

static uint8_t page[NVME_IDENTIFY_BYTES];
static uint8_t descriptors[NVME_IDENTIFY_BYTES];
static struct nvme_namespace found;

static int decode(void)
{
    const char *reason = NULL;
    int code = nvme_decode_namespace(page, descriptors, &found, &reason);
    CHECK_EQ(reason != NULL, code < 0);
    return code;
}

/* Makes a namespace of 1000 blocks in format 0, of 512 bytes. */
static void reset(void)
{
    memset(page, 0, sizeof page);
    memset(descriptors, 0, sizeof descriptors);
    nvme_put64(page, 1000);
    page[128 + 2] = 9;
}

static void test_formats(void)
{
    reset();
    CHECK_EQ(decode(), 0);
    CHECK_EQ(found.size_bytes, 512000);
    CHECK_EQ(found.block_bytes, 512);
    CHECK(!found.write_protected);
    page[99] = 1;
    CHECK_EQ(decode(), 0);
    CHECK(found.write_protected);

    page[128 + 4 * 17 + 2] = 12; /* format 17: bits 5:4 of its number count from 17 formats on */
    page[128 + 4 + 2] = 13;
    page[26] = 1 | 1 << 5;
    page[25] = 16;
    CHECK_EQ(decode(), 0);
    CHECK_EQ(found.block_bytes, 4096);
    page[25] = 15;
    CHECK_EQ(decode(), 0);
    CHECK_EQ(found.block_bytes, 8192);
}

static void test_limits(void)
{
    reset();
    nvme_put64(page, 0);
    CHECK_EQ(decode(), DLFS_E_NOT_FOUND);
    reset();
    page[128] = 8; /* metadata */
    CHECK_EQ(decode(), -ENOTSUP);
    for (uint8_t shift = 0; shift < 20; shift++) {
        reset();
        page[128 + 2] = shift;
        CHECK_EQ(decode(), shift >= 9 && shift <= 16 ? 0 : -ENOTSUP);
    }
    reset();
    nvme_put64(page, (uint64_t)INT64_MAX >> 9);
    CHECK_EQ(decode(), 0);
    nvme_put64(page, ((uint64_t)INT64_MAX >> 9) + 1);
    CHECK_EQ(decode(), -ENOTSUP);
}

/* Appends a descriptor whose bytes all have one value; returns the offset after it. */
static size_t add(size_t at, uint8_t kind, uint8_t bytes, uint8_t value)
{
    descriptors[at] = kind;
    descriptors[at + 1] = bytes;
    memset(descriptors + at + 4, value, bytes);
    return at + 4 + bytes;
}

static void test_identifiers(void)
{
    reset();
    CHECK_EQ(decode(), 0);
    CHECK_EQ(found.id_kind, DLFS_NVME_ID_NONE);
    (void)add(0, 1, 8, 5); /* EUI64 */
    CHECK_EQ(decode(), 0);
    CHECK_EQ(found.id_kind, DLFS_NVME_ID_EUI64);
    CHECK(found.id[7] == 5 && found.id[8] == 0);
    memset(page + 104, 6, 16); /* NGUID ranks higher */
    CHECK_EQ(decode(), 0);
    CHECK_EQ(found.id_kind, DLFS_NVME_ID_NGUID);
    CHECK(found.id[0] == 6 && found.id[15] == 6);
    (void)add(add(add(0, 3, 16, 7), 2, 16, 8), 1, 8, 5); /* UUID first: it stays */
    CHECK_EQ(decode(), 0);
    CHECK_EQ(found.id_kind, DLFS_NVME_ID_UUID);
    CHECK(found.id[0] == 7 && found.id[15] == 7);
    (void)add(0, 3, 16, 0); /* zeros are no identifier */
    CHECK_EQ(decode(), 0);
    CHECK_EQ(found.id_kind, DLFS_NVME_ID_NGUID);
    CHECK_EQ(found.id[0], 8 - 2); /* that of the page, which was seen first */
}

static void test_command_sets(void)
{
    reset();
    (void)add(0, 4, 1, 0);
    CHECK_EQ(decode(), 0);
    (void)add(0, 4, 1, 2); /* zoned */
    CHECK_EQ(decode(), -ENOTSUP);
    (void)add(add(0, 3, 16, 7), 4, 1, 2);
    CHECK_EQ(decode(), -ENOTSUP);
    reset();
    (void)add(0, 5, 1, 2); /* a kind of another time */
    CHECK_EQ(decode(), 0);
}

int main(void)
{
    test_formats();
    test_limits();
    test_identifiers();
    test_command_sets();
    return 0;
}
