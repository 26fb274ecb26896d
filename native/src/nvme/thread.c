/*
 * The thread of an association. It sleeps in poll(2) until something is asked of it, the keep-alive
 * is due, or the admin connection has something to say, which can only be its end.
 *
 * When anything fails, everything that the host has with the controller is given up, and made anew
 * over the paths in their order, with pauses that grow from DELAY_MS_MIN to DELAY_MS_MAX, each
 * shortened at random by up to a half so that hosts do not come back in step. A controller that
 * does not live for long after it was made counts as one more failed attempt.
 */
#include "nvme/thread.h"
#include "platform/clock.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#define DELAY_MS_MIN 10u
#define DELAY_MS_MAX 1000u
/* A controller that lived this many times the last pause was worth making. */
#define WORTH_FACTOR 4u
#define NANOSECONDS_PER_MS UINT64_C(1000000)
/* How long saying goodbye may take. */
#define GOODBYE_MS 500u

static struct nvme_patience patience_of(struct nvme_association *association, uint64_t ms)
{
    return (struct nvme_patience){.until_ns = monotonic_ns() + ms * NANOSECONDS_PER_MS,
                                  .wake = association->wake,
                                  .stop = &association->stop};
}

static uint32_t grow(uint32_t delay_ms)
{
    uint32_t next = delay_ms * 2;
    return next < DELAY_MS_MIN ? DELAY_MS_MIN : next > DELAY_MS_MAX ? DELAY_MS_MAX : next;
}

/* A pause of delay_ms less up to a half (xorshift64). */
static uint64_t jitter_ns(struct nvme_association *association, uint32_t delay_ms)
{
    uint64_t value = association->random | 1;
    value ^= value << 13;
    value ^= value >> 7;
    value ^= value << 17;
    association->random = value;
    uint64_t whole_ns = delay_ms * NANOSECONDS_PER_MS;
    return whole_ns - (whole_ns / 2 > 0 ? value % (whole_ns / 2) : 0);
}

/* Sleeps until until_ns, a wake-up or a stop; wake-ups are only looked at, not explained. */
static void sleep_until(struct nvme_association *association, int descriptor, uint64_t until_ns)
{
    uint64_t now = monotonic_ns();
    int timeout_ms = -1;
    if (until_ns != UINT64_MAX) {
        uint64_t left_ms = until_ns > now ? (until_ns - now) / NANOSECONDS_PER_MS + 1 : 0;
        timeout_ms = left_ms < INT32_MAX ? (int)left_ms : INT32_MAX;
    }
    struct pollfd watched[2] = {{.fd = association->wake, .events = POLLIN},
                                {.fd = descriptor, .events = POLLIN}};
    int got = poll(watched, 2, timeout_ms);
    if (got > 0 && watched[0].revents != 0) {
        uint64_t ignored;
        (void)!read(association->wake, &ignored, sizeof ignored);
    }
}

/* ---- failing --------------------------------------------------------------------------------- */

void nvme_note(struct nvme_association *association, int code, const char *reason)
{
    const struct nvme_path *path = &association->config.paths[association->path];
    nvme_say(&association->error, "%.255s:%u: %.200s", path->host, path->port, reason);
    struct nvme_counters *counters = &association->counters;
    if (code == DLFS_E_TIMEOUT) {
        atomic_fetch_add(&counters->timeouts, 1);
    } else if (code == DLFS_E_DIGEST) {
        atomic_fetch_add(&counters->digest_errors, 1);
    } else if (code == DLFS_E_PROTOCOL) {
        atomic_fetch_add(&counters->protocol_errors, 1);
    }
}

void nvme_fail(struct nvme_association *association, int code, const char *reason)
{
    association->failure = code;
    nvme_note(association, code, reason);
}

static void fail_locked(struct nvme_association *association, int code, const char *reason)
{
    (void)pthread_mutex_lock(&association->lock);
    if (association->failure == 0) {
        nvme_fail(association, code, reason);
    }
    (void)pthread_mutex_unlock(&association->lock);
}

