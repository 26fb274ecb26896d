/*
 * Builds a directory segment from a stream of paths: names, locations, storage order, tree, parts,
 * checksums.
 *
 * Names are encoded and locations stored as they come, each in memory that grows. At the end both
 * are moved behind what precedes them in the segment. Then the samples are sorted by address, and
 * after that by the hash of their path, in the same memory. The hashes are those of the paths
 * decoded from the names part, twice for each seed that is tried.
 *
 * A sort puts (key, index) pairs into ranges of keys, and sorts each range, by radix sorts: stable,
 * so that equal keys stay in index order, and linear for any keys.
 */
#include "directory/build.h"

#include <errno.h>
#include <stdlib.h>

#define EQUAL_HASHES_MAX                                                                   \
    15u               /* most samples with one hash: they fit into two neighbouring leaves \
                       */
#define SEEDS_MAX 64u /* a second seed is only needed for paths made to collide */
#define RADIX_BITS 11u
#define RADIX_SIZE (1u << RADIX_BITS)
#define SPREAD_BITS 5u     /* beyond those of the count: one pair in 32 has equal leading bits */
#define PREFETCH_RANKS 32u /* locations that are brought into the cache ahead */

struct dlfs_directory_builder {
    dlfs_directory_config config;
    bool ended;                    /* after an error, or complete */
    struct growing_memory entries; /* locations; at the end, the entries part */
    uint64_t sample_bytes;
    bool large; /* a sample is larger than a chunk */

    struct path_walk walk;    /* over samples and directories */
    struct name_list samples; /* its text becomes the names part */
    uint32_t samples_shared;  /* bytes common to all paths of the walk since the last sample */
    struct name_list empty;   /* directories that nothing lies below */
    uint32_t empty_shared;    /* bytes common to all paths since the last of these */

    struct growing_memory directory_text; /* all added directories */
    struct growing_memory
        directory_starts; /* uint64_t: position of each in the text, and the end */
    uint64_t directory_count;
    uint64_t directories_taken; /* those that the walk has passed */
    bool pending;               /* the last of them is empty unless the next path lies below it */
    uint32_t pending_shared;    /* the bytes that it shares with the empty directory before it */
};

typedef struct pair {
    uint64_t key;
    uint64_t index;
} pair;

/* ---- paths ----------------------------------------------------------------------------------- */

int dlfs_directory_builder_create(const dlfs_directory_config *config, dlfs_directory_builder **out)
{
    if (config == NULL || out == NULL) {
        return -EINVAL;
    }
    uint32_t chunk = config->chunk_bytes;
    if (chunk < DLFS_CHUNK_BYTES_MIN || chunk > DLFS_CHUNK_BYTES_MAX ||
        (chunk & (chunk - 1)) != 0 || config->data_bytes % chunk != 0) {
        return -EINVAL;
    }
    dlfs_directory_builder *builder = calloc(1, sizeof(*builder));
    if (builder == NULL) {
        return -ENOMEM;
    }
    builder->config = *config;
    builder->samples_shared = UINT32_MAX;
    builder->empty_shared = UINT32_MAX;
    *out = builder;
    return 0;
}

void dlfs_directory_builder_destroy(dlfs_directory_builder *builder)
{
    if (builder == NULL) {
        return;
    }
    growing_memory_free(&builder->entries);
    growing_memory_free(&builder->directory_text);
    growing_memory_free(&builder->directory_starts);
    dlfs_name_list_free(&builder->samples);
    dlfs_name_list_free(&builder->empty);
    free(builder);
}

/* Returns the path of an added directory, and its length. */
static const uint8_t *directory_path(const dlfs_directory_builder *builder, uint64_t number,
                                     uint64_t *bytes)
{
    const uint64_t *starts = (const uint64_t *)builder->directory_starts.base;
    *bytes = starts[number + 1] - starts[number];
    return builder->directory_text.base + starts[number];
}

