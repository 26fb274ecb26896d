/*
 * The arena's memory is touched by a thread that no read waits for: whole chunks go where memory
 * was touched, and other samples are read by themselves.
 */
#define LARGE_EVERY 6u /* several steps of memory */

#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "platform/memory.h"
#include "reader/reader_tests.h"
#include "sequence/sequence.h"
#include "stream/stream.h"

#define STEP ((size_t)2 << 20)
#define STEPS 6u
#define STEP_SLOTS 4u
#define PAGE 4096u
#define BATCH 16u
#define OTHERS (STEPS * STEP_SLOTS / 8) /* slots that are left to samples read by themselves */

/* ---- the thread by itself -------------------------------------------------------------------- */

/* Has a small arena touched as a large one is. The lock is held where it is needed. */
static void begin_large(dlfs_reader *reader)
{
    reader->arena->fill.bounds = true;
    reader->arena->fill.large = 0;
    reader->arena->fill.touched = reader->arena->fill.claimed = 0;
}

static void reader_without_memory(dlfs_reader *reader, uint32_t slots, bool shared)
{
    *reader = (dlfs_reader){
        .released = PTHREAD_COND_INITIALIZER,
        .chunk_shift = 19,
        .chunk_count = (STEPS - 1) * STEP_SLOTS,
        .slots_enough = UINT64_MAX,
        .slots_max = slots,
        .owns_arena = true,
        .dataset_fits = true,
    };
    CHECK_EQ(arena_create(slots, 19, shared, &reader->arena), 0);
    reader->arena->readers = reader;
}

/* The reader's arena unmaps the memory when it is freed. */
static void reader_over_memory(dlfs_reader *reader, void *memory)
{
    reader_without_memory(reader, STEPS * STEP_SLOTS, false);
    reader->arena->memory = memory;
    reader->arena->bytes = STEPS * STEP;
    fill_begin(reader);
    fill_join(reader);
    CHECK(!reader->arena->fill.bounds);
    begin_large(reader);
}

static uint32_t wait_for_room(dlfs_reader *reader, uint32_t least)
{
    uint32_t room = 0;
    while (room < least) {
        pthread_mutex_lock(&reader->arena->lock);
        room = fill_room(reader);
        pthread_mutex_unlock(&reader->arena->lock);
        sched_yield();
    }
    return room;
}

static bool is_touched(const uint8_t *memory, size_t bytes)
{
    unsigned char resident[STEPS * STEP / 4096];
    CHECK_EQ(mincore((void *)(uintptr_t)memory, bytes, resident), 0);
    bool touched = true;
    for (size_t page = 0; page < bytes / 4096; page++) {
        touched = touched && (resident[page] & 1);
    }
    return touched;
}

static void as_far_as_asked(void)
{
    void *arena;
    dlfs_reader reader;
    CHECK_EQ(dlfs_memory_map(STEPS * STEP, &arena, NULL), 0);
    reader_over_memory(&reader, arena);
    CHECK_EQ(fill_room(&reader), 0);
    CHECK(!reader.arena->fill.running);
    CHECK_EQ(fill_admits(&reader, 1), 0); /* and has one touched, and one for a later read */
    CHECK_EQ(wait_for_room(&reader, 2), 2 * STEP_SLOTS - OTHERS);
    CHECK(is_touched(arena, 2 * STEP));
    CHECK_EQ(fill_admits(&reader, 1), 1);
    CHECK_EQ(fill_admits(&reader, 2), 2);
    reader.arena->chunk_slot_count = reader.share.chunks = 2 * STEP_SLOTS;
    CHECK_EQ(fill_room(&reader), 0);
    CHECK_EQ(fill_admits(&reader, 1), 0);
    CHECK_EQ(wait_for_room(&reader, 2), 2 * STEP_SLOTS - OTHERS);
    CHECK_EQ(fill_admits(&reader, 3 * STEP_SLOTS),
             2 * STEP_SLOTS - OTHERS); /* all chunks of the dataset */
    CHECK_EQ(wait_for_room(&reader, 3 * STEP_SLOTS), reader.slots_max);
    CHECK(!fill_bounds_chunks(&reader));
    CHECK(is_touched(arena, (STEPS - 1) * STEP));
    fill_end(reader.arena);
    arena_unreference(reader.arena);
}

