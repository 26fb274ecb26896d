/*
 * The admin thread of a controller, and single admin commands.
 *
 * The admin thread polls the admin queue ten times a second, so that SPDK sends its keep-alive and
 * receives events. It sends keep-alives of its own, and takes the controller for lost when one is
 * not answered in time. When the connection is lost it connects again; the pauses between attempts
 * double.
 *
 * During a reconnect no other thread may call SPDK for this controller. The admin thread sets the
 * state to CONTROLLER_DOWN while it holds the locks of all queue pairs, and these check the state
 * before each call. Over fabrics they then free their SPDK queue pairs, because SPDK forgets which
 * queue IDs are in use; over PCIe, SPDK resets them itself. operations.c decides about the requests
 * that this aborts.
 *
 * Source: spdk/nvme.h, spdk_nvme_ctrlr_disconnect and spdk_nvme_ctrlr_reconnect_async; NVM Express
 * Base Specification 2.0, section 5.24 (Keep Alive).
 */
#include "platform/clock.h"
#include "shim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define POLL_NS (UINT64_C(100) * NS_PER_MS)
#define SCAN_NS (UINT64_C(1000) * NS_PER_MS) /* between scans for removed devices */
#define BACKOFF_FIRST_NS (UINT64_C(10) * NS_PER_MS)
#define BACKOFF_LAST_NS (UINT64_C(1000) * NS_PER_MS)
/* Failed resets after which a PCIe device counts as broken. A remote target is tried further. */
#define LOCAL_ATTEMPTS_MAX 3u
#define STEP_NS UINT64_C(50000) /* between two polls of a connection attempt or a command */

/* Offset of CQT in Identify Controller, which SPDK does not name, and the unit of KAS. */
#define COMMAND_QUIESCE_TIME 386u
#define KAS_MS 100u

/* ---- commands -------------------------------------------------------------------------------- */

void command_encode(const dlfs_nvme_command *command, struct spdk_nvme_cmd *out)
{
    memset(out, 0, sizeof *out);
    out->opc = (uint16_t)(command->opcode & 0xffu);
    out->nsid = command->nsid;
    out->cdw10 = command->cdw10;
    out->cdw11 = command->cdw11;
    out->cdw12 = command->cdw12;
    out->cdw13 = command->cdw13;
    out->cdw14 = command->cdw14;
    out->cdw15 = command->cdw15;
}

dlfs_nvme_result command_result(const struct spdk_nvme_cpl *completion)
{
    return (dlfs_nvme_result){.value = (uint64_t)completion->cdw1 << 32 | completion->cdw0,
                              .status =
                                  (uint32_t)completion->status.sct << 8 | completion->status.sc};
}

/* One admin command in flight; freed by its caller, or by its completion if the caller gave up. */
struct admin_call {
    struct spdk_nvme_cpl completion;
    _Atomic int state; /* enum call_state */
    void *data;
};

enum call_state { CALL_UNDER_WAY, CALL_DONE, CALL_ABANDONED };

static void admin_call_free(struct admin_call *call)
{
    spdk_free(call->data);
    free(call);
}

/* SPDK's callback, in any thread that polls the admin queue; SPDK also polls it when it creates a
 * queue pair. */
static void admin_call_done(void *argument, const struct spdk_nvme_cpl *completion)
{
    struct admin_call *call = argument;
    call->completion = *completion;
    if (atomic_exchange(&call->state, (int)CALL_DONE) == CALL_ABANDONED) {
        admin_call_free(call);
    }
}

static int admin_poll(struct controller *controller)
{
    (void)pthread_mutex_lock(&controller->admin_lock);
    int code = spdk_nvme_ctrlr_process_admin_completions(controller->spdk);
    (void)pthread_mutex_unlock(&controller->admin_lock);
    return code;
}

static bool is_ready(const struct controller *controller)
{
    return atomic_load(&controller->state) == CONTROLLER_READY;
}

/* Waits up to reconnect_ms for a connection. */
static int wait_ready(struct controller *controller, uint32_t reconnect_ms)
{
    while (!is_ready(controller)) {
        uint64_t down_ns = monotonic_ns() - atomic_load(&controller->down_since_ns);
        bool lost = atomic_load(&controller->state) == CONTROLLER_LOST;
        if (lost || down_ns > reconnect_ms * NS_PER_MS) {
            return DLFS_E_LOST;
        }
        shim_sleep_ns(NS_PER_MS);
    }
    return 0;
}

