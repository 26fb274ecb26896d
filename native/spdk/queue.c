/*
 * Queue pairs on top of SPDK's: their connection, submit and poll.
 *
 * A queue pair connects again after a loss, with pauses that double, for up to reconnect_ms; then
 * waiting operations end with DLFS_E_LOST. If a command is not answered in time, the queue pair is
 * disconnected, so that nothing can write to the command's buffer any more. If a write has no
 * answer, the whole controller is reset: the time after which a target has quiesced counts from the
 * end of all connections.
 *
 * SPDK sends issued requests when it is polled. While writes are in flight, the writer's lease is
 * checked right before each poll; if it has expired, the queue pair is disconnected instead.
 *
 * A thread that polls is busy, as usual with SPDK. After a while without a completion it yields to
 * other threads between two polls, and later sleeps for short times.
 */
#include "queue.h"
#include "platform/clock.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <spdk/likely.h>

#define BOUNCE_COUNT_MAX 64u
#define REQUESTS_MAX 16384u

#define SPIN_NS NS_PER_MS        /* time without a completion until a poll yields */
#define YIELD_NS (2 * NS_PER_MS) /* time without a completion until a poll sleeps */
#define SLEEP_NS UINT64_C(50000)
#define CHECK_POLLS 1024u /* polls with completions between two checks of time limits */
#define CHECK_NS (UINT64_C(10) * NS_PER_MS)
#define BACKOFF_FIRST_NS (UINT64_C(5) * NS_PER_MS)
#define BACKOFF_LAST_NS (UINT64_C(500) * NS_PER_MS)
#define STEP_NS UINT64_C(50000) /* between two polls of the first connection */
#define BACKOFF_REFUSED_NS (UINT64_C(50) * NS_PER_MS) /* pause after several refusals */

/* ---- the connection -------------------------------------------------------------------------- */

static uint32_t requests_wanted(const struct queue *queue)
{
    uint32_t transfer = queue->device->info.max_transfer_bytes;
    uint32_t children = REQUEST_BYTES_MAX > transfer ? REQUEST_BYTES_MAX / transfer + 2 : 1;
    uint64_t all = (uint64_t)queue->request_count * children;
    uint32_t least = queue->request_count + children;
    return all < REQUESTS_MAX ? (uint32_t)all : least > REQUESTS_MAX ? least : REQUESTS_MAX;
}

static struct spdk_nvme_qpair *allocate(const struct queue *queue)
{
    struct spdk_nvme_io_qpair_opts options;
    struct spdk_nvme_ctrlr *controller = queue->controller->spdk;
    spdk_nvme_ctrlr_get_default_io_qpair_opts(controller, &options, sizeof options);
    union spdk_nvme_cap_register capabilities = spdk_nvme_ctrlr_get_regs_cap(controller);
    uint32_t entries_max = (uint32_t)capabilities.bits.mqes + 1;
    uint32_t entries = queue->request_count + 1; /* one stays empty */
    options.io_queue_size = entries < entries_max ? entries : entries_max;
    options.io_queue_requests = requests_wanted(queue);
    options.delay_cmd_submit = true;
    options.async_mode = queue->controller->fabrics; /* connecting must not block poll */
    return spdk_nvme_ctrlr_alloc_io_qpair(controller, &options, sizeof options);
}

/* Allocates or reconnects SPDK's queue pair. Over fabrics it accepts requests at once and connects
 * while it is polled; a failed connect then counts as a lost connection. */
static bool connect_qpair(struct queue *queue)
{
    if (queue->spdk == NULL) {
        queue->spdk = allocate(queue);
        if (queue->spdk == NULL) {
            return false;
        }
    } else {
        (void)spdk_nvme_qpair_process_completions(queue->spdk, 0); /* completes a disconnect */
        if (spdk_nvme_ctrlr_reconnect_io_qpair(queue->spdk) != 0) {
            return false;
        }
    }
    queue->ns = spdk_nvme_ctrlr_get_ns(queue->controller->spdk, queue->device->nsid);
    queue->namespace_gone = queue->ns == NULL || !spdk_nvme_ns_is_active(queue->ns);
    queue->incarnation = atomic_load(&queue->controller->incarnation);
    queue->write_lost = false;
    queue->connected = true;
    return true;
}

