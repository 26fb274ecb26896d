/*
 * Finds the samples of a batch that are in memory, and takes memory for the others: slots of the
 * arena, or private memory. If the whole dataset fits in memory, spans are widened to whole chunks,
 * which stay, as far as memory was touched for them. If other batches pin the arena, the batch gets
 * private memory, so that a read never waits for a release.
 */
#include <errno.h>
#include <string.h>

#include "reader/read_batch.h"

#define LOOK_UP_MAX 1024u /* samples that are looked up under one hold of the lock */

int read_fail(struct read *read, uint64_t position, int code, uint32_t crc_got,
              uint64_t bad_address)
{
    dlfs_failure failure =
        reader_failure(read->reader, read->batch->indices[position], code, crc_got, bad_address);
    failure.position = position;
    return batch_fail(read->batch, &failure);
}

/* ---- look up --------------------------------------------------------------------------------- */

/* Finds the locations of samples, and takes all of them as misses for now. */
static int locate(struct read *read, uint64_t first, uint64_t end)
{
    struct batch *batch = read->batch;
    for (uint64_t i = first; i < end; i++) {
        __builtin_prefetch(&read->reader->locations[batch->indices[i]]);
    }
    for (uint64_t i = first; i < end; i++) {
        struct location location;
        batch->offsets[i] = 0;
        batch->lengths[i] = 0;
        if (reader_locate(read->reader, batch->indices[i], &location)) {
            batch->lengths[i] = (int64_t)location.length;
            read->misses[i] =
                (struct miss){location.address, location.length, i, location.crc32c, 0};
        } else if (read_fail(read, i, DLFS_E_FORMAT, 0, 0) < 0) {
            return -ENOMEM;
        }
    }
    return 0;
}

/*
 * Divides located samples into hits, which are referenced, and misses. The lock is held; locate()
 * has loaded the locations into the processor's caches before.
 */
static void look_up(struct read *read, uint64_t first, uint64_t end)
{
    dlfs_reader *reader = read->reader;
    struct batch *batch = read->batch;
    const struct cache *cache = &reader->cache;
    uint64_t cached = cache->slots < cache->slots_max ? cache->slots : cache->slots_max;
    read->whole_chunks = reader->dataset_fits && cached + reader->chunk_count <= reader->slots_max;
    for (uint64_t i = first; i < end; i++) {
        if (batch->lengths[i] <= 0) {
            continue;
        }
        struct miss miss = read->misses[i];
        struct location location = {miss.address, miss.length, miss.address >> reader->chunk_shift,
                                    miss.crc32c};
        uint64_t offset;
        if (arena_look_up(reader, batch->indices[i], &location, &offset)) {
            batch->offsets[i] = (int64_t)offset;
            read->hit_bytes += location.length;
            read->fetch->stats.cache_hits++;
        } else {
            batch->offsets[i] = MISSING;
            read->misses[read->miss_count++] = miss;
        }
    }
}

