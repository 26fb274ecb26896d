/*
 * Merges sorted paths: a heap of the sources, by their next path.
 */
#include <errno.h>
#include <stdlib.h>

#include "directory/directory.h"
#include "dlfs/import.h"

/* The sources that have paths left. That at 0 has the first one. */
struct heap {
    dlfs_path_source *sources;
    uint32_t *numbers;
    uint32_t count;
};

static const uint8_t *next_path(const dlfs_path_source *source, uint64_t *bytes)
{
    *bytes = source->offsets[source->next + 1] - source->offsets[source->next];
    return source->names + source->offsets[source->next];
}

static bool comes_before(const struct heap *heap, uint32_t one, uint32_t other)
{
    uint64_t bytes;
    uint64_t other_bytes;
    const uint8_t *path = next_path(&heap->sources[heap->numbers[one]], &bytes);
    const uint8_t *other_path = next_path(&heap->sources[heap->numbers[other]], &other_bytes);
    return dlfs_compare_paths(path, bytes, other_path, other_bytes) < 0;
}

/* Moves a source down to where no source below it comes before it. */
static void sink(struct heap *heap, uint32_t at)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= heap->count) {
            return;
        }
        if (child + 1 < heap->count && comes_before(heap, child + 1, child)) {
            child++;
        }
        if (!comes_before(heap, child, at)) {
            return;
        }
        uint32_t number = heap->numbers[at];
        heap->numbers[at] = heap->numbers[child];
        heap->numbers[child] = number;
        at = child;
    }
}

static void fill_heap(struct heap *heap, uint32_t source_count)
{
    for (uint32_t i = 0; i < source_count; i++) {
        if (heap->sources[i].next < heap->sources[i].count) {
            heap->numbers[heap->count++] = i;
        }
    }
    for (uint32_t at = heap->count / 2; at-- > 0;) {
        sink(heap, at);
    }
}

static int64_t merge(struct heap *heap, const dlfs_path_target *target, uint32_t *repeated)
{
    uint64_t used = 0;
    uint64_t done = 0;
    bool complete = heap->count == 0;
    target->offsets[0] = 0;
    while (!complete && done < target->capacity) {
        dlfs_path_source *source = &heap->sources[heap->numbers[0]];
        uint64_t bytes;
        const uint8_t *path = next_path(source, &bytes);
        if (bytes > target->names_bytes - used) {
            return done > 0 ? (int64_t)done : -EINVAL;
        }
        memcpy(target->names + used, path, bytes);
        target->locations[done] = source->locations[source->next];
        target->rows[done] = source->rows[source->next];
        used += bytes;
        target->offsets[++done] = used;
        if (++source->next == source->count) {
            complete = true;
            heap->numbers[0] = heap->numbers[--heap->count];
        }
        sink(heap, 0);
        if (heap->count > 0) {
            uint64_t next_bytes;
            const uint8_t *next = next_path(&heap->sources[heap->numbers[0]], &next_bytes);
            if (next_bytes == bytes && memcmp(next, path, bytes) == 0) {
                *repeated = heap->numbers[0];
                return -EEXIST;
            }
        }
    }
    return (int64_t)done;
}

int64_t dlfs_paths_merge(dlfs_path_source *sources, uint32_t source_count,
                         const dlfs_path_target *target, uint32_t *repeated)
{
    if ((source_count > 0 && sources == NULL) || target == NULL || repeated == NULL) {
        return -EINVAL;
    }
    struct heap heap = {.sources = sources};
    heap.numbers = malloc((source_count + (size_t)1) * sizeof(*heap.numbers));
    if (heap.numbers == NULL) {
        return -ENOMEM;
    }
    fill_heap(&heap, source_count);
    int64_t done = merge(&heap, target, repeated);
    free(heap.numbers);
    return done;
}