/* Returns the rule that a directory breaks by itself, or with the one before it, or 0. */
static uint32_t check_directory(const dlfs_directory_builder *builder, const uint8_t *path,
                                uint64_t bytes)
{
    if (bytes == 0 || bytes > DLFS_PATH_BYTES_MAX || path[bytes - 1] != '/' ||
        !dlfs_path_is_valid(path, bytes - 1)) {
        return DLFS_PATH_MALFORMED;
    }
    if (builder->directory_count > 0) {
        uint64_t last_bytes;
        const uint8_t *last = directory_path(builder, builder->directory_count - 1, &last_bytes);
        if (dlfs_compare_paths(last, last_bytes, path, bytes) >= 0) {
            return DLFS_PATH_UNSORTED;
        }
    }
    return 0;
}

/* Stores one directory. -ENOMEM. */
static int store_directory(dlfs_directory_builder *builder, const uint8_t *path, uint64_t bytes)
{
    uint64_t number = builder->directory_count;
    uint64_t end = number > 0 ? ((const uint64_t *)builder->directory_starts.base)[number] : 0;
    if (growing_memory_reserve(&builder->directory_text, end + bytes) < 0 ||
        growing_memory_reserve(&builder->directory_starts, (number + 2) * sizeof(uint64_t)) < 0) {
        return -ENOMEM;
    }
    memcpy(builder->directory_text.base + end, path, bytes);
    ((uint64_t *)builder->directory_starts.base)[number + 1] = end + bytes;
    builder->directory_count++;
    return 0;
}

int dlfs_directory_builder_add_directories(dlfs_directory_builder *builder, const uint8_t *names,
                                           const uint64_t *offsets, uint64_t count,
                                           dlfs_path_refusal *refusal)
{
    if (builder == NULL || refusal == NULL || (count > 0 && (names == NULL || offsets == NULL))) {
        return -EINVAL;
    }
    *refusal = (dlfs_path_refusal){.is_directory = 1};
    if (builder->ended || builder->samples.count > 0 ||
        count > DLFS_DIRECTORY_SAMPLES_MAX - builder->directory_count) {
        return -EINVAL;
    }
    int code = 0;
    for (uint64_t i = 0; i < count && code == 0; i++) {
        const uint8_t *path = names + offsets[i];
        uint64_t bytes = offsets[i + 1] - offsets[i];
        refusal->index = builder->directory_count;
        if (offsets[i + 1] >= offsets[i]) {
            refusal->rule = check_directory(builder, path, bytes);
        }
        bool refused = offsets[i + 1] < offsets[i] || refusal->rule != 0;
        code = refused ? -EINVAL : store_directory(builder, path, bytes);
    }
    builder->ended = code < 0;
    return code;
}

/* Encodes the last directory of the walk, unless the next path, which may be NULL, lies below. */
static int encode_pending(dlfs_directory_builder *builder, const uint8_t *next, uint64_t bytes)
{
    if (!builder->pending) {
        return 0;
    }
    uint64_t path_bytes;
    const uint8_t *path = directory_path(builder, builder->directories_taken - 1, &path_bytes);
    builder->pending = false;
    if (next != NULL && bytes >= path_bytes && memcmp(next, path, path_bytes) == 0) {
        return 0;
    }
    builder->empty_shared = UINT32_MAX;
    return dlfs_name_list_add(&builder->empty, path, (uint32_t)path_bytes, builder->pending_shared);
}

/*
 * Takes the next path of samples and directories together. Of paths in order, two have as many
 * bytes in common as the pair of neighbours between them that has the fewest. Errors: -EINVAL and
 * the refusal's rule, -ENOMEM.
 */
static int take_path(dlfs_directory_builder *builder, const uint8_t *path, uint64_t bytes,
                     bool directory, dlfs_path_refusal *refusal)
{
    uint32_t common = 0;
    refusal->rule = dlfs_path_walk_next(&builder->walk, path, bytes, directory, &common);
    if (refusal->rule != 0) {
        refusal->prefix_bytes = common;
        return -EINVAL;
    }
    int code = encode_pending(builder, path, bytes);
    if (common < builder->samples_shared) {
        builder->samples_shared = common;
    }
    if (common < builder->empty_shared) {
        builder->empty_shared = common;
    }
    return code;
}

