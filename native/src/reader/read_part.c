/*
 * Reads a range of a sample and gives its bytes to a function of the caller.
 *
 * A sample of up to a chunk is read as in a batch. A larger one has a checksum for each of its
 * parts, which are the chunks that it fills. The parts that the range touches are read into slots
 * of the arena, verified and kept there like any chunk, a window of them at a time. A part that
 * another call is reading is waited for; where the arena has no slot, the window has memory of its
 * own.
 */
#include "dlfs/part.h"

#include <errno.h>
#include <string.h>

#include "reader/internal.h"

#define WINDOW_BYTES (UINT64_C(8) << 20)
#define WINDOW_PARTS_MAX 64u
#define SLOTS_SHARE 4u              /* of the arena that one window takes: a quarter */
#define WAIT_NS UINT64_C(100000000) /* between two looks at the deadline and *stop */

/*
 * The owners of chunks that this file loads: calls wait for each other's only.
 * One load has another owner than the next ones, so that a call sees when the load that it waits
 * for has ended.
 */
static const char part_owners[64];
static _Atomic uint32_t loads_begun;

/* A part of the window. */
struct window_part {
    uint32_t slot;        /* it is in this slot, or is read into it; SLOT_NONE: private memory */
    const uint8_t *bytes; /* of the whole part */
    uint32_t crc_got;
    int code;
    bool reads;      /* it is read by this call */
    bool registered; /* the arena knows that it is loaded */
    bool again;      /* it is to be read again from another copy, into other memory */
};

/* A call. */
struct part_read {
    dlfs_reader *reader;
    struct fetch *fetch;
    struct location location;
    dlfs_part_sink *sink; /* that the bytes go to; NULL: they are only loaded */
    void *argument;
    const uint32_t *checksums; /* of the data space's chunks */
    struct private_memory *private_memory;
    uint64_t first_chunk; /* of the window */
    uint32_t count;       /* parts in the window */
    struct window_part parts[WINDOW_PARTS_MAX];
};

/* Returns the length of the part of the sample that lies in a chunk. */
static uint64_t part_length(const struct part_read *read, uint64_t chunk)
{
    return location_part_length(read->reader, &read->location, chunk << read->reader->chunk_shift);
}

/* ---- the window: lock held ------------------------------------------------------------------- */

/* Finds a part in memory: alone, or in a run of slots that holds the whole sample. */
static bool find_part(struct part_read *read, uint64_t chunk, struct window_part *part)
{
    dlfs_reader *reader = read->reader;
    uint64_t offset;
    uint32_t head = arena_find(reader, read->location.chunk);
    uint32_t number = arena_find(reader, chunk);
    if (head != SLOT_NONE && arena_holds(reader, head, &read->location, &offset)) {
        part->slot = head;
        part->bytes = reader->arena->memory + offset +
                      ((chunk - read->location.chunk) << reader->chunk_shift);
    } else if (number != SLOT_NONE && reader->arena->slots[number].state == SLOT_CHUNK &&
               reader->arena->slots[number].bad == NULL) {
        part->slot = number;
        part->bytes = slot_memory(reader, number);
    } else {
        return false;
    }
    arena_reference(reader, part->slot);
    reader->arena->slots[part->slot].uses++;
    read->fetch->stats.cache_hits++;
    return true;
}

/* Takes a slot to read a part into. Returns false if there is none. */
static bool take_slot(struct part_read *read, uint64_t chunk, struct window_part *part)
{
    dlfs_reader *reader = read->reader;
    uint32_t number = arena_take(reader, 1, true);
    if (number == SLOT_NONE) {
        return false;
    }
    part->registered = arena_find(reader, chunk) == SLOT_NONE;
    if (part->registered) {
        uint32_t load = atomic_fetch_add(&loads_begun, 1) % sizeof part_owners;
        arena_begin_load(reader, number, chunk, &part_owners[load]);
    }
    part->slot = number;
    part->bytes = slot_memory(reader, number);
    part->reads = true;
    return true;
}

/* Returns the owner of a part that another call is reading; NULL if none is. */
static const void *find_load(const dlfs_reader *reader, uint64_t chunk)
{
    uint32_t number = arena_find(reader, chunk);
    if (number == SLOT_NONE || reader->arena->slots[number].state != SLOT_LOADING) {
        return NULL;
    }
    uintptr_t owner = (uintptr_t)reader->arena->slots[number].owner;
    bool is_part = owner - (uintptr_t)part_owners < sizeof part_owners;
    return is_part ? reader->arena->slots[number].owner : NULL;
}

