/*
 * An open dataset: its directory in memory, completely checked, its reader, and the epoch under
 * way.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/device.h"
#include "device/uri.h"
#include "directory/directory.h"
#include "reader/reader.h"
#include "volume/source.h"

#define MEMORY_BYTES_DEFAULT (UINT64_C(256) << 20)
#define MEMORY_CHUNKS_MIN 4u
#define DEPTH_DEFAULT 128u
#define GAP_BYTES (16u << 10)
#define RETRY_COUNT 2u
#define TIMEOUT_MS_DEFAULT 30000u
#define GRACE_MS 1000u /* added so that a device can report its own time-out first */
#define SHOWN_BYTES 208u
#define WINDOW_CHUNKS_DEFAULT 64u

struct dlfs_dataset {
    dlfs_volume *volume;
    const struct volume_record *record;
    void *segment; /* chunks of the directory: entries part, then names part */
    size_t segment_bytes;
    dlfs_directory *directory;
    dlfs_reader *reader;
    dlfs_sequence *sequence; /* for the epoch under way, or NULL */
    dlfs_stream *stream;
    uint64_t sample_count;
};

/*
 * Checks every block of both parts. *position gets the offset in the segment where the bad block
 * begins.
 */
static int check_blocks(const dlfs_directory *directory, const uint8_t *entries,
                        const struct volume_record *record, uint64_t *position)
{
    const uint8_t *names = entries + record->row->entries_bytes;
    uint64_t bad_block = 0;
    int code = dlfs_directory_verify(directory, 0, entries, record->row->entries_bytes, &bad_block);
    *position = bad_block * DLFS_DIRECTORY_BLOCK_BYTES;
    if (code < 0) {
        return code;
    }
    bad_block = 0;
    code = dlfs_directory_verify(directory, 1, names, record->row->names_bytes, &bad_block);
    *position = record->row->entries_bytes + bad_block * DLFS_DIRECTORY_BLOCK_BYTES;
    return code;
}

/*
 * Opens the directory over the segment in memory and checks all of it against its record. *position
 * gets the offset in the segment where it is wrong.
 */
static int check_segment(dlfs_dataset *dataset, uint64_t *position)
{
    const struct volume_record *record = dataset->record;
    const uint8_t *entries = dataset->segment;
    const uint8_t *names = entries + record->row->entries_bytes;
    dlfs_directory *directory;
    *position = 0;
    int code = dlfs_directory_open(entries, record->row->entries_bytes, &directory);
    if (code < 0) {
        return code;
    }
    const dlfs_directory_header *header = dataset->segment;
    code = DLFS_E_FORMAT;
    if (memcmp(header->dataset_uuid, record->row->uuid, sizeof header->dataset_uuid) != 0 ||
        dlfs_directory_count(directory) != record->row->sample_count ||
        dlfs_directory_data_bytes(directory) != record->row->data_bytes ||
        dlfs_directory_chunk_bytes(directory) != dataset->volume->superblock.chunk_bytes ||
        dlfs_directory_names_bytes(directory) != record->row->names_bytes) {
        goto failed;
    }
    code = check_blocks(directory, entries, record, position);
    if (code >= 0) {
        code = dlfs_directory_attach_names(directory, names, record->row->names_bytes);
    }
    if (code < 0) {
        goto failed;
    }
    dataset->directory = directory;
    return 0;
failed:
    dlfs_directory_close(directory);
    return code;
}

/* Reads the directory from the copies that have it intact. *bad gets the location of the error. */
static int load_directory(dlfs_dataset *dataset, struct volume_location *bad)
{
    const struct volume_superblock *sb = &dataset->volume->superblock;
    const struct volume_record *record = dataset->record;
    uint64_t segment_bytes = record->row->entries_bytes + record->row->names_bytes;
    uint64_t chunks = (segment_bytes + sb->chunk_bytes - 1) / sb->chunk_bytes;
    const struct volume_space space = {record->directory_runs, record->row->directory_run_count,
                                       chunks};
    uint64_t position;
    struct volume_limit limit = volume_limit_begin();
    *bad = volume_locate(dataset->volume, &space, 0);
    dataset->segment_bytes = chunks * sb->chunk_bytes;
    int code = dlfs_memory_map(dataset->segment_bytes, &dataset->segment, NULL);
    if (code < 0) {
        dataset->segment = NULL;
        return code;
    }
    for (uint32_t choice = 0; choice < volume_choice_count(sb); choice++) {
        code = volume_read_space(dataset->volume, &limit, &space, choice, dataset->segment, bad);
        if (code >= 0) {
            code = check_segment(dataset, &position);
            *bad = volume_locate(dataset->volume, &space, position);
        }
        if (code >= 0) {
            return 0;
        }
    }
    return code;
}

