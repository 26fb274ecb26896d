/*
 * The chunk copy plan: reads a whole chunk for the sample that is needed next, and copies further
 * samples out of it that the look-ahead needs too. The look-ahead is sized so that on average the
 * copies fill the memory. If they do not fit, the samples needed furthest in the future are evicted
 * first and read again later.
 *
 * Copies are packed by the time of their use: positions are divided into buckets, and a slot of the
 * arena holds samples of one bucket only. So a slot is free again when its bucket has passed, and
 * memory never fragments.
 *
 * A chunk of k samples yields about 1 + k * (look-ahead / samples) of them a read, against one for
 * reading samples one by one; stream/plan_choice.c compares the two. A chunk's samples are used up
 * evenly between two reads of it, so about half of the samples ahead are in memory, and the
 * look-ahead may be twice what fits.
 *
 * Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
 * Systems Journal 5(2), 1966: evict what is needed furthest in the future, which is known from the
 * order.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "stream/state.h"

#define LOADING_MAX 16u /* chunks being read at a time */
#define BUCKETS_MIN 4u
#define OVERHEAD_BYTES 48u /* of a sample in the look-ahead: its entry and its place in the map */
#define AHEAD_MAX (UINT64_C(1) << 28)
#define ORDER_STEP 256u /* samples whose indices are looked up at a time */
#define SAMPLE_ALIGN 8u

/* ---- the map from index to entry ------------------------------------------------------------- */

static uint64_t map_home(const struct chunk_copy *chunk_copy, uint64_t index)
{
    return (index * UINT64_C(0x9E3779B97F4A7C15) >> 20) & chunk_copy->map_mask;
}

/* Finds where an index is in the map, or the empty place where it belongs. */
static uint64_t map_find(const dlfs_stream *stream, uint64_t index)
{
    const struct chunk_copy *chunk_copy = &stream->chunk_copy;
    uint64_t at = map_home(chunk_copy, index);
    while (chunk_copy->map[at] != 0 && stream->ring[chunk_copy->map[at] - 1].index != index) {
        at = (at + 1) & chunk_copy->map_mask;
    }
    return at;
}

void chunk_copy_add_entry(dlfs_stream *stream, uint64_t position)
{
    uint64_t at = map_find(stream, entry_at(stream, position)->index);
    if (stream->chunk_copy.map[at] == 0) {
        stream->chunk_copy.map[at] = (uint32_t)(position & stream->mask) + 1;
    }
}

/* Moves later entries of the chain into the gap, so that a search finds them without it. */
void chunk_copy_remove_entry(dlfs_stream *stream, uint64_t position)
{
    struct chunk_copy *chunk_copy = &stream->chunk_copy;
    uint64_t at = map_find(stream, entry_at(stream, position)->index);
    if (chunk_copy->map[at] != (uint32_t)(position & stream->mask) + 1) {
        return;
    }
    uint64_t gap = at;
    for (;;) {
        at = (at + 1) & chunk_copy->map_mask;
        if (chunk_copy->map[at] == 0) {
            break;
        }
        uint64_t home = map_home(chunk_copy, stream->ring[chunk_copy->map[at] - 1].index);
        if (((at - home) & chunk_copy->map_mask) >= ((at - gap) & chunk_copy->map_mask)) {
            chunk_copy->map[gap] = chunk_copy->map[at];
            gap = at;
        }
    }
    chunk_copy->map[gap] = 0;
}

/* ---- create, destroy ------------------------------------------------------------------------- */

/* The division of the memory that the cache leaves. */
struct division {
    uint32_t loading;   /* slots for chunks being read */
    uint32_t buckets;   /* number of buckets in the look-ahead */
    uint64_t lookahead; /* positions */
};

/*
 * Divides the slots that the cache leaves. Just before the nearest of k buckets has passed, it and
 * the filled parts of the others, 1 - 1/2k, 1 - 3/2k, ... of each, take 1/k + 1/2 of the
 * look-ahead's bytes. The newest slot of each bucket is half empty. More buckets waste less of the
 * former and more of the latter.
 */
