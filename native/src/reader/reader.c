/*
 * The reader itself: its configuration, its counters, the fetches that threads take for a read, and
 * the verification of spans. A reader is freed with its last batch.
 */
#include "reader/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "platform/thread.h"
#include "reader/chunk_map.h"
#include "reader/members.h"

#define ORDER_STEP 256u                         /* samples whose indices are looked up at a time */
#define IDLE_PLANS_BYTES_MAX ((size_t)32 << 20) /* of the plans of idle fetches */

/* ---- create, destroy ------------------------------------------------------------------------- */

static int config_check(const dlfs_reader_config *config)
{
    uint64_t chunk = config->chunk_bytes;
    uint32_t block = config->block_bytes;
    if (config->devices == NULL || config->directory == NULL || config->member_count == 0 ||
        config->member_count > DLFS_MEMBERS_MAX || config->depth == 0 ||
        config->depth > DLFS_DEPTH_MAX) {
        return -EINVAL;
    }
    if (chunk < DLFS_CHUNK_BYTES_MIN || chunk > DLFS_CHUNK_BYTES_MAX ||
        (chunk & (chunk - 1)) != 0 || block == 0 || (block & (block - 1)) != 0 || block > chunk ||
        (config->flags & ~DLFS_READER_PARTS) != 0) {
        return -EINVAL;
    }
    if (config->replicas == 0 || config->replicas > DLFS_REPLICAS_MAX ||
        config->replicas > config->member_count) {
        return -EINVAL;
    }
    if (config->arena != NULL) {
        return (uint64_t)1 << config->arena->chunk_shift == chunk ? 0 : -EINVAL;
    }
    if (config->memory_bytes / chunk < SLOTS_MIN || config->memory_bytes / chunk > UINT32_MAX / 2) {
        return DLFS_E_LIMIT;
    }
    return 0;
}

/* Gives the reader its arena: the one that it shares, or one of its own, no larger than needed. */
static int join_arena(dlfs_reader *reader)
{
    const dlfs_reader_config *config = &reader->config;
    reader->arena = config->arena;
    reader->owns_arena = config->arena == NULL;
    reader->slots_enough = share_enough(reader->chunk_count);
    if (reader->owns_arena) {
        uint64_t slots = config->memory_bytes >> reader->chunk_shift;
        uint32_t needed = share_needed(reader, (uint32_t)slots);
        int code = arena_create(needed, reader->chunk_shift, false, &reader->arena);
        if (code < 0) {
            return code;
        }
    } else {
        (void)atomic_fetch_add_explicit(&reader->arena->references, 1, memory_order_relaxed);
    }
    reader->slots_max = share_needed(reader, reader->arena->slot_count);
    reader->dataset_fits = share_fits(reader);
    return 0;
}

static int copy_config(dlfs_reader *reader, const dlfs_reader_config *config)
{
    reader->config = *config;
    reader->chunk_shift = (uint32_t)__builtin_ctz(config->chunk_bytes);
    reader->locations = dlfs_directory_locations(config->directory);
    reader->sample_count = dlfs_directory_count(config->directory);
    reader->data_bytes = dlfs_directory_data_bytes(config->directory);
    reader->chunk_count = (reader->data_bytes + config->chunk_bytes - 1) >> reader->chunk_shift;
    reader->devices = calloc(config->member_count, sizeof(dlfs_device *));
    reader->member_stats = calloc(config->member_count, sizeof(dlfs_member_stats));
    if (reader->devices == NULL || reader->member_stats == NULL) {
        return -ENOMEM;
    }
    memcpy(reader->devices, config->devices, (size_t)config->member_count * sizeof(dlfs_device *));
    int code = members_create(reader);
    if (code == 0) {
        code = chunk_map_create(&reader->config, &reader->map);
    }
    if (code < 0) {
        return code;
    }
    uint64_t chunks = reader->map->starts[reader->map->extent_count];
    return reader->data_bytes <= chunks << reader->chunk_shift ? join_arena(reader) : -EINVAL;
}

/* ---- requests that hang ---------------------------------------------------------------------- */

