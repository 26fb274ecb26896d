/*
 * Asks hung members whether they answer again, so that no read waits to find out.
 *
 * A member is hung when it left a read unanswered for as long as a read may take (members.c). Then
 * one thread of the reader sends it a read of one block, again and again after it failed. The
 * thread ends when no member is hung any more. An answer, also an error of the device, makes reads
 * ask the member again.
 *
 * The thread has a fetch of its own, which is no read under way: the reader can be destroyed.
 */
#include "reader/prober.h"

#include "platform/thread.h"
#include "reader/fetch.h"
#include "reader/members.h"
#include "reader/requests.h"

#define PAUSE_NS UINT64_C(1000000000) /* between two requests to a hung member */
#define POLL_MS 100                   /* longest wait for an answer before the thread may end */

static bool any_hung(const dlfs_reader *reader)
{
    bool any = false;
    for (uint32_t member = 0; member < reader->config.member_count; member++) {
        any |= member_is_hung(reader, member);
    }
    return any;
}

/* Sends a request to each hung member that has none. */
static void ask_hung(struct fetch *fetch)
{
    const dlfs_reader *reader = fetch->reader;
    fetch->now_ns = monotonic_ns();
    for (uint32_t member = 0; member < reader->config.member_count; member++) {
        if (member_is_hung(reader, member)) {
            member_probe(fetch, member, reader->config.data_offset_bytes);
        }
    }
}

/* Waits for an answer, or for a pause if no request is under way. The lock is held, and released
 * meanwhile. */
static void wait_for_answers(dlfs_reader *reader, struct fetch *fetch, uint64_t until_ns)
{
    if (fetch->requests_in_flight == 0) {
        condition_wait_until(&reader->prober.wake, &reader->arena->lock, until_ns);
        return;
    }
    pthread_mutex_unlock(&reader->arena->lock);
    fetch_step(fetch, POLL_MS);
    fetch_release_queues(fetch);
    pthread_mutex_lock(&reader->arena->lock);
}

/* Asks until no member is hung. The lock is held, and released meanwhile. */
static void ask_until_none(dlfs_reader *reader, struct fetch *fetch)
{
    uint64_t next_ns = 0;
    while (!reader->prober.stop && any_hung(reader)) {
        if (monotonic_ns() >= next_ns) {
            pthread_mutex_unlock(&reader->arena->lock);
            ask_hung(fetch);
            pthread_mutex_lock(&reader->arena->lock);
            next_ns = monotonic_ns() + PAUSE_NS;
        }
        if (!reader->prober.stop) {
            wait_for_answers(reader, fetch, next_ns);
        }
    }
}

/* Destroys a fetch, or leaves it to those that drain fetches if a member has not answered. */
static void end_fetch(dlfs_reader *reader, struct fetch *fetch)
{
    if (fetch->requests_in_flight == 0) {
        fetch_destroy(fetch);
        return;
    }
    fetch->closing = NULL;
    pthread_mutex_lock(&reader->arena->lock);
    fetch->next = reader->draining_fetches;
    reader->draining_fetches = fetch;
    pthread_mutex_unlock(&reader->arena->lock);
}

static void *prober_thread(void *argument)
{
    dlfs_reader *reader = argument;
    int code = 0;
    pthread_mutex_lock(&reader->arena->lock);
    while (code == 0 && !reader->prober.stop && any_hung(reader)) {
        struct fetch *fetch = NULL;
        pthread_mutex_unlock(&reader->arena->lock);
        code = fetch_create(reader, &fetch);
        pthread_mutex_lock(&reader->arena->lock);
        if (code < 0) {
            break;
        }
        fetch->closing = &reader->prober.stop;
        ask_until_none(reader, fetch);
        pthread_mutex_unlock(&reader->arena->lock);
        fetch_release_queues(fetch);
        end_fetch(reader, fetch);
        pthread_mutex_lock(&reader->arena->lock);
    }
    if (code < 0) {
        atomic_store(&reader->prober.wanted, true); /* the next read begins another thread */
    }
    reader->prober.ended = true;
    pthread_mutex_unlock(&reader->arena->lock);
    return NULL;
}

void prober_begin(dlfs_reader *reader)
{
    struct prober *prober = &reader->prober;
    if (!atomic_load_explicit(&prober->wanted, memory_order_relaxed)) {
        return;
    }
    pthread_mutex_lock(&reader->arena->lock);
    atomic_store(&prober->wanted, false);
    if (prober->made && prober->ended) {
        (void)pthread_join(prober->thread, NULL);
        prober->made = false;
    }
    if (!prober->made && !prober->stop) {
        prober->ended = false;
        prober->made = thread_start(&prober->thread, NULL, prober_thread, reader) == 0;
        if (!prober->made) {
            atomic_store(&prober->wanted, true);
        }
    }
    pthread_mutex_unlock(&reader->arena->lock);
}

void prober_end(dlfs_reader *reader)
{
    struct prober *prober = &reader->prober;
    pthread_mutex_lock(&reader->arena->lock);
    bool made = prober->made;
    prober->stop = true;
    prober->made = false;
    pthread_cond_signal(&prober->wake);
    pthread_mutex_unlock(&reader->arena->lock);
    if (made) {
        (void)pthread_join(prober->thread, NULL);
    }
}
