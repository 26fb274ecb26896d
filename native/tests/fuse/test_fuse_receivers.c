/*
 * Tests which threads receive requests: one thread for one program, another one when that blocks,
 * all threads for several programs. Also tests when busy polling pays.
 */
#include "asleep.h"
#include "threads/receivers.h"

#define BUSY_POLL_US 100u
#define REQUESTS 100u

struct other {
    struct receivers *receivers;
    pthread_t thread;
    _Atomic pid_t id;
    _Atomic bool done;
    bool sole;
};

static void *begin(void *argument)
{
    struct other *other = argument;
    atomic_store(&other->id, gettid());
    other->sole = receivers_wait(other->receivers);
    receivers_release(other->receivers);
    atomic_store(&other->done, true);
    return NULL;
}

/* Starts a thread and waits until it blocks, since another thread is the sole receiver. */
static void other_begin(struct other *other, struct receivers *receivers)
{
    *other = (struct other){.receivers = receivers};
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
    struct receivers receivers;
    struct other other;
    receivers_init(&receivers, BUSY_POLL_US);
    CHECK(receivers_wait(&receivers));
    for (uint32_t i = 0; i < REQUESTS; i++) {
        receivers_note_request(&receivers, 7);
    }
    CHECK(receivers_wait(&receivers) &&
          receivers_is_sole(&receivers)); /* it still is the receiver */
    other_begin(&other, &receivers);
    receivers_release(&receivers);
    other_end(&other);
    CHECK(other.sole && !receivers_is_sole(&receivers));
    CHECK(receivers_wait(&receivers));
    receivers_release(&receivers);
    receivers_release(&receivers);
    receivers_destroy(&receivers);
}

static void test_all_for_several_programs(void)
{
    struct receivers receivers;
    struct other other;
    receivers_init(&receivers, BUSY_POLL_US);
    CHECK(receivers_wait(&receivers));
    other_begin(&other, &receivers);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        receivers_note_request(&receivers, 7 + i % 2);
    }
    other_end(&other);
    CHECK(!other.sole);
    CHECK(!receivers_wait(&receivers)); /* at once, but not as the sole receiver */
    for (uint32_t i = 0; i < REQUESTS; i++) {
        receivers_note_request(&receivers, 7);
    }
    CHECK(receivers_wait(&receivers));
    receivers_note_request(&receivers, 8); /* a single request of another program */
    receivers_note_request(&receivers, 7);
    CHECK(receivers_wait(&receivers));
    receivers_release(&receivers);
    receivers_destroy(&receivers);
}

static void test_the_end_while_it_waits(void)
{
    struct receivers receivers;
    struct other other;
    receivers_init(&receivers, BUSY_POLL_US);
    CHECK(receivers_wait(&receivers));
    other_begin(&other, &receivers);
    receivers_end(&receivers);
    CHECK_EQ(pthread_join(other.thread, NULL), 0);
    CHECK(!receivers_wait(&receivers));
    receivers_release(&receivers);
    receivers_destroy(&receivers);
}

static void test_without_busy_polling(void)
{
    struct receivers receivers;
    receivers_init(&receivers, 0);
    CHECK(!receivers_wait(&receivers));
    for (uint32_t i = 0; i < REQUESTS; i++) {
        receivers_note_request(&receivers, 7);
    }
    CHECK(!receivers_wait(&receivers) && !receivers_is_sole(&receivers));
    receivers_destroy(&receivers);
}

static void test_busy_polling(void)
{
    struct receivers receivers;
    struct busy_poll *device = &receivers.device;
    uint32_t tried = 0;
    receivers_init(&receivers, BUSY_POLL_US);
    for (uint32_t i = 0; i < 1000; i++) { /* one event in ten is late: polling pays */
        CHECK(busy_poll_pays(device));
        busy_poll_note(device, i % 10 != 0);
    }
    for (uint32_t i = 0; i < 1000; i++) { /* all events are late: polling is seldom tried */
        if (!busy_poll_pays(device)) {
            continue;
        }
        busy_poll_note(device, false);
        tried++;
    }
    CHECK(tried > 1 && tried < 100);
    while (!busy_poll_pays(device)) {
    }
    busy_poll_note(device, true);
    CHECK(busy_poll_pays(device)); /* an event in time restores the credit */
    receivers_destroy(&receivers);
}

int main(void)
{
    test_one_at_a_time();
    test_all_for_several_programs();
    test_the_end_while_it_waits();
    test_without_busy_polling();
    test_busy_polling();
    return 0;
}