static int admin_submit(struct controller *controller, const dlfs_nvme_command *command,
                        uint32_t data_bytes, struct admin_call *call)
{
    struct spdk_nvme_cmd encoded;
    command_encode(command, &encoded);
    (void)pthread_mutex_lock(&controller->admin_lock);
    int code = -ENXIO;
    if (is_ready(controller)) {
        code = spdk_nvme_ctrlr_cmd_admin_raw(controller->spdk, &encoded, call->data, data_bytes,
                                             admin_call_done, call);
    }
    (void)pthread_mutex_unlock(&controller->admin_lock);
    return code == -ENXIO ? DLFS_E_LOST : code;
}

/* Polls until a command is done; abandons it after timeout_ms. */
static int admin_wait(struct controller *controller, uint32_t timeout_ms, struct admin_call *call)
{
    uint64_t deadline_ns = monotonic_ns() + timeout_ms * NS_PER_MS;
    while (atomic_load(&call->state) != CALL_DONE) {
        (void)pthread_mutex_lock(&controller->admin_lock);
        if (is_ready(controller)) {
            (void)spdk_nvme_ctrlr_process_admin_completions(controller->spdk);
        }
        (void)pthread_mutex_unlock(&controller->admin_lock);
        int under_way = CALL_UNDER_WAY;
        if (monotonic_ns() > deadline_ns &&
            atomic_compare_exchange_strong(&call->state, &under_way, (int)CALL_ABANDONED)) {
            controller_reset(controller, true);
            return DLFS_E_TIMEOUT;
        }
        shim_sleep_ns(STEP_NS);
    }
    return 0;
}

int controller_run(struct controller *controller, uint32_t reconnect_ms, uint32_t timeout_ms,
                   const dlfs_nvme_command *command, void *data, uint32_t data_bytes,
                   uint32_t direction, dlfs_nvme_result *result)
{
    int code = wait_ready(controller, reconnect_ms);
    if (code < 0) {
        return code;
    }
    struct admin_call *call = calloc(1, sizeof *call);
    if (call == NULL) {
        return -ENOMEM;
    }
    if (data_bytes > 0) {
        call->data = spdk_zmalloc(data_bytes, 4096, NULL, SPDK_ENV_NUMA_ID_ANY, SPDK_MALLOC_DMA);
        code = call->data == NULL ? -ENOMEM : 0;
    }
    if (code == 0 && data_bytes > 0 && direction == DLFS_NVME_DATA_OUT) {
        memcpy(call->data, data, data_bytes);
    }
    if (code == 0) {
        code = admin_submit(controller, command, data_bytes, call);
    }
    if (code < 0) {
        admin_call_free(call);
        return code;
    }
    code = admin_wait(controller, timeout_ms, call);
    if (code < 0) {
        return code;
    }
    if (data_bytes > 0 && direction == DLFS_NVME_DATA_IN) {
        memcpy(data, call->data, data_bytes);
    }
    *result = command_result(&call->completion);
    admin_call_free(call);
    return result->status == SPDK_NVME_SC_ABORTED_SQ_DELETION ? DLFS_E_LOST : 0;
}

/* ---- quiescing ------------------------------------------------------------------------------- */

void controller_read_quiesce(struct controller *controller)
{
    const struct spdk_nvme_ctrlr_opts *options = spdk_nvme_ctrlr_get_opts(controller->spdk);
    const struct spdk_nvme_ctrlr_data *data = spdk_nvme_ctrlr_get_data(controller->spdk);
    uint16_t reported_ms;
    memcpy(&reported_ms, (const uint8_t *)data + COMMAND_QUIESCE_TIME, sizeof reported_ms);
    uint64_t quiesce_ms =
        nvme_quiesce_ms(reported_ms, options->keep_alive_timeout_ms, data->kas * KAS_MS);
    /* Over PCIe, a reset ends all commands before the next one can be sent. */
    atomic_store(&controller->quiesce_ns, controller->fabrics ? quiesce_ms * NS_PER_MS : 1);
}

/* ---- the admin thread ------------------------------------------------------------------------ */