static void with_help(void)
{
    void *arena;
    dlfs_reader reader;
    CHECK_EQ(dlfs_memory_map(STEPS * STEP, &arena, NULL), 0);
    reader_over_memory(&reader, arena);
    reader.arena->fill.running = true; /* so that no thread is started */
    CHECK(!fill_needs_help(reader.arena));
    pthread_mutex_lock(&reader.arena->lock);
    fill_want(&reader, STEP_SLOTS - OTHERS);
    CHECK(fill_needs_help(reader.arena));
    fill_help(reader.arena);
    CHECK_EQ(fill_room(&reader), STEP_SLOTS - OTHERS);
    CHECK(reader.arena->fill.step_ns > 0);
    CHECK(!fill_needs_help(reader.arena));
    reader.arena->fill.claimed += STEP_SLOTS; /* another thread is at this step */
    reader.arena->fill.busy[0] = STEP_SLOTS;
    fill_want(&reader, reader.slots_max);
    fill_help(reader.arena);
    CHECK_EQ(fill_room(&reader), STEP_SLOTS - OTHERS);
    reader.arena->fill.busy[0] = SLOT_NONE;
    fill_help(reader.arena);
    CHECK_EQ(fill_room(&reader), 4 * STEP_SLOTS - OTHERS);
    fill_pause(&reader);
    CHECK(!fill_needs_help(reader.arena));
    pthread_mutex_unlock(&reader.arena->lock);
    reader.arena->fill.running = false;
    arena_unreference(reader.arena);
}

static void *touch_next_slot(void *reader)
{
    dlfs_reader *own = reader;
    pthread_mutex_lock(&own->arena->lock);
    fill_next_slot(own);
    pthread_mutex_unlock(&own->arena->lock);
    return NULL;
}

/*
 * Checks that a slot is touched once, as a step, before it is taken; also where others touch it. A
 * slot behind the next step is not: that would touch all before it, too.
 */
static void before_it_is_taken(void)
{
    void *arena;
    dlfs_reader reader;
    pthread_t thread;
    CHECK_EQ(dlfs_memory_map(STEPS * STEP, &arena, NULL), 0);
    reader_over_memory(&reader, arena);
    struct fill *fill = &reader.arena->fill;
    CHECK(!is_touched(arena, STEP));
    (void)touch_next_slot(&reader);
    CHECK(is_touched(arena, STEP));
    CHECK_EQ(fill->claimed, STEP_SLOTS);
    (void)touch_next_slot(&reader);
    CHECK_EQ(fill->claimed, STEP_SLOTS);

    pthread_mutex_lock(&reader.arena->lock);
    uint32_t taken[STEPS * STEP_SLOTS];
    for (uint32_t i = 0; i < STEPS * STEP_SLOTS; i++) {
        taken[i] = arena_take(&reader, 1, true);
    }
    arena_release(&reader, taken[STEPS * STEP_SLOTS - 1]);
    pthread_mutex_unlock(&reader.arena->lock);
    (void)touch_next_slot(&reader);
    CHECK_EQ(fill->claimed, STEP_SLOTS);

    pthread_mutex_lock(&reader.arena->lock);
    arena_release(&reader, taken[STEP_SLOTS]);
    fill->claimed += STEP_SLOTS; /* the thread is at the second step */
    fill->busy[0] = STEP_SLOTS;
    CHECK_EQ(pthread_create(&thread, NULL, touch_next_slot, &reader), 0);
    pthread_mutex_unlock(&reader.arena->lock);
    (void)usleep(20000);
    pthread_mutex_lock(&reader.arena->lock);
    CHECK_EQ(fill->claimed, 2 * STEP_SLOTS);
    fill->busy[0] = SLOT_NONE;
    fill->touched = 2 * STEP_SLOTS;
    arena_wake_all(reader.arena);
    pthread_mutex_unlock(&reader.arena->lock);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(fill->claimed, 2 * STEP_SLOTS);
    CHECK(!is_touched((uint8_t *)arena + STEP, STEP));

    pthread_mutex_lock(&reader.arena->lock);
    for (uint32_t i = 0; i < STEPS * STEP_SLOTS - 1; i++) {
        if (i != STEP_SLOTS) {
            arena_release(&reader, taken[i]);
        }
    }
    pthread_mutex_unlock(&reader.arena->lock);
    arena_unreference(reader.arena);
}

