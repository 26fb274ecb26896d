/*
 * Writes a directory segment: names, locations, storage order, tree, parts, checksums.
 *
 * There are two steps, between which the caller allocates space for the parts. Planning reads the
 * names once, checks every rule about paths, adds up the name blocks and chooses the hash seed.
 * Building writes. The sorts are radix sorts of (key, index) pairs: stable, so that equal keys stay
 * in index order, and linear for any keys.
 */
#include "directory/build.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define EQUAL_HASHES_MAX                                                                   \
    15u               /* most samples with one hash: they fit into two neighbouring leaves \
                       */
#define SEEDS_MAX 64u /* a second seed is only needed for paths made to collide */
#define RADIX_BITS 11u
#define RADIX_SIZE (1u << RADIX_BITS)

typedef struct pair {
    uint64_t key;
    uint64_t index;
} pair;

/* ---- sorting --------------------------------------------------------------------------------- */

static bool radix_pass(const pair *from, pair *to, uint64_t count, uint32_t shift)
{
    uint64_t starts[RADIX_SIZE] = {0};
    uint64_t sum = 0;

    for (uint64_t i = 0; i < count; i++) {
        starts[from[i].key >> shift & (RADIX_SIZE - 1)]++;
    }
    if (starts[from[0].key >> shift & (RADIX_SIZE - 1)] == count) {
        return false; /* all pairs have the same digit */
    }
    for (uint32_t digit = 0; digit < RADIX_SIZE; digit++) {
        uint64_t width = starts[digit];
        starts[digit] = sum;
        sum += width;
    }
    for (uint64_t i = 0; i < count; i++) {
        to[starts[from[i].key >> shift & (RADIX_SIZE - 1)]++] = from[i];
    }
    return true;
}

/* Sorts count > 0 pairs stably by key. Returns the array with the result: pairs or spare. */
static pair *radix_sort(pair *pairs, pair *spare, uint64_t count)
{
    for (uint32_t shift = 0; shift < 64; shift += RADIX_BITS) {
        if (radix_pass(pairs, spare, count, shift)) {
            pair *swap = pairs;
            pairs = spare;
            spare = swap;
        }
    }
    return pairs;
}

static pair *allocate_pairs(uint64_t count)
{
    /* Memory for both arrays of a sort; count is at most 2^48, so this cannot overflow. */
    return malloc((count > 0 ? count : 1) * 2 * sizeof(pair));
}

static void hash_names(const uint8_t *names, const uint64_t *offsets, uint64_t count, uint64_t seed,
                       pair *pairs)
{
    for (uint64_t i = 0; i < count; i++) {
        pairs[i].key = dlfs_path_hash(names + offsets[i], offsets[i + 1] - offsets[i], seed);
        pairs[i].index = i;
    }
}

/* ---- the seed -------------------------------------------------------------------------------- */

/*
 * Counts hashes by their first bits, in a table with at least twice as many counters as samples. If
 * no counter exceeds the limit, no hash does: this nearly always decides without a sort. Returns 1,
 * 0 or -ENOMEM.
 */
static int seed_is_plainly_good(const uint8_t *names, const uint64_t *offsets, uint64_t count,
                                uint64_t seed)
{
    uint32_t bits = 4;
    while (UINT64_C(1) << bits < 2 * count) {
        bits++;
    }
    uint8_t *counters = calloc(UINT64_C(1) << bits, 1);
    if (counters == NULL) {
        return -ENOMEM;
    }
    int good = 1;
    for (uint64_t i = 0; i < count && good; i++) {
        uint64_t hash = dlfs_path_hash(names + offsets[i], offsets[i + 1] - offsets[i], seed);
        if (++counters[hash >> (64 - bits)] > EQUAL_HASHES_MAX) {
            good = 0;
        }
    }
    free(counters);
    return good;
}