/* Returns the longest time of a read: longer if a device may reconnect for longer. */
static uint32_t default_timeout_ms(const dlfs_volume *volume)
{
    uint32_t timeout_ms = TIMEOUT_MS_DEFAULT;
    for (uint32_t i = 0; i < volume->superblock.member_count; i++) {
        uint32_t device_ms =
            volume->devices[i] != NULL ? dlfs_device_operation_ms(volume->devices[i]) : 0;
        if (device_ms > 0 && device_ms + GRACE_MS > timeout_ms) {
            timeout_ms = device_ms + GRACE_MS;
        }
    }
    return timeout_ms;
}

static int make_reader(dlfs_dataset *dataset, const dlfs_open_options *options)
{
    const struct volume_superblock *sb = &dataset->volume->superblock;
    const struct volume_record *record = dataset->record;
    uint64_t least_bytes = (uint64_t)MEMORY_CHUNKS_MIN * sb->chunk_bytes;
    uint64_t memory_bytes = options->memory_bytes ? options->memory_bytes : MEMORY_BYTES_DEFAULT;
    dlfs_reader_config config = {
        .devices = dataset->volume->devices,
        .member_count = sb->member_count,
        .chunk_bytes = sb->chunk_bytes,
        .block_bytes = sb->block_bytes,
        .depth = options->depth ? options->depth : DEPTH_DEFAULT,
        .data_offset_bytes = sb->data_offset_bytes,
        .extents = record->data_runs,
        .extent_count = record->row->data_run_count,
        .directory = dataset->directory,
        .memory_bytes = memory_bytes > least_bytes ? memory_bytes : least_bytes,
        .gap_bytes = GAP_BYTES,
        .retry_count = RETRY_COUNT,
        .timeout_ms =
            options->timeout_ms ? options->timeout_ms : default_timeout_ms(dataset->volume),
        .replicas = sb->replicas,
        .groups = sb->groups,
        .group_count = sb->group_count,
    };
    return dlfs_reader_create(&config, &dataset->reader);
}

/* Finds the record of a name and version; 0: the newest version. */
static const struct volume_record *find_record(const dlfs_volume *volume, const char *name,
                                               uint32_t version)
{
    const struct volume_record *found = NULL;
    size_t name_bytes = strlen(name);
    for (uint32_t i = 0; i < volume->catalog.count; i++) {
        const struct volume_record *record = &volume->catalog.records[i];
        if (record->row->name_bytes == name_bytes && memcmp(record->name, name, name_bytes) == 0 &&
            (version == 0 || record->row->version == version)) {
            found = record; /* versions rise */
        }
    }
    return found;
}

static void end_epoch(dlfs_dataset *dataset)
{
    dlfs_stream_destroy(dataset->stream);
    dlfs_sequence_destroy(dataset->sequence);
    dataset->stream = NULL;
    dataset->sequence = NULL;
}

static void forget(dlfs_dataset *dataset)
{
    dlfs_directory_close(dataset->directory);
    dlfs_memory_unmap(dataset->segment, dataset->segment_bytes);
    free(dataset);
}

static int say_no_dataset(const char *name, uint32_t version, char *message, uint32_t message_bytes)
{
    char shown[SHOWN_BYTES];
    (void)uri_show(name, strnlen(name, SHOWN_BYTES), shown, sizeof shown);
    if (version) {
        return volume_fail(message, message_bytes, DLFS_E_NOT_FOUND,
                           "there is no dataset '%s' version %u", shown, version);
    }
    return volume_fail(message, message_bytes, DLFS_E_NOT_FOUND, "there is no dataset '%s'", shown);
}

/* Fills in a dataset whose volume and record are set. */
static int load(dlfs_dataset *dataset, const dlfs_open_options *options, char *message,
                uint32_t message_bytes)
{
    const struct volume_record *record = dataset->record;
    char shown[SHOWN_BYTES];
    struct volume_location bad;
    (void)uri_show((const char *)record->name, record->row->name_bytes, shown, sizeof shown);
    int code = load_directory(dataset, &bad);
    if (code < 0) {
        return volume_fail(message, message_bytes, code,
                           "read the directory of dataset '%s' version %u: %s at byte %llu: %s",
                           shown, record->row->version,
                           volume_member_name(dataset->volume, bad.member).text,
                           (unsigned long long)bad.offset_bytes, dlfs_strerror(code));
    }
    code = make_reader(dataset, options);
    if (code < 0) {
        (void)volume_fail(message, message_bytes, code,
                          "make a reader of dataset '%s' version %u: %s", shown,
                          record->row->version, dlfs_strerror(code));
    }
    return code;
}