static void lock_all(struct controller *controller)
{
    (void)pthread_mutex_lock(&controller->lock);
    for (struct queue_link *link = controller->queues; link != NULL; link = link->next) {
        (void)pthread_mutex_lock(&link->lock);
    }
    (void)pthread_mutex_lock(&controller->admin_lock);
}

static void unlock_all(struct controller *controller)
{
    (void)pthread_mutex_unlock(&controller->admin_lock);
    for (struct queue_link *link = controller->queues; link != NULL; link = link->next) {
        (void)pthread_mutex_unlock(&link->lock);
    }
    (void)pthread_mutex_unlock(&controller->lock);
}

/* Leaves CONTROLLER_READY: from here on, only the admin thread calls SPDK for this controller. */
static void leave_ready(struct controller *controller, enum controller_state state)
{
    lock_all(controller);
    bool timed_out = atomic_exchange(&controller->timed_out, false);
    atomic_store(&controller->down_since_ns, monotonic_ns());
    atomic_store(&controller->state, (int)state);
    (void)atomic_fetch_add(&controller->incarnation, 1);
    for (struct queue_link *link = controller->queues; link != NULL; link = link->next) {
        link->on_disconnect(link, timed_out);
    }
    unlock_all(controller);
    controller->backoff_ns = BACKOFF_FIRST_NS;
    controller->retry_at_ns = 0;
    controller->attempts = 0;
    atomic_store(&controller->heartbeat_ns, 0);
}

/* Closes the old connection; returns false if the controller was removed. */
static bool disconnect(struct controller *controller)
{
    int code = spdk_nvme_ctrlr_disconnect(controller->spdk);
    if (code == -ENXIO) {
        return false;
    }
    uint64_t deadline_ns = monotonic_ns() + controller->connect_ms * NS_PER_MS;
    while (admin_poll(controller) != -ENXIO && monotonic_ns() < deadline_ns) {
        shim_sleep_ns(STEP_NS);
    }
    return true;
}

/* Makes SPDK request as many I/O queues as at first. It would request the number that it was last
 * granted; after an attempt that ended during that request, always one. */
static void restore_queue_count(struct controller *controller)
{
    const struct spdk_nvme_ctrlr_opts *options = spdk_nvme_ctrlr_get_opts(controller->spdk);
    ((struct spdk_nvme_ctrlr_opts *)(uintptr_t)options)->num_io_queues = controller->queues_wanted;
}

/* Tries once to connect again. Returns 0 or a negative code. */
static int reconnect(struct controller *controller)
{
    uint64_t deadline_ns = monotonic_ns() + controller->connect_ms * NS_PER_MS;
    restore_queue_count(controller);
    spdk_nvme_ctrlr_reconnect_async(controller->spdk);
    for (;;) {
        int code = spdk_nvme_ctrlr_reconnect_poll_async(controller->spdk);
        if (code != -EAGAIN) {
            return code;
        }
        if (atomic_load(&controller->stopping) || monotonic_ns() > deadline_ns) {
            spdk_nvme_ctrlr_fail(controller->spdk); /* the next poll ends the attempt */
        }
        shim_sleep_ns(STEP_NS);
    }
}

/* Tries to connect again if the pause is over. */
static void try_reconnect(struct controller *controller)
{
    if (monotonic_ns() < controller->retry_at_ns) {
        return;
    }
    bool broken = !controller->fabrics && controller->attempts >= LOCAL_ATTEMPTS_MAX;
    if (broken || !disconnect(controller)) {
        leave_ready(controller, CONTROLLER_LOST);
        return;
    }
    if (reconnect(controller) == 0) {
        controller->heartbeat_next_ns = monotonic_ns() + controller->heartbeat_ms * NS_PER_MS;
        controller_read_quiesce(controller);
        atomic_store(&controller->timed_out, false);
        atomic_store(&controller->reset_wanted, false);
        atomic_store(&controller->state, (int)CONTROLLER_READY);
        return;
    }
    controller->attempts++;
    controller->retry_at_ns = monotonic_ns() + controller->backoff_ns;
    controller->backoff_ns *= 2;
    if (controller->backoff_ns > BACKOFF_LAST_NS) {
        controller->backoff_ns = BACKOFF_LAST_NS;
    }
}

