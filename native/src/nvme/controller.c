/* Making a controller ready; see nvme/controller.h. */
#include "nvme/controller.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "nvme/events.h"
#include "nvme/protocol/writes.h"
#include "nvme/security/authenticate.h"
#include "platform/clock.h"

#define ADMIN_STAGING_BYTES 16384u
#define QUEUE_STAGING_BYTES (256u << 10)
#define ADMIN_QUEUE_SIZE 31u /* 0's based: 32 entries, as the specification asks of hosts */
#define CONTROLLER_DYNAMIC 0xFFFFu
#define CC_ENABLE 0x1u
#define CC_ENTRY_SIZES 0x460000u /* 64-byte submission and 16-byte completion entries */
#define CC_SHUTDOWN_NORMAL 0x4000u
#define CSTS_READY 0x1u
#define CSTS_FATAL 0x2u
#define READY_POLL_NS UINT64_C(2000000)
#define READY_UNIT_NS UINT64_C(500000000)

/* ---- configuration and addresses ------------------------------------------------------------- */

static int copy_text(char *to, size_t to_bytes, const char *from)
{
    size_t length = from != NULL ? strnlen(from, to_bytes) : 0;
    if (length == 0 || length >= to_bytes) {
        return -EINVAL;
    }
    memcpy(to, from, length);
    to[length] = '\0';
    return 0;
}

/* Copies the name of a key; NULL for none. Returns false if it is empty or too long. */
static bool copy_key_name(char to[NVME_KEY_NAME_BYTES_MAX + 1], const char *name)
{
    return name == NULL || copy_text(to, NVME_KEY_NAME_BYTES_MAX + 1, name) == 0;
}

int nvme_config_copy(const dlfs_nvme_config *from, struct nvme_config *to)
{
    *to = (struct nvme_config){.path_count = from->path_count,
                               .nsid = from->nsid,
                               .digests = from->digests,
                               .timeout_ms = from->timeout_ms,
                               .connect_ms = from->connect_ms,
                               .keepalive_ms = from->keepalive_ms,
                               .reconnect_ms = from->reconnect_ms,
                               .busy_poll_us = from->busy_poll_us,
                               .reauth_s = from->reauth_s,
                               .tls_identity = NVME_TLS_IDENTITY_MAX,
                               .concat = from->concat != 0,
                               .writable = (from->flags & DLFS_OPEN_WRITE) != 0};
    memcpy(to->host_id, from->host_id, sizeof to->host_id);
    bool valid = from->path_count >= 1 && from->path_count <= DLFS_NVME_PATHS_MAX &&
                 from->nsid != UINT32_MAX && from->timeout_ms > 0 && from->connect_ms > 0 &&
                 (from->digests & ~(DLFS_NVME_HEADER_DIGEST | DLFS_NVME_DATA_DIGEST)) == 0 &&
                 (from->flags & ~DLFS_OPEN_WRITE) == 0 &&
                 copy_key_name(to->dhchap_key, from->dhchap_key) &&
                 copy_key_name(to->dhchap_ctrl_key, from->dhchap_ctrl_key) &&
                 copy_key_name(to->tls_psk, from->tls_psk) &&
                 (to->dhchap_key[0] != '\0' || to->dhchap_ctrl_key[0] == '\0') &&
                 (!to->concat || (to->dhchap_key[0] != '\0' && to->tls_psk[0] == '\0'));
    if (!valid || copy_text(to->subsystem_nqn, sizeof to->subsystem_nqn, from->subsystem_nqn) < 0 ||
        copy_text(to->host_nqn, sizeof to->host_nqn, from->host_nqn) < 0) {
        return -EINVAL;
    }
    return nvme_paths_copy(from->hosts, from->ports, from->path_count, to->paths);
}

int nvme_paths_copy(const char *const *hosts, const uint32_t *ports, uint32_t path_count,
                    struct nvme_path *to)
{
    for (uint32_t i = 0; i < path_count; i++) {
        if (copy_text(to[i].host, sizeof to[i].host, hosts[i]) < 0 || ports[i] == 0 ||
            ports[i] > UINT16_MAX) {
            return -EINVAL;
        }
        to[i].port = (uint16_t)ports[i];
    }
    return 0;
}

/* ---- the admin queue ------------------------------------------------------------------------- */

/* Turns the status of a command into an error; what is the command's name in text. */
static int check_status(uint16_t status, const char *what, struct nvme_text *text)
{
    if (status != 0) {
        nvme_text_format(text, "%s: status 0x%x, %s", what, status, nvme_status_phrase(status));
    }
    return nvme_status_code(status);
}

