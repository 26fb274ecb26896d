/*
 * The paper's opportunistic batching: requests in the order of the device, neighbours read together
 * when the bytes between them cost less than another request.
 */
#include "plan.h"

#include <stdlib.h>

#include "reader.h"

static int by_address(const void *left, const void *right)
{
    const struct want *a = left;
    const struct want *b = right;
    return (a->address > b->address) - (a->address < b->address);
}

void plan_sort(struct want *wants, uint64_t count)
{
    qsort(wants, count, sizeof(*wants), by_address);
}

/* The blocks that a want touches. */
static void want_blocks(const dlfs_reader *reader, const struct want *want, uint64_t *first,
                        uint64_t *end)
{
    uint64_t mask = reader->config.block_bytes - 1;
    *first = want->address & ~mask;
    *end = (want->address + want->length + mask) & ~mask;
}

uint64_t plan_merge(const dlfs_reader *reader, const struct want *wants, uint64_t count,
                    struct plan_span *spans)
{
    uint64_t total = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t first;
        uint64_t end;
        want_blocks(reader, &wants[i], &first, &end);
        struct plan_span *last = total ? &spans[total - 1] : NULL;
        uint64_t last_end = last ? last->address + last->length : 0;
        bool same_chunk =
            last && last->address >> reader->chunk_shift == (end - 1) >> reader->chunk_shift;
        if (same_chunk && first <= last_end + reader->config.gap_bytes) {
            if (end > last_end)
                last->length = end - last->address;
            last->want_count++;
        } else {
            spans[total++] =
                (struct plan_span){first, end - first, 0, (uint32_t)i, 1, SLOT_NONE, false};
        }
    }
    return total;
}

uint64_t plan_widen(const dlfs_reader *reader, const struct want *wants, uint64_t count,
                    struct plan_span *spans)
{
    uint64_t mask = reader->config.chunk_bytes - 1;
    uint64_t total = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t first = wants[i].address & ~mask;
        uint64_t end = (wants[i].address + wants[i].length + mask) & ~mask;
        struct plan_span *last = total ? &spans[total - 1] : NULL;
        if (last && first == last->address && end <= last->address + last->length)
            last->want_count++;
        else
            spans[total++] =
                (struct plan_span){first, end - first, 0, (uint32_t)i, 1, SLOT_NONE, true};
    }
    return total;
}
