/*
 * Touches the memory of an arena before reads need it. The kernel provides and zeroes a
 * page when it is first touched. For an arena that takes a whole dataset that is as much work as
 * reading it, and many times as much on a virtual machine whose host provides memory page by page.
 *
 * A thread does this behind the first UNTOUCHED_BYTES, a huge page at a time, as
 * far as reads have asked for. Whole chunks, which stay in memory, are read into as many slots as
 * were touched. Until then, samples are read one by one, into a few slots that are used again and
 * again (the list of free slots begins with those that were released last). Where the memory comes
 * so fast that this is not worth it, a stream's thread helps instead. A read of a part of a large
 * sample touches the step of its slot itself if that is the next one, or waits for the thread that
 * does: used before it is touched, its pages would be collapsed while they hold data, which copies
 * them.
 *
 * Huge pages. Private memory gets them at its first touch, where
 * /sys/kernel/mm/transparent_hugepage/enabled is "always" or "madvise". Shared memory does so where
 * shmem_enabled in the same folder allows it, which it mostly does not. Then MADV_COLLAPSE (Linux
 * 6.1), which depends on neither setting, replaces the pages of a step, mostly none, by a huge
 * page.
 */
#include "arena/fill.h"

#include <errno.h>
#include <sys/mman.h>

#include "platform/clock.h"
#include "platform/thread.h"
#include "reader/state.h"

#define STEP_BYTES ((size_t)2 << 20) /* a huge page, which the arena is aligned to */
/* Chunks do not wait for so much memory, nor do those of a smaller dataset: reads touch it in a
 * moment. */
#define UNTOUCHED_BYTES ((uint64_t)64 << 20)
#define SHARED_FIRST_BYTES ((uint64_t)64 << 20) /* of a dataset: touched at once, if shared */
#define OTHERS_BYTES ((uint64_t)32 << 20)       /* least bytes for samples read by themselves */
#define PAGE_BYTES 4096u
#define MEAN_STEPS 4u /* that the mean time of a step is taken over */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

uint32_t fill_step_slots(const dlfs_arena *arena)
{
    return arena->chunk_shift < 21 ? (uint32_t)(STEP_BYTES >> arena->chunk_shift) : 1;
}

static bool is_over(const dlfs_arena *arena)
{
    return arena->fill.touched >= arena->slot_count;
}

/* Returns the slots that are left to samples that are read by themselves. */
static uint32_t other_slots(const dlfs_arena *arena)
{
    uint64_t least = OTHERS_BYTES >> arena->chunk_shift;
    least = least < arena->slot_count / 8 ? least : arena->slot_count / 8;
    return arena->other_slots_most > least ? arena->other_slots_most : (uint32_t)least;
}

/*
 * Touches the memory of a step. The lock is not held: another thread may touch another step. Sets
 * *huge to false if the kernel cannot collapse memory. Returns false with a kernel older than 5.14,
 * or without memory.
 */
static bool touch(const dlfs_arena *arena, uint32_t slot, bool *huge)
{
    size_t at = (size_t)slot << arena->chunk_shift;
    size_t bytes = (size_t)fill_step_slots(arena) << arena->chunk_shift;
    bytes = bytes < arena->bytes - at ? bytes : arena->bytes - at;
    uint8_t *memory = arena->memory + at;
    /* Without a page table, which the first page brings, MADV_COLLAPSE fails. */
    if (*huge && madvise(memory, PAGE_BYTES, MADV_POPULATE_WRITE) == 0 &&
        madvise(memory, bytes, MADV_COLLAPSE) < 0 && (errno == EINVAL || errno == ENOMEM)) {
        *huge = false; /* not in this kernel, forbidden, or none is free */
    }
    return madvise(memory, bytes, MADV_POPULATE_WRITE) == 0;
}

