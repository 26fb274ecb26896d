/*
 * Reads many small files at once, for imports.
 *
 * A batch is an array of files and their ranges in one buffer, chosen by the caller. The caller's
 * thread and some helper threads take groups of files from the array by a shared counter until none
 * is left. Helpers live for one call. A thread opens all files of a group, and has the kernel read
 * ahead in each, before it reads the first: it then waits once for several reads of the disk. The
 * threads use blocking system calls rather than io_uring, because opening is most of the work and
 * containers may forbid io_uring.
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
#define GROUP_FILES 8u                  /* files that one thread has open at a time */
#define AHEAD_BYTES (UINT64_C(1) << 18) /* most bytes of a file that are read ahead */

_Static_assert(sizeof(dlfs_file) == 40, "abi.py has the same layout");

typedef struct job job;
struct job {
    void (*act)(const job *work, dlfs_file *files, uint64_t count); /* sets the codes */
    dlfs_file *files;
    uint64_t count;
    uint64_t group; /* files of a call of act */
    uint8_t *buffer;
    const char *paths;
    int directory;
    uint32_t flags; /* DLFS_FILES_* */
    atomic_uint_fast64_t next;
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

/* Opens a file and has the kernel read ahead in it. Returns a descriptor or -errno. */
static int begin_file(const job *work, const dlfs_file *file)
{
    int descriptor = open_file(work, work->paths + file->position);
    if (descriptor < 0) {
        return descriptor;
    }
    int code = check_unchanged(descriptor, file);
    if (code != 0) {
        (void)close(descriptor); /* a descriptor opened for reading loses nothing */
        return code;
    }
    uint64_t ahead = file->length_bytes < AHEAD_BYTES ? file->length_bytes : AHEAD_BYTES;
    if (ahead > 0) {
        (void)posix_fadvise(descriptor, 0, (off_t)ahead, POSIX_FADV_WILLNEED); /* only advice */
    }
    return descriptor;
}

static int finish_file(const job *work, const dlfs_file *file, int descriptor)
{
    int code = read_range(descriptor, work->buffer + file->buffer_offset, file->length_bytes, 0);
    if (code == DLFS_E_TRUNCATED) {
        code = -ESTALE; /* the file shrank between the check and the read */
    }
    if (code == 0) {
        code = check_unchanged(descriptor, file);
    }
    (void)close(descriptor);
    return code;
}

static void read_files(const job *work, dlfs_file *files, uint64_t count)
{
    int opened[GROUP_FILES];
    for (uint64_t i = 0; i < count; i++) {
        opened[i] = begin_file(work, &files[i]);
    }
    for (uint64_t i = 0; i < count; i++) {
        files[i].code = opened[i] < 0 ? opened[i] : finish_file(work, &files[i], opened[i]);
    }
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

static void stat_files(const job *work, dlfs_file *files, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        files[i].code = stat_file(work, &files[i]);
    }
}

static void read_ranges(const job *work, dlfs_file *ranges, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        dlfs_file *range = &ranges[i];
        range->code = read_range(range->descriptor, work->buffer + range->buffer_offset,
                                 range->length_bytes, range->position);
    }
}

static void *work_through(void *argument)
{
    job *work = argument;
    for (;;) {
        uint64_t first = atomic_fetch_add_explicit(&work->next, work->group, memory_order_relaxed);
        if (first >= work->count) {
            return NULL;
        }
        uint64_t left = work->count - first;
        uint64_t count = left < work->group ? left : work->group;
        work->act(work, work->files + first, count);
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
    /* A few files are better read by a thread each. */
    work->group = work->count / thread_count < GROUP_FILES ? 1 : GROUP_FILES;
    uint32_t wanted = work->count < thread_count ? (uint32_t)work->count : thread_count;
    uint32_t started = 0;
    while (started + 1 < wanted && thread_start(&helpers[started], NULL, work_through, work) == 0) {
        started++;
    }
    work_through(work);
    for (uint32_t i = 0; i < started; i++) {
        (void)pthread_join(helpers[i], NULL); /* fails only for an invalid handle */
    }
    uint64_t failed = 0;
    for (uint64_t i = 0; i < work->count; i++) {
        dlfs_file *file = &work->files[i];
        if (file->code == -EMFILE || file->code == -ENFILE) {
            work->act(work, file, 1); /* no other file of this call is open any more */
        }
        failed += file->code != 0;
    }
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
    job work = {.act = read_files,
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
    job work = {.act = stat_files,
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
    job work = {.act = read_ranges, .files = ranges, .count = count, .buffer = buffer};
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
