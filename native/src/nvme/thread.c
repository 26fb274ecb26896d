/*
 * The thread of an association. It sleeps in poll(2) until it has an admin command or a link to
 * handle, a keep-alive is due, or the admin connection ends.
 *
 * When any connection fails, the thread closes all connections to the controller and connects again
 * over the paths in their order. The pauses between rounds of attempts grow from 10 ms to one
 * second; each is shortened at random by up to a half, so that hosts do not come back at
 * the same moment. A controller that fails soon after it was connected counts as one more failed
 * attempt.
 */
#include "nvme/association.h"
#include "nvme/paths.h"
#include "nvme/security/authenticate.h"
#include "nvme/watch.h"
#include "platform/clock.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "platform/thread.h"

/* Time limit of a controller's shutdown. */
#define SHUTDOWN_MS 500u

/* Returns backoff_ms less a random share of up to a half (xorshift64). */
static uint64_t jitter_ns(struct nvme_association *association, uint32_t backoff_ms)
{
    uint64_t value = association->random | 1;
    value ^= value << 13;
    value ^= value >> 7;
    value ^= value << 17;
    association->random = value;
    uint64_t whole_ns = backoff_ms * NVME_NANOSECONDS_PER_MS;
    return whole_ns - (whole_ns / 2 > 0 ? value % (whole_ns / 2) : 0);
}

/* Sleeps until until_ns, until the descriptor is readable, or until a wake-up. */
static void sleep_until(struct nvme_association *association, int descriptor, uint64_t until_ns)
{
    (void)nvme_poll(association->wake, descriptor, POLLIN, until_ns);
}

/* ---- failing --------------------------------------------------------------------------------- */

/* Declares the controller lost and ends all admin commands with code. With the lock held. */
static void declare_lost(struct nvme_association *association, int code)
{
    association->state = NVME_LOST;
    association->lost_code = code;
    association->lost_ns = monotonic_ns();
    for (struct nvme_link *link = association->links; link != NULL; link = link->next) {
        link->code = code;
        nvme_link_signal(link);
    }
    while (association->requests != NULL) {
        struct nvme_admin_request *request = association->requests;
        association->requests = request->next;
        request->code = code;
        request->state = NVME_REQUEST_DONE;
    }
    (void)pthread_cond_broadcast(&association->changed);
}

/* ---- connecting ------------------------------------------------------------------------------ */

/* Waits for the present pause and tries every path once. Declares the controller lost when the time
 * for that is over. */
