/*
 * Decodes the superblock, which describes a member and its volume (FORMAT.md, sections 2, 3.1 and
 * 9).
 */
#include <errno.h>
#include <stdbool.h>

#include "volume/volume.h"

#define MAGIC "DLFSVOL1"
#define VERSION_MAJOR 1u
#define GROUP_BYTES 24u
#define GROUP_STATE_MAX 1u

/* Offsets of fields. */
enum {
    AT_VERSION_MAJOR = 8,
    AT_SUPERBLOCK_BYTES = 12,
    AT_INCOMPAT = 16,
    AT_VOLUME_UUID = 32,
    AT_MEMBER_UUID = 48,
    AT_MEMBER_NUMBER = 64,
    AT_MEMBER_COUNT = 68,
    AT_CHUNK_BYTES = 72,
    AT_BLOCK_BYTES = 76,
    AT_DATA_OFFSET = 80,
    AT_GROUP_COUNT = 88,
    AT_DRAFT = 92,
    AT_MEMBER_BYTES = 96,
    AT_GENERATION = 104,
    AT_CREATED = 112,
    AT_REPLICAS = 120,
    AT_CATALOG_RUN_COUNT = 124,
    AT_CATALOG_BYTES = 128,
    AT_CATALOG_CRC32C = 136,
    AT_LABEL_BYTES = 140,
    AT_CATALOG_RUNS = 256,
    AT_MEMBER_UUIDS = 512,
    AT_GROUPS = 3584,
    AT_CRC32C = 4092,
};

/* Offsets in an entry of the table of groups. */
enum {
    AT_GROUP_FIRST_CHUNK = 0,
    AT_GROUP_ROW_COUNT = 8,
    AT_GROUP_MEMBER_COUNT = 16,
    AT_GROUP_STATE = 20,
};

static bool is_size(uint32_t value, uint32_t low, uint32_t high)
{
    return value >= low && value <= high && (value & (value - 1)) == 0;
}

bool volume_superblock_has_magic(const uint8_t *block)
{
    return memcmp(block, MAGIC, sizeof MAGIC - 1) == 0;
}

/* Returns true if a block is an intact superblock of the major version of this code. */
static bool is_of_this_version(const uint8_t *block)
{
    return volume_superblock_has_magic(block) &&
           dlfs_crc32c(0, block, AT_CRC32C) == volume_u32(block + AT_CRC32C) &&
           volume_u16(block + AT_VERSION_MAJOR) == VERSION_MAJOR;
}

static int check_frame(const uint8_t *block)
{
    if (!volume_superblock_has_magic(block)) {
        return DLFS_E_FORMAT;
    }
    if (dlfs_crc32c(0, block, AT_CRC32C) != volume_u32(block + AT_CRC32C)) {
        return DLFS_E_CHECKSUM;
    }
    if (!is_of_this_version(block) || volume_u32(block + AT_DRAFT) != VOLUME_DRAFT) {
        return -EPROTONOSUPPORT;
    }
    if (volume_u32(block + AT_SUPERBLOCK_BYTES) != VOLUME_SUPERBLOCK_BYTES) {
        return DLFS_E_FORMAT;
    }
    return volume_u64(block + AT_INCOMPAT) == 0 ? 0 : -EPROTONOSUPPORT;
}

bool volume_superblock_is_other_draft(const uint8_t *block, uint32_t *draft)
{
    *draft = volume_u32(block + AT_DRAFT);
    return is_of_this_version(block) && *draft != VOLUME_DRAFT;
}

bool volume_superblock_is_unknown(const uint8_t *block, uint64_t *generation, uint8_t *uuid)
{
    if (!is_of_this_version(block) || volume_u32(block + AT_DRAFT) != VOLUME_DRAFT ||
        volume_u64(block + AT_INCOMPAT) == 0) {
        return false;
    }
    *generation = volume_u64(block + AT_GENERATION);
    memcpy(uuid, block + AT_VOLUME_UUID, VOLUME_UUID_BYTES);
    return true;
}

