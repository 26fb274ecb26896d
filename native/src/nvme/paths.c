/* Chooses the path of an association; see nvme/paths.h. */
#include "nvme/paths.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "platform/clock.h"

/* Pauses between looks for an optimized path. They bound how often an association moves back. */
#define PROBE_MS_MIN 1000u
#define PROBE_MS_MAX 16000u
/* Longest attempt to connect during a look, in which the thread does nothing else. */
#define PROBE_CONNECT_MS 1000u
/* Longest wait for write commands in flight before a voluntary move. */
#define DRAIN_MS 200u
#define DRAIN_STEP_MS 1u

/* A controller that may be used. */
struct candidate {
    struct nvme_admin admin; /* without a connection: there is none */
    uint32_t path;
    int rank;
};

int nvme_check_same(const struct nvme_namespace *before, const struct nvme_namespace *now,
                    uint32_t nsid, struct nvme_text *text)
{
    if (before->block_bytes != now->block_bytes || before->id_kind != now->id_kind ||
        memcmp(before->id, now->id, sizeof now->id) != 0) {
        nvme_text_format(text, "namespace %u is another one now", nsid);
        return DLFS_E_LOST;
    }
    if (now->size_bytes < before->size_bytes) {
        nvme_text_format(text, "namespace %u shrank from %" PRIu64 " to %" PRIu64 " bytes", nsid,
                         before->size_bytes, now->size_bytes);
        return DLFS_E_LOST;
    }
    return 0;
}

/* Checks the namespace of a new controller. best: a controller of the same round, or none. */
static int check_namespace(const struct nvme_association *association, const struct candidate *best,
                           const struct nvme_admin *found, struct nvme_text *text)
{
    const struct nvme_config *config = &association->config;
    if (association->connected_ns != 0) {
        return nvme_check_same(&association->admin.ns, &found->ns, config->nsid, text);
    }
    if (config->writable && found->ns.write_protected) {
        nvme_text_format(text, "namespace %u of %s: it is write-protected", config->nsid,
                         config->subsystem_nqn);
        return -EROFS;
    }
    return best->admin.connection == NULL
               ? 0
               : nvme_check_same(&best->admin.ns, &found->ns, config->nsid, text);
}

