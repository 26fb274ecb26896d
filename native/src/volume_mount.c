/*
 * Mounting: which member each device is, which generation is in force (FORMAT.md, section 8.2), and
 * its catalog.
 *
 * Three copies of the superblock are read from each device, and the newest valid one of all devices
 * is in force. A device that is not to be read (no superblock, too small, replaced, stale) counts
 * as missing; a volume with K copies can do without K - 1 members.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

#include "volume.h"

#define READ_MEMORY_BYTES (1u << 18)
#define COPIES 3u
#define LAG_MAX 1u /* generations that a whole member may be behind: a crash in a commit */

/* What superblocks of one generation may differ in: member UUID and number, size, checksum. */
#define MEMBER_FIRST_BYTE 48u
#define MEMBER_END_BYTE 68u
#define MEMBER_SIZE_FIRST_BYTE 96u
#define MEMBER_SIZE_END_BYTE 104u
#define CRC32C_FIRST_BYTE 4092u

/* A device that is offered as a member, and what it says. */
struct candidate {
    dlfs_device *device;
    int code; /* why it is not to be read; 0: it is */
    struct volume_superblock superblock;
    uint8_t block[VOLUME_SUPERBLOCK_BYTES];
};

/* What mounting works with. */
struct mounting {
    struct candidate *candidates; /* [count] */
    uint32_t count;
    const struct candidate *newest;
    uint8_t *memory; /* READ_MEMORY_BYTES */
    char *message;
    uint32_t message_bytes;
};

/* Reads one copy, whatever the logical block of the device is. */
static int read_block(dlfs_queue *queue, const dlfs_device *device, uint8_t *memory,
                      uint64_t offset_bytes, uint8_t *block)
{
    uint64_t size_bytes = dlfs_device_size_bytes(device);
    uint32_t logical_bytes = dlfs_device_block_bytes(device);
    if (size_bytes < VOLUME_SUPERBLOCK_BYTES || offset_bytes > size_bytes - VOLUME_SUPERBLOCK_BYTES)
        return DLFS_E_TRUNCATED;
    uint64_t first = offset_bytes / logical_bytes * logical_bytes;
    uint64_t length = offset_bytes - first + VOLUME_SUPERBLOCK_BYTES;
    length = (length + logical_bytes - 1) / logical_bytes * logical_bytes;
    if (length > READ_MEMORY_BYTES || length > size_bytes - first)
        return DLFS_E_TRUNCATED;
    int code = dlfs_queue_transfer(queue, DLFS_OP_READ, memory, first, length, (uint32_t)length);
    if (code < 0)
        return code;
    memcpy(block, memory + (offset_bytes - first), VOLUME_SUPERBLOCK_BYTES);
    return 0;
}

/* Takes the copy at an offset if it is valid and newer than what there is. */
static void take_copy(struct candidate *candidate, dlfs_queue *queue, uint8_t *memory,
                      uint64_t offset_bytes)
{
    uint8_t block[VOLUME_SUPERBLOCK_BYTES];
    struct volume_superblock found;
    int code = read_block(queue, candidate->device, memory, offset_bytes, block);
    if (code >= 0)
        code = volume_superblock_decode(block, &found);
    if (code < 0) {
        /* The first copy's reason stands, but for one that says more. */
        bool told = candidate->code != 0 && candidate->code != DLFS_E_FORMAT;
        if (candidate->superblock.generation == 0 && !told)
            candidate->code = code;
        return;
    }
    candidate->code = 0;
    if (found.generation > candidate->superblock.generation) {
        candidate->superblock = found;
        memcpy(candidate->block, block, sizeof block);
    }
}

/* Finds out what a device says; candidate->code when it says nothing. */
static void identify(struct candidate *candidate, uint8_t *memory)
{
    dlfs_queue *queue;
    int code = dlfs_queue_create(candidate->device, 1, &queue);
    if (code < 0) {
        candidate->code = code;
        return;
    }
    uint64_t size_bytes = dlfs_device_size_bytes(candidate->device);
    take_copy(candidate, queue, memory, 0);
    take_copy(candidate, queue, memory, VOLUME_SUPERBLOCK_B_OFFSET_BYTES);
    uint64_t member_bytes = candidate->superblock.member_bytes;
    take_copy(candidate, queue, memory,
              volume_tail_offset(member_bytes ? member_bytes : size_bytes));
    dlfs_queue_destroy(queue);
    if (candidate->code == 0 && candidate->superblock.member_bytes > size_bytes)
        candidate->code = DLFS_E_TRUNCATED;
    if (candidate->code == 0 &&
        candidate->superblock.block_bytes % dlfs_device_block_bytes(candidate->device) != 0)
        candidate->code = -EINVAL;
}

