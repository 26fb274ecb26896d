/*
 * Mounting: finds out which member each device is, which generation is in force (FORMAT.md, section
 * 8.2), and reads its catalog.
 *
 * Three copies of the superblock are read from each device. The newest valid one of all devices is
 * in force. If a newer one needs a feature unknown to this code, the volume is refused: the older
 * generation is no longer in force. A device that cannot be used (no superblock, too small,
 * replaced, stale) counts as missing; a volume with K copies can do without K - 1 members.
 *
 * A volume that was grown records the URIs of its members. So some of them are enough, or devices
 * that have left it: the others are opened by these URIs, if they are like the given ones
 * (uri_follow).
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/uri.h"
#include "volume/candidate.h"
#include "volume/volume.h"

#define LAG_MAX 1u /* generations that a member may lag behind after a crash in a commit */

/* The state of mounting a volume. */
struct mounting {
    struct candidate *candidates; /* [count] */
    uint32_t count;
    uint32_t capacity;       /* of candidates */
    const char *const *uris; /* [uri_count], of the devices that the caller gave; NULL with 0 */
    uint32_t uri_count;
    const struct candidate *newest;
    uint8_t *memory; /* READ_MEMORY_BYTES */
    struct volume_limit limit;
    char *message;
    uint32_t message_bytes;
};

/* Returns true if two superblocks of one generation describe the same volume. */
static bool agrees(const struct volume_superblock *a, const struct volume_superblock *b)
{
    struct volume_superblock other = *b;
    memcpy(other.member_uuid, a->member_uuid, sizeof other.member_uuid);
    other.member_number = a->member_number;
    other.member_bytes = a->member_bytes;
    other.crc32c = a->crc32c;
    return memcmp(a, &other, VOLUME_SUPERBLOCK_BYTES) == 0;
}

/* Compares the sizes that never change; members and groups may differ in an older generation. */
static bool same_sizes(const struct volume_superblock *a, const struct volume_superblock *b)
{
    return a->chunk_bytes == b->chunk_bytes && a->block_bytes == b->block_bytes &&
           a->data_offset_bytes == b->data_offset_bytes && a->replicas == b->replicas;
}

/* Returns the number of a member in the generation in force; its member_count if it has none. */
static uint32_t number_in(const struct volume_superblock *newest,
                          const struct volume_superblock *member)
{
    uint32_t number = 0;
    while (number < newest->member_count &&
           memcmp(newest->member_uuids[number], member->member_uuid, sizeof member->member_uuid) !=
               0) {
        number++;
    }
    return number;
}

/* Returns true if a member is as large as the generation in force needs it. */
static bool has_room(const struct volume_superblock *newest, const struct volume_superblock *member,
                     uint32_t number)
{
    const dlfs_chunk_group *group = newest->groups;
    while (number >= group->first_member + group->member_count) {
        group++; /* the groups have all members */
    }
    uint64_t tail = volume_tail_offset(member->member_bytes);
    return tail >= newest->data_offset_bytes &&
           group->band_rows * newest->replicas <=
               (tail - newest->data_offset_bytes) / newest->chunk_bytes;
}

/*
 * Sets the reason why a candidate is not used, unless its generation is the newest or one before
 * it.
 */
static void check_age(struct candidate *candidate, const struct volume_superblock *newest)
{
    const struct volume_superblock *own = &candidate->superblock;
    uint32_t number = number_in(newest, own);
    if (number == newest->member_count) {
        candidate_refuse(candidate, DLFS_E_FORMAT,
                         "open %s: it was member %u until generation %llu, and was replaced",
                         candidate->name, own->member_number, wide(own->generation));
    } else if (newest->replicas > 1 && own->generation + LAG_MAX < newest->generation) {
        candidate_refuse(candidate, DLFS_E_FORMAT,
                         "open %s: it is stale: expected generation %llu, got %llu",
                         candidate->name, wide(newest->generation), wide(own->generation));
    } else if (!has_room(newest, own, number)) {
        candidate_refuse(candidate, DLFS_E_FORMAT,
                         "open %s: a member of %llu bytes is too small for its group of members",
                         candidate->name, wide(own->member_bytes));
    }
}