/* Gives the present generation up. With the lock held. */
static void drop(struct nvme_association *association)
{
    uint64_t now = monotonic_ns();
    bool silent = association->failure == DLFS_E_TIMEOUT;
    association->failure = 0;
    association->state = NVME_CONNECTING;
    association->once = false;
    association->down_ns = now;
    atomic_fetch_add(&association->generation, 1);
    nvme_connection_drop(&association->admin.connection);
    uint64_t lived_ms = (now - association->made_ns) / NANOSECONDS_PER_MS;
    if (lived_ms > (uint64_t)WORTH_FACTOR * association->delay_ms + DELAY_MS_MIN) {
        association->delay_ms = 0;
    } else {
        association->delay_ms = grow(association->delay_ms);
    }
    for (struct nvme_link *link = association->links; link != NULL; link = link->next) {
        nvme_connection_drop(&link->connection);
        link->silent = link->silent || silent;
        link->wanted = true;
        link->since_ns = now;
        link->retry_at_ns = 0;
        link->delay_ms = 0;
        nvme_link_signal(link);
    }
    (void)pthread_cond_broadcast(&association->changed);
}

/* No controller any more. With the lock held. */
static void lose(struct nvme_association *association, int code)
{
    association->state = NVME_LOST;
    association->lost_code = code;
    association->lost_ns = monotonic_ns();
    for (struct nvme_link *link = association->links; link != NULL; link = link->next) {
        link->code = code;
        nvme_link_signal(link);
    }
    while (association->requests != NULL) {
        struct nvme_request *request = association->requests;
        association->requests = request->next;
        request->code = code;
        request->state = NVME_REQUEST_DONE;
    }
    (void)pthread_cond_broadcast(&association->changed);
}

/* ---- connecting ------------------------------------------------------------------------------ */

/* Whether a controller that was reached again has the namespace that was there before. */
static int check_same(const struct nvme_association *association, const struct nvme_admin *found,
                      struct nvme_text *text)
{
    const struct nvme_namespace *before = &association->admin.space;
    const struct nvme_namespace *now = &found->space;
    bool same = before->block_bytes == now->block_bytes && before->size_bytes <= now->size_bytes &&
                before->id_kind == now->id_kind && memcmp(before->id, now->id, sizeof now->id) == 0;
    if (association->made_ns == 0 || same) {
        return 0;
    }
    nvme_say(text, "namespace %u is another one now, or smaller", association->config.nsid);
    return DLFS_E_LOST;
}

/* Tries the addresses of one path: 0, or the first one's failure. */
static int attempt(struct nvme_association *association, uint32_t number, struct nvme_admin *admin,
                   struct nvme_text *text)
{
    const struct nvme_config *config = &association->config;
    struct nvme_address addresses[NVME_ADDRESSES_MAX];
    int count = nvme_resolve(&config->paths[number], addresses, text);
    int first_code = count < 0 ? count : 0;
    for (int i = 0; i < count; i++) {
        struct nvme_text why = {.bytes = ""};
        struct nvme_patience patience = patience_of(association, config->connect_ms);
        int code = nvme_controller_open(config, &addresses[i], &patience, admin, &why);
        if (code == 0) {
            code = check_same(association, admin, &why);
            if (code == 0) {
                return 0;
            }
            nvme_connection_abort(admin->connection, false);
        }
        if (code == DLFS_E_CLOSED) {
            return code;
        }
        if (first_code == 0) {
            first_code = code;
            *text = why;
        }
    }
    return first_code;
}

static void publish(struct nvme_association *association, const struct nvme_admin *admin,
                    uint32_t path)
{
    uint64_t now = monotonic_ns();
    uint64_t size_bytes = association->admin.space.size_bytes;
    if (association->made_ns != 0) {
        atomic_fetch_add(&association->counters.reconnects, 1);
    }
    (void)pthread_mutex_lock(&association->lock);
    association->admin = *admin;
    if (association->made_ns != 0) {
        association->admin.space.size_bytes = size_bytes; /* a device does not grow while open */
    }
    association->path = path;
    association->state = NVME_READY;
    association->made_ns = now;
    association->keep_alive_ns = now;
    (void)pthread_cond_broadcast(&association->changed);
    (void)pthread_mutex_unlock(&association->lock);
}

