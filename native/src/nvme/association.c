/* Associations as their users see them: making, requests, links, reports; see
 * nvme/association.h. The thread is in nvme/thread.c. */
#include "nvme/association.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "nvme/thread.h"
#include "platform/clock.h"
#include "platform/thread.h"

/* How long a lost device stays lost before an operation has it looked for again. */
#define REVIVE_PAUSE_NS UINT64_C(1000000000)
#define NANOSECONDS_PER_MS UINT64_C(1000000)

static void wake(int descriptor)
{
    uint64_t one = 1;
    (void)!write(descriptor, &one, sizeof one); /* fails only when it is readable already */
}

void nvme_link_signal(struct nvme_link *link)
{
    atomic_store(&link->signal, 1);
    wake(link->wake);
}

/* ---- life ------------------------------------------------------------------------------------ */

static int make_locks(struct nvme_association *association)
{
    int code = condition_init(&association->changed);
    if (code < 0) {
        return code;
    }
    (void)pthread_mutex_init(&association->lock, NULL);
    (void)pthread_mutex_init(&association->service_lock, NULL);
    association->locks_made = true;
    return 0;
}

int nvme_association_create(const struct nvme_config *config, struct nvme_association **out)
{
    struct nvme_association *association = calloc(1, sizeof *association);
    if (association == NULL) {
        return -ENOMEM;
    }
    association->config = *config;
    association->owner = getpid();
    association->random = monotonic_ns() ^ (uint64_t)association->owner << 32;
    nvme_durability_init(&association->durability);
    nvme_write_limit_init(&association->write_limit);
    association->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int code = association->wake >= 0 ? make_locks(association) : -errno;
    if (code < 0) {
        nvme_association_destroy(association);
        return code;
    }
    *out = association;
    return 0;
}

int nvme_association_start(struct nvme_association *association, bool once)
{
    association->once = once;
    association->down_ns = monotonic_ns();
    int code = thread_start(&association->thread, NULL, nvme_thread_main, association);
    (void)pthread_mutex_lock(&association->lock);
    association->thread_started = code == 0;
    if (code < 0) {
        association->state = NVME_LOST;
        association->lost_code = code;
        association->lost_ns = UINT64_MAX; /* for ever: nobody could look for it */
        nvme_say(&association->error, "start a thread: %s", strerrordesc_np(-code));
        (void)pthread_cond_broadcast(&association->changed);
    }
    (void)pthread_mutex_unlock(&association->lock);
    return code;
}

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

void nvme_association_destroy(struct nvme_association *association)
{
    if (association == NULL) {
        return;
    }
    if (association->owner != getpid()) {
        /* The thread and the locks are the parent's; what we hold are copies of descriptors. */
        nvme_connection_abort(association->admin.connection, true);
        free_memory(association);
        return;
    }
    if (association->thread_started) {
        atomic_store(&association->stop, true);
        wake(association->wake);
        (void)pthread_join(association->thread, NULL);
    }
    if (association->locks_made) {
        (void)pthread_cond_destroy(&association->changed);
        (void)pthread_mutex_destroy(&association->lock);
        (void)pthread_mutex_destroy(&association->service_lock);
    }
    nvme_durability_destroy(&association->durability);
    free_memory(association);
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

/* Waits for a change until until_ns; false when that has passed. With the lock held. */
static bool wait_changed(struct nvme_association *association, uint64_t until_ns)
{
    if (monotonic_ns() >= until_ns) {
        return false;
    }
    condition_wait_until(&association->changed, &association->lock, until_ns);
    return true;
}

/* As long as anything here may take: an operation's budget and the making of a connection. */
static uint64_t budget_end_ns(const struct nvme_config *config)
{
    uint64_t budget_ms = (uint64_t)config->timeout_ms + config->reconnect_ms + config->connect_ms;
    return monotonic_ns() + budget_ms * NANOSECONDS_PER_MS;
}

/* Has a lost controller looked for again: false when it is too early. With the lock held. */
static bool revive(struct nvme_association *association)
{
    if (association->state != NVME_LOST) {
        return true;
    }
    uint64_t now = monotonic_ns();
    if (now < association->lost_ns || now - association->lost_ns < REVIVE_PAUSE_NS) {
        return false;
    }
    association->state = NVME_CONNECTING;
    association->once = true;
    for (struct nvme_link *link = association->links; link != NULL; link = link->next) {
        link->code = 0;
    }
    wake(association->wake);
    return true;
}

/* ---- requests -------------------------------------------------------------------------------- */

static void request_remove(struct nvme_association *association, struct nvme_request *request)
{
    struct nvme_request **place = &association->requests;
    while (*place != NULL && *place != request) {
        place = &(*place)->next;
    }
    if (*place == request) {
        *place = request->next;
    }
}

static void request_append(struct nvme_association *association, struct nvme_request *request)
{
    struct nvme_request **place = &association->requests;
    while (*place != NULL) {
        place = &(*place)->next;
    }
    request->next = NULL;
    *place = request;
}

int nvme_association_run(struct nvme_association *association, struct nvme_request *request)
{
    uint64_t until_ns = budget_end_ns(&association->config);
    request->state = NVME_REQUEST_WAITING;
    request->late = false;
    (void)pthread_mutex_lock(&association->lock);
    if (!revive(association)) {
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
            /* It is with the controller: its own time limit ends that, for the last time. */
            request->late = true;
            until_ns = monotonic_ns() + association->config.timeout_ms * NANOSECONDS_PER_MS;
        }
    }
    (void)pthread_mutex_unlock(&association->lock);
    return request->code;
}