/* Runs a command and turns a failure status into an error. */
static int run_checked(struct nvme_connection *connection, struct nvme_exchange *exchange,
                       const struct nvme_deadline *deadline, const char *what,
                       struct nvme_text *text)
{
    int code = nvme_connection_run(connection, exchange, deadline, what, text);
    return code < 0 ? code : check_status(exchange->status, what, text);
}

static int property_get(struct nvme_connection *connection, uint32_t offset, bool eight_bytes,
                        const struct nvme_deadline *deadline, uint64_t *value,
                        struct nvme_text *text)
{
    struct nvme_exchange exchange = {.data = NULL};
    nvme_entry_property_get(exchange.entry, offset, eight_bytes);
    int code = run_checked(connection, &exchange, deadline, "Property Get", text);
    *value = eight_bytes ? exchange.cqe.value : (uint32_t)exchange.cqe.value;
    return code;
}

static int property_set(struct nvme_connection *connection, uint32_t offset, uint32_t value,
                        const struct nvme_deadline *deadline, struct nvme_text *text)
{
    struct nvme_exchange exchange = {.data = NULL};
    nvme_entry_property_set(exchange.entry, offset, value);
    return run_checked(connection, &exchange, deadline, "Property Set", text);
}

/* Runs Identify, as nvme_connection_fetch. */
static int identify(struct nvme_connection *connection, uint32_t nsid, uint8_t what, uint8_t *data,
                    const struct nvme_deadline *deadline, uint16_t *status, struct nvme_text *text)
{
    struct nvme_exchange exchange = {.data = data, .data_bytes = NVME_IDENTIFY_BYTES};
    nvme_entry_command(
        exchange.entry,
        &(dlfs_nvme_command){.opcode = NVME_ADMIN_IDENTIFY, .nsid = nsid, .cdw10 = what});
    int code = nvme_connection_fetch(connection, &exchange, deadline, NULL, text);
    *status = exchange.status;
    return code;
}

/* Runs Fabrics Connect on a new connection; *refused is set if the controller refused it. */
static int connect_queue(struct nvme_connection *connection, const struct nvme_config *config,
                         uint16_t qid, uint16_t sq_size, uint16_t controller_id,
                         const struct nvme_deadline *deadline, uint16_t *got_controller_id,
                         bool *refused, struct nvme_text *text)
{
    uint8_t data[NVME_CONNECT_BYTES];
    struct nvme_exchange exchange = {
        .data = data, .data_bytes = sizeof data, .direction = DLFS_NVME_DATA_OUT};
    nvme_connect_data(data, config->host_id, controller_id, config->subsystem_nqn,
                      config->host_nqn);
    nvme_entry_connect(exchange.entry, qid, sq_size, qid == 0 ? config->keepalive_ms : 0);
    int code = nvme_connection_run(connection, &exchange, deadline, NULL, text);
    uint16_t status = exchange.status;
    if (code < 0) {
        return code;
    }
    if (status != 0) {
        *refused = status != NVME_STATUS_SEQUENCE_ERROR;
        const char *verb = status == NVME_STATUS_UNKNOWN_SUBSYSTEM && qid == 0
                               ? "is unknown to the target, or not for"
                               : "refused";
        nvme_text_format(text, "subsystem %s %s host %s (status 0x%x, %s)", config->subsystem_nqn,
                         verb, config->host_nqn, status, nvme_status_phrase(status));
        code = nvme_status_code(status);
        return qid > 0 && code == DLFS_E_NOT_FOUND ? -EREMOTEIO : code;
    }
    *got_controller_id = (uint16_t)exchange.cqe.value;
    return nvme_authenticate_connected(connection, config, exchange.cqe.value, deadline, text);
}

/* Returns the command set to select in CC, of those that CAP offers. */
static uint32_t choose_command_set(uint64_t cap)
{
    if ((cap >> 37 & 1) != 0) {
        return 0; /* NVM */
    }
    return (cap >> 44 & 1) != 0 ? 0x70u : 0x60u; /* none (admin only), or all */
}