/* Tries every path once: 0, or the first one's failure; the error tells of all of them. */
static int try_paths(struct nvme_association *association)
{
    int first_code = 0;
    struct nvme_text told = {.bytes = ""};
    for (uint32_t i = 0; i < association->config.path_count; i++) {
        const struct nvme_path *path = &association->config.paths[i];
        struct nvme_admin admin;
        struct nvme_text text = {.bytes = ""};
        int code = attempt(association, i, &admin, &text);
        if (code == 0) {
            publish(association, &admin, i);
            return 0;
        }
        if (code == DLFS_E_CLOSED) {
            return code;
        }
        first_code = first_code == 0 ? code : first_code;
        size_t length = strlen(told.bytes);
        (void)snprintf(told.bytes + length, sizeof told.bytes - length, "%sconnect %s:%u: %s",
                       length > 0 ? "; " : "", path->host, path->port, text.bytes);
    }
    (void)pthread_mutex_lock(&association->lock);
    association->error = told;
    (void)pthread_mutex_unlock(&association->lock);
    return first_code;
}

/* One round of attempts, after the pause that is due; or the loss. */
static void restore(struct nvme_association *association)
{
    uint64_t end_ns = association->down_ns + association->config.reconnect_ms * NANOSECONDS_PER_MS;
    (void)pthread_mutex_lock(&association->lock);
    bool once = association->once;
    (void)pthread_mutex_unlock(&association->lock);
    if (!once && association->config.reconnect_ms == 0) {
        (void)pthread_mutex_lock(&association->lock);
        lose(association, DLFS_E_LOST);
        (void)pthread_mutex_unlock(&association->lock);
        return;
    }
    if (!once && association->delay_ms > 0) {
        uint64_t until_ns = monotonic_ns() + jitter_ns(association, association->delay_ms);
        until_ns = until_ns < end_ns ? until_ns : end_ns;
        while (monotonic_ns() < until_ns && !atomic_load(&association->stop)) {
            sleep_until(association, -1, until_ns);
        }
    }
    int code = try_paths(association);
    if (code == 0 || code == DLFS_E_CLOSED) {
        return;
    }
    association->delay_ms = grow(association->delay_ms);
    if (once || monotonic_ns() >= end_ns) {
        (void)pthread_mutex_lock(&association->lock);
        /* Opening tells what was found; a device that was there before is lost, however. */
        lose(association, association->made_ns == 0 ? code : DLFS_E_LOST);
        (void)pthread_mutex_unlock(&association->lock);
    }
}

/* ---- queue pairs ----------------------------------------------------------------------------- */

static bool qid_is_taken(const struct nvme_association *association, uint16_t qid)
{
    for (const struct nvme_link *link = association->links; link != NULL; link = link->next) {
        if (link->qid == qid) {
            return true;
        }
    }
    return false;
}

/*
 * Gives a link a queue number that no other has: the one that was given longest ago, since the
 * controller may not have noticed yet that a queue is gone. With the lock held.
 */
static bool choose_qid(struct nvme_association *association, struct nvme_link *link)
{
    uint32_t most = association->admin.queue_count_max;
    if (link->qid != 0 && link->qid <= most) {
        return true;
    }
    link->qid = 0;
    for (uint32_t i = 0; i < most; i++) {
        uint16_t qid = (uint16_t)((association->last_qid + i) % most + 1);
        if (!qid_is_taken(association, qid)) {
            association->last_qid = qid;
            link->qid = qid;
            return true;
        }
    }
    return false;
}

static void link_lose(struct nvme_association *association, struct nvme_link *link, int code)
{
    link->wanted = false;
    link->code = code;
    link->since_ns = monotonic_ns();
    nvme_link_signal(link);
    (void)pthread_cond_broadcast(&association->changed);
}

/*
 * A link could not be connected. A controller that refuses is taken at its word by a new queue
 * pair; one that had a connection before hopes for the whole budget. With the lock held.
 */
