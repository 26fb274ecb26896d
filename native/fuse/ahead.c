/*
 * The belief goes up by two with each reading and down by one with each look-up, between bounds, so
 * that it stays high as long as every other file looked up is read.
 */
#include "ahead.h"

#include <string.h>

#define BELIEF_MAX 16
#define BELIEF_FIRST 12
#define BELIEF_ENOUGH 8

void ahead_init(struct ahead *ahead)
{
    memset(ahead, 0, sizeof *ahead);
    (void)pthread_mutex_init(&ahead->lock, NULL);
    atomic_init(&ahead->belief, BELIEF_FIRST);
}

void ahead_destroy(struct ahead *ahead)
{
    (void)pthread_mutex_destroy(&ahead->lock);
}

/* Lost updates of threads at the same time do not matter. */
bool ahead_looked_up(struct ahead *ahead)
{
    int32_t belief = atomic_load_explicit(&ahead->belief, memory_order_relaxed);
    if (belief > 0) {
        atomic_store_explicit(&ahead->belief, belief - 1, memory_order_relaxed);
    }
    return belief >= BELIEF_ENOUGH;
}

void ahead_was_read(struct ahead *ahead)
{
    int32_t belief = atomic_load_explicit(&ahead->belief, memory_order_relaxed) + 2;
    atomic_store_explicit(&ahead->belief, belief < BELIEF_MAX ? belief : BELIEF_MAX,
                          memory_order_relaxed);
}

/* The run that an index continues, or the one used longest ago, begun anew. */
static struct run *run_of(struct ahead *ahead, uint32_t slot, uint64_t index)
{
    struct run *oldest = &ahead->runs[0];
    for (uint32_t i = 0; i < AHEAD_RUNS; i++) {
        struct run *run = &ahead->runs[i];
        if (run->slot == slot && (run->next == index || run->next == index + 1)) {
            return run;
        }
        if (run->used < oldest->used) {
            oldest = run;
        }
    }
    *oldest = (struct run){.slot = slot, .next = index + 1};
    return oldest;
}

/* How many samples from an index on make one reading. */
static uint32_t extent(const dlfs_location *locations, uint64_t first, uint64_t count)
{
    uint64_t bytes = 0;
    uint32_t samples = 0;
    while (samples < AHEAD_SAMPLES && first + samples < count) {
        uint64_t length = dlfs_location_length(&locations[first + samples]);
        bytes += length;
        if (length > AHEAD_SAMPLE_BYTES_MAX || bytes > AHEAD_BYTES) {
            break;
        }
        samples++;
    }
    return samples;
}

uint32_t ahead_follow(struct ahead *ahead, uint32_t slot, uint64_t index,
                      const dlfs_location *locations, uint64_t count, uint64_t *first)
{
    uint32_t samples = 0;
    (void)pthread_mutex_lock(&ahead->lock);
    struct run *run = run_of(ahead, slot, index);
    run->used = ++ahead->clock;
    if (run->next == index) {
        run->next = index + 1;
        run->steps++;
    }
    if (run->until < index + 1) {
        run->until = index + 1;
    }
    /* The next reading begins when half of the last one has been used. */
    if (run->steps >= AHEAD_RUN_MIN && run->until - index <= AHEAD_SAMPLES / 2) {
        samples = extent(locations, run->until, count);
        *first = run->until;
        run->until += samples;
    }
    (void)pthread_mutex_unlock(&ahead->lock);
    return samples;
}
