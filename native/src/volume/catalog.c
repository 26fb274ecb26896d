/*
 * The catalog: the datasets of a volume and their locations (FORMAT.md, section 4), with the rule
 * that every chunk has one owner, or belongs to the data of several datasets. Its cost is that of
 * sorting the runs, whose number is limited first. It is read here for C programs;
 * dlfs/format/catalog.py also edits and writes it, and its errors name the record that is wrong.
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

/* The header (FORMAT.md, section 4.1). */
struct header {
    uint8_t magic[8];
    uint32_t header_bytes;
    uint32_t reserved;
    uint8_t volume_uuid[VOLUME_UUID_BYTES];
    uint64_t generation;
    uint64_t catalog_bytes;
    uint32_t record_count;
    uint32_t free_run_count;
    uint32_t run_count;
    uint32_t text_bytes;
};

_Static_assert(sizeof(struct header) == VOLUME_CATALOG_HEADER_BYTES, "as in FORMAT.md");

#define RUNS_MAX (VOLUME_RUNS_MAX + VOLUME_CATALOG_RUNS_MAX)

/* A run and its kind of owner. */
struct owned_run {
    uint64_t first_chunk;
    uint64_t end_chunk;
    bool is_data; /* of samples and attributes, which datasets may share */
};

/* The state of decoding a catalog. */
struct parser {
    const struct header *header;
    const struct volume_row *row; /* of the next record */
    const struct volume_row *row_end;
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
    const struct volume_row *row = record->row;
    if (row->entries_bytes < block || row->entries_bytes > DLFS_ADDRESS_MAX ||
        row->names_bytes < block || row->names_bytes > DLFS_ADDRESS_MAX ||
        row->entries_bytes % block != 0 || row->names_bytes % block != 0 ||
        row->sample_count > row->entries_bytes / sizeof(dlfs_location)) {
        return false;
    }
    uint64_t segment_bytes = row->entries_bytes + row->names_bytes;
    return (segment_bytes + chunk_bytes - 1) / chunk_bytes ==
           chunks_of(record->directory_runs, row->directory_run_count);
}

