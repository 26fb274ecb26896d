/*
 * The catalog: the datasets of a volume and their locations (FORMAT.md, section 4), with the rule
 * that every chunk has one owner, or belongs to the data of several datasets. Its cost is that of
 * sorting the runs, whose number is limited first.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

#include "directory/directory.h"
#include "volume/volume.h"

#define MAGIC "DLFSCAT1"
#define ATTRIBUTE_BYTES 8u /* tag, reserved, length */
#define LAYOUTS 2u

/* Offsets of fields in the header and in a record. */
enum {
    AT_HEADER_BYTES = 8,
    AT_VOLUME_UUID = 16,
    AT_GENERATION = 32,
    AT_CATALOG_BYTES = 40,
    AT_DATASET_COUNT = 48,
    AT_FREE_RUN_COUNT = 52,
    AT_VERSION = 4,
    AT_UUID = 8,
    AT_CREATED = 24,
    AT_SAMPLE_COUNT = 32,
    AT_SAMPLE_BYTES = 40,
    AT_DATA_BYTES = 56,
    AT_ENTRIES_BYTES = 64,
    AT_NAMES_BYTES = 72,
    AT_LAYOUT = 80,
    AT_NAME_BYTES = 82,
    AT_ATTRIBUTES_BYTES = 84,
    AT_DATA_RUN_COUNT = 88,
    AT_DIRECTORY_RUN_COUNT = 92,
};

#define RUNS_MAX (VOLUME_RUNS_MAX + VOLUME_CATALOG_RUNS_MAX)

/* A run and its kind of owner. */
struct owned_run {
    uint64_t first_chunk;
    uint64_t end_chunk;
    bool is_data; /* of samples and attributes, which datasets may share */
};

/* The state of decoding a catalog. */
struct parser {
    const uint8_t *bytes;
    uint64_t size;
    uint64_t at; /* offset of the next record, a multiple of 8 */
    const struct volume_superblock *superblock;
    struct owned_run *runs; /* of all owners, [RUNS_MAX] */
    uint32_t run_count;
};

static void add_run(struct parser *parser, const dlfs_extent *run, bool is_data)
{
    parser->runs[parser->run_count++] = (struct owned_run){
        .first_chunk = run->first_chunk,
        .end_chunk = run->first_chunk + run->chunk_count,
        .is_data = is_data,
    };
}

/* Records count runs at an offset that end before `end`, each within the volume. */
static const dlfs_extent *take_runs(struct parser *parser, uint64_t at, uint32_t count,
                                    uint64_t end, bool is_data)
{
    if (count > RUNS_MAX - parser->run_count || at > end ||
        count > (end - at) / sizeof(dlfs_extent)) {
        return NULL;
    }
    const dlfs_extent *runs = (const dlfs_extent *)(const void *)(parser->bytes + at);
    for (uint32_t i = 0; i < count; i++) {
        if (!volume_has_run(parser->superblock, &runs[i])) {
            return NULL;
        }
        add_run(parser, &runs[i], is_data);
    }
    return runs;
}

static uint64_t chunks_of(const dlfs_extent *runs, uint32_t count)
{
    uint64_t chunks = 0; /* wraps only if runs overlap, which is refused */
    for (uint32_t i = 0; i < count; i++) {
        chunks += runs[i].chunk_count;
    }
    return chunks;
}

/* Returns true if the attributes exactly fill their range; their meaning is not checked. */
static bool check_attributes(const uint8_t *bytes, uint64_t size)
{
    uint64_t at = 0;
    while (at < size) {
        if (size - at < ATTRIBUTE_BYTES) {
            return false;
        }
        uint64_t length = ((uint64_t)volume_u32(bytes + at + 4) + 7) & ~UINT64_C(7);
        if (length > size - at - ATTRIBUTE_BYTES) {
            return false;
        }
        at += ATTRIBUTE_BYTES + length;
    }
    return true;
}

static bool check_name(const uint8_t *name, uint32_t bytes)
{
    if (bytes < 1 || bytes > DLFS_NAME_BYTES_MAX || memchr(name, '/', bytes) != NULL ||
        memchr(name, '\0', bytes) != NULL) {
        return false;
    }
    return !(name[0] == '.' && (bytes == 1 || (bytes == 2 && name[1] == '.')));
}

