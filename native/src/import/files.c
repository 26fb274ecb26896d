/*
 * Reads many small files at once, for imports.
 *
 * A batch is an array of files and their ranges in one buffer, chosen by the caller. The caller's
 * thread and some helper threads take files from the array by a shared counter until none is left.
 * Helpers live for one call. The threads use blocking system calls rather than io_uring, because
 * opening is most of the work and containers may forbid io_uring.
 */
#include "dlfs/import.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "platform/thread.h"

#define READ_BYTES_MAX                                                         \
    (UINT64_C(1) << 30) /* Linux transfers at most 2 GiB less one page at once \
                         */
#define NS_PER_SECOND INT64_C(1000000000)

_Static_assert(sizeof(dlfs_file) == 40, "abi.py has the same layout");

typedef struct job job;
struct job {
    int (*act)(const job *work, dlfs_file *file);
    dlfs_file *files;
    uint64_t count;
    uint8_t *buffer;
    const char *paths;
    int directory;
    uint32_t flags; /* DLFS_FILES_* */
    atomic_uint_fast64_t next;
    atomic_uint_fast64_t failed;
};

/*
 * Reads exactly length bytes at position. Returns 0, -errno, or DLFS_E_TRUNCATED if the file ends
 * before.
 */
static int read_range(int descriptor, uint8_t *target, uint64_t length, uint64_t position)
{
    while (length > 0) {
        size_t wanted = (size_t)(length < READ_BYTES_MAX ? length : READ_BYTES_MAX);
        ssize_t got = pread(descriptor, target, wanted, (off_t)position);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return -errno;
        }
        if (got == 0) {
            return DLFS_E_TRUNCATED;
        }
        target += got;
        position += (uint64_t)got;
        length -= (uint64_t)got;
    }
    return 0;
}

static int64_t modified_ns(const struct stat *status)
{
    return (int64_t)status->st_mtim.tv_sec * NS_PER_SECOND + (int64_t)status->st_mtim.tv_nsec;
}

static int check_unchanged(int descriptor, const dlfs_file *file)
{
    struct stat status;
    if (fstat(descriptor, &status) != 0) {
        return -errno;
    }
    if (!S_ISREG(status.st_mode) || (uint64_t)status.st_size != file->length_bytes ||
        modified_ns(&status) != file->modified_ns) {
        return -ESTALE;
    }
    return 0;
}

static int open_file(const job *work, const char *path)
{
    /*
     * O_NOATIME avoids an inode write per file, where it is permitted. O_NONBLOCK: opening a FIFO
     * must not block.
     */
    int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
    flags |= (work->flags & DLFS_FILES_NOFOLLOW) != 0 ? O_NOFOLLOW : 0;
    int descriptor;
    do {
        descriptor = openat(work->directory, path, flags | O_NOATIME);
        if (descriptor < 0 && errno == EPERM) {
            descriptor = openat(work->directory, path, flags);
        }
    } while (descriptor < 0 && errno == EINTR);
    return descriptor < 0 ? -errno : descriptor;
}

static int read_file(const job *work, dlfs_file *file)
{
    int descriptor = open_file(work, work->paths + file->position);
    if (descriptor < 0) {
        return descriptor;
    }
    int code = check_unchanged(descriptor, file);
    if (code == 0) {
        code = read_range(descriptor, work->buffer + file->buffer_offset, file->length_bytes, 0);
    }
    if (code == DLFS_E_TRUNCATED) {
        code = -ESTALE; /* the file shrank between the check and the read */
    }
    if (code == 0) {
        code = check_unchanged(descriptor, file);
    }
    (void)close(descriptor); /* a descriptor opened for reading loses nothing */
    return code;
}

static int stat_file(const job *work, dlfs_file *file)
{
    const char *path = work->paths + file->position;
    int flags = (work->flags & DLFS_FILES_NOFOLLOW) != 0 ? AT_SYMLINK_NOFOLLOW : 0;
    struct stat status;
    if (fstatat(work->directory, path, &status, flags) != 0) {
        return -errno;
    }
    if (!S_ISREG(status.st_mode)) {
        return -ESTALE;
    }
    /* Most files are readable by all; access() costs as much as the rest of this function. */
    if ((status.st_mode & S_IROTH) == 0 &&
        faccessat(work->directory, path, R_OK, AT_EACCESS) != 0) {
        return -errno;
    }
    file->length_bytes = (uint64_t)status.st_size;
    file->modified_ns = modified_ns(&status);
    return 0;
}