/* Compares a candidate with the generation in force. -EINVAL and DLFS_E_FORMAT end the mounting. */
static int check_candidate(struct mounting *mounting, uint32_t number)
{
    struct candidate *candidate = &mounting->candidates[number];
    const struct volume_superblock *own = &candidate->superblock;
    const struct volume_superblock *newest = &mounting->newest->superblock;
    if (memcmp(own->volume_uuid, newest->volume_uuid, sizeof own->volume_uuid) != 0) {
        return volume_fail(
            mounting->message, mounting->message_bytes, -EINVAL,
            "open %s: expected a member of the volume of %s, got one of another volume",
            candidate->name, mounting->newest->name);
    }
    bool behind = own->generation < newest->generation;
    if (!same_sizes(own, newest) || (!behind && !agrees(own, newest))) {
        return volume_fail(
            mounting->message, mounting->message_bytes, DLFS_E_FORMAT,
            "open %s: its superblock contradicts that of the volume's newest generation, "
            "%llu, on %s",
            candidate->name, wide(newest->generation), mounting->newest->name);
    }
    check_age(candidate, newest);
    return 0;
}

/* Makes a candidate's device the device of its member. */
static int take_member(const struct mounting *mounting, const struct candidate *candidate,
                       dlfs_volume *volume)
{
    uint32_t number = number_in(&mounting->newest->superblock, &candidate->superblock);
    if (volume->devices[number] != NULL) {
        return volume_fail(
            mounting->message, mounting->message_bytes, -EINVAL,
            "open %s: expected each member once, got number %u again: %s is that one too",
            candidate->name, number, volume->names[number]);
    }
    volume->devices[number] = candidate->device;
    memcpy(volume->names[number], candidate->name, sizeof candidate->name);
    return 0;
}

/* Describes which members are missing, and the reason of the first of those that were given.
 * Returns its code. */
static int describe_missing(const struct mounting *mounting, const dlfs_volume *volume,
                            const struct candidate *reason)
{
    const struct volume_superblock *sb = &volume->superblock;
    char numbers[DLFS_MEMBERS_MAX * sizeof ", 63"] = "";
    size_t length = 0;
    uint32_t missing = 0;
    for (uint32_t i = 0; i < sb->member_count; i++) {
        if (volume->devices[i] != NULL) {
            continue;
        }
        int written =
            snprintf(numbers + length, sizeof numbers - length, "%s%u", missing++ ? ", " : "", i);
        length += (size_t)written;
    }
    return volume_fail(
        mounting->message, mounting->message_bytes,
        reason != NULL ? reason->code : DLFS_E_NOT_FOUND,
        "expected %u members, in %u copies, got %u that can be read; missing: number %s%s%s",
        sb->member_count, sb->replicas, sb->member_count - missing, numbers,
        reason != NULL ? ": " : "", reason != NULL ? reason->reason : "");
}

/* Gives every member its device. */
static int assemble(struct mounting *mounting, dlfs_volume *volume)
{
    const struct volume_superblock *newest = &mounting->newest->superblock;
    const struct candidate *reason = NULL; /* NULL: the missing members were not given */
    uint32_t present = 0;
    for (uint32_t i = 0; i < mounting->count; i++) {
        struct candidate *candidate = &mounting->candidates[i];
        int code = candidate->code == 0 ? check_candidate(mounting, i) : 0;
        if (code < 0) {
            return code;
        }
        if (candidate->code < 0) {
            reason = reason != NULL || candidate->reason[0] == '\0' ? reason : candidate;
            continue;
        }
        code = take_member(mounting, candidate, volume);
        if (code < 0) {
            return code;
        }
        present++;
    }
    volume->superblock = *newest;
    if (newest->member_count - present < newest->replicas) {
        return 0;
    }
    return describe_missing(mounting, volume, reason);
}

/* Reads the catalog from the copies that have it intact. */
static int load_catalog(dlfs_volume *volume, struct volume_limit *limit, char *message,
                        uint32_t message_bytes)
{
    const struct volume_superblock *sb = &volume->superblock;
    uint64_t chunks = (sb->catalog_bytes + sb->chunk_bytes - 1) / sb->chunk_bytes;
    volume->catalog_memory_bytes = chunks * sb->chunk_bytes;
    int code = dlfs_memory_map(volume->catalog_memory_bytes, &volume->catalog_memory, NULL);
    if (code < 0) {
        volume->catalog_memory = NULL;
        return code;
    }
    const struct volume_space space = {sb->catalog_runs, sb->catalog_run_count, chunks};
    struct volume_location place = {.member = 0};
    for (uint32_t choice = 0; choice < volume_choice_count(sb); choice++) {
        code = volume_read_space(volume, limit, &space, choice, volume->catalog_memory, &place);
        if (code >= 0) {
            place = volume_locate(volume, &space, 0);
            code = volume_catalog_decode(volume->catalog_memory, sb, &volume->catalog);
        }
        if (code >= 0) {
            return 0;
        }
    }
    return volume_fail(message, message_bytes, code,
                       "read the catalog of generation %llu: %s at byte %llu: %s",
                       wide(sb->generation), volume_member_name(volume, place.member).text,
                       wide(place.offset_bytes), dlfs_strerror(code));
}

