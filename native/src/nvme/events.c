/* Asynchronous events of one controller; see nvme/events.h. */
#include "nvme/events.h"

#include <errno.h>
#include <stdlib.h>

#define NSID_ALL 0xFFFFFFFFu
#define ANA_GROUPS_ONLY 1u /* LSP: without the lists of namespaces */
/* Most groups of the ANA log that are read; a namespace of a later one has no state. */
#define ANA_GROUPS_MAX 2047u

/* Runs a command; *status gets its status. Returns an error of the connection only. */
static int run(struct nvme_admin *admin, struct nvme_exchange *exchange,
               const struct nvme_deadline *deadline, const char *what, uint16_t *status,
               struct nvme_text *text)
{
    struct nvme_text reason;
    int code = nvme_connection_run(admin->connection, exchange, deadline, &reason);
    if (code < 0) {
        nvme_text_format(text, "%s: %.400s", what, reason.bytes);
        return code;
    }
    *status = exchange->cqe.status & NVME_STATUS_CODE;
    return 0;
}

/* Reads a log into data, which is zeros unless *status is 0. */
static int get_log(struct nvme_admin *admin, uint8_t log, uint8_t specific, uint8_t *data,
                   uint32_t bytes, const struct nvme_deadline *deadline, uint16_t *status,
                   struct nvme_text *text)
{
    struct nvme_exchange exchange = {
        .data = data, .data_bytes = bytes, .direction = DLFS_NVME_DATA_IN};
    memset(data, 0, bytes);
    nvme_entry_get_log(exchange.entry, NSID_ALL, log, specific, bytes);
    int code = run(admin, &exchange, deadline, "Get Log Page", status, text);
    if (code == 0 && *status != 0) {
        memset(data, 0, bytes);
    }
    return code;
}

int nvme_events_start(struct nvme_admin *admin, const struct nvme_deadline *deadline,
                      struct nvme_text *text)
{
    const struct nvme_controller *controller = &admin->controller;
    uint32_t notices = nvme_notices_choose(controller->notices, controller->discovery);
    int code = 0;
    if (notices != 0) {
        uint16_t status = 0;
        struct nvme_exchange exchange = {.data = NULL};
        nvme_entry_set_events(exchange.entry, notices);
        code = run(admin, &exchange, deadline, "Set Features (events)", &status, text);
        if (code == 0 && status == 0) {
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
