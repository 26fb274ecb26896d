/* Decodes events, the Changed Namespace List and the ANA log; see nvme/protocol/notices.h. */
#include "nvme/protocol/notices.h"

#include "dlfs/dlfs.h"
#include "nvme/protocol/pdu.h"

#define TYPE_HEALTH 1u
#define TYPE_NOTICE 2u
#define INFO_NAMESPACE 0x00u
#define INFO_FIRMWARE 0x01u
#define INFO_ANA 0x03u
#define INFO_DISCOVERY 0xF0u
/* The only entry of a Changed Namespace List that is too short for all changes. */
#define NAMESPACES_TOO_MANY 0xFFFFFFFFu
#define ANA_STATE 0x0Fu

uint32_t nvme_notices_choose(uint32_t offered, bool discovery)
{
    if (discovery) {
        return offered & NVME_NOTICE_DISCOVERY;
    }
    uint32_t notices = offered & (NVME_NOTICE_NAMESPACE | NVME_NOTICE_FIRMWARE | NVME_NOTICE_ANA);
    return notices != 0 ? notices | NVME_NOTICE_HEALTH : 0;
}

enum nvme_event_kind nvme_event_kind(uint32_t event)
{
    uint32_t type = event & 7;
    if (type == TYPE_HEALTH) {
        return NVME_EVENT_HEALTH;
    }
    if (type != TYPE_NOTICE) {
        return NVME_EVENT_OTHER;
    }
    switch (event >> 8 & 0xFF) {
    case INFO_NAMESPACE:
        return NVME_EVENT_NAMESPACE;
    case INFO_FIRMWARE:
        return NVME_EVENT_FIRMWARE;
    case INFO_ANA:
        return NVME_EVENT_ANA;
    case INFO_DISCOVERY:
        return NVME_EVENT_DISCOVERY;
    default:
        return NVME_EVENT_OTHER;
    }
}

const char *nvme_event_phrase(uint32_t event)
{
    static const char *const phrases[] = {
        [NVME_EVENT_OTHER] = "other event",
        [NVME_EVENT_NAMESPACE] = "namespace attribute changed",
        [NVME_EVENT_ANA] = "asymmetric namespace access changed",
        [NVME_EVENT_DISCOVERY] = "discovery log changed",
        [NVME_EVENT_HEALTH] = "health warning",
        [NVME_EVENT_FIRMWARE] = "firmware activation starting",
    };
    return phrases[nvme_event_kind(event)];
}

bool nvme_namespace_changed(const uint8_t *data, size_t bytes, uint32_t nsid)
{
    for (size_t at = 0; at + 4 <= bytes; at += 4) {
        uint32_t entry = nvme_get32(data + at);
        if (entry == 0) {
            return false;
        }
        if (entry == nsid || entry == NAMESPACES_TOO_MANY) {
            return true;
        }
    }
    return false;
}

/* ---- ANA ------------------------------------------------------------------------------------- */

static const char *const state_words[ANA_STATE + 1] = {
    [DLFS_NVME_ANA_OPTIMIZED] = "optimized",
    [DLFS_NVME_ANA_NON_OPTIMIZED] = "non-optimized",
    [DLFS_NVME_ANA_INACCESSIBLE] = "inaccessible",
    [DLFS_NVME_ANA_PERSISTENT_LOSS] = "persistent loss",
    [DLFS_NVME_ANA_CHANGE] = "change",
};

int nvme_decode_ana(const uint8_t *data, size_t bytes, uint32_t group, uint32_t *state,
                    const char **reason)
{
    uint32_t found = DLFS_NVME_ANA_NONE;
    uint32_t left = bytes >= NVME_LOG_ANA_HEADER_BYTES ? nvme_get16(data + 8) : 0;
    size_t at = NVME_LOG_ANA_HEADER_BYTES;
    for (; left > 0 && bytes - at >= NVME_LOG_ANA_GROUP_BYTES; left--) {
        const uint8_t *entry = data + at;
        if (nvme_get32(entry) == group) {
            uint8_t value = entry[16] & ANA_STATE;
            if (state_words[value] == NULL) {
                return nvme_protocol_error(reason, "the ANA log has a group in an unknown state");
            }
            found = value;
            break;
        }
        at += NVME_LOG_ANA_GROUP_BYTES;
        uint64_t list_bytes = (uint64_t)nvme_get32(entry + 4) * 4;
        if (list_bytes > bytes - at) {
            break;
        }
        at += (size_t)list_bytes;
    }
    *state = found;
    return 0;
}

const char *nvme_ana_word(uint32_t state)
{
    return state_words[state] != NULL ? state_words[state] : "not reported";
}

int nvme_ana_rank(uint32_t state)
{
    switch (state) {
    case DLFS_NVME_ANA_NONE:
    case DLFS_NVME_ANA_OPTIMIZED:
        return 0;
    case DLFS_NVME_ANA_NON_OPTIMIZED:
        return 1;
    default:
        return NVME_RANK_UNUSABLE;
    }
}
