/*
 * Samples that a native mount holds: found, waited for, given up for others, failed, and shared by
 * threads that want more than there is room for.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "held.h"

#define BUDGET 1000u

static struct held_sample *begin(struct held *held, uint64_t key, uint64_t bytes)
{
    struct held_sample *sample = NULL;
    CHECK_EQ(held_begin(held, key, bytes, false, &sample), 0);
    memset(sample->own, (int)key, bytes);
    return sample;
}

static void load(struct held *held, uint64_t key, uint64_t bytes)
{
    struct held_sample *sample = begin(held, key, bytes);
    CHECK(held_end(held, sample, true) == NULL);
    held_release(held, sample, 0);
}

static enum held_found find(struct held *held, uint64_t key, struct held_sample **sample)
{
    const struct waiter waiter = {.offset = key, .bytes = 10};
    bool ahead;
    return held_find(held, key, &waiter, &ahead, sample);
}

static void test_found_until_others_need_the_room(struct held *held)
{
    struct held_sample *sample;
    CHECK_EQ(find(held, 1, &sample), HELD_NONE);
    load(held, 1, 400);
    load(held, 2, 400);
    CHECK_EQ(find(held, 1, &sample), HELD_DATA); /* so 2 was used longest ago */
    CHECK(sample->data[399] == 1);
    held_release(held, sample, 0);
    load(held, 3, 400);
    CHECK_EQ(find(held, 2, &sample), HELD_NONE);
    CHECK_EQ(find(held, 1, &sample), HELD_DATA);
    CHECK_EQ(held_bytes(held), 800);
    held_release(held, sample, 399);
    CHECK_EQ(find(held, 1, &sample), HELD_DATA);
    held_release(held, sample, 1); /* all of it was given out: gone at once */
    CHECK_EQ(find(held, 1, &sample), HELD_NONE);
    CHECK_EQ(held_bytes(held), 400);
    held_expire(held, 0);
    CHECK_EQ(held_bytes(held), 0);
}

static void test_waiters_are_handed_over(struct held *held)
{
    struct held_sample *other;
    struct held_sample *sample = begin(held, 5, 10);
    CHECK_EQ(find(held, 5, &other), HELD_PARKED);
    CHECK_EQ(find(held, 5, &other), HELD_PARKED);
    CHECK_EQ(held_begin(held, 5, 10, false, &other), -EEXIST);
    struct waiter *waiters = held_end(held, sample, true);
    CHECK(waiters != NULL && waiters->next != NULL && waiters->next->next == NULL);
    CHECK_EQ(waiters->offset, 5);
    free(waiters->next);
    free(waiters);
    held_release(held, sample, 20);
    CHECK_EQ(held_bytes(held), 0);
}

static void test_failures_are_forgotten(struct held *held)
{
    struct held_sample *other;
    struct held_sample *sample = begin(held, 6, 10);
    CHECK_EQ(find(held, 6, &other), HELD_PARKED);
    struct waiter *waiter = held_end(held, sample, false);
    CHECK(waiter != NULL);
    free(waiter);
    CHECK_EQ(find(held, 6, &other), HELD_NONE);
    CHECK_EQ(held_bytes(held), 0);
}

static void test_room(struct held *held)
{
    struct held_sample *large = begin(held, 7, 2 * BUDGET); /* alone */
    struct held_sample *sample;
    CHECK_EQ(held_begin(held, 8, 1, true, &sample), -EAGAIN);
    CHECK(held_end(held, large, true) == NULL);
    CHECK_EQ(held_begin(held, 8, 1, true, &sample), -EAGAIN); /* it is in use */
    held_release(held, large, 0);
    load(held, 8, 1);
    CHECK_EQ(held_bytes(held), 1);
    bool ahead;
    CHECK_EQ(held_begin(held, 9, 1, true, &sample), 0);
    CHECK(held_end(held, sample, true) == NULL);
    held_release(held, sample, 0);
    for (int turn = 1; turn >= 0; turn--) { /* the first to ask finds that it was ahead */
        CHECK_EQ(held_find(held, 9, &(struct waiter){0}, &ahead, &sample), HELD_DATA);
        CHECK_EQ(ahead, turn);
        held_release(held, sample, 0);
    }
    held_expire(held, 0);
}

