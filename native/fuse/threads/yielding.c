/*
 * The watcher sets all policies, and is normal itself: no thread holds the lock while it yields,
 * which it might then do for seconds. The lock is not taken for each answer.
 */
#include "threads/yielding.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "platform/clock.h"
#include "platform/thread.h"

#define LOOK_NS UINT64_C(4000000)      /* between two looks of the watcher */
#define BARRED_NS UINT64_C(1000000000) /* that a thread stays normal after it had to wait */

static bool set_policy(pid_t thread, int policy)
{
    struct sched_param parameter = {0};
    return sched_setscheduler(thread, policy, &parameter) == 0;
}

/* Returns true if a thread of this process runs, or waits for its processor. */
static bool is_runnable(pid_t thread)
{
    char path[64];
    char line[512] = "";
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)thread);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    bool got = fgets(line, sizeof line, file) != NULL;
    (void)fclose(file);
    const char *name_end = strrchr(line, ')'); /* the state follows the name */
    return got && name_end != NULL && strncmp(name_end, ") R", 3) == 0;
}

/* Has the threads yield that have asked for it. The lock is held. */
static void begin_yielding(struct yielding *yielding)
{
    for (struct yielder *yielder = yielding->first; yielder != NULL; yielder = yielder->next) {
        if (!yielder->is_set) {
            yielder->is_set = true;
            (void)set_policy(yielder->id, SCHED_IDLE);
        }
    }
}

/* Makes those normal that have not answered since the last look. The lock is held. */
static void look(struct yielding *yielding)
{
    struct yielder **at = &yielding->first;
    while (*at != NULL) {
        struct yielder *yielder = *at;
        uint32_t answers = atomic_load_explicit(&yielder->answers, memory_order_relaxed);
        if (answers != yielder->seen) {
            yielder->seen = answers;
            at = &yielder->next;
            continue;
        }
        if (is_runnable(yielder->id)) {
            atomic_store(&yielder->barred_until_ns, monotonic_ns() + BARRED_NS);
        }
        *at = yielder->next;
        (void)set_policy(yielder->id, SCHED_OTHER);
        atomic_store(&yielder->yields, false);
    }
}

/* Returns true if a thread with the policy SCHED_IDLE may become normal again. */
static bool may_yield(void)
{
    return sched_getscheduler(0) == SCHED_OTHER && set_policy(0, SCHED_IDLE) &&
           set_policy(0, SCHED_OTHER);
}

static void *watch(void *argument)
{
    struct yielding *yielding = argument;
    bool permitted = may_yield();
    uint64_t next_look_ns = 0;
    (void)pthread_mutex_lock(&yielding->lock);
    atomic_store(&yielding->permitted, permitted && !yielding->ending);
    while (!yielding->ending) {
        if (yielding->first == NULL) {
            (void)pthread_cond_wait(&yielding->asked, &yielding->lock);
        } else {
            condition_wait_until(&yielding->asked, &yielding->lock, next_look_ns);
        }
        if (monotonic_ns() >= next_look_ns) {
            look(yielding);
            next_look_ns = monotonic_ns() + LOOK_NS;
        }
        begin_yielding(yielding);
    }
    (void)pthread_mutex_unlock(&yielding->lock);
    return NULL;
}

void yielding_start(struct yielding *yielding)
{
    (void)pthread_mutex_init(&yielding->lock, NULL);
    (void)condition_init(&yielding->asked);
    yielding->first = NULL;
    yielding->ending = false;
    atomic_init(&yielding->permitted, false);
    yielding->started = thread_start(&yielding->watcher, NULL, watch, yielding) == 0;
}

void yielding_stop(struct yielding *yielding)
{
    (void)pthread_mutex_lock(&yielding->lock);
    yielding->ending = true;
    atomic_store(&yielding->permitted, false);
    (void)pthread_cond_signal(&yielding->asked);
    (void)pthread_mutex_unlock(&yielding->lock);
    if (yielding->started) {
        (void)pthread_join(yielding->watcher, NULL);
    }
    (void)pthread_cond_destroy(&yielding->asked);
    (void)pthread_mutex_destroy(&yielding->lock);
}

void yielder_init(struct yielder *yielder, struct yielding *yielding)
{
    yielder->yielding = yielding;
    yielder->id = (pid_t)syscall(SYS_gettid); /* glibc has gettid() from 2.30 on */
    yielder->next = NULL;
    atomic_init(&yielder->yields, false);
    atomic_init(&yielder->answers, 0);
    atomic_init(&yielder->barred_until_ns, 0);
}

static void ask(struct yielder *yielder)
{
    struct yielding *yielding = yielder->yielding;
    (void)pthread_mutex_lock(&yielding->lock);
    if (!yielding->ending) {
        atomic_store(&yielder->yields, true);
        yielder->is_set = false;
        yielder->seen = atomic_load(&yielder->answers) - 1;
        yielder->next = yielding->first;
        yielding->first = yielder;
        (void)pthread_cond_signal(&yielding->asked);
    }
    (void)pthread_mutex_unlock(&yielding->lock);
}

void yielder_answer(struct yielder *yielder, bool alone)
{
    (void)atomic_fetch_add_explicit(&yielder->answers, 1, memory_order_relaxed);
    if (alone && !atomic_load_explicit(&yielder->yields, memory_order_relaxed) &&
        atomic_load_explicit(&yielder->yielding->permitted, memory_order_relaxed) &&
        monotonic_ns() >= atomic_load(&yielder->barred_until_ns)) {
        ask(yielder);
    }
}

void yielder_end(struct yielder *yielder)
{
    struct yielding *yielding = yielder->yielding;
    (void)set_policy(yielder->id, SCHED_OTHER);
    (void)pthread_mutex_lock(&yielding->lock);
    for (struct yielder **at = &yielding->first; *at != NULL; at = &(*at)->next) {
        if (*at == yielder) {
            *at = yielder->next;
            break;
        }
    }
    (void)pthread_mutex_unlock(&yielding->lock);
}
