/*
 * Finds samples by path, many at once.
 *
 * At ten million samples every lookup misses the caches at the last separators, the leaf, the name
 * block's offset and the name block. These misses in sequence take most of a microsecond. So a
 * group of lookups descends together, one level at a time, and each prefetches the memory of its
 * next step before the others take theirs.
 */
#include "directory/directory.h"

#include <errno.h>
#include <stdbool.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define GROUP                                                                                  \
    32u /* lookups in flight: about as many misses as a processor has outstanding; their state \
           stays in L1 */
#define CACHE_LINE_BYTES 64u
#define NAME_PREFETCH_SLACK_BYTES 32u
#define NAME_PREFETCH_BYTES_MAX 256u /* most blocks of 16 paths are no longer */

typedef struct probe {
    const uint8_t *path;
    uint64_t path_bytes;
    uint64_t hash;
    uint64_t node;      /* node in the current level; finally the leaf */
    uint32_t matches;   /* bit set: entries of the leaf with the same fingerprint */
    uint64_t candidate; /* index in the first of these entries */
} probe;

static inline void prefetch(const void *base, uint64_t bytes)
{
    for (uint64_t offset = 0; offset < bytes; offset += CACHE_LINE_BYTES) {
        __builtin_prefetch((const uint8_t *)base + offset);
    }
}

static inline uint32_t match_fingerprints(const uint32_t *fingerprints, uint32_t wanted)
{
#ifdef __SSE2__
    const __m128i *quads = (const __m128i *)fingerprints;
    __m128i key = _mm_set1_epi32((int)wanted);
    __m128i low = _mm_packs_epi32(_mm_cmpeq_epi32(_mm_load_si128(quads), key),
                                  _mm_cmpeq_epi32(_mm_load_si128(quads + 1), key));
    __m128i high = _mm_packs_epi32(_mm_cmpeq_epi32(_mm_load_si128(quads + 2), key),
                                   _mm_cmpeq_epi32(_mm_load_si128(quads + 3), key));
    return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(low, high));
#else
    uint32_t matches = 0;
    for (uint32_t i = 0; i < DLFS_DIRECTORY_NODE_KEYS; i++) {
        matches |= (uint32_t)(fingerprints[i] == wanted) << i;
    }
    return matches;
#endif
}

static inline const uint8_t *leaf_at(const dlfs_directory *directory, uint64_t leaf)
{
    return directory->leaves + leaf * directory->layout.leaf_bytes;
}

/* Returns the index in an entry of a leaf; UINT64_MAX if the entry is empty, whatever the width. */
static inline uint64_t leaf_index(const dlfs_directory *directory, uint64_t leaf, uint32_t entry)
{
    const uint8_t *indices = leaf_at(directory, leaf) + DLFS_DIRECTORY_NODE_KEYS * sizeof(uint32_t);
    if (directory->layout.index_bytes == sizeof(uint64_t)) {
        return ((const uint64_t *)indices)[entry];
    }
    uint32_t index = ((const uint32_t *)indices)[entry];
    return index == UINT32_MAX ? UINT64_MAX : index;
}

static void hash_group(const dlfs_directory *directory, const uint8_t *paths,
                       const uint64_t *offsets, uint32_t count, probe *probes)
{
    for (uint32_t i = 0; i < count; i++) {
        probe *p = &probes[i];
        p->path = paths + offsets[i];
        p->path_bytes = offsets[i + 1] - offsets[i];
        p->hash = dlfs_path_hash(p->path, p->path_bytes, directory->hash_seed);
        p->node = 0;
    }
}

/*
 * Returns the position of the last key of a node that is <= the hash, or 0. Bisects by arithmetic
 * rather than by branches, which would be unpredictable; a few steps of many lookups overlap.
 */
static inline uint64_t last_not_above(const uint64_t *node, uint64_t hash)
{
    uint64_t place = 0;
    for (uint64_t half = DLFS_DIRECTORY_NODE_KEYS / 2; half > 0; half /= 2) {
        place += (uint64_t)(node[place + half] <= hash) * half;
    }
    return place;
}

/*
 * Moves each lookup from its node to the node or leaf below, which the last key <= the hash
 * selects.
 */
static void descend_group(const dlfs_directory *directory, uint32_t level, uint32_t count,
                          probe *probes)
{
    const dlfs_directory_layout *layout = &directory->layout;
    const uint64_t *keys = directory->separators + layout->level_first[level];
    uint64_t last = layout->level_keys[level] - 1;
    const uint8_t *below = directory->leaves;
    uint64_t below_bytes = layout->leaf_bytes;
    if (level > 0) {
        below = (const uint8_t *)(directory->separators + layout->level_first[level - 1]);
        below_bytes = DLFS_DIRECTORY_NODE_KEYS * sizeof(uint64_t);
    }
    for (uint32_t i = 0; i < count; i++) {
        probe *p = &probes[i];
        uint64_t next = p->node * DLFS_DIRECTORY_NODE_KEYS;
        next += last_not_above(keys + next, p->hash);
        /* A hash of all ones also matches the padding. */
        p->node = next < last ? next : last;
        if (level <= 1) { /* the levels above are in the cache */
            prefetch(below + p->node * below_bytes, below_bytes);
        }
    }
}