static int enable(struct nvme_admin *admin, uint64_t cap, const struct nvme_deadline *deadline,
                  struct nvme_text *text)
{
    struct nvme_deadline limit =
        nvme_deadline_within(deadline, ((cap >> 24 & 0xFF) + 1) * READY_UNIT_NS);
    uint32_t cc = CC_ENTRY_SIZES | choose_command_set(cap) | CC_ENABLE;
    int code = property_set(admin->connection, NVME_PROPERTY_CC, cc, &limit, text);
    while (code == 0) {
        uint64_t status;
        code = property_get(admin->connection, NVME_PROPERTY_CSTS, false, &limit, &status, text);
        if (code < 0) {
            return code;
        }
        if ((status & CSTS_FATAL) != 0) {
            nvme_text_format(text, "the controller reports a fatal status (CSTS.CFS)");
            return DLFS_E_LOST;
        }
        if ((status & CSTS_READY) != 0) {
            return 0;
        }
        struct nvme_deadline pause = nvme_deadline_within(&limit, READY_POLL_NS);
        /* Descriptor -1 is never ready: only the pause or a stop ends the wait. */
        code = nvme_wait(&pause, -1, 0);
        code = code == DLFS_E_TIMEOUT && pause.until_ns < limit.until_ns ? 0 : code;
        if (code < 0) {
            nvme_text_format(text, "the controller does not become ready");
        }
    }
    return code;
}

static int identify_controller(const struct nvme_config *config, struct nvme_admin *admin,
                               uint64_t cap, const struct nvme_deadline *deadline,
                               struct nvme_text *text)
{
    uint8_t data[NVME_IDENTIFY_BYTES];
    uint16_t status;
    int code =
        identify(admin->connection, 0, NVME_IDENTIFY_CONTROLLER, data, deadline, &status, text);
    code = code < 0 ? code : check_status(status, "Identify Controller", text);
    if (code < 0) {
        return code;
    }
    const char *reason = "";
    uint64_t page_bytes = UINT64_C(4096) << (cap >> 48 & 15);
    code = nvme_decode_controller(data, page_bytes, &admin->controller, &reason);
    if (code < 0) {
        nvme_text_format(text, "%s", reason);
        return code;
    }
    admin->command_count_max = (uint32_t)(cap & 0xFFFF); /* MQES is 0's based; one stays empty */
    if (admin->command_count_max == 0) {
        nvme_text_format(text, "CAP.MQES: expected at least 1");
        return DLFS_E_PROTOCOL;
    }
    if (admin->controller.discovery) {
        nvme_text_format(text, "%s is a discovery controller, without namespaces",
                         config->subsystem_nqn);
        return config->nsid == 0 ? 0 : DLFS_E_NOT_FOUND;
    }
    struct nvme_exchange exchange = {.data = NULL};
    /* NSQR and NCQR, both 0's based */
    nvme_entry_command(exchange.entry,
                       &(dlfs_nvme_command){.opcode = NVME_ADMIN_SET_FEATURES,
                                            .cdw10 = NVME_FEATURE_QUEUES,
                                            .cdw11 = (NVME_QUEUES_MAX - 1) * 0x10001u});
    code = run_checked(admin->connection, &exchange, deadline, "Set Features (queues)", text);
    uint32_t submission = (uint32_t)(exchange.cqe.value & 0xFFFF) + 1;
    uint32_t completion = (uint32_t)(exchange.cqe.value >> 16 & 0xFFFF) + 1;
    uint32_t granted = submission < completion ? submission : completion;
    admin->queue_count_max = granted < NVME_QUEUES_MAX ? granted : NVME_QUEUES_MAX;
    return code;
}

int nvme_controller_identify_namespace(const struct nvme_config *config, struct nvme_admin *admin,
                                       const struct nvme_deadline *deadline, struct nvme_text *text)
{
    uint8_t data[NVME_IDENTIFY_BYTES];
    uint8_t descriptors[NVME_IDENTIFY_BYTES];
    uint16_t status;
    /*
     * If the namespace is missing, a controller answers with zeros or with an error status.
     * Controllers before version 1.3 have no descriptors; then the namespace's other identifiers
     * are used.
     */
    int code = identify(admin->connection, config->nsid, NVME_IDENTIFY_NAMESPACE, data, deadline,
                        &status, text);
    if (code == 0) {
        code = identify(admin->connection, config->nsid, NVME_IDENTIFY_DESCRIPTORS, descriptors,
                        deadline, &status, text);
    }
    if (code < 0) {
        return code;
    }
    const char *why = "";
    code = nvme_decode_namespace(data, descriptors, &admin->ns, &why);
    if (code < 0) {
        nvme_text_format(text, "namespace %u of %s: %s", config->nsid, config->subsystem_nqn, why);
        return code;
    }
    uint32_t most = admin->controller.transfer_bytes_max;
    most = most < NVME_TRANSFER_BYTES_MAX ? most : NVME_TRANSFER_BYTES_MAX;
    admin->transfer_bytes_max = most - most % admin->ns.block_bytes;
    if (admin->transfer_bytes_max == 0) {
        nvme_text_format(text, "namespace %u: a block is larger than MDTS", config->nsid);
        return -ENOTSUP;
    }
    return 0;
}