static void link_failed(struct nvme_association *association, struct nvme_link *link, int code,
                        bool refused, const char *text)
{
    const struct nvme_path *path = &association->config.paths[association->path];
    nvme_say(&association->error, "connect queue %u of %.200s:%u: %.200s", link->qid, path->host,
             path->port, text);
    uint64_t now = monotonic_ns();
    uint64_t budget_ns = association->config.reconnect_ms * NANOSECONDS_PER_MS;
    if ((refused && !link->had) || now - link->since_ns >= budget_ns) {
        link_lose(association, link, refused && !link->had ? code : DLFS_E_LOST);
        return;
    }
    link->delay_ms = grow(link->delay_ms);
    link->retry_at_ns = now + jitter_ns(association, link->delay_ms);
}

/*
 * A target that was restarted refuses queues of a controller that it does not know any more: that
 * is no word on the queue, but the end of the controller.
 */
static bool is_final(struct nvme_association *association)
{
    struct nvme_patience patience = patience_of(association, association->config.connect_ms);
    struct nvme_text text = {.bytes = ""};
    int code = nvme_controller_check(&association->admin, &patience, &text);
    if (code < 0 && code != DLFS_E_CLOSED) {
        fail_locked(association, DLFS_E_LOST, text.bytes);
    }
    return code == 0;
}

static void link_connect(struct nvme_association *association, struct nvme_link *link)
{
    struct nvme_patience patience = patience_of(association, association->config.connect_ms);
    struct nvme_connection *connection = NULL;
    struct nvme_text text = {.bytes = ""};
    bool refused = false;
    int code =
        nvme_controller_connect_queue(&association->config, &association->admin, link->qid,
                                      link->command_count, &patience, &connection, &refused, &text);
    refused = refused && is_final(association);
    (void)pthread_mutex_lock(&association->lock);
    if (code == 0) {
        connection->generation = atomic_load(&association->generation);
        link->connection = connection;
        link->wanted = false;
        link->had = true;
        link->delay_ms = 0;
        nvme_link_signal(link);
        (void)pthread_cond_broadcast(&association->changed);
    } else if (code != DLFS_E_CLOSED && !link->let_go) {
        link_failed(association, link, code, refused, text.bytes);
    }
    nvme_link_put_down(association, link);
    (void)pthread_mutex_unlock(&association->lock);
}

/*
 * The link to connect now, in hand; NULL when there is none, *next_ns being when there may be one.
 * With the lock held.
 */
static struct nvme_link *next_link(struct nvme_association *association, uint64_t *next_ns)
{
    uint64_t now = monotonic_ns();
    for (struct nvme_link *link = association->links; link != NULL; link = link->next) {
        if (!link->wanted || link->code < 0) {
            continue;
        }
        if (link->retry_at_ns > now) {
            *next_ns = link->retry_at_ns < *next_ns ? link->retry_at_ns : *next_ns;
            continue;
        }
        if (association->admin.queue_count_max == 0) {
            link_lose(association, link, -ENOTSUP);
        } else if (!choose_qid(association, link)) {
            nvme_say(&association->error, "the target allows %u queue pairs at once",
                     association->admin.queue_count_max);
            link_lose(association, link, DLFS_E_LIMIT);
        } else {
            link->in_hand = true;
            return link;
        }
    }
    return NULL;
}

/* ---- serving --------------------------------------------------------------------------------- */

/* Whether a command may be run again when nobody knows whether it was run. */
static bool is_harmless(const struct nvme_request *request)
{
    uint8_t opcode = request->exchange.entry[0];
    return opcode == NVME_ADMIN_IDENTIFY || opcode == NVME_ADMIN_GET_LOG_PAGE ||
           opcode == NVME_ADMIN_GET_FEATURES;
}

