/*
 * Handles what a controller reports while an association is in use: the namespace grew, shrank,
 * became read-only or went away; its ANA state changed; the controller's health.
 *
 * A namespace that shrank, went away or is another one now ends all operations with DLFS_E_LOST at
 * once. The device goes on when the next operation, a second later or more, finds it again.
 */
#ifndef DLFS_NVME_WATCH_H
#define DLFS_NVME_WATCH_H

#include "nvme/association.h"

/* Handles one event, an ANA status of a command, and a look for an optimized path that is due. Does
 * nothing if there is none. Called by the association's thread while a controller is connected. */
void nvme_watch_serve(struct nvme_association *association);

#endif