/* Schedules the next attempt to connect after a longer pause. */
static void back_off(struct queue *queue)
{
    queue->backoff_ns *= 2;
    if (queue->backoff_ns > BACKOFF_LAST_NS) {
        queue->backoff_ns = BACKOFF_LAST_NS;
    }
    queue->retry_at_ns = monotonic_ns() + queue->backoff_ns;
}

/* Notes that the connection failed; SPDK has aborted all requests in flight. */
static void note_disconnect(struct queue *queue)
{
    queue->connected = false;
    if (queue->down_since_ns == 0) {
        queue->down_since_ns = monotonic_ns();
        queue->backoff_ns = BACKOFF_FIRST_NS;
        queue->retry_at_ns = 0;
    } else { /* the attempt to connect failed */
        back_off(queue);
    }
    controller_check(queue->controller);
}

/*
 * Disconnects, so that nothing can write to the buffers of requests in flight any more. Over PCIe
 * only a reset of the controller guarantees that. timed_out: the target did not answer in time.
 */
static void disconnect_queue(struct queue *queue, bool timed_out)
{
    if (!queue->controller->fabrics) {
        controller_reset(queue->controller, timed_out);
        return;
    }
    if (timed_out && queue->writes_in_flight > 0) {
        atomic_store(&queue->controller->timed_out, true); /* ensure_connected resets it */
    }
    spdk_nvme_ctrlr_disconnect_io_qpair(queue->spdk);
    note_disconnect(queue);
}

/* Frees SPDK's queue pair. */
static void free_qpair(struct queue *queue)
{
    if (queue->spdk != NULL) {
        (void)spdk_nvme_ctrlr_free_io_qpair(queue->spdk);
        queue->spdk = NULL;
        queue->ns = NULL;
    }
}

/* Handles the disconnect of the controller; see struct queue_link. Over fabrics it frees SPDK's
 * queue pair. */
static void on_controller_disconnect(struct queue_link *link, bool timed_out)
{
    struct queue *queue = (struct queue *)link;
    if (timed_out) {
        operations_fail_writes(queue, DLFS_E_TIMEOUT);
    }
    if (queue->connected) {
        note_disconnect(queue);
    }
    if (queue->controller->fabrics || atomic_load(&queue->controller->state) == CONTROLLER_LOST) {
        free_qpair(queue);
    }
}

/* Ends waiting operations if the device has been unreachable for reconnect_ms. */
static void fail_unreachable(struct queue *queue, uint64_t now)
{
    bool lost = atomic_load(&queue->controller->state) == CONTROLLER_LOST;
    uint64_t since = queue->down_since_ns;
    if (lost || (since != 0 && now - since > queue->device->reconnect_ms * NS_PER_MS)) {
        operations_fail_waiting(queue, DLFS_E_LOST);
    }
}

/* Returns true if the queue pair is connected; tries to connect it if an attempt is due. */
static bool ensure_connected(struct queue *queue)
{
    bool ready = atomic_load(&queue->controller->state) == CONTROLLER_READY;
    bool same = queue->incarnation == atomic_load(&queue->controller->incarnation);
    if (spdk_likely(queue->connected && ready && same)) {
        return true;
    }
    uint64_t now = monotonic_ns();
    if (queue->down_since_ns == 0) {
        queue->down_since_ns = now;
    }
    if (ready && same && queue->write_lost) {
        controller_reset(queue->controller, false);
    } else if (ready && now >= queue->retry_at_ns) {
        if (connect_qpair(queue)) {
            return true;
        }
        back_off(queue);
        controller_check(queue->controller);
    }
    fail_unreachable(queue, monotonic_ns());
    return false;
}

/* Ends operations whose time limit has passed. */
static void check_times(struct queue *queue, uint64_t now)
{
    queue->checked_ns = now;
    operations_expire_waiting(queue, now);
    if (operations_time_out(queue, now)) {
        disconnect_queue(queue, true);
    }
}

/* Disconnects if writes were issued that may not be sent now, before SPDK sends them. */
static bool stop_forbidden_writes(struct queue *queue)
{
    int permit = 0;
    if (queue->writes_in_flight > 0) {
        permit = nvme_write_permit(&queue->device->write_limit, queue->incarnation);
    }
    if (permit == -EKEYEXPIRED) {
        operations_fail_writes(queue, permit);
    }
    if (permit < 0) {
        disconnect_queue(queue, false);
    }
    return permit < 0;
}