/* Takes the directories before a sample, or all without one. Errors: as take_path. */
static int take_directories(dlfs_directory_builder *builder, const uint8_t *sample, uint64_t bytes,
                            dlfs_path_refusal *refusal)
{
    while (builder->directories_taken < builder->directory_count) {
        uint64_t path_bytes;
        const uint8_t *path = directory_path(builder, builder->directories_taken, &path_bytes);
        if (sample != NULL && dlfs_compare_paths(sample, bytes, path, path_bytes) < 0) {
            break;
        }
        int code = take_path(builder, path, path_bytes, true, refusal);
        if (code < 0) {
            refusal->index = builder->directories_taken;
            refusal->is_directory = 1;
            return code;
        }
        builder->directories_taken++;
        builder->pending = true;
        builder->pending_shared = builder->empty_shared;
    }
    return 0;
}

static int take_sample(dlfs_directory_builder *builder, const uint8_t *path, uint64_t bytes,
                       const dlfs_location *location, dlfs_path_refusal *refusal)
{
    int code = take_directories(builder, path, bytes, refusal);
    if (code == 0) {
        code = take_path(builder, path, bytes, false, refusal);
    }
    if (code < 0) {
        return code;
    }
    uint64_t length = dlfs_location_length(location);
    ((dlfs_location *)builder->entries.base)[builder->samples.count] = *location;
    builder->sample_bytes += length;
    builder->large = builder->large || length > builder->config.chunk_bytes;
    code = dlfs_name_list_add(&builder->samples, path, (uint32_t)bytes, builder->samples_shared);
    builder->samples_shared = UINT32_MAX;
    return code;
}

int dlfs_directory_builder_add(dlfs_directory_builder *builder, const uint8_t *names,
                               const uint64_t *offsets, const dlfs_location *locations,
                               const uint64_t *order, uint64_t count, dlfs_path_refusal *refusal)
{
    if (builder == NULL || refusal == NULL ||
        (count > 0 && (names == NULL || offsets == NULL || locations == NULL))) {
        return -EINVAL;
    }
    *refusal = (dlfs_path_refusal){.rule = 0};
    if (builder->ended || count > DLFS_DIRECTORY_SAMPLES_MAX - builder->samples.count) {
        return -EINVAL;
    }
    int code = growing_memory_reserve(&builder->entries,
                                      (builder->samples.count + count) * sizeof(dlfs_location));
    for (uint64_t k = 0; k < count && code == 0; k++) {
        uint64_t i = order != NULL ? order[k] : k;
        refusal->index = k;
        code = offsets[i + 1] < offsets[i]
                   ? -EINVAL
                   : take_sample(builder, names + offsets[i], offsets[i + 1] - offsets[i],
                                 &locations[i], refusal);
    }
    dlfs_path_walk_save(&builder->walk);
    builder->ended = code < 0;
    return code;
}

int dlfs_directory_builder_resize(dlfs_directory_builder *builder, uint64_t data_bytes)
{
    if (builder == NULL || builder->ended || data_bytes % builder->config.chunk_bytes != 0) {
        return -EINVAL;
    }
    builder->config.data_bytes = data_bytes;
    return 0;
}

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

/* Sorts count > 0 pairs stably by the bits of their keys from `shift` on. spare has as much room.
 */
static void radix_sort(pair *pairs, pair *spare, uint64_t count, uint32_t shift)
{
    pair *from = pairs;
    pair *to = spare;
    for (; shift < 64; shift += RADIX_BITS) {
        if (radix_pass(from, to, count, shift)) {
            pair *swap = from;
            from = to;
            to = swap;
        }
    }
    if (from != pairs) {
        memcpy(pairs, from, count * sizeof(*pairs));
    }
}

/*
 * Inserts each pair that is before the one before it where it belongs. Returns false if that takes
 * more moves than there are pairs; equal keys are in their order then, too.
 */
