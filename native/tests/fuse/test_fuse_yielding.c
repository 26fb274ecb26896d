/*
 * Tests when threads yield their processor: while they answer one program, until they pause, and
 * not if they could not become normal again.
 */
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "platform/clock.h"
#include "threads/yielding.h"

#define ANSWERS 1000u
#define NOBODY 65534u

static void pause_us(long us)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

static bool yields(void)
{
    return sched_getscheduler(0) == SCHED_IDLE;
}

/* Returns false if the system forbids it. */
static bool is_permitted(void)
{
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NICE, &limit), 0);
    return geteuid() == 0 || limit.rlim_cur >= 20;
}

/* Answers one program until this thread yields. */
static void answer_until_yields(struct yielder *yielder)
{
    while (!yields()) {
        yielder_answer(yielder, true);
        pause_us(10);
    }
}

static void test_until_a_pause(struct yielder *yielder)
{
    answer_until_yields(yielder);
    CHECK(atomic_load(&yielder->yields));
    while (yields()) { /* the watcher finds a thread that sleeps */
        pause_us(1000);
    }
    answer_until_yields(yielder);
}

/* A thread that has work but gets no further waits for its processor, as far as one can see. */
static void test_barred(struct yielder *yielder)
{
    answer_until_yields(yielder);
    while (yields()) {
    }
    while (atomic_load(&yielder->yields)) {
    }
    uint64_t barred_until_ns = atomic_load(&yielder->barred_until_ns);
    CHECK(barred_until_ns > 0);
    yielder_answer(yielder, true);
    CHECK(!yields() || monotonic_ns() >= barred_until_ns);
    answer_until_yields(yielder);
    CHECK(monotonic_ns() >= barred_until_ns);
}

static void test_several_programs(struct yielder *yielder)
{
    while (yields()) {
        pause_us(1000);
    }
    for (uint32_t i = 0; i < ANSWERS; i++) {
        yielder_answer(yielder, false);
        CHECK(!yields());
    }
}

static void test_forbidden(void)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct yielding yielding;
        struct yielder yielder;
        CHECK_EQ(setrlimit(RLIMIT_NICE, &(struct rlimit){0}), 0);
        CHECK(geteuid() != 0 || setuid(NOBODY) == 0);
        yielding_start(&yielding);
        yielder_init(&yielder, &yielding);
        for (uint32_t i = 0; i < ANSWERS; i++) {
            yielder_answer(&yielder, true);
            CHECK(!yields());
            pause_us(10);
        }
        yielder_end(&yielder);
        yielding_stop(&yielding);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void)
{
    struct yielding yielding;
    struct yielder yielder;
    test_forbidden();
    if (!is_permitted()) {
        return 0;
    }
    yielding_start(&yielding);
    yielder_init(&yielder, &yielding);
    test_until_a_pause(&yielder);
    test_barred(&yielder);
    test_several_programs(&yielder);
    answer_until_yields(&yielder);
    yielder_end(&yielder); /* while it yields */
    yielding_stop(&yielding);
    return 0;
}