/* Checks that chunks do not wait for the first bytes of a large dataset, which reads touch. */
static void first_chunks_do_not_wait(void)
{
    dlfs_reader reader;
    uint32_t first = (64u << 20) >> 19;
    reader_without_memory(&reader, 3 * first, false);
    reader.chunk_count = 3 * first - 1;
    fill_begin(&reader);
    CHECK(fill_bounds_chunks(&reader));
    CHECK_EQ(fill_room(&reader), first - 3 * first / 8); /* but for slots of other samples */
    CHECK(!reader.arena->fill.running);
    reader.chunk_count = first;
    fill_begin(&reader);
    CHECK(!fill_bounds_chunks(&reader)); /* there is no step that would end the fill */
    arena_unreference(reader.arena);
}

static void cannot_be_touched(void)
{
    dlfs_reader reader;
    void *arena = mmap(NULL, STEPS * STEP, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(arena != MAP_FAILED);
    reader_over_memory(&reader, arena);
    CHECK_EQ(0, fill_admits(&reader, 1));
    CHECK_EQ(wait_for_room(&reader, 1), reader.slots_max);
    arena_unreference(reader.arena);
}

/* ---- huge pages of shared memory ------------------------------------------------------------- */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* Returns the bytes of a mapping of shared memory that huge pages are mapped for. */
static uint64_t huge_bytes(const void *memory)
{
    char line[256];
    bool inside = false;
    uint64_t kib = 0;
    FILE *file = fopen("/proc/self/smaps", "re");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned long start;
        unsigned long end;
        unsigned long found;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) {
            inside = (uintptr_t)memory >= start && (uintptr_t)memory < end;
        } else if (inside && sscanf(line, "ShmemPmdMapped: %lu kB", &found) == 1) {
            kib += found;
        }
    }
    (void)fclose(file);
    return kib << 10;
}

static uint8_t *map_shared(int *descriptor)
{
    void *memory;
    /* No reserved huge pages, which need no collapsing. */
    CHECK_EQ(
        memory_create_shared("test", STEPS * STEP, false, MEMORY_OWNER_WRITES, &memory, descriptor),
        0);
    return memory;
}

/* Returns true if the kernel collapses shared memory, and has a huge page free. */
static bool kernel_collapses(void)
{
    int descriptor;
    uint8_t *memory = map_shared(&descriptor);
    memory[0] = 1;
    bool collapses = madvise(memory, STEP, MADV_COLLAPSE) == 0;
    dlfs_memory_unmap(memory, STEPS * STEP);
    close(descriptor);
    return collapses;
}

static bool is_over(dlfs_reader *reader)
{
    pthread_mutex_lock(&reader->arena->lock);
    bool over = reader->arena->fill.touched >= reader->slots_max;
    fill_help(reader->arena); /* as a stream's thread does */
    pthread_mutex_unlock(&reader->arena->lock);
    return over;
}

/* Touches shared memory that has some bytes already. Huge pages replace theirs if the kernel can.
 */