/* Whether two superblocks of one generation say the same of the volume. */
static bool agrees(const uint8_t *a, const uint8_t *b)
{
    return memcmp(a, b, MEMBER_FIRST_BYTE) == 0 &&
           memcmp(a + MEMBER_END_BYTE, b + MEMBER_END_BYTE,
                  MEMBER_SIZE_FIRST_BYTE - MEMBER_END_BYTE) == 0 &&
           memcmp(a + MEMBER_SIZE_END_BYTE, b + MEMBER_SIZE_END_BYTE,
                  CRC32C_FIRST_BYTE - MEMBER_SIZE_END_BYTE) == 0;
}

static bool same_geometry(const struct volume_superblock *a, const struct volume_superblock *b)
{
    return a->member_count == b->member_count && a->chunk_bytes == b->chunk_bytes &&
           a->block_bytes == b->block_bytes && a->data_offset_bytes == b->data_offset_bytes &&
           a->row_count == b->row_count && a->replicas == b->replicas;
}

/* How a candidate stands to the generation in force: -EINVAL and DLFS_E_FORMAT end the mounting. */
static int check_candidate(struct mounting *mounting, uint32_t number)
{
    struct candidate *candidate = &mounting->candidates[number];
    const struct volume_superblock *own = &candidate->superblock;
    const struct volume_superblock *newest = &mounting->newest->superblock;
    if (memcmp(own->volume_uuid, newest->volume_uuid, sizeof own->volume_uuid) != 0) {
        volume_say(mounting->message, mounting->message_bytes,
                   "member %u given is one of another volume", number);
        return -EINVAL;
    }
    bool behind = own->generation < newest->generation;
    if (!same_geometry(own, newest) ||
        (!behind && !agrees(candidate->block, mounting->newest->block))) {
        volume_say(mounting->message, mounting->message_bytes,
                   "member %u given contradicts the volume's newest generation", number);
        return DLFS_E_FORMAT;
    }
    bool replaced = memcmp(newest->member_uuids[own->member_number], own->member_uuid,
                           sizeof own->member_uuid) != 0;
    if (replaced || (newest->replicas > 1 && own->generation + LAG_MAX < newest->generation))
        candidate->code = DLFS_E_FORMAT;
    return 0;
}

/* Gives every member its device. */
static int assemble(struct mounting *mounting, dlfs_volume *volume)
{
    const struct volume_superblock *newest = &mounting->newest->superblock;
    int reason = DLFS_E_NOT_FOUND;
    uint32_t present = 0;
    for (uint32_t i = 0; i < mounting->count; i++) {
        struct candidate *candidate = &mounting->candidates[i];
        if (candidate->code == 0) {
            int code = check_candidate(mounting, i);
            if (code < 0)
                return code;
        }
        if (candidate->code < 0) {
            reason = reason == DLFS_E_NOT_FOUND ? candidate->code : reason;
            continue;
        }
        dlfs_device **place = &volume->devices[candidate->superblock.member_number];
        if (*place) {
            volume_say(mounting->message, mounting->message_bytes,
                       "member number %u was given twice", candidate->superblock.member_number);
            return -EINVAL;
        }
        *place = candidate->device;
        present++;
    }
    volume->superblock = *newest;
    if (newest->member_count - present < newest->replicas)
        return 0;
    bool told = reason != DLFS_E_NOT_FOUND; /* else the others were not given */
    volume_say(mounting->message, mounting->message_bytes,
               "expected %u members, in %u copies, got %u that can be read%s%s",
               newest->member_count, newest->replicas, present, told ? ": " : "",
               told ? dlfs_strerror(reason) : "");
    return reason;
}

/* Reads the catalog, from whichever copies have it right. */
static int load_catalog(dlfs_volume *volume, char *message, uint32_t message_bytes)
{
    const struct volume_superblock *sb = &volume->superblock;
    uint64_t chunks = (sb->catalog_bytes + sb->chunk_bytes - 1) / sb->chunk_bytes;
    volume->catalog_memory_bytes = chunks * sb->chunk_bytes;
    int code = dlfs_memory_map(volume->catalog_memory_bytes, &volume->catalog_memory, NULL);
    if (code < 0) {
        volume->catalog_memory = NULL;
        return code;
    }
    for (uint32_t choice = 0; choice < volume_choice_count(sb); choice++) {
        code = volume_read_space(volume, sb->catalog_runs, sb->catalog_run_count, chunks, choice,
                                 volume->catalog_memory);
        if (code >= 0)
            code = volume_catalog_decode(volume->catalog_memory, sb, &volume->catalog);
        if (code >= 0)
            return 0;
    }
    volume_say(message, message_bytes, "the catalog of generation %llu: %s",
               (unsigned long long)sb->generation, dlfs_strerror(code));
    return code;
}

static void forget(dlfs_volume *volume)
{
    volume_catalog_free(&volume->catalog);
    dlfs_memory_unmap(volume->catalog_memory, volume->catalog_memory_bytes);
    for (uint32_t i = 0; i < volume->owned_count; i++)
        (void)dlfs_device_destroy(volume->owned[i]); /* no queue pair is left: it cannot fail */
    free(volume);
}

