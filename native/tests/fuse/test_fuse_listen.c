/*
 * Who listens to the kernel: one thread as long as one program asks, the next one when that has to
 * sleep, all when several programs ask; and whether staying awake pays.
 */
#include "asleep.h"
#include "listen.h"

#define AWAKE_US 100u
#define REQUESTS 100u

struct other {
    struct listening *listening;
    pthread_t thread;
    _Atomic pid_t id;
    _Atomic bool done;
    bool alone;
};

static void *begin(void *argument)
{
    struct other *other = argument;
    atomic_store(&other->id, gettid());
    other->alone = listen_begin(other->listening);
    listen_leave(other->listening);
    atomic_store(&other->done, true);
    return NULL;
}

/* A thread that rests, for somebody else listens. */
static void other_begin(struct other *other, struct listening *listening)
{
    *other = (struct other){.listening = listening};
    CHECK_EQ(pthread_create(&other->thread, NULL, begin, other), 0);
    while (atomic_load(&other->id) == 0) {
    }
    wait_until_asleep(atomic_load(&other->id));
    CHECK(!atomic_load(&other->done));
}

static void other_end(struct other *other)
{
    CHECK_EQ(pthread_join(other->thread, NULL), 0);
    CHECK(atomic_load(&other->done));
}

static void test_one_at_a_time(void)
{
    struct listening listening;
    struct other other;
    listen_init(&listening, AWAKE_US);
    CHECK(listen_begin(&listening));
    for (uint32_t i = 0; i < REQUESTS; i++) {
        listen_heard(&listening, 7);
    }
    CHECK(listen_begin(&listening) && listen_alone(&listening)); /* it is still its turn */
    other_begin(&other, &listening);
    listen_leave(&listening);
    other_end(&other);
    CHECK(other.alone && !listen_alone(&listening));
    CHECK(listen_begin(&listening));
    listen_leave(&listening);
    listen_leave(&listening);
    listen_destroy(&listening);
}

static void test_all_for_several_programs(void)
{
    struct listening listening;
    struct other other;
    listen_init(&listening, AWAKE_US);
    CHECK(listen_begin(&listening));
    other_begin(&other, &listening);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        listen_heard(&listening, 7 + i % 2);
    }
    other_end(&other);
    CHECK(!other.alone);
    CHECK(!listen_begin(&listening)); /* at once, though not the only one */
    for (uint32_t i = 0; i < REQUESTS; i++) {
        listen_heard(&listening, 7);
    }
    CHECK(listen_begin(&listening));
    listen_heard(&listening, 8); /* somebody looks in */
    listen_heard(&listening, 7);
    CHECK(listen_begin(&listening));
    listen_leave(&listening);
    listen_destroy(&listening);
}

static void test_cancelled_at_rest(void)
{
    struct listening listening;
    struct other other;
    void *result;
    listen_init(&listening, AWAKE_US);
    CHECK(listen_begin(&listening));
    other_begin(&other, &listening);
    CHECK_EQ(pthread_cancel(other.thread), 0);
    CHECK_EQ(pthread_join(other.thread, &result), 0);
    CHECK(result == PTHREAD_CANCELED);
    listen_leave(&listening); /* nothing is locked */
    listen_destroy(&listening);
}

static void test_never_awake(void)
{
    struct listening listening;
    listen_init(&listening, 0);
    CHECK(!listen_begin(&listening));
    for (uint32_t i = 0; i < REQUESTS; i++) {
        listen_heard(&listening, 7);
    }
    CHECK(!listen_begin(&listening) && !listen_alone(&listening));
    listen_destroy(&listening);
}

static void test_wakefulness(void)
{
    struct listening listening;
    struct wakefulness *device = &listening.device;
    uint32_t tried = 0;
    listen_init(&listening, AWAKE_US);
    for (uint32_t i = 0; i < 1000; i++) { /* one in ten is late: it pays */
        CHECK(wakefulness_pays(device));
        wakefulness_tried(device, i % 10 != 0);
    }
    for (uint32_t i = 0; i < 1000; i++) { /* all are late: seldom tried */
        if (!wakefulness_pays(device)) {
            continue;
        }
        wakefulness_tried(device, false);
        tried++;
    }
    CHECK(tried > 1 && tried < 100);
    while (!wakefulness_pays(device)) {
    }
    wakefulness_tried(device, true);
    CHECK(wakefulness_pays(device)); /* and again, once it does */
    listen_destroy(&listening);
}

int main(void)
{
    test_one_at_a_time();
    test_all_for_several_programs();
    test_cancelled_at_rest();
    test_never_awake();
    test_wakefulness();
    return 0;
}
