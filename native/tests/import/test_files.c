/*
 * Reading files: every byte at its offset, a code for every file, nothing outside, invalid calls.
 */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "dlfs/import.h"

#define COUNT 200u
#define PATHS_BYTES (COUNT * 8u)
#define UNTOUCHED 0xa5

/* Files 0..COUNT-1 of a scratch folder: file i has i bytes of the value i. */
typedef struct scene {
    char folder[64];
    int directory;
    char paths[PATHS_BYTES];
    uint64_t paths_bytes;
    dlfs_file files[COUNT];
    uint8_t
        *buffer; /* exactly as long as the files, so that a sanitizer detects one byte too many */
    uint64_t buffer_bytes;
} scene;

static void write_file(int directory, const char *name, uint8_t value, size_t length)
{
    uint8_t bytes[COUNT];
    memset(bytes, value, sizeof(bytes));
    CHECK(length <= sizeof(bytes));
    int descriptor = openat(directory, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    CHECK(descriptor >= 0);
    CHECK_EQ(write(descriptor, bytes, length), length);
    CHECK_EQ(close(descriptor), 0);
}

static void scene_create(scene *made)
{
    memset(made, 0, sizeof(*made));
    strcpy(made->folder, "/tmp/dlfs-files-XXXXXX");
    CHECK(mkdtemp(made->folder) != NULL);
    made->directory = open(made->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(made->directory >= 0);
    for (uint32_t i = 0; i < COUNT; i++) {
        char *name = made->paths + made->paths_bytes;
        made->files[i].position = made->paths_bytes;
        made->paths_bytes += (uint64_t)sprintf(name, "f%u", i) + 1;
        write_file(made->directory, name, (uint8_t)i, i);
    }
    CHECK_EQ(
        dlfs_files_stat(made->directory, made->paths, made->paths_bytes, made->files, COUNT, 0, 4),
        0);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK_EQ(made->files[i].length_bytes, i);
        made->files[i].buffer_offset = made->buffer_bytes;
        made->buffer_bytes += i;
    }
    made->buffer = malloc(made->buffer_bytes);
    CHECK(made->buffer != NULL);
    memset(made->buffer, UNTOUCHED, made->buffer_bytes);
}

static const char *path_of(const scene *made, uint32_t i)
{
    return made->paths + made->files[i].position;
}

static void scene_destroy(scene *made)
{
    for (uint32_t i = 0; i < COUNT; i++) {
        (void)unlinkat(made->directory, path_of(made, i), 0);
    }
    CHECK_EQ(close(made->directory), 0);
    CHECK_EQ(rmdir(made->folder), 0);
    free(made->buffer);
}

static int read_all(scene *made, uint32_t flags, uint32_t thread_count)
{
    return dlfs_files_read(made->directory, made->paths, made->paths_bytes, made->files, COUNT,
                           made->buffer, made->buffer_bytes, flags, thread_count);
}

static bool holds(const scene *made, uint32_t i, uint8_t value)
{
    for (uint32_t at = 0; at < i; at++) {
        if (made->buffer[made->files[i].buffer_offset + at] != value) {
            return false;
        }
    }
    return true;
}

static void every_thread_count(void)
{
    static const uint32_t counts[] = {1, 2, 7, DLFS_FILES_THREADS_MAX};
    scene made;
    scene_create(&made);
    for (size_t turn = 0; turn < sizeof(counts) / sizeof(counts[0]); turn++) {
        memset(made.buffer, UNTOUCHED, made.buffer_bytes);
        CHECK_EQ(read_all(&made, 0, counts[turn]), 0);
        for (uint32_t i = 0; i < COUNT; i++) {
            CHECK_EQ(made.files[i].code, 0);
            CHECK(holds(&made, i, (uint8_t)i));
        }
    }
    scene_destroy(&made);
}

/*
 * One of each kind of bad file among good ones: each gets its own code, and the good ones are read.
 */
static void bad_files_among_good_ones(void)
{
    scene made;
    scene_create(&made);
    CHECK_EQ(unlinkat(made.directory, path_of(&made, 10), 0), 0);
    write_file(made.directory, path_of(&made, 20), 20, 19);
    write_file(made.directory, path_of(&made, 30), 30, 31);
    made.files[40].modified_ns++;
    CHECK_EQ(unlinkat(made.directory, path_of(&made, 50), 0), 0);
    CHECK_EQ(mkfifoat(made.directory, path_of(&made, 50), 0644), 0); /* must not block */
    CHECK_EQ(unlinkat(made.directory, path_of(&made, 60), 0), 0);
    CHECK_EQ(symlinkat(path_of(&made, 61), made.directory, path_of(&made, 60)), 0);

    CHECK_EQ(read_all(&made, DLFS_FILES_NOFOLLOW, 3), 6);
    for (uint32_t i = 0; i < COUNT; i++) {
        int expected = i == 10                                    ? -ENOENT
                       : i == 20 || i == 30 || i == 40 || i == 50 ? -ESTALE
                       : i == 60                                  ? -ELOOP
                                                                  : 0;
        CHECK_EQ(made.files[i].code, expected);
        CHECK(expected != 0 || holds(&made, i, (uint8_t)i));
    }
    /* Followed, the link leads to a file of another length. */
    CHECK_EQ(read_all(&made, 0, 3), 6);
    CHECK_EQ(made.files[60].code, -ESTALE);
    scene_destroy(&made);
}

/* Where the system allows fewer open files than a thread would have open, all are read. */
static void few_descriptors(void)
{
    scene made;
    scene_create(&made);
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    int next = dup(made.directory);
    CHECK(next > made.directory);
    CHECK_EQ(close(next), 0);
    for (uint32_t allowed = 0; allowed < 3; allowed++) {
        struct rlimit low = {.rlim_cur = (rlim_t)next + allowed, .rlim_max = limit.rlim_max};
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
        CHECK_EQ(read_all(&made, 0, 1), allowed == 0 ? COUNT : 0);
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
        CHECK_EQ(made.files[COUNT - 1].code, allowed == 0 ? -EMFILE : 0);
        CHECK(allowed == 0 || holds(&made, COUNT - 1, COUNT - 1));
    }
    scene_destroy(&made);
}

static void stat_tells_what_cannot_be_read(void)
{
    scene made;
    scene_create(&made);
    CHECK_EQ(unlinkat(made.directory, path_of(&made, 1), 0), 0);
    CHECK_EQ(unlinkat(made.directory, path_of(&made, 2), 0), 0);
    CHECK_EQ(mkfifoat(made.directory, path_of(&made, 2), 0644), 0);
    CHECK_EQ(unlinkat(made.directory, path_of(&made, 3), 0), 0);
    CHECK_EQ(symlinkat(path_of(&made, 9), made.directory, path_of(&made, 3)), 0);
    CHECK_EQ(fchmodat(made.directory, path_of(&made, 4), 0, 0), 0);
    int expected = geteuid() == 0 ? 0 : -EACCES; /* root may read it nevertheless */

    CHECK_EQ(dlfs_files_stat(made.directory, made.paths, made.paths_bytes, made.files, COUNT,
                             DLFS_FILES_NOFOLLOW, 2),
             expected == 0 ? 3 : 4);
    CHECK_EQ(made.files[1].code, -ENOENT);
    CHECK_EQ(made.files[2].code, -ESTALE);
    CHECK_EQ(made.files[3].code, -ESTALE);
    CHECK_EQ(made.files[4].code, expected);
    CHECK_EQ(dlfs_files_stat(made.directory, made.paths, made.paths_bytes, made.files, COUNT, 0, 2),
             expected == 0 ? 2 : 3);
    CHECK_EQ(made.files[3].code, 0);
    CHECK_EQ(made.files[3].length_bytes, 9);
    scene_destroy(&made);
}

/* Ranges of one file of 0, 1, 2, ... 199: whole, within, up to its end, and beyond it. */
static void ranges(void)
{
    char name[] = "/tmp/dlfs-files-XXXXXX";
    int descriptor = mkstemp(name);
    CHECK(descriptor >= 0);
    uint8_t bytes[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        bytes[i] = (uint8_t)i;
    }
    CHECK_EQ(write(descriptor, bytes, COUNT), COUNT);

    uint8_t *buffer = malloc(256);
    CHECK(buffer != NULL);
    dlfs_file wanted[] = {
        {.position = 0, .buffer_offset = 0, .length_bytes = 10, .descriptor = descriptor},
        {.position = 190, .buffer_offset = 10, .length_bytes = 10, .descriptor = descriptor},
        {.position = 195, .buffer_offset = 20, .length_bytes = 10, .descriptor = descriptor},
        {.position = COUNT, .buffer_offset = 256, .length_bytes = 0, .descriptor = descriptor},
        {.position = 1 << 20, .buffer_offset = 30, .length_bytes = 1, .descriptor = descriptor},
        {.position = 0, .buffer_offset = 255, .length_bytes = 1, .descriptor = -1},
    };
    CHECK_EQ(dlfs_ranges_read(wanted, 6, buffer, 256, 2), 3);
    CHECK(wanted[0].code == 0 && memcmp(buffer, bytes, 10) == 0);
    CHECK(wanted[1].code == 0 && memcmp(buffer + 10, bytes + 190, 10) == 0);
    CHECK_EQ(wanted[2].code, DLFS_E_TRUNCATED);
    CHECK_EQ(wanted[3].code, 0);
    CHECK_EQ(wanted[4].code, DLFS_E_TRUNCATED);
    CHECK_EQ(wanted[5].code, -EBADF);

    wanted[0].position = UINT64_MAX; /* no such offset in any file: refused before any read */
    CHECK_EQ(dlfs_ranges_read(wanted, 1, buffer, 256, 1), -EINVAL);
    wanted[0].position = INT64_MAX;
    CHECK_EQ(dlfs_ranges_read(wanted, 1, buffer, 256, 1), -EINVAL);
    CHECK_EQ(dlfs_ranges_read(wanted, 0, NULL, 0, 1), 0);
    free(buffer);
    CHECK_EQ(close(descriptor), 0);
    CHECK_EQ(unlink(name), 0);
}

static void hostile_calls(void)
{
    scene made;
    scene_create(&made);
    const dlfs_file good = made.files[100];
    CHECK_EQ(read_all(&made, 0, 0), -EINVAL);
    CHECK_EQ(read_all(&made, 0, DLFS_FILES_THREADS_MAX + 1), -EINVAL);
    CHECK_EQ(read_all(&made, 0x80, 1), -EINVAL);
    made.files[100].buffer_offset = made.buffer_bytes - 99;
    CHECK_EQ(read_all(&made, 0, 1), -EINVAL);
    made.files[100].buffer_offset = UINT64_MAX - 50; /* its end wraps around */
    CHECK_EQ(read_all(&made, 0, 1), -EINVAL);
    made.files[100] = good;
    made.files[100].length_bytes = UINT64_MAX;
    CHECK_EQ(read_all(&made, 0, 1), -EINVAL);
    made.files[100] = good;
    made.files[100].position = made.paths_bytes;
    CHECK_EQ(read_all(&made, 0, 1), -EINVAL);
    made.files[100] = good;
    made.paths[made.paths_bytes - 1] = 'x'; /* the last path has no NUL */
    CHECK_EQ(read_all(&made, 0, 1), -EINVAL);
    made.paths[made.paths_bytes - 1] = '\0';
    CHECK_EQ(dlfs_files_read(made.directory, NULL, made.paths_bytes, made.files, COUNT, made.buffer,
                             made.buffer_bytes, 0, 1),
             -EINVAL);
    CHECK_EQ(dlfs_files_stat(made.directory, made.paths, 0, made.files, COUNT, 0, 1), -EINVAL);
    for (uint64_t at = 0; at < made.buffer_bytes; at++) {
        CHECK(made.buffer[at] == UNTOUCHED);
    }
    CHECK_EQ(read_all(&made, 0, 1), 0);
    scene_destroy(&made);
}

static void *read_many_times(void *argument)
{
    scene *made = argument;
    for (int turn = 0; turn < 20; turn++) {
        CHECK_EQ(read_all(made, 0, 3), 0);
    }
    return NULL;
}

static void callers_at_once(void)
{
    enum { CALLERS = 3 };
    static scene made[CALLERS];
    pthread_t threads[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        scene_create(&made[i]);
        CHECK_EQ(pthread_create(&threads[i], NULL, read_many_times, &made[i]), 0);
    }
    for (int i = 0; i < CALLERS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
        CHECK(holds(&made[i], COUNT - 1, COUNT - 1));
        scene_destroy(&made[i]);
    }
}

int main(void)
{
    every_thread_count();
    bad_files_among_good_ones();
    few_descriptors();
    stat_tells_what_cannot_be_read();
    ranges();
    hostile_calls();
    callers_at_once();
    return 0;
}