static void forget(dlfs_volume *volume)
{
    if (volume == NULL) {
        return;
    }
    volume_catalog_free(&volume->catalog);
    dlfs_memory_unmap(volume->catalog_memory, volume->catalog_memory_bytes);
    for (uint32_t i = 0; i < volume->owned_count; i++) {
        (void)dlfs_device_destroy(volume->owned[i]); /* no queue pair is left: it cannot fail */
    }
    free(volume);
}

/* Chooses the newest generation of all candidates; those before number first were compared. */
static void choose_newest(struct mounting *mounting, uint32_t first)
{
    for (uint32_t i = first; i < mounting->count; i++) {
        const struct candidate *candidate = &mounting->candidates[i];
        if (candidate->code >= 0 &&
            (mounting->newest == NULL ||
             candidate->superblock.generation > mounting->newest->superblock.generation)) {
            mounting->newest = candidate;
        }
    }
}

/* Returns the shares of the time left of which a device gets one: others have the same, or more is
 * to be read. */
static uint32_t member_shares(const struct mounting *mounting)
{
    return mounting->count > 1 ? 2 : 1;
}

/* Reads the superblocks of all devices that were given. */
static void identify_all(struct mounting *mounting)
{
    for (uint32_t i = 0; i < mounting->count; i++) {
        struct candidate *candidate = &mounting->candidates[i];
        if (candidate->device != NULL) {
            candidate_identify(candidate, &mounting->limit, member_shares(mounting));
        }
    }
    choose_newest(mounting, 0);
}

/* Refuses the volume if a copy on any device is newer than the newest one that this code knows. */
static int check_known(const struct mounting *mounting)
{
    const struct volume_superblock *newest = &mounting->newest->superblock;
    for (uint32_t i = 0; i < mounting->count; i++) {
        const struct candidate *candidate = &mounting->candidates[i];
        if (candidate->unknown_generation > newest->generation &&
            memcmp(candidate->unknown_volume_uuid, newest->volume_uuid, VOLUME_UUID_BYTES) == 0) {
            return volume_fail(mounting->message, mounting->message_bytes, -EPROTONOSUPPORT,
                               "open %s: read a superblock at byte %llu: generation %llu needs a "
                               "feature unknown to this version; a newer dlfs made this volume",
                               candidate->name, wide(candidate->unknown_offset_bytes),
                               wide(candidate->unknown_generation));
        }
    }
    return 0;
}

/* Opens a device in addition to those that were given; it counts only as the recorded member. */
static void add_located(struct mounting *mounting, dlfs_volume *volume,
                        const struct volume_member_location *location)
{
    struct candidate *candidate = &mounting->candidates[mounting->count];
    struct uri parsed;
    char *uri = strndup(location->uri, location->uri_bytes);
    if (uri == NULL || strlen(uri) != location->uri_bytes) { /* no URI contains a NUL */
        free(uri);
        return;
    }
    mounting->count++;
    (void)uri_show(uri, strlen(uri), candidate->name, sizeof candidate->name);
    candidate->code = uri_follow(uri, mounting->uris, mounting->uri_count, &parsed,
                                 candidate->reason, REASON_BYTES);
    free(uri);
    if (candidate->code >= 0) {
        candidate->code = uri_open_parsed(&parsed, candidate->name, candidate->reason, REASON_BYTES,
                                          &candidate->device);
    }
    if (candidate->code < 0) {
        return;
    }
    volume->owned[volume->owned_count++] = candidate->device;
    candidate_identify(candidate, &mounting->limit, member_shares(mounting));
    if (candidate->code >= 0 &&
        memcmp(candidate->superblock.member_uuid, location->uuid, VOLUME_UUID_BYTES) != 0) {
        candidate_refuse(candidate, DLFS_E_NOT_FOUND, "open %s: it is another member",
                         candidate->name);
    }
}