/* Waits for the requests of a fetch. Returns false if some may hang. */
static bool fetch_ends(const struct fetch *fetch)
{
    bool ends = true;
    for (uint32_t member = 0; ends && member < fetch->reader->config.member_count; member++) {
        dlfs_queue *queue = fetch->members[member].queue;
        ends = queue == NULL || dlfs_queue_ends(queue);
    }
    return ends;
}

/* Holds the devices of a reader, or gives up these holds. */
static void hold_devices(const dlfs_reader *reader, bool hold)
{
    for (uint32_t member = 0; member < reader->config.member_count; member++) {
        if (reader->devices[member] != NULL) {
            (hold ? dlfs_device_retain : dlfs_device_release)(reader->devices[member]);
        }
    }
}

static void *leave_thread(void *argument)
{
    struct fetch *fetch = argument;
    dlfs_reader *reader = fetch->reader;
    fetch_destroy(fetch);
    hold_devices(reader, false);
    pthread_mutex_lock(&reader->arena->lock);
    reader_unlock_release(reader);
    return NULL;
}

/*
 * Destroys a fetch without waiting for requests that hang: a thread does it when the devices have
 * answered. Until then it keeps the devices and a reference to the reader, since the devices may
 * write to the reader's memory. Takes the lock.
 */
static void leave_fetch(dlfs_reader *reader, struct fetch *fetch)
{
    if (fetch_ends(fetch)) {
        fetch_destroy(fetch);
        return;
    }
    hold_devices(reader, true);
    pthread_mutex_lock(&reader->arena->lock);
    reader->references++;
    pthread_mutex_unlock(&reader->arena->lock);
    pthread_t thread;
    if (thread_start(&thread, NULL, leave_thread, fetch) == 0) {
        (void)pthread_detach(thread);
    } /* else all of it stays for good, as a device may write to it */
}

static void leave_list(dlfs_reader *reader, struct fetch **list)
{
    while (*list != NULL) {
        struct fetch *next = (*list)->next;
        leave_fetch(reader, *list);
        *list = next;
    }
}

static void reader_free(dlfs_reader *reader)
{
    while (reader->idle_batches != NULL) {
        struct batch *next = reader->idle_batches->next;
        batch_free(reader->idle_batches);
        reader->idle_batches = next;
    }
    if (reader->arena != NULL) {
        arena_detach(reader);
        arena_unreference(reader->arena);
    }
    pthread_cond_destroy(&reader->prober.wake);
    pthread_cond_destroy(&reader->released);
    chunk_map_destroy(reader->map);
    free(reader->devices);
    free(reader->members);
    free(reader->member_stats);
    free(reader);
}

DLFS_API int dlfs_reader_create(const dlfs_reader_config *config, dlfs_reader **out)
{
    int code = config != NULL ? config_check(config) : -EINVAL;
    if (code < 0) {
        return code;
    }
    dlfs_reader *reader = calloc(1, sizeof(*reader));
    if (reader == NULL) {
        return -ENOMEM;
    }
    (void)condition_init(&reader->released);
    (void)condition_init(&reader->prober.wake);
    cache_init(&reader->cache);
    code = copy_config(reader, config);
    if (code < 0) {
        reader_free(reader);
        return code;
    }
    reader->references = 1;
    *out = reader;
    return 0;
}

void reader_unlock_release(dlfs_reader *reader)
{
    bool last = --reader->references == 0;
    pthread_mutex_unlock(&reader->arena->lock);
    if (last) {
        reader_free(reader);
    }
}

DLFS_API int dlfs_reader_destroy(dlfs_reader *reader)
{
    if (reader == NULL) {
        return 0;
    }
    pthread_mutex_lock(&reader->arena->lock);
    bool busy = reader->open_streams || reader->fetches_in_use;
    pthread_mutex_unlock(&reader->arena->lock);
    if (busy) {
        return -EBUSY;
    }
    prober_end(reader);
    leave_list(reader, &reader->idle_fetches);
    leave_list(reader, &reader->draining_fetches);
    for (uint32_t member = 0; member < reader->config.member_count; member++) {
        if (reader->devices[member] != NULL) {
            dlfs_queues_close(reader->devices[member]);
        }
    }
    pthread_mutex_lock(&reader->arena->lock);
    cache_close(reader);
    reader_unlock_release(reader);
    return 0;
}