/* Decides the same exactly, by sorting. Returns 1, 0 or -ENOMEM. */
static int seed_is_good(const uint8_t *names, const uint64_t *offsets, uint64_t count,
                        uint64_t seed)
{
    if (count <= EQUAL_HASHES_MAX) {
        return 1;
    }
    int good = seed_is_plainly_good(names, offsets, count, seed);
    if (good != 0) {
        return good;
    }
    pair *pairs = allocate_pairs(count);
    if (pairs == NULL) {
        return -ENOMEM;
    }
    hash_names(names, offsets, count, seed, pairs);
    const pair *sorted = radix_sort(pairs, pairs + count, count);
    good = 1;
    for (uint64_t i = EQUAL_HASHES_MAX; i < count && good; i++) {
        good = sorted[i].key != sorted[i - EQUAL_HASHES_MAX].key;
    }
    free(pairs);
    return good;
}

static int choose_seed(const uint8_t *names, const uint64_t *offsets, uint64_t count,
                       uint64_t *seed)
{
    for (uint64_t candidate = 0; candidate < SEEDS_MAX; candidate++) {
        int good = seed_is_good(names, offsets, count, candidate);
        if (good < 0) {
            return good;
        }
        if (good > 0) {
            *seed = candidate;
            return 0;
        }
    }
    return -EINVAL;
}

/* Checks what does not depend on the samples. */
static int check_content(const dlfs_directory_content *content)
{
    uint32_t chunk = content->chunk_bytes;
    bool complete =
        content->offsets != NULL &&
        (content->count == 0 || (content->names != NULL && content->locations != NULL)) &&
        (content->empty_count == 0 ||
         (content->empty_names != NULL && content->empty_offsets != NULL));
    bool sized = chunk >= DLFS_CHUNK_BYTES_MIN && chunk <= DLFS_CHUNK_BYTES_MAX &&
                 (chunk & (chunk - 1)) == 0 && content->data_bytes % chunk == 0;
    if (!complete || !sized || content->count > DLFS_DIRECTORY_SAMPLES_MAX ||
        content->empty_count > DLFS_DIRECTORY_SAMPLES_MAX) {
        return -EINVAL;
    }
    bool parts = content->part_count > 0;
    if (parts && (content->parts == NULL || content->part_count != content->data_bytes / chunk)) {
        return -EINVAL;
    }
    return 0;
}

static int compute_layout(const dlfs_directory_content *content, uint64_t names_bytes,
                          dlfs_directory_layout *layout)
{
    const dlfs_directory_counts counts = {.sample_count = content->count,
                                          .names_bytes = names_bytes,
                                          .part_count = content->part_count,
                                          .empty_count = content->empty_count};
    return dlfs_directory_layout_compute(&counts, layout);
}

int dlfs_directory_plan_build(const dlfs_directory_content *content, dlfs_directory_plan *plan)
{
    dlfs_directory_layout layout;
    uint64_t bytes;
    uint64_t seed = 0;

    if (plan == NULL || content == NULL || check_content(content) < 0) {
        return -EINVAL;
    }
    uint64_t count = content->count;
    int code = dlfs_directory_encode_names(content, NULL, DLFS_DIRECTORY_NAMES_BYTES_MAX, &bytes);
    if (code < 0) {
        return code;
    }
    bytes = (bytes + DLFS_DIRECTORY_BLOCK_BYTES - 1) & ~(uint64_t)(DLFS_DIRECTORY_BLOCK_BYTES - 1);
    code = compute_layout(content, bytes, &layout);
    if (code == 0) {
        code = choose_seed(content->names, content->offsets, count, &seed);
    }
    if (code < 0) {
        return code;
    }
    *plan = (dlfs_directory_plan){.sample_count = count,
                                  .entries_bytes = layout.entries_bytes,
                                  .names_bytes = layout.names_bytes,
                                  .hash_seed = seed};
    return 0;
}

/* ---- sections -------------------------------------------------------------------------------- */

static void store_index(void *indices, uint32_t index_bytes, uint64_t at, uint64_t index)
{
    if (index_bytes == sizeof(uint32_t)) {
        ((uint32_t *)indices)[at] = (uint32_t)index;
    } else {
        ((uint64_t *)indices)[at] = index;
    }
}

/*
 * Checks the location of one sample: it lies in the data space, in chunks as it must, and if it is
 * larger than a chunk its CRC32C is that of its parts. Sets *large for such a sample.
 */
