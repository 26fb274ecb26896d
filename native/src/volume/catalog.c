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
#define TAG_BYTES 8u /* tag, reserved, length */
#define TAG_SOURCE 1u
#define SOURCE_BYTES_MAX (16u << 10)
#define LAYOUTS 2u
#define SAMPLES_MAX (UINT64_C(1) << 48)

enum record_state { SEALED, UNFINISHED, STATES };

/* Offsets of fields in the header. */
enum {
    AT_HEADER_BYTES = 8,
    AT_VOLUME_UUID = 16,
    AT_GENERATION = 32,
    AT_CATALOG_BYTES = 40,
    AT_RECORD_COUNT = 48,
    AT_FREE_RUN_COUNT = 52,
    AT_RUN_COUNT = 56,
    AT_TEXT_BYTES = 60,
};

/* Offsets of fields in a row of the table. */
enum {
    AT_UUID = 0,
    AT_VERSION = 16,
    AT_STATE = 20,
    AT_LAYOUT = 22,
    AT_CREATED = 24,
    AT_SAMPLE_COUNT = 32,
    AT_SAMPLE_BYTES = 40,
    AT_DATA_BYTES = 56,
    AT_ENTRIES_BYTES = 64,
    AT_NAMES_BYTES = 72,
    AT_ATTRIBUTES_ADDRESS = 80,
    AT_ATTRIBUTES_BYTES = 88,
    AT_ATTRIBUTES_HEAD_BYTES = 96,
    AT_DATA_RUN_COUNT = 104,
    AT_DIRECTORY_RUN_COUNT = 108,
    AT_JOURNAL_RUN_COUNT = 112,
    AT_NAME_BYTES = 116,
    AT_TAGS_BYTES = 118,
    AT_JOURNAL_BYTES = 120,
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
    const uint8_t *row;     /* of the next record */
    const uint8_t *row_end; /* end of the table */
    const dlfs_extent *run; /* of the next record */
    const dlfs_extent *runs_end;
    const uint8_t *text; /* of the next record */
    const uint8_t *text_end;
    const dlfs_extent *free_runs;
    uint32_t free_run_count;
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

/* Takes the next `count` runs of the records, each within the volume. NULL: there are not as many.
 */
static const dlfs_extent *take_runs(struct parser *parser, uint32_t count, bool is_data)
{
    const dlfs_extent *runs = parser->run;
    if (count > (size_t)(parser->runs_end - runs)) {
        return NULL;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (!volume_has_run(parser->superblock, &runs[i])) {
            return NULL;
        }
        add_run(parser, &runs[i], is_data);
    }
    parser->run += count;
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

/*
 * Returns true if the tagged values exactly fill their range, and there is at most one description
 * of a source, of a length that is allowed. Other tags have no meaning here.
 */
static bool check_tags(const uint8_t *bytes, uint64_t size)
{
    uint64_t at = 0;
    uint32_t sources = 0;
    while (at < size) {
        if (size - at < TAG_BYTES) {
            return false;
        }
        uint32_t length = volume_u32(bytes + at + 4);
        uint64_t padded = ((uint64_t)length + 7) & ~UINT64_C(7);
        if (padded > size - at - TAG_BYTES) {
            return false;
        }
        if (volume_u16(bytes + at) == TAG_SOURCE && (sources++ > 0 || length > SOURCE_BYTES_MAX)) {
            return false;
        }
        at += TAG_BYTES + padded;
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

/* Returns true if the chunks of a sealed record's directory are those that its sizes need. */
static bool check_directory(const struct volume_record *record, uint32_t chunk_bytes)
{
    const uint32_t block = DLFS_DIRECTORY_BLOCK_BYTES;
    if (record->entries_bytes < block || record->entries_bytes > DLFS_ADDRESS_MAX ||
        record->names_bytes < block || record->names_bytes > DLFS_ADDRESS_MAX ||
        record->entries_bytes % block != 0 || record->names_bytes % block != 0 ||
        record->sample_count > record->entries_bytes / sizeof(dlfs_location)) {
        return false;
    }
    uint64_t segment_bytes = record->entries_bytes + record->names_bytes;
    return (segment_bytes + chunk_bytes - 1) / chunk_bytes ==
           chunks_of(record->directory_runs, record->directory_run_count);
}

/* Returns true if there is no attribute segment, or if it fills the last chunks of the data. */
static bool check_attributes(const uint8_t *row, uint64_t data_bytes, uint32_t chunk_bytes)
{
    const uint32_t block = DLFS_DIRECTORY_BLOCK_BYTES;
    uint64_t address = volume_u64(row + AT_ATTRIBUTES_ADDRESS);
    uint64_t bytes = volume_u64(row + AT_ATTRIBUTES_BYTES);
    uint64_t head = volume_u64(row + AT_ATTRIBUTES_HEAD_BYTES);
    if (bytes == 0) {
        return address == 0 && head == 0;
    }
    if (bytes > data_bytes || address > data_bytes || bytes % block != 0 || head % block != 0 ||
        head < block || head > bytes || address % chunk_bytes != 0) {
        return false;
    }
    return address + (bytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes == data_bytes;
}

/* Checks what only a sealed record has; its version is at least 1, and it has no journal. */
static bool check_sealed(const struct volume_record *record, const uint8_t *row,
                         uint32_t chunk_bytes)
{
    return record->version >= 1 && volume_u32(row + AT_JOURNAL_RUN_COUNT) == 0 &&
           volume_u64(row + AT_JOURNAL_BYTES) == 0 && check_directory(record, chunk_bytes) &&
           check_attributes(row, record->data_bytes, chunk_bytes);
}

/* Checks what only an unfinished record has: a journal, and neither version nor directory. */
static bool check_unfinished(const struct volume_record *record, const uint8_t *row,
                             uint64_t journal_chunks, uint32_t chunk_bytes)
{
    uint64_t journal_bytes = volume_u64(row + AT_JOURNAL_BYTES);
    return record->version == 0 && record->directory_run_count == 0 && record->entries_bytes == 0 &&
           record->names_bytes == 0 && record->sample_count <= SAMPLES_MAX &&
           volume_u64(row + AT_ATTRIBUTES_BYTES) == 0 && check_attributes(row, 0, chunk_bytes) &&
           journal_bytes <= DLFS_ADDRESS_MAX &&
           (journal_bytes + chunk_bytes - 1) / chunk_bytes <= journal_chunks;
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

/* Takes the name and the tagged values of a record; returns false if they are malformed. */
static bool take_text(struct parser *parser, const uint8_t *row, struct volume_record *record)
{
    uint32_t name_bytes = volume_u16(row + AT_NAME_BYTES);
    uint32_t tags_bytes = volume_u16(row + AT_TAGS_BYTES);
    if ((size_t)name_bytes + tags_bytes > (size_t)(parser->text_end - parser->text)) {
        return false;
    }
    record->name = parser->text;
    record->name_bytes = name_bytes;
    parser->text += name_bytes + tags_bytes;
    return check_name(record->name, name_bytes) &&
           check_tags(record->name + name_bytes, tags_bytes);
}

/* Parses the next record. */
static bool parse_record(struct parser *parser, struct volume_record *record, bool *is_sealed)
{
    const uint8_t *row = parser->row;
    uint32_t chunk_bytes = parser->superblock->chunk_bytes;
    uint32_t state = volume_u16(row + AT_STATE);
    uint32_t data_count = volume_u32(row + AT_DATA_RUN_COUNT);
    uint32_t directory_count = volume_u32(row + AT_DIRECTORY_RUN_COUNT);
    uint32_t journal_count = volume_u32(row + AT_JOURNAL_RUN_COUNT);
    parser->row += VOLUME_RECORD_BYTES;
    if (state >= STATES || volume_u16(row + AT_LAYOUT) >= LAYOUTS ||
        volume_u64(row + AT_CREATED) > VOLUME_NUMBER_MAX) {
        return false;
    }
    struct owned_run *data = parser->runs + parser->run_count;
    const dlfs_extent *data_runs = take_runs(parser, data_count, true);
    if (data_runs == NULL || !check_own_data(data, data_count)) {
        return false;
    }
    const dlfs_extent *directory_runs = take_runs(parser, directory_count, false);
    const dlfs_extent *journal_runs = take_runs(parser, journal_count, false);
    if (directory_runs == NULL || journal_runs == NULL) {
        return false;
    }
    *record = (struct volume_record){
        .version = volume_u32(row + AT_VERSION),
        .uuid = row + AT_UUID,
        .sample_count = volume_u64(row + AT_SAMPLE_COUNT),
        .sample_bytes = volume_u64(row + AT_SAMPLE_BYTES),
        .data_bytes = volume_u64(row + AT_DATA_BYTES),
        .entries_bytes = volume_u64(row + AT_ENTRIES_BYTES),
        .names_bytes = volume_u64(row + AT_NAMES_BYTES),
        .data_runs = data_runs,
        .directory_runs = directory_runs,
        .data_run_count = data_count,
        .directory_run_count = directory_count,
    };
    *is_sealed = state == SEALED;
    return take_text(parser, row, record) && record->data_bytes <= DLFS_ADDRESS_MAX &&
           record->sample_bytes <= record->data_bytes && record->data_bytes % chunk_bytes == 0 &&
           record->data_bytes / chunk_bytes == chunks_of(data_runs, data_count) &&
           (*is_sealed ? check_sealed(record, row, chunk_bytes)
                       : check_unfinished(record, row, chunks_of(journal_runs, journal_count),
                                          chunk_bytes));
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

static bool parse_free_runs(struct parser *parser)
{
    const dlfs_extent *runs = parser->free_runs;
    for (uint32_t i = 0; i < parser->free_run_count; i++) {
        if (!volume_has_run(parser->superblock, &runs[i]) ||
            (i > 0 && runs[i].first_chunk <= runs[i - 1].first_chunk + runs[i - 1].chunk_count)) {
            return false;
        }
        add_run(parser, &runs[i], false);
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

/* Checks the header, and finds the parts of the catalog, whose lengths add up to its length. */
static bool parse_header(struct parser *parser)
{
    const uint8_t *bytes = parser->bytes;
    const struct volume_superblock *superblock = parser->superblock;
    uint64_t records = volume_u32(bytes + AT_RECORD_COUNT);
    uint64_t runs = volume_u32(bytes + AT_RUN_COUNT);
    uint64_t free_runs = volume_u32(bytes + AT_FREE_RUN_COUNT);
    uint64_t runs_at = VOLUME_CATALOG_HEADER_BYTES + records * VOLUME_RECORD_BYTES;
    uint64_t text_at = runs_at + (runs + free_runs) * sizeof(dlfs_extent);
    if (memcmp(bytes, MAGIC, sizeof MAGIC - 1) != 0 ||
        volume_u32(bytes + AT_HEADER_BYTES) != VOLUME_CATALOG_HEADER_BYTES ||
        memcmp(bytes + AT_VOLUME_UUID, superblock->volume_uuid, 16) != 0 ||
        volume_u64(bytes + AT_GENERATION) != superblock->generation ||
        volume_u64(bytes + AT_CATALOG_BYTES) != superblock->catalog_bytes ||
        records > VOLUME_DATASETS_MAX || runs + free_runs > VOLUME_RUNS_MAX ||
        text_at + volume_u32(bytes + AT_TEXT_BYTES) != superblock->catalog_bytes) {
        return false;
    }
    parser->row = bytes + VOLUME_CATALOG_HEADER_BYTES;
    parser->row_end = bytes + runs_at;
    parser->run = (const dlfs_extent *)(const void *)parser->row_end;
    parser->runs_end = parser->run + runs;
    parser->free_runs = parser->runs_end;
    parser->free_run_count = (uint32_t)free_runs;
    parser->text = bytes + text_at;
    parser->text_end = bytes + superblock->catalog_bytes;
    return true;
}

/* Parses all records, and gives the sealed ones to the catalog. */
static bool parse_all(struct parser *parser, struct volume_catalog *catalog)
{
    struct volume_record previous = {.name = NULL};
    while (parser->row < parser->row_end) {
        struct volume_record record;
        bool is_sealed;
        if (!parse_record(parser, &record, &is_sealed) ||
            (previous.name != NULL && !rises(&previous, &record))) {
            return false;
        }
        previous = record;
        if (is_sealed) {
            catalog->records[catalog->count++] = record;
        }
    }
    if (parser->run != parser->runs_end || parser->text != parser->text_end ||
        !parse_free_runs(parser)) {
        return false;
    }
    for (uint32_t i = 0; i < parser->superblock->catalog_run_count; i++) {
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
    struct parser parser = {.bytes = bytes, .superblock = superblock};
    if (!parse_header(&parser)) {
        return DLFS_E_FORMAT;
    }
    int code = -ENOMEM;
    struct volume_catalog catalog = {.count = 0};
    size_t records = volume_u32(bytes + AT_RECORD_COUNT);
    parser.runs = malloc(RUNS_MAX * sizeof *parser.runs);
    catalog.records = calloc(records + 1, sizeof *catalog.records);
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