static void heartbeat_done(void *argument, const struct spdk_nvme_cpl *completion)
{
    (void)completion; /* any status shows that the controller answers */
    struct controller *controller = argument;
    atomic_store(&controller->heartbeat_ns, 0);
}

/* Sends a keep-alive when it is due; returns false if one was not answered in time. */
static bool heartbeat(struct controller *controller)
{
    uint64_t now = monotonic_ns();
    uint64_t sent_ns = atomic_load(&controller->heartbeat_ns);
    if (sent_ns != 0) {
        bool timed_out = now - sent_ns >= controller->timeout_ms * NS_PER_MS;
        if (timed_out) {
            atomic_store(&controller->timed_out, true);
        }
        return !timed_out;
    }
    if (controller->heartbeat_ms == 0 || now < controller->heartbeat_next_ns) {
        return true;
    }
    struct spdk_nvme_cmd command = {.opc = SPDK_NVME_OPC_KEEP_ALIVE};
    controller->heartbeat_next_ns = now + controller->heartbeat_ms * NS_PER_MS;
    (void)pthread_mutex_lock(&controller->admin_lock);
    atomic_store(&controller->heartbeat_ns, now);
    int code = spdk_nvme_ctrlr_cmd_admin_raw(controller->spdk, &command, NULL, 0, heartbeat_done,
                                             controller);
    if (code != 0) {
        atomic_store(&controller->heartbeat_ns, 0);
    }
    (void)pthread_mutex_unlock(&controller->admin_lock);
    return code != -ENXIO;
}

/* Handles a lost or unresponsive connection. */
static void check_connection(struct controller *controller)
{
    if (!is_ready(controller)) {
        if (atomic_load(&controller->state) == CONTROLLER_DOWN) {
            try_reconnect(controller);
        }
        return;
    }
    bool alive = admin_poll(controller) >= 0 && heartbeat(controller);
    if (atomic_load(&controller->removed)) {
        leave_ready(controller, CONTROLLER_LOST);
    } else if (!alive || atomic_load(&controller->reset_wanted)) {
        leave_ready(controller, CONTROLLER_DOWN);
        try_reconnect(controller);
    }
}

/* Over PCIe: makes SPDK check for removed devices. */
static void scan_for_removal(struct controller *controller, uint64_t *next_ns)
{
    if (!controller->fabrics && monotonic_ns() >= *next_ns) {
        *next_ns = monotonic_ns() + SCAN_NS;
        (void)spdk_nvme_scan_attached(&controller->transport_id);
    }
}

void *controller_main(void *argument)
{
    struct controller *controller = argument;
    uint64_t scan_ns = 0;
    while (!atomic_load(&controller->stopping)) {
        uint64_t until_ns = monotonic_ns() + POLL_NS;
        if (!is_ready(controller) && controller->retry_at_ns < until_ns) {
            until_ns = controller->retry_at_ns;
        }
        struct timespec until = clock_timespec(until_ns);
        (void)sem_clockwait(&controller->wake, CLOCK_MONOTONIC, &until);
        if (!atomic_load(&controller->stopping)) {
            scan_for_removal(controller, &scan_ns);
            check_connection(controller);
        }
    }
    return NULL;
}

void controller_reset(struct controller *controller, bool timed_out)
{
    if (timed_out) {
        atomic_store(&controller->timed_out, true);
    }
    atomic_store(&controller->reset_wanted, true);
    controller_check(controller);
}

void controller_check(struct controller *controller)
{
    int waiting = 0;
    if (sem_getvalue(&controller->wake, &waiting) == 0 && waiting == 0) {
        (void)sem_post(&controller->wake);
    }
}

void controller_attach_queue(struct controller *controller, struct queue_link *link)
{
    (void)pthread_mutex_lock(&controller->lock);
    link->next = controller->queues;
    controller->queues = link;
    (void)pthread_mutex_unlock(&controller->lock);
}

void controller_detach_queue(struct controller *controller, struct queue_link *link)
{
    (void)pthread_mutex_lock(&controller->lock);
    struct queue_link **cursor = &controller->queues;
    while (*cursor != link) {
        cursor = &(*cursor)->next;
    }
    *cursor = link->next;
    (void)pthread_mutex_unlock(&controller->lock);
}
