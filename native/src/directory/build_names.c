/*
 * Writes the names part of a directory segment: the paths of the samples and, in blocks of their
 * own, those of the empty directories. Every rule about paths is checked, for both lists together.
 */
#include "directory/build.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

/* A sequence of paths in order, and the state to compare the next one with. */
typedef struct names_walk {
    const uint8_t *previous;
    uint32_t previous_bytes;
    uint32_t depth;                          /* depth of the stack */
    uint16_t stack[DLFS_PATH_BYTES_MAX + 1]; /* lengths of the earlier paths that the previous one
                                                begins with, and its own */
} names_walk;

static bool component_is_valid(const uint8_t *component, uint32_t bytes)
{
    bool dots =
        bytes > 0 && component[0] == '.' && (bytes == 1 || (bytes == 2 && component[1] == '.'));
    return bytes > 0 && bytes <= DLFS_COMPONENT_BYTES_MAX && !dots;
}

static bool path_is_valid(const uint8_t *path, uint64_t bytes)
{
    if (bytes == 0 || bytes > DLFS_PATH_BYTES_MAX) {
        return false;
    }
    uint32_t start = 0;
    for (uint32_t i = 0; i < bytes; i++) {
        if (path[i] == 0) {
            return false;
        }
        if (path[i] == '/') {
            if (!component_is_valid(path + start, i - start)) {
                return false;
            }
            start = i + 1;
        }
    }
    return component_is_valid(path + start, (uint32_t)bytes - start);
}

static uint32_t common_bytes(const uint8_t *a, const uint8_t *b, uint32_t limit)
{
    uint32_t i = 0;
    while (i < limit && a[i] == b[i]) {
        i++;
    }
    return i;
}

/*
 * Takes the next path, of a sample, or of an empty directory with a '/' behind it; -EINVAL if it
 * breaks a rule. A path that begins with a whole earlier path must not continue with '/', and no
 * path begins with that of an empty directory: none lies below another. Only the longest such path
 * needs a comparison, because the path before was compared with the others.
 */
static int walk_next(names_walk *walk, const uint8_t *path, uint64_t path_bytes, bool directory)
{
    if (path_bytes > DLFS_PATH_BYTES_MAX ||
        (directory && (path_bytes == 0 || path[path_bytes - 1] != '/')) ||
        !path_is_valid(path, path_bytes - directory)) {
        return -EINVAL;
    }
    uint32_t bytes = (uint32_t)path_bytes;
    uint32_t shorter = bytes < walk->previous_bytes ? bytes : walk->previous_bytes;
    uint32_t common = common_bytes(walk->previous, path, shorter);
    if (common == bytes || (common < shorter && path[common] < walk->previous[common])) {
        return -EINVAL;
    }
    while (walk->depth > 0 && walk->stack[walk->depth - 1] > common) {
        walk->depth--;
    }
    if (walk->depth > 0 && walk->stack[walk->depth - 1] == common &&
        (path[common] == '/' || path[common - 1] == '/')) {
        return -EINVAL;
    }
    walk->stack[walk->depth++] = (uint16_t)bytes;
    walk->previous = path;
    walk->previous_bytes = bytes;
    return 0;
}

/* Paths one after the other, in byte order. */
typedef struct path_list {
    const uint8_t *names;
    const uint64_t *offsets;
    uint64_t count;
} path_list;

/* Returns true if path i of one list is before path j of the other, or the other has no more. */
static bool comes_first(const path_list *one, uint64_t i, const path_list *other, uint64_t j)
{
    if (i == one->count || j == other->count) {
        return j == other->count;
    }
    return dlfs_compare_paths(one->names + one->offsets[i], one->offsets[i + 1] - one->offsets[i],
                              other->names + other->offsets[j],
                              other->offsets[j + 1] - other->offsets[j]) < 0;
}

static bool offsets_rise(const path_list *list)
{
    for (uint64_t i = 0; i < list->count; i++) {
        if (list->offsets[i + 1] < list->offsets[i]) {
            return false;
        }
    }
    return true;
}

/* Checks all paths, of samples and of empty directories, in their common order. */
static int check_paths(const path_list *samples, const path_list *empty)
{
    names_walk walk = {.previous = NULL};
    uint64_t i = 0;
    uint64_t j = 0;
    if (!offsets_rise(samples) || !offsets_rise(empty)) {
        return -EINVAL;
    }
    while (i < samples->count || j < empty->count) {
        bool sample = comes_first(samples, i, empty, j);
        const path_list *list = sample ? samples : empty;
        uint64_t at = sample ? i++ : j++;
        int code = walk_next(&walk, list->names + list->offsets[at],
                             list->offsets[at + 1] - list->offsets[at], !sample);
        if (code < 0) {
            return code;
        }
    }
    return 0;
}

static uint32_t varint_bytes(uint32_t value)
{
    return value < 0x80 ? 1 : 2;
}

static uint8_t *write_varint(uint8_t *at, uint32_t value)
{
    if (value < 0x80) {
        *at++ = (uint8_t)value;
        return at;
    }
    *at++ = (uint8_t)(value | 0x80);
    *at++ = (uint8_t)(value >> 7);
    return at;
}

/* The names part that is being encoded; out is NULL if only its length is computed. */
typedef struct encoding {
    uint8_t *out;
    uint64_t capacity;
    uint64_t used;
    uint64_t block; /* the next name block */
} encoding;

/* Encodes the blocks of one list. -EINVAL: they are longer than the capacity. */
static int encode_list(const path_list *list, encoding *to)
{
    for (uint64_t i = 0; i < list->count; i++) {
        const uint8_t *path = list->names + list->offsets[i];
        uint32_t bytes = (uint32_t)(list->offsets[i + 1] - list->offsets[i]);
        uint32_t shared = 0;
        if (i % DLFS_DIRECTORY_NODE_KEYS == 0) {
            if (to->out != NULL) {
                ((uint64_t *)to->out)[to->block] = to->used;
            }
            to->block++;
        } else {
            uint64_t before = list->offsets[i] - list->offsets[i - 1];
            shared = common_bytes(path - before, path, before < bytes ? (uint32_t)before : bytes);
        }
        uint32_t suffix_bytes = bytes - shared;
        uint32_t entry_bytes = varint_bytes(shared) + varint_bytes(suffix_bytes) + suffix_bytes;
        if (entry_bytes > to->capacity - to->used) {
            return -EINVAL;
        }
        if (to->out != NULL) {
            uint8_t *at = write_varint(write_varint(to->out + to->used, shared), suffix_bytes);
            memcpy(at, path + shared, suffix_bytes);
        }
        to->used += entry_bytes;
    }
    return 0;
}

int dlfs_directory_encode_names(const dlfs_directory_content *content, uint8_t *out,
                                uint64_t capacity, uint64_t *bytes)
{
    const path_list samples = {content->names, content->offsets, content->count};
    const path_list empty = {content->empty_names, content->empty_offsets, content->empty_count};
    const uint64_t keys = DLFS_DIRECTORY_NODE_KEYS;
    uint64_t blocks = (samples.count + keys - 1) / keys + (empty.count + keys - 1) / keys;
    encoding to = {.out = out, .capacity = capacity, .used = (blocks + 1) * sizeof(uint64_t)};
    int code = to.used > capacity ? -EINVAL : check_paths(&samples, &empty);
    if (code == 0) {
        code = encode_list(&samples, &to);
    }
    if (code == 0) {
        code = encode_list(&empty, &to);
    }
    if (code < 0) {
        return code;
    }
    if (out != NULL) {
        ((uint64_t *)out)[blocks] = to.used;
    }
    *bytes = to.used;
    return 0;
}