/* Connects to one of a path's addresses. Returns 0, or the first address's error. */
static int connect_path(struct nvme_association *association, const struct candidate *best,
                        uint32_t number, uint32_t connect_ms, struct nvme_admin *admin,
                        struct nvme_text *text)
{
    const struct nvme_config *config = &association->config;
    struct nvme_address addresses[NVME_ADDRESSES_MAX];
    struct nvme_deadline resolving = nvme_association_deadline(association, connect_ms);
    int count = nvme_resolve(&config->paths[number], &resolving, addresses, text);
    int first_code = count < 0 ? count : 0;
    for (int i = 0; i < count; i++) {
        struct nvme_text why = {.bytes = ""};
        struct nvme_deadline deadline = nvme_association_deadline(association, connect_ms);
        int code = nvme_controller_open(config, &addresses[i], &deadline, admin, &why);
        if (code == 0) {
            code = check_namespace(association, best, admin, &why);
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
    uint64_t size_bytes = association->admin.ns.size_bytes;
    if (association->connected_ns != 0) {
        atomic_fetch_add(&association->counters.reconnects, 1);
        atomic_fetch_add(&association->counters.path_moves, path != association->path);
    }
    atomic_store(&association->write_protected, admin->ns.write_protected);
    (void)pthread_mutex_lock(&association->lock);
    association->admin = *admin;
    association->config.was_connected = true;
    if (admin->connection != NULL && admin->connection->tls != NULL) {
        association->config.tls_identity = admin->connection->tls_identity;
    }
    association->namespace_bytes = admin->ns.size_bytes;
    if (association->connected_ns != 0) {
        association->admin.ns.size_bytes = size_bytes; /* a device does not grow while open */
    }
    association->path = path;
    association->state = NVME_READY;
    association->connected_ns = now;
    association->keep_alive_ns = now;
    association->authenticated_ns = now;
    (void)pthread_cond_broadcast(&association->changed);
    (void)pthread_mutex_unlock(&association->lock);
    association->first_path = 0;
    association->probe_ms = PROBE_MS_MIN;
    nvme_paths_plan_probe(association);
}

/* ---- a round of attempts --------------------------------------------------------------------- */

/* Adds the reason why a path is not used to the message of a round. */
static void add_failure(struct nvme_text *failures, const struct nvme_path *path,
                        const struct nvme_text *text)
{
    size_t length = strlen(failures->bytes);
    (void)snprintf(failures->bytes + length, sizeof failures->bytes - length, "%sconnect %s:%u: %s",
                   length > 0 ? "; " : "", path->host, path->port, text->bytes);
}

/* Keeps a new controller if it is better than the best one so far. Returns 0, or why it is never
 * used. */
static int consider(struct candidate *best, const struct nvme_admin *admin, uint32_t path,
                    struct nvme_text *text)
{
    int rank = nvme_ana_rank(admin->ana_state);
    if (rank < best->rank) {
        nvme_connection_abort(best->admin.connection, false);
        *best = (struct candidate){.admin = *admin, .path = path, .rank = rank};
        return 0;
    }
    nvme_connection_abort(admin->connection, false);
    if (rank < NVME_RANK_UNUSABLE) {
        return 0;
    }
    nvme_text_format(text, "the namespace's ANA state is %s (group %u)",
                     nvme_ana_word(admin->ana_state), admin->ns.ana_group);
    return DLFS_E_LOST;
}

/*
 * Returns the code that says more of two failed paths, of which found may be 0: a path that may
 * answer later outweighs one that refused this host, or does not know the subsystem now. But a key
 * that is wrong on one path is wrong on the others.
 */
static int weigh(int found, int code)
{
    bool may_return = code == DLFS_E_LOST || code == DLFS_E_TIMEOUT;
    bool gives_way = found != DLFS_E_LOST && found != DLFS_E_TIMEOUT && found != DLFS_E_AUTH;
    return found == 0 || (may_return && gives_way) ? code : found;
}

int nvme_paths_connect(struct nvme_association *association)
{
    int failure = 0;
    uint32_t count = association->config.path_count;
    uint32_t changing = 0;
    struct nvme_text failures = {.bytes = ""};
    struct candidate best = {.rank = NVME_RANK_UNUSABLE};
    association->transition_ms = 0;
    for (uint32_t i = 0; i < count && best.rank > 0; i++) {
        uint32_t number = (association->first_path + i) % count;
        struct nvme_admin admin = {.connection = NULL};
        struct nvme_text text = {.bytes = ""};
        int code =
            connect_path(association, &best, number, association->config.connect_ms, &admin, &text);
        if (code == 0) {
            changing += admin.ana_state == DLFS_NVME_ANA_CHANGE;
            uint32_t limit_ms = admin.controller.ana_transition_ms;
            code = consider(&best, &admin, number, &text);
            if (code < 0 && limit_ms > association->transition_ms) {
                association->transition_ms = limit_ms;
            }
        }
        if (code == DLFS_E_CLOSED) {
            nvme_connection_abort(best.admin.connection, false);
            return code;
        }
        if (code < 0) {
            failure = weigh(failure, code);
            add_failure(&failures, &association->config.paths[number], &text);
        }
    }
    if (changing < count) {
        association->transition_ms = 0;
    }
    if (best.admin.connection != NULL) {
        publish(association, &best.admin, best.path);
        return 0;
    }
    (void)pthread_mutex_lock(&association->lock);
    association->error = failures;
    (void)pthread_mutex_unlock(&association->lock);
    return failure;
}

static bool same_path(const struct nvme_path *one, const struct nvme_path *other)
{
    return one->port == other->port && strcmp(one->host, other->host) == 0;
}

/* Replaces the paths. With the lock held, since others read the present path for messages. */
static void replace_paths(struct nvme_association *association)
{
    struct nvme_config *config = &association->config;
    struct nvme_path present = config->paths[association->path];
    uint32_t count = association->new_path_count;
    uint32_t index = 0;
    while (index < count && !same_path(&association->new_paths[index], &present)) {
        index++;
    }
    if (index == DLFS_NVME_PATHS_MAX) {
        index--; /* the present path takes the place of the last one */
    }
    memcpy(config->paths, association->new_paths, sizeof config->paths);
    config->paths[index] = present;
    config->path_count = index < count ? count : index + 1;
    association->path = index;
    association->new_path_count = 0;
    association->first_path = 0;
    association->probe_path = 0;
}

void nvme_paths_take_new(struct nvme_association *association)
{
    (void)pthread_mutex_lock(&association->lock);
    bool ready = association->state == NVME_READY;
    bool found = association->new_path_count > 0;
    if (found) {
        replace_paths(association);
    }
    (void)pthread_mutex_unlock(&association->lock);
    if (found && ready) {
        nvme_paths_plan_probe(association);
    }
}

/* ---- moving to an optimized path ------------------------------------------------------------- */

bool nvme_paths_pause_writes(struct nvme_association *association, uint64_t ms)
{
    uint64_t until_ns = monotonic_ns() + ms * NVME_NANOSECONDS_PER_MS;
    atomic_store(&association->writes_paused, true);
    while (atomic_load(&association->writes_in_flight) > 0 && monotonic_ns() < until_ns) {
        struct nvme_deadline step = nvme_association_deadline(association, DRAIN_STEP_MS);
        if (nvme_wait(&step, -1, 0) != DLFS_E_TIMEOUT) {
            break;
        }
    }
    return atomic_load(&association->writes_in_flight) == 0;
}

void nvme_paths_plan_probe(struct nvme_association *association)
{
    association->probe_ns = UINT64_MAX;
    if (association->config.path_count > 1 && nvme_ana_rank(association->admin.ana_state) > 0) {
        association->probe_ns = monotonic_ns() + association->probe_ms * NVME_NANOSECONDS_PER_MS;
    }
}

/*
 * Moves to a controller that was just connected. Returns false, and does nothing, while a write has
 * no answer or no flush covers it yet: moving would make the write wait, or its flush fail.
 */
static bool move(struct nvme_association *association, const struct nvme_admin *admin,
                 uint32_t path)
{
    struct nvme_durability *durability = &association->durability;
    if (pthread_mutex_trylock(&durability->flush_lock) != 0) {
        return false;
    }
    bool moves = nvme_paths_pause_writes(association, DRAIN_MS) &&
                 atomic_load(&durability->unflushed) == UINT64_MAX;
    if (moves) {
        (void)pthread_mutex_lock(&association->lock);
        nvme_association_end_incarnation(association);
        (void)pthread_mutex_unlock(&association->lock);
        association->backoff_ms = 0; /* nothing has failed */
        publish(association, admin, path);
    }
    atomic_store(&association->writes_paused, false);
    (void)pthread_mutex_unlock(&durability->flush_lock);
    return moves;
}

void nvme_paths_probe(struct nvme_association *association)
{
    const struct nvme_config *config = &association->config;
    struct candidate none = {.rank = NVME_RANK_UNUSABLE};
    struct nvme_admin admin = {.connection = NULL};
    struct nvme_text ignored;
    uint32_t connect_ms =
        config->connect_ms < PROBE_CONNECT_MS ? config->connect_ms : PROBE_CONNECT_MS;
    do {
        association->probe_path = (association->probe_path + 1) % config->path_count;
    } while (association->probe_path == association->path);
    uint32_t path = association->probe_path;
    int code = connect_path(association, &none, path, connect_ms, &admin, &ignored);
    bool better = code == 0 && nvme_ana_rank(admin.ana_state) == 0;
    if (better && move(association, &admin, path)) {
        return;
    }
    if (code == 0) {
        nvme_connection_abort(admin.connection, false);
    }
    association->probe_ms =
        association->probe_ms * 2 < PROBE_MS_MAX ? association->probe_ms * 2 : PROBE_MS_MAX;
    nvme_paths_plan_probe(association);
}
