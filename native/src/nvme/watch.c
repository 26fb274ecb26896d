/* Handles what a controller reports; see nvme/watch.h. */
#include "nvme/watch.h"

#include <inttypes.h>
#include <stdio.h>

#include "nvme/events.h"
#include "nvme/paths.h"
#include "platform/clock.h"

/* Longest wait for answers to write commands on a path that becomes inaccessible. A write without
 * an answer has to wait until the controller has quiesced. */
#define FAILOVER_DRAIN_MS 100u

/* Describes the event in the status and counts it. */
static void note_event(struct nvme_association *association, uint32_t event)
{
    (void)pthread_mutex_lock(&association->lock);
    (void)snprintf(association->event, sizeof association->event, "%s (0x%06" PRIx32 ")",
                   nvme_event_phrase(event), event);
    (void)pthread_mutex_unlock(&association->lock);
    atomic_fetch_add(&association->counters.events[nvme_event_kind(event)], 1);
}

/* ---- the namespace --------------------------------------------------------------------------- */

/* Identifies the namespace again. Returns an error of the connection only. */
static int check_namespace(struct nvme_association *association,
                           const struct nvme_deadline *deadline, struct nvme_text *text)
{
    const struct nvme_config *config = &association->config;
    struct nvme_admin found = association->admin;
    int code = nvme_controller_identify_namespace(config, &found, deadline, text);
    if (code < 0 && found.connection->unusable) {
        return code;
    }
    if (code == 0) {
        code = nvme_check_same(&association->admin.ns, &found.ns, config->nsid, text);
    }
    if (code < 0) {
        nvme_association_fail(association, DLFS_E_LOST, true, text->bytes);
        return 0;
    }
    atomic_store(&association->write_protected, found.ns.write_protected);
    (void)pthread_mutex_lock(&association->lock);
    association->namespace_bytes = found.ns.size_bytes;
    association->check_ana |= found.ns.ana_group != association->admin.ns.ana_group;
    association->admin.ns.ana_group = found.ns.ana_group;
    (void)pthread_mutex_unlock(&association->lock);
    return 0;
}

static int on_namespace(struct nvme_association *association, const struct nvme_deadline *deadline,
                        struct nvme_text *text)
{
    uint32_t nsid = association->config.nsid;
    bool changed = false;
    int code = nvme_events_read_namespaces(&association->admin, nsid, &changed, deadline, text);
    if (code == 0 && changed && nsid != 0) {
        code = check_namespace(association, deadline, text);
    }
    return code;
}

/* ---- ANA ------------------------------------------------------------------------------------- */

/* Ends the incarnation, so that another path is tried first. */
static void leave_path(struct nvme_association *association, uint32_t state)
{
    char reason[128];
    (void)snprintf(reason, sizeof reason, "the namespace's ANA state is %s (group %u)",
                   nvme_ana_word(state), association->admin.ns.ana_group);
    (void)nvme_paths_pause_writes(association, FAILOVER_DRAIN_MS);
    association->first_path = (association->path + 1) % association->config.path_count;
    nvme_association_fail(association, DLFS_E_LOST, false, reason);
}

/* Reads the ANA state of the path in use, and leaves the path if another may be better. */
static int check_ana(struct nvme_association *association, const struct nvme_deadline *deadline,
                     struct nvme_text *text)
{
    struct nvme_admin found = association->admin;
    int before = nvme_ana_rank(found.ana_state);
    int code = nvme_events_read_ana(&found, deadline, text);
    if (code < 0) {
        return code;
    }
    (void)pthread_mutex_lock(&association->lock);
    association->admin.ana_state = found.ana_state;
    association->check_ana = false;
    (void)pthread_mutex_unlock(&association->lock);
    int now = nvme_ana_rank(found.ana_state);
    if (now == NVME_RANK_UNUSABLE) {
        leave_path(association, found.ana_state);
    } else if (now != before) {
        nvme_paths_plan_probe(association);
    }
    return 0;
}

/* ---- serving --------------------------------------------------------------------------------- */

static int on_health(struct nvme_association *association, const struct nvme_deadline *deadline,
                     struct nvme_text *text)
{
    uint8_t warnings = 0;
    int code = nvme_events_read_health(&association->admin, &warnings, deadline, text);
    (void)pthread_mutex_lock(&association->lock);
    association->health_warnings = warnings;
    (void)pthread_mutex_unlock(&association->lock);
    return code;
}

static int on_event(struct nvme_association *association, const struct nvme_deadline *deadline,
                    struct nvme_text *text)
{
    struct nvme_connection *connection = association->admin.connection;
    uint32_t event = connection->event;
    connection->event_arrived = false;
    note_event(association, event);
    int code = nvme_connection_request_event(connection, deadline, text);
    if (code < 0) {
        return code;
    }
    switch (nvme_event_kind(event)) {
    case NVME_EVENT_NAMESPACE:
        return on_namespace(association, deadline, text);
    case NVME_EVENT_ANA:
        return check_ana(association, deadline, text);
    case NVME_EVENT_HEALTH:
        return on_health(association, deadline, text);
    default:
        return 0;
    }
}

void nvme_watch_serve(struct nvme_association *association)
{
    struct nvme_text text = {.bytes = ""};
    int code = 0;
    struct nvme_deadline deadline =
        nvme_association_deadline(association, association->config.timeout_ms);
    (void)pthread_mutex_lock(&association->lock);
    bool failed = association->failure < 0;
    bool ana = association->check_ana;
    (void)pthread_mutex_unlock(&association->lock);
    if (failed) {
        return;
    }
    if (association->admin.connection->event_arrived) {
        code = on_event(association, &deadline, &text);
    } else if (ana) {
        code = check_ana(association, &deadline, &text);
    } else if (monotonic_ns() >= association->probe_ns) {
        nvme_paths_probe(association);
    }
    if (code < 0 && code != DLFS_E_CLOSED) {
        nvme_association_fail(association, code, false, text.bytes);
    }
}
