/* Asynchronous events of one controller; see nvme/events.h. */
#include "nvme/events.h"

#include <errno.h>
#include <stdlib.h>

#define NSID_ALL 0xFFFFFFFFu
#define ANA_GROUPS_ONLY 1u /* LSP: without the lists of namespaces */
/* Most groups of the ANA log that are read; a namespace of a later one has no state. */
#define ANA_GROUPS_MAX 2047u

/* Reads a log into data, which is zeros unless *status is 0. */
static int get_log(struct nvme_admin *admin, uint8_t log, uint8_t specific, uint8_t *data,
                   uint32_t bytes, const struct nvme_deadline *deadline, uint16_t *status,
                   struct nvme_text *text)
{
    struct nvme_exchange exchange = {.data = data, .data_bytes = bytes};
    uint32_t dwords = bytes / 4 - 1; /* NUMD, 0's based, in two halves */
    nvme_entry_command(exchange.entry,
                       &(dlfs_nvme_command){.opcode = NVME_ADMIN_GET_LOG_PAGE,
                                            .nsid = NSID_ALL,
                                            .cdw10 = log | (uint32_t)specific << 8 | dwords << 16,
                                            .cdw11 = dwords >> 16});
    int code = nvme_connection_fetch(admin->connection, &exchange, deadline, "Get Log Page", text);
    *status = exchange.status;
    return code;
}

int nvme_events_start(struct nvme_admin *admin, const struct nvme_deadline *deadline,
                      struct nvme_text *text)
{
    const struct nvme_controller *controller = &admin->controller;
    uint32_t notices = nvme_notices_choose(controller->notices, controller->discovery);
    int code = 0;
    if (notices != 0) {
        struct nvme_exchange exchange = {.data = NULL};
        nvme_entry_command(exchange.entry, &(dlfs_nvme_command){.opcode = NVME_ADMIN_SET_FEATURES,
                                                                .cdw10 = NVME_FEATURE_EVENTS,
                                                                .cdw11 = notices});
        code = nvme_connection_run(admin->connection, &exchange, deadline, "Set Features (events)",
                                   text);
        if (code == 0 && exchange.status == 0) {
            code = nvme_connection_request_event(admin->connection, deadline, text);
        }
    }
    return code == 0 ? nvme_events_read_ana(admin, deadline, text) : code;
}

int nvme_events_read_namespaces(struct nvme_admin *admin, uint32_t nsid, bool *changed,
                                const struct nvme_deadline *deadline, struct nvme_text *text)
{
    uint8_t data[NVME_LOG_NAMESPACES_BYTES];
    uint16_t status;
    int code = get_log(admin, NVME_LOG_NAMESPACES, 0, data, sizeof data, deadline, &status, text);
    if (code == 0) {
        *changed = status != 0 || nvme_namespace_changed(data, sizeof data, nsid);
    }
    return code;
}

int nvme_events_read_health(struct nvme_admin *admin, uint8_t *warnings,
                            const struct nvme_deadline *deadline, struct nvme_text *text)
{
    uint8_t data[NVME_LOG_HEALTH_BYTES];
    uint16_t status;
    int code = get_log(admin, NVME_LOG_HEALTH, 0, data, sizeof data, deadline, &status, text);
    if (code == 0) {
        *warnings = data[0];
    }
    return code;
}

int nvme_events_read_ana(struct nvme_admin *admin, const struct nvme_deadline *deadline,
                         struct nvme_text *text)
{
    if (!admin->controller.reports_ana || admin->ns.ana_group == 0) {
        return 0;
    }
    uint32_t groups = admin->controller.ana_group_count;
    groups = groups < ANA_GROUPS_MAX ? groups : ANA_GROUPS_MAX;
    uint32_t bytes = NVME_LOG_ANA_HEADER_BYTES + groups * NVME_LOG_ANA_GROUP_BYTES;
    uint32_t most = admin->controller.transfer_bytes_max;
    bytes = bytes < most ? bytes : most;
    uint8_t *data = malloc(bytes);
    if (data == NULL) {
        nvme_text_format(text, "no memory");
        return -ENOMEM;
    }
    uint16_t status;
    const char *reason = "";
    int code = get_log(admin, NVME_LOG_ANA, ANA_GROUPS_ONLY, data, bytes, deadline, &status, text);
    if (code == 0) {
        code = nvme_decode_ana(data, bytes, admin->ns.ana_group, &admin->ana_state, &reason);
        if (code < 0) {
            nvme_text_format(text, "%s", reason);
        }
    }
    free(data);
    return code;
}
