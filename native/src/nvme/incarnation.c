/* The end of an incarnation, the pauses before reconnects, and deadlines; see nvme/association.h.
 */
#include "nvme/association.h"
#include "platform/clock.h"

#define BACKOFF_MS_MIN 10u
#define BACKOFF_MS_MAX 1000u
/* A connection that lasted this many times the last pause was stable: the pauses start anew. */
#define STABLE_FACTOR 4u

struct nvme_deadline nvme_association_deadline(struct nvme_association *association, uint64_t ms)
{
    return (struct nvme_deadline){.until_ns = monotonic_ns() + ms * NVME_NANOSECONDS_PER_MS,
                                  .wake = association->wake,
                                  .stop = &association->stop};
}

uint32_t nvme_next_backoff_ms(uint32_t backoff_ms)
{
    uint32_t next = backoff_ms * 2;
    return next < BACKOFF_MS_MIN ? BACKOFF_MS_MIN : next > BACKOFF_MS_MAX ? BACKOFF_MS_MAX : next;
}

void nvme_association_end_incarnation(struct nvme_association *association)
{
    uint64_t now = monotonic_ns();
    bool timed_out = association->failure == DLFS_E_TIMEOUT;
    association->failure = 0;
    association->namespace_gone = false;
    association->check_ana = false;
    association->state = NVME_CONNECTING;
    association->single_round = false;
    association->disconnected_ns = now;
    atomic_fetch_add(&association->incarnation, 1);
    atomic_store(&association->writes_paused, false);
    nvme_connection_drop(&association->admin.connection);
    uint64_t lived_ms = (now - association->connected_ns) / NVME_NANOSECONDS_PER_MS;
    if (lived_ms > (uint64_t)STABLE_FACTOR * association->backoff_ms + BACKOFF_MS_MIN) {
        association->backoff_ms = 0;
    } else {
        association->backoff_ms = nvme_next_backoff_ms(association->backoff_ms);
    }
    for (struct nvme_link *link = association->links; link != NULL; link = link->next) {
        nvme_connection_drop(&link->connection);
        link->timed_out = link->timed_out || timed_out;
        link->needs_connection = true;
        link->since_ns = now;
        link->retry_at_ns = 0;
        link->backoff_ms = 0;
        nvme_link_signal(link);
    }
    (void)pthread_cond_broadcast(&association->changed);
}