static int check_location(const dlfs_directory_content *content, const dlfs_location *location,
                          bool *large)
{
    uint64_t address = dlfs_location_address(location);
    uint64_t length = dlfs_location_length(location);
    if (address > content->data_bytes || length > content->data_bytes - address ||
        !dlfs_location_fits_chunks(location, content->chunk_bytes)) {
        return -EINVAL;
    }
    if (length <= content->chunk_bytes) {
        return 0;
    }
    *large = true;
    int code = dlfs_directory_check_parts(location, content->chunk_bytes, content->parts,
                                          content->part_count);
    return code < 0 ? -EINVAL : 0;
}

/* Writes the order section. -EINVAL: a location breaks a rule, or a sample begins in another. */
static int build_order(const dlfs_directory_layout *layout, const dlfs_directory_content *content,
                       pair *pairs, uint8_t *entries)
{
    uint64_t count = layout->sample_count;
    const dlfs_location *locations = content->locations;
    bool large = false;
    for (uint64_t i = 0; i < count; i++) {
        if (check_location(content, &locations[i], &large) < 0) {
            return -EINVAL;
        }
        pairs[i].key = dlfs_location_address(&locations[i]);
        pairs[i].index = i;
    }
    if (large != (content->part_count > 0)) {
        return -EINVAL;
    }
    const pair *sorted = count > 0 ? radix_sort(pairs, pairs + count, count) : pairs;
    uint64_t end = 0; /* end of the samples so far that have bytes */
    for (uint64_t rank = 0; rank < count; rank++) {
        const pair *at = &sorted[rank];
        uint64_t length = dlfs_location_length(&locations[at->index]);
        if (length > 0) {
            if (at->key < end) {
                return -EINVAL;
            }
            end = dlfs_location_end(&locations[at->index], content->chunk_bytes);
        }
        store_index(entries + layout->order_offset, layout->index_bytes, rank, at->index);
    }
    return 0;
}

static void build_separators(const dlfs_directory_layout *layout, const pair *sorted,
                             uint64_t *separators)
{
    memset(separators, 0xff, layout->separator_count * sizeof(uint64_t));
    for (uint64_t leaf = 0; leaf < layout->leaf_count; leaf++) {
        separators[leaf] = sorted[leaf * DLFS_DIRECTORY_NODE_KEYS].key;
    }
    for (uint32_t level = 1; level < layout->level_count; level++) {
        const uint64_t *below = separators + layout->level_first[level - 1];
        uint64_t *keys = separators + layout->level_first[level];
        for (uint64_t i = 0; i < layout->level_keys[level]; i++) {
            keys[i] = below[i * DLFS_DIRECTORY_NODE_KEYS];
        }
    }
}

static void build_tree(const dlfs_directory_layout *layout, const pair *sorted, uint8_t *entries)
{
    for (uint64_t leaf = 0; leaf < layout->leaf_count; leaf++) {
        uint8_t *base = entries + layout->leaves_offset + leaf * layout->leaf_bytes;
        uint32_t *fingerprints = (uint32_t *)base;
        void *indices = base + DLFS_DIRECTORY_NODE_KEYS * sizeof(uint32_t);
        for (uint32_t entry = 0; entry < DLFS_DIRECTORY_NODE_KEYS; entry++) {
            uint64_t at = leaf * DLFS_DIRECTORY_NODE_KEYS + entry;
            bool used = at < layout->sample_count;
            fingerprints[entry] = used ? (uint32_t)sorted[at].key : 0;
            store_index(indices, layout->index_bytes, entry, used ? sorted[at].index : UINT64_MAX);
        }
    }
    build_separators(layout, sorted, (uint64_t *)(entries + layout->separators_offset));
}

static void build_header(const dlfs_directory_layout *layout, const dlfs_directory_plan *plan,
                         const dlfs_directory_content *content, uint8_t *entries)
{
    dlfs_directory_header *header = (dlfs_directory_header *)entries;
    memcpy(header->magic, DLFS_DIRECTORY_MAGIC, sizeof(header->magic));
    memcpy(header->dataset_uuid, content->dataset_uuid, sizeof(header->dataset_uuid));
    header->version = DLFS_DIRECTORY_VERSION;
    header->header_bytes = sizeof(*header);
    header->sample_count = layout->sample_count;
    header->data_bytes = content->data_bytes;
    header->chunk_bytes = content->chunk_bytes;
    header->hash_seed = plan->hash_seed;
    memcpy(entries + offsetof(dlfs_directory_header, index_bytes),
           (const uint8_t *)layout + offsetof(dlfs_directory_layout, index_bytes),
           DLFS_DIRECTORY_COMMON_BYTES);
    header->parts_offset = layout->parts_offset;
    header->part_count = layout->part_count;
    header->empty_count = layout->empty_count;
}