static int make_ready(const struct nvme_config *config, struct nvme_admin *admin,
                      const struct nvme_deadline *deadline, struct nvme_text *text)
{
    uint64_t cap = 0;
    uint16_t controller_id = 0;
    bool refused = false;
    int code = connect_queue(admin->connection, config, 0, ADMIN_QUEUE_SIZE, CONTROLLER_DYNAMIC,
                             deadline, &controller_id, &refused, text);
    if (code == 0) {
        code = property_get(admin->connection, NVME_PROPERTY_CAP, true, deadline, &cap, text);
    }
    if (code == 0) {
        code = enable(admin, cap, deadline, text);
    }
    if (code == 0) {
        code = identify_controller(config, admin, cap, deadline, text);
    }
    if (code == 0 && config->nsid != 0) {
        code = nvme_controller_identify_namespace(config, admin, deadline, text);
    }
    admin->controller.id = controller_id;
    return code == 0 ? nvme_events_start(admin, deadline, text) : code;
}

/* Opens a connection, with TLS if there is a generated key or the configuration names one. */
static int open_connection(const struct nvme_config *config, const struct nvme_address *address,
                           const struct nvme_tls_key *generated, uint32_t staging_bytes,
                           const struct nvme_deadline *deadline, struct nvme_connection **out,
                           struct nvme_text *text)
{
    const struct nvme_security *security = NULL;
    const struct nvme_tls_config tls = {.key = config->tls_psk,
                                        .generated = generated,
                                        .host_nqn = config->host_nqn,
                                        .subsystem_nqn = config->subsystem_nqn,
                                        .identity = config->tls_identity,
                                        .receive_bytes = staging_bytes};
    bool encrypted = generated != NULL || config->tls_psk[0] != '\0';
    if (encrypted) {
        int code = nvme_security_load(&security, text->bytes);
        if (code < 0) {
            return code;
        }
    }
    int code = nvme_connection_open(address, config->digests, security, encrypted ? &tls : NULL,
                                    staging_bytes, deadline, out, text);
    /* At the first attempt only: a target that restarts need not answer this, too. */
    if (!encrypted && (code == DLFS_E_AUTH || (code == DLFS_E_LOST && !config->was_connected &&
                                               nvme_connection_demands_tls(address, deadline)))) {
        nvme_text_format(text, "%s",
                         config->concat
                             ? "the port demands TLS of every connection, also of the one on which "
                               "concat=1 generates a key: name a key with tls_psk instead"
                             : "the port demands TLS, and no tls_psk names a key for it");
        code = DLFS_E_AUTH;
    }
    return code;
}

/*
 * Authenticates a connection without TLS, for the TLS key that both sides generate thereby, and
 * closes it. The caller frees the key by *security.
 */
static int generate_key(const struct nvme_config *config, const struct nvme_address *address,
                        const struct nvme_deadline *deadline, const struct nvme_security **security,
                        struct nvme_tls_key **out, struct nvme_text *text)
{
    struct nvme_connection *connection;
    uint16_t ignored;
    bool refused;
    int code =
        open_connection(config, address, NULL, ADMIN_STAGING_BYTES, deadline, &connection, text);
    if (code < 0) {
        return code;
    }
    code = connect_queue(connection, config, 0, ADMIN_QUEUE_SIZE, CONTROLLER_DYNAMIC, deadline,
                         &ignored, &refused, text);
    if (code < 0) {
        nvme_connection_abort(connection, false);
        return code;
    }
    *security = connection->security;
    *out = connection->generated;
    connection->generated = NULL;
    nvme_connection_close(connection);
    return 0;
}

/* Opens the admin connection. With concat, another one generates its TLS key before. */
static int open_admin(const struct nvme_config *config, const struct nvme_address *address,
                      const struct nvme_deadline *deadline, struct nvme_connection **out,
                      struct nvme_text *text)
{
    const struct nvme_security *security = NULL;
    struct nvme_tls_key *generated = NULL;
    int code =
        config->concat ? generate_key(config, address, deadline, &security, &generated, text) : 0;
    if (code == 0) {
        code =
            open_connection(config, address, generated, ADMIN_STAGING_BYTES, deadline, out, text);
    }
    if (code == 0) {
        (*out)->generated = generated;
    } else if (generated != NULL) {
        security->tls_key_free(generated);
    }
    return code;
}

