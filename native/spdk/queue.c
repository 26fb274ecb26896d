/*
 * Queue pairs over SPDK's: their connection, and polling.
 *
 * A connection that is lost is made anew, with pauses that double, for as long as a device may be
 * out of reach; then what waits ends with DLFS_E_LOST. A command that is not answered in time takes
 * the connection with it, so that nothing can reach its buffer any more. A write whose answer is
 * missing takes the whole controller with it: how long a target takes to be done with it counts
 * from the end of all connections.
 *
 * SPDK sends what was issued when it is polled. While writes are in flight, the lease of this
 * host's writer is looked at right before that, and where it is over the connection goes instead.
 *
 * Polling is SPDK's way: poll looks at the device again and again. After a while without a
 * completion it lets other threads run between two looks, and later sleeps a little.
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

#define SPIN_NS NS_PER_MS        /* without a completion, before other threads may run */
#define YIELD_NS (2 * NS_PER_MS) /* the same, before a little sleep */
#define NAP_NS UINT64_C(50000)
#define CHECK_LOOKS 1024u /* between two looks at the time, while completions come */
#define CHECK_NS (UINT64_C(10) * NS_PER_MS)
#define BACKOFF_FIRST_NS (UINT64_C(5) * NS_PER_MS)
#define BACKOFF_LAST_NS (UINT64_C(500) * NS_PER_MS)
#define STEP_NS UINT64_C(50000) /* between two looks at a connection that is made */
#define BACKOFF_REFUSED_NS (UINT64_C(50) * NS_PER_MS) /* some failures in a row */

struct queue *queue_next(const struct queue *queue)
{
    return queue->next;
}

void queue_link(struct queue *queue, struct queue *next)
{
    queue->next = next;
}

void queue_lock(struct queue *queue)
{
    (void)pthread_mutex_lock(&queue->lock);
}

void queue_unlock(struct queue *queue)
{
    (void)pthread_mutex_unlock(&queue->lock);
}

/* ---- the connection -------------------------------------------------------------------------- */

static uint32_t requests_wanted(const struct queue *queue)
{
    uint32_t transfer = queue->device->info.max_transfer_bytes;
    uint32_t children = PIECE_BYTES > transfer ? PIECE_BYTES / transfer + 2 : 1;
    uint64_t all = (uint64_t)queue->piece_count * children;
    uint32_t least = queue->piece_count + children;
    return all < REQUESTS_MAX ? (uint32_t)all : least > REQUESTS_MAX ? least : REQUESTS_MAX;
}

static struct spdk_nvme_qpair *allocate(const struct queue *queue)
{
    struct spdk_nvme_io_qpair_opts options;
    struct spdk_nvme_ctrlr *controller = queue->controller->spdk;
    spdk_nvme_ctrlr_get_default_io_qpair_opts(controller, &options, sizeof options);
    union spdk_nvme_cap_register capabilities = spdk_nvme_ctrlr_get_regs_cap(controller);
    uint32_t entries_max = (uint32_t)capabilities.bits.mqes + 1;
    uint32_t entries = queue->piece_count + 1; /* one stays empty */
    options.io_queue_size = entries < entries_max ? entries : entries_max;
    options.io_queue_requests = requests_wanted(queue);
    options.delay_cmd_submit = true;
    options.async_mode = queue->controller->fabrics; /* connecting must not hold up poll */
    return spdk_nvme_ctrlr_alloc_io_qpair(controller, &options, sizeof options);
}

/* Makes or mends SPDK's queue pair. Over fabrics it goes on connecting while it is polled, and
 * takes requests already; a failure is one of the connection. */
static bool establish(struct queue *queue)
{
    if (queue->spdk == NULL) {
        queue->spdk = allocate(queue);
        if (queue->spdk == NULL) {
            return false;
        }
    } else {
        (void)spdk_nvme_qpair_process_completions(queue->spdk, 0); /* ends what it still undoes */
        if (spdk_nvme_ctrlr_reconnect_io_qpair(queue->spdk) != 0) {
            return false;
        }
    }
    queue->ns = spdk_nvme_ctrlr_get_ns(queue->controller->spdk, queue->device->nsid);
    queue->namespace_gone = queue->ns == NULL || !spdk_nvme_ns_is_active(queue->ns);
    queue->generation = atomic_load(&queue->controller->generation);
    queue->write_lost = false;
    queue->connected = true;
    return true;
}

/* The next attempt is later than the last one was. */
static void put_off(struct queue *queue)
{
    queue->backoff_ns *= 2;
    if (queue->backoff_ns > BACKOFF_LAST_NS) {
        queue->backoff_ns = BACKOFF_LAST_NS;
    }
    queue->retry_at_ns = monotonic_ns() + queue->backoff_ns;
}

/* The connection failed; what was in flight has been aborted. */
static void note_loss(struct queue *queue)
{
    queue->connected = false;
    if (queue->down_since_ns == 0) {
        queue->down_since_ns = monotonic_ns();
        queue->backoff_ns = BACKOFF_FIRST_NS;
        queue->retry_at_ns = 0;
    } else { /* it never came to be well */
        put_off(queue);
    }
    controller_check(queue->controller);
}