/* Issues requests and polls SPDK once for up to count completions (0: all). With the lock held. */
static void process(struct queue *queue, uint32_t count)
{
    if (!ensure_connected(queue)) {
        return;
    }
    if (spdk_unlikely(queue->namespace_gone)) {
        operations_fail_waiting(queue, DLFS_E_LOST);
        return;
    }
    bool issued = operations_issue(queue);
    if (spdk_unlikely(stop_forbidden_writes(queue))) {
        return;
    }
    if (spdk_unlikely(!issued || spdk_nvme_qpair_process_completions(queue->spdk, count) < 0)) {
        /* Over fabrics, makes SPDK abort all requests: it must not use their buffers any more. */
        if (queue->controller->fabrics) {
            spdk_nvme_ctrlr_disconnect_io_qpair(queue->spdk);
        }
        note_disconnect(queue);
        return;
    }
    if (spdk_unlikely(queue->down_since_ns != 0 && spdk_nvme_qpair_is_connected(queue->spdk))) {
        queue->down_since_ns = 0;
    }
    if (spdk_unlikely(queue->waiting.first != NONE)) {
        (void)operations_issue(queue);
    }
}

/* ---- submit and poll ------------------------------------------------------------------------- */

int queue_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct queue *queue = (struct queue *)base;
    uint64_t now = monotonic_ns();
    (void)pthread_mutex_lock(&queue->link.lock);
    for (uint32_t i = 0; i < count; i++) {
        operation_add(queue, &operations[i], now);
    }
    /* Over TCP, SPDK sends requests only when it is polled: polling now lets the target work while
     * the caller does something else. It takes as many completions as operations were submitted,
     * which often saves the next poll. The operations are accepted in any case. */
    bool ready = atomic_load(&queue->controller->state) == CONTROLLER_READY;
    if (spdk_likely(ready && queue->connected && !queue->namespace_gone && count > 0)) {
        process(queue, count);
    }
    (void)pthread_mutex_unlock(&queue->link.lock);
    return (int)count;
}

/* Yields or sleeps after a poll without completions, the longer the more time passed without one.
 */
static void idle(bool connected, uint64_t idle_ns)
{
    if (!connected) {
        shim_sleep_ns(NS_PER_MS);
    } else if (idle_ns > YIELD_NS) {
        shim_sleep_ns(SLEEP_NS);
    } else if (idle_ns > SPIN_NS) {
        (void)sched_yield();
    }
}

int queue_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count, int timeout_ms)
{
    struct queue *queue = (struct queue *)base;
    uint64_t start_ns = 0;
    for (;;) {
        (void)pthread_mutex_lock(&queue->link.lock);
        /* Polls for no more completions than the caller takes: their data is then still in the
         * CPU caches, and no poll is spent on an empty connection. */
        if (queue->finished_count < count) {
            process(queue, count - queue->finished_count);
        }
        uint32_t filled = operations_take_finished(queue, completions, count);
        bool check = filled == 0 || ++queue->poll_count % CHECK_POLLS == 0;
        uint64_t now = check ? monotonic_ns() : 0;
        if (check && queue->connected && now - queue->checked_ns > CHECK_NS) {
            check_times(queue, now);
        }
        bool connected = queue->connected;
        (void)pthread_mutex_unlock(&queue->link.lock);
        start_ns = start_ns == 0 ? now : start_ns;
        bool over = timeout_ms >= 0 && now - start_ns >= (uint64_t)timeout_ms * NS_PER_MS;
        if (filled > 0 || over) {
            return (int)filled;
        }
        idle(connected, now - start_ns);
    }
}

static int queue_register(dlfs_queue *base, void *start, size_t bytes)
{
    struct queue *queue = (struct queue *)base;
    enum spdk_nvme_transport_type transport = queue->controller->transport_id.trtype;
    if (environment_is_foreign()) {
        return DLFS_E_CLOSED;
    }
    range_release(queue->range);
    queue->range = NULL;
    bool bounces = (queue->device->flags & DLFS_SPDK_BOUNCE) != 0;
    if (start != NULL && queue->needs_dma && !bounces) {
        queue->range = range_register(transport, start, bytes);
    }
    return 0;
}