int read_find(struct read *read)
{
    dlfs_reader *reader = read->reader;
    uint64_t count = read->batch->public.count;
    uint64_t found = 0; /* samples that were looked up: the hits hold references */
    int code = 0;
    do {
        uint64_t end = count - found < LOOK_UP_MAX ? count : found + LOOK_UP_MAX;
        code = locate(read, found, end);
        if (code < 0) {
            break;
        }
        pthread_mutex_lock(&reader->arena->lock);
        code = arena_attach(reader);
        if (code == 0) {
            look_up(read, found, end);
            found = end;
        }
        pthread_mutex_unlock(&reader->arena->lock);
    } while (code == 0 && found < count);
    if (code < 0) {
        read->batch->public.count = found;
    }
    return code;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Places the spans in slots of the arena. Takes no slot if there are not enough. The lock is held.
 */
static bool take_slots(struct read *read)
{
    dlfs_reader *reader = read->reader;
    uint32_t chunk_bytes = reader->config.chunk_bytes;
    uint64_t used = chunk_bytes;
    uint32_t open = SLOT_NONE;
    uint64_t taken;
    for (taken = 0; taken < read->span_count; taken++) {
        struct plan_span *span = &read->spans[taken];
        if (span->length <= chunk_bytes - used) {
            arena_reference(reader, open);
        } else {
            uint64_t run = (span->length + chunk_bytes - 1) >> reader->chunk_shift;
            open = run > reader->slots_max ? SLOT_NONE : arena_take(reader, (uint32_t)run, true);
            if (open == SLOT_NONE) {
                break;
            }
            used = 0;
        }
        span->slot = open;
        span->memory_offset = ((uint64_t)open << reader->chunk_shift) + used;
        used = span->whole_chunks || span->length > chunk_bytes ? chunk_bytes : used + span->length;
    }
    if (taken == read->span_count) {
        return true;
    }
    while (taken-- > 0) {
        arena_release(reader, read->spans[taken].slot);
    }
    return false;
}

/* Moves the hits of a batch into its private memory, from offset `at` on. */
static void move_hits(struct read *read, struct private_memory *private_memory, uint64_t at)
{
    dlfs_reader *reader = read->reader;
    struct batch *batch = read->batch;
    for (uint64_t i = 0; i < batch->public.count; i++) {
        if (batch->lengths[i] <= 0 || batch->offsets[i] == MISSING) {
            continue;
        }
        uint64_t offset = (uint64_t)batch->offsets[i];
        memcpy(private_memory->base + at, reader->arena->memory + offset,
               (size_t)batch->lengths[i]);
        batch->offsets[i] = (int64_t)at;
        at += (uint64_t)batch->lengths[i];
        pthread_mutex_lock(&reader->arena->lock);
        arena_release(reader, slot_of(reader, offset));
        pthread_mutex_unlock(&reader->arena->lock);
    }
}

/* Gives the batch private memory for just the samples that it needs; none of it stays cached. */
static int take_private_memory(struct read *read)
{
    uint64_t bytes = 0;
    bool fits = true;
    read->span_count = plan_merge(read->reader, read->misses, read->miss_count, read->spans);
    for (uint64_t i = 0; i < read->span_count; i++) {
        read->spans[i].memory_offset = bytes;
        fits &= !__builtin_add_overflow(bytes, read->spans[i].length, &bytes);
    }
    fits &= bytes < SIZE_MAX / 2 && read->hit_bytes < SIZE_MAX / 2;
    if (!fits) {
        return -ENOMEM;
    }
    if (bytes + read->hit_bytes > read->terms->limit.private_bytes_max) {
        return DLFS_E_LIMIT;
    }
    struct private_memory *private_memory;
    int code = private_memory_take(read->reader, bytes + read->hit_bytes + 1,
                                   read->terms->limit.share, &private_memory);
    if (code < 0) {
        return code;
    }
    move_hits(read, private_memory, bytes);
    read->batch->private_memory = private_memory;
    read->fetch->stats.private_batches++;
    return 0;
}

int read_place(struct read *read)
{
    dlfs_reader *reader = read->reader;
    plan_sort(read->misses, read->fetch->sort_scratch, read->miss_count);
    if (read->whole_chunks) {
        uint64_t slots = 0;
        uint64_t all = plan_widen(reader, read->misses, read->miss_count, read->spans, &slots);
        read->span_count = plan_narrow(reader, read->misses, read->miss_count, read->spans, all,
                                       fill_admits(reader, slots));
    } else {
        read->span_count = plan_merge(reader, read->misses, read->miss_count, read->spans);
    }
    pthread_mutex_lock(&reader->arena->lock);
    bool taken = take_slots(read);
    for (uint64_t i = 0; taken && i < read->span_count; i++) {
        struct plan_span *span = &read->spans[i];
        uint64_t chunk = span->address >> reader->chunk_shift;
        span->whole_chunks = span->whole_chunks && arena_find(reader, chunk) == SLOT_NONE;
        if (span->whole_chunks) {
            arena_begin_load(reader, span->slot, chunk, NULL);
        }
    }
    pthread_mutex_unlock(&reader->arena->lock);
    return taken ? 0 : take_private_memory(read);
}
