/*
 * Chooses the path of an association: connects a controller over each path and uses the first one
 * whose ANA state is optimized or not reported, else the first that is non-optimized. A path in any
 * other state is not used.
 *
 * One path is used at a time. While that is a non-optimized one, the thread connects to another
 * path now and then, and moves to it when it is optimized.
 */
#ifndef DLFS_NVME_PATHS_H
#define DLFS_NVME_PATHS_H

#include "nvme/association.h"

/*
 * Tries every path once and publishes the best controller. Returns 0, DLFS_E_CLOSED, or the first
 * path's error; the association's error message names all paths and their ANA states.
 */
int nvme_paths_connect(struct nvme_association *association);
/* Takes new paths for the next round of attempts, if there are any. The present one is kept. */
void nvme_paths_take_new(struct nvme_association *association);
/* Plans the next look for an optimized path after the present one's ANA state has changed. */
void nvme_paths_plan_probe(struct nvme_association *association);
/* Connects to one other path and moves to it if it is optimized. */
void nvme_paths_probe(struct nvme_association *association);
/*
 * Checks that a namespace is the one from before, and not smaller. Returns 0, or DLFS_E_LOST with a
 * message.
 */
int nvme_check_same(const struct nvme_namespace *before, const struct nvme_namespace *now,
                    uint32_t nsid, struct nvme_text *text);
/*
 * Keeps commands other than reads from being issued and waits up to ms until none is in flight.
 * Returns true if that is so. Clearing writes_paused permits them again, as the next controller
 * does.
 */
bool nvme_paths_pause_writes(struct nvme_association *association, uint64_t ms);

#endif
