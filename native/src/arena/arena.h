/*
 * The sample memory, the arena: a mapping cut into slots of one chunk each, which readers share.
 * All functions are called with the arena's lock held, unless they say otherwise.
 */
#ifndef DLFS_ARENA_H
#define DLFS_ARENA_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "arena/fill.h"
#include "dlfs/dlfs.h"

#define SLOT_NONE UINT32_MAX
#define SLOTS_MIN 4u

enum slot_state {
    SLOT_FREE,
    SLOT_TRANSIENT, /* holds samples, or is being filled; free again without references */
    SLOT_LOADING,   /* a chunk of the dataset is being read into it */
    SLOT_CHUNK,     /* holds a verified chunk of the dataset; may be evicted without references */
    SLOT_PACKED,    /* holds copies of single verified samples (arena/cache.c) */
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
    _Atomic bool resident;   /* CHUNK: is in the index of its reader (reader/residents.c) */
    dlfs_reader *reader;     /* that holds it; unset if it is free */
    struct bad_samples *bad; /* CHUNK: samples that must not be given; NULL if all are sound */
    const void *owner;       /* LOADING: the stream that reads the chunk, or NULL */
};

/* A doubly linked list of slots. */
struct slot_list {
    uint32_t first; /* SLOT_NONE if empty */
    uint32_t last;
    uint32_t count;
};

struct dlfs_arena {
    pthread_mutex_t lock;        /* guards the arena, and the lists of its readers */
    _Atomic uint32_t references; /* the creator's, and one for each reader */
    bool shared;                 /* other processes can map the memory */
    uint32_t chunk_shift;        /* log2 of the bytes of a slot */
    uint8_t *memory;             /* NULL until it is mapped */
    size_t bytes;
    int descriptor;     /* of the memory file, if it is shared; else -1 */
    struct slot *slots; /* [slot_count] */
    uint32_t slot_count;
    uint32_t chunk_slot_count; /* slots that are LOADING or CHUNK */
    uint32_t other_slots_most; /* most other slots that were in use at a time */
    struct slot_list free_slots;
    struct fill fill;
    dlfs_reader *readers;                /* list of those that have read */
    uint64_t taken;                      /* slots that were taken so far: the clock of the shares */
    uint64_t divided_at;                 /* value of `taken` when the shares were computed */
    uint32_t waiting;                    /* readers that lacked a slot within their share */
    uint32_t reserved;                   /* slots of all reservations */
    struct private_memory *idle_private; /* kept for the next batch */
    size_t idle_private_bytes;
};

/* A reader's part in its arena. Guarded by the arena's lock. */
struct shareholder {
    bool attached;       /* the reader has read: it is in the arena's list */
    bool active;         /* it had a share of its own when the shares were computed */
    bool waiting;        /* it lacked a slot within its share */
    uint32_t reserved;   /* slots that it has at least, for resident chunks and their index */
    uint32_t slots_used; /* slots that it holds */
    uint32_t chunks;     /* of them, those that are LOADING or CHUNK */
    uint32_t wanted;     /* slots for chunks that its reads have asked to have touched */
    uint32_t changes;    /* times that its share has changed */
    uint64_t used_at;    /* value of the arena's `taken` when it was read last */
    dlfs_reader *next;   /* in the arena's list */
};

struct location;

/* Creates an arena of this many slots, with one reference. Returns 0 or -ENOMEM. */
int arena_create(uint32_t slot_count, uint32_t chunk_shift, bool shared, dlfs_arena **out);
/* Gives up a reference; the last one frees the arena. The lock is not held. */
void arena_unreference(dlfs_arena *arena);
/* Makes the reader one of its arena's on the first call, and maps the memory. The lock is released
 * meanwhile. Returns 0 or -errno. */
int arena_attach(dlfs_reader *reader);
/* Frees all slots of a reader, which has no batch and no read under way. Takes the lock. */
void arena_detach(dlfs_reader *reader);
/*
 * Takes a run of slots, TRANSIENT with one reference, and evicts idle chunks for it. With
 * `displace` it also evicts idle slots of the cache. Returns SLOT_NONE if there is no such run, or
 * the reader's share is in use.
 */