static bool check_sizes(const struct volume_record *record, uint32_t chunk_bytes)
{
    const uint32_t block = DLFS_DIRECTORY_BLOCK_BYTES;
    if (record->version < 1 || record->data_bytes > DLFS_ADDRESS_MAX ||
        record->sample_bytes > record->data_bytes) {
        return false;
    }
    if (record->entries_bytes < block || record->entries_bytes > DLFS_ADDRESS_MAX ||
        record->names_bytes < block || record->names_bytes > DLFS_ADDRESS_MAX ||
        record->entries_bytes % block != 0 || record->names_bytes % block != 0 ||
        record->sample_count > record->entries_bytes / sizeof(dlfs_location)) {
        return false;
    }
    uint64_t data_chunks = chunks_of(record->data_runs, record->data_run_count);
    uint64_t directory_chunks = chunks_of(record->directory_runs, record->directory_run_count);
    uint64_t segment_bytes = record->entries_bytes + record->names_bytes;
    return record->data_bytes % chunk_bytes == 0 &&
           record->data_bytes / chunk_bytes == data_chunks &&
           (segment_bytes + chunk_bytes - 1) / chunk_bytes == directory_chunks;
}

static int compare_runs(const void *a, const void *b)
{
    uint64_t left = ((const struct owned_run *)a)->first_chunk;
    uint64_t right = ((const struct owned_run *)b)->first_chunk;
    return (left > right) - (left < right);
}

static void sort_runs(struct owned_run *runs, uint32_t count)
{
    if (count > 0) { /* without runs the array may be NULL */
        qsort(runs, count, sizeof *runs, compare_runs);
    }
}

/* Sorts the runs of a dataset's data. Returns true if no chunk is in two of them. */
static bool check_own_data(struct owned_run *runs, uint32_t count)
{
    sort_runs(runs, count);
    for (uint32_t i = 1; i < count; i++) {
        if (runs[i].first_chunk < runs[i - 1].end_chunk) {
            return false;
        }
    }
    return true;
}

/* Parses the next record. */
static bool parse_record(struct parser *parser, struct volume_record *record)
{
    const uint8_t *raw = parser->bytes + parser->at;
    uint64_t left = parser->size - parser->at;
    if (left < VOLUME_RECORD_BYTES || volume_u32(raw) > left) {
        return false;
    }
    uint32_t attributes_bytes = volume_u32(raw + AT_ATTRIBUTES_BYTES);
    uint32_t data_count = volume_u32(raw + AT_DATA_RUN_COUNT);
    uint32_t directory_count = volume_u32(raw + AT_DIRECTORY_RUN_COUNT);
    uint32_t name_bytes = volume_u16(raw + AT_NAME_BYTES);
    uint64_t directory_at = VOLUME_RECORD_BYTES + sizeof(dlfs_extent) * (uint64_t)data_count;
    uint64_t attributes_at = directory_at + sizeof(dlfs_extent) * (uint64_t)directory_count;
    uint64_t name_at = attributes_at + attributes_bytes;
    if (((name_at + name_bytes + 7) & ~UINT64_C(7)) != volume_u32(raw) ||
        attributes_bytes > VOLUME_ATTRIBUTES_BYTES_MAX || attributes_bytes % 8 != 0 ||
        volume_u16(raw + AT_LAYOUT) >= LAYOUTS ||
        volume_u64(raw + AT_CREATED) > VOLUME_NUMBER_MAX) {
        return false;
    }
    uint64_t end = parser->at + volume_u32(raw);
    struct owned_run *data = parser->runs + parser->run_count;
    const dlfs_extent *data_runs =
        take_runs(parser, parser->at + VOLUME_RECORD_BYTES, data_count, end, true);
    if (data_runs == NULL || !check_own_data(data, data_count)) {
        return false;
    }
    *record = (struct volume_record){
        .name = raw + name_at,
        .name_bytes = name_bytes,
        .version = volume_u32(raw + AT_VERSION),
        .uuid = raw + AT_UUID,
        .sample_count = volume_u64(raw + AT_SAMPLE_COUNT),
        .sample_bytes = volume_u64(raw + AT_SAMPLE_BYTES),
        .data_bytes = volume_u64(raw + AT_DATA_BYTES),
        .entries_bytes = volume_u64(raw + AT_ENTRIES_BYTES),
        .names_bytes = volume_u64(raw + AT_NAMES_BYTES),
        .data_runs = data_runs,
        .directory_runs = take_runs(parser, parser->at + directory_at, directory_count, end, false),
        .data_run_count = data_count,
        .directory_run_count = directory_count,
    };
    parser->at = end;
    return record->directory_runs != NULL &&
           check_attributes(raw + attributes_at, attributes_bytes) &&
           check_name(record->name, name_bytes) &&
           check_sizes(record, parser->superblock->chunk_bytes);
}

/* Returns true if a record comes before another, by (name, version). */
static bool rises(const struct volume_record *a, const struct volume_record *b)
{
    uint32_t both = a->name_bytes < b->name_bytes ? a->name_bytes : b->name_bytes;
    int order = memcmp(a->name, b->name, both);
    if (order == 0 && a->name_bytes == b->name_bytes) {
        return a->version < b->version;
    }
    return order < 0 || (order == 0 && a->name_bytes < b->name_bytes);
}

