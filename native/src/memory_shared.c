/*
 * Memory for several processes: files without names (memfd), which are gone with the last process
 * that has them open or mapped, however it ends.
 *
 * Seals fix what the others may do: a file that could be made shorter would kill who reads it
 * (SIGBUS), and what only its owner is to write to must not be writable through a descriptor that
 * was passed on, nor through /proc.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dlfs/dlfs.h"
#include "memory.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define SEALS_OF_SIZE (F_SEAL_SHRINK | F_SEAL_GROW)

/* Maps a file at a multiple of the huge page, so that huge pages of it can be mapped as such. */
static int map_aligned(int descriptor, size_t length, int protection, void **base)
{
    size_t spare = length >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : 0;
    uint8_t *room =
        mmap(NULL, length + spare, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return -ENOMEM;
    size_t head = spare ? (HUGE_PAGE_BYTES - (uintptr_t)room % HUGE_PAGE_BYTES) % spare : 0;
    void *mapped = mmap(room + head, length, protection, MAP_SHARED | MAP_FIXED, descriptor, 0);
    int code = mapped == MAP_FAILED ? -errno : 0;
    if (code < 0) {
        munmap(room, length + spare);
        return code;
    }
    if (head > 0)
        munmap(room, head);
    if (spare > head)
        munmap(room + head + length, spare - head);
    *base = mapped;
    return 0;
}

static int create_with(const char *name, unsigned flags, size_t length, int seals, void **base,
                       int *descriptor)
{
    int file = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (file < 0)
        return -errno;
    void *mapped = NULL;
    int code = ftruncate(file, (off_t)length) < 0 ? -errno : 0;
    if (code == 0)
        code = map_aligned(file, length, PROT_READ | PROT_WRITE, &mapped);
    if (code == 0 && fcntl(file, F_ADD_SEALS, seals | F_SEAL_SEAL) < 0) {
        code = -errno;
        munmap(mapped, length);
    }
    if (code < 0) {
        close(file);
        return code;
    }
    *base = mapped;
    *descriptor = file;
    return 0;
}

int memory_create_shared(const char *name, size_t length, bool huge, enum memory_writers writers,
                         void **base, int *descriptor)
{
    int seals = SEALS_OF_SIZE | (writers == MEMORY_OWNER_WRITES ? F_SEAL_FUTURE_WRITE : 0);
    huge = huge && length >= HUGE_PAGE_BYTES;
    if (huge && create_with(name, MFD_HUGETLB | MFD_HUGE_2MB, length, seals, base, descriptor) == 0)
        return 0;
    int code = create_with(name, 0, length, seals, base, descriptor);
    if (code == 0 && huge)
        (void)madvise(*base, length, MADV_HUGEPAGE);
    return code;
}

int memory_map_shared(int descriptor, size_t length, bool huge, enum memory_writers writers,
                      void **base)
{
    struct stat status;
    if (fstat(descriptor, &status) < 0)
        return -errno;
    int seals = fcntl(descriptor, F_GET_SEALS);
    if (length == 0 || status.st_size < 0 || (size_t)status.st_size < length || seals < 0 ||
        (seals & F_SEAL_SHRINK) == 0)
        return -EINVAL;
    int protection = writers == MEMORY_ALL_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    int code = map_aligned(descriptor, length, protection, base);
    if (code == 0 && huge && length >= HUGE_PAGE_BYTES)
        (void)madvise(*base, length, MADV_HUGEPAGE);
    return code;
}