/* Large ones have no memory of their own: they stay in the batch that they come in. */
static void test_large(struct held *held)
{
    struct held_sample *sample;
    CHECK_EQ(held_begin(held, 20, HELD_OWN_BYTES_MAX, false, &sample), 0);
    CHECK(sample->own != NULL);
    CHECK(held_end(held, sample, false) == NULL);
    CHECK_EQ(held_begin(held, 20, HELD_OWN_BYTES_MAX + 1, false, &sample), 0);
    CHECK(sample->own == NULL && sample->data == NULL);
    CHECK(held_end(held, sample, false) == NULL);
    CHECK_EQ(held_bytes(held), 0);
}

static void *wait_for_much(void *argument)
{
    load(argument, 11, 2 * BUDGET);
    return NULL;
}

/* Who waits for much room is not overtaken by others who need less, again and again. */
static void test_turns(struct held *held)
{
    pthread_t thread;
    struct held_sample *other;
    struct held_sample *sample = begin(held, 10, 10);
    CHECK_EQ(pthread_create(&thread, NULL, wait_for_much, held), 0);
    for (bool waits = false; !waits;) {
        (void)pthread_mutex_lock(&held->lock);
        waits = held->turns != NULL;
        (void)pthread_mutex_unlock(&held->lock);
    }
    CHECK_EQ(held_begin(held, 12, 10, true, &other), -EAGAIN);
    CHECK(held_end(held, sample, true) == NULL);
    held_release(held, sample, sample->bytes);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(held->turns == NULL);
    load(held, 12, 10);
    held_expire(held, 0);
    CHECK_EQ(held_bytes(held), 0);
}

/* ---- threads --------------------------------------------------------------------------------- */

#define THREADS 4u
#define TURNS 3000u
#define KEYS 24u

static uint64_t bytes_of(uint64_t key)
{
    return 100 + key * 50; /* up to more than the budget */
}

static void use(struct held *held, uint64_t key)
{
    struct held_sample *sample;
    enum held_found found = find(held, key, &sample);
    if (found == HELD_NONE) {
        int code = held_begin(held, key, bytes_of(key), key % 3 == 0, &sample);
        if (code < 0) {
            CHECK(code == -EEXIST || code == -EAGAIN);
            return;
        }
        memset(sample->own, (int)key, sample->bytes);
        struct waiter *waiter = held_end(held, sample, key % 7 != 0);
        while (waiter != NULL) {
            struct waiter *next = waiter->next;
            CHECK_EQ(waiter->offset, key);
            free(waiter);
            waiter = next;
        }
        if (key % 7 == 0) {
            return;
        }
    } else if (found == HELD_PARKED) {
        return;
    }
    for (uint64_t at = 0; at < sample->bytes; at++) {
        CHECK(sample->data[at] == (uint8_t)key);
    }
    held_release(held, sample, key % 5 == 0 ? sample->bytes : 0);
}

static void *work(void *argument)
{
    struct held *held = argument;
    uint64_t random = (uint64_t)(uintptr_t)&random >> 4;
    for (uint32_t turn = 0; turn < TURNS; turn++) {
        random = random * UINT64_C(6364136223846793005) + 1442695040888963407u;
        use(held, (random >> 33) % KEYS);
    }
    return NULL;
}

static void test_threads_share(struct held *held)
{
    pthread_t threads[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, work, held), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    held_expire(held, 0);
    CHECK_EQ(held_bytes(held), 0);
}

int main(void)
{
    struct held *held;
    CHECK_EQ(held_create(BUDGET, &held), 0);
    test_found_until_others_need_the_room(held);
    test_waiters_are_handed_over(held);
    test_failures_are_forgotten(held);
    test_room(held);
    test_large(held);
    test_turns(held);
    test_threads_share(held);
    load(held, 1, 10); /* left for the end */
    held_destroy(held);
    held_destroy(NULL);
    return 0;
}