static bool parse_free_runs(struct parser *parser, uint32_t count)
{
    const dlfs_extent *runs = take_runs(parser, parser->at, count, parser->size, false);
    if (runs == NULL || parser->at + sizeof(dlfs_extent) * (uint64_t)count != parser->size) {
        return false;
    }
    for (uint32_t i = 1; i < count; i++) {
        if (runs[i].first_chunk <= runs[i - 1].first_chunk + runs[i - 1].chunk_count) {
            return false;
        }
    }
    return true;
}

/* Returns the first chunk of the group after the one that ends at a chunk; else the same chunk. */
static uint64_t next_group_chunk(const struct volume_superblock *superblock, uint64_t end)
{
    uint64_t previous_end = 0;
    for (uint32_t i = 0; i < superblock->group_count; i++) {
        const dlfs_chunk_group *group = &superblock->groups[i];
        if (previous_end == end) {
            return group->first_chunk;
        }
        previous_end = group->first_chunk + group->band_rows * group->member_count;
    }
    return end;
}

/*
 * Returns true if every chunk of the volume has exactly one owner, or belongs to the data of
 * several datasets.
 */
static bool check_owners(struct parser *parser)
{
    uint64_t end = 0;
    bool end_is_data = false;
    sort_runs(parser->runs, parser->run_count);
    for (uint32_t i = 0; i < parser->run_count; i++) {
        const struct owned_run *run = &parser->runs[i];
        if (run->is_data && end_is_data && run->first_chunk < end) {
            end = run->end_chunk > end ? run->end_chunk : end;
            continue;
        }
        if (run->first_chunk != end &&
            run->first_chunk != next_group_chunk(parser->superblock, end)) {
            return false;
        }
        end = run->end_chunk;
        end_is_data = run->is_data;
    }
    return end == parser->superblock->chunk_end;
}

static bool check_header(const uint8_t *bytes, const struct volume_superblock *superblock)
{
    return memcmp(bytes, MAGIC, sizeof MAGIC - 1) == 0 &&
           volume_u32(bytes + AT_HEADER_BYTES) == VOLUME_CATALOG_HEADER_BYTES &&
           memcmp(bytes + AT_VOLUME_UUID, superblock->volume_uuid, 16) == 0 &&
           volume_u64(bytes + AT_GENERATION) == superblock->generation &&
           volume_u64(bytes + AT_CATALOG_BYTES) == superblock->catalog_bytes &&
           volume_u32(bytes + AT_DATASET_COUNT) <= VOLUME_DATASETS_MAX;
}

static bool parse_all(struct parser *parser, struct volume_catalog *catalog)
{
    for (uint32_t i = 0; i < catalog->count; i++) {
        if (!parse_record(parser, &catalog->records[i]) ||
            (i && !rises(&catalog->records[i - 1], &catalog->records[i]))) {
            return false;
        }
    }
    uint32_t own = parser->superblock->catalog_run_count;
    if (!parse_free_runs(parser, volume_u32(parser->bytes + AT_FREE_RUN_COUNT)) ||
        parser->run_count > VOLUME_RUNS_MAX) {
        return false;
    }
    for (uint32_t i = 0; i < own; i++) {
        add_run(parser, &parser->superblock->catalog_runs[i], false);
    }
    return check_owners(parser);
}

int volume_catalog_decode(const uint8_t *bytes, const struct volume_superblock *superblock,
                          struct volume_catalog *out)
{
    uint64_t size = superblock->catalog_bytes;
    if (dlfs_crc32c(0, bytes, size) != superblock->catalog_crc32c) {
        return DLFS_E_CHECKSUM;
    }
    if (!check_header(bytes, superblock)) {
        return DLFS_E_FORMAT;
    }
    int code = -ENOMEM;
    struct parser parser = {.bytes = bytes, .size = size, .superblock = superblock};
    struct volume_catalog catalog = {.count = volume_u32(bytes + AT_DATASET_COUNT)};
    parser.at = VOLUME_CATALOG_HEADER_BYTES;
    parser.runs = malloc(RUNS_MAX * sizeof *parser.runs);
    catalog.records = calloc((size_t)catalog.count + 1, sizeof *catalog.records);
    if (parser.runs == NULL || catalog.records == NULL) {
        goto failed;
    }
    code = DLFS_E_FORMAT;
    if (!parse_all(&parser, &catalog)) {
        goto failed;
    }
    free(parser.runs);
    *out = catalog;
    return 0;
failed:
    free(parser.runs);
    free(catalog.records);
    return code;
}

void volume_catalog_free(struct volume_catalog *catalog)
{
    free(catalog->records);
    *catalog = (struct volume_catalog){.count = 0};
}