/* Decodes the fields of fixed size. Counts are checked before they are used. */
static bool parse(const uint8_t *block, struct volume_superblock *out)
{
    memcpy(out->volume_uuid, block + AT_VOLUME_UUID, sizeof out->volume_uuid);
    memcpy(out->member_uuid, block + AT_MEMBER_UUID, sizeof out->member_uuid);
    out->member_number = volume_u32(block + AT_MEMBER_NUMBER);
    out->member_count = volume_u32(block + AT_MEMBER_COUNT);
    out->chunk_bytes = volume_u32(block + AT_CHUNK_BYTES);
    out->block_bytes = volume_u32(block + AT_BLOCK_BYTES);
    out->data_offset_bytes = volume_u64(block + AT_DATA_OFFSET);
    out->member_bytes = volume_u64(block + AT_MEMBER_BYTES);
    out->generation = volume_u64(block + AT_GENERATION);
    out->replicas = volume_u32(block + AT_REPLICAS);
    out->catalog_run_count = volume_u32(block + AT_CATALOG_RUN_COUNT);
    out->catalog_bytes = volume_u64(block + AT_CATALOG_BYTES);
    out->catalog_crc32c = volume_u32(block + AT_CATALOG_CRC32C);
    if (out->member_count < 1 || out->member_count > DLFS_MEMBERS_MAX ||
        out->catalog_run_count < 1 || out->catalog_run_count > VOLUME_CATALOG_RUNS_MAX) {
        return false;
    }
    memcpy(out->catalog_runs, block + AT_CATALOG_RUNS,
           out->catalog_run_count * sizeof(dlfs_extent));
    memcpy(out->member_uuids, block + AT_MEMBER_UUIDS, out->member_count * sizeof(uint8_t[16]));
    return true;
}

/* Returns true if a group's chunks are possible. */
static bool check_group(const struct volume_superblock *sb, const dlfs_chunk_group *group)
{
    uint64_t room = VOLUME_CHUNK_END_MAX - 1;
    return group->band_rows >= 1 && group->first_chunk < room &&
           group->member_count >= sb->replicas && group->member_count <= DLFS_MEMBERS_MAX &&
           group->band_rows <= (room - group->first_chunk) / group->member_count;
}

/* Takes a group; its chunks end before those of the next one begin. */
static bool take_group(struct volume_superblock *sb, const dlfs_chunk_group *group,
                       uint64_t row_count)
{
    uint64_t rows_max = (VOLUME_MEMBER_BYTES_MAX - sb->data_offset_bytes) / sb->chunk_bytes;
    if (!check_group(sb, group) || row_count > rows_max ||
        (sb->group_count > 0 && group->first_chunk <= sb->chunk_end) ||
        group->first_member > sb->member_count - group->member_count) {
        return false;
    }
    uint32_t number = sb->member_number;
    uint64_t tail = volume_tail_offset(sb->member_bytes);
    if (number >= group->first_member && number - group->first_member < group->member_count &&
        (tail < sb->data_offset_bytes ||
         row_count > (tail - sb->data_offset_bytes) / sb->chunk_bytes)) {
        return false; /* this member is too small */
    }
    sb->groups[sb->group_count++] = *group;
    sb->chunk_end = group->first_chunk + group->band_rows * group->member_count;
    return true;
}

/* Parses the table of groups. */
static bool parse_groups(const uint8_t *block, struct volume_superblock *sb)
{
    uint32_t count = volume_u32(block + AT_GROUP_COUNT);
    uint32_t first_member = 0;
    if (count < 1 || count > DLFS_GROUPS_MAX) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *entry = block + AT_GROUPS + (size_t)i * GROUP_BYTES;
        uint64_t row_count = volume_u64(entry + AT_GROUP_ROW_COUNT);
        const dlfs_chunk_group group = {
            .first_chunk = volume_u64(entry + AT_GROUP_FIRST_CHUNK),
            .band_rows = row_count / sb->replicas,
            .first_member = first_member,
            .member_count = volume_u32(entry + AT_GROUP_MEMBER_COUNT),
        };
        if (group.member_count > sb->member_count ||
            volume_u16(entry + AT_GROUP_STATE) > GROUP_STATE_MAX ||
            !take_group(sb, &group, row_count)) {
            return false;
        }
        first_member += group.member_count;
    }
    return first_member == sb->member_count;
}

