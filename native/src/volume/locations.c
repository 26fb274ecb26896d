/*
 * Decodes the record of the URIs that the members of a volume have (FORMAT.md, section 3.4), for C
 * programs. dlfs/format/locations.py also writes it.
 */
#include "volume/volume.h"

#define MAGIC "DLFSLOCN"
#define VERSION 1u
#define HEAD_BYTES 48u
#define ENTRY_BYTES 18u /* UUID and length of the URI */
#define CRC32C_BYTES 4u

/* Offsets of fields. */
enum {
    AT_VERSION = 8,
    AT_RECORD_BYTES = 12,
    AT_VOLUME_UUID = 16,
    AT_GENERATION = 32,
    AT_MEMBER_COUNT = 40,
};

static bool parse_entries(const uint8_t *bytes, uint32_t end, struct volume_locations *out)
{
    uint32_t at = HEAD_BYTES;
    for (uint32_t i = 0; i < out->count; i++) {
        if (end - at < ENTRY_BYTES) {
            return false;
        }
        uint32_t uri_bytes = volume_u16(bytes + at + VOLUME_UUID_BYTES);
        if (end - at - ENTRY_BYTES < uri_bytes) {
            return false;
        }
        out->members[i] = (struct volume_member_location){
            .uuid = bytes + at,
            .uri = (const char *)bytes + at + ENTRY_BYTES,
            .uri_bytes = uri_bytes,
        };
        at += ENTRY_BYTES + uri_bytes;
    }
    return true;
}

bool volume_locations_decode(const uint8_t *bytes, struct volume_locations *out)
{
    struct volume_locations found = {
        .volume_uuid = bytes + AT_VOLUME_UUID,
        .generation = volume_u64(bytes + AT_GENERATION),
        .count = volume_u32(bytes + AT_MEMBER_COUNT),
    };
    uint32_t length = volume_u32(bytes + AT_RECORD_BYTES);
    if (memcmp(bytes, MAGIC, sizeof MAGIC - 1) != 0 || volume_u32(bytes + AT_VERSION) != VERSION ||
        found.count > DLFS_MEMBERS_MAX || length < HEAD_BYTES + CRC32C_BYTES ||
        length > VOLUME_LOCATIONS_BYTES_MAX) {
        return false;
    }
    uint32_t end = length - CRC32C_BYTES;
    if (dlfs_crc32c(0, bytes, end) != volume_u32(bytes + end) ||
        !parse_entries(bytes, end, &found)) {
        return false;
    }
    *out = found;
    return true;
}
