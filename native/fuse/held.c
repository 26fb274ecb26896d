/*
 * The table of held samples: buckets by key, one list by time of use, one lock.
 *
 * What is being read counts with its whole size from the beginning, so the budget holds at every
 * moment. Samples under way and those in use are passed over when memory is wanted.
 */
#include "held.h"
#include "platform/clock.h"

#include <errno.h>
#include <stdlib.h>

int held_create(uint64_t budget_bytes, struct held **out)
{
    struct held *held = calloc(1, sizeof *held);
    if (held == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_init(&held->lock, NULL);
    (void)pthread_cond_init(&held->room, NULL);
    held->budget_bytes = budget_bytes;
    *out = held;
    return 0;
}

/* ---- the list and the buckets; the lock is held ---------------------------------------------- */

static struct held_sample **bucket_of(struct held *held, uint64_t key)
{
    uint64_t mixed = key * UINT64_C(0x9E3779B97F4A7C15);
    return &held->buckets[(mixed >> 32) % HELD_BUCKETS];
}

static struct held_sample *look(struct held *held, uint64_t key)
{
    struct held_sample *sample = *bucket_of(held, key);
    while (sample != NULL && sample->key != key) {
        sample = sample->chain;
    }
    return sample;
}

static void unlink_sample(struct held *held, struct held_sample *sample)
{
    *(sample->newer != NULL ? &sample->newer->older : &held->newest) = sample->older;
    *(sample->older != NULL ? &sample->older->newer : &held->oldest) = sample->newer;
}

static void link_newest(struct held *held, struct held_sample *sample)
{
    sample->newer = NULL;
    sample->older = held->newest;
    *(held->newest != NULL ? &held->newest->newer : &held->oldest) = sample;
    held->newest = sample;
    sample->used_ns = monotonic_coarse_ns();
}

static void drop(struct held *held, struct held_sample *sample)
{
    struct held_sample **at = bucket_of(held, sample->key);
    while (*at != sample) {
        at = &(*at)->chain;
    }
    *at = sample->chain;
    unlink_sample(held, sample);
    held->bytes -= sample->bytes;
    dlfs_batch_release(sample->batch);
    free(sample->own);
    free(sample);
    (void)pthread_cond_broadcast(&held->room);
}

static bool is_idle(const struct held_sample *sample)
{
    return sample->state == HELD_READY && sample->users == 0;
}

/* Makes room as far as that can be; whether a sample of this size may come now. */
static bool make_room(struct held *held, uint64_t bytes)
{
    struct held_sample *sample = held->oldest;
    while (sample != NULL && held->bytes + bytes > held->budget_bytes) {
        struct held_sample *next = sample->newer;
        if (is_idle(sample)) {
            drop(held, sample);
        }
        sample = next;
    }
    return held->bytes + bytes <= held->budget_bytes || held->bytes == 0;
}

/*
 * Waits for room for a sample, behind those who came before, until it is there by somebody else;
 * -EAGAIN instead of waiting for one that is ahead of its time.
 */
static int wait_for_room(struct held *held, uint64_t key, uint64_t bytes, bool ahead)
{
    if (held->turns == NULL && make_room(held, bytes)) {
        return 0;
    }
    if (ahead) {
        return -EAGAIN;
    }
    struct turn mine = {NULL};
    struct turn **at = &held->turns;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = &mine;
    while (look(held, key) == NULL && !(held->turns == &mine && make_room(held, bytes))) {
        (void)pthread_cond_wait(&held->room, &held->lock);
    }
    for (at = &held->turns; *at != &mine;) {
        at = &(*at)->next;
    }
    *at = mine.next;
    (void)pthread_cond_broadcast(&held->room);
    return 0;
}

/* ---- the whole ------------------------------------------------------------------------------- */

void held_destroy(struct held *held)
{
    if (held == NULL) {
        return;
    }
    while (held->newest != NULL) {
        drop(held, held->newest);
    }
    (void)pthread_cond_destroy(&held->room);
    (void)pthread_mutex_destroy(&held->lock);
    free(held);
}

static enum held_found park(struct held_sample *sample, const struct waiter *waiter)
{
    struct waiter *copy = malloc(sizeof *copy);
    if (copy == NULL) {
        return HELD_NO_MEMORY;
    }
    *copy = *waiter;
    copy->next = sample->waiters;
    sample->waiters = copy;
    return HELD_PARKED;
}

enum held_found held_find(struct held *held, uint64_t key, const struct waiter *waiter,
                          bool *was_ahead, struct held_sample **out)
{
    enum held_found found = HELD_NONE;
    (void)pthread_mutex_lock(&held->lock);
    struct held_sample *sample = look(held, key);
    *was_ahead = sample != NULL && sample->ahead;
    if (sample != NULL && sample->state == HELD_READY) {
        unlink_sample(held, sample);
        link_newest(held, sample);
        sample->users++;
        *out = sample;
        found = HELD_DATA;
    } else if (sample != NULL) {
        found = park(sample, waiter);
    }
    if (sample != NULL) {
        sample->ahead = false;
    }
    (void)pthread_mutex_unlock(&held->lock);
    return found;
}

static int begin(struct held *held, uint64_t key, uint64_t bytes, bool ahead,
                 struct held_sample **out)
{
    int code = look(held, key) == NULL ? wait_for_room(held, key, bytes, ahead) : -EEXIST;
    if (code == 0 && look(held, key) != NULL) {
        code = -EEXIST;
    }
    if (code < 0) {
        return code;
    }
    struct held_sample *sample = calloc(1, sizeof *sample);
    bool copied = bytes <= HELD_OWN_BYTES_MAX;
    uint8_t *own = copied ? malloc(bytes + 1) : NULL;
    if (sample == NULL || (copied && own == NULL)) {
        free(sample);
        free(own);
        return -ENOMEM;
    }
    sample->key = key;
    sample->bytes = bytes;
    sample->data = sample->own = own;
    sample->ahead = ahead;
    struct held_sample **bucket = bucket_of(held, key);
    sample->chain = *bucket;
    *bucket = sample;
    link_newest(held, sample);
    held->bytes += bytes;
    *out = sample;
    return 0;
}

int held_begin(struct held *held, uint64_t key, uint64_t bytes, bool ahead,
               struct held_sample **out)
{
    (void)pthread_mutex_lock(&held->lock);
    int code = begin(held, key, bytes, ahead, out);
    (void)pthread_mutex_unlock(&held->lock);
    return code;
}

struct waiter *held_end(struct held *held, struct held_sample *sample, bool well)
{
    (void)pthread_mutex_lock(&held->lock);
    struct waiter *waiters = sample->waiters;
    sample->waiters = NULL;
    if (well) {
        sample->state = HELD_READY;
        sample->users = 1;
    } else {
        drop(held, sample);
    }
    (void)pthread_mutex_unlock(&held->lock);
    return waiters;
}

void held_release(struct held *held, struct held_sample *sample, uint64_t given_bytes)
{
    (void)pthread_mutex_lock(&held->lock);
    sample->given_bytes += given_bytes;
    if (--sample->users == 0) {
        if (sample->given_bytes >= sample->bytes) {
            drop(held, sample);
        } else {
            (void)pthread_cond_broadcast(&held->room);
        }
    }
    (void)pthread_mutex_unlock(&held->lock);
}

void held_expire(struct held *held, uint64_t age_ns)
{
    uint64_t now = monotonic_coarse_ns();
    (void)pthread_mutex_lock(&held->lock);
    struct held_sample *sample = held->oldest;
    while (sample != NULL && now - sample->used_ns >= age_ns) {
        struct held_sample *next = sample->newer;
        if (is_idle(sample)) {
            drop(held, sample);
        }
        sample = next;
    }
    (void)pthread_mutex_unlock(&held->lock);
}

uint64_t held_bytes(struct held *held)
{
    (void)pthread_mutex_lock(&held->lock);
    uint64_t bytes = held->bytes;
    (void)pthread_mutex_unlock(&held->lock);
    return bytes;
}
