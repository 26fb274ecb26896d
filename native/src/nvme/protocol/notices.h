/*
 * Decodes what a controller reports about changes: asynchronous events, the Changed Namespace List,
 * the health log and the Asymmetric Namespace Access (ANA) log. No I/O.
 *
 * A group of namespaces has one ANA state on each controller. The state says whether I/O commands
 * for them are served through that controller, and how well.
 *
 * Source: NVM Express Base Specification 2.0, sections 5.2 (events), 5.16.1 (log pages 02h, 04h,
 * 0Ch), 5.27.1.8 (feature 0Bh), 8.1 (ANA).
 */
#ifndef DLFS_NVME_NOTICES_H
#define DLFS_NVME_NOTICES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dlfs/nvme.h"

#define NVME_LOG_HEALTH 0x02u
#define NVME_LOG_NAMESPACES 0x04u
#define NVME_LOG_ANA 0x0Cu
#define NVME_LOG_HEALTH_BYTES 512u
#define NVME_LOG_NAMESPACES_BYTES 4096u
#define NVME_LOG_ANA_HEADER_BYTES 16u
#define NVME_LOG_ANA_GROUP_BYTES 32u /* without the list of namespaces */

/* Bits of OAES (Identify Controller) and of feature 0Bh. */
#define NVME_NOTICE_HEALTH 0x0000001Fu /* critical warnings; not part of OAES */
#define NVME_NOTICE_NAMESPACE 0x00000100u
#define NVME_NOTICE_FIRMWARE 0x00000200u
#define NVME_NOTICE_ANA 0x00000800u
#define NVME_NOTICE_DISCOVERY 0x80000000u

enum nvme_event_kind {
    NVME_EVENT_OTHER, /* an error, or an event that this initiator did not enable */
    NVME_EVENT_NAMESPACE,
    NVME_EVENT_ANA,
    NVME_EVENT_DISCOVERY,
    NVME_EVENT_HEALTH,
    NVME_EVENT_FIRMWARE,
    NVME_EVENT_KINDS,
};

/* Returns the events to enable of those that a controller offers; 0: none. */
uint32_t nvme_notices_choose(uint32_t offered, bool discovery);
/* Returns the kind of an event. event: dword 0 of the request's completion. */
enum nvme_event_kind nvme_event_kind(uint32_t event);
/* Returns a phrase such as "namespace attribute changed"; never NULL. */
const char *nvme_event_phrase(uint32_t event);

/*
 * Returns true if the Changed Namespace List has a namespace, or is too short for all changes.
 * Bytes after the last namespace of the list are not read.
 */
bool nvme_namespace_changed(const uint8_t *data, size_t bytes, uint32_t nsid);

/*
 * Decodes the state of a group in the ANA log; DLFS_NVME_ANA_NONE if the group is not in it. bytes:
 * the part of the log that was read; a group that reaches beyond it ends the search. Errors:
 * DLFS_E_PROTOCOL for a state without a meaning, with *reason.
 */
int nvme_decode_ana(const uint8_t *data, size_t bytes, uint32_t group, uint32_t *state,
                    const char **reason);
/* Returns a word such as "optimized"; never NULL. */
const char *nvme_ana_word(uint32_t state);
/* Returns the rank of a path by its state: 0 is the best, NVME_RANK_UNUSABLE serves no I/O. */
#define NVME_RANK_UNUSABLE 2
int nvme_ana_rank(uint32_t state);

#endif