static int open_once(const struct nvme_config *config, const struct nvme_address *address,
                     const struct nvme_deadline *deadline, struct nvme_admin *out,
                     struct nvme_text *text)
{
    struct nvme_admin admin = {.address = *address};
    int code = open_admin(config, address, deadline, &admin.connection, text);
    if (code < 0) {
        return code;
    }
    code = make_ready(config, &admin, deadline, text);
    if (code < 0) {
        nvme_connection_abort(admin.connection, false);
        return code;
    }
    *out = admin;
    return 0;
}

/*
 * A target that closed the connection in the authentication gets another attempt. One that refused
 * this host closes it again; one that was restarted is away, or authenticates.
 */
int nvme_controller_open(const struct nvme_config *config, const struct nvme_address *address,
                         const struct nvme_deadline *deadline, struct nvme_admin *out,
                         struct nvme_text *text)
{
    int code = open_once(config, address, deadline, out, text);
    if (code == NVME_AUTH_CLOSED) {
        code = open_once(config, address, deadline, out, text);
    }
    return code == NVME_AUTH_CLOSED ? DLFS_E_AUTH : code;
}

static int connect_queue_once(const struct nvme_config *config, const struct nvme_admin *admin,
                              uint16_t qid, uint32_t command_count,
                              const struct nvme_deadline *deadline, struct nvme_connection **out,
                              bool *refused, struct nvme_text *text)
{
    *refused = false;
    struct nvme_connection *connection;
    int code = open_connection(config, &admin->address, admin->connection->generated,
                               QUEUE_STAGING_BYTES, deadline, &connection, text);
    if (code < 0) {
        return code;
    }
    if (command_count > admin->command_count_max) {
        command_count = admin->command_count_max;
    }
    /* Limits how long the kernel retransmits a write, even if this process is stopped. */
    (void)setsockopt(connection->descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &config->timeout_ms,
                     sizeof config->timeout_ms);
    uint16_t ignored;
    code = connect_queue(connection, config, qid, (uint16_t)command_count, admin->controller.id,
                         deadline, &ignored, refused, text);
    if (code < 0) {
        nvme_connection_abort(connection, false);
        return code;
    }
    connection->command_count = command_count;
    connection->transfer_bytes_max = admin->transfer_bytes_max;
    connection->capsule_bytes_max = admin->controller.capsule_bytes_max;
    connection->quiesce_ms = nvme_quiesce_ms(admin->controller.quiesce_ms, config->keepalive_ms,
                                             admin->controller.keepalive_step_ms);
    *out = connection;
    return 0;
}

int nvme_controller_connect_queue(const struct nvme_config *config, const struct nvme_admin *admin,
                                  uint16_t qid, uint32_t command_count,
                                  const struct nvme_deadline *deadline,
                                  struct nvme_connection **out, bool *refused,
                                  struct nvme_text *text)
{
    int code = connect_queue_once(config, admin, qid, command_count, deadline, out, refused, text);
    if (code == NVME_AUTH_CLOSED) { /* as nvme_controller_open */
        code = connect_queue_once(config, admin, qid, command_count, deadline, out, refused, text);
    }
    return code == NVME_AUTH_CLOSED ? DLFS_E_AUTH : code;
}

int nvme_controller_check(const struct nvme_admin *admin, const struct nvme_deadline *deadline,
                          struct nvme_text *text)
{
    uint64_t ignored;
    return property_get(admin->connection, NVME_PROPERTY_CSTS, false, deadline, &ignored, text);
}

int nvme_controller_keep_alive(struct nvme_admin *admin, const struct nvme_deadline *deadline,
                               struct nvme_text *text)
{
    struct nvme_exchange exchange = {.data = NULL};
    nvme_entry_command(exchange.entry, &(dlfs_nvme_command){.opcode = NVME_ADMIN_KEEP_ALIVE});
    return run_checked(admin->connection, &exchange, deadline, "Keep Alive", text);
}

void nvme_controller_shut_down(struct nvme_admin *admin, const struct nvme_deadline *deadline)
{
    struct nvme_text ignored;
    (void)property_set(admin->connection, NVME_PROPERTY_CC,
                       CC_ENTRY_SIZES | CC_SHUTDOWN_NORMAL | CC_ENABLE, deadline, &ignored);
    struct nvme_connection *connection = admin->connection;
    admin->connection = NULL;
    nvme_connection_close(connection);
}