static struct division divide(const dlfs_reader *reader, uint64_t mean_bytes, uint32_t cached_slots)
{
    uint32_t slots = subtract_or_zero(reader->slots_max, cached_slots);
    uint32_t loading = slots / 8 < LOADING_MAX ? slots / 8 : LOADING_MAX;
    struct division division = {.loading = loading ? loading : 1, .buckets = BUCKETS_MIN};
    while (division.buckets < COPY_BUCKETS - 2 &&
           (division.buckets + 1) * (division.buckets + 1) <= slots + slots / 4) {
        division.buckets++;
    }
    uint64_t reserved = division.loading + (division.buckets + 2) / 2;
    uint64_t claimable_slots = slots > reserved ? slots - reserved : 1;
    uint64_t fits = (claimable_slots << reader->chunk_shift) / (mean_bytes + OVERHEAD_BYTES);
    if (cached_slots < reader->chunk_count) { /* samples of cached chunks need no copy */
        fits = fits * reader->chunk_count / (reader->chunk_count - cached_slots);
    }
    uint64_t lookahead = fits * 2 * division.buckets / (division.buckets + 2);
    lookahead = lookahead < AHEAD_MAX ? lookahead : AHEAD_MAX;
    division.lookahead = lookahead > division.buckets ? lookahead : division.buckets;
    return division;
}

uint64_t chunk_copy_lookahead(const dlfs_reader *reader, uint64_t mean_bytes, uint32_t cached_slots)
{
    return divide(reader, mean_bytes, cached_slots).lookahead;
}

int chunk_copy_create(dlfs_stream *stream, uint64_t mean_bytes)
{
    struct chunk_copy *chunk_copy = &stream->chunk_copy;
    struct division division = divide(stream->reader, mean_bytes, stream->cached_slots);
    chunk_copy->loading_max = division.loading;
    stream->lookahead = division.lookahead;
    if (stream->lookahead > stream->config.count && stream->config.count > 0) {
        stream->lookahead = stream->config.count;
    }
    chunk_copy->bucket_span = stream->lookahead / division.buckets + 1;
    for (uint32_t i = 0; i < COPY_BUCKETS; i++) {
        chunk_copy->buckets[i].slot = SLOT_NONE;
    }
    uint64_t size = 4096;
    while (size < 4 * stream->lookahead) {
        size *= 2;
    }
    chunk_copy->map_mask = size - 1;
    chunk_copy->map = calloc(size, sizeof(*chunk_copy->map));
    return chunk_copy->map != NULL ? 0 : -ENOMEM;
}

/* Releases the slots of a bucket. */
static void bucket_close(dlfs_stream *stream, struct bucket *bucket)
{
    uint32_t next;
    for (uint32_t slot = bucket->slot; slot != SLOT_NONE; slot = next) {
        next = stream->reader->arena->slots[slot].next;
        arena_release(stream->reader, slot);
    }
    bucket->slot = SLOT_NONE;
}

void chunk_copy_destroy(dlfs_stream *stream)
{
    for (uint32_t i = 0; stream->chunk_copy.map != NULL && i < COPY_BUCKETS; i++) {
        bucket_close(stream, &stream->chunk_copy.buckets[i]);
    }
    free(stream->chunk_copy.map);
    free(stream->chunk_copy.copies);
}

