/*
 * Decodes the superblock, which describes a member and its volume (FORMAT.md, sections 2, 3.1 and
 * 9), for C programs, which open volumes without Python. dlfs/format/superblock.py also writes it,
 * and its errors name the field that is wrong.
 */
#include <errno.h>
#include <stdbool.h>

#include "volume/volume.h"

#define MAGIC "DLFSVOL1"
#define VERSION_MAJOR 1u
#define GROUP_STATE_MAX 1u

static bool is_size(uint32_t value, uint32_t low, uint32_t high)
{
    return value >= low && value <= high && (value & (value - 1)) == 0;
}

bool volume_superblock_has_magic(const uint8_t *block)
{
    return memcmp(block, MAGIC, sizeof MAGIC - 1) == 0;
}

/* Takes the fields of a block. Errors: those of decoding that concern the block as a whole. */
static int take_fields(const uint8_t *block, struct volume_superblock *out)
{
    memcpy(out, block, VOLUME_SUPERBLOCK_BYTES);
    if (!volume_superblock_has_magic(block)) {
        return DLFS_E_FORMAT;
    }
    if (dlfs_crc32c(0, block, offsetof(struct volume_superblock, crc32c)) != out->crc32c) {
        return DLFS_E_CHECKSUM;
    }
    if (out->version_major != VERSION_MAJOR || out->draft != VOLUME_DRAFT) {
        return -EPROTONOSUPPORT;
    }
    if (out->superblock_bytes != VOLUME_SUPERBLOCK_BYTES) {
        return DLFS_E_FORMAT;
    }
    return out->incompat == 0 ? 0 : -EPROTONOSUPPORT;
}

bool volume_superblock_is_other_draft(const uint8_t *block, uint32_t *draft)
{
    struct volume_superblock found;
    int code = take_fields(block, &found);
    *draft = found.draft;
    return code == -EPROTONOSUPPORT && found.version_major == VERSION_MAJOR &&
           found.draft != VOLUME_DRAFT;
}

bool volume_superblock_is_unknown(const uint8_t *block, uint64_t *generation, uint8_t *uuid)
{
    struct volume_superblock found;
    int code = take_fields(block, &found);
    if (!volume_superblock_has_magic(block) || code == DLFS_E_CHECKSUM ||
        found.version_major != VERSION_MAJOR || found.draft != VOLUME_DRAFT ||
        found.incompat == 0) {
        return false;
    }
    *generation = found.generation;
    memcpy(uuid, found.volume_uuid, VOLUME_UUID_BYTES);
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
static bool parse_groups(struct volume_superblock *sb)
{
    uint32_t count = sb->group_count;
    uint32_t first_member = 0;
    if (count < 1 || count > DLFS_GROUPS_MAX) {
        return false;
    }
    sb->group_count = 0; /* of those that were taken */
    for (uint32_t i = 0; i < count; i++) {
        const struct volume_group_entry *entry = &sb->group_entries[i];
        const dlfs_chunk_group group = {
            .first_chunk = entry->first_chunk,
            .band_rows = entry->row_count / sb->replicas,
            .first_member = first_member,
            .member_count = entry->member_count,
        };
        if (group.member_count > sb->member_count || entry->state > GROUP_STATE_MAX ||
            !take_group(sb, &group, entry->row_count)) {
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

static bool check_geometry(struct volume_superblock *sb)
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
        !parse_groups(sb)) {
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
    struct volume_superblock sb = {.chunk_end = 0};
    int code = take_fields(block, &sb);
    if (code < 0) {
        return code;
    }
    if (sb.member_count < 1 || sb.member_count > DLFS_MEMBERS_MAX || sb.catalog_run_count < 1 ||
        sb.catalog_run_count > VOLUME_CATALOG_RUNS_MAX || !check_geometry(&sb) ||
        !check_members(&sb) || !check_catalog_runs(&sb) || sb.generation < 1 ||
        sb.generation > VOLUME_NUMBER_MAX || sb.created > VOLUME_NUMBER_MAX ||
        sb.label_bytes > VOLUME_LABEL_BYTES_MAX) {
        return DLFS_E_FORMAT;
    }
    *out = sb;
    return 0;
}
