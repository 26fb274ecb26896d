/*
 * Regular files and block devices: opens them and finds out which block size works. The engines
 * (uring.c, threads.c) do the I/O.
 *
 * O_DIRECT is used unless the caller or the file system refuses it. The block size is the larger of
 * the device's logical block and of what statx(STATX_DIOALIGN) reports. It is then tried with a
 * real read and doubled until a read works, because network and stacked file systems do not always
 * report it.
 *
 * A file system caches the location of a block when the block is first used, but of no others. Each
 * of a million small reads of a cold file would thus search its extents: 0.8 us of 5 for 4 KiB on
 * ext4. So the file system is asked to cache all extents when the file is opened.
 *
 * Source: Documentation/filesystems/fiemap.rst of the Linux kernel (FIEMAP_FLAG_CACHE).
 */
#include "device/file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Block size of a file that no read can be tried on. */
#define BLOCK_BYTES_UNTRIED 4096u
/* Memory for the largest block at an address that is aligned to that block and to no more. */
#define TRIAL_BYTES ((size_t)2 * DLFS_BLOCK_BYTES_MAX)

static int file_flush(dlfs_device *base)
{
    const struct dlfs_file_device *device = (const struct dlfs_file_device *)base;
    int failed;
    do {
        failed = fdatasync(device->descriptor);
    } while (failed != 0 && errno == EINTR);
    return failed == 0 ? 0 : -errno;
}

static void file_destroy(dlfs_device *base)
{
    struct dlfs_file_device *device = (struct dlfs_file_device *)base;
    (void)close(device->descriptor);
    free(device);
}

static const struct dlfs_device_ops uring_device_ops = {
    .queue_create = dlfs_uring_queue_create,
    .flush = file_flush,
    .destroy = file_destroy,
};

static const struct dlfs_device_ops threads_device_ops = {
    .queue_create = dlfs_threads_queue_create,
    .flush = file_flush,
    .destroy = file_destroy,
};

int dlfs_device_descriptor(const dlfs_device *device)
{
    if (device == NULL ||
        (device->ops != &uring_device_ops && device->ops != &threads_device_ops)) {
        return -ENOTSUP;
    }
    return ((const struct dlfs_file_device *)device)->descriptor;
}

static int open_retrying(const char *path, int flags)
{
    int descriptor;
    do {
        descriptor = open(path, flags);
    } while (descriptor < 0 && errno == EINTR);
    return descriptor < 0 ? -errno : descriptor;
}

/* Returns true if the file system states that it has no direct I/O for this file. */
static bool direct_is_refused(int descriptor, uint32_t *align_bytes)
{
#ifdef STATX_DIOALIGN
    struct statx status;
    if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
        (status.stx_mask & STATX_DIOALIGN) != 0) {
        uint32_t memory = status.stx_dio_mem_align;
        uint32_t offset = status.stx_dio_offset_align;
        *align_bytes = memory > offset ? memory : offset;
        return offset == 0;
    }
#endif
    (void)descriptor;
    *align_bytes = 0;
    return false;
}

/*
 * Reads one block at offset 0 into a buffer aligned to no more than the block. Returns 0 or -errno.
 */
static int try_block(int descriptor, uint8_t *memory, uint32_t block_bytes)
{
    ssize_t got;
    do {
        /* memory is aligned to two blocks: one block further is aligned to one block only */
        got = pread(descriptor, memory + block_bytes, block_bytes, 0);
    } while (got < 0 && errno == EINTR);
    return got < 0 ? -errno : 0;
}

/*
 * Returns the smallest power of two >= at_least_bytes with which direct reads work; 0 if none does.
 */
static uint32_t find_block_bytes(int descriptor, uint32_t at_least_bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, TRIAL_BYTES, TRIAL_BYTES) != 0) {
        return 0;
    }
    uint32_t found = 0;
    for (uint32_t bytes = DLFS_BLOCK_BYTES_MIN; bytes <= DLFS_BLOCK_BYTES_MAX && found == 0;
         bytes *= 2) {
        /* Only EINVAL is about alignment; the reads of the user report any other error. */
        if (bytes >= at_least_bytes && try_block(descriptor, memory, bytes) != -EINVAL) {
            found = bytes;
        }
    }
    free(memory);
    return found;
}

/* Makes the file system cache the extents of the whole file, if it can. */
static void cache_extents(int descriptor)
{
#ifdef FIEMAP_FLAG_CACHE
    /* The file system caches all extents; the unused result is about one byte. */
    struct fiemap map = {.fm_length = 1, .fm_flags = FIEMAP_FLAG_CACHE};
    (void)ioctl(descriptor, FS_IOC_FIEMAP, &map);
#else
    (void)descriptor;
#endif
}

static int describe_disk(int descriptor, uint64_t *size_bytes, uint32_t *block_bytes)
{
    int logical = 0;
    uint64_t bytes = 0;
    if (ioctl(descriptor, BLKSSZGET, &logical) != 0 ||
        ioctl(descriptor, BLKGETSIZE64, &bytes) != 0) {
        return -errno;
    }
    if (logical <= 0) {
        return -EIO;
    }
    *size_bytes = bytes;
    *block_bytes = (uint32_t)logical;
    return 0;
}

