/*
 * Reads plain files as fast as threads can: opens each, reads it whole, and closes it.
 *
 *     bare_files DIRECTORY PATHS THREADS
 *
 * PATHS is a file of NUL-terminated paths, relative to DIRECTORY, in the order of reading.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "bare.h"

#define FILES_AT_A_TIME 64u

static int directory;
static char **paths;
static size_t count;
static _Atomic size_t next;
static _Atomic uint64_t total_bytes;

static uint64_t read_one(const char *path, char **buffer, size_t *capacity)
{
    int file = openat(directory, path, O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) < 0)
        die(path);
    size_t size = (size_t)status.st_size;
    if (size > *capacity) {
        free(*buffer);
        *buffer = allocate(size);
        *capacity = size;
    }
    for (size_t at = 0; at < size;) {
        ssize_t got = read(file, *buffer + at, size - at);
        if (got <= 0)
            die(path);
        at += (size_t)got;
    }
    close(file);
    return size;
}

static void *work(void *unused)
{
    size_t capacity = 1 << 20;
    char *buffer = allocate(capacity);
    uint64_t bytes = 0;
    size_t first;
    while ((first = atomic_fetch_add(&next, FILES_AT_A_TIME)) < count)
        for (size_t i = first; i < first + FILES_AT_A_TIME && i < count; i++)
            bytes += read_one(paths[i], &buffer, &capacity);
    atomic_fetch_add(&total_bytes, bytes);
    free(buffer);
    return unused;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    size_t bytes;
    char *text = load(argv[2], &bytes);
    paths = calloc(bytes + 1, sizeof(*paths));
    directory = open(argv[1], O_RDONLY | O_DIRECTORY);
    if (!paths || directory < 0)
        die(argv[1]);
    for (size_t at = 0; at < bytes; at += strlen(text + at) + 1)
        paths[count++] = text + at;
    unsigned threads = (unsigned)strtoul(argv[3], NULL, 10);
    pthread_t *workers = calloc(threads, sizeof(*workers));
    double cpu = cpu_s();
    double start = now_s();
    for (unsigned i = 0; workers && i < threads; i++)
        if (pthread_create(&workers[i], NULL, work, NULL) != 0)
            die("thread");
    for (unsigned i = 0; workers && i < threads; i++)
        pthread_join(workers[i], NULL);
    report(count, total_bytes, now_s() - start, cpu_s() - cpu);
    free(workers);
    return 0;
}