/* Gives the connection up: nothing can reach the memory of what was in flight any more. Over PCIe
 * only a reset makes sure of that. silent: the target did not answer in time. */
static void drop(struct queue *queue, bool silent)
{
    if (!queue->controller->fabrics) {
        controller_reset(queue->controller, silent);
        return;
    }
    if (silent && queue->writing > 0) {
        atomic_store(&queue->controller->silent, true); /* which goes too, see have_connection */
    }
    spdk_nvme_ctrlr_disconnect_io_qpair(queue->spdk);
    note_loss(queue);
}

/* Gives SPDK's queue pair back. */
static void release(struct queue *queue)
{
    if (queue->spdk != NULL) {
        (void)spdk_nvme_ctrlr_free_io_qpair(queue->spdk);
        queue->spdk = NULL;
        queue->ns = NULL;
    }
}

void queue_leave(struct queue *queue, bool silent)
{
    if (silent) {
        request_doom_writes(queue, DLFS_E_TIMEOUT);
    }
    if (queue->connected) {
        note_loss(queue);
    }
    if (queue->controller->fabrics || atomic_load(&queue->controller->state) == CONTROLLER_LOST) {
        release(queue);
    }
}

/* Ends what has been out of reach for too long. */
static void give_up(struct queue *queue, uint64_t now)
{
    bool lost = atomic_load(&queue->controller->state) == CONTROLLER_LOST;
    uint64_t since = queue->down_since_ns;
    if (lost || (since != 0 && now - since > queue->device->reconnect_ms * NS_PER_MS)) {
        request_fail_waiting(queue, DLFS_E_LOST);
    }
}

/* Whether there is a connection, after an attempt to have one when it is time for it. */
static bool have_connection(struct queue *queue)
{
    bool ready = atomic_load(&queue->controller->state) == CONTROLLER_READY;
    bool same = queue->generation == atomic_load(&queue->controller->generation);
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
        if (establish(queue)) {
            return true;
        }
        put_off(queue);
        controller_check(queue->controller);
    }
    give_up(queue, monotonic_ns());
    return false;
}

/* Ends what was not answered in time. */
static void check_times(struct queue *queue, uint64_t now)
{
    queue->checked_ns = now;
    request_end_waiting(queue, now);
    if (request_doom_late(queue, now)) {
        drop(queue, true);
    }
}

/* Drops the connection when writes are in flight that may not be sent now, before SPDK sends them.
 */
static bool withdraw_writes(struct queue *queue)
{
    int permit = 0;
    if (queue->writing > 0) {
        permit = nvme_write_permit(&queue->device->write_limit, queue->generation);
    }
    if (permit == -EKEYEXPIRED) {
        request_doom_writes(queue, permit);
    }
    if (permit < 0) {
        drop(queue, false);
    }
    return permit < 0;
}

/* One look at the device, with the lock held, for up to count completions of SPDK's (0: all). */
static void look(struct queue *queue, uint32_t count)
{
    if (!have_connection(queue)) {
        return;
    }
    if (spdk_unlikely(queue->namespace_gone)) {
        request_fail_waiting(queue, DLFS_E_LOST);
        return;
    }
    bool issued = request_issue(queue);
    if (spdk_unlikely(withdraw_writes(queue))) {
        return;
    }
    if (spdk_unlikely(!issued || spdk_nvme_qpair_process_completions(queue->spdk, count) < 0)) {
        /* Aborts what SPDK has not: over fabrics it must let go of every buffer. */
        if (queue->controller->fabrics) {
            spdk_nvme_ctrlr_disconnect_io_qpair(queue->spdk);
        }
        note_loss(queue);
        return;
    }
    if (spdk_unlikely(queue->down_since_ns != 0 && spdk_nvme_qpair_is_connected(queue->spdk))) {
        queue->down_since_ns = 0;
    }
    if (spdk_unlikely(queue->waiting.first != NONE)) {
        (void)request_issue(queue);
    }
}

/* ---- the queue pair's face ------------------------------------------------------------------- */

int queue_submit(void *argument, const dlfs_operation *operations, uint32_t count)
{
    struct queue *queue = argument;
    uint64_t now = monotonic_ns();
    queue_lock(queue);
    for (uint32_t i = 0; i < count; i++) {
        request_add(queue, &operations[i], now);
    }
    /* Over TCP, SPDK keeps requests until it is asked for completions: the target shall have them
     * while the caller is busy with others. So many are taken as were submitted, which saves the
     * next poll its look. They are accepted whatever becomes of this. */
    bool ready = atomic_load(&queue->controller->state) == CONTROLLER_READY;
    if (spdk_likely(ready && queue->connected && !queue->namespace_gone && count > 0)) {
        look(queue, count);
    }
    queue_unlock(queue);
    return (int)count;
}

/* Between two looks that found nothing: lets others run, the longer it takes the more. */
static void relax(bool connected, uint64_t idle_ns)
{
    if (!connected) {
        shim_sleep_ns(NS_PER_MS);
    } else if (idle_ns > YIELD_NS) {
        shim_sleep_ns(NAP_NS);
    } else if (idle_ns > SPIN_NS) {
        (void)sched_yield();
    }
}

