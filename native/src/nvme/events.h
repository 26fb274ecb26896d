/*
 * Asynchronous events of one controller: enables them, and reads the logs that they point to. The
 * controller reports a change by completing an Asynchronous Event Request.
 *
 * One request is outstanding. It is sent again as soon as it was completed, before the log is read:
 * a controller retains events while it has no request, and reports no second event of a kind before
 * the log of the first was read. More requests would bring no event earlier.
 *
 * Threads: one at a time, the one that uses the admin queue.
 */
#ifndef DLFS_NVME_EVENTS_H
#define DLFS_NVME_EVENTS_H

#include "nvme/controller.h"

/*
 * Enables the events of a new controller, sends the first request and reads the namespace's ANA
 * state. A controller that offers no events, or refuses to report them, is used without.
 */
int nvme_events_start(struct nvme_admin *admin, const struct nvme_deadline *deadline,
                      struct nvme_text *text);
/*
 * Reads the Changed Namespace List, which permits the next event of that kind. *changed is true if
 * a namespace is in it, or if the controller does not have the log.
 */
int nvme_events_read_namespaces(struct nvme_admin *admin, uint32_t nsid, bool *changed,
                                const struct nvme_deadline *deadline, struct nvme_text *text);
/* Reads the health log, which permits the next event of that kind. *warnings: its critical warnings
 * as bits; 0 if the controller does not have the log. */
int nvme_events_read_health(struct nvme_admin *admin, uint8_t *warnings,
                            const struct nvme_deadline *deadline, struct nvme_text *text);
/* Reads the ANA log, which permits the next event of that kind, and changes admin->ana_state. */
int nvme_events_read_ana(struct nvme_admin *admin, const struct nvme_deadline *deadline,
                         struct nvme_text *text);

#endif