DLFS_API int dlfs_open(dlfs_volume *volume, const char *name, const dlfs_open_options *options,
                       char *message, uint32_t message_bytes, dlfs_dataset **out)
{
    const dlfs_open_options defaults = {.memory_bytes = 0};
    if (volume == NULL || name == NULL || out == NULL) {
        return -EINVAL;
    }
    const dlfs_open_options *chosen = options != NULL ? options : &defaults;
    if (chosen->reserved != 0) {
        return volume_fail(message, message_bytes, -EINVAL,
                           "open a dataset: expected reserved = 0, got %u", chosen->reserved);
    }
    const struct volume_record *record = find_record(volume, name, chosen->version);
    if (record == NULL) {
        return say_no_dataset(name, chosen->version, message, message_bytes);
    }
    dlfs_dataset *dataset = calloc(1, sizeof *dataset);
    if (dataset == NULL) {
        return -ENOMEM;
    }
    dataset->volume = volume;
    dataset->record = record;
    dataset->sample_count = record->row->sample_count;
    int code = load(dataset, chosen, message, message_bytes);
    if (code < 0) {
        forget(dataset);
        return code;
    }
    __atomic_add_fetch(&volume->dataset_count, 1, __ATOMIC_RELAXED);
    *out = dataset;
    return 0;
}

DLFS_API int dlfs_close(dlfs_dataset *dataset)
{
    if (dataset == NULL) {
        return 0;
    }
    end_epoch(dataset);
    int code = dlfs_reader_destroy(dataset->reader);
    if (code < 0) {
        return code;
    }
    dlfs_volume *volume = dataset->volume;
    forget(dataset);
    __atomic_sub_fetch(&volume->dataset_count, 1, __ATOMIC_RELEASE);
    return 0;
}

/* ---- samples --------------------------------------------------------------------------------- */

DLFS_API uint64_t dlfs_count(const dlfs_dataset *dataset)
{
    return dataset->sample_count;
}

DLFS_API int64_t dlfs_find(const dlfs_dataset *dataset, const char *path)
{
    uint64_t index;
    const uint64_t offsets[2] = {0, strlen(path)};
    if (offsets[1] > DLFS_PATH_BYTES_MAX) {
        return DLFS_E_NOT_FOUND;
    }
    int code = dlfs_directory_find(dataset->directory, (const uint8_t *)path, offsets, 1, &index);
    if (code < 0) {
        return code;
    }
    return index < dataset->sample_count ? (int64_t)index : DLFS_E_NOT_FOUND;
}

DLFS_API int64_t dlfs_path(const dlfs_dataset *dataset, uint64_t index, char *text,
                           uint64_t text_bytes)
{
    uint64_t offsets[2];
    if (text == NULL || index >= dataset->sample_count || text_bytes < DLFS_PATH_BYTES_MAX + 1) {
        return -EINVAL;
    }
    int64_t count = dlfs_directory_names(dataset->directory, index, 1, (uint8_t *)text,
                                         DLFS_PATH_BYTES_MAX, offsets);
    if (count < 0) {
        return count;
    }
    text[offsets[1]] = '\0';
    return (int64_t)offsets[1];
}

DLFS_API int64_t dlfs_length(const dlfs_dataset *dataset, uint64_t index)
{
    if (index >= dataset->sample_count) {
        return -EINVAL;
    }
    return (int64_t)dlfs_location_length(dlfs_directory_location(dataset->directory, index));
}

DLFS_API int64_t dlfs_read(dlfs_dataset *dataset, uint64_t index, void *buffer,
                           uint64_t buffer_bytes)
{
    return dlfs_read_sample(dataset, index, buffer, buffer_bytes, NULL);
}

DLFS_API int64_t dlfs_read_sample(dlfs_dataset *dataset, uint64_t index, void *buffer,
                                  uint64_t buffer_bytes, dlfs_failure *failure)
{
    dlfs_failure found = {.index = index};
    int64_t result = reader_get(dataset->reader, index, buffer, buffer_bytes, 0, NULL, &found);
    if (result < 0 && failure != NULL) {
        if (found.code == 0 && index < dataset->sample_count) {
            found = reader_failure(dataset->reader, index, (int)result, 0, 0);
        }
        found.code = (int32_t)result;
        *failure = found;
    }
    return result;
}

