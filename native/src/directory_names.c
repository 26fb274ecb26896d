/*
 * Names: blocks of 16 front-coded paths in path order.
 *
 * Reading them never trusts what they say: a name block must lie inside the names part, a name may
 * share no more than the name before it has, and none may be over the limit of a path. A name is
 * compared with a path without being decoded: it is enough to know how far the path agrees with
 * each name on the way.
 */
#include "directory.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

static const uint8_t *attached_names(const dlfs_directory *directory)
{
    return atomic_load_explicit(&directory->names, memory_order_acquire);
}

int dlfs_directory_name_block(const dlfs_directory *directory, const uint8_t *names, uint64_t block,
                              const uint8_t **begin, const uint8_t **end)
{
    const uint64_t *offsets = (const uint64_t *)names;
    uint64_t first = offsets[block];
    uint64_t last = offsets[block + 1];
    uint64_t table_bytes = (directory->layout.name_block_count + 1) * sizeof(uint64_t);
    if (first < table_bytes || last < first || last > directory->layout.names_bytes)
        return DLFS_E_FORMAT;
    *begin = names + first;
    *end = names + last;
    return 0;
}

/* One varint of at most two bytes; NULL when it does not end by then or by the end of the block. */
static inline const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, uint32_t *value)
{
    if (at >= end)
        return NULL;
    uint32_t low = *at++;
    if (low < 0x80) {
        *value = low;
        return at;
    }
    if (at >= end || *at >= 0x80)
        return NULL;
    *value = (low & 0x7f) | (uint32_t)*at++ << 7;
    return at;
}

/*
 * The next entry of a block: how much it shares with the name before it, of length before, and its
 * suffix. NULL when it is malformed, else the end of the entry, which is the end of its suffix.
 */
static inline const uint8_t *read_entry(const uint8_t *at, const uint8_t *end, uint32_t before,
                                        uint32_t *shared, uint32_t *suffix_bytes)
{
    if (end - at >= 2 &&
        ((at[0] | at[1]) & 0x80) == 0) { /* nearly always: two lengths of one byte */
        *shared = at[0];
        *suffix_bytes = at[1];
        at += 2;
        if ((*shared > before) | (*suffix_bytes > (uint64_t)(end - at)))
            return NULL;
        return at + *suffix_bytes;
    }
    at = read_varint(at, end, shared);
    if (!at)
        return NULL;
    at = read_varint(at, end, suffix_bytes);
    if (!at || *shared > before || *suffix_bytes > (uint64_t)(end - at) ||
        *shared + *suffix_bytes > DLFS_PATH_BYTES_MAX)
        return NULL;
    return at + *suffix_bytes;
}

/* Whether a[0..bytes) and b[0..bytes) are equal; short runs, so no call. */
static inline bool equal_bytes(const uint8_t *a, const uint8_t *b, uint32_t bytes)
{
    uint64_t left;
    uint64_t right;
    uint32_t i = 0;
    for (; i + sizeof(left) <= bytes; i += (uint32_t)sizeof(left)) {
        memcpy(&left, a + i, sizeof(left));
        memcpy(&right, b + i, sizeof(right));
        if (left != right)
            return false;
    }
    while (i < bytes && a[i] == b[i])
        i++;
    return i == bytes;
}

/* An entry on the way to a name: where its suffix is, and where in the name that goes. */
typedef struct name_piece {
    const uint8_t *suffix;
    uint32_t shared;
} name_piece;

int dlfs_directory_name_equals(const dlfs_directory *directory, const uint8_t *names,
                               uint64_t index, const uint8_t *path, uint64_t path_bytes)
{
    name_piece pieces[DLFS_DIRECTORY_NODE_KEYS];
    const uint8_t *at;
    const uint8_t *end;
    uint32_t bytes = 0; /* length of the name last read */
    uint32_t slot = (uint32_t)(index % DLFS_DIRECTORY_NODE_KEYS);

    int code =
        dlfs_directory_name_block(directory, names, index / DLFS_DIRECTORY_NODE_KEYS, &at, &end);
    if (code < 0)
        return code;
    for (uint32_t i = 0; i <= slot; i++) {
        uint32_t suffix_bytes;
        at = read_entry(at, end, bytes, &pieces[i].shared, &suffix_bytes);
        if (!at)
            return DLFS_E_FORMAT;
        pieces[i].suffix = at - suffix_bytes;
        bytes = pieces[i].shared + suffix_bytes;
    }
    if (bytes != path_bytes)
        return 0;
    /* Backwards: each byte of the name was last written by the nearest entry that shares less than
     * its place. */
    uint32_t open = bytes;
    for (uint32_t i = slot + 1; i-- > 0 && open > 0;) {
        const name_piece *piece = &pieces[i];
        if (piece->shared >= open)
            continue;
        if (!equal_bytes(path + piece->shared, piece->suffix, open - piece->shared))
            return 0;
        open = piece->shared;
    }
    return open == 0;
}

