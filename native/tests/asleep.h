/* Waits until threads of this process sleep. Source: proc(5), /proc/PID/task/ID/stat. */
#pragma once

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static inline bool is_asleep(pid_t id)
{
    char path[64];
    char state;
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/stat", id);
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    CHECK_EQ(fscanf(file, "%*d %*s %c", &state), 1);
    (void)fclose(file);
    return state == 'S';
}

static inline void wait_until_asleep(pid_t id)
{
    while (!is_asleep(id)) {
    }
}

/* Returns true if no thread runs but the caller. */
static inline bool others_are_asleep(void)
{
    bool asleep = true;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        pid_t id = (pid_t)strtol(entry->d_name, NULL, 10); /* 0: "." and ".." */
        if (id != 0 && id != gettid() && !is_asleep(id)) {
            asleep = false;
        }
    }
    (void)closedir(tasks);
    return asleep;
}

/*
 * Waits until threads that were just made have begun and found nothing to do: what they allocate
 * when they begin may lock the allocator of a sanitizer, and a child that is forked meanwhile has
 * it locked for ever. One of them may be seen asleep as it waits for another one's lock, so all
 * must be, many times in turn.
 */
static inline void wait_until_others_sleep(void)
{
    for (int seen = 0; seen < 10; seen++) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        if (!others_are_asleep()) {
            seen = -1;
        }
    }
}
