/*
 * Memory that grows: the kernel moves the pages of a mapping to a larger one, so that no byte is
 * copied and no page is there twice.
 */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "platform/memory.h"

#define FIRST_BYTES ((size_t)64 << 10)

int growing_memory_resize(struct growing_memory *memory, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes > SIZE_MAX / 2) {
        return -ENOMEM;
    }
    size_t length = (bytes + page - 1) / page * page;
    void *base = memory->base == NULL
                     ? mmap(NULL, length, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                     : mremap(memory->base, memory->capacity, length, MREMAP_MAYMOVE);
    if (base == MAP_FAILED) {
        return -ENOMEM;
    }
    *memory = (struct growing_memory){.base = base, .capacity = length};
    return 0;
}

int growing_memory_reserve(struct growing_memory *memory, size_t bytes)
{
    if (bytes <= memory->capacity && memory->base != NULL) {
        return 0;
    }
    size_t least = memory->capacity > 0 ? memory->capacity * 2 : FIRST_BYTES;
    return growing_memory_resize(memory, bytes > least ? bytes : least);
}

void growing_memory_free(struct growing_memory *memory)
{
    if (memory->base != NULL) {
        munmap(memory->base, memory->capacity);
    }
    *memory = (struct growing_memory){.base = NULL};
}