/*
 * Waits for the first part while another call reads it. If that fails, this call reads the part
 * itself: of several that have waited, none waits for another one again. The other call may need a
 * queue pair which this one has, so they are given back first.
 */
static int wait_for_part(struct part_read *read)
{
    dlfs_reader *reader = read->reader;
    struct fetch *fetch = read->fetch;
    const void *load = find_load(reader, read->first_chunk);
    while (load != NULL && find_load(reader, read->first_chunk) == load) {
        if (fetch_is_stopped(fetch) || fetch->now_ns >= fetch->deadline_ns) {
            return DLFS_E_TIMEOUT;
        }
        pthread_mutex_unlock(&reader->arena->lock);
        fetch_step(fetch, 0);
        fetch_release_queues(fetch);
        pthread_mutex_lock(&reader->arena->lock);
        if (find_load(reader, read->first_chunk) != load) {
            return 0;
        }
        struct timespec until = clock_timespec(fetch->now_ns + WAIT_NS);
        (void)pthread_cond_timedwait(&reader->released, &reader->arena->lock, &until);
        fetch->now_ns = monotonic_ns();
    }
    return 0;
}

/* Has a slot touched for a part that is not in memory. */
static void touch_slot(dlfs_reader *reader, uint64_t chunk)
{
    if (arena_find(reader, chunk) == SLOT_NONE) {
        fill_next_slot(reader);
    }
}

/* Finds the first parts in memory, or takes slots for them: as many as there are. */
static int take_window(struct part_read *read, uint32_t count_max)
{
    dlfs_reader *reader = read->reader;
    pthread_mutex_lock(&reader->arena->lock);
    int code = arena_attach(reader);
    if (code == 0) {
        touch_slot(reader, read->first_chunk);
        code = wait_for_part(read);
    }
    read->count = 0;
    while (code == 0 && read->count < count_max) {
        uint64_t chunk = read->first_chunk + read->count;
        if (read->count > 0) {
            touch_slot(reader, chunk);
        }
        struct window_part *part = &read->parts[read->count];
        *part = (struct window_part){.slot = SLOT_NONE};
        bool is_waited_for = read->count > 0 && find_load(reader, chunk) != NULL;
        if (!find_part(read, chunk, part) && (is_waited_for || !take_slot(read, chunk, part))) {
            break;
        }
        read->count++;
    }
    pthread_mutex_unlock(&reader->arena->lock);
    return code;
}

/* Gives one part of the window private memory, because batches have pinned the arena. */
static int take_private_memory(struct part_read *read)
{
    uint64_t bytes = read->reader->config.chunk_bytes;
    int code = private_memory_take(read->reader, bytes, NULL, &read->private_memory);
    if (code == 0) {
        read->parts[0] = (struct window_part){
            .slot = SLOT_NONE, .bytes = read->private_memory->base, .reads = true};
        read->count = 1;
    }
    return code;
}

/* Ends the loads of the window: what is sound stays in memory. */
static void end_loads(struct part_read *read)
{
    dlfs_reader *reader = read->reader;
    pthread_mutex_lock(&reader->arena->lock);
    for (uint32_t i = 0; i < read->count; i++) {
        const struct window_part *part = &read->parts[i];
        if (part->registered) {
            arena_end_load(reader, part->slot, part->code == 0, NULL);
            pthread_cond_broadcast(&reader->released);
        }
    }
    pthread_mutex_unlock(&reader->arena->lock);
}

static void release_window(struct part_read *read)
{
    dlfs_reader *reader = read->reader;
    pthread_mutex_lock(&reader->arena->lock);
    for (uint32_t i = 0; i < read->count; i++) {
        if (read->parts[i].slot != SLOT_NONE) {
            arena_release(reader, read->parts[i].slot);
        }
    }
    pthread_mutex_unlock(&reader->arena->lock);
    if (read->private_memory != NULL) {
        private_memory_release(read->private_memory);
        read->private_memory = NULL;
    }
}

/* ---- reading --------------------------------------------------------------------------------- */

static void start_span(struct part_read *read, uint32_t number)
{
    const struct window_part *part = &read->parts[number];
    uint64_t mask = read->reader->config.block_bytes - 1;
    uint64_t chunk = read->first_chunk + number;
    struct span *span = span_take(read->fetch);
    span->address = chunk << read->reader->chunk_shift;
    span->length = (part_length(read, chunk) + mask) & ~mask;
    span->memory = (uint8_t *)(uintptr_t)part->bytes;
    span->slot = part->slot;
    span->private_memory = read->private_memory;
    span->tag = number;
    span_start(read->fetch, span);
}

