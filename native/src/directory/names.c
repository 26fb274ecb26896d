/*
 * Names: blocks of 16 front-coded paths in path order.
 *
 * The bytes are not trusted: a name block must lie inside the names part, a name may share no more
 * bytes than the name before it has, and no name may exceed the limit of a path. To compare a path
 * with names of the usual short lengths, they are decoded into a buffer with copies of one fixed
 * length. Other names are compared in place: it suffices to know how many bytes the path shares
 * with each name on the way.
 */
#include "directory/directory.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#define COPY_BYTES 32
#define SHORT_BYTES_MAX 127u /* longest length that takes one byte */
#define NAME_UNUSUAL UINT32_MAX

int dlfs_directory_name_block(const dlfs_directory *directory, const uint8_t *names, uint64_t block,
                              const uint8_t **begin, const uint8_t **end)
{
    const uint64_t *offsets = (const uint64_t *)names;
    uint64_t first = offsets[block];
    uint64_t last = offsets[block + 1];
    uint64_t table_bytes = (directory->layout.name_block_count + 1) * sizeof(uint64_t);
    if (first < table_bytes || last < first || last > directory->layout.names_bytes) {
        return DLFS_E_FORMAT;
    }
    *begin = names + first;
    *end = names + last;
    return 0;
}

/*
 * Reads one varint of at most two bytes. Returns NULL if it does not end by then or by the end of
 * the block.
 */
static inline const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, uint32_t *value)
{
    if (at >= end) {
        return NULL;
    }
    uint32_t low = *at++;
    if (low < 0x80) {
        *value = low;
        return at;
    }
    if (at >= end || *at >= 0x80) {
        return NULL;
    }
    *value = (low & 0x7f) | (uint32_t)*at++ << 7;
    return at;
}

/*
 * Reads the next entry of a block: how many bytes it shares with the name before it, of length
 * `before`, and its suffix. Returns NULL if it is malformed, else the end of the entry, which is
 * the end of its suffix.
 */
static inline const uint8_t *read_entry(const uint8_t *at, const uint8_t *end, uint32_t before,
                                        uint32_t *shared, uint32_t *suffix_bytes)
{
    if (end - at >= 2 &&
        ((at[0] | at[1]) & 0x80) == 0) { /* nearly always: two lengths of one byte */
        *shared = at[0];
        *suffix_bytes = at[1];
        at += 2;
        if ((*shared > before) | (*suffix_bytes > (uint64_t)(end - at))) {
            return NULL;
        }
        return at + *suffix_bytes;
    }
    at = read_varint(at, end, shared);
    if (at == NULL) {
        return NULL;
    }
    at = read_varint(at, end, suffix_bytes);
    if (at == NULL || *shared > before || *suffix_bytes > (uint64_t)(end - at) ||
        *shared + *suffix_bytes > DLFS_PATH_BYTES_MAX) {
        return NULL;
    }
    return at + *suffix_bytes;
}

static inline bool equal_words(const uint8_t *a, const uint8_t *b)
{
    uint64_t left;
    uint64_t right;
    memcpy(&left, a, sizeof(left));
    memcpy(&right, b, sizeof(right));
    return left == right;
}

/*
 * Returns true if a[0..bytes) and b[0..bytes) are equal. The runs are short, so memcmp is not
 * called.
 */
static inline bool equal_bytes(const uint8_t *a, const uint8_t *b, uint32_t bytes)
{
    uint32_t i = 0;
    for (; i + sizeof(uint64_t) <= bytes; i += (uint32_t)sizeof(uint64_t)) {
        if (!equal_words(a + i, b + i)) {
            return false;
        }
    }
    if (bytes >= sizeof(uint64_t)) { /* the last word, which overlaps bytes compared before */
        return equal_words(a + bytes - sizeof(uint64_t), b + bytes - sizeof(uint64_t));
    }
    while (i < bytes && a[i] == b[i]) {
        i++;
    }
    return i == bytes;
}

/* An entry on the way to a name: its suffix, and the offset of the suffix in the name. */
typedef struct name_piece {
    const uint8_t *suffix;
    uint32_t shared;
} name_piece;

/* Compares any names in place, byte by byte. at..end is the block. */
static int pieces_equal(const uint8_t *at, const uint8_t *end, uint32_t number, const uint8_t *path,
                        uint64_t path_bytes)
{
    name_piece pieces[DLFS_DIRECTORY_NODE_KEYS];
    uint32_t bytes = 0; /* length of the last name read */

    for (uint32_t i = 0; i <= number; i++) {
        uint32_t suffix_bytes;
        at = read_entry(at, end, bytes, &pieces[i].shared, &suffix_bytes);
        if (at == NULL) {
            return DLFS_E_FORMAT;
        }
        pieces[i].suffix = at - suffix_bytes;
        bytes = pieces[i].shared + suffix_bytes;
    }
    if (bytes != path_bytes) {
        return 0;
    }
    /*
     * Backwards: each byte of the name comes from the nearest entry that shares less than its
     * offset.
     */
    uint32_t open = bytes;
    for (uint32_t i = number + 1; i-- > 0 && open > 0;) {
        const name_piece *piece = &pieces[i];
        if (piece->shared >= open) {
            continue;
        }
        if (!equal_bytes(path + piece->shared, piece->suffix, open - piece->shared)) {
            return 0;
        }
        open = piece->shared;
    }
    return open == 0;
}