static bool insert_pairs(pair *pairs, uint64_t count)
{
    uint64_t moves = 0;
    for (uint64_t i = 1; i < count; i++) {
        pair moved = pairs[i];
        uint64_t at = i;
        while (at > 0 && moved.key < pairs[at - 1].key) {
            if (++moves > count) {
                pairs[at] = moved;
                return false;
            }
            pairs[at] = pairs[at - 1];
            at--;
        }
        pairs[at] = moved;
    }
    return true;
}

/*
 * Sorts the pairs of a range, whose keys have the same bits from `shift` on. Keys that are spread
 * evenly are sorted by their leading bits, with which few neighbours are out of order.
 */
static void sort_range(pair *pairs, pair *spare, uint64_t count, uint32_t shift)
{
    if (insert_pairs(pairs, count)) {
        return;
    }
    uint32_t bits = SPREAD_BITS;
    while (count >> (bits - SPREAD_BITS) > 0 && bits < 64) {
        bits++;
    }
    uint32_t passes = (bits + RADIX_BITS - 1) / RADIX_BITS;
    if (passes * RADIX_BITS < shift) {
        radix_sort(pairs, spare, count, shift - passes * RADIX_BITS);
        if (insert_pairs(pairs, count)) {
            return;
        }
    }
    radix_sort(pairs, spare, count, 0);
}

/* What samples are sorted by: the address of each, or the hash of its path. */
struct sort_keys {
    uint64_t count;
    uint32_t shift;                 /* keys >> shift are below RADIX_SIZE */
    const dlfs_location *locations; /* NULL: hashes */
    const uint8_t *names;           /* a names part that was made here */
    uint64_t seed;
};

/* Reads the keys in the order of the samples. */
struct key_reader {
    const struct sort_keys *keys;
    uint64_t index;
    const uint8_t *at;
    uint8_t path[DLFS_PATH_BYTES_MAX];
};

static uint32_t read_varint(const uint8_t **at)
{
    uint32_t value = *(*at)++;
    return value < 0x80 ? value : (value & 0x7f) | (uint32_t) * (*at)++ << 7;
}

static void read_keys_from_start(struct key_reader *reader, const struct sort_keys *keys)
{
    reader->keys = keys;
    reader->index = 0;
    reader->at = keys->locations == NULL ? keys->names + *(const uint64_t *)keys->names : NULL;
}

static uint64_t next_key(struct key_reader *reader)
{
    const struct sort_keys *keys = reader->keys;
    if (keys->locations != NULL) {
        return dlfs_location_address(&keys->locations[reader->index++]);
    }
    uint32_t shared = read_varint(&reader->at);
    uint32_t suffix_bytes = read_varint(&reader->at);
    memcpy(reader->path + shared, reader->at, suffix_bytes);
    reader->at += suffix_bytes;
    return dlfs_path_hash(reader->path, shared + suffix_bytes, keys->seed);
}

/*
 * Sorts the samples by their keys, and by their indices where keys are equal, into pairs[0..count).
 * The keys are read twice: to count those in each range, and to put them there. Then each range is
 * sorted in memory as long as it. -ENOMEM.
 */
static int sort_by_keys(const struct sort_keys *keys, pair *pairs)
{
    uint64_t ends[RADIX_SIZE + 1] = {0}; /* [k + 1]: the end of range k */
    uint64_t largest = 0;
    struct key_reader reader;
    read_keys_from_start(&reader, keys);
    for (uint64_t i = 0; i < keys->count; i++) {
        ends[(next_key(&reader) >> keys->shift) + 1]++;
    }
    for (uint32_t range = 0; range < RADIX_SIZE; range++) {
        largest = ends[range + 1] > largest ? ends[range + 1] : largest;
        ends[range + 1] += ends[range];
    }
    pair *spare = malloc(largest * sizeof(*spare) + 1);
    if (spare == NULL) {
        return -ENOMEM;
    }
    read_keys_from_start(&reader, keys);
    for (uint64_t i = 0; i < keys->count; i++) {
        uint64_t key = next_key(&reader);
        pairs[ends[key >> keys->shift]++] = (pair){.key = key, .index = i};
    }
    for (uint32_t range = 0; range < RADIX_SIZE; range++) { /* each entry moved to its end */
        uint64_t start = range > 0 ? ends[range - 1] : 0;
        sort_range(pairs + start, spare, ends[range] - start, keys->shift);
    }
    free(spare);
    return 0;
}