static int read_open_file(const job *work, dlfs_file *file)
{
    return read_range(file->descriptor, work->buffer + file->buffer_offset, file->length_bytes,
                      file->position);
}

static void *work_through(void *argument)
{
    job *work = argument;
    for (;;) {
        uint64_t i = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (i >= work->count) {
            return NULL;
        }
        dlfs_file *file = &work->files[i];
        file->code = work->act(work, file);
        if (file->code != 0) {
            atomic_fetch_add_explicit(&work->failed, 1, memory_order_relaxed);
        }
    }
}

/* Does the work with this many threads, and returns the number of files that failed. */
static int run(job *work, uint32_t thread_count)
{
    pthread_t helpers[DLFS_FILES_THREADS_MAX];
    if (thread_count == 0 || thread_count > DLFS_FILES_THREADS_MAX ||
        (work->flags & ~DLFS_FILES_NOFOLLOW) != 0) {
        return -EINVAL;
    }
    if (work->count == 0) {
        return 0;
    }
    uint32_t wanted = work->count < thread_count ? (uint32_t)work->count : thread_count;
    uint32_t started = 0;
    while (started + 1 < wanted && thread_start(&helpers[started], NULL, work_through, work) == 0) {
        started++;
    }
    work_through(work);
    for (uint32_t i = 0; i < started; i++) {
        (void)pthread_join(helpers[i], NULL); /* fails only for an invalid handle */
    }
    uint64_t failed = atomic_load(&work->failed);
    return failed > INT_MAX ? INT_MAX : (int)failed;
}

static bool places_fit(const dlfs_file *files, uint64_t count, uint64_t buffer_bytes)
{
    for (uint64_t i = 0; i < count; i++) {
        if (files[i].length_bytes > buffer_bytes ||
            files[i].buffer_offset > buffer_bytes - files[i].length_bytes) {
            return false;
        }
    }
    return true;
}

static bool paths_end(const char *paths, uint64_t paths_bytes, const dlfs_file *files,
                      uint64_t count)
{
    /* A NUL at the very end terminates every path that starts before it. */
    if (count > 0 && (paths == NULL || paths_bytes == 0 || paths[paths_bytes - 1] != '\0')) {
        return false;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (files[i].position >= paths_bytes) {
            return false;
        }
    }
    return true;
}

int dlfs_files_read(int directory, const char *paths, uint64_t paths_bytes, dlfs_file *files,
                    uint64_t count, void *buffer, uint64_t buffer_bytes, uint32_t flags,
                    uint32_t thread_count)
{
    job work = {.act = read_file,
                .files = files,
                .count = count,
                .buffer = buffer,
                .paths = paths,
                .directory = directory,
                .flags = flags};
    bool fits =
        places_fit(files, count, buffer_bytes) && paths_end(paths, paths_bytes, files, count);
    return fits ? run(&work, thread_count) : -EINVAL;
}

int dlfs_files_stat(int directory, const char *paths, uint64_t paths_bytes, dlfs_file *files,
                    uint64_t count, uint32_t flags, uint32_t thread_count)
{
    job work = {.act = stat_file,
                .files = files,
                .count = count,
                .paths = paths,
                .directory = directory,
                .flags = flags};
    return paths_end(paths, paths_bytes, files, count) ? run(&work, thread_count) : -EINVAL;
}

int dlfs_ranges_read(dlfs_file *ranges, uint64_t count, void *buffer, uint64_t buffer_bytes,
                     uint32_t thread_count)
{
    job work = {.act = read_open_file, .files = ranges, .count = count, .buffer = buffer};
    if (!places_fit(ranges, count, buffer_bytes)) {
        return -EINVAL;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (ranges[i].position > INT64_MAX - ranges[i].length_bytes) {
            return -EINVAL;
        }
    }
    return run(&work, thread_count);
}
