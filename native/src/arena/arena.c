/*
 * The sample memory: one mapping, cut into slots of a chunk each (arena/slots.c), which readers
 * share (arena/shares.c). It is mapped when the first of them reads.
 */
#include "arena/arena.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "arena/private_memory.h"
#include "platform/memory.h"
#include "reader/state.h"

#define SLOTS_MAX (UINT32_MAX / 2)
#define PAGE_SHIFT_MIN 12u
#define PART_OVERHEAD_BYTES 4096u /* read around a part of a sample, and kept with it, at most */
#define LARGE_BYTES ((size_t)2 << 20) /* dlfs_memory_map aligns larger mappings to this */

/* ---- create, destroy ------------------------------------------------------------------------- */

int arena_create(uint32_t slot_count, uint32_t chunk_shift, bool shared, dlfs_arena **out)
{
    dlfs_arena *arena = calloc(1, sizeof(*arena));
    struct slot *slots = calloc(slot_count, sizeof(*slots));
    if (arena == NULL || slots == NULL) {
        free(arena);
        free(slots);
        return -ENOMEM;
    }
    pthread_mutex_init(&arena->lock, NULL);
    pthread_cond_init(&arena->fill.work, NULL);
    atomic_init(&arena->references, 1);
    arena->shared = shared;
    arena->chunk_shift = chunk_shift;
    arena->descriptor = -1;
    arena->slots = slots;
    arena->slot_count = slot_count;
    slots_init(arena);
    *out = arena;
    return 0;
}

DLFS_API int dlfs_arena_create(const dlfs_arena_config *config, dlfs_arena **out)
{
    uint64_t chunk = config != NULL ? config->chunk_bytes : 0;
    if (chunk < DLFS_CHUNK_BYTES_MIN || chunk > DLFS_CHUNK_BYTES_MAX ||
        (chunk & (chunk - 1)) != 0 || (config->flags & ~DLFS_ARENA_SHARED) != 0) {
        return -EINVAL;
    }
    uint64_t slots = config->memory_bytes / chunk;
    if (slots < SLOTS_MIN || slots > SLOTS_MAX) {
        return DLFS_E_LIMIT;
    }
    return arena_create((uint32_t)slots, (uint32_t)__builtin_ctzll(chunk),
                        (config->flags & DLFS_ARENA_SHARED) != 0, out);
}

void arena_unreference(dlfs_arena *arena)
{
    if (arena == NULL ||
        atomic_fetch_sub_explicit(&arena->references, 1, memory_order_acq_rel) > 1) {
        return;
    }
    fill_end(arena);
    private_memory_free_all(arena);
    dlfs_memory_unmap(arena->memory, arena->bytes);
    if (arena->descriptor >= 0) {
        close(arena->descriptor);
    }
    free(arena->slots);
    pthread_cond_destroy(&arena->fill.work);
    pthread_mutex_destroy(&arena->lock);
    free(arena);
}

DLFS_API void dlfs_arena_destroy(dlfs_arena *arena)
{
    arena_unreference(arena);
}

DLFS_API void dlfs_arena_get_stats(dlfs_arena *arena, dlfs_arena_stats *stats)
{
    pthread_mutex_lock(&arena->lock);
    uint64_t used = arena->slot_count - arena->free_slots.count;
    *stats = (dlfs_arena_stats){
        .memory_bytes = (uint64_t)arena->slot_count << arena->chunk_shift,
        .held_bytes = used << arena->chunk_shift,
    };
    for (const dlfs_reader *reader = arena->readers; reader != NULL; reader = reader->share.next) {
        stats->readers++;
    }
    pthread_mutex_unlock(&arena->lock);
}

/* ---- the mapping ----------------------------------------------------------------------------- */

/* Maps the slots: private memory, or memory that other processes can map too. */
static int map_memory(dlfs_arena *arena)
{
    size_t bytes = (size_t)arena->slot_count << arena->chunk_shift;
    /* A small mapping is only aligned to pages, which is not enough for larger blocks. */
    if (arena->chunk_shift > PAGE_SHIFT_MIN && bytes < LARGE_BYTES) {
        bytes = LARGE_BYTES;
    }
    void *base;
    int code;
    if (!arena->shared) {
        code = dlfs_memory_map(bytes, &base, NULL);
    } else {
        bytes = memory_length(bytes); /* other processes map whole pages */
        code = bytes > 0 ? memory_create_shared("dlfs-arena", bytes, true, MEMORY_OWNER_WRITES,
                                                &base, &arena->descriptor)
                         : -ENOMEM;
    }
    if (code == 0) {
        arena->memory = base;
        arena->bytes = bytes;
    }
    return code;
}