static void reconnect(struct nvme_association *association, bool single_round)
{
    int code = DLFS_E_LOST;
    uint64_t end_ns =
        association->disconnected_ns + association->config.reconnect_ms * NVME_NANOSECONDS_PER_MS;
    if (!single_round && association->backoff_ms > 0) {
        uint64_t until_ns = monotonic_ns() + jitter_ns(association, association->backoff_ms);
        until_ns = until_ns < end_ns ? until_ns : end_ns;
        while (monotonic_ns() < until_ns && !atomic_load(&association->stop)) {
            sleep_until(association, -1, until_ns);
        }
    }
    if (single_round || association->config.reconnect_ms > 0) {
        code = nvme_paths_connect(association);
    }
    if (code == 0 || code == DLFS_E_CLOSED) {
        return;
    }
    association->backoff_ms = nvme_next_backoff_ms(association->backoff_ms);
    uint64_t transition_ns = association->transition_ms * NVME_NANOSECONDS_PER_MS;
    if (transition_ns > 0 && association->disconnected_ns + transition_ns < end_ns) {
        end_ns = association->disconnected_ns + transition_ns;
    }
    if (single_round || monotonic_ns() >= end_ns) {
        (void)pthread_mutex_lock(&association->lock);
        /* An open reports the error itself. A device that was connected before is lost, or its key
         * is not valid any more. */
        bool is_cause = association->connected_ns == 0 || code == DLFS_E_AUTH;
        declare_lost(association, is_cause ? code : DLFS_E_LOST);
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
 * Gives a link a free queue ID: the least recently used one, since the controller may not have
 * noticed the end of a queue yet. With the lock held.
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

static void fail_link(struct nvme_association *association, struct nvme_link *link, int code)
{
    link->needs_connection = false;
    link->code = code;
    link->since_ns = monotonic_ns();
    nvme_link_signal(link);
    (void)pthread_cond_broadcast(&association->changed);
}

/*
 * Handles a failed attempt to connect a link. A refusal is final for a new queue pair. One that was
 * connected before tries again for reconnect_ms. With the lock held.
 */
static void link_connect_failed(struct nvme_association *association, struct nvme_link *link,
                                int code, bool refused, const char *text)
{
    const struct nvme_path *path = &association->config.paths[association->path];
    nvme_text_format(&association->error, "connect queue %u of %.200s:%u: %.200s", link->qid,
                     path->host, path->port, text);
    uint64_t now = monotonic_ns();
    uint64_t budget_ns = association->config.reconnect_ms * NVME_NANOSECONDS_PER_MS;
    if ((refused && !link->was_connected) || now - link->since_ns >= budget_ns) {
        bool is_cause = (refused && !link->was_connected) || code == DLFS_E_AUTH;
        fail_link(association, link, is_cause ? code : DLFS_E_LOST);
        return;
    }
    link->backoff_ms = nvme_next_backoff_ms(link->backoff_ms);
    link->retry_at_ns = now + jitter_ns(association, link->backoff_ms);
}

/*
 * Returns true if the controller still answers after it refused a queue. A restarted target refuses
 * queues because it does not know the controller any more: then the incarnation has failed, and the
 * refusal says nothing about the queue.
 */
static bool refusal_is_final(struct nvme_association *association)
{
    struct nvme_deadline deadline =
        nvme_association_deadline(association, association->config.connect_ms);
    struct nvme_text text = {.bytes = ""};
    int code = nvme_controller_check(&association->admin, &deadline, &text);
    if (code < 0 && code != DLFS_E_CLOSED) {
        nvme_association_fail(association, DLFS_E_LOST, false, text.bytes);
    }
    return code == 0;
}

static void link_connect(struct nvme_association *association, struct nvme_link *link)
{
    struct nvme_deadline deadline =
        nvme_association_deadline(association, association->config.connect_ms);
    struct nvme_connection *connection = NULL;
    struct nvme_text text = {.bytes = ""};
    bool refused = false;
    int code =
        nvme_controller_connect_queue(&association->config, &association->admin, link->qid,
                                      link->command_count, &deadline, &connection, &refused, &text);
    refused = refused && refusal_is_final(association);
    (void)pthread_mutex_lock(&association->lock);
    if (code == 0) {
        connection->incarnation = atomic_load(&association->incarnation);
        link->connection = connection;
        link->needs_connection = false;
        link->was_connected = true;
        link->backoff_ms = 0;
        nvme_link_signal(link);
        (void)pthread_cond_broadcast(&association->changed);
    } else if (code != DLFS_E_CLOSED && !link->released) {
        link_connect_failed(association, link, code, refused, text.bytes);
    }
    nvme_link_connect_end(association, link);
    (void)pthread_mutex_unlock(&association->lock);
}

/*
 * Returns the link to connect now, marked as connecting. If there is none, returns NULL and lowers
 * *next_ns to the time of the next attempt. With the lock held.
 */
static struct nvme_link *next_link(struct nvme_association *association, uint64_t *next_ns)
{
    uint64_t now = monotonic_ns();
    for (struct nvme_link *link = association->links; link != NULL; link = link->next) {
        if (!link->needs_connection || link->code < 0) {
            continue;
        }
        if (link->retry_at_ns > now) {
            *next_ns = link->retry_at_ns < *next_ns ? link->retry_at_ns : *next_ns;
            continue;
        }
        if (association->admin.queue_count_max == 0) {
            fail_link(association, link, -ENOTSUP);
        } else if (!choose_qid(association, link)) {
            nvme_text_format(&association->error, "the target allows %u queue pairs at once",
                             association->admin.queue_count_max);
            fail_link(association, link, DLFS_E_LIMIT);
        } else {
            link->connecting = true;
            return link;
        }
    }
    return NULL;
}

/* ---- serving --------------------------------------------------------------------------------- */

/* Returns true if a command may be sent again although the controller may have executed it. */
static bool is_idempotent(const struct nvme_admin_request *request)
{
    uint8_t opcode = request->exchange->entry[0];
    return opcode == NVME_ADMIN_IDENTIFY || opcode == NVME_ADMIN_GET_LOG_PAGE ||
           opcode == NVME_ADMIN_GET_FEATURES;
}

/* Authenticates the admin queue anew, with the present keys. */
static int authenticate(struct nvme_association *association)
{
    const struct nvme_config *config = &association->config;
    struct nvme_deadline deadline = nvme_association_deadline(association, config->connect_ms);
    struct nvme_text text = {.bytes = ""};
    int code = nvme_authenticate(association->admin.connection, config,
                                 config->concat ? NVME_CHANNEL_REPLACE : NVME_CHANNEL_NONE,
                                 &deadline, &text);
    association->authenticated_ns = monotonic_ns();
    code = code == NVME_AUTH_CLOSED ? DLFS_E_LOST : code; /* connecting again tells why */
    if (code < 0 && code != DLFS_E_CLOSED) {
        nvme_association_fail(association, code, false, text.bytes);
    }
    return code;
}

static void run_request(struct nvme_association *association, struct nvme_admin_request *request)
{
    if (request->authenticate) {
        int result = authenticate(association);
        (void)pthread_mutex_lock(&association->lock);
        request->code = result;
        request->state = NVME_REQUEST_DONE;
        (void)pthread_cond_broadcast(&association->changed);
        (void)pthread_mutex_unlock(&association->lock);
        return;
    }
    struct nvme_deadline deadline =
        nvme_association_deadline(association, association->config.timeout_ms);
    struct nvme_text text;
    int code = nvme_connection_run(association->admin.connection, request->exchange, &deadline,
                                   NULL, &text);
    (void)pthread_mutex_lock(&association->lock);
    if (code < 0 && code != DLFS_E_CLOSED) {
        nvme_fail_incarnation(association, code, text.bytes);
    }
    if (code < 0 && code != DLFS_E_CLOSED && is_idempotent(request) && !request->no_retry) {
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
    struct nvme_deadline deadline =
        nvme_association_deadline(association, association->config.timeout_ms);
    struct nvme_text text;
    int code = nvme_controller_keep_alive(&association->admin, &deadline, &text);
    association->keep_alive_ns = monotonic_ns();
    if (code < 0 && code != DLFS_E_CLOSED) {
        nvme_association_fail(association, code == DLFS_E_TIMEOUT ? code : DLFS_E_LOST, false,
                              text.bytes);
    }
}

/* Receives events on the admin connection, which is idle, and notices its end. */
static void check_admin_socket(struct nvme_association *association)
{
    const char *reason = "";
    int code = nvme_connection_receive_event(association->admin.connection, &reason);
    if (code < 0) {
        nvme_association_fail(association, code, false, reason);
    }
}

static uint64_t authentication_due_ns(const struct nvme_association *association)
{
    uint64_t period_ns = association->config.reauth_s * UINT64_C(1000000000);
    bool has_key = association->config.dhchap_key[0] != '\0';
    return has_key && period_ns > 0 ? association->authenticated_ns + period_ns : UINT64_MAX;
}

static uint64_t keep_alive_due_ns(const struct nvme_association *association)
{
    const struct nvme_config *config = &association->config;
    /* Half of the timeout, so that one late keep-alive does not end the controller. */
    uint64_t period_ns = config->keepalive_ms * NVME_NANOSECONDS_PER_MS / 2;
    return period_ns > 0 ? association->keep_alive_ns + period_ns : UINT64_MAX;
}

/* Handles an event, if there is one, and a failure, else sends a due keep-alive, else runs an admin
 * command, else connects a link, else sleeps. At most one event is handled in a call, so that many
 * events delay nothing else. Authentications are due as keep-alives are. */
static void serve_one(struct nvme_association *association)
{
    nvme_watch_serve(association);
    uint64_t until_ns = keep_alive_due_ns(association);
    uint64_t authentication_ns = authentication_due_ns(association);
    bool keeps_alive = until_ns <= authentication_ns;
    until_ns = keeps_alive ? until_ns : authentication_ns;
    bool due = monotonic_ns() >= until_ns;
    until_ns = association->probe_ns < until_ns ? association->probe_ns : until_ns;
    struct nvme_link *link = NULL;
    (void)pthread_mutex_lock(&association->lock);
    if (association->failure < 0) {
        bool gone = association->namespace_gone;
        nvme_association_end_incarnation(association);
        if (gone) {
            declare_lost(association, DLFS_E_LOST);
        }
        (void)pthread_mutex_unlock(&association->lock);
        return;
    }
    struct nvme_admin_request *request = due ? NULL : association->requests;
    if (due) {
        /* Keep-alives and authentications come before requests and links. */
    } else if (request != NULL) {
        association->requests = request->next;
        request->state = NVME_REQUEST_RUNNING;
    } else {
        link = next_link(association, &until_ns);
    }
    (void)pthread_mutex_unlock(&association->lock);
    if (due && keeps_alive) {
        keep_alive(association);
    } else if (due) {
        (void)authenticate(association);
    } else if (request != NULL) {
        run_request(association, request);
    } else if (link != NULL) {
        link_connect(association, link);
    } else if (!association->admin.connection->event_arrived) {
        if (!nvme_connection_has_buffered(association->admin.connection)) {
            sleep_until(association, association->admin.connection->descriptor, until_ns);
        }
        check_admin_socket(association);
    }
}

static void *thread_main(void *argument)
{
    struct nvme_association *association = argument;
    while (!atomic_load(&association->stop)) {
        nvme_paths_take_new(association);
        (void)pthread_mutex_lock(&association->lock);
        enum nvme_state state = association->state;
        bool single_round = association->single_round;
        (void)pthread_mutex_unlock(&association->lock);
        if (state == NVME_READY) {
            serve_one(association);
        } else if (state == NVME_CONNECTING) {
            reconnect(association, single_round);
        } else {
            sleep_until(association, -1, UINT64_MAX);
        }
    }
    if (association->admin.connection != NULL) {
        /* The shutdown has a stop flag of its own: the thread's is set already. */
        atomic_bool never = false;
        struct nvme_deadline deadline = nvme_association_deadline(association, SHUTDOWN_MS);
        deadline.stop = &never;
        nvme_controller_shut_down(&association->admin, &deadline);
    }
    nvme_association_thread_ended(association);
    return NULL;
}

int nvme_association_start(struct nvme_association *association, bool single_round)
{
    association->single_round = single_round;
    association->disconnected_ns = monotonic_ns();
    int code = thread_start(&association->thread, NULL, thread_main, association);
    (void)pthread_mutex_lock(&association->lock);
    association->thread_started = code == 0;
    if (code < 0) {
        association->state = NVME_LOST;
        association->lost_code = code;
        association->lost_ns = UINT64_MAX; /* never tried again: there is no thread to do it */
        nvme_text_format(&association->error, "start a thread: %s", dlfs_strerror(code));
        (void)pthread_cond_broadcast(&association->changed);
    }
    (void)pthread_mutex_unlock(&association->lock);
    return code;
}
