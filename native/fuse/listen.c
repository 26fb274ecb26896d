/*
 * That a thread is the one that listens is noted in `taken` and in a variable of its own. It stays
 * so while it answers: between requests nobody is woken and nothing is locked.
 *
 * How many programs ask is guessed from the threads that requests came from: each change counts for
 * as much as several requests from the same one, between bounds.
 */
#include "listen.h"

#define CHANGE 8
#define CHANGES_CROWD 32
#define CHANGES_MAX 64
#define CREDIT_MAX 32
#define CREDIT_MIN (-64) /* skipped as often before it is tried again */
#define CREDIT_LOST 4

static _Thread_local const struct listening *mine;

void listen_init(struct listening *listening, uint32_t awake_us)
{
    (void)pthread_mutex_init(&listening->lock, NULL);
    (void)pthread_cond_init(&listening->left, NULL);
    listening->taken = false;
    listening->awake_us = awake_us;
    atomic_init(&listening->crowd, awake_us == 0);
    atomic_init(&listening->asker, 0);
    atomic_init(&listening->changes, 0);
    atomic_init(&listening->device.credit, CREDIT_MAX);
    atomic_init(&listening->kernel.credit, CREDIT_MAX);
}

void listen_destroy(struct listening *listening)
{
    (void)pthread_cond_destroy(&listening->left);
    (void)pthread_mutex_destroy(&listening->lock);
}

static bool is_crowd(const struct listening *listening)
{
    return atomic_load_explicit(&listening->crowd, memory_order_relaxed);
}

bool listen_alone(const struct listening *listening)
{
    return mine == listening && !is_crowd(listening);
}

static void unlock(void *lock)
{
    (void)pthread_mutex_unlock(lock);
}

bool listen_begin(struct listening *listening)
{
    if (mine == listening || is_crowd(listening)) {
        return listen_alone(listening);
    }
    (void)pthread_mutex_lock(&listening->lock);
    pthread_cleanup_push(unlock, &listening->lock);
    while (listening->taken && !is_crowd(listening)) {
        (void)pthread_cond_wait(&listening->left, &listening->lock);
    }
    if (!is_crowd(listening)) {
        listening->taken = true;
        mine = listening;
    }
    pthread_cleanup_pop(1);
    return listen_alone(listening);
}

void listen_leave(struct listening *listening)
{
    if (mine != listening) {
        return;
    }
    (void)pthread_mutex_lock(&listening->lock);
    mine = NULL;
    listening->taken = false;
    (void)pthread_cond_signal(&listening->left);
    (void)pthread_mutex_unlock(&listening->lock);
}

static void become(struct listening *listening, bool crowd)
{
    (void)pthread_mutex_lock(&listening->lock);
    atomic_store_explicit(&listening->crowd, crowd, memory_order_relaxed);
    (void)pthread_cond_broadcast(&listening->left);
    (void)pthread_mutex_unlock(&listening->lock);
}

/* Lost updates of threads at the same time do not matter. */
void listen_heard(struct listening *listening, uint32_t asker)
{
    uint32_t last = atomic_load_explicit(&listening->asker, memory_order_relaxed);
    int32_t before = atomic_load_explicit(&listening->changes, memory_order_relaxed);
    if (listening->awake_us == 0 || (asker == last && before == 0)) {
        return;
    }
    int32_t changes = asker == last ? before - 1 : before + CHANGE;
    changes = changes > CHANGES_MAX ? CHANGES_MAX : changes;
    atomic_store_explicit(&listening->asker, asker, memory_order_relaxed);
    atomic_store_explicit(&listening->changes, changes, memory_order_relaxed);
    if (changes >= CHANGES_CROWD && !is_crowd(listening)) {
        become(listening, true);
        listen_leave(listening);
    } else if (changes <= 0 && is_crowd(listening)) {
        become(listening, false);
    }
}

bool wakefulness_pays(struct wakefulness *wakefulness)
{
    int32_t credit = atomic_load_explicit(&wakefulness->credit, memory_order_relaxed);
    if (credit <= 0) {
        atomic_store_explicit(&wakefulness->credit, credit + 1, memory_order_relaxed);
    }
    return credit > 0;
}

void wakefulness_tried(struct wakefulness *wakefulness, bool well)
{
    int32_t credit = atomic_load_explicit(&wakefulness->credit, memory_order_relaxed);
    credit += well ? 1 : -CREDIT_LOST;
    credit = credit > CREDIT_MAX ? CREDIT_MAX : credit;
    credit = credit <= 0 ? CREDIT_MIN : credit;
    atomic_store_explicit(&wakefulness->credit, credit, memory_order_relaxed);
}