static void collapses(bool refused)
{
    int descriptor;
    dlfs_reader reader;
    bool can = kernel_collapses();
    uint8_t *arena = map_shared(&descriptor);
    const uint8_t *other = mmap(NULL, STEPS * STEP, PROT_READ, MAP_SHARED, descriptor, 0);
    CHECK(other != MAP_FAILED);
    for (size_t step = 0; step < STEPS; step++) {
        memset(arena + step * STEP, (int)step + 1, PAGE);
    }
    if (refused) {
        CHECK_EQ(madvise(arena, STEPS * STEP, MADV_NOHUGEPAGE), 0);
    }
    reader_without_memory(&reader, STEPS * STEP_SLOTS, true);
    reader.dataset_fits = false; /* then all slots are touched */
    reader.arena->memory = arena;
    reader.arena->bytes = STEPS * STEP;
    pthread_mutex_lock(&reader.arena->lock);
    fill_begin(&reader);
    fill_join(&reader);
    pthread_mutex_unlock(&reader.arena->lock);
    while (!is_over(&reader)) {
        sched_yield();
    }
    fill_end(reader.arena);
    CHECK(!reader.arena->fill.failed);
    CHECK(is_touched(arena, STEPS * STEP));
    CHECK(!refused || !reader.arena->fill.huge);
    CHECK(refused || !can || huge_bytes(arena) > 0);
    CHECK(!refused || huge_bytes(arena) == 0);
    for (size_t step = 0; step < STEPS; step++) {
        const uint8_t *page = other + step * STEP;
        for (size_t i = 0; i < 2 * PAGE; i++) {
            CHECK_EQ(page[i], i < PAGE ? step + 1 : 0);
        }
    }
    CHECK_EQ(munmap((void *)(uintptr_t)other, STEPS * STEP), 0);
    arena_unreference(reader.arena);
    close(descriptor);
}

/* ---- reads next to it ------------------------------------------------------------------------ */

static void take(dlfs_reader *reader, const dlfs_sequence *sequence, uint64_t stop, uint64_t size)
{
    dlfs_stream_config config = {.sequence = sequence,
                                 .stride = 1,
                                 .count = sequence_count(sequence),
                                 .plan = DLFS_PLAN_CHUNKS};
    dlfs_stream *stream;
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    uint64_t taken = 0;
    for (dlfs_batch *batch; taken < stop && dlfs_stream_next(stream, size, -1, &batch) == 0;) {
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < batch->count; i++) {
            check_sample(batch, i);
        }
        taken += batch->count;
        dlfs_batch_release(batch);
    }
    CHECK(taken >= stop);
    dlfs_stream_destroy(stream);
}

static void read_all(dlfs_reader *reader)
{
    for (uint64_t first = 0; first + BATCH <= COUNT; first += BATCH) {
        uint64_t indices[BATCH];
        dlfs_batch *batch;
        for (uint64_t i = 0; i < BATCH; i++) {
            indices[i] = (first + i) * 37 % COUNT;
        }
        CHECK_EQ(dlfs_reader_read(reader, indices, BATCH, &batch), 0);
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < BATCH; i++) {
            check_sample(batch, i);
        }
        dlfs_batch_release(batch);
    }
}

static uint64_t chunks_in_memory(dlfs_reader *reader)
{
    uint64_t found = 0;
    pthread_mutex_lock(&reader->arena->lock);
    for (uint32_t slot = 0; slot < reader->slots_max; slot += reader->arena->slots[slot].run) {
        found +=
            reader->arena->slots[slot].state == SLOT_CHUNK ? reader->arena->slots[slot].run : 0;
    }
    pthread_mutex_unlock(&reader->arena->lock);
    return found;
}

/* Reads an epoch up to a position, batches, and a whole epoch. */
static void reads(uint64_t first_stop, bool shared, bool stuck)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    CHECK(dataset.chunk_count * CHUNK > 2 * STEP);
    dlfs_reader *reader = reader_with(&dataset, DEVICE_BYTES, 0, shared);
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 3, 0, 4, &sequence),
             0);
    reader->arena->fill.running = stuck; /* then the reader starts no thread, */
    reader->arena->fill.step_ns = stuck ? UINT64_MAX / 8 : 0; /* and does not wait for it */
    pthread_mutex_lock(&reader->arena->lock);
    CHECK_EQ(arena_attach(reader), 0);
    if (!shared || stuck) {
        begin_large(reader);
    } else {
        reader->arena->fill.bounds = true;
        reader->arena->fill.large = 0;
    }
    pthread_mutex_unlock(&reader->arena->lock);
    take(reader, sequence, first_stop, BATCH);
    read_all(reader);
    if (stuck) {
        CHECK_EQ(chunks_in_memory(reader), 0);
        reader->arena->fill.running = false;
        reader->arena->fill.wanted = 0;
    }
    pthread_mutex_lock(&reader->arena->lock);
    fill_want(reader, reader->slots_max);
    pthread_mutex_unlock(&reader->arena->lock);
    (void)wait_for_room(reader, reader->slots_max);
    take(reader, sequence, COUNT, BATCH);
    CHECK(chunks_in_memory(reader) > 0);
    dlfs_sequence_destroy(sequence);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* While no memory is touched, no more samples are read ahead than the queues take: one larger than
 * a chunk takes a place for each of its chunks. */
