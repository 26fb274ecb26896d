/*
 * The controllers that this process is connected to, counted: SPDK allows one connection for a
 * transport ID and host NQN. admin.c runs their admin threads.
 *
 * Source: spdk/nvme.h; NVM Express Base Specification 2.1, section 5.1.13.2.1 (CQT, KAS).
 */
#include "platform/clock.h"
#include "platform/thread.h"
#include "shim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEP_NS UINT64_C(50000)                /* between two polls of a detach */
#define DETACH_NS (UINT64_C(2000) * NS_PER_MS) /* time limit of a controller's shutdown */
#define DEFAULT_SERVICE "4420"

static struct {
    pthread_mutex_t lock;
    struct controller *first;
} registry = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- connecting ------------------------------------------------------------------------------ */

static void removed(void *argument, struct spdk_nvme_ctrlr *spdk)
{
    (void)spdk;
    struct controller *controller = argument;
    atomic_store(&controller->removed, true);
    controller_check(controller);
}

int transport_parse(const char *text, struct spdk_nvme_transport_id *transport_id)
{
    memset(transport_id, 0, sizeof *transport_id);
    if (spdk_nvme_transport_id_parse(transport_id, text) != 0) {
        return -EINVAL;
    }
    if (transport_id->trtype == SPDK_NVME_TRANSPORT_PCIE) {
        return 0;
    }
    if (transport_id->adrfam == 0) {
        transport_id->adrfam = strchr(transport_id->traddr, ':') != NULL ? SPDK_NVMF_ADRFAM_IPV6
                                                                         : SPDK_NVMF_ADRFAM_IPV4;
    }
    if (transport_id->trsvcid[0] == '\0') {
        (void)snprintf(transport_id->trsvcid, sizeof transport_id->trsvcid, DEFAULT_SERVICE);
    }
    return 0;
}

/* Returns the limit of the kernel's TCP retransmissions, so that it sends no write after the time
 * limit of a command, even if this process is stopped. SPDK takes it as an exponent: 2^n ms. */
static uint8_t ack_timeout_power(uint32_t timeout_ms)
{
    uint8_t power = 1;
    while (timeout_ms >> power > 1) {
        power++;
    }
    return power;
}

static int fill_options(const dlfs_spdk_config *config, bool tcp,
                        struct spdk_nvme_ctrlr_opts *options)
{
    struct spdk_nvme_host_id host;
    memset(&host, 0, sizeof host);
    spdk_nvme_ctrlr_get_default_ctrlr_opts(options, sizeof *options);
    options->keep_alive_timeout_ms = config->keepalive_ms;
    options->admin_timeout_ms = config->connect_ms;
    if (tcp) {
        options->transport_ack_timeout = ack_timeout_power(config->timeout_ms);
    }
    options->fabrics_connect_timeout_us = (uint64_t)config->connect_ms * 1000;
    options->disable_error_logging = true;
    if (strlen(config->host_nqn) >= sizeof options->hostnqn) {
        return -EINVAL;
    }
    (void)snprintf(options->hostnqn, sizeof options->hostnqn, "%s", config->host_nqn);
    memcpy(options->extended_host_id, config->host_id, sizeof options->extended_host_id);
    if (spdk_nvme_host_id_parse(&host, config->transport_id) == 0) {
        (void)snprintf(options->src_addr, sizeof options->src_addr, "%s", host.hostaddr);
        (void)snprintf(options->src_svcid, sizeof options->src_svcid, "%s", host.hostsvcid);
    }
    return 0;
}

/* Sets the time limit of TCP connects, which is one setting for the whole process. */
static void limit_tcp_connect(uint32_t connect_ms)
{
    struct spdk_nvme_transport_opts options;
    spdk_nvme_transport_get_opts(&options, sizeof options);
    options.opts_size = sizeof options;
    options.tcp_connect_timeout_ms = connect_ms;
    (void)spdk_nvme_transport_set_opts(&options, sizeof options);
}

static int locks_init(struct controller *controller)
{
    (void)pthread_mutex_init(&controller->lock, NULL);
    (void)pthread_mutex_init(&controller->admin_lock, NULL);
    return sem_init(&controller->wake, 0, 0) == 0 ? 0 : -errno;
}

static void controller_free(struct controller *controller)
{
    (void)sem_destroy(&controller->wake);
    (void)pthread_mutex_destroy(&controller->admin_lock);
    (void)pthread_mutex_destroy(&controller->lock);
    free(controller);
}