/* ---- decoding -------------------------------------------------------------------------------- */

/* Before any block: nothing to read until cursor_open. */
static void cursor_init(dlfs_name_cursor *cursor)
{
    cursor->at = NULL;
    cursor->end = NULL;
    cursor->bytes = 0;
}

static int cursor_open(const dlfs_directory *directory, const uint8_t *names, uint64_t block,
                       dlfs_name_cursor *cursor)
{
    cursor->bytes = 0;
    return dlfs_directory_name_block(directory, names, block, &cursor->at, &cursor->end);
}

static int cursor_next(dlfs_name_cursor *cursor)
{
    uint32_t shared;
    uint32_t suffix_bytes;
    const uint8_t *next =
        read_entry(cursor->at, cursor->end, cursor->bytes, &shared, &suffix_bytes);
    if (!next)
        return DLFS_E_FORMAT;
    memcpy(cursor->name + shared, next - suffix_bytes, suffix_bytes);
    cursor->bytes = shared + suffix_bytes;
    cursor->at = next;
    return 0;
}

/* Moves to the name with this index: within its block when it is not the first, from a block's
 * start when it is. */
static int cursor_advance(const dlfs_directory *directory, const uint8_t *names, uint64_t index,
                          dlfs_name_cursor *cursor)
{
    if (index % DLFS_DIRECTORY_NODE_KEYS == 0) {
        int code = cursor_open(directory, names, index / DLFS_DIRECTORY_NODE_KEYS, cursor);
        if (code < 0)
            return code;
    }
    return cursor_next(cursor);
}

int64_t dlfs_directory_names(const dlfs_directory *directory, uint64_t first, uint64_t count,
                             uint8_t *text, uint64_t text_bytes, uint64_t *offsets)
{
    uint64_t sample_count = directory->layout.sample_count;
    const uint8_t *names = attached_names(directory);
    dlfs_name_cursor cursor;

    if (first > sample_count || count > sample_count - first || count > INT64_MAX)
        return -EINVAL;
    if (!names)
        return -EAGAIN;
    cursor_init(&cursor);
    uint64_t used = 0;
    uint64_t index = first - first % DLFS_DIRECTORY_NODE_KEYS;
    for (; index < first + count; index++) {
        int code = cursor_advance(directory, names, index, &cursor);
        if (code < 0)
            return code;
        if (index < first)
            continue;
        if (cursor.bytes > text_bytes - used)
            break;
        offsets[index - first] = used;
        memcpy(text + used, cursor.name, cursor.bytes);
        used += cursor.bytes;
    }
    uint64_t fitted = index > first ? index - first : 0;
    offsets[fitted] = used;
    return (int64_t)fitted;
}

/* ---- order ----------------------------------------------------------------------------------- */

/* As memcmp over the shorter, then by length: <0, 0, >0. */
static int compare_paths(const uint8_t *a, uint64_t a_bytes, const uint8_t *b, uint64_t b_bytes)
{
    int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    if (order != 0)
        return order;
    return (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

/* The number of blocks whose first name is < path, by bisection. */
static int count_blocks_below(const dlfs_directory *directory, const uint8_t *names,
                              const uint8_t *path, uint64_t path_bytes, uint64_t *blocks)
{
    uint64_t low = 0;
    uint64_t high = directory->layout.name_block_count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        const uint8_t *at;
        const uint8_t *end;
        uint32_t shared;
        uint32_t bytes;
        int code = dlfs_directory_name_block(directory, names, middle, &at, &end);
        if (code < 0)
            return code;
        at = read_entry(at, end, 0, &shared, &bytes);
        if (!at)
            return DLFS_E_FORMAT;
        if (compare_paths(at - bytes, bytes, path, path_bytes) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    *blocks = low;
    return 0;
}

int dlfs_directory_lower_bound(const dlfs_directory *directory, const uint8_t *path,
                               uint64_t path_bytes, uint64_t *index)
{
    const uint8_t *names = attached_names(directory);
    dlfs_name_cursor cursor;
    uint64_t below;

    if (!names)
        return -EAGAIN;
    int code = count_blocks_below(directory, names, path, path_bytes, &below);
    if (code < 0)
        return code;
    if (below == 0) {
        *index = 0;
        return 0;
    }
    /* The answer is in the last block that starts below the path, or right behind it. */
    uint64_t at = (below - 1) * DLFS_DIRECTORY_NODE_KEYS;
    uint64_t end = below * DLFS_DIRECTORY_NODE_KEYS;
    if (end > directory->layout.sample_count)
        end = directory->layout.sample_count;
    cursor_init(&cursor);
    for (; at < end; at++) {
        code = cursor_advance(directory, names, at, &cursor);
        if (code < 0)
            return code;
        if (compare_paths(cursor.name, cursor.bytes, path, path_bytes) >= 0)
            break;
    }
    *index = at;
    return 0;
}