/* Writes the checksums in the order of their dependence: blocks, tables, header. */
static void build_checksums(const dlfs_directory_layout *layout, uint8_t *entries,
                            const uint8_t *names)
{
    dlfs_directory_header *header = (dlfs_directory_header *)entries;
    uint8_t *tables = entries + layout->entries_checksums_offset;
    dlfs_crc32c_blocks(entries + layout->locations_offset,
                       layout->entries_bytes - layout->locations_offset, DLFS_DIRECTORY_BLOCK_BYTES,
                       (uint32_t *)tables);
    dlfs_crc32c_blocks(names, layout->names_bytes, DLFS_DIRECTORY_BLOCK_BYTES,
                       (uint32_t *)(entries + layout->names_checksums_offset));
    header->tables_crc32c =
        dlfs_crc32c(0, tables, layout->locations_offset - layout->entries_checksums_offset);
    header->header_crc32c = dlfs_crc32c(0, header, offsetof(dlfs_directory_header, header_crc32c));
}

/*
 * Checks a plan's sizes, which differ if it was not made for this content; a wrong plan never
 * causes a write out of bounds.
 */
static int check_plan(const dlfs_directory_plan *plan, const dlfs_directory_content *content,
                      dlfs_directory_layout *layout)
{
    if (plan->names_bytes % DLFS_DIRECTORY_BLOCK_BYTES != 0 || plan->hash_seed >= SEEDS_MAX ||
        plan->sample_count != content->count) {
        return -EINVAL;
    }
    int code = compute_layout(content, plan->names_bytes, layout);
    if (code < 0) {
        return code;
    }
    return layout->entries_bytes == plan->entries_bytes ? 0 : -EINVAL;
}

/* Writes the names, the order, the locations, the tree and the parts. */
static int build_sections(const dlfs_directory_layout *layout, const dlfs_directory_plan *plan,
                          const dlfs_directory_content *content, pair *pairs, uint8_t *entries,
                          uint8_t *names)
{
    uint64_t count = content->count;
    uint64_t used;
    int code = dlfs_directory_encode_names(content, names, layout->names_bytes, &used);
    if (code == 0 && layout->names_bytes - used >= DLFS_DIRECTORY_BLOCK_BYTES) {
        code = -EINVAL;
    }
    if (code == 0) {
        code = build_order(layout, content, pairs, entries);
    }
    if (code < 0 || count == 0) {
        return code;
    }
    memcpy(entries + layout->locations_offset, content->locations,
           count * sizeof(*content->locations));
    hash_names(content->names, content->offsets, count, plan->hash_seed, pairs);
    build_tree(layout, radix_sort(pairs, pairs + count, count), entries);
    if (content->part_count > 0) {
        memcpy(entries + layout->parts_offset, content->parts,
               content->part_count * sizeof(*content->parts));
    }
    return 0;
}

int dlfs_directory_build(const dlfs_directory_plan *plan, const dlfs_directory_content *content,
                         void *entries, void *names)
{
    dlfs_directory_layout layout;

    if (plan == NULL || content == NULL || entries == NULL || names == NULL ||
        check_content(content) < 0 ||
        ((uintptr_t)entries | (uintptr_t)names) % DLFS_DIRECTORY_ALIGNMENT != 0) {
        return -EINVAL;
    }
    int code = check_plan(plan, content, &layout);
    if (code < 0) {
        return code;
    }
    pair *pairs = allocate_pairs(layout.sample_count);
    if (pairs == NULL) {
        return -ENOMEM;
    }
    memset(entries, 0, layout.entries_bytes);
    memset(names, 0, layout.names_bytes);
    code = build_sections(&layout, plan, content, pairs, entries, names);
    if (code == 0) {
        build_header(&layout, plan, content, entries);
        build_checksums(&layout, entries, names);
    }
    free(pairs);
    return code;
}