/* Returns where a thread that helps may note its step; NULL if as many touch memory as may. */
static uint32_t *find_place(dlfs_arena *arena)
{
    uint32_t *place = arena->fill.busy + 1;
    while (place < arena->fill.busy + FILL_THREADS_MAX && *place != SLOT_NONE) {
        place++;
    }
    return place < arena->fill.busy + FILL_THREADS_MAX ? place : NULL;
}

/* Touches the next step, noted at a place. The lock is held, and released meanwhile. */
static void touch_next(dlfs_arena *arena, uint32_t *place)
{
    struct fill *fill = &arena->fill;
    uint32_t slot = fill->claimed;
    bool huge = fill->huge;
    *place = slot;
    fill->claimed += fill_step_slots(arena);
    pthread_mutex_unlock(&arena->lock);
    uint64_t before = monotonic_ns();
    bool touched = touch(arena, slot, &huge);
    uint64_t step_ns = monotonic_ns() - before;
    pthread_mutex_lock(&arena->lock);
    *place = SLOT_NONE;
    fill->failed |= !touched;
    fill->huge = fill->huge && huge;
    fill->step_ns = (fill->step_ns * (MEAN_STEPS - 1) + step_ns) / MEAN_STEPS;
    uint32_t end = fill->claimed;
    for (uint32_t i = 0; i < FILL_THREADS_MAX; i++) {
        end = fill->busy[i] < end ? fill->busy[i] : end;
    }
    fill->touched = fill->failed || end >= fill->needed ? arena->slot_count : end;
    arena_wake_all(arena);
}

/* Returns true if there is a step to touch. */
static bool has_step(const dlfs_arena *arena)
{
    const struct fill *fill = &arena->fill;
    return !is_over(arena) && fill->claimed < fill->wanted && fill->claimed < fill->needed;
}

static void *fill_thread(void *argument)
{
    dlfs_arena *arena = argument;
    struct fill *fill = &arena->fill;
    pthread_mutex_lock(&arena->lock);
    while (!fill->stop && !is_over(arena)) {
        if (has_step(arena)) {
            touch_next(arena, &fill->busy[0]);
        } else if (fill->claimed < fill->needed) {
            pthread_cond_wait(&fill->work, &arena->lock);
        } else {
            break; /* others touch the last steps */
        }
    }
    pthread_mutex_unlock(&arena->lock);
    return NULL;
}

bool fill_needs_help(dlfs_arena *arena)
{
    return has_step(arena) && find_place(arena) != NULL;
}

void fill_help(dlfs_arena *arena)
{
    if (fill_needs_help(arena)) {
        touch_next(arena, find_place(arena));
    }
}

void fill_next_slot(dlfs_reader *reader)
{
    dlfs_arena *arena = reader->arena;
    while (!is_over(arena) && arena->free_slots.count > 0 &&
           arena->free_slots.first >= arena->fill.touched) {
        if (arena->free_slots.first >= arena->fill.claimed + fill_step_slots(arena)) {
            break; /* other steps lie before its own */
        }
        uint32_t *place = find_place(arena);
        if (arena->free_slots.first >= arena->fill.claimed && place != NULL) {
            touch_next(arena, place);
        } else {
            pthread_cond_wait(&reader->released, &arena->lock);
        }
    }
}

void fill_begin(dlfs_reader *reader)
{
    dlfs_arena *arena = reader->arena;
    struct fill *fill = &arena->fill;
    bool whole = reader->owns_arena && reader->dataset_fits; /* no other dataset follows */
    fill->needed = whole ? (uint32_t)reader->chunk_count : arena->slot_count;
    uint64_t bytes = (uint64_t)fill->needed << arena->chunk_shift;
    fill->huge = arena->shared;
    fill->large = (uint32_t)(UNTOUCHED_BYTES >> arena->chunk_shift);
    fill->bounds = (reader->dataset_fits || !reader->owns_arena) && bytes > UNTOUCHED_BYTES;
    bool wanted = fill->bounds || (arena->shared && bytes >= STEP_BYTES);
    for (uint32_t i = 0; i < FILL_THREADS_MAX; i++) {
        fill->busy[i] = SLOT_NONE;
    }
    fill->touched = wanted ? 0 : arena->slot_count;
    if (fill->bounds && !arena->shared) {
        fill->touched = fill->claimed = (uint32_t)(UNTOUCHED_BYTES >> arena->chunk_shift);
    }
}