/* ---- counters -------------------------------------------------------------------------------- */

DLFS_API void dlfs_reader_get_stats(dlfs_reader *reader, dlfs_reader_stats *stats)
{
    pthread_mutex_lock(&reader->arena->lock);
    *stats = reader->stats;
    stats->held_bytes = (uint64_t)reader->share.slots_used << reader->chunk_shift;
    pthread_mutex_unlock(&reader->arena->lock);
    stats->copy_ns = atomic_load_explicit(&reader->copy_ns, memory_order_relaxed);
}

DLFS_API int dlfs_reader_get_member_stats(dlfs_reader *reader, uint32_t member,
                                          dlfs_member_stats *stats)
{
    if (member >= reader->config.member_count) {
        return -EINVAL;
    }
    pthread_mutex_lock(&reader->arena->lock);
    *stats = reader->member_stats[member];
    pthread_mutex_unlock(&reader->arena->lock);
    dlfs_device *device = reader->devices[member];
    if (device != NULL) {
        stats->queue_pairs = atomic_load(&device->queue_count);
        stats->queue_pairs_max = dlfs_queues_max(device);
    }
    return 0;
}

DLFS_API int dlfs_reader_memory(dlfs_reader *reader, const void **base, uint64_t *bytes)
{
    if (reader == NULL) {
        return -EINVAL;
    }
    pthread_mutex_lock(&reader->arena->lock);
    int code = arena_attach(reader);
    pthread_mutex_unlock(&reader->arena->lock);
    if (code == 0) {
        *base = reader->arena->memory;
        *bytes = reader->arena->bytes;
    }
    return code;
}

DLFS_API uint64_t dlfs_reader_share_bytes(const dlfs_reader *reader)
{
    return (uint64_t)reader->slots_max << reader->chunk_shift;
}

DLFS_API int dlfs_reader_arena(dlfs_reader *reader, int *descriptor, uint64_t *bytes)
{
    const void *base;
    if (reader == NULL || !reader->arena->shared) {
        return -EINVAL;
    }
    int code = dlfs_reader_memory(reader, &base, bytes);
    if (code == 0) {
        *descriptor = reader->arena->descriptor;
    }
    return code;
}

/* ---- idle fetches ---------------------------------------------------------------------------- */

void reader_drain_fetches(dlfs_reader *reader)
{
    pthread_mutex_lock(&reader->arena->lock);
    struct fetch *fetch = reader->draining_fetches;
    reader->draining_fetches = NULL;
    for (struct fetch *each = fetch; each != NULL; each = each->next) {
        reader->idle_plans_bytes -= fetch_plan_bytes(each);
        reader->fetches_in_use++;
    }
    pthread_mutex_unlock(&reader->arena->lock);
    while (fetch != NULL) {
        struct fetch *next = fetch->next;
        fetch_step(fetch, 0);
        reader_return_fetch(reader, fetch);
        fetch = next;
    }
}

void reader_wait(struct fetch *fetch)
{
    fetch_step(fetch, fetch_is_stopped(fetch) ? 0 : -1);
    prober_begin(fetch->reader); /* the read may need the answer of a member that it found hung */
    if (fetch_queue_waiter(fetch) != NULL) { /* a read that was given up may have the queue pair */
        reader_drain_fetches(fetch->reader);
    }
}

int reader_take_fetch(dlfs_reader *reader, struct fetch **out)
{
    pthread_mutex_lock(&reader->arena->lock);
    struct fetch **list =
        reader->idle_fetches != NULL ? &reader->idle_fetches : &reader->draining_fetches;
    struct fetch *fetch = *list;
    if (fetch != NULL) {
        *list = fetch->next;
        reader->idle_plans_bytes -= fetch_plan_bytes(fetch);
    }
    reader->fetches_in_use++;
    bool draining = reader->draining_fetches != NULL;
    pthread_mutex_unlock(&reader->arena->lock);
    if (draining) {
        reader_drain_fetches(reader);
    }
    if (fetch != NULL && fetch->abandoned_requests > 0) {
        fetch_step(fetch, 0);
    }
    int code = fetch != NULL ? 0 : fetch_create(reader, &fetch);
    if (code == 0) {
        fetch->deadline_ns = UINT64_MAX;
        fetch->slow_bytes = 0;
        fetch->redirected = 0;
        fetch->redirect_rounds = 0;
        *out = fetch;
        return 0;
    }
    pthread_mutex_lock(&reader->arena->lock);
    reader->fetches_in_use--;
    pthread_mutex_unlock(&reader->arena->lock);
    return code;
}