/* Properties of an open file; block_bytes starts at the smallest possible size. */
struct file_shape {
    uint64_t size_bytes;
    uint32_t block_bytes;
    bool direct; /* whether O_DIRECT stays in use */
};

static int describe_file(int descriptor, bool direct, struct file_shape *shape)
{
    struct stat status;
    if (fstat(descriptor, &status) != 0) {
        return -errno;
    }
    shape->direct = direct;
    if (S_ISBLK(status.st_mode)) {
        int error = describe_disk(descriptor, &shape->size_bytes, &shape->block_bytes);
        if (error < 0) {
            return error;
        }
    } else if (S_ISREG(status.st_mode)) {
        shape->size_bytes = (uint64_t)status.st_size;
        cache_extents(descriptor);
    } else {
        return -ENOTBLK;
    }
    if (!direct) {
        return 0;
    }
    uint32_t align_bytes = 0;
    if (direct_is_refused(descriptor, &align_bytes)) {
        shape->direct = false;
        return 0;
    }
    if (align_bytes < shape->block_bytes) {
        align_bytes = shape->block_bytes;
    }
    if (align_bytes < BLOCK_BYTES_UNTRIED && shape->size_bytes == 0) {
        align_bytes = BLOCK_BYTES_UNTRIED;
    }
    uint32_t works = find_block_bytes(descriptor, align_bytes);
    shape->direct = works != 0;
    shape->block_bytes = works != 0 ? works : shape->block_bytes;
    return 0;
}

static int open_described(const char *path, uint32_t flags, struct file_shape *shape)
{
    int access = (flags & DLFS_OPEN_WRITE) != 0 ? O_RDWR : O_RDONLY;
    bool direct = (flags & DLFS_OPEN_BUFFERED) == 0;
    /* O_NONBLOCK: a named pipe that has just taken its place must not wait for its other end. */
    access |= O_CLOEXEC | O_NONBLOCK;
    int descriptor = open_retrying(path, direct ? access | O_DIRECT : access);
    if (direct && descriptor == -EINVAL) { /* the file system does not support O_DIRECT */
        direct = false;
        descriptor = open_retrying(path, access);
    }
    if (descriptor < 0) {
        return descriptor;
    }
    int error = describe_file(descriptor, direct, shape);
    int keep = 0;
    if (error == 0) {
        int status = fcntl(descriptor, F_GETFL);
        keep = shape->direct ? O_DIRECT : 0;
        status = (status & ~(O_NONBLOCK | O_DIRECT)) | keep;
        error = fcntl(descriptor, F_SETFL, status) == 0 ? 0 : -errno;
    }
    if (error < 0) {
        (void)close(descriptor);
        return error;
    }
    return descriptor;
}

static int choose_engine(uint32_t engine, bool *uring)
{
    *uring = false;
    if (engine == DLFS_ENGINE_THREADS) {
        return 0;
    }
    int error = dlfs_uring_probe();
    *uring = error == 0;
    if (error == 0 || engine == DLFS_ENGINE_URING) {
        return error;
    }
    /* ENOMEM: kernels before 5.12 count rings as locked memory. */
    bool forbidden = error == -ENOSYS || error == -EPERM || error == -EACCES || error == -ENOMEM;
    return forbidden ? 0 : error;
}

int dlfs_device_open_file(const char *path, uint32_t flags, uint32_t engine, dlfs_device **out)
{
    if (path == NULL || out == NULL || engine > DLFS_ENGINE_THREADS ||
        (flags & ~(DLFS_OPEN_WRITE | DLFS_OPEN_BUFFERED)) != 0) {
        return -EINVAL;
    }
    bool uring;
    int error = choose_engine(engine, &uring);
    if (error < 0) {
        return error;
    }
    struct stat status;
    /* Opening alone may have an effect, as of a watchdog or a tape. */
    if (stat(path, &status) == 0 &&
        (S_ISCHR(status.st_mode) || S_ISFIFO(status.st_mode) || S_ISSOCK(status.st_mode))) {
        return -ENOTBLK;
    }
    struct file_shape shape = {.block_bytes = DLFS_BLOCK_BYTES_MIN};
    int descriptor = open_described(path, flags, &shape);
    if (descriptor < 0) {
        return descriptor;
    }
    struct dlfs_file_device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        (void)close(descriptor);
        return -ENOMEM;
    }
    device->descriptor = descriptor;
    dlfs_device_init(&device->base, uring ? &uring_device_ops : &threads_device_ops,
                     uring ? "uring" : "threads",
                     shape.size_bytes - shape.size_bytes % shape.block_bytes, shape.block_bytes,
                     (flags & DLFS_OPEN_WRITE) != 0);
    *out = &device->base;
    return 0;
}
