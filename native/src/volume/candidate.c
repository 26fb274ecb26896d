/*
 * Reads the three copies of a device's superblock, and takes the newest valid one (FORMAT.md,
 * section 8.2).
 */
#include "volume/candidate.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

/* The reading of a candidate's superblocks. */
struct identifying {
    struct volume_source *source;
    struct volume_limit *limit;
    uint32_t shares;
};

/* Reads one superblock copy, whatever the logical block of the device is. */
static int read_block(const struct identifying *identifying, uint64_t offset_bytes, uint8_t *block)
{
    const dlfs_device *device = identifying->source->device;
    uint64_t size_bytes = dlfs_device_size_bytes(device);
    uint32_t logical_bytes = dlfs_device_block_bytes(device);
    if (size_bytes < VOLUME_SUPERBLOCK_BYTES ||
        offset_bytes > size_bytes - VOLUME_SUPERBLOCK_BYTES) {
        return DLFS_E_TRUNCATED;
    }
    uint64_t first = offset_bytes / logical_bytes * logical_bytes;
    uint64_t length = offset_bytes - first + VOLUME_SUPERBLOCK_BYTES;
    length = (length + logical_bytes - 1) / logical_bytes * logical_bytes;
    if (length > READ_MEMORY_BYTES || length > size_bytes - first) {
        return DLFS_E_TRUNCATED;
    }
    uint64_t until_ns = volume_limit_device_ns(identifying->limit, identifying->shares);
    int code = volume_source_read(identifying->source, identifying->limit, first, length, until_ns);
    if (code < 0) {
        return code;
    }
    memcpy(block, (const uint8_t *)identifying->source->memory + (offset_bytes - first),
           VOLUME_SUPERBLOCK_BYTES);
    return 0;
}

/* Notes a copy that needs features unknown to this code, if it is newer than the one noted before.
 */
static void note_unknown(struct candidate *candidate, uint64_t offset_bytes, const uint8_t *block)
{
    uint64_t generation;
    uint8_t uuid[VOLUME_UUID_BYTES];
    if (volume_superblock_is_unknown(block, &generation, uuid) &&
        generation > candidate->unknown_generation) {
        candidate->unknown_generation = generation;
        candidate->unknown_offset_bytes = offset_bytes;
        memcpy(candidate->unknown_volume_uuid, uuid, sizeof uuid);
    }
}

void candidate_refuse(struct candidate *candidate, int code, const char *form, ...)
{
    va_list arguments;
    candidate->code = code;
    va_start(arguments, form);
    (void)vsnprintf(candidate->reason, REASON_BYTES, form, arguments);
    va_end(arguments);
}

/* Sets the reason why the copy at an offset is not valid. */
static void refuse_copy(struct candidate *candidate, uint64_t offset_bytes, const uint8_t *block,
                        int code)
{
    uint32_t draft;
    if (code == -EPROTONOSUPPORT && volume_superblock_is_other_draft(block, &draft)) {
        candidate_refuse(
            candidate, code,
            "open %s: read a superblock at byte %llu: expected draft %u of the format, "
            "got %u: this volume was made by another state of development of DLFS: "
            "import it again",
            candidate->name, wide(offset_bytes), VOLUME_DRAFT, draft);
        return;
    }
    candidate_refuse(candidate, code, "open %s: read a superblock at byte %llu: %s",
                     candidate->name, wide(offset_bytes), dlfs_strerror(code));
}

/* Takes the copy at an offset if it is valid and newer than the one taken before. */
static void take_copy(struct candidate *candidate, const struct identifying *identifying,
                      uint64_t offset_bytes)
{
    uint8_t block[VOLUME_SUPERBLOCK_BYTES];
    struct volume_superblock found;
    if (candidate->code == DLFS_E_TIMEOUT) {
        return; /* it is not waited for again */
    }
    int code = read_block(identifying, offset_bytes, block);
    if (code >= 0) {
        candidate->has_magic |= volume_superblock_has_magic(block);
        note_unknown(candidate, offset_bytes, block);
        code = volume_superblock_decode(block, &found);
    }
    if (code < 0) {
        /* The first copy's reason is kept unless a later one is more specific. */
        bool specific = candidate->code != 0 && candidate->code != DLFS_E_FORMAT;
        if (code == DLFS_E_TIMEOUT || (candidate->superblock.generation == 0 && !specific)) {
            refuse_copy(candidate, offset_bytes, block, code);
        }
        return;
    }
    candidate->code = 0;
    if (found.generation > candidate->superblock.generation) {
        candidate->superblock = found;
    }
}

/* Checks the superblock against the size and block size of its device. */
static void check_device(struct candidate *candidate)
{
    uint64_t size_bytes = dlfs_device_size_bytes(candidate->device);
    uint32_t device_block_bytes = dlfs_device_block_bytes(candidate->device);
    const struct volume_superblock *sb = &candidate->superblock;
    bool is_none = candidate->code == DLFS_E_FORMAT || candidate->code == DLFS_E_TRUNCATED;
    if (is_none && !candidate->has_magic) {
        candidate_refuse(
            candidate, DLFS_E_FORMAT,
            "open %s: this is no DLFS volume: expected a superblock at its head or its "
            "tail, got none in %llu bytes",
            candidate->name, wide(size_bytes));
    }
    if (candidate->code == 0 && sb->member_bytes > size_bytes) {
        candidate_refuse(candidate, DLFS_E_TRUNCATED,
                         "open %s: expected a member of %llu bytes, got a device of %llu",
                         candidate->name, wide(sb->member_bytes), wide(size_bytes));
    }
    if (candidate->code == 0 && sb->block_bytes % device_block_bytes != 0) {
        candidate_refuse(
            candidate, -EINVAL,
            "open %s: expected a device whose blocks make up blocks of %u bytes, got %u",
            candidate->name, sb->block_bytes, device_block_bytes);
    }
}

void candidate_identify(struct candidate *candidate, struct volume_limit *limit, uint32_t shares)
{
    struct volume_source source;
    volume_limit_admit(limit, candidate->device);
    int code = volume_source_open(&source, candidate->device, 1, READ_MEMORY_BYTES,
                                  volume_limit_device_ns(limit, shares));
    if (code < 0) {
        candidate_refuse(candidate, code, "open %s: make a queue pair: %s", candidate->name,
                         dlfs_strerror(code));
        return;
    }
    uint64_t size_bytes = dlfs_device_size_bytes(candidate->device);
    const struct identifying identifying = {&source, limit, shares};
    take_copy(candidate, &identifying, 0);
    take_copy(candidate, &identifying, VOLUME_SUPERBLOCK_B_OFFSET_BYTES);
    uint64_t member_bytes = candidate->superblock.member_bytes;
    take_copy(candidate, &identifying,
              volume_tail_offset(member_bytes ? member_bytes : size_bytes));
    volume_source_close(&source);
    check_device(candidate);
}