void fill_join(dlfs_reader *reader)
{
    const dlfs_arena *arena = reader->arena;
    uint64_t first = SHARED_FIRST_BYTES >> arena->chunk_shift;
    uint32_t needed = share_needed(reader, arena->slot_count);
    if (arena->shared) {
        fill_want(reader, reader->dataset_fits && first < needed ? first : needed);
    }
}

/* Returns the slots that all readers want to be touched, at least those that are already. */
static uint32_t sum_wanted(const dlfs_arena *arena)
{
    uint64_t wanted = 0;
    bool waits = false;
    for (const dlfs_reader *reader = arena->readers; reader != NULL; reader = reader->share.next) {
        const struct shareholder *share = &reader->share;
        wanted += share->wanted > share->chunks ? share->wanted : share->chunks;
        waits |= reader->dataset_fits && reader->chunk_count >= arena->fill.large;
    }
    wanted += waits ? other_slots(arena) : 0;
    wanted = wanted > arena->fill.claimed ? wanted : arena->fill.claimed;
    return wanted < arena->slot_count ? (uint32_t)wanted : arena->slot_count;
}

void fill_want(dlfs_reader *reader, uint64_t slots)
{
    dlfs_arena *arena = reader->arena;
    struct fill *fill = &arena->fill;
    uint64_t chunks = reader->share.chunks + slots;
    chunks = chunks < arena->slot_count ? chunks : arena->slot_count;
    reader->share.wanted = chunks > reader->share.wanted ? (uint32_t)chunks : reader->share.wanted;
    uint32_t wanted = sum_wanted(arena);
    if (is_over(arena) || wanted <= fill->wanted) {
        return;
    }
    fill->wanted = wanted;
    if (!fill->running) {
        fill->running = thread_start(&fill->thread, NULL, fill_thread, arena) == 0;
    }
    if (!fill->running) {
        fill->failed = true;
        fill->touched = arena->slot_count;
    }
    pthread_cond_signal(&fill->work);
}

void fill_pause(dlfs_reader *reader)
{
    if (reader->dataset_fits) {
        reader->share.wanted = 0;
        reader->arena->fill.wanted = sum_wanted(reader->arena);
    }
}

bool fill_bounds_chunks(const dlfs_reader *reader)
{
    const struct fill *fill = &reader->arena->fill;
    return reader->dataset_fits && fill->bounds && reader->chunk_count >= fill->large &&
           !is_over(reader->arena);
}

uint32_t fill_room(const dlfs_reader *reader)
{
    const dlfs_arena *arena = reader->arena;
    if (!fill_bounds_chunks(reader)) {
        return reader->slots_max;
    }
    uint32_t used = arena->chunk_slot_count + other_slots(arena);
    return arena->fill.touched > used ? arena->fill.touched - used : 0;
}

uint64_t fill_admits(dlfs_reader *reader, uint64_t slots)
{
    pthread_mutex_lock(&reader->arena->lock);
    bool bounds = fill_bounds_chunks(reader);
    uint64_t room = bounds ? fill_room(reader) : slots;
    if (bounds) { /* also for a later read that is as large */
        fill_want(reader, 2 * slots);
    }
    pthread_mutex_unlock(&reader->arena->lock);
    return room < slots ? room : slots;
}

void fill_end(dlfs_arena *arena)
{
    struct fill *fill = &arena->fill;
    pthread_mutex_lock(&arena->lock);
    bool running = fill->running;
    fill->stop = true;
    fill->running = false;
    pthread_cond_signal(&fill->work);
    pthread_mutex_unlock(&arena->lock);
    if (running) {
        pthread_join(fill->thread, NULL);
    }
}