/* Verifies a part that has come. Returns true if it is read again. */
static bool finish_span(struct part_read *read, struct span *span)
{
    struct fetch *fetch = read->fetch;
    struct window_part *part = &read->parts[span->tag];
    uint64_t chunk = read->first_chunk + span->tag;
    part->code = span->code;
    if (span->code == 0) {
        part->crc_got = dlfs_crc32c(0, span->memory, part_length(read, chunk));
        if (part->crc_got != read->checksums[chunk]) {
            fetch->stats.checksum_errors++;
            if (span_retry(fetch, span)) {
                return true;
            }
            part->code = DLFS_E_CHECKSUM;
        }
    }
    part->again = span->code == DLFS_E_TIMEOUT && span->redirected && !fetch_is_stopped(fetch) &&
                  fetch->now_ns < fetch->deadline_ns;
    span_recycle(fetch, span);
    return false;
}

/* Reads the parts of the window that are not in memory. If nothing can be read, they fail. */
static int fetch_window(struct part_read *read)
{
    struct fetch *fetch = read->fetch;
    uint32_t under_way = 0;
    for (uint32_t i = 0; i < read->count; i++) {
        under_way += read->parts[i].reads;
    }
    if (under_way == 0) {
        return 0;
    }
    fetch->now_ns = monotonic_ns();
    int code = fetch_prepare(fetch, under_way, NULL);
    for (uint32_t i = 0; i < read->count; i++) {
        if (read->parts[i].reads && code == 0) {
            start_span(read, i);
        } else if (read->parts[i].reads) {
            read->parts[i].code = code;
        }
    }
    while (code == 0 && under_way > 0) {
        struct span *span = fetch_take_done(fetch);
        if (span == NULL) {
            reader_wait(fetch);
        } else {
            under_way -= !finish_span(read, span);
        }
    }
    fetch_add_time(fetch, &fetch->stats.verify_ns);
    return code == -ENOMEM ? code : 0;
}

/*
 * Reads the next window, of at most count_max parts, and gives its share of the range to the sink.
 * Returns the bytes of the range in the window, 0 if it is to be read again, or a code.
 */
static int64_t read_window(struct part_read *read, uint32_t count_max, uint64_t address,
                           uint64_t end, dlfs_failure *failure)
{
    dlfs_reader *reader = read->reader;
    uint64_t start = read->first_chunk << reader->chunk_shift;
    int64_t result = take_window(read, count_max);
    if (result == 0 && read->count == 0) {
        result = take_private_memory(read);
    }
    if (result == 0) {
        result = fetch_window(read);
    }
    if (result == DLFS_E_TIMEOUT) {
        *failure = reader_failure(reader, failure->index, DLFS_E_TIMEOUT, 0, start);
    }
    end_loads(read);
    struct iovec pieces[WINDOW_PARTS_MAX];
    uint32_t piece_count = 0;
    uint64_t done = 0;
    for (uint32_t i = 0; result == 0 && i < read->count; i++) {
        const struct window_part *part = &read->parts[i];
        uint64_t first = start + ((uint64_t)i << reader->chunk_shift);
        if (part->code < 0 && part->again) {
            break;
        }
        if (part->code < 0) {
            result = part->code;
            *failure = reader_failure(reader, failure->index, part->code, part->crc_got, first);
            break;
        }
        uint64_t from = address > first ? address - first : 0;
        uint64_t last = first + part_length(read, read->first_chunk + i);
        uint64_t to = (end < last ? end : last) - first;
        pieces[piece_count++] = (struct iovec){.iov_base = (void *)(uintptr_t)(part->bytes + from),
                                               .iov_len = to - from};
        done += to - from;
    }
    if (read->sink != NULL && piece_count > 0) {
        read->sink(read->argument, pieces, piece_count);
    }
    release_window(read);
    return result < 0 ? result : (int64_t)done;
}

/* Reads a range of a sample that is larger than a chunk. */
static int read_large(struct part_read *read, const dlfs_part *range, dlfs_failure *failure)
{
    dlfs_reader *reader = read->reader;
    uint64_t window = WINDOW_BYTES >> reader->chunk_shift;
    window = window > WINDOW_PARTS_MAX ? WINDOW_PARTS_MAX : window;
    window = window > reader->slots_max / SLOTS_SHARE ? reader->slots_max / SLOTS_SHARE : window;
    window = window > 0 ? window : 1;
    uint64_t address = read->location.address + range->offset_bytes;
    uint64_t end = address + range->length_bytes;
    while (address < end) {
        read->first_chunk = address >> reader->chunk_shift;
        uint64_t left = ((end - 1) >> reader->chunk_shift) - read->first_chunk + 1;
        int64_t done =
            read_window(read, (uint32_t)(left < window ? left : window), address, end, failure);
        if (done < 0) {
            return (int)done;
        }
        address += (uint64_t)done;
    }
    return 0;
}