/* Adds a structure of counters, all of 64 bits, to another one, and sets them to 0. */
static void add_counters(void *to, void *from, size_t bytes)
{
    uint64_t *total = to;
    uint64_t *part = from;
    for (size_t i = 0; i < bytes / sizeof(*total); i++) {
        total[i] += part[i];
        part[i] = 0;
    }
}

void reader_fold_stats(dlfs_reader *reader, struct fetch *fetch)
{
    add_counters(&reader->stats, &fetch->stats, sizeof(fetch->stats));
    for (uint32_t member = 0; member < reader->config.member_count; member++) {
        dlfs_member_stats *part = &fetch->members[member].stats;
        if (part->reads > 0) {
            add_counters(&reader->member_stats[member], part, sizeof(*part));
        }
    }
}

void reader_return_fetch(dlfs_reader *reader, struct fetch *fetch)
{
    prober_begin(reader);
    fetch_release_queues(fetch);
    fetch->stop = NULL; /* the caller's, while other threads may still drain the fetch */
    fetch->closing = NULL;
    pthread_mutex_lock(&reader->arena->lock);
    reader_fold_stats(reader, fetch);
    struct fetch **list =
        fetch->abandoned_requests > 0 ? &reader->draining_fetches : &reader->idle_fetches;
    if (reader->idle_plans_bytes + fetch_plan_bytes(fetch) > IDLE_PLANS_BYTES_MAX) {
        fetch_free_plan(fetch);
    }
    reader->idle_plans_bytes += fetch_plan_bytes(fetch);
    fetch->next = *list;
    *list = fetch;
    reader->fetches_in_use--;
    pthread_mutex_unlock(&reader->arena->lock);
}

/* ---- verification ---------------------------------------------------------------------------- */

const uint32_t *reader_part_checksums(const dlfs_reader *reader, const struct location *location)
{
    uint64_t count;
    const uint32_t *checksums = dlfs_directory_parts(reader->config.directory, &count);
    uint64_t last = (location->address + location->length - 1) >> reader->chunk_shift;
    bool whole = (reader->config.flags & DLFS_READER_PARTS) == 0; /* else fields, of any address */
    bool starts_chunk = (location->address & (reader->config.chunk_bytes - 1)) == 0;
    bool found = whole && starts_chunk && location->length > reader->config.chunk_bytes;
    return found && last < count ? checksums : NULL;
}

uint64_t reader_bad_part(const dlfs_reader *reader, const struct location *location,
                         const uint8_t *sample, uint32_t *crc_got)
{
    const uint32_t *checksums = reader_part_checksums(reader, location);
    for (uint64_t at = 0; checksums != NULL && at < location->length;
         at += reader->config.chunk_bytes) {
        uint64_t address = location->address + at;
        uint32_t crc = dlfs_crc32c(0, sample + at, location_part_length(reader, location, address));
        if (crc != checksums[address >> reader->chunk_shift]) {
            *crc_got = crc;
            return address;
        }
    }
    return UINT64_MAX;
}

struct reader_geometry reader_geometry(const dlfs_reader *reader)
{
    return (struct reader_geometry){
        .directory = reader->config.directory,
        .sample_count = reader->sample_count,
        .arena_bytes = reader->arena->bytes,
        .slot_count = reader->arena->slot_count,
        .chunk_bytes = reader->config.chunk_bytes,
        .chunk_shift = reader->chunk_shift,
    };
}

uint32_t reader_slots_max(const dlfs_reader *reader)
{
    return reader->slots_max;
}

void reader_count_hits(dlfs_reader *reader, uint64_t samples, uint64_t bytes)
{
    pthread_mutex_lock(&reader->arena->lock);
    reader->stats.samples += samples;
    reader->stats.cache_hits += samples;
    reader->stats.sample_bytes += bytes;
    pthread_mutex_unlock(&reader->arena->lock);
}

