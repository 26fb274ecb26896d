/*
 * Questions: a handler's thread puts one in line and waits; the owner fetches it, and answers.
 *
 * There are never more than there are threads, so a list will do. When the mount ends, all are
 * answered with ENOTCONN, so that no thread waits for an owner who is gone.
 */
#include "platform/clock.h"
#include "service.h"

#include <errno.h>
#include <string.h>
#include <time.h>

int ask(struct dlfs_fuse *fuse, struct question *question)
{
    count(&fuse->counters.questions, 1);
    listen_leave(&fuse->listening);
    question->fetched = question->answered = false;
    question->next = NULL;
    (void)pthread_mutex_lock(&fuse->lock);
    question->asked.ticket = ++fuse->ticket;
    struct question **last = &fuse->questions;
    while (*last != NULL) {
        last = &(*last)->next;
    }
    *last = question;
    (void)pthread_cond_signal(&fuse->asked);
    while (!question->answered && !fuse->stopping) {
        (void)pthread_cond_wait(&fuse->answered, &fuse->lock);
    }
    struct question **at = &fuse->questions;
    while (*at != question) {
        at = &(*at)->next;
    }
    *at = question->next;
    bool answered = question->answered;
    (void)pthread_mutex_unlock(&fuse->lock);
    return answered ? question->answer.error : ENOTCONN;
}

int ask_error(struct dlfs_fuse *fuse, uint32_t slot, const dlfs_failure *failure)
{
    struct question question = {.asked = {.kind = DLFS_FUSE_ASK_ERROR, .slot = slot}};
    question.asked.failure = *failure;
    int error = ask(fuse, &question);
    return error > 0 ? error : EIO;
}

int errno_for(struct dlfs_fuse *fuse, uint32_t slot, int code)
{
    switch (code) {
    case -ENOENT:
    case -ENOTDIR:
    case -ENOMEM:
    case -ESTALE:
        return -code;
    default:
        return ask_error(fuse, slot, &(dlfs_failure){.code = code, .member = UINT32_MAX});
    }
}

/* ---- the owner's side ------------------------------------------------------------------------ */

static struct question *first_unfetched(struct dlfs_fuse *fuse)
{
    struct question *question = fuse->questions;
    while (question != NULL && question->fetched) {
        question = question->next;
    }
    return question;
}

/* Waits for a question, or the end; false when the time has passed. */
static bool wait_asked(struct dlfs_fuse *fuse, int timeout_ms, const struct timespec *deadline)
{
    while (first_unfetched(fuse) == NULL && !fuse->stopping) {
        if (timeout_ms < 0) {
            (void)pthread_cond_wait(&fuse->asked, &fuse->lock);
        } else if (pthread_cond_timedwait(&fuse->asked, &fuse->lock, deadline) == ETIMEDOUT) {
            return false;
        }
    }
    return true;
}

DLFS_API int dlfs_fuse_wait(dlfs_fuse *fuse, int timeout_ms, dlfs_fuse_question *question)
{
    struct timespec deadline =
        clock_timespec(monotonic_ns() + (timeout_ms > 0 ? (uint64_t)timeout_ms * NS_PER_MS : 0));
    int code = 0;
    (void)pthread_mutex_lock(&fuse->lock);
    if (wait_asked(fuse, timeout_ms, &deadline)) {
        code = fuse->stopping ? -ESHUTDOWN : 1;
        struct question *next = first_unfetched(fuse);
        if (code == 1) {
            next->fetched = true;
            *question = next->asked;
        }
    }
    (void)pthread_mutex_unlock(&fuse->lock);
    return code;
}

DLFS_API int dlfs_fuse_answer_question(dlfs_fuse *fuse, const dlfs_fuse_answer *answer)
{
    (void)pthread_mutex_lock(&fuse->lock);
    struct question *question = fuse->questions;
    while (question != NULL && question->asked.ticket != answer->ticket) {
        question = question->next;
    }
    if (question != NULL) {
        question->answer = *answer;
        question->answered = true;
        (void)pthread_cond_broadcast(&fuse->answered);
    }
    (void)pthread_mutex_unlock(&fuse->lock);
    return question != NULL ? 0 : -ENOENT;
}