static void run_request(struct nvme_association *association, struct nvme_request *request)
{
    struct nvme_patience patience = patience_of(association, association->config.timeout_ms);
    struct nvme_text text;
    int code =
        nvme_connection_run(association->admin.connection, &request->exchange, &patience, &text);
    (void)pthread_mutex_lock(&association->lock);
    if (code < 0 && code != DLFS_E_CLOSED) {
        nvme_fail(association, code, text.bytes);
    }
    if (code < 0 && code != DLFS_E_CLOSED && is_harmless(request) && !request->late) {
        request->state = NVME_REQUEST_WAITING;
        request->next = association->requests;
        association->requests = request;
    } else {
        request->code = code == 0 || code == DLFS_E_TIMEOUT ? code : DLFS_E_LOST;
        request->state = NVME_REQUEST_DONE;
    }
    (void)pthread_cond_broadcast(&association->changed);
    (void)pthread_mutex_unlock(&association->lock);
}

static void keep_alive(struct nvme_association *association)
{
    struct nvme_patience patience = patience_of(association, association->config.timeout_ms);
    struct nvme_text text;
    int code = nvme_controller_keep_alive(&association->admin, &patience, &text);
    association->keep_alive_ns = monotonic_ns();
    if (code < 0 && code != DLFS_E_CLOSED) {
        fail_locked(association, code == DLFS_E_TIMEOUT ? code : DLFS_E_LOST, text.bytes);
    }
}

/* The admin connection is readable although nothing was asked: it ended, or it is confused. */
static void hear(struct nvme_association *association)
{
    uint8_t byte;
    ssize_t got = recv(association->admin.connection->descriptor, &byte, 1, MSG_PEEK);
    if (got > 0) {
        fail_locked(association, DLFS_E_PROTOCOL, "the target spoke on the admin queue unasked");
    } else if (got == 0) {
        fail_locked(association, DLFS_E_LOST, "the target closed the admin connection");
    } else if (errno != EAGAIN && errno != EINTR) {
        fail_locked(association, nvme_socket_code(errno), strerrordesc_np(errno));
    }
}

static uint64_t keep_alive_due_ns(const struct nvme_association *association)
{
    const struct nvme_config *config = &association->config;
    /* Half of what the controller allows, so that one late message is not the end. */
    uint64_t period_ns = config->keepalive_ms * NANOSECONDS_PER_MS / 2;
    return period_ns > 0 ? association->keep_alive_ns + period_ns : UINT64_MAX;
}

/* One thing at a time, what fails first. */
static void serve(struct nvme_association *association)
{
    uint64_t until_ns = keep_alive_due_ns(association);
    bool due = monotonic_ns() >= until_ns;
    struct nvme_link *link = NULL;
    (void)pthread_mutex_lock(&association->lock);
    if (association->failure < 0) {
        drop(association);
        (void)pthread_mutex_unlock(&association->lock);
        return;
    }
    struct nvme_request *request = due ? NULL : association->requests;
    if (due) {
        /* Before all else. */
    } else if (request != NULL) {
        association->requests = request->next;
        request->state = NVME_REQUEST_RUNNING;
    } else {
        link = next_link(association, &until_ns);
    }
    (void)pthread_mutex_unlock(&association->lock);
    if (due) {
        keep_alive(association);
    } else if (request != NULL) {
        run_request(association, request);
    } else if (link != NULL) {
        link_connect(association, link);
    } else {
        sleep_until(association, association->admin.connection->descriptor, until_ns);
        hear(association);
    }
}

void *nvme_thread_main(void *argument)
{
    struct nvme_association *association = argument;
    while (!atomic_load(&association->stop)) {
        (void)pthread_mutex_lock(&association->lock);
        enum nvme_state state = association->state;
        (void)pthread_mutex_unlock(&association->lock);
        if (state == NVME_READY) {
            serve(association);
        } else if (state == NVME_CONNECTING) {
            restore(association);
        } else {
            sleep_until(association, -1, UINT64_MAX);
        }
    }
    if (association->admin.connection != NULL) {
        /* The stop must not cut the goodbye short. */
        atomic_bool never = false;
        struct nvme_patience patience = patience_of(association, GOODBYE_MS);
        patience.stop = &never;
        nvme_controller_shut_down(&association->admin, &patience);
    }
    return NULL;
}