/*
 * Sorts the samples by the hash of their path, with the smallest seed with which no hash is too
 * frequent. Errors: -EINVAL (no seed will do), -ENOMEM.
 */
static int sort_hashes(const uint8_t *names, uint64_t count, pair *pairs, uint64_t *seed)
{
    struct sort_keys keys = {.count = count, .shift = 64 - RADIX_BITS, .names = names};
    for (; keys.seed < SEEDS_MAX; keys.seed++) {
        int code = sort_by_keys(&keys, pairs);
        if (code < 0) {
            return code;
        }
        bool good = true;
        for (uint64_t i = EQUAL_HASHES_MAX; i < count && good; i++) {
            good = pairs[i].key != pairs[i - EQUAL_HASHES_MAX].key;
        }
        if (good) {
            *seed = keys.seed;
            return 0;
        }
    }
    return -EINVAL;
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
 * larger than a chunk its CRC32C is that of its parts.
 */
static int check_location(const dlfs_directory_config *config, const dlfs_directory_layout *layout,
                          const uint8_t *entries, const dlfs_location *location)
{
    uint64_t address = dlfs_location_address(location);
    uint64_t length = dlfs_location_length(location);
    if (address > config->data_bytes || length > config->data_bytes - address ||
        !dlfs_location_fits_chunks(location, config->chunk_bytes)) {
        return -EINVAL;
    }
    if (length <= config->chunk_bytes) {
        return 0;
    }
    int code = dlfs_directory_check_parts(location, config->chunk_bytes,
                                          (const uint32_t *)(entries + layout->parts_offset),
                                          layout->part_count);
    return code < 0 ? -EINVAL : 0;
}

/* Writes the order section. Errors: -EINVAL (a location breaks a rule, or a sample begins in
 * another), -ENOMEM. */
static int build_order(const dlfs_directory_config *config, const dlfs_directory_layout *layout,
                       pair *pairs, uint8_t *entries)
{
    uint64_t count = layout->sample_count;
    const dlfs_location *locations = (const dlfs_location *)(entries + layout->locations_offset);
    struct sort_keys keys = {.count = count, .locations = locations};
    bool rising = true;
    for (uint64_t i = 0; i < count; i++) {
        if (check_location(config, layout, entries, &locations[i]) < 0) {
            return -EINVAL;
        }
        rising = rising && (i == 0 || dlfs_location_address(&locations[i - 1]) <=
                                          dlfs_location_address(&locations[i]));
    }
    while (config->data_bytes >> keys.shift >= RADIX_SIZE) {
        keys.shift++;
    }
    int code = rising ? 0 : sort_by_keys(&keys, pairs);
    if (code < 0) {
        return code;
    }
    uint64_t end = 0; /* end of the samples so far that have bytes */
    for (uint64_t rank = 0; rank < count; rank++) {
        uint64_t index = rising ? rank : pairs[rank].index;
        if (count - rank > PREFETCH_RANKS) {
            __builtin_prefetch(&locations[rising ? rank : pairs[rank + PREFETCH_RANKS].index]);
        }
        const dlfs_location *location = &locations[index];
        if (dlfs_location_length(location) > 0) {
            if (dlfs_location_address(location) < end) {
                return -EINVAL;
            }
            end = dlfs_location_end(location, config->chunk_bytes);
        }
        store_index(entries + layout->order_offset, layout->index_bytes, rank, index);
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

static void build_header(const dlfs_directory_layout *layout, const dlfs_directory_config *config,
                         uint64_t seed, uint8_t *entries)
{
    dlfs_directory_header *header = (dlfs_directory_header *)entries;
    memcpy(header->magic, DLFS_DIRECTORY_MAGIC, sizeof(header->magic));
    memcpy(header->dataset_uuid, config->dataset_uuid, sizeof(header->dataset_uuid));
    header->version = DLFS_DIRECTORY_VERSION;
    header->header_bytes = sizeof(*header);
    header->sample_count = layout->sample_count;
    header->data_bytes = config->data_bytes;
    header->chunk_bytes = config->chunk_bytes;
    header->hash_seed = seed;
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

/* ---- the end --------------------------------------------------------------------------------- */

/* Writes order and tree. Errors: -EINVAL (a location), -ENOMEM. */
static int build_sorted(const dlfs_directory_config *config, const dlfs_directory_layout *layout,
                        uint8_t *entries, const uint8_t *names, uint64_t *seed)
{
    uint64_t count = layout->sample_count;
    if (count == 0) {
        return 0;
    }
    pair *pairs = malloc(count * sizeof(*pairs)); /* count is at most 2^48: no overflow */
    if (pairs == NULL) {
        return -ENOMEM;
    }
    int code = build_order(config, layout, pairs, entries);
    if (code == 0) {
        code = sort_hashes(names, count, pairs, seed);
    }
    if (code == 0) {
        build_tree(layout, pairs, entries);
    }
    free(pairs);
    return code;
}

/* Makes the locations a section of the entries part, which is zero elsewhere. -ENOMEM. */
static int place_locations(const dlfs_directory_layout *layout, struct growing_memory *entries)
{
    uint64_t bytes = layout->sample_count * sizeof(dlfs_location);
    int code = growing_memory_resize(entries, layout->entries_bytes);
    if (code < 0) {
        return code;
    }
    memmove(entries->base + layout->locations_offset, entries->base, bytes);
    memset(entries->base, 0, layout->locations_offset);
    return 0;
}

static int build_segment(dlfs_directory_builder *builder, const uint32_t *parts,
                         uint64_t part_count, dlfs_directory_segment *segment)
{
    const dlfs_directory_config *config = &builder->config;
    uint64_t chunks = config->data_bytes / config->chunk_bytes;
    dlfs_directory_counts counts = {.sample_count = builder->samples.count,
                                    .part_count = builder->large ? chunks : 0,
                                    .empty_count = builder->empty.count};
    dlfs_directory_layout layout;
    uint64_t seed = 0;
    int code = dlfs_name_lists_join(&builder->samples, &builder->empty, &counts.names_bytes);
    if (code == 0) {
        code = dlfs_directory_layout_compute(&counts, &layout);
    }
    if (code == 0) {
        code = place_locations(&layout, &builder->entries);
    }
    if (code != 0) {
        return code;
    }
    uint8_t *entries = builder->entries.base;
    uint8_t *names = builder->samples.text.base;
    if (part_count > layout.part_count) {
        part_count = layout.part_count;
    }
    if (part_count > 0) {
        memcpy(entries + layout.parts_offset, parts, part_count * sizeof(*parts));
    }
    code = build_sorted(config, &layout, entries, names, &seed);
    if (code < 0) {
        return code;
    }
    build_header(&layout, config, seed, entries);
    build_checksums(&layout, entries, names);
    *segment = (dlfs_directory_segment){.entries = entries,
                                        .names = names,
                                        .entries_bytes = layout.entries_bytes,
                                        .names_bytes = layout.names_bytes,
                                        .sample_count = layout.sample_count,
                                        .sample_bytes = builder->sample_bytes,
                                        .empty_count = layout.empty_count,
                                        .hash_seed = seed};
    return 0;
}

int dlfs_directory_builder_finish(dlfs_directory_builder *builder, const uint32_t *parts,
                                  uint64_t part_count, dlfs_path_refusal *refusal,
                                  dlfs_directory_segment *segment)
{
    if (builder == NULL || refusal == NULL || segment == NULL ||
        (part_count > 0 && parts == NULL)) {
        return -EINVAL;
    }
    *refusal = (dlfs_path_refusal){.rule = 0};
    if (builder->ended) {
        return -EINVAL;
    }
    builder->ended = true;
    int code = take_directories(builder, NULL, 0, refusal);
    if (code == 0) {
        code = encode_pending(builder, NULL, 0);
    }
    return code < 0 ? code : build_segment(builder, parts, part_count, segment);
}