/* Returns true if there is no attribute segment, or if it fills the last chunks of the data. */
static bool check_attributes(const struct volume_row *row, uint64_t data_bytes,
                             uint32_t chunk_bytes)
{
    const uint32_t block = DLFS_DIRECTORY_BLOCK_BYTES;
    uint64_t address = row->attributes_address;
    uint64_t bytes = row->attributes_bytes;
    uint64_t head = row->attributes_head_bytes;
    if (bytes == 0) {
        return address == 0 && head == 0;
    }
    if (bytes > data_bytes || address > data_bytes || bytes % block != 0 || head % block != 0 ||
        head < block || head > bytes || address % chunk_bytes != 0) {
        return false;
    }
    return address + (bytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes == data_bytes;
}

/* Checks what only a sealed record has; its version is at least 1, and it has no journal and no
 * granted runs. */
static bool check_sealed(const struct volume_record *record, uint32_t chunk_bytes)
{
    const struct volume_row *row = record->row;
    return row->version >= 1 && row->journal_run_count == 0 && row->journal_bytes == 0 &&
           row->granted_run_count == 0 && check_directory(record, chunk_bytes) &&
           check_attributes(row, row->data_bytes, chunk_bytes);
}

/* Checks what only an unfinished record has: a journal, and neither version nor directory. */
static bool check_unfinished(const struct volume_row *row, uint64_t journal_chunks,
                             uint32_t chunk_bytes)
{
    return row->version == 0 && row->directory_run_count == 0 && row->entries_bytes == 0 &&
           row->names_bytes == 0 && row->sample_count <= SAMPLES_MAX &&
           row->attributes_bytes == 0 && check_attributes(row, 0, chunk_bytes) &&
           row->journal_bytes <= DLFS_ADDRESS_MAX &&
           (row->journal_bytes + chunk_bytes - 1) / chunk_bytes <= journal_chunks;
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
static bool take_text(struct parser *parser, struct volume_record *record)
{
    uint32_t name_bytes = record->row->name_bytes;
    uint32_t tags_bytes = record->row->tags_bytes;
    if ((size_t)name_bytes + tags_bytes > (size_t)(parser->text_end - parser->text)) {
        return false;
    }
    record->name = parser->text;
    parser->text += name_bytes + tags_bytes;
    return check_name(record->name, name_bytes) &&
           check_tags(record->name + name_bytes, tags_bytes);
}

/* Parses the next record. */
static bool parse_record(struct parser *parser, struct volume_record *record)
{
    const struct volume_row *row = parser->row++;
    uint32_t chunk_bytes = parser->superblock->chunk_bytes;
    if (row->state >= STATES || row->layout >= LAYOUTS || row->created > VOLUME_NUMBER_MAX) {
        return false;
    }
    struct owned_run *data = parser->runs + parser->run_count;
    *record = (struct volume_record){.row = row};
    record->data_runs = take_runs(parser, row->data_run_count, true);
    if (record->data_runs == NULL || !check_own_data(data, row->data_run_count)) {
        return false;
    }
    record->directory_runs = take_runs(parser, row->directory_run_count, false);
    const dlfs_extent *journal_runs = take_runs(parser, row->journal_run_count, false);
    if (record->directory_runs == NULL || journal_runs == NULL ||
        take_runs(parser, row->granted_run_count, false) == NULL) {
        return false;
    }
    uint64_t journal_chunks = chunks_of(journal_runs, row->journal_run_count);
    return take_text(parser, record) && row->data_bytes <= DLFS_ADDRESS_MAX &&
           row->sample_bytes <= row->data_bytes && row->data_bytes % chunk_bytes == 0 &&
           row->data_bytes / chunk_bytes == chunks_of(record->data_runs, row->data_run_count) &&
           (row->state == SEALED ? check_sealed(record, chunk_bytes)
                                 : check_unfinished(row, journal_chunks, chunk_bytes));
}

/* Returns true if a record comes before another, by (name, version). */
static bool rises(const struct volume_record *a, const struct volume_record *b)
{
    int order = dlfs_compare_paths(a->name, a->row->name_bytes, b->name, b->row->name_bytes);
    return order < 0 || (order == 0 && a->row->version < b->row->version);
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
    const struct header *header = parser->header;
    const uint8_t *bytes = (const uint8_t *)header;
    const struct volume_superblock *superblock = parser->superblock;
    uint64_t records = header->record_count;
    uint64_t runs = header->run_count;
    uint64_t free_runs = header->free_run_count;
    uint64_t runs_at = sizeof *header + records * sizeof(struct volume_row);
    uint64_t text_at = runs_at + (runs + free_runs) * sizeof(dlfs_extent);
    if (memcmp(header->magic, MAGIC, sizeof header->magic) != 0 ||
        header->header_bytes != sizeof *header ||
        memcmp(header->volume_uuid, superblock->volume_uuid, VOLUME_UUID_BYTES) != 0 ||
        header->generation != superblock->generation ||
        header->catalog_bytes != superblock->catalog_bytes || records > VOLUME_DATASETS_MAX ||
        runs + free_runs > VOLUME_RUNS_MAX ||
        text_at + header->text_bytes != superblock->catalog_bytes) {
        return false;
    }
    parser->row = (const struct volume_row *)(const void *)(header + 1);
    parser->row_end = parser->row + records;
    parser->run = (const dlfs_extent *)(const void *)parser->row_end;
    parser->runs_end = parser->run + runs;
    parser->free_runs = parser->runs_end;
    parser->free_run_count = header->free_run_count;
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
        if (!parse_record(parser, &record) ||
            (previous.name != NULL && !rises(&previous, &record))) {
            return false;
        }
        previous = record;
        if (record.row->state == SEALED) {
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
    const struct header *header = (const struct header *)(const void *)bytes;
    struct parser parser = {.header = header, .superblock = superblock};
    if (!parse_header(&parser)) {
        return DLFS_E_FORMAT;
    }
    int code = -ENOMEM;
    struct volume_catalog catalog = {.count = 0};
    parser.runs = malloc(RUNS_MAX * sizeof *parser.runs);
    catalog.records = calloc((size_t)header->record_count + 1, sizeof *catalog.records);
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
