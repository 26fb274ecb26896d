/* Touches the memory of an arena before reads need it. */
#ifndef DLFS_FILL_H
#define DLFS_FILL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "dlfs/dlfs.h"

#define FILL_THREADS_MAX 8u /* that touch memory at once */

/* The progress of the threads that touch the arena, a step at a time, from its first slot on. */
struct fill {
    pthread_t thread;
    pthread_cond_t work; /* `wanted` has grown, or the thread is to end */
    bool running;
    bool stop;
    bool huge;        /* shared memory is to be collapsed into huge pages */
    bool bounds;      /* until the end, no more chunks are loaded than slots were touched */
    bool failed;      /* the kernel refuses: reads touch the rest */
    uint32_t large;   /* chunks of a dataset that wait so, at least */
    uint32_t needed;  /* slots to touch until the end */
    uint32_t wanted;  /* slots that reads have asked for */
    uint32_t claimed; /* slots that were touched or are being touched */
    uint32_t touched; /* slots before every step in progress; all of the arena's at the end */
    uint32_t busy[FILL_THREADS_MAX]; /* first slots of the steps in progress; or SLOT_NONE */
    uint64_t step_ns;                /* mean time of the last steps */
};

/* Decides whether a thread is to touch the new arena, given its first reader. The lock is held. */
void fill_begin(dlfs_reader *reader);
/* Has the first slots of shared memory touched for a reader. The lock is held. */
void fill_join(dlfs_reader *reader);
/* Has the thread touch slots for this many more chunks of a reader. The lock is held. */
void fill_want(dlfs_reader *reader, uint64_t slots);
/* Has the thread touch no more for a reader until a read asks for it. The lock is held. */
void fill_pause(dlfs_reader *reader);
/* Returns true if another thread may touch a step, too. The lock is held. */
bool fill_needs_help(dlfs_arena *arena);
/* Touches a step if fill_needs_help. The lock is held, and released meanwhile. */
void fill_help(dlfs_arena *arena);
/* Has the next free slot touched, unless reads do that by themselves, or it lies behind the next
 * step. The lock is held, and released meanwhile. */
void fill_next_slot(dlfs_reader *reader);
/* Returns true if chunks have to wait for slots that were touched. The lock is held. */
bool fill_bounds_chunks(const dlfs_reader *reader);
/* Returns how many slots chunks may be read into now. The lock is held. */
uint32_t fill_room(const dlfs_reader *reader);
/*
 * Returns how many slots of these a read may put whole chunks into. Has the others touched for
 * later reads. Takes the lock.
 */
uint64_t fill_admits(dlfs_reader *reader, uint64_t slots);
/* Returns the slots of a step. */
uint32_t fill_step_slots(const dlfs_arena *arena);
/* Ends the thread, however far it has come. */
void fill_end(dlfs_arena *arena);

#endif