/* Reads a range of a sample that has no parts. */
static int read_small(const struct part_read *read, const dlfs_part *range,
                      const _Atomic bool *stop, dlfs_failure *failure)
{
    struct read_terms terms = READ_TERMS_PLAIN;
    terms.stop = stop;
    dlfs_batch *batch;
    int code = reader_read(read->reader, &range->index, 1, &terms, &batch);
    if (code < 0) {
        return code;
    }
    if (batch->failure_count > 0) {
        *failure = batch->failures[0];
        code = failure->code;
    } else if (read->sink != NULL) {
        const uint8_t *sample = batch->base + batch->offsets[0];
        struct iovec piece = {.iov_base = (void *)(uintptr_t)(sample + range->offset_bytes),
                              .iov_len = range->length_bytes};
        read->sink(read->argument, &piece, 1);
    }
    dlfs_batch_release(batch);
    return code;
}

/* ---- the whole call -------------------------------------------------------------------------- */

/* Finds the sample. Returns -EINVAL unless it has such a range. */
static int locate(const dlfs_reader *reader, const dlfs_part *range, struct location *location)
{
    if (range->index >= reader->sample_count) {
        return -EINVAL;
    }
    if (!reader_locate(reader, range->index, location)) {
        return DLFS_E_FORMAT;
    }
    bool within = range->offset_bytes <= location->length &&
                  range->length_bytes <= location->length - range->offset_bytes;
    return within ? 0 : -EINVAL;
}

void part_copy(void *next, const struct iovec *pieces, uint32_t piece_count)
{
    uint8_t **buffer = next;
    for (uint32_t i = 0; i < piece_count; i++) {
        memcpy(*buffer, pieces[i].iov_base, pieces[i].iov_len);
        *buffer += pieces[i].iov_len;
    }
}

int reader_read_part(dlfs_reader *reader, const dlfs_part *range, dlfs_part_sink *sink,
                     void *argument, const _Atomic bool *stop, dlfs_failure *failure)
{
    if (reader == NULL || range == NULL || failure == NULL) {
        return -EINVAL;
    }
    struct part_read read = {.reader = reader, .sink = sink, .argument = argument};
    *failure = (dlfs_failure){.index = range->index};
    int code = locate(reader, range, &read.location);
    if (code == DLFS_E_FORMAT) {
        *failure = reader_failure(reader, range->index, code, 0, 0);
    }
    if (code < 0 || range->length_bytes == 0) {
        return code;
    }
    read.checksums = reader_part_checksums(reader, &read.location);
    if (read.checksums == NULL) {
        return read_small(&read, range, stop, failure);
    }
    code = reader_take_fetch(reader, &read.fetch);
    if (code < 0) {
        return code;
    }
    struct fetch *fetch = read.fetch;
    fetch->stop = stop;
    fetch->now_ns = monotonic_ns();
    fetch->slow_bytes = range->length_bytes;
    fetch->deadline_ns = fetch->now_ns + reader_timeout_ns(reader);
    fetch->redirected_ns = fetch->now_ns;
    code = read_large(&read, range, failure);
    if (code == 0 && sink != NULL) {
        fetch->stats.sample_bytes += range->length_bytes;
        fetch->stats.samples += range->offset_bytes + range->length_bytes == read.location.length;
    }
    reader_return_fetch(reader, fetch);
    return code;
}

DLFS_API int dlfs_reader_read_part(dlfs_reader *reader, const dlfs_part *part, void *buffer,
                                   dlfs_failure *failure)
{
    return reader_read_part(reader, part, part_copy, &buffer, NULL, failure);
}

DLFS_API int dlfs_reader_send_part(dlfs_reader *reader, const dlfs_part *part, dlfs_part_sink *sink,
                                   void *argument, dlfs_failure *failure)
{
    return reader_read_part(reader, part, sink, argument, NULL, failure);
}

_Static_assert(sizeof(_Atomic bool) == sizeof(bool), "a caller's flag is read as an atomic one");

DLFS_API int dlfs_reader_load_part(dlfs_reader *reader, const dlfs_part *part, const bool *stop,
                                   dlfs_failure *failure)
{
    return reader_read_part(reader, part, NULL, NULL, (const _Atomic bool *)stop, failure);
}
