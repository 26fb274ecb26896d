/*
 * Fuzzes the decoders of superblocks and catalogs.
 *
 * An input is one byte of choices, a superblock and a catalog. Since hardly any random bytes have
 * right checksums, choices correct them first, and make the superblock name the catalog. The
 * decoded result is read from end to end: every record must lie in the catalog's bytes, every run
 * in the volume. Both lie in memory of exactly their length, so that ASan detects one byte too
 * many.
 */
#include <stdlib.h>

#include "volume/volume.h"

#define CRC32C_OFFSET 4092u
#define AT_CATALOG_BYTES 128u
#define AT_CATALOG_CRC32C 136u

enum { SUPERBLOCK_RIGHT = 1, CATALOG_RIGHT = 2 };

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

static void check_run(const dlfs_extent *run, const struct volume_superblock *superblock)
{
    if (!volume_has_run(superblock, run)) {
        abort();
    }
}

static void check_records(const struct volume_catalog *catalog, const uint8_t *bytes,
                          const struct volume_superblock *superblock)
{
    uint32_t crc32c = 0;
    for (uint32_t i = 0; i < catalog->count; i++) {
        const struct volume_record *record = &catalog->records[i];
        if (record->name < bytes ||
            record->name + record->row->name_bytes > bytes + superblock->catalog_bytes) {
            abort();
        }
        crc32c = dlfs_crc32c(crc32c, record->name, record->row->name_bytes);
        crc32c = dlfs_crc32c(crc32c, record->row->uuid, 16);
        for (uint32_t k = 0; k < record->row->data_run_count; k++) {
            check_run(&record->data_runs[k], superblock);
        }
        for (uint32_t k = 0; k < record->row->directory_run_count; k++) {
            check_run(&record->directory_runs[k], superblock);
        }
    }
}

static uint8_t *copy(const uint8_t *bytes, size_t count)
{
    uint8_t *made = malloc(count ? count : 1);
    if (made == NULL) {
        abort();
    }
    memcpy(made, bytes, count);
    return made;
}

static void put_u32(uint8_t *at, uint32_t value)
{
    memcpy(at, &value, sizeof value);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    struct volume_superblock superblock;
    struct volume_catalog catalog;
    if (count < 1 + VOLUME_SUPERBLOCK_BYTES) {
        return 0;
    }
    uint8_t choices = bytes[0];
    uint64_t catalog_bytes = count - 1 - VOLUME_SUPERBLOCK_BYTES;
    uint8_t *block = copy(bytes + 1, VOLUME_SUPERBLOCK_BYTES);
    uint8_t *raw = copy(bytes + 1 + VOLUME_SUPERBLOCK_BYTES, catalog_bytes);
    if (choices & CATALOG_RIGHT) {
        memcpy(block + AT_CATALOG_BYTES, &catalog_bytes, sizeof catalog_bytes);
        put_u32(block + AT_CATALOG_CRC32C, dlfs_crc32c(0, raw, catalog_bytes));
    }
    if (choices & SUPERBLOCK_RIGHT) {
        put_u32(block + CRC32C_OFFSET, dlfs_crc32c(0, block, CRC32C_OFFSET));
    }
    if (volume_superblock_decode(block, &superblock) == 0) {
        for (uint32_t i = 0; i < superblock.catalog_run_count; i++) {
            check_run(&superblock.catalog_runs[i], &superblock);
        }
        if (superblock.catalog_bytes == catalog_bytes &&
            volume_catalog_decode(raw, &superblock, &catalog) == 0) {
            check_records(&catalog, raw, &superblock);
            volume_catalog_free(&catalog);
        }
    }
    free(block);
    free(raw);
    return 0;
}
