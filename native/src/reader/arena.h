/*
 * The sample memory of a reader, the arena: a mapping cut into slots of one chunk each. All
 * functions are called with the reader's lock held.
 */
#ifndef DLFS_ARENA_H
#define DLFS_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "dlfs/dlfs.h"

#define SLOT_NONE UINT32_MAX
#define SLOTS_MIN 4u

enum slot_state {
    SLOT_FREE,
    SLOT_TRANSIENT, /* holds samples, or is being filled; free again without references */
    SLOT_LOADING,   /* a chunk of the dataset is being read into it */
    SLOT_CHUNK,     /* holds a verified chunk of the dataset; may be evicted without references */
    SLOT_PACKED,    /* holds copies of single verified samples (reader/cache.c) */
    SLOT_TAIL,      /* belongs to the run of slots that an earlier one heads */
};

/* The samples of a chunk that failed their checksum. */
struct bad_samples {
    uint64_t count;
    uint64_t capacity;    /* entries that fit into `addresses` */
    uint64_t addresses[]; /* ascending */
};

/* A place for one chunk in the arena. The first slot of a run describes the whole run. */
struct slot {
    uint64_t chunk;      /* LOADING, CHUNK: number of the run's first chunk in the dataset; PACKED:
                            bytes of the run that are used */
    uint64_t references; /* may exceed 2^32: each sample of a batch holds one */
    uint32_t run;        /* number of slots in the run that this one heads, mostly 1 */
    uint32_t previous;   /* neighbours in the list of free slots or of idle ones */
    uint32_t next;
    uint32_t waiters;        /* LOADING: first stream entry that waits for the chunk */
    uint32_t head;           /* TAIL: the slot that heads the run */
    uint32_t samples;        /* cached: number of samples in it; estimated for chunks */
    uint32_t uses;           /* cached: samples of it that were given since the last review */
    uint8_t idle_reviews;    /* cached: reviews in a row that found too few uses */
    uint8_t state;           /* enum slot_state */
    bool cached;             /* CHUNK, PACKED: belongs to the cache, and stays while it is idle */
    struct bad_samples *bad; /* CHUNK: samples that must not be given; NULL if all are sound */
    const void *owner;       /* LOADING: the stream that reads the chunk, or NULL */
};

/* A doubly linked list of slots. */
struct slot_list {
    uint32_t first; /* SLOT_NONE if empty */
    uint32_t last;
    uint32_t count;
};

struct location;

/* Maps the memory on the first call. Returns 0 or -errno. */
int arena_map(dlfs_reader *reader);
/* Unmaps the memory and frees the slots. */
void arena_free(dlfs_reader *reader);
/*
 * Takes a run of slots, TRANSIENT with one reference, and evicts idle chunks for it. With
 * `displace` it also evicts idle slots of the cache. Returns SLOT_NONE if there is no such run.
 */
uint32_t arena_take(dlfs_reader *reader, uint32_t run, bool displace);
/* Takes a run of slots for packed samples, from the end of the arena. Returns SLOT_NONE if there is
 * no such run. */
uint32_t arena_take_packed(dlfs_reader *reader, uint32_t run);
/* Returns the slot that heads the run of a slot: mostly the slot itself. */
uint32_t arena_head(const dlfs_reader *reader, uint32_t slot);
/* Takes a reference to the run of a slot. */
void arena_reference(dlfs_reader *reader, uint32_t slot);
/* Gives up a reference to the run of a slot. */
void arena_release(dlfs_reader *reader, uint32_t slot);
/* Frees an idle cached slot with its run, and removes its samples from the cache. */
void arena_evict_cached(dlfs_reader *reader, uint32_t slot);
/* Releases the slots of an empty cache map, unless an open stream is going to fill it. */
void arena_release_empty_map(dlfs_reader *reader);
/* Begins to load a chunk: its TRANSIENT slot becomes LOADING. */
void arena_begin_load(dlfs_reader *reader, uint32_t slot, uint64_t chunk, const void *owner);
/* Ends the load: a `valid` chunk becomes CHUNK, else the slot is TRANSIENT again. Takes over `bad`,
 * the samples that failed their checksum. */
void arena_end_load(dlfs_reader *reader, uint32_t slot, bool valid, struct bad_samples *bad);
/* Returns the slot of a chunk that is LOADING or CHUNK, or SLOT_NONE. */
uint32_t arena_find(const dlfs_reader *reader, uint64_t chunk);
/* Returns true, and the sample's offset in the arena, if the slot holds the sample intact. */
bool arena_holds(const dlfs_reader *reader, uint32_t slot, const struct location *location,
                 uint64_t *offset);
/* Finds an intact sample in a chunk or among the packed samples, and takes a reference to it.
 * Returns false if memory does not have it, else its offset in the arena. */
bool arena_look_up(dlfs_reader *reader, uint64_t index, const struct location *location,
                   uint64_t *offset);
/* Returns how many slots are free or may be evicted. */
uint32_t arena_available(const dlfs_reader *reader);

#endif
