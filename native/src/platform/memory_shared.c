/*
 * Memory shared by several processes: files without names (memfd), which are freed with the last
 * process that has them open or mapped, however it ends.
 *
 * Seals limit what other processes may do. Shortening a file would kill a process that reads it
 * (SIGBUS). Memory that only its owner may write must not be writable through a descriptor that was
 * passed on, nor through /proc.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dlfs/dlfs.h"
#include "platform/memory.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define SEALS_OF_SIZE (F_SEAL_SHRINK | F_SEAL_GROW)

/*
 * Moves a mapping to a multiple of the huge page, within address space that is reserved for it. A
 * move that fails may have unmapped its destination, where another thread may map memory at any
 * time. So the destination is never unmapped here, only the reserved space on either side of it.
 */
static int align(size_t length, void **mapped)
{
    uint8_t *room = mmap(NULL, length + HUGE_PAGE_BYTES, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        return -ENOMEM;
    }
    size_t head = (HUGE_PAGE_BYTES - (uintptr_t)room % HUGE_PAGE_BYTES) % HUGE_PAGE_BYTES;
    void *moved = mremap(*mapped, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, room + head);
    int code = moved == MAP_FAILED ? -errno : 0;
    if (head > 0) {
        munmap(room, head);
    }
    munmap(room + head + length, HUGE_PAGE_BYTES - head);
    if (code == 0) {
        *mapped = moved;
    }
    return code;
}

/*
 * Maps a file. A mapping of a huge page or more starts at a multiple of the huge page, so that huge
 * pages can be used. The kernel chooses the address first: if it has no memory for the file, as
 * without reserved huge pages, nothing is left behind.
 */
static int map_file(int descriptor, size_t length, int protection, void **base)
{
    void *mapped = mmap(NULL, length, protection, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        return -errno;
    }
    if (length >= HUGE_PAGE_BYTES && (uintptr_t)mapped % HUGE_PAGE_BYTES != 0) {
        int code = align(length, &mapped);
        if (code < 0) {
            munmap(mapped, length);
            return code;
        }
    }
    *base = mapped;
    return 0;
}

/* Seals a file. -EPERM: the sealed file can be mapped for writing nevertheless. */
static int seal(int descriptor, size_t length, int seals)
{
    if (fcntl(descriptor, F_ADD_SEALS, seals | F_SEAL_SEAL) < 0) {
        return -errno;
    }
    return (seals & F_SEAL_FUTURE_WRITE) && memory_is_writable(descriptor, length) ? -EPERM : 0;
}

static int create_with(const char *name, unsigned flags, size_t length, int seals, void **base,
                       int *descriptor)
{
    int file = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (file < 0) {
        return -errno;
    }
    void *mapped = NULL;
    int code = ftruncate(file, (off_t)length) < 0 ? -errno : 0;
    if (code == 0) {
        code = map_file(file, length, PROT_READ | PROT_WRITE, &mapped);
    }
    if (code == 0) {
        code = seal(file, length, seals);
        if (code < 0) {
            munmap(mapped, length);
        }
    }
    if (code < 0) {
        close(file);
        return code;
    }
    *base = mapped;
    *descriptor = file;
    return 0;
}

bool memory_is_writable(int descriptor, size_t length)
{
    void *mapped = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        return errno != EPERM;
    }
    munmap(mapped, length);
    return true;
}

int memory_create_shared(const char *name, size_t length, bool huge, enum memory_writers writers,
                         void **base, int *descriptor)
{
    int seals = SEALS_OF_SIZE | (writers == MEMORY_OWNER_WRITES ? F_SEAL_FUTURE_WRITE : 0);
    huge = huge && length >= HUGE_PAGE_BYTES;
    /* Kernels before 5.13 lose F_SEAL_FUTURE_WRITE on huge pages, so those are not used. */
    if (huge &&
        create_with(name, MFD_HUGETLB | MFD_HUGE_2MB, length, seals, base, descriptor) == 0) {
        return 0;
    }
    int code = create_with(name, 0, length, seals, base, descriptor);
    if (code == 0 && huge) {
        (void)madvise(*base, length, MADV_HUGEPAGE);
    }
    return code;
}

int memory_map_shared(int descriptor, size_t length, bool huge, enum memory_writers writers,
                      void **base)
{
    struct stat status;
    if (fstat(descriptor, &status) < 0) {
        return -errno;
    }
    int seals = fcntl(descriptor, F_GET_SEALS);
    if (length == 0 || status.st_size < 0 || (size_t)status.st_size < length || seals < 0 ||
        (seals & F_SEAL_SHRINK) == 0) {
        return -EINVAL;
    }
    int protection = writers == MEMORY_ALL_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    int code = map_file(descriptor, length, protection, base);
    if (code == 0 && huge && length >= HUGE_PAGE_BYTES) {
        (void)madvise(*base, length, MADV_HUGEPAGE);
    }
    return code;
}