/* Returns true if the record may name members of the volume that are not among the candidates. */
static bool is_missing(const struct mounting *mounting,
                       const struct volume_member_location *location)
{
    for (uint32_t i = 0; i < mounting->count; i++) {
        const struct candidate *candidate = &mounting->candidates[i];
        if (candidate->code >= 0 &&
            memcmp(candidate->superblock.member_uuid, location->uuid, VOLUME_UUID_BYTES) == 0) {
            return false;
        }
    }
    return true;
}

/* Reads the location record of a device that is, or was, a member of a volume that was grown. */
static bool read_locations(struct mounting *mounting, const struct candidate *candidate,
                           struct volume_locations *locations)
{
    struct volume_source source;
    const struct volume_superblock *sb = &candidate->superblock;
    bool grown = candidate->code >= 0 ? sb->group_count > 1 || sb->groups[0].first_chunk > 0
                                      : !candidate->has_magic;
    uint64_t end = VOLUME_LOCATIONS_OFFSET_BYTES + VOLUME_LOCATIONS_BYTES_MAX;
    uint64_t until_ns = volume_limit_device_ns(&mounting->limit, member_shares(mounting));
    if (candidate->device == NULL || !grown || candidate->code == DLFS_E_TIMEOUT ||
        dlfs_device_size_bytes(candidate->device) < end ||
        volume_source_open(&source, candidate->device, 1, VOLUME_LOCATIONS_BYTES_MAX, until_ns) <
            0) {
        return false;
    }
    int code = volume_source_read(&source, &mounting->limit, VOLUME_LOCATIONS_OFFSET_BYTES,
                                  VOLUME_LOCATIONS_BYTES_MAX, until_ns);
    if (code >= 0) {
        memcpy(mounting->memory, source.memory, VOLUME_LOCATIONS_BYTES_MAX);
    }
    volume_source_close(&source);
    return code >= 0 && volume_locations_decode(mounting->memory, locations);
}

/* Opens the members that were not given, by the newest location record. */
static void locate(struct mounting *mounting, dlfs_volume *volume)
{
    struct volume_locations locations = {.generation = 0};
    struct volume_locations found;
    uint8_t *record = malloc(VOLUME_LOCATIONS_BYTES_MAX);
    const struct candidate *newest = mounting->newest;
    for (uint32_t i = 0; record != NULL && i < mounting->count; i++) {
        if (read_locations(mounting, &mounting->candidates[i], &found) &&
            found.generation > locations.generation &&
            (newest == NULL ||
             memcmp(found.volume_uuid, newest->superblock.volume_uuid, VOLUME_UUID_BYTES) == 0)) {
            memcpy(record, mounting->memory, VOLUME_LOCATIONS_BYTES_MAX);
            (void)volume_locations_decode(record, &locations);
        }
    }
    uint32_t given = mounting->count;
    for (uint32_t i = 0; i < locations.count && mounting->count < mounting->capacity; i++) {
        if (is_missing(mounting, &locations.members[i])) {
            add_located(mounting, volume, &locations.members[i]);
        }
    }
    free(record);
    choose_newest(mounting, given);
}

/* Describes why no device is a member: the first known reason. */
static int describe_none(const struct mounting *mounting)
{
    for (uint32_t i = 0; i < mounting->count; i++) {
        const struct candidate *candidate = &mounting->candidates[i];
        if (candidate->reason[0] == '\0') {
            continue;
        }
        return volume_fail(mounting->message, mounting->message_bytes, candidate->code, "%s",
                           candidate->reason);
    }
    return volume_fail(mounting->message, mounting->message_bytes, DLFS_E_NOT_FOUND,
                       "expected a device of a member, got none");
}

/* Fills a new volume from the candidates' devices. */
static int mount_into(dlfs_volume *volume, struct mounting *mounting)
{
    void *memory = NULL;
    int code = dlfs_memory_map(READ_MEMORY_BYTES, &memory, NULL);
    if (code < 0) {
        return code;
    }
    mounting->memory = memory;
    mounting->limit = volume_limit_begin();
    identify_all(mounting);
    locate(mounting, volume);
    if (mounting->newest == NULL) {
        code = describe_none(mounting);
        goto out;
    }
    code = check_known(mounting);
    if (code >= 0) {
        code = assemble(mounting, volume);
    }
    if (code >= 0) {
        code = load_catalog(volume, &mounting->limit, mounting->message, mounting->message_bytes);
    }
out:
    dlfs_memory_unmap(memory, READ_MEMORY_BYTES);
    return code;
}