DLFS_API int dlfs_describe_failure(const dlfs_dataset *dataset, const dlfs_failure *failure,
                                   char *message, uint32_t message_bytes)
{
    char path[DLFS_PATH_BYTES_MAX + 1];
    char shown_path[SHOWN_BYTES];
    char shown_name[SHOWN_BYTES];
    char reason[SHOWN_BYTES];
    const struct volume_record *record = dataset->record;
    if (failure == NULL || failure->index >= dataset->sample_count || failure->code >= 0 ||
        failure->member >= dataset->volume->superblock.member_count) {
        return -EINVAL;
    }
    int64_t path_bytes = dlfs_path(dataset, failure->index, path, sizeof path);
    if (path_bytes < 0) {
        path[path_bytes = 0] = '\0';
    }
    (void)uri_show(path, (size_t)path_bytes, shown_path, sizeof shown_path);
    (void)uri_show((const char *)record->name, record->row->name_bytes, shown_name,
                   sizeof shown_name);
    (void)snprintf(reason, sizeof reason, "%s", dlfs_strerror(failure->code));
    if (failure->code == DLFS_E_CHECKSUM) {
        (void)snprintf(reason, sizeof reason, "expected CRC32C %08x, got %08x",
                       failure->crc_expected, failure->crc_got);
    }
    char range[SHOWN_BYTES] = "";
    if (failure->part_length_bytes > 0) {
        uint64_t end = failure->part_offset_bytes + failure->part_length_bytes;
        (void)snprintf(range, sizeof range, "bytes %llu to %llu of ",
                       (unsigned long long)failure->part_offset_bytes, (unsigned long long)end - 1);
    }
    return volume_fail(message, message_bytes, 0,
                       "sample %llu '%s' of dataset '%s': %s at byte %llu, %s%lld bytes: %s",
                       (unsigned long long)failure->index, shown_path, shown_name,
                       volume_member_name(dataset->volume, failure->member).text,
                       (unsigned long long)failure->offset_bytes, range,
                       (long long)dlfs_length(dataset, failure->index), reason);
}

DLFS_API dlfs_reader *dlfs_dataset_reader(dlfs_dataset *dataset)
{
    return dataset->reader;
}

DLFS_API const dlfs_directory *dlfs_dataset_directory(const dlfs_dataset *dataset)
{
    return dataset->directory;
}

/* ---- an epoch -------------------------------------------------------------------------------- */

DLFS_API int dlfs_begin(dlfs_dataset *dataset, const dlfs_epoch *epoch)
{
    end_epoch(dataset);
    uint32_t world_size = epoch != NULL && epoch->world_size ? epoch->world_size : 1;
    if (epoch == NULL || epoch->rank >= world_size || epoch->position > dataset->sample_count ||
        epoch->reserved != 0) {
        return -EINVAL;
    }
    uint32_t window_chunks = epoch->window_chunks ? epoch->window_chunks : WINDOW_CHUNKS_DEFAULT;
    int code = dlfs_sequence_create(dataset->directory, dataset->volume->superblock.chunk_bytes,
                                    epoch->order, epoch->seed, epoch->epoch, window_chunks,
                                    &dataset->sequence);
    if (code < 0) {
        return code;
    }
    uint64_t first = epoch->position + epoch->rank;
    uint64_t left = first < dataset->sample_count ? dataset->sample_count - first : 0;
    dlfs_stream_config config = {
        .sequence = dataset->sequence,
        .first = first,
        .stride = world_size,
        .count = (left + world_size - 1) / world_size,
        .plan = epoch->plan,
    };
    code = dlfs_stream_create(dataset->reader, &config, &dataset->stream);
    if (code < 0) {
        end_epoch(dataset);
    }
    return code < 0 ? code : 0;
}

DLFS_API void dlfs_end(dlfs_dataset *dataset)
{
    if (dataset != NULL) {
        end_epoch(dataset);
    }
}

DLFS_API int dlfs_order(const dlfs_dataset *dataset, uint64_t first, uint64_t count, uint64_t *out)
{
    if (dataset->sequence == NULL) {
        return -EINVAL;
    }
    return dlfs_sequence_fill(dataset->sequence, first, 1, count, out);
}

DLFS_API int dlfs_bread(dlfs_dataset *dataset, uint64_t count, dlfs_batch **out)
{
    if (dataset->stream == NULL || count == 0) {
        return -EINVAL;
    }
    return dlfs_stream_next(dataset->stream, count, -1, out);
}