int queue_poll(void *argument, dlfs_completion *completions, uint32_t count, int timeout_ms)
{
    struct queue *queue = argument;
    uint64_t start_ns = 0;
    for (;;) {
        queue_lock(queue);
        /* No more than the caller takes now: its data is to be in the processor's caches still, and
         * the look that finds the connection empty is saved. */
        if (queue->finished_count < count) {
            look(queue, count - queue->finished_count);
        }
        uint32_t filled = request_take_finished(queue, completions, count);
        bool check = filled == 0 || ++queue->looks % CHECK_LOOKS == 0;
        uint64_t now = check ? monotonic_ns() : 0;
        if (check && queue->connected && now - queue->checked_ns > CHECK_NS) {
            check_times(queue, now);
        }
        bool connected = queue->connected;
        queue_unlock(queue);
        start_ns = start_ns == 0 ? now : start_ns;
        bool over = timeout_ms >= 0 && now - start_ns >= (uint64_t)timeout_ms * NS_PER_MS;
        if (filled > 0 || over) {
            return (int)filled;
        }
        relax(connected, now - start_ns);
    }
}

int queue_register(void *argument, void *base, size_t bytes)
{
    struct queue *queue = argument;
    enum spdk_nvme_transport_type transport = queue->controller->transport_id.trtype;
    if (environment_is_foreign()) {
        return DLFS_E_CLOSED;
    }
    range_release(queue->range);
    queue->range = NULL;
    bool bounces = (queue->device->flags & DLFS_SPDK_BOUNCE) != 0;
    if (base != NULL && queue->needs_dma && !bounces) {
        queue->range = range_register(transport, base, bytes);
    }
    return 0;
}

uint64_t queue_generation(const struct queue *queue)
{
    return queue->generation;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* The memory by which data goes that devices cannot reach: as much as there is, down to one piece.
 */
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
    (void)pthread_mutex_destroy(&queue->lock);
    free(queue->pieces);
    free(queue);
}

/* The first connection. Where the controller is out of reach, poll goes on trying; one that is well
 * and refuses has no queue pair left. */
static int connect_first(struct queue *queue)
{
    uint64_t deadline_ns = monotonic_ns() + queue->controller->connect_ms * NS_PER_MS;
    queue->down_since_ns = monotonic_ns();
    while (queue->backoff_ns <= BACKOFF_REFUSED_NS) {
        queue_lock(queue);
        look(queue, 0);
        bool up = queue->connected && queue->down_since_ns == 0;
        queue_unlock(queue);
        bool ready = atomic_load(&queue->controller->state) == CONTROLLER_READY;
        if (up || !ready || monotonic_ns() > deadline_ns) {
            return 0;
        }
        shim_sleep_ns(STEP_NS);
    }
    return DLFS_E_LIMIT;
}

int queue_create(void *argument, uint32_t depth, void **out)
{
    struct device *device = argument;
    if (environment_is_foreign()) {
        return DLFS_E_CLOSED;
    }
    struct queue *queue = calloc(1, sizeof *queue + depth * sizeof queue->slots[0]);
    if (queue == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_init(&queue->lock, NULL);
    queue->device = device;
    queue->controller = device->controller;
    queue->depth = depth;
    queue->backoff_ns = BACKOFF_FIRST_NS;
    queue->piece_count = depth;
    queue->pieces = calloc(depth, sizeof *queue->pieces);
    bool tcp = device->controller->transport_id.trtype == SPDK_NVME_TRANSPORT_TCP;
    queue->needs_dma = !tcp || (device->flags & DLFS_SPDK_BOUNCE) != 0;
    int code = queue->pieces == NULL ? -ENOMEM : 0;
    if (code == 0 && queue->needs_dma) {
        code = make_bounce(queue);
    }
    if (code < 0) {
        queue_free(queue);
        return code;
    }
    request_init(queue);
    controller_attach_queue(device->controller, queue);
    code = connect_first(queue);
    if (code < 0) {
        queue_destroy(queue);
        return code;
    }
    *out = queue;
    return 0;
}

/* Gives SPDK's queue pair back for good; false while the admin thread is mending it. */
static bool retire(struct queue *queue)
{
    queue_lock(queue);
    bool mending = queue->spdk != NULL && atomic_load(&queue->controller->state) == CONTROLLER_DOWN;
    if (!mending) {
        queue->connected = false;
        release(queue);
    }
    queue_unlock(queue);
    return !mending;
}

void queue_destroy(void *argument)
{
    struct queue *queue = argument;
    while (!retire(queue)) {
        shim_sleep_ns(NS_PER_MS);
    }
    controller_detach_queue(queue->controller, queue);
    range_release(queue->range);
    spdk_free(queue->bounce);
    queue_free(queue);
}

/* SPDK's part is the parent's, and the lock may be held by one of its threads for ever: only the
 * memory is ours. */
void queue_abandon(void *argument)
{
    struct queue *queue = argument;
    free(queue->pieces);
    free(queue);
}
