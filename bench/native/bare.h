/* Shared code of the bare programs: locations to read, clocks, and the JSON line of results. */
#ifndef BENCH_BARE_H
#define BENCH_BARE_H

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Offset and length of a sample, in bytes. */
struct location {
    uint64_t offset;
    uint64_t length;
};

static inline void die(const char *what)
{
    perror(what);
    exit(1);
}

static inline double now_s(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static inline double seconds_of(struct timeval time)
{
    return (double)time.tv_sec + (double)time.tv_usec * 1e-6;
}

/* Returns the CPU time of the process with all its threads, in seconds. */
static inline double cpu_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
}

static inline void *allocate(size_t bytes)
{
    void *memory = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    if (!memory)
        die("allocate");
    return memory;
}

/* Reads a whole file into memory, followed by a NUL. */
static inline char *load(const char *path, size_t *bytes)
{
    int file = open(path, O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) < 0)
        die(path);
    *bytes = (size_t)status.st_size;
    char *memory = allocate(*bytes + 1);
    for (size_t at = 0; at < *bytes;) {
        ssize_t got = read(file, memory + at, *bytes - at);
        if (got <= 0)
            die(path);
        at += (size_t)got;
    }
    memory[*bytes] = 0;
    close(file);
    return memory;
}

static inline void report(uint64_t samples, uint64_t bytes, double seconds, double cpu)
{
    printf("{\"samples\": %llu, \"bytes\": %llu, \"seconds\": %.9f, \"cpu_seconds\": %.9f}\n",
           (unsigned long long)samples, (unsigned long long)bytes, seconds, cpu);
}

#endif
