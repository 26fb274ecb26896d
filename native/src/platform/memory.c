/*
 * Memory for buffers: anonymous mappings, of huge pages where the machine gives them.
 *
 * A mapping of 2 MiB or more is rounded up to whole huge pages, whatever pages it gets, so that
 * unmapping needs its length only. Reserved huge pages are reserved whole at mmap, so that touching
 * them cannot fail later.
 */
#include "dlfs/dlfs.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "platform/memory.h"

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define HUGE_PAGE_SHIFT 21

static size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

size_t memory_length(size_t bytes)
{
    if (bytes > SIZE_MAX / 2) {
        return 0;
    }
    if (bytes >= HUGE_PAGE_BYTES) {
        return round_up(bytes, HUGE_PAGE_BYTES);
    }
    return round_up(bytes, (size_t)sysconf(_SC_PAGESIZE));
}

static void *map_anonymous(size_t bytes, int flags)
{
    void *base =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

/*
 * Maps one huge page more than requested and unmaps the excess at both ends, so that the rest is
 * aligned.
 */
static void *map_aligned(size_t bytes)
{
    uint8_t *base = map_anonymous(bytes + HUGE_PAGE_BYTES, 0);
    if (base == NULL) {
        return NULL;
    }
    size_t head = round_up((uintptr_t)base, HUGE_PAGE_BYTES) - (uintptr_t)base;
    if (head > 0) {
        munmap(base, head);
    }
    if (head < HUGE_PAGE_BYTES) {
        munmap(base + head + bytes, HUGE_PAGE_BYTES - head);
    }
    return base + head;
}

int dlfs_memory_map(size_t bytes, void **base, uint32_t *kind)
{
    if (bytes == 0) {
        return -EINVAL;
    }
    size_t length = memory_length(bytes);
    if (length == 0) {
        return -ENOMEM;
    }
    bool large = bytes >= HUGE_PAGE_BYTES;
    uint32_t got = DLFS_MEMORY_HUGE;
    void *memory =
        large ? map_anonymous(length, MAP_HUGETLB | (HUGE_PAGE_SHIFT << MAP_HUGE_SHIFT)) : NULL;
    if (memory == NULL) {
        memory = large ? map_aligned(length) : map_anonymous(length, 0);
        if (memory == NULL) {
            return -ENOMEM;
        }
        bool advised = large && madvise(memory, length, MADV_HUGEPAGE) == 0;
        got = advised ? DLFS_MEMORY_TRANSPARENT : DLFS_MEMORY_PAGES;
    }
    *base = memory;
    if (kind != NULL) {
        *kind = got;
    }
    return 0;
}

void dlfs_memory_unmap(void *base, size_t bytes)
{
    if (base != NULL) {
        munmap(base, memory_length(bytes));
    }
}