/* Asks all devices who they are; the newest superblock decides. */
static int identify_all(struct mounting *mounting, dlfs_device *const *devices, const int *codes)
{
    int code = DLFS_E_NOT_FOUND;
    for (uint32_t i = 0; i < mounting->count; i++) {
        struct candidate *candidate = &mounting->candidates[i];
        candidate->device = devices[i];
        if (devices[i])
            identify(candidate, mounting->memory);
        else
            candidate->code = codes && codes[i] < 0 ? codes[i] : DLFS_E_NOT_FOUND;
        if (candidate->code < 0)
            code = code == DLFS_E_NOT_FOUND ? candidate->code : code;
        else if (!mounting->newest ||
                 candidate->superblock.generation > mounting->newest->superblock.generation)
            mounting->newest = candidate;
    }
    if (mounting->newest)
        return 0;
    volume_say(mounting->message, mounting->message_bytes, "none of %u members can be read: %s",
               mounting->count, dlfs_strerror(code));
    return code;
}

/* Fills a new volume; codes: why devices are NULL, or NULL. */
static int mount_into(dlfs_volume *volume, dlfs_device *const *devices, const int *codes,
                      uint32_t count, char *message, uint32_t message_bytes)
{
    struct mounting mounting = {.count = count, .message = message, .message_bytes = message_bytes};
    void *memory = NULL;
    int code = dlfs_memory_map(READ_MEMORY_BYTES, &memory, NULL);
    if (code < 0)
        return code;
    mounting.memory = memory;
    mounting.candidates = calloc(count, sizeof *mounting.candidates);
    if (!mounting.candidates) {
        code = -ENOMEM;
        goto out;
    }
    code = identify_all(&mounting, devices, codes);
    if (code >= 0)
        code = assemble(&mounting, volume);
    if (code >= 0)
        code = load_catalog(volume, message, message_bytes);
out:
    free(mounting.candidates);
    dlfs_memory_unmap(memory, READ_MEMORY_BYTES);
    return code;
}

static bool check_count(const void *members, uint32_t count, char *message, uint32_t message_bytes)
{
    if (members && count >= 1 && count <= DLFS_MEMBERS_MAX)
        return true;
    volume_say(message, message_bytes, "expected 1..%u members, got %u", DLFS_MEMBERS_MAX, count);
    return false;
}

DLFS_API int dlfs_mount_devices(dlfs_device *const *devices, uint32_t count, char *message,
                                uint32_t message_bytes, dlfs_volume **out)
{
    if (!out || !check_count(devices, count, message, message_bytes))
        return -EINVAL;
    dlfs_volume *volume = calloc(1, sizeof *volume);
    if (!volume)
        return -ENOMEM;
    int code = mount_into(volume, devices, NULL, count, message, message_bytes);
    if (code < 0) {
        forget(volume);
        return code;
    }
    *out = volume;
    return 0;
}

DLFS_API int dlfs_mount(const char *const *paths, uint32_t count, char *message,
                        uint32_t message_bytes, dlfs_volume **out)
{
    dlfs_device *devices[DLFS_MEMBERS_MAX] = {NULL};
    int codes[DLFS_MEMBERS_MAX] = {0};
    if (!out || !check_count(paths, count, message, message_bytes))
        return -EINVAL;
    dlfs_volume *volume = calloc(1, sizeof *volume);
    if (!volume)
        return -ENOMEM;
    for (uint32_t i = 0; i < count; i++) {
        codes[i] =
            paths[i] ? dlfs_device_open_file(paths[i], 0, DLFS_ENGINE_AUTO, &devices[i]) : -EINVAL;
        if (codes[i] >= 0)
            volume->owned[volume->owned_count++] = devices[i];
    }
    int code = mount_into(volume, devices, codes, count, message, message_bytes);
    if (code < 0) {
        forget(volume);
        return code;
    }
    *out = volume;
    return 0;
}

DLFS_API int dlfs_unmount(dlfs_volume *volume)
{
    if (!volume)
        return 0;
    if (__atomic_load_n(&volume->dataset_count, __ATOMIC_ACQUIRE) != 0)
        return -EBUSY;
    forget(volume);
    return 0;
}

DLFS_API uint32_t dlfs_dataset_count(const dlfs_volume *volume)
{
    return volume->catalog.count;
}

DLFS_API int dlfs_dataset_describe(const dlfs_volume *volume, uint32_t number,
                                   dlfs_dataset_info *info)
{
    if (!info || number >= volume->catalog.count)
        return -EINVAL;
    const struct volume_record *record = &volume->catalog.records[number];
    dlfs_dataset_info told = {.version = record->version,
                              .sample_count = record->sample_count,
                              .sample_bytes = record->sample_bytes};
    memcpy(told.name, record->name, record->name_bytes);
    memcpy(told.uuid, record->uuid, sizeof told.uuid);
    *info = told;
    return 0;
}