uint64_t queue_incarnation(const dlfs_queue *base)
{
    return ((const struct queue *)base)->incarnation;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Allocates bounce memory: for as many requests as possible, at least one. */
static int make_bounce(struct queue *queue)
{
    uint32_t count = queue->depth < BOUNCE_COUNT_MAX ? queue->depth : BOUNCE_COUNT_MAX;
    for (; queue->bounce == NULL && count > 0; count /= 2) {
        queue->bounce = spdk_malloc((size_t)count * BOUNCE_BYTES, 4096, NULL, SPDK_ENV_NUMA_ID_ANY,
                                    SPDK_MALLOC_DMA);
        queue->bounce_count = queue->bounce != NULL ? count : 0;
    }
    return queue->bounce != NULL ? 0 : -ENOMEM;
}

static void queue_free(struct queue *queue)
{
    (void)pthread_mutex_destroy(&queue->link.lock);
    free(queue->requests);
    free(queue);
}

/* Connects a new queue pair. If the controller is disconnected, poll tries further. If the
 * controller is connected but refuses the queue pair, its limit of queue pairs is reached. */
static int connect_first(struct queue *queue)
{
    uint64_t deadline_ns = monotonic_ns() + queue->controller->connect_ms * NS_PER_MS;
    queue->down_since_ns = monotonic_ns();
    while (queue->backoff_ns <= BACKOFF_REFUSED_NS) {
        (void)pthread_mutex_lock(&queue->link.lock);
        process(queue, 0);
        bool up = queue->connected && queue->down_since_ns == 0;
        (void)pthread_mutex_unlock(&queue->link.lock);
        bool ready = atomic_load(&queue->controller->state) == CONTROLLER_READY;
        if (up || !ready || monotonic_ns() > deadline_ns) {
            return 0;
        }
        shim_sleep_ns(STEP_NS);
    }
    return DLFS_E_LIMIT;
}

static const struct dlfs_queue_ops queue_ops = {
    .submit = queue_submit,
    .poll = queue_poll,
    .register_range = queue_register,
    .destroy = queue_destroy,
    .abandon = queue_abandon,
};

int queue_create(dlfs_device *base, uint32_t depth, const struct dlfs_connect_limit *limit,
                 dlfs_queue **out)
{
    (void)limit;
    struct device *device = (struct device *)base;
    if (environment_is_foreign()) {
        return DLFS_E_CLOSED;
    }
    struct queue *queue = calloc(1, sizeof *queue + depth * sizeof queue->operations[0]);
    if (queue == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_init(&queue->link.lock, NULL);
    queue->link.base.ops = &queue_ops;
    queue->link.on_disconnect = on_controller_disconnect;
    queue->device = device;
    queue->controller = device->controller;
    queue->depth = depth;
    queue->backoff_ns = BACKOFF_FIRST_NS;
    queue->request_count = depth;
    queue->requests = calloc(depth, sizeof *queue->requests);
    bool tcp = device->controller->transport_id.trtype == SPDK_NVME_TRANSPORT_TCP;
    queue->needs_dma = !tcp || (device->flags & DLFS_SPDK_BOUNCE) != 0;
    int code = queue->requests == NULL ? -ENOMEM : 0;
    if (code == 0 && queue->needs_dma) {
        code = make_bounce(queue);
    }
    if (code < 0) {
        queue_free(queue);
        return code;
    }
    operations_init(queue);
    controller_attach_queue(device->controller, &queue->link);
    code = connect_first(queue);
    if (code < 0) {
        queue_destroy(&queue->link.base);
        return code;
    }
    *out = &queue->link.base;
    return 0;
}

/* Frees SPDK's queue pair; returns false while the admin thread resets the controller. */
static bool try_free_qpair(struct queue *queue)
{
    (void)pthread_mutex_lock(&queue->link.lock);
    bool resetting =
        queue->spdk != NULL && atomic_load(&queue->controller->state) == CONTROLLER_DOWN;
    if (!resetting) {
        queue->connected = false;
        free_qpair(queue);
    }
    (void)pthread_mutex_unlock(&queue->link.lock);
    return !resetting;
}

void queue_destroy(dlfs_queue *base)
{
    struct queue *queue = (struct queue *)base;
    while (!try_free_qpair(queue)) {
        shim_sleep_ns(NS_PER_MS);
    }
    controller_detach_queue(queue->controller, &queue->link);
    range_release(queue->range);
    spdk_free(queue->bounce);
    queue_free(queue);
}

/* Frees only this process's memory: SPDK's objects belong to the parent process, and one of its
 * threads may have held the lock at the fork. */
void queue_abandon(dlfs_queue *base)
{
    struct queue *queue = (struct queue *)base;
    free(queue->requests);
    free(queue);
}