dlfs_failure reader_failure(const dlfs_reader *reader, uint64_t index, int code, uint32_t crc_got,
                            uint64_t bad_address)
{
    struct location location;
    dlfs_failure failure = {.index = index, .code = code, .crc_got = crc_got};
    if (reader_locate(reader, index, &location) && location.chunk < reader->chunk_count) {
        bool inside =
            bad_address > location.address && bad_address - location.address < location.length;
        struct member_location first =
            member_locate(reader, inside ? bad_address : location.address, 0);
        failure.member = first.member;
        failure.offset_bytes = first.offset_bytes;
    }
    failure.crc_expected = location.crc32c;
    bool in_part = code == DLFS_E_CHECKSUM && bad_address >= location.address &&
                   bad_address - location.address < location.length;
    const uint32_t *checksums = in_part ? reader_part_checksums(reader, &location) : NULL;
    if (checksums != NULL) {
        failure.crc_expected = checksums[bad_address >> reader->chunk_shift];
        failure.part_offset_bytes = bad_address - location.address;
        failure.part_length_bytes = location_part_length(reader, &location, bad_address);
    }
    return failure;
}

/* Adds a sample that failed; those added before lie at lower addresses. */
static int note_bad(struct bad_samples **bad, uint64_t address)
{
    struct bad_samples *noted = *bad;
    uint64_t count = noted != NULL ? noted->count : 0;
    if (noted == NULL || count == noted->capacity) {
        uint64_t capacity = count ? 2 * count : 8;
        noted = realloc(noted, sizeof(*noted) + capacity * sizeof(noted->addresses[0]));
        if (noted == NULL) {
            return -ENOMEM;
        }
        noted->capacity = capacity;
        *bad = noted;
    }
    noted->addresses[count] = address;
    noted->count = count + 1;
    return 0;
}

/*
 * Verifies the samples of these indices that lie completely in a span, but for misses that are
 * known to be sound. Moves *known behind those that it has passed.
 */
static int verify_samples(const dlfs_reader *reader, const struct span *span,
                          const uint64_t *indices, uint64_t count, struct known_misses *known,
                          struct bad_samples **bad)
{
    int code = 0;
    uint64_t end = span->address + span->length;
    for (uint64_t i = 0; i < count; i++) {
        __builtin_prefetch(&reader->locations[indices[i]]);
    }
    for (uint64_t i = 0; code == 0 && i < count; i++) {
        struct location location;
        if (!reader_locate(reader, indices[i], &location) || location.length == 0 ||
            location.address < span->address || location.address + location.length > end) {
            continue;
        }
        while (known->count > 0 && known->first->address < location.address) {
            known->first++;
            known->count--;
        }
        if (known->count > 0 && known->first->address == location.address &&
            known->first->length == location.length && known->first->crc32c == location.crc32c) {
            continue;
        }
        const uint8_t *bytes = span->memory + (location.address - span->address);
        if (dlfs_crc32c(0, bytes, location.length) != location.crc32c) {
            code = note_bad(bad, location.address);
        }
    }
    return code;
}

int reader_verify_span(const dlfs_reader *reader, const struct span *span,
                       const struct known_misses *sound, struct bad_samples **bad)
{
    const dlfs_directory *directory = reader->config.directory;
    uint64_t indices[ORDER_STEP];
    uint64_t rank = dlfs_directory_rank_at(directory, span->address);
    uint64_t end = dlfs_directory_rank_at(directory, span->address + span->length);
    int code = 0;
    struct known_misses known = sound != NULL ? *sound : (struct known_misses){0};
    *bad = NULL;
    while (code == 0 && rank < end) {
        uint64_t count = end - rank < ORDER_STEP ? end - rank : ORDER_STEP;
        code = dlfs_directory_order(directory, rank, count, indices);
        if (code == 0) {
            code = verify_samples(reader, span, indices, count, &known, bad);
        }
        rank += count;
    }
    if (code == 0) {
        return 0;
    }
    free(*bad);
    *bad = NULL;
    return code;
}
