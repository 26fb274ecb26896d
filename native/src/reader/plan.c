/*
 * Sorts the samples of a read by address, and merges neighbours when the bytes between them cost
 * less than another request.
 */
#include "reader/plan.h"

#include <string.h>

#include "reader/state.h"

#define INSERTION_SORT_MAX 24u /* misses that are sorted by insertion */
#define DIGIT_BITS 8u
#define DIGITS (1u << DIGIT_BITS)

static void sort_by_insertion(struct miss *misses, uint64_t count)
{
    for (uint64_t i = 1; i < count; i++) {
        struct miss miss = misses[i];
        uint64_t at = i;
        for (; at > 0 && misses[at - 1].address > miss.address; at--) {
            misses[at] = misses[at - 1];
        }
        misses[at] = miss;
    }
}

/* Does one pass of a radix sort: by the digit that begins at bit `shift` of the address. */
static void sort_digit(const struct miss *from, struct miss *to, uint64_t count, uint32_t shift)
{
    uint64_t starts[DIGITS] = {0};
    for (uint64_t i = 0; i < count; i++) {
        starts[from[i].address >> shift & (DIGITS - 1)]++;
    }
    uint64_t start = 0;
    for (uint32_t digit = 0; digit < DIGITS; digit++) {
        uint64_t next = start + starts[digit];
        starts[digit] = start;
        start = next;
    }
    for (uint64_t i = 0; i < count; i++) {
        to[starts[from[i].address >> shift & (DIGITS - 1)]++] = from[i];
    }
}

void plan_sort(struct miss *misses, struct miss *scratch, uint64_t count)
{
    uint64_t differing = 0; /* bits in which the addresses differ */
    bool sorted = true;
    for (uint64_t i = 1; i < count; i++) {
        differing |= misses[i].address ^ misses[i - 1].address;
        sorted &= misses[i].address >= misses[i - 1].address;
    }
    if (sorted) {
        return;
    }
    if (count <= INSERTION_SORT_MAX) {
        sort_by_insertion(misses, count);
        return;
    }
    struct miss *from = misses;
    struct miss *to = scratch;
    uint32_t shift = (uint32_t)__builtin_ctzll(differing);
    for (; shift < 64 && differing >> shift != 0; shift += DIGIT_BITS) {
        sort_digit(from, to, count, shift);
        struct miss *sorted_now = to;
        to = from;
        from = sorted_now;
    }
    if (from != misses) {
        memcpy(misses, from, count * sizeof(*misses));
    }
}

uint64_t plan_merge(const dlfs_reader *reader, const struct miss *misses, uint64_t count,
                    struct plan_span *spans)
{
    uint64_t mask = reader->config.block_bytes - 1;
    uint64_t total = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t first = misses[i].address & ~mask;
        uint64_t end = (misses[i].address + misses[i].length + mask) & ~mask;
        struct plan_span *last = total ? &spans[total - 1] : NULL;
        uint64_t last_end = last != NULL ? last->address + last->length : 0;
        bool same_chunk = last != NULL &&
                          last->address >> reader->chunk_shift == (end - 1) >> reader->chunk_shift;
        if (same_chunk && first <= last_end + reader->config.gap_bytes) {
            if (end > last_end) {
                last->length = end - last->address;
            }
            last->miss_count++;
        } else {
            spans[total++] =
                (struct plan_span){first, end - first, 0, (uint32_t)i, 1, SLOT_NONE, false};
        }
    }
    return total;
}

uint64_t plan_widen(const dlfs_reader *reader, const struct miss *misses, uint64_t count,
                    struct plan_span *spans, uint64_t *slots)
{
    uint64_t mask = reader->config.chunk_bytes - 1;
    uint64_t total = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t first = misses[i].address & ~mask;
        uint64_t end = reader_chunks_end(reader, misses[i].address, misses[i].length);
        struct plan_span *last = total ? &spans[total - 1] : NULL;
        if (last != NULL && first == last->address && end <= last->address + last->length) {
            last->miss_count++;
        } else {
            spans[total++] =
                (struct plan_span){first, end - first, 0, (uint32_t)i, 1, SLOT_NONE, true};
            *slots += (end - first + mask) >> reader->chunk_shift;
        }
    }
    return total;
}

uint64_t plan_narrow(const dlfs_reader *reader, const struct miss *misses, uint64_t count,
                     struct plan_span *spans, uint64_t span_count, uint64_t slots_max)
{
    uint64_t mask = reader->config.chunk_bytes - 1;
    uint64_t done = 0;
    uint64_t slots = 0;
    for (; done < span_count; done++) {
        slots += (spans[done].length + mask) >> reader->chunk_shift;
        if (slots > slots_max) {
            break;
        }
    }
    if (done == span_count) {
        return span_count;
    }
    uint32_t first = spans[done].first_miss;
    uint64_t merged = plan_merge(reader, misses + first, count - first, spans + done);
    for (uint64_t i = done; i < done + merged; i++) {
        spans[i].first_miss += first;
    }
    return done + merged;
}
