/* Mappings: zeroed, aligned, private; impossible lengths. */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

static void check_mapping(size_t bytes, size_t alignment)
{
    void *base = NULL;
    uint32_t kind = 99;
    CHECK_EQ(dlfs_memory_map(bytes, &base, &kind), 0);
    CHECK(kind <= DLFS_MEMORY_HUGE);
    CHECK_EQ((uintptr_t)base % alignment, 0);
    const uint8_t *at = base;
    CHECK(at[0] == 0 && at[bytes / 2] == 0 && at[bytes - 1] == 0);
    memset(base, 7, bytes);
    dlfs_memory_unmap(base, bytes);
}

int main(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), huge = (size_t)2 << 20;
    check_mapping(1, page);
    check_mapping(page + 1, page);
    check_mapping(huge - 1, page);
    check_mapping(huge, huge);
    check_mapping(3 * huge + 5, huge);
    void *untouched = &page;
    uint32_t kind = 99;
    CHECK_EQ(dlfs_memory_map(0, &untouched, &kind), -EINVAL);
    CHECK_EQ(dlfs_memory_map(SIZE_MAX, &untouched, &kind), -ENOMEM);
    CHECK_EQ(dlfs_memory_map(SIZE_MAX / 2, &untouched, &kind), -ENOMEM);
    CHECK(untouched == &page && kind == 99);
    CHECK_EQ(dlfs_memory_map(page, &untouched, NULL), 0);
    dlfs_memory_unmap(untouched, page);
    dlfs_memory_unmap(NULL, 1);
    return 0;
}