void chunk_copy_release_passed(dlfs_stream *stream)
{
    for (uint32_t i = 0; i < COPY_BUCKETS; i++) {
        struct bucket *bucket = &stream->chunk_copy.buckets[i];
        if (bucket->slot != SLOT_NONE &&
            (bucket->number + 1) * stream->chunk_copy.bucket_span <= stream->head) {
            bucket_close(stream, bucket);
        }
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

/*
 * Releases the newest slot of the bucket that is needed furthest in the future, if that is after
 * `position`. Returns false if there is none.
 */
static bool evict_furthest(dlfs_stream *stream, uint64_t position)
{
    struct chunk_copy *chunk_copy = &stream->chunk_copy;
    struct bucket *furthest = NULL;
    for (uint32_t i = 0; i < COPY_BUCKETS; i++) {
        struct bucket *bucket = &chunk_copy->buckets[i];
        if (bucket->slot != SLOT_NONE && (furthest == NULL || bucket->number > furthest->number)) {
            furthest = bucket;
        }
    }
    if (furthest == NULL) {
        return false;
    }
    uint64_t first = furthest->number * chunk_copy->bucket_span;
    uint64_t end = first + chunk_copy->bucket_span < stream->filled
                       ? first + chunk_copy->bucket_span
                       : stream->filled;
    if (first <= position || first < stream->planned || first < stream->head + stream->awaited) {
        return false;
    }
    uint32_t slot = furthest->slot;
    for (uint64_t at = first; at < end; at++) {
        struct entry *entry = entry_at(stream, at);
        if (entry->state == ENTRY_READY && entry->in_bucket && entry->length > 0 &&
            slot_of(stream->reader, entry->offset) == slot) {
            arena_release(stream->reader, slot);
            entry->state = ENTRY_NEW;
        }
    }
    furthest->slot = stream->reader->arena->slots[slot].next;
    furthest->used = stream->reader->config.chunk_bytes;
    arena_release(stream->reader, slot);
    return true;
}

/* Takes a slot, if necessary by evicting samples that are needed after `position`. */
static uint32_t take_slot(dlfs_stream *stream, uint64_t position)
{
    uint32_t slot = arena_take(stream->reader, 1, false);
    while (slot == SLOT_NONE && evict_furthest(stream, position)) {
        slot = arena_take(stream->reader, 1, false);
    }
    return slot;
}

/*
 * Finds room in the bucket of a position, with a reference for the sample. Returns false if there
 * is none.
 */
static bool bucket_reserve(dlfs_stream *stream, uint64_t position, uint64_t length,
                           uint64_t *offset)
{
    dlfs_reader *reader = stream->reader;
    uint64_t number = position / stream->chunk_copy.bucket_span;
    struct bucket *bucket = &stream->chunk_copy.buckets[number % COPY_BUCKETS];
    if (bucket->slot == SLOT_NONE) {
        *bucket = (struct bucket){number, SLOT_NONE, reader->config.chunk_bytes};
    }
    if (bucket->number != number) {
        return false;
    }
    if (length > reader->config.chunk_bytes - bucket->used) {
        uint32_t slot = take_slot(stream, position);
        if (slot == SLOT_NONE) {
            return false;
        }
        reader->arena->slots[slot].next = bucket->slot;
        bucket->slot = slot;
        bucket->used = 0;
    }
    *offset = ((uint64_t)bucket->slot << reader->chunk_shift) + bucket->used;
    uint64_t used = bucket->used + ((length + SAMPLE_ALIGN - 1) & ~(uint64_t)(SAMPLE_ALIGN - 1));
    bucket->used = used < reader->config.chunk_bytes ? (uint32_t)used : reader->config.chunk_bytes;
    arena_reference(reader, bucket->slot);
    return true;
}

/* ---- planning -------------------------------------------------------------------------------- */

bool chunk_copy_plan(dlfs_stream *stream, uint64_t position, const struct location *location)
{
    dlfs_reader *reader = stream->reader;
    struct chunk_copy *chunk_copy = &stream->chunk_copy;
    uint32_t number = arena_find(reader, location->chunk);
    if (number != SLOT_NONE) {
        const struct slot *slot = &reader->arena->slots[number];
        if (slot->state != SLOT_LOADING || slot->owner != stream) {
            return load_alone(stream, position, location);
        }
        entry_wait(stream, position, number);
        return true;
    }
    /* Chunks are read only for samples needed soon. Later samples are copied with those. */
    uint64_t soon =
        stream->lookahead / 4 > stream->awaited ? stream->lookahead / 4 : stream->awaited;
    if (position >= stream->head + soon || chunk_copy->loading == chunk_copy->loading_max ||
        stream->fetch->unused_spans == SLOT_NONE) {
        return false;
    }
    uint32_t taken = take_slot(stream, position);
    if (taken == SLOT_NONE) {
        return false;
    }
    struct span *span = span_take(stream->fetch);
    span->address = location->chunk << reader->chunk_shift;
    span->length = reader_chunk_end(reader, location->chunk) - span->address;
    span->tag = (uint32_t)(position & stream->mask);
    arena_begin_load(reader, taken, location->chunk, stream);
    entry_wait(stream, position, taken);
    chunk_copy->loading++;
    stream_start(stream, span, KIND_COPY, taken, 0);
    return true;
}

/* ---- a chunk was read ------------------------------------------------------------------------ */

static bool reserve_copies(struct chunk_copy *chunk_copy, uint64_t count)
{
    if (count <= chunk_copy->copy_capacity) {
        return true;
    }
    struct sample_copy *copies = realloc(chunk_copy->copies, count * sizeof(*copies));
    if (copies == NULL) {
        return false;
    }
    chunk_copy->copies = copies;
    chunk_copy->copy_capacity = count;
    return true;
}

/* Finds the samples of the chunk that the look-ahead may need. Returns their number. */
static uint64_t find_copies(dlfs_stream *stream, const struct span *span)
{
    const dlfs_reader *reader = stream->reader;
    const dlfs_directory *directory = reader->config.directory;
    struct chunk_copy *chunk_copy = &stream->chunk_copy;
    uint64_t indices[ORDER_STEP];
    uint64_t rank = dlfs_directory_rank_at(directory, span->address);
    uint64_t end = dlfs_directory_rank_at(directory, span->address + span->length);
    uint64_t found = 0;
    while (rank < end) {
        uint64_t count = end - rank < ORDER_STEP ? end - rank : ORDER_STEP;
        if (!reserve_copies(chunk_copy, found + count) ||
            dlfs_directory_order(directory, rank, count, indices) < 0) {
            break;
        }
        for (uint64_t i = 0; i < count; i++) {
            __builtin_prefetch(&chunk_copy->map[map_home(chunk_copy, indices[i])]);
            __builtin_prefetch(&reader->locations[indices[i]]);
        }
        for (uint64_t i = 0; i < count; i++) {
            uint32_t ring_index = chunk_copy->map[map_find(stream, indices[i])];
            struct location location;
            if (ring_index == 0 || !reader_locate(reader, indices[i], &location) ||
                location.length == 0 || location.address < span->address ||
                location.address + location.length > span->address + span->length) {
                continue;
            }
            chunk_copy->copies[found++] = (struct sample_copy){ring_index - 1,
                                                               location.crc32c,
                                                               location.address - span->address,
                                                               location.length,
                                                               0,
                                                               0};
        }
        rank += count;
    }
    return found;
}

/* Finds memory for a copy: in its bucket, or in the chunk itself if that was read for this sample.
 */
static bool place_copy(dlfs_stream *stream, const struct span *span,
                       struct sample_copy *sample_copy)
{
    if (bucket_reserve(stream, sample_copy->position, sample_copy->length, &sample_copy->offset)) {
        return true;
    }
    if (stream->ring[sample_copy->entry].state != ENTRY_WAITING) {
        return false;
    }
    sample_copy->offset =
        (uint64_t)(span->memory - stream->reader->arena->memory) + sample_copy->start;
    arena_reference(stream->reader, span->slot);
    return true;
}

/*
 * Returns the position up to which samples of a chunk are copied. At the beginning of an epoch all
 * chunks are read for the first time. If all kept as many samples, all would run out at the same
 * time, again and again, and memory would be full and empty by turns. So the first time each chunk
 * gets a limit of its own.
 */
static uint64_t copy_limit(const dlfs_stream *stream, const struct span *span)
{
    uint64_t chunk = span->address >> stream->reader->chunk_shift;
    uint64_t share = (chunk * UINT64_C(0x9E3779B97F4A7C15)) >> 32;
    uint64_t limit = (stream->lookahead * share) >> 32;
    return entry_position(stream, span->tag) < limit ? limit : stream->filled;
}

static int compare_positions(const void *one, const void *other)
{
    uint64_t first = ((const struct sample_copy *)one)->position;
    uint64_t second = ((const struct sample_copy *)other)->position;
    return (first > second) - (first < second);
}

/*
 * Selects the copies that are still needed, and sorts them by position, so that no copy takes the
 * memory of one that is needed earlier. The lock is held.
 */
static uint64_t sort_needed(const dlfs_stream *stream, const struct span *span, uint64_t count)
{
    struct sample_copy *copies = stream->chunk_copy.copies;
    uint64_t limit = copy_limit(stream, span);
    uint64_t needed = 0;
    for (uint64_t i = 0; i < count; i++) {
        struct sample_copy sample_copy = copies[i];
        const struct entry *entry = &stream->ring[sample_copy.entry];
        sample_copy.position = entry_position(stream, sample_copy.entry);
        if (sample_copy.position < stream->filled && !entry->alone &&
            ((entry->state == ENTRY_NEW && sample_copy.position < limit) ||
             entry->state == ENTRY_WAITING)) {
            copies[needed++] = sample_copy;
        }
    }
    if (needed > 0) { /* the array may not exist else */
        qsort(copies, needed, sizeof(*copies), compare_positions);
    }
    return needed;
}

/* Finds memory for the copies that are still needed, and drops the others. The lock is held. */
static uint64_t place_copies(dlfs_stream *stream, const struct span *span, uint64_t count)
{
    struct sample_copy *copies = stream->chunk_copy.copies;
    uint64_t needed = sort_needed(stream, span, count);
    uint64_t placed = 0;
    for (uint64_t i = 0; i < needed; i++) {
        struct sample_copy sample_copy = copies[i];
        bool again = stream->ring[sample_copy.entry].state ==
                     ENTRY_COPIED; /* the order has the sample twice */
        if (!again && place_copy(stream, span, &sample_copy)) {
            stream->ring[sample_copy.entry].state = ENTRY_COPIED;
            copies[placed++] = sample_copy;
        }
    }
    return placed;
}

/* Ends the entries that waited for the chunk and were not copied. */
static void end_waiters(dlfs_stream *stream, const struct span *span)
{
    uint32_t next;
    for (uint32_t at = stream->reader->arena->slots[span->slot].waiters; at != RING_NONE;
         at = next) {
        next = stream->ring[at].next;
        if (stream->ring[at].state == ENTRY_WAITING) {
            entry_read_alone(stream, at, span);
        }
    }
}

/* Caches the chunk as a whole if the cache admits it: its samples are used where they lie. */
static bool finish_cached(dlfs_stream *stream, const struct span *span)
{
    dlfs_reader *reader = stream->reader;
    pthread_mutex_lock(&reader->arena->lock);
    bool admitted =
        span->code == 0 && cache_admits_chunk(reader, span->address >> reader->chunk_shift, 1);
    pthread_mutex_unlock(&reader->arena->lock);
    if (!admitted) {
        return false;
    }
    struct bad_samples *bad;
    bool valid = reader_verify_span(reader, span, NULL, &bad) == 0;
    pthread_mutex_lock(&reader->arena->lock);
    for (uint32_t at = reader->arena->slots[span->slot].waiters; at != RING_NONE;
         at = stream->ring[at].next) {
        arena_reference(reader, span->slot);
    }
    chunks_end_load(stream, span, valid, bad);
    stream->chunk_copy.loading--;
    pthread_mutex_unlock(&reader->arena->lock);
    return true;
}

void chunk_copy_finish(dlfs_stream *stream, struct span *span)
{
    dlfs_reader *reader = stream->reader;
    if (finish_cached(stream, span)) {
        return;
    }
    uint64_t count = span->code == 0 ? find_copies(stream, span) : 0;
    struct sample_copy *copies = stream->chunk_copy.copies;

    pthread_mutex_lock(&reader->arena->lock);
    count = place_copies(stream, span, count);
    pthread_mutex_unlock(&reader->arena->lock);

    for (uint64_t i = 0; i < count; i++) {
        struct sample_copy *sample_copy = &copies[i];
        uint8_t *source = span->memory + sample_copy->start;
        uint8_t *target = reader->arena->memory + sample_copy->offset;
        uint32_t crc = target == source ? dlfs_crc32c(0, source, sample_copy->length)
                                        : dlfs_crc32c_copy(0, target, source, sample_copy->length);
        if (crc != sample_copy->crc32c) {
            sample_copy->length = 0;
        }
    }

    pthread_mutex_lock(&reader->arena->lock);
    for (uint64_t i = 0; i < count; i++) {
        struct entry *entry = &stream->ring[copies[i].entry];
        if (copies[i].length > 0) {
            entry_ready(entry, copies[i].offset, copies[i].length);
            entry->in_bucket = slot_of(reader, copies[i].offset) != span->slot;
        } else {
            stream->fetch->stats.checksum_errors++;
            arena_release(reader, slot_of(reader, copies[i].offset));
            entry_again(stream, entry_position(stream, copies[i].entry), true);
        }
    }
    end_waiters(stream, span);
    arena_end_load(reader, span->slot, false, NULL);
    arena_release(reader, span->slot);
    stream->chunk_copy.loading--;
    pthread_mutex_unlock(&reader->arena->lock);
}