static void match_group(const dlfs_directory *directory, const uint64_t *name_offsets,
                        uint32_t count, probe *probes)
{
    for (uint32_t i = 0; i < count; i++) {
        probe *p = &probes[i];
        p->matches =
            match_fingerprints((const uint32_t *)leaf_at(directory, p->node), (uint32_t)p->hash);
        p->candidate = UINT64_MAX;
        if (p->matches == 0) {
            continue;
        }
        p->candidate = leaf_index(directory, p->node, (uint32_t)__builtin_ctz(p->matches));
        if (p->candidate < directory->layout.sample_count) {
            prefetch(&name_offsets[p->candidate / DLFS_DIRECTORY_NODE_KEYS], 1);
        }
    }
}

static void fetch_names_group(const dlfs_directory *directory, const uint8_t *names, uint32_t count,
                              const probe *probes)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *begin;
        const uint8_t *end;
        if (probes[i].candidate >= directory->layout.sample_count) {
            continue;
        }
        uint64_t block = probes[i].candidate / DLFS_DIRECTORY_NODE_KEYS;
        if (dlfs_directory_name_block(directory, names, block, &begin, &end) < 0) {
            continue;
        }
        uint64_t bytes = (uint64_t)(end - begin);
        uint64_t entry = probes[i].candidate % DLFS_DIRECTORY_NODE_KEYS;
        /* Prefetches up to the candidate's name, assuming names of similar lengths. */
        uint64_t needed =
            NAME_PREFETCH_SLACK_BYTES + bytes * (entry + 1) / DLFS_DIRECTORY_NODE_KEYS;
        bytes = needed < bytes ? needed : bytes;
        bytes = bytes < NAME_PREFETCH_BYTES_MAX ? bytes : NAME_PREFETCH_BYTES_MAX;
        uint64_t ahead = (uintptr_t)begin % CACHE_LINE_BYTES;
        prefetch(begin - ahead, bytes + ahead);
    }
}

/*
 * Returns 1 and sets *out to the index if one of the entries in `matches` has the path; 0 if none
 * does; DLFS_E_FORMAT.
 */
static int check_entries(const dlfs_directory *directory, const uint8_t *names, const probe *p,
                         uint64_t leaf, uint32_t matches, uint64_t *out)
{
    for (; matches != 0; matches &= matches - 1) {
        uint64_t index = leaf_index(directory, leaf, (uint32_t)__builtin_ctz(matches));
        if (index == UINT64_MAX) {
            continue;
        }
        if (index >= directory->layout.sample_count) {
            return DLFS_E_FORMAT;
        }
        int code = dlfs_directory_name_equals(directory, names, index, p->path, p->path_bytes);
        if (code < 0) {
            return code;
        }
        if (code > 0) {
            *out = index;
            return 1;
        }
    }
    return 0;
}

static int check_probe(const dlfs_directory *directory, const uint8_t *names, const probe *p,
                       uint64_t *out)
{
    int code = check_entries(directory, names, p, p->node, p->matches, out);
    if (code != 0) {
        return code < 0 ? code : 0;
    }
    /*
     * Equal hashes can span two leaves: this leaf begins with the hash, so the one before may end
     * with it.
     */
    if (p->node > 0 && directory->separators[p->node] == p->hash) {
        uint64_t leaf = p->node - 1;
        uint32_t matches =
            match_fingerprints((const uint32_t *)leaf_at(directory, leaf), (uint32_t)p->hash);
        code = check_entries(directory, names, p, leaf, matches, out);
        if (code != 0) {
            return code < 0 ? code : 0;
        }
    }
    *out = UINT64_MAX;
    return 0;
}

static int find_group(const dlfs_directory *directory, const uint8_t *names, const uint8_t *paths,
                      const uint64_t *offsets, uint32_t count, uint64_t *out)
{
    probe probes[GROUP];
    hash_group(directory, paths, offsets, count, probes);
    for (uint32_t level = directory->layout.level_count; level-- > 0;) {
        descend_group(directory, level, count, probes);
    }
    match_group(directory, (const uint64_t *)names, count, probes);
    fetch_names_group(directory, names, count, probes);
    for (uint32_t i = 0; i < count; i++) {
        int code = check_probe(directory, names, &probes[i], &out[i]);
        if (code < 0) {
            return code;
        }
    }
    return 0;
}

int dlfs_directory_find(const dlfs_directory *directory, const uint8_t *paths,
                        const uint64_t *offsets, uint64_t count, uint64_t *out)
{
    const uint8_t *names = dlfs_directory_attached_names(directory);
    if (names == NULL) {
        return -EAGAIN;
    }
    if (directory->layout.sample_count == 0) {
        for (uint64_t i = 0; i < count; i++) {
            out[i] = UINT64_MAX;
        }
        return 0;
    }
    for (uint64_t first = 0; first < count; first += GROUP) {
        uint32_t group = count - first < GROUP ? (uint32_t)(count - first) : GROUP;
        int code = find_group(directory, names, paths, offsets + first, group, out + first);
        if (code < 0) {
            return code;
        }
    }
    return 0;
}