uint32_t arena_take(dlfs_reader *reader, uint32_t run, bool displace);
/* Takes a run of slots for packed samples, from the end of the arena. Returns SLOT_NONE if there is
 * no such run. */
uint32_t arena_take_packed(dlfs_reader *reader, uint32_t run);
/* Has the reader woken when a slot is free that its share has room for. Returns SLOT_NONE. */
uint32_t arena_starve(dlfs_reader *reader);
/* Returns the slot that heads the run of a slot: mostly the slot itself. */
uint32_t arena_head(const dlfs_reader *reader, uint32_t slot);
/* Takes a reference to the run of a slot. */
void arena_reference(dlfs_reader *reader, uint32_t slot);
/* Gives up a reference to the run of a slot. */
void arena_release(dlfs_reader *reader, uint32_t slot);
/* Evicts idle slots of a reader that holds more than its share. */
void arena_evict_excess(dlfs_reader *reader);
/* Frees an idle slot with its run, and removes what it holds from the cache. */
void arena_evict(dlfs_reader *reader, uint32_t slot);
/* Releases the slots of an empty cache map, unless an open stream is going to fill it. */
void arena_release_empty_map(dlfs_reader *reader);
/* Begins to load a chunk: its TRANSIENT slot becomes LOADING. */
void arena_begin_load(dlfs_reader *reader, uint32_t slot, uint64_t chunk, const void *owner);
/* Ends the load: a `valid` chunk becomes CHUNK, else the slot is TRANSIENT again. Takes over `bad`,
 * the samples that failed their checksum. */
void arena_end_load(dlfs_reader *reader, uint32_t slot, bool valid, struct bad_samples *bad);
/* Enters a chunk that was loaded in the index of residents (reader/residents.c), unless a sample of
 * it failed. Does nothing without a reservation. */
void arena_make_resident(dlfs_reader *reader, uint32_t slot);
/* Returns the slot of a chunk that is LOADING or CHUNK, or SLOT_NONE. */
uint32_t arena_find(const dlfs_reader *reader, uint64_t chunk);
/* Returns true, and the sample's offset in the arena, if the slot holds the sample intact. */
bool arena_holds(const dlfs_reader *reader, uint32_t slot, const struct location *location,
                 uint64_t *offset);
/* Finds an intact sample in a chunk or among the packed samples, and takes a reference to it.
 * Returns false if memory does not have it, else its offset in the arena. */
bool arena_look_up(dlfs_reader *reader, uint64_t index, const struct location *location,
                   uint64_t *offset);
/* Returns how many slots the reader may take now: they are free or may be evicted. */
uint32_t arena_available(const dlfs_reader *reader);
/* Wakes all threads that wait for the arena's slots. */
void arena_wake_all(dlfs_arena *arena);

/* ---- arena/slots.c, for arena/arena.c ------------------------------------------------------ */

/* Puts all slots of a new arena into its list of free ones. */
void slots_init(dlfs_arena *arena);
/* Frees all slots of a reader, whatever is in them. */
void slots_free_all(dlfs_reader *reader);

/* ---- arena/shares.c ------------------------------------------------------------------------- */

/* Returns the slots that a dataset of so many chunks needs: no more than these, a quarter more, and
 * a margin. */
static inline uint64_t share_enough(uint64_t chunks)
{
    return chunks + chunks / 4 + 4 * (uint64_t)SLOTS_MIN;
}
/* Returns the slots that a reader can use, at most `most`. */
uint32_t share_needed(const dlfs_reader *reader, uint32_t most);
/* Returns true if a reader's share has room for the whole dataset. */
bool share_fits(const dlfs_reader *reader);
/* Returns true if a reader holds more than its share, which has shrunk. */
bool share_is_exceeded(const dlfs_reader *reader);
/* Returns true if a reader holds more than its share even without what may be evicted. */
bool share_is_pinned(const dlfs_reader *reader);
/* Computes the shares of the arena's readers: slots_max of each. */
void arena_divide(dlfs_arena *arena);
/* Notes that a reader is read. It gets a share of its own if it has none. */
void share_use(dlfs_reader *reader);
/* Divides the arena again if a reader is going to take slots that its share may have room for then.
 */
void share_claim(dlfs_reader *reader, uint32_t run);

#endif