/*
 * Decodes a name of the usual form: lengths of one byte each, and no suffix longer than one copy
 * except the first. Writes the name at a number of the block to `name` and returns its length, or
 * NAME_UNUSUAL, also for malformed bytes. Every copy has COPY_BYTES, whatever its length: the next
 * copy overwrites the excess, or it is ignored. Nothing thus branches on the lengths, which are
 * unpredictable, and the processor decodes the names of several lookups in parallel. `readable` is
 * the end of the names part.
 */
static inline uint32_t decode_usual(const uint8_t *at, const uint8_t *end, const uint8_t *readable,
                                    uint32_t number, uint8_t *name)
{
    if (readable - end < COPY_BYTES || end - at < 2 || at[0] != 0 || at[1] > SHORT_BYTES_MAX ||
        at[1] > end - at - 2) {
        return NAME_UNUSUAL;
    }
    uint32_t bytes = at[1];
    at += 2;
    for (uint32_t done = 0; done < bytes; done += COPY_BYTES) {
        memcpy(name + done, at + done, COPY_BYTES);
    }
    at += bytes;
    for (uint32_t i = 0; i < number; i++) {
        if (end - at < 2) {
            return NAME_UNUSUAL;
        }
        uint32_t shared = at[0];
        uint32_t suffix_bytes = at[1];
        at += 2;
        if ((shared > bytes) | (shared > SHORT_BYTES_MAX) | (suffix_bytes > COPY_BYTES) |
            (suffix_bytes > end - at)) {
            return NAME_UNUSUAL;
        }
        memcpy(name + shared, at, COPY_BYTES);
        bytes = shared + suffix_bytes;
        at += suffix_bytes;
    }
    return bytes;
}

int dlfs_directory_name_equals(const dlfs_directory *directory, const uint8_t *names,
                               uint64_t index, const uint8_t *path, uint64_t path_bytes)
{
    uint8_t
        name[SHORT_BYTES_MAX + COPY_BYTES]; /* the shared bytes, and room for one copy after them */
    const uint8_t *at;
    const uint8_t *end;
    uint32_t number = (uint32_t)(index % DLFS_DIRECTORY_NODE_KEYS);

    int code =
        dlfs_directory_name_block(directory, names, index / DLFS_DIRECTORY_NODE_KEYS, &at, &end);
    if (code < 0) {
        return code;
    }
    uint32_t bytes = decode_usual(at, end, names + directory->layout.names_bytes, number, name);
    if (bytes == NAME_UNUSUAL) {
        return pieces_equal(at, end, number, path, path_bytes);
    }
    return bytes == path_bytes && equal_bytes(name, path, bytes);
}

/* ---- decoding -------------------------------------------------------------------------------- */

/* Initialises a cursor before any block; cursor_advance gives it one. */
static void cursor_init(dlfs_name_cursor *cursor)
{
    cursor->at = NULL;
    cursor->end = NULL;
    cursor->bytes = 0;
}

static int cursor_next(dlfs_name_cursor *cursor)
{
    uint32_t shared;
    uint32_t suffix_bytes;
    const uint8_t *next =
        read_entry(cursor->at, cursor->end, cursor->bytes, &shared, &suffix_bytes);
    if (next == NULL) {
        return DLFS_E_FORMAT;
    }
    memcpy(cursor->name + shared, next - suffix_bytes, suffix_bytes);
    cursor->bytes = shared + suffix_bytes;
    cursor->at = next;
    return 0;
}

/* Moves to the name with this index: the next one of its block, or the first one of a new block. */
static int cursor_advance(const dlfs_directory *directory, const uint8_t *names, uint64_t index,
                          dlfs_name_cursor *cursor)
{
    if (index % DLFS_DIRECTORY_NODE_KEYS == 0) {
        cursor->bytes = 0;
        int code = dlfs_directory_name_block(directory, names, index / DLFS_DIRECTORY_NODE_KEYS,
                                             &cursor->at, &cursor->end);
        if (code < 0) {
            return code;
        }
    }
    return cursor_next(cursor);
}

/* One of the two lists of paths, in name blocks of its own. */
typedef struct name_list {
    uint64_t begin; /* the number that its first path would have if all blocks before were full */
    uint64_t count;
} name_list;

static name_list sample_list(const dlfs_directory *directory)
{
    return (name_list){.count = directory->layout.sample_count};
}

static name_list empty_list(const dlfs_directory *directory)
{
    return (name_list){.begin = directory->layout.leaf_count * DLFS_DIRECTORY_NODE_KEYS,
                       .count = directory->layout.empty_count};
}

/*
 * Moves to the name with this index: onwards from the name of `before` if that is in the same block
 * and not behind it, else from the start of the block. `before` is UINT64_MAX at first.
 */
