/*
 * Associations, as devices and queue pairs use them: create, admin commands, links, error reports.
 * See nvme/association.h. Their thread is in nvme/thread.c, which calls this file.
 */
#include "nvme/association.h"
#include "platform/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Time after a loss until an operation may start another attempt to connect. */
#define LOST_RETRY_NS UINT64_C(1000000000)
/* Time between two looks at a flag that ends a wait. */
#define STOP_POLL_NS UINT64_C(50000000)
/* Longest wait for the end of the thread. Any thread may close a device, also the one that happens
 * to collect garbage; a target that does not answer the shutdown must not hold it. */
#define END_WAIT_NS UINT64_C(50000000)

static void wake(int descriptor)
{
    uint64_t one = 1;
    (void)!write(descriptor, &one, sizeof one); /* fails only if it is readable already */
}

void nvme_link_signal(struct nvme_link *link)
{
    atomic_store(&link->signal, 1);
    wake(link->wake);
}

/* ---- errors ---------------------------------------------------------------------------------- */

static void record_error(struct nvme_association *association, int code, const char *reason)
{
    const struct nvme_path *path = &association->config.paths[association->path];
    nvme_text_format(&association->error, "%.255s:%u: %.200s", path->host, path->port, reason);
    struct nvme_counters *counters = &association->counters;
    if (code == DLFS_E_TIMEOUT) {
        atomic_fetch_add(&counters->timeouts, 1);
    } else if (code == DLFS_E_DIGEST) {
        atomic_fetch_add(&counters->digest_errors, 1);
    } else if (code == DLFS_E_PROTOCOL) {
        atomic_fetch_add(&counters->protocol_errors, 1);
    }
}

void nvme_fail_incarnation(struct nvme_association *association, int code, const char *reason)
{
    association->failure = code;
    record_error(association, code, reason);
}

void nvme_association_fail(struct nvme_association *association, int code, bool namespace_gone,
                           const char *reason)
{
    (void)pthread_mutex_lock(&association->lock);
    if (association->failure == 0) {
        association->namespace_gone = namespace_gone;
        nvme_fail_incarnation(association, code, reason);
    }
    (void)pthread_mutex_unlock(&association->lock);
}