/* ---- links ----------------------------------------------------------------------------------- */

static void link_free(struct nvme_association *association, struct nvme_link *link)
{
    struct nvme_link **place = &association->links;
    while (*place != link) {
        place = &(*place)->next;
    }
    *place = link->next;
    nvme_connection_close(link->connection);
    (void)close(link->wake);
    free(link);
}

void nvme_link_put_down(struct nvme_association *association, struct nvme_link *link)
{
    link->in_hand = false;
    if (link->let_go) {
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
    link->wanted = true;
    link->since_ns = monotonic_ns();
    link->next = association->links;
    association->links = link;
    *out = link;
    return 0;
}

/*
 * Whether a controller that was there is looked for. That may take the whole budget, which
 * operations have for themselves: making a queue pair does not wait for it. With the lock held.
 */
static bool is_coming_back(const struct nvme_association *association)
{
    return association->state == NVME_CONNECTING && association->made_ns != 0;
}

int nvme_link_create(struct nvme_association *association, uint32_t command_count,
                     struct nvme_link **out)
{
    uint64_t until_ns = budget_end_ns(&association->config);
    struct nvme_link *link = NULL;
    (void)pthread_mutex_lock(&association->lock);
    int code = revive(association) ? 0 : association->lost_code;
    if (code == 0) {
        code = link_make(association, command_count, &link);
    }
    if (link == NULL) {
        (void)pthread_mutex_unlock(&association->lock);
        return code;
    }
    wake(association->wake);
    while (link->connection == NULL && link->code == 0 && code == 0 &&
           !is_coming_back(association)) {
        code = wait_changed(association, until_ns) ? 0 : DLFS_E_TIMEOUT;
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

void nvme_link_release(struct nvme_association *association, struct nvme_link *link, bool foreign)
{
    if (foreign) {
        return; /* it goes with the child's copy of the association */
    }
    (void)pthread_mutex_lock(&association->lock);
    link->let_go = true;
    if (!link->in_hand) {
        link_free(association, link);
    }
    (void)pthread_mutex_unlock(&association->lock);
}

struct nvme_news nvme_link_news(struct nvme_association *association, struct nvme_link *link,
                                uint64_t generation)
{
    uint64_t ignored;
    (void)pthread_mutex_lock(&association->lock);
    /* Under the lock, or a wake-up between its signal and its write would stay readable for ever.
     */
    (void)!read(link->wake, &ignored, sizeof ignored);
    atomic_store(&link->signal, 0);
    struct nvme_news news = {.connection = link->connection,
                             .ended = generation != atomic_load(&association->generation),
                             .silent = link->silent,
                             .code = link->code};
    link->connection = NULL;
    link->silent = false;
    (void)pthread_mutex_unlock(&association->lock);
    return news;
}

/* Whether a generation is in use, and nothing was said against it. With the lock held. */
static bool is_well(const struct nvme_association *association, uint64_t generation)
{
    return generation == atomic_load(&association->generation) &&
           association->state == NVME_READY && association->failure == 0;
}

void nvme_association_report(struct nvme_association *association, uint64_t generation, int code,
                             const char *reason)
{
    (void)pthread_mutex_lock(&association->lock);
    if (is_well(association, generation)) {
        nvme_fail(association, code, reason);
        wake(association->wake);
    }
    (void)pthread_mutex_unlock(&association->lock);
}

void nvme_link_report(struct nvme_association *association, struct nvme_link *link,
                      uint64_t generation, int code, const char *reason)
{
    (void)pthread_mutex_lock(&association->lock);
    if (is_well(association, generation)) {
        nvme_note(association, code, reason);
        link->qid = 0; /* the controller may not have noticed yet that the old one is gone */
        link->wanted = true;
        link->since_ns = monotonic_ns();
        link->retry_at_ns = 0;
        wake(association->wake);
    }
    (void)pthread_mutex_unlock(&association->lock);
}

bool nvme_link_revive(struct nvme_association *association, struct nvme_link *link, int *code)
{
    (void)pthread_mutex_lock(&association->lock);
    bool possible = revive(association);
    if (possible && link->code < 0) { /* this queue pair alone was refused */
        uint64_t now = monotonic_ns();
        possible = now - link->since_ns >= REVIVE_PAUSE_NS;
        if (possible) {
            link->code = 0;
            link->wanted = true;
            link->since_ns = now;
            link->retry_at_ns = 0;
            wake(association->wake);
        }
    }
    *code = link->code < 0 ? link->code : association->lost_code;
    (void)pthread_mutex_unlock(&association->lock);
    return possible;
}
