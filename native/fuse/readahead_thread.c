/* Read-aheads are hints: when there are too many, the newest are dropped. */
#include "readahead_thread.h"

#include "platform/thread.h"

void readahead_thread_init(struct readahead_thread *thread)
{
    (void)pthread_mutex_init(&thread->lock, NULL);
    (void)pthread_cond_init(&thread->posted, NULL);
}

void readahead_thread_destroy(struct readahead_thread *thread)
{
    (void)pthread_cond_destroy(&thread->posted);
    (void)pthread_mutex_destroy(&thread->lock);
}

/* Takes the oldest read-ahead, and waits for one. Returns false at the end. */
static bool take(struct readahead_thread *thread, struct readahead_job *job)
{
    (void)pthread_mutex_lock(&thread->lock);
    while (thread->count == 0 && !thread->ending) {
        (void)pthread_cond_wait(&thread->posted, &thread->lock);
    }
    bool taken = !thread->ending;
    if (taken) {
        *job = thread->jobs[thread->first];
        thread->first = (thread->first + 1) % READAHEAD_JOBS_MAX;
        thread->count--;
    }
    (void)pthread_mutex_unlock(&thread->lock);
    return taken;
}

static void *run(void *argument)
{
    struct readahead_thread *thread = argument;
    struct readahead_job job;
    while (take(thread, &job)) {
        thread->read(thread->owner, &job);
    }
    return NULL;
}

int readahead_thread_start(struct readahead_thread *thread,
                           void (*read)(void *owner, const struct readahead_job *job), void *owner)
{
    thread->read = read;
    thread->owner = owner;
    int code = thread_start(&thread->thread, NULL, run, thread);
    thread->running = code == 0;
    return code;
}

void readahead_thread_stop(struct readahead_thread *thread)
{
    if (!thread->running) {
        return;
    }
    (void)pthread_mutex_lock(&thread->lock);
    __atomic_store_n(&thread->ending, true, __ATOMIC_RELAXED);
    (void)pthread_cond_signal(&thread->posted);
    (void)pthread_mutex_unlock(&thread->lock);
    (void)pthread_join(thread->thread, NULL);
    thread->running = false;
}

void readahead_thread_post(struct readahead_thread *thread, const struct readahead_job *job)
{
    (void)pthread_mutex_lock(&thread->lock);
    if (thread->count < READAHEAD_JOBS_MAX) {
        uint32_t last = (thread->first + thread->count) % READAHEAD_JOBS_MAX;
        thread->jobs[last] = *job;
        thread->count++;
        (void)pthread_cond_signal(&thread->posted);
    }
    (void)pthread_mutex_unlock(&thread->lock);
}