static int cursor_seek(const dlfs_directory *directory, const uint8_t *names, uint64_t before,
                       uint64_t index, dlfs_name_cursor *cursor)
{
    uint64_t block = index / DLFS_DIRECTORY_NODE_KEYS;
    uint64_t at = block * DLFS_DIRECTORY_NODE_KEYS;
    if (before / DLFS_DIRECTORY_NODE_KEYS == block && before <= index) {
        at = before + 1;
    }
    for (; at <= index; at++) {
        int code = cursor_advance(directory, names, at, cursor);
        if (code < 0) {
            return code;
        }
    }
    return 0;
}

/*
 * Decodes the names of a list with these indices, or, if that is NULL, from `first` on. Returns the
 * number of those that the text has room for.
 */
static int64_t decode(const dlfs_directory *directory, name_list list, const uint64_t *indices,
                      uint64_t first, uint64_t count, uint8_t *text, uint64_t text_bytes,
                      uint64_t *offsets)
{
    const uint8_t *names = dlfs_directory_attached_names(directory);
    dlfs_name_cursor cursor;

    if (count > INT64_MAX ||
        (indices == NULL && (first > list.count || count > list.count - first))) {
        return -EINVAL;
    }
    if (names == NULL) {
        return -EAGAIN;
    }
    cursor_init(&cursor);
    uint64_t used = 0;
    uint64_t before = UINT64_MAX;
    uint64_t i = 0;
    for (; i < count; i++) {
        uint64_t index = indices != NULL ? indices[i] : first + i;
        if (index >= list.count) {
            return -EINVAL;
        }
        int code = cursor_seek(directory, names, before, list.begin + index, &cursor);
        if (code < 0) {
            return code;
        }
        before = list.begin + index;
        if (cursor.bytes > text_bytes - used) {
            break;
        }
        offsets[i] = used;
        memcpy(text + used, cursor.name, cursor.bytes);
        used += cursor.bytes;
    }
    offsets[i] = used;
    return (int64_t)i;
}

int64_t dlfs_directory_names(const dlfs_directory *directory, uint64_t first, uint64_t count,
                             uint8_t *text, uint64_t text_bytes, uint64_t *offsets)
{
    return decode(directory, sample_list(directory), NULL, first, count, text, text_bytes, offsets);
}

uint64_t dlfs_directory_empty_count(const dlfs_directory *directory)
{
    return directory->layout.empty_count;
}

int64_t dlfs_directory_empty_names(const dlfs_directory *directory, uint64_t first, uint64_t count,
                                   uint8_t *text, uint64_t text_bytes, uint64_t *offsets)
{
    return decode(directory, empty_list(directory), NULL, first, count, text, text_bytes, offsets);
}

int64_t dlfs_directory_names_of(const dlfs_directory *directory, const uint64_t *indices,
                                uint64_t count, uint8_t *text, uint64_t text_bytes,
                                uint64_t *offsets)
{
    return decode(directory, sample_list(directory), indices, 0, count, text, text_bytes, offsets);
}

/* ---- order ----------------------------------------------------------------------------------- */

static int lower_bound(const dlfs_directory *directory, name_list list, const uint8_t *path,
                       uint64_t path_bytes, uint64_t *index)
{
    const uint8_t *names = dlfs_directory_attached_names(directory);
    uint64_t low = 0; /* bisects for the number of blocks whose first name is < path */
    uint64_t high = (list.count + DLFS_DIRECTORY_NODE_KEYS - 1) / DLFS_DIRECTORY_NODE_KEYS;
    dlfs_name_cursor cursor;

    if (names == NULL) {
        return -EAGAIN;
    }
    cursor_init(&cursor);
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        int code = cursor_advance(directory, names, list.begin + middle * DLFS_DIRECTORY_NODE_KEYS,
                                  &cursor);
        if (code < 0) {
            return code;
        }
        if (dlfs_compare_paths(cursor.name, cursor.bytes, path, path_bytes) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    /* The answer is in the last block that starts below the path, or right after that block. */
    uint64_t at = low > 0 ? (low - 1) * DLFS_DIRECTORY_NODE_KEYS : 0;
    uint64_t end = low * DLFS_DIRECTORY_NODE_KEYS;
    end = end < list.count ? end : list.count;
    for (; at < end; at++) {
        int code = cursor_advance(directory, names, list.begin + at, &cursor);
        if (code < 0) {
            return code;
        }
        if (dlfs_compare_paths(cursor.name, cursor.bytes, path, path_bytes) >= 0) {
            break;
        }
    }
    *index = at;
    return 0;
}

int dlfs_directory_lower_bound(const dlfs_directory *directory, const uint8_t *path,
                               uint64_t path_bytes, uint64_t *index)
{
    return lower_bound(directory, sample_list(directory), path, path_bytes, index);
}

int dlfs_directory_empty_lower_bound(const dlfs_directory *directory, const uint8_t *path,
                                     uint64_t path_bytes, uint64_t *number)
{
    return lower_bound(directory, empty_list(directory), path, path_bytes, number);
}