static void large_samples_use_few_slots(void)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_with(&dataset, DEVICE_BYTES, 0, 0);
    uint64_t large[COUNT / LARGE_EVERY];
    for (uint64_t i = 0; i < COUNT / LARGE_EVERY; i++) {
        large[i] = i * LARGE_EVERY + 5;
    }
    dlfs_choice choice = {.kind = DLFS_ORDER_LIST, .indices = large, .count = COUNT / LARGE_EVERY};
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_choose(dataset.directory, &choice, &sequence), 0);
    reader->arena->fill.running = true;
    reader->arena->fill.step_ns = UINT64_MAX / 8;
    pthread_mutex_lock(&reader->arena->lock);
    CHECK_EQ(arena_attach(reader), 0);
    begin_large(reader);
    pthread_mutex_unlock(&reader->arena->lock);
    take(reader, sequence, choice.count, 1);
    CHECK_EQ(chunks_in_memory(reader), 0);
    uint64_t sample_slots = LENGTH_MAX / CHUNK + 1;
    CHECK(reader->arena->other_slots_most <= (1 + reader->config.depth) * sample_slots);
    reader->arena->fill.running = false;
    dlfs_sequence_destroy(sequence);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Of two streams that begin together, each has all of its chunks touched, also if one ends early.
 */
static void two_datasets_fit(bool one_ends)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    uint64_t slots = 3 * dataset.chunk_count;
    const dlfs_arena_config config = {.memory_bytes = slots * CHUNK, .chunk_bytes = CHUNK};
    dlfs_arena *arena;
    CHECK_EQ(dlfs_arena_create(&config, &arena), 0);
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 3, 0, 4, &sequence),
             0);
    const dlfs_stream_config stream = {.sequence = sequence,
                                       .stride = 1,
                                       .count = sequence_count(sequence),
                                       .plan = DLFS_PLAN_CHUNKS};
    dlfs_reader *readers[2];
    dlfs_stream *streams[2];
    arena->fill.running = true; /* no thread touches anything */
    for (uint32_t i = 0; i < 2; i++) {
        readers[i] = reader_as(
            &dataset, (dlfs_reader_config){
                          .depth = 8, .arena = arena, .gap_bytes = 8192, .timeout_ms = 20000});
        pthread_mutex_lock(&arena->lock);
        CHECK_EQ(arena_attach(readers[i]), 0);
        if (i == 0) {
            begin_large(readers[0]);
            arena->fill.step_ns = UINT64_MAX / 8; /* nor does a stream's */
        }
        pthread_mutex_unlock(&arena->lock);
        CHECK_EQ(dlfs_stream_create(readers[i], &stream, &streams[i]), 0);
    }
    CHECK(arena->fill.wanted >= 2 * dataset.chunk_count);
    if (one_ends) {
        dlfs_stream_destroy(streams[1]);
        CHECK(arena->fill.wanted >= dataset.chunk_count);
        CHECK(arena->fill.wanted < 2 * dataset.chunk_count);
    }
    for (uint32_t i = 0; i < 2; i++) {
        if (i == 0 || !one_ends) {
            dlfs_stream_destroy(streams[i]);
        }
        CHECK_EQ(dlfs_reader_destroy(readers[i]), 0);
    }
    arena->fill.running = false;
    dlfs_arena_destroy(arena);
    dlfs_sequence_destroy(sequence);
    dataset_destroy(&dataset);
}

int main(void)
{
    two_datasets_fit(false);
    two_datasets_fit(true);
    as_far_as_asked();
    with_help();
    before_it_is_taken();
    first_chunks_do_not_wait();
    cannot_be_touched();
    collapses(false);
    collapses(true);
    for (int shared = 0; shared < 2; shared++) {
        reads(COUNT, shared != 0, false);
        reads(COUNT, shared != 0, true);
        reads(1, shared != 0, false);
    }
    large_samples_use_few_slots();
    return 0;
}