/* Detaches SPDK's controller: by a shutdown if it answers in time, else without. */
static void detach(struct controller *controller)
{
    struct spdk_nvme_detach_ctx *context = NULL;
    uint64_t deadline_ns = monotonic_ns() + DETACH_NS;
    if (atomic_load(&controller->state) != CONTROLLER_READY) {
        spdk_nvme_ctrlr_fail(controller->spdk);
    }
    if (spdk_nvme_detach_async(controller->spdk, &context) != 0 || context == NULL) {
        return;
    }
    while (spdk_nvme_detach_poll_async(context) == -EAGAIN) {
        if (monotonic_ns() > deadline_ns) {
            spdk_nvme_ctrlr_fail(controller->spdk);
        }
        shim_sleep_ns(STEP_NS);
    }
}

static int connect_new(const dlfs_spdk_config *config,
                       const struct spdk_nvme_transport_id *transport_id,
                       const struct spdk_nvme_ctrlr_opts *options, struct controller **out)
{
    struct controller *controller = calloc(1, sizeof *controller);
    if (controller == NULL) {
        return -ENOMEM;
    }
    int code = locks_init(controller);
    if (code < 0) {
        free(controller);
        return code;
    }
    controller->transport_id = *transport_id;
    (void)snprintf(controller->host_nqn, sizeof controller->host_nqn, "%s", options->hostnqn);
    controller->timeout_ms = config->timeout_ms;
    controller->connect_ms = config->connect_ms;
    controller->queues_wanted = options->num_io_queues;
    limit_tcp_connect(config->connect_ms);
    controller->spdk = spdk_nvme_connect(transport_id, options, sizeof *options);
    if (controller->spdk == NULL) {
        controller_free(controller);
        return DLFS_E_LOST;
    }
    controller->fabrics = spdk_nvme_ctrlr_is_fabrics(controller->spdk);
    controller->heartbeat_ms = controller->fabrics ? config->keepalive_ms / 2 : 0;
    controller_read_quiesce(controller);
    spdk_nvme_ctrlr_set_remove_cb(controller->spdk, removed, controller);
    code = thread_start(&controller->thread, NULL, controller_main, controller);
    if (code < 0) {
        detach(controller);
        controller_free(controller);
        return code;
    }
    *out = controller;
    return 0;
}

static struct controller *find(const struct spdk_nvme_transport_id *transport_id,
                               const char *host_nqn)
{
    struct controller *controller = registry.first;
    while (controller != NULL &&
           (spdk_nvme_transport_id_compare(&controller->transport_id, transport_id) != 0 ||
            strcmp(controller->host_nqn, host_nqn) != 0)) {
        controller = controller->next;
    }
    return controller;
}

int controller_get(const dlfs_spdk_config *config,
                   const struct spdk_nvme_transport_id *transport_id, char *message,
                   size_t message_bytes, struct controller **out)
{
    struct spdk_nvme_ctrlr_opts options;
    bool tcp = transport_id->trtype == SPDK_NVME_TRANSPORT_TCP;
    int code = fill_options(config, tcp, &options);
    if (code < 0) {
        return code;
    }
    (void)pthread_mutex_lock(&registry.lock);
    struct controller *controller = find(transport_id, options.hostnqn);
    if (controller == NULL) {
        unsigned mark = log_mark();
        code = connect_new(config, transport_id, &options, &controller);
        if (code < 0) {
            log_text(mark, message, message_bytes);
        } else {
            controller->next = registry.first;
            registry.first = controller;
        }
    }
    if (code == 0) {
        controller->users++;
        *out = controller;
    }
    (void)pthread_mutex_unlock(&registry.lock);
    return code;
}

static void stop_thread(struct controller *controller)
{
    atomic_store(&controller->stopping, true);
    (void)sem_post(&controller->wake);
    (void)pthread_join(controller->thread, NULL);
}

void controller_put(struct controller *controller)
{
    (void)pthread_mutex_lock(&registry.lock);
    controller->users--;
    if (controller->users == 0) {
        struct controller **link = &registry.first;
        while (*link != controller) {
            link = &(*link)->next;
        }
        *link = controller->next;
        stop_thread(controller);
        detach(controller);
        controller_free(controller);
    }
    (void)pthread_mutex_unlock(&registry.lock);
}

/* Ends all admin threads before SPDK's destructors free its memory. */
__attribute__((destructor)) static void stop_all(void)
{
    if (environment_is_foreign()) {
        return;
    }
    (void)pthread_mutex_lock(&registry.lock);
    for (struct controller *controller = registry.first; controller != NULL;
         controller = controller->next) {
        stop_thread(controller);
    }
    registry.first = NULL;
    (void)pthread_mutex_unlock(&registry.lock);
}