const dlfs_chunk_group *volume_group_of(const struct volume_superblock *superblock, uint64_t chunk)
{
    for (uint32_t i = 0; i < superblock->group_count; i++) {
        const dlfs_chunk_group *group = &superblock->groups[i];
        if (chunk >= group->first_chunk &&
            chunk - group->first_chunk < group->band_rows * group->member_count) {
            return group;
        }
    }
    return NULL;
}

bool volume_has_run(const struct volume_superblock *superblock, const dlfs_extent *run)
{
    const dlfs_chunk_group *group = volume_group_of(superblock, run->first_chunk);
    return group != NULL && run->chunk_count >= 1 &&
           run->chunk_count <=
               group->first_chunk + group->band_rows * group->member_count - run->first_chunk;
}

static bool check_geometry(const uint8_t *block, struct volume_superblock *sb)
{
    if (!is_size(sb->chunk_bytes, DLFS_CHUNK_BYTES_MIN, DLFS_CHUNK_BYTES_MAX) ||
        !is_size(sb->block_bytes, VOLUME_BLOCK_BYTES_MIN, VOLUME_BLOCK_BYTES_MAX) ||
        sb->block_bytes > sb->chunk_bytes) {
        return false;
    }
    if (sb->data_offset_bytes < VOLUME_DATA_OFFSET_BYTES_MIN ||
        sb->data_offset_bytes % sb->chunk_bytes != 0 ||
        sb->data_offset_bytes > VOLUME_MEMBER_BYTES_MAX ||
        sb->member_bytes > VOLUME_MEMBER_BYTES_MAX) {
        return false;
    }
    if (sb->replicas < 1 || sb->replicas > DLFS_REPLICAS_MAX || sb->replicas > sb->member_count ||
        !parse_groups(block, sb)) {
        return false;
    }
    uint64_t chunks = 0;
    for (uint32_t i = 0; i < sb->group_count; i++) {
        chunks += sb->groups[i].band_rows * sb->groups[i].member_count;
    }
    return chunks >= VOLUME_CHUNKS_MIN;
}

static bool check_members(const struct volume_superblock *sb)
{
    if (sb->member_number >= sb->member_count ||
        memcmp(sb->member_uuids[sb->member_number], sb->member_uuid, sizeof sb->member_uuid) != 0) {
        return false;
    }
    for (uint32_t i = 0; i < sb->member_count; i++) {
        for (uint32_t j = 0; j < i; j++) {
            if (memcmp(sb->member_uuids[i], sb->member_uuids[j], sizeof sb->member_uuid) == 0) {
                return false;
            }
        }
    }
    return true;
}

static bool check_catalog_runs(const struct volume_superblock *sb)
{
    uint64_t chunks = 0;
    if (sb->catalog_bytes < VOLUME_CATALOG_HEADER_BYTES ||
        sb->catalog_bytes > VOLUME_CATALOG_BYTES_MAX) {
        return false;
    }
    for (uint32_t i = 0; i < sb->catalog_run_count; i++) {
        const dlfs_extent *run = &sb->catalog_runs[i];
        if (!volume_has_run(sb, run)) {
            return false;
        }
        for (uint32_t j = 0; j < i; j++) {
            const dlfs_extent *other = &sb->catalog_runs[j];
            if (run->first_chunk < other->first_chunk + other->chunk_count &&
                other->first_chunk < run->first_chunk + run->chunk_count) {
                return false;
            }
        }
        chunks += run->chunk_count;
    }
    return chunks >= (sb->catalog_bytes + sb->chunk_bytes - 1) / sb->chunk_bytes;
}

int volume_superblock_decode(const uint8_t *block, struct volume_superblock *out)
{
    struct volume_superblock sb = {.replicas = 0};
    int code = check_frame(block);
    if (code < 0) {
        return code;
    }
    if (!parse(block, &sb) || !check_geometry(block, &sb) || !check_members(&sb) ||
        !check_catalog_runs(&sb)) {
        return DLFS_E_FORMAT;
    }
    if (sb.generation < 1 || sb.generation > VOLUME_NUMBER_MAX ||
        volume_u64(block + AT_CREATED) > VOLUME_NUMBER_MAX ||
        volume_u32(block + AT_LABEL_BYTES) > VOLUME_LABEL_BYTES_MAX) {
        return DLFS_E_FORMAT;
    }
    *out = sb;
    return 0;
}
