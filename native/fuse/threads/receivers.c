/*
 * The sole receiver is marked by `taken` and by a variable of that thread. It stays the receiver
 * while it answers, so that no thread is woken and no lock is taken between two requests.
 *
 * Whether several programs use the mount is estimated from the client threads of the requests: each
 * change of client counts as much as several requests from the same one, between bounds.
 */
#include "threads/receivers.h"

#define SCORE_OF_CHANGE 8
#define SCORE_ALL_RECEIVE 32
#define SCORE_MAX 64
#define CREDIT_MAX 32
#define CREDIT_MIN (-64) /* as many events pass before busy polling is tried again */
#define CREDIT_LOST 4    /* for an event that did not come */

static _Thread_local const struct receivers *mine;
static _Thread_local const struct receivers *over_ring;

void receivers_init(struct receivers *receivers, uint32_t busy_poll_us)
{
    (void)pthread_mutex_init(&receivers->lock, NULL);
    (void)pthread_cond_init(&receivers->vacant, NULL);
    receivers->taken = false;
    receivers->busy_poll_us = busy_poll_us;
    atomic_init(&receivers->all_receive, busy_poll_us == 0);
    atomic_init(&receivers->ending, false);
    atomic_init(&receivers->last_client, 0);
    atomic_init(&receivers->change_score, 0);
    atomic_init(&receivers->device.credit, CREDIT_MAX);
    atomic_init(&receivers->kernel.credit, CREDIT_MAX);
}

void receivers_destroy(struct receivers *receivers)
{
    (void)pthread_cond_destroy(&receivers->vacant);
    (void)pthread_mutex_destroy(&receivers->lock);
}

static bool all_receive(const struct receivers *receivers)
{
    return atomic_load_explicit(&receivers->all_receive, memory_order_relaxed) ||
           atomic_load_explicit(&receivers->ending, memory_order_relaxed);
}

bool receivers_is_sole(const struct receivers *receivers)
{
    return (mine == receivers || over_ring == receivers) && !all_receive(receivers);
}

void receivers_enter_ring(struct receivers *receivers)
{
    over_ring = receivers;
}

bool receivers_wait(struct receivers *receivers)
{
    if (mine == receivers || all_receive(receivers)) {
        return receivers_is_sole(receivers);
    }
    (void)pthread_mutex_lock(&receivers->lock);
    while (receivers->taken && !all_receive(receivers)) {
        (void)pthread_cond_wait(&receivers->vacant, &receivers->lock);
    }
    if (!all_receive(receivers)) {
        receivers->taken = true;
        mine = receivers;
    }
    (void)pthread_mutex_unlock(&receivers->lock);
    return receivers_is_sole(receivers);
}

void receivers_release(struct receivers *receivers)
{
    if (mine != receivers) {
        return;
    }
    (void)pthread_mutex_lock(&receivers->lock);
    mine = NULL;
    receivers->taken = false;
    (void)pthread_cond_signal(&receivers->vacant);
    (void)pthread_mutex_unlock(&receivers->lock);
}

void receivers_end(struct receivers *receivers)
{
    (void)pthread_mutex_lock(&receivers->lock);
    atomic_store_explicit(&receivers->ending, true, memory_order_relaxed);
    (void)pthread_cond_broadcast(&receivers->vacant);
    (void)pthread_mutex_unlock(&receivers->lock);
}

static void set_all_receive(struct receivers *receivers, bool all)
{
    (void)pthread_mutex_lock(&receivers->lock);
    atomic_store_explicit(&receivers->all_receive, all, memory_order_relaxed);
    (void)pthread_cond_broadcast(&receivers->vacant);
    (void)pthread_mutex_unlock(&receivers->lock);
}

/* An update lost between two threads does no harm: the score is an estimate. */
void receivers_note_request(struct receivers *receivers, uint32_t client)
{
    uint32_t last = atomic_load_explicit(&receivers->last_client, memory_order_relaxed);
    int32_t before = atomic_load_explicit(&receivers->change_score, memory_order_relaxed);
    if (receivers->busy_poll_us == 0 || (client == last && before == 0)) {
        return;
    }
    int32_t score = client == last ? before - 1 : before + SCORE_OF_CHANGE;
    score = score > SCORE_MAX ? SCORE_MAX : score;
    atomic_store_explicit(&receivers->last_client, client, memory_order_relaxed);
    atomic_store_explicit(&receivers->change_score, score, memory_order_relaxed);
    if (score >= SCORE_ALL_RECEIVE && !all_receive(receivers)) {
        set_all_receive(receivers, true);
        receivers_release(receivers);
    } else if (score <= 0 && all_receive(receivers)) {
        set_all_receive(receivers, false);
    }
}

bool busy_poll_pays(struct busy_poll *poll)
{
    int32_t credit = atomic_load_explicit(&poll->credit, memory_order_relaxed);
    if (credit <= 0) {
        atomic_store_explicit(&poll->credit, credit + 1, memory_order_relaxed);
    }
    return credit > 0;
}

void busy_poll_note(struct busy_poll *poll, bool came)
{
    int32_t credit = atomic_load_explicit(&poll->credit, memory_order_relaxed);
    credit += came ? 1 : -CREDIT_LOST;
    credit = credit > CREDIT_MAX ? CREDIT_MAX : credit;
    credit = credit <= 0 ? CREDIT_MIN : credit;
    atomic_store_explicit(&poll->credit, credit, memory_order_relaxed);
}