/* A reader's arrays, which take a look at each sample to make. */
struct arrays {
    uint32_t *chunk_slots;
    uint32_t *chunk_data;
    uint64_t slots_enough;
    bool in_one_chunk; /* every sample lies in one chunk */
};

static bool reads_parts(const dlfs_reader *reader)
{
    return (reader->config.flags & DLFS_READER_PARTS) != 0;
}

/*
 * Finds how many bytes of each chunk hold samples. The directory's order would say it sooner, but
 * all that is looked up in a chunk must have been read, so it is found from the same locations.
 * Parts of samples are not read by whole chunks, so they may need fewer slots than there are.
 */
static void measure_chunks(const dlfs_reader *reader, struct arrays *arrays)
{
    uint32_t *chunk_data = arrays->chunk_data;
    uint64_t blocks = reader->config.block_bytes - 1;
    uint64_t bytes = 0;
    arrays->in_one_chunk = true;
    for (uint64_t index = 0; index < reader->sample_count; index++) {
        struct location location;
        if (!reader_locate(reader, index, &location) || location.length == 0) {
            continue;
        }
        uint64_t last = location.address + location.length - 1;
        uint64_t chunk = last >> reader->chunk_shift;
        uint32_t end = (uint32_t)(((last & (reader->config.chunk_bytes - 1)) | blocks) + 1);
        chunk_data[chunk] = end > chunk_data[chunk] ? end : chunk_data[chunk];
        for (uint64_t full = location.chunk; full < chunk; full++) {
            chunk_data[full] = reader->config.chunk_bytes;
            arrays->in_one_chunk = false;
        }
        bytes += location.length + PART_OVERHEAD_BYTES;
    }
    uint64_t chunks = (bytes >> reader->chunk_shift) + 1;
    bool fewer = reads_parts(reader) && chunks < reader->chunk_count;
    arrays->slots_enough = share_enough(fewer ? chunks : reader->chunk_count);
}

static int arrays_make(const dlfs_reader *reader, struct arrays *arrays)
{
    arrays->chunk_slots = calloc(reader->chunk_count + 1, sizeof(*arrays->chunk_slots));
    arrays->chunk_data = calloc(reader->chunk_count + 1, sizeof(*arrays->chunk_data));
    if (arrays->chunk_slots == NULL || arrays->chunk_data == NULL) {
        return -ENOMEM;
    }
    measure_chunks(reader, arrays);
    return 0;
}

/* Makes the reader one of its arena's, with its arrays. */
static int attach(dlfs_reader *reader, const struct arrays *arrays)
{
    dlfs_arena *arena = reader->arena;
    bool maps = arena->memory == NULL;
    int code = maps ? map_memory(arena) : 0;
    if (code < 0) {
        return code;
    }
    reader->chunk_slots = arrays->chunk_slots;
    reader->chunk_data = arrays->chunk_data;
    reader->in_one_chunk = arrays->in_one_chunk && !reads_parts(reader);
    reader->slots_enough = arrays->slots_enough;
    reader->idle_slots = (struct slot_list){SLOT_NONE, SLOT_NONE, 0};
    reader->share.attached = true;
    reader->share.next = arena->readers;
    arena->readers = reader;
    share_use(reader);
    if (maps) {
        fill_begin(reader);
    }
    fill_join(reader);
    return 0;
}

int arena_attach(dlfs_reader *reader)
{
    if (reader->share.attached) {
        share_use(reader);
        return 0;
    }
    struct arrays arrays = {0};
    pthread_mutex_unlock(&reader->arena->lock); /* the other readers do not wait for this one */
    int code = arrays_make(reader, &arrays);
    pthread_mutex_lock(&reader->arena->lock);
    bool attaches = code == 0 && !reader->share.attached;
    code = attaches ? attach(reader, &arrays) : code;
    if (!attaches || code < 0) {
        free(arrays.chunk_slots);
        free(arrays.chunk_data);
    }
    return code;
}

void arena_detach(dlfs_reader *reader)
{
    dlfs_arena *arena = reader->arena;
    pthread_mutex_lock(&arena->lock);
    if (reader->share.attached) {
        slots_free_all(reader);
        dlfs_reader **at = &arena->readers;
        while (*at != reader) {
            at = &(*at)->share.next;
        }
        *at = reader->share.next;
        arena->waiting -= reader->share.waiting;
        arena_divide(arena);
    }
    pthread_mutex_unlock(&arena->lock);
    free(reader->chunk_slots);
    free(reader->chunk_data);
}
