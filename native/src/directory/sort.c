/*
 * Sorts paths: a merge sort of their numbers, by their bytes. Paths that are sorted already, as
 * most sources have them, cost one comparison each.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "directory/directory.h"
#include "dlfs/import.h"

/* Packed paths and their offsets. */
struct paths {
    const uint8_t *names;
    const uint64_t *offsets;
};

static bool comes_before(const struct paths *paths, uint64_t one, uint64_t other)
{
    const uint64_t *offsets = paths->offsets;
    return dlfs_compare_paths(paths->names + offsets[one], offsets[one + 1] - offsets[one],
                              paths->names + offsets[other],
                              offsets[other + 1] - offsets[other]) < 0;
}

/* Merges from[first..middle) and from[middle..end) into the same range of `to`. */
static void merge(const struct paths *paths, const uint64_t *from, uint64_t *to, uint64_t first,
                  uint64_t middle, uint64_t end)
{
    uint64_t left = first;
    uint64_t right = middle;
    if (middle >= end || !comes_before(paths, from[middle], from[middle - 1])) {
        memcpy(to + first, from + first, (end - first) * sizeof(*to));
        return;
    }
    for (uint64_t at = first; at < end; at++) {
        bool take_right =
            left == middle || (right < end && comes_before(paths, from[right], from[left]));
        to[at] = take_right ? from[right++] : from[left++];
    }
}

DLFS_API int dlfs_paths_sort(const uint8_t *names, const uint64_t *offsets, uint64_t count,
                             uint64_t *order)
{
    if (count > 0 && (names == NULL || offsets == NULL || order == NULL)) {
        return -EINVAL;
    }
    const struct paths paths = {names, offsets};
    uint64_t sorted = count > 0;
    for (uint64_t i = 0; i < count; i++) {
        order[i] = i;
    }
    while (sorted < count && !comes_before(&paths, sorted, sorted - 1)) {
        sorted++;
    }
    if (sorted == count) {
        return 0;
    }
    uint64_t *scratch = malloc(count * sizeof(*scratch));
    if (scratch == NULL) {
        return -ENOMEM;
    }
    uint64_t *from = order;
    uint64_t *to = scratch;
    for (uint64_t width = 1; width < count; width *= 2) {
        for (uint64_t first = 0; first < count; first += 2 * width) {
            uint64_t middle = width < count - first ? first + width : count;
            uint64_t end = width < count - middle ? middle + width : count;
            merge(&paths, from, to, first, middle, end);
        }
        uint64_t *merged = to;
        to = from;
        from = merged;
    }
    if (from != order) {
        memcpy(order, from, count * sizeof(*order));
    }
    free(scratch);
    return 0;
}