/*
 * Makes candidates of the devices that were given, or of those that URIs name. All URIs are checked
 * before any device is opened: a malformed one does not count as a missing member.
 */
static int add_given(struct mounting *mounting, dlfs_volume *volume, dlfs_device *const *devices)
{
    struct uri parsed;
    int code = 0;
    for (uint32_t i = 0; code >= 0 && i < mounting->uri_count; i++) {
        code = uri_parse(mounting->uris[i], &parsed, mounting->message, mounting->message_bytes);
    }
    for (uint32_t i = 0; code >= 0 && i < mounting->count; i++) {
        struct candidate *candidate = &mounting->candidates[i];
        if (devices != NULL) {
            candidate->device = devices[i];
            candidate->code = devices[i] != NULL ? 0 : DLFS_E_NOT_FOUND; /* for no known reason */
            (void)snprintf(candidate->name, sizeof candidate->name, "device %u", i);
            continue;
        }
        const char *uri = mounting->uris[i];
        (void)uri_show(uri, strlen(uri), candidate->name, sizeof candidate->name);
        candidate->code = uri_open_device(uri, candidate->name, candidate->reason, REASON_BYTES,
                                          &candidate->device);
        if (candidate->code >= 0) {
            volume->owned[volume->owned_count++] = candidate->device;
        }
    }
    return code;
}

/* Mounts the devices that were given, or those that URIs name and further members. */
static int mount(struct mounting *mounting, dlfs_device *const *devices, dlfs_volume **out)
{
    if (out == NULL) {
        return -EINVAL;
    }
    if ((devices == NULL && mounting->uris == NULL) || mounting->count < 1 ||
        mounting->count > DLFS_MEMBERS_MAX) {
        return volume_fail(mounting->message, mounting->message_bytes, -EINVAL,
                           "expected 1..%u members, got %u", DLFS_MEMBERS_MAX, mounting->count);
    }
    dlfs_volume *volume = calloc(1, sizeof *volume);
    mounting->candidates = calloc(mounting->capacity, sizeof *mounting->candidates);
    int code = volume != NULL && mounting->candidates != NULL ? 0 : -ENOMEM;
    if (code >= 0) {
        code = add_given(mounting, volume, devices);
    }
    if (code >= 0) {
        code = mount_into(volume, mounting);
    }
    free(mounting->candidates);
    if (code < 0) {
        forget(volume);
        return code;
    }
    *out = volume;
    return 0;
}

DLFS_API int dlfs_mount_devices(dlfs_device *const *devices, uint32_t count, char *message,
                                uint32_t message_bytes, dlfs_volume **out)
{
    struct mounting mounting = {
        .count = count, .capacity = count, .message = message, .message_bytes = message_bytes};
    return mount(&mounting, devices, out);
}

DLFS_API int dlfs_mount(const char *const *uris, uint32_t count, char *message,
                        uint32_t message_bytes, dlfs_volume **out)
{
    struct mounting mounting = {.count = count,
                                .capacity = count + DLFS_MEMBERS_MAX,
                                .uris = uris,
                                .uri_count = count,
                                .message = message,
                                .message_bytes = message_bytes};
    return mount(&mounting, NULL, out);
}

DLFS_API int dlfs_unmount(dlfs_volume *volume)
{
    if (volume == NULL) {
        return 0;
    }
    if (__atomic_load_n(&volume->dataset_count, __ATOMIC_ACQUIRE) != 0) {
        return -EBUSY;
    }
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
    if (info == NULL || number >= volume->catalog.count) {
        return -EINVAL;
    }
    const struct volume_record *record = &volume->catalog.records[number];
    dlfs_dataset_info described = {.version = record->row->version,
                                   .sample_count = record->row->sample_count,
                                   .sample_bytes = record->row->sample_bytes};
    memcpy(described.name, record->name, record->row->name_bytes);
    memcpy(described.uuid, record->row->uuid, sizeof described.uuid);
    *info = described;
    return 0;
}
