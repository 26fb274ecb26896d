/*
 * Writes the names part of a directory segment, path by path, and checks every rule about paths:
 * those of one path, and those of all paths in their order.
 */
#include "directory/build.h"

#include <errno.h>
#include <string.h>

static bool component_is_valid(const uint8_t *component, uint32_t bytes)
{
    bool dots =
        bytes > 0 && component[0] == '.' && (bytes == 1 || (bytes == 2 && component[1] == '.'));
    return bytes > 0 && bytes <= DLFS_COMPONENT_BYTES_MAX && !dots;
}

bool dlfs_path_is_valid(const uint8_t *path, uint64_t bytes)
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

uint32_t dlfs_common_bytes(const uint8_t *a, const uint8_t *b, uint32_t limit)
{
    uint32_t i = 0;
    while (limit - i >= sizeof(uint64_t)) {
        uint64_t left;
        uint64_t right;
        memcpy(&left, a + i, sizeof(left));
        memcpy(&right, b + i, sizeof(right));
        if (left != right) {
            return i + (uint32_t)__builtin_ctzll(left ^ right) / 8;
        }
        i += (uint32_t)sizeof(uint64_t);
    }
    while (i < limit && a[i] == b[i]) {
        i++;
    }
    return i;
}

/*
 * A path that begins with the whole path of a sample must not continue with '/': none lies below a
 * sample. Only the longest such path needs a comparison, because the path before was compared with
 * the others.
 */
uint32_t dlfs_path_walk_next(struct path_walk *walk, const uint8_t *path, uint64_t path_bytes,
                             bool directory, uint32_t *common)
{
    if (path_bytes > DLFS_PATH_BYTES_MAX ||
        (directory && (path_bytes == 0 || path[path_bytes - 1] != '/')) ||
        !dlfs_path_is_valid(path, path_bytes - directory)) {
        return DLFS_PATH_MALFORMED;
    }
    uint32_t bytes = (uint32_t)path_bytes;
    uint32_t shorter = bytes < walk->previous_bytes ? bytes : walk->previous_bytes;
    uint32_t same = shorter > 0 ? dlfs_common_bytes(walk->previous, path, shorter) : 0;
    if (same == bytes) {
        return same == walk->previous_bytes ? DLFS_PATH_REPEATED : DLFS_PATH_UNSORTED;
    }
    if (same < shorter && path[same] < walk->previous[same]) {
        return DLFS_PATH_UNSORTED;
    }
    *common = same;
    while (walk->depth > 0 && walk->stack[walk->depth - 1] > same) {
        walk->depth--;
    }
    if (walk->depth > 0 && walk->stack[walk->depth - 1] == same && path[same] == '/') {
        return DLFS_PATH_BELOW_SAMPLE;
    }
    if (!directory) {
        walk->stack[walk->depth++] = (uint16_t)bytes;
    }
    walk->previous = path;
    walk->previous_bytes = bytes;
    return 0;
}

void dlfs_path_walk_save(struct path_walk *walk)
{
    if (walk->previous != walk->saved && walk->previous_bytes > 0) {
        memcpy(walk->saved, walk->previous, walk->previous_bytes);
        walk->previous = walk->saved;
    }
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

int dlfs_name_list_add(struct name_list *list, const uint8_t *path, uint32_t bytes, uint32_t shared)
{
    const uint64_t entry_bytes_max = DLFS_PATH_BYTES_MAX + 2 * DLFS_DIRECTORY_VARINT_BYTES_MAX;
    int code = growing_memory_reserve(&list->text, list->bytes + entry_bytes_max);
    if (code == 0 && list->count % DLFS_DIRECTORY_NODE_KEYS == 0) {
        uint64_t block = list->count / DLFS_DIRECTORY_NODE_KEYS;
        shared = 0;
        code = growing_memory_reserve(&list->starts, (block + 1) * sizeof(uint64_t));
        if (code == 0) {
            ((uint64_t *)list->starts.base)[block] = list->bytes;
        }
    }
    if (code < 0) {
        return code;
    }
    uint8_t *at = list->text.base + list->bytes;
    at = write_varint(write_varint(at, shared), bytes - shared);
    memcpy(at, path + shared, bytes - shared);
    list->bytes = (uint64_t)(at + (bytes - shared) - list->text.base);
    list->count++;
    return 0;
}

static uint64_t block_count(const struct name_list *list)
{
    return (list->count + DLFS_DIRECTORY_NODE_KEYS - 1) / DLFS_DIRECTORY_NODE_KEYS;
}

/* Writes the offsets of a list's blocks, whose text begins at `base` in the names part. */
static uint64_t *write_offsets(const struct name_list *list, uint64_t base, uint64_t *offsets)
{
    for (uint64_t block = 0; block < block_count(list); block++) {
        *offsets++ = base + ((const uint64_t *)list->starts.base)[block];
    }
    return offsets;
}

int dlfs_name_lists_join(struct name_list *samples, struct name_list *empty, uint64_t *bytes)
{
    uint64_t head = (block_count(samples) + block_count(empty) + 1) * sizeof(uint64_t);
    uint64_t used = head + samples->bytes + empty->bytes;
    uint64_t whole = (used + DLFS_DIRECTORY_BLOCK_BYTES - 1) / DLFS_DIRECTORY_BLOCK_BYTES *
                     DLFS_DIRECTORY_BLOCK_BYTES;
    int code = growing_memory_resize(&samples->text, whole);
    if (code < 0) {
        return code;
    }
    /* No byte of the memory behind the text was ever written, so the padding is zero. */
    uint8_t *names = samples->text.base;
    memmove(names + head, names, samples->bytes);
    if (empty->bytes > 0) {
        memcpy(names + head + samples->bytes, empty->text.base, empty->bytes);
    }
    uint64_t *offsets = write_offsets(samples, head, (uint64_t *)names);
    offsets = write_offsets(empty, head + samples->bytes, offsets);
    *offsets = used;
    growing_memory_free(&samples->starts);
    dlfs_name_list_free(empty);
    *bytes = whole;
    return 0;
}

void dlfs_name_list_free(struct name_list *list)
{
    growing_memory_free(&list->text);
    growing_memory_free(&list->starts);
}