/* Waits for a change until until_ns; returns false if that has passed. With the lock held. */
static bool wait_changed(struct nvme_association *association, uint64_t until_ns)
{
    if (monotonic_ns() >= until_ns) {
        return false;
    }
    condition_wait_until(&association->changed, &association->lock, until_ns);
    return true;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void free_memory(struct nvme_association *association)
{
    while (association->links != NULL) {
        struct nvme_link *link = association->links;
        association->links = link->next;
        nvme_connection_abort(link->connection, association->owner != getpid());
        (void)close(link->wake);
        free(link);
    }
    if (association->wake >= 0) {
        (void)close(association->wake);
    }
    free(association);
}

int nvme_association_create(const struct nvme_config *config, struct nvme_association **out)
{
    struct nvme_association *association = calloc(1, sizeof *association);
    if (association == NULL) {
        return -ENOMEM;
    }
    association->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int code = association->wake >= 0 ? condition_init(&association->changed) : -errno;
    if (code < 0) {
        free_memory(association);
        return code;
    }
    (void)pthread_mutex_init(&association->lock, NULL);
    (void)pthread_mutex_init(&association->passthrough_lock, NULL);
    nvme_durability_init(&association->durability);
    nvme_write_limit_init(&association->write_limit);
    association->config = *config;
    association->owner = getpid();
    association->random = monotonic_ns() ^ (uint64_t)association->owner << 32;
    *out = association;
    return 0;
}

/* Frees an association that no thread uses any more. */
static void free_ended(struct nvme_association *association)
{
    (void)pthread_cond_destroy(&association->changed);
    (void)pthread_mutex_destroy(&association->lock);
    (void)pthread_mutex_destroy(&association->passthrough_lock);
    nvme_durability_destroy(&association->durability);
    free_memory(association);
}

/* Ends the thread. Returns false if it takes longer than END_WAIT_NS: then the thread frees the
 * association. */
static bool end_thread(struct nvme_association *association)
{
    pthread_t thread = association->thread;
    uint64_t until_ns = monotonic_ns() + END_WAIT_NS;
    (void)pthread_mutex_lock(&association->lock);
    atomic_store(&association->stop, true);
    wake(association->wake);
    while (!association->thread_ended && wait_changed(association, until_ns)) {
    }
    bool ended = association->thread_ended;
    association->abandoned = !ended;
    (void)pthread_mutex_unlock(&association->lock);
    (void)(ended ? pthread_join(thread, NULL) : pthread_detach(thread));
    return ended;
}

void nvme_association_destroy(struct nvme_association *association)
{
    if (association == NULL) {
        return;
    }
    if (association->owner != getpid()) {
        /* The thread and the locks exist in the parent only; the descriptors are copies. */
        nvme_connection_abort(association->admin.connection, true);
        free_memory(association);
        return;
    }
    if (!association->thread_started || end_thread(association)) {
        free_ended(association);
    }
}

void nvme_association_thread_ended(struct nvme_association *association)
{
    (void)pthread_mutex_lock(&association->lock);
    association->thread_ended = true;
    bool abandoned = association->abandoned;
    (void)pthread_cond_broadcast(&association->changed);
    (void)pthread_mutex_unlock(&association->lock);
    if (abandoned) {
        free_ended(association);
    }
}

int nvme_association_wait(struct nvme_association *association)
{
    (void)pthread_mutex_lock(&association->lock);
    while (association->state == NVME_CONNECTING) {
        (void)pthread_cond_wait(&association->changed, &association->lock);
    }
    int code = association->state == NVME_READY ? 0 : association->lost_code;
    (void)pthread_mutex_unlock(&association->lock);
    return code;
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* Returns when a call that starts now must end: after an operation's time limit and the time to
 * open a connection. */
static uint64_t budget_end_ns(const struct nvme_config *config)
{
    uint64_t budget_ms = (uint64_t)config->timeout_ms + config->reconnect_ms + config->connect_ms;
    return monotonic_ns() + budget_ms * NVME_NANOSECONDS_PER_MS;
}

/* Makes the thread connect a lost controller again; returns false if it is too early for that. With
 * the lock held. */
static bool retry_lost(struct nvme_association *association)
{
    if (association->state != NVME_LOST) {
        return true;
    }
    uint64_t now = monotonic_ns();
    if (now < association->lost_ns || now - association->lost_ns < LOST_RETRY_NS) {
        return false;
    }
    association->state = NVME_CONNECTING;
    association->single_round = true;
    for (struct nvme_link *link = association->links; link != NULL; link = link->next) {
        link->code = 0;
    }
    wake(association->wake);
    return true;
}

/* ---- requests -------------------------------------------------------------------------------- */

static void request_remove(struct nvme_association *association, struct nvme_admin_request *request)
{
    struct nvme_admin_request **cursor = &association->requests;
    while (*cursor != NULL && *cursor != request) {
        cursor = &(*cursor)->next;
    }
    if (*cursor == request) {
        *cursor = request->next;
    }
}

static void request_append(struct nvme_association *association, struct nvme_admin_request *request)
{
    struct nvme_admin_request **cursor = &association->requests;
    while (*cursor != NULL) {
        cursor = &(*cursor)->next;
    }
    request->next = NULL;
    *cursor = request;
}

int nvme_association_run(struct nvme_association *association, struct nvme_admin_request *request)
{
    uint64_t until_ns = budget_end_ns(&association->config);
    request->state = NVME_REQUEST_WAITING;
    request->no_retry = false;
    (void)pthread_mutex_lock(&association->lock);
    if (!retry_lost(association)) {
        int code = association->lost_code;
        (void)pthread_mutex_unlock(&association->lock);
        return code;
    }
    request_append(association, request);
    wake(association->wake);
    while (request->state != NVME_REQUEST_DONE) {
        bool in_time = wait_changed(association, until_ns);
        if (!in_time && request->state == NVME_REQUEST_WAITING) {
            request_remove(association, request);
            request->state = NVME_REQUEST_DONE;
            request->code = DLFS_E_TIMEOUT;
        } else if (!in_time) {
            /* The controller has it: the thread ends it after timeout_ms and does not send it
             * again. */
            request->no_retry = true;
            until_ns = monotonic_ns() + association->config.timeout_ms * NVME_NANOSECONDS_PER_MS;
        }
    }
    (void)pthread_mutex_unlock(&association->lock);
    return request->code;
}

void nvme_association_set_paths(struct nvme_association *association, const struct nvme_path *paths,
                                uint32_t path_count)
{
    (void)pthread_mutex_lock(&association->lock);
    memcpy(association->new_paths, paths, path_count * sizeof *paths);
    association->new_path_count = path_count;
    wake(association->wake);
    (void)pthread_mutex_unlock(&association->lock);
}

/* ---- links ----------------------------------------------------------------------------------- */

static void link_free(struct nvme_association *association, struct nvme_link *link)
{
    struct nvme_link **cursor = &association->links;
    while (*cursor != link) {
        cursor = &(*cursor)->next;
    }
    *cursor = link->next;
    nvme_connection_close(link->connection);
    (void)close(link->wake);
    free(link);
}

void nvme_link_connect_end(struct nvme_association *association, struct nvme_link *link)
{
    link->connecting = false;
    if (link->released) {
        link_free(association, link);
    }
}

static int link_make(struct nvme_association *association, uint32_t command_count,
                     struct nvme_link **out)
{
    struct nvme_link *link = calloc(1, sizeof *link);
    if (link == NULL) {
        return -ENOMEM;
    }
    link->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (link->wake < 0) {
        int code = -errno;
        free(link);
        return code;
    }
    link->command_count = command_count;
    link->needs_connection = true;
    link->since_ns = monotonic_ns();
    link->next = association->links;
    association->links = link;
    *out = link;
    return 0;
}

/*
 * Returns true while the thread connects again after a failure. That may take the whole time limit
 * of an operation, so that creating a queue pair does not wait for it. With the lock held.
 */
static bool is_reconnecting(const struct nvme_association *association)
{
    return association->state == NVME_CONNECTING && association->connected_ns != 0;
}

/*
 * Waits for a change like wait_changed, but returns false soon after *stop is set: the thread that
 * sets it knows of no association to signal. stop may be NULL. With the lock held.
 */
static bool wait_changed_or_stop(struct nvme_association *association, uint64_t until_ns,
                                 const _Atomic bool *stop)
{
    if (stop == NULL) {
        return wait_changed(association, until_ns);
    }
    uint64_t look_ns = monotonic_ns() + STOP_POLL_NS;
    return !atomic_load(stop) && wait_changed(association, look_ns < until_ns ? look_ns : until_ns);
}

int nvme_link_create(struct nvme_association *association, uint32_t command_count,
                     const struct dlfs_connect_limit *limit, struct nvme_link **out)
{
    uint64_t until_ns = budget_end_ns(&association->config);
    const _Atomic bool *stop = limit != NULL ? limit->stop : NULL;
    struct nvme_link *link = NULL;
    if (limit != NULL && limit->until_ns > 0 && limit->until_ns < until_ns) {
        until_ns = limit->until_ns;
    }
    (void)pthread_mutex_lock(&association->lock);
    int code = retry_lost(association) ? 0 : association->lost_code;
    if (code == 0) {
        code = link_make(association, command_count, &link);
    }
    if (link == NULL) {
        (void)pthread_mutex_unlock(&association->lock);
        return code;
    }
    wake(association->wake);
    while (link->connection == NULL && link->code == 0 && code == 0 &&
           !is_reconnecting(association)) {
        code = wait_changed_or_stop(association, until_ns, stop) ? 0 : DLFS_E_TIMEOUT;
    }
    if (link->connection != NULL) {
        code = 0;
    } else if (link->code < 0) {
        code = link->code;
    }
    (void)pthread_mutex_unlock(&association->lock);
    if (code < 0) {
        nvme_link_release(association, link, false);
        return code;
    }
    *out = link;
    return 0;
}

void nvme_link_release(struct nvme_association *association, struct nvme_link *link, bool in_child)
{
    if (in_child) {
        return; /* the link is freed with the forked child's copy of the association */
    }
    (void)pthread_mutex_lock(&association->lock);
    link->released = true;
    if (!link->connecting) {
        link_free(association, link);
    }
    (void)pthread_mutex_unlock(&association->lock);
}

struct nvme_link_update nvme_link_take_update(struct nvme_association *association,
                                              struct nvme_link *link, uint64_t incarnation)
{
    uint64_t ignored;
    (void)pthread_mutex_lock(&association->lock);
    /* Under the lock: a wake-up that is written between these two lines would stay readable. */
    (void)!read(link->wake, &ignored, sizeof ignored);
    atomic_store(&link->signal, 0);
    struct nvme_link_update update = {.connection = link->connection,
                                      .is_over =
                                          incarnation != atomic_load(&association->incarnation),
                                      .timed_out = link->timed_out,
                                      .code = link->code};
    link->connection = NULL;
    link->timed_out = false;
    (void)pthread_mutex_unlock(&association->lock);
    return update;
}

/* Returns true if an incarnation is in use and has not failed. With the lock held. */
static bool is_current(const struct nvme_association *association, uint64_t incarnation)
{
    return incarnation == atomic_load(&association->incarnation) &&
           association->state == NVME_READY && association->failure == 0;
}

void nvme_association_report(struct nvme_association *association, uint64_t incarnation, int code,
                             const char *reason)
{
    (void)pthread_mutex_lock(&association->lock);
    if (is_current(association, incarnation)) {
        nvme_fail_incarnation(association, code, reason);
        wake(association->wake);
    }
    (void)pthread_mutex_unlock(&association->lock);
}

void nvme_association_check_ana(struct nvme_association *association, uint64_t incarnation)
{
    (void)pthread_mutex_lock(&association->lock);
    if (is_current(association, incarnation) && !association->check_ana) {
        association->check_ana = true;
        wake(association->wake);
    }
    (void)pthread_mutex_unlock(&association->lock);
}

void nvme_link_report(struct nvme_association *association, struct nvme_link *link,
                      uint64_t incarnation, int code, const char *reason)
{
    (void)pthread_mutex_lock(&association->lock);
    if (is_current(association, incarnation)) {
        record_error(association, code, reason);
        link->qid = 0; /* the controller may not have noticed the end of the old queue yet */
        link->needs_connection = true;
        link->since_ns = monotonic_ns();
        link->retry_at_ns = 0;
        wake(association->wake);
    }
    (void)pthread_mutex_unlock(&association->lock);
}

bool nvme_link_retry_lost(struct nvme_association *association, struct nvme_link *link, int *code)
{
    (void)pthread_mutex_lock(&association->lock);
    bool possible = retry_lost(association);
    if (possible && link->code < 0) { /* only this queue pair was refused */
        uint64_t now = monotonic_ns();
        possible = now - link->since_ns >= LOST_RETRY_NS;
        if (possible) {
            link->code = 0;
            link->needs_connection = true;
            link->since_ns = now;
            link->retry_at_ns = 0;
            wake(association->wake);
        }
    }
    *code = link->code < 0 ? link->code : association->lost_code;
    (void)pthread_mutex_unlock(&association->lock);
    return possible;
}
