/*
 * The internal interfaces of libdlfs_spdk. Each file calls only those above it in this list:
 *
 *   environment.c   SPDK's environment: started once in a process; SPDK's log messages
 *   memory.c        ranges of the caller's memory that are registered for DMA
 *   admin.c         a controller's admin thread: keep-alive, reconnects; single admin commands
 *   controller.c    the controllers of this process, counted
 *   operations.c    operations of a queue pair as requests to SPDK (queue.h)
 *   queue.c         queue pairs: their connection, submit and poll
 *   device.c        namespaces as devices: open, flush, single commands
 *
 * Threads: each controller has an admin thread. Queue pairs are used by their callers' threads.
 *
 * Locks, in the order in which a thread may take them: the registry's (opening and closing of
 * controllers), a controller's, a queue pair's, a controller's admin lock. A thread that calls SPDK
 * with a queue pair holds its lock: its user, or the admin thread during a reset. The lock is
 * contended only during a reset, so that it costs almost nothing.
 */
#ifndef DLFS_SPDK_SHIM_H
#define DLFS_SPDK_SHIM_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <spdk/stdinc.h>

#include <spdk/env.h>
#include <spdk/nvme.h>

#include "device/device.h"
#include "dlfs_spdk.h"
#include "nvme/protocol/writes.h"

#define NS_PER_MS UINT64_C(1000000)

void shim_sleep_ns(uint64_t duration_ns);

/* ---- environment ----------------------------------------------------------------------------- */

/*
 * Starts the environment on the first call; later calls check that it has the configured options.
 * message gets the reason of a failure.
 */
int environment_start(const dlfs_spdk_config *config, bool needs_pci, char *message,
                      size_t message_bytes);
/* Returns true in forked children of the process that started the environment. */
bool environment_is_foreign(void);

/* Returns a mark of SPDK's log for log_text. */
unsigned log_mark(void);
/* Joins SPDK's first error messages since a mark into text; empty if there were none. */
void log_text(unsigned mark, char *text, size_t text_bytes);

/* ---- controllers ----------------------------------------------------------------------------- */

enum controller_state {
    CONTROLLER_READY,
    CONTROLLER_DOWN, /* disconnected; the admin thread connects again */
    CONTROLLER_LOST, /* removed or broken: it is not connected again */
};

/* A queue pair as libdlfs and its controller see it: the first member of struct queue. */
struct queue_link {
    dlfs_queue base;
    struct queue_link *next; /* next queue pair of the controller */
    pthread_mutex_t lock;    /* held by the thread that calls SPDK with the queue pair */
    /* Called with the lock held when the controller is disconnected. timed_out: because the target
     * did not answer in time. */
    void (*on_disconnect)(struct queue_link *link, bool timed_out);
};

struct controller {
    struct controller *next; /* next one of the registry */
    struct spdk_nvme_ctrlr *spdk;
    struct spdk_nvme_transport_id transport_id;
    char host_nqn[SPDK_NVMF_NQN_MAX_LEN + 1];
    uint32_t users; /* devices that use it */
    uint32_t timeout_ms;
    uint32_t connect_ms;
    uint32_t queues_wanted; /* I/O queues to request; a controller may grant fewer */
    bool fabrics;

    pthread_mutex_t lock;       /* guards queues */
    pthread_mutex_t admin_lock; /* held by the thread that polls the admin queue */
    struct queue_link *queues;
    _Atomic int state; /* enum controller_state; changed while all locks are held */
    _Atomic uint64_t down_since_ns;
    _Atomic uint64_t incarnation; /* number of disconnects; changes together with state */
    _Atomic uint64_t quiesce_ns;  /* see nvme_quiesce_ms */

    pthread_t thread;
    sem_t wake;
    _Atomic bool stopping;
    _Atomic bool reset_wanted;
    _Atomic bool timed_out; /* the next disconnect is because of a missing answer */
    _Atomic bool removed;
    _Atomic uint64_t heartbeat_ns; /* when the keep-alive in flight was sent; 0: none is */
    uint64_t heartbeat_next_ns;
    uint32_t heartbeat_ms;
    uint64_t retry_at_ns;
    uint64_t backoff_ns;
    uint32_t attempts; /* failed attempts to connect since the disconnect */
};

/* Parses SPDK's transport ID and adds defaults for TCP and RDMA. */
int transport_parse(const char *text, struct spdk_nvme_transport_id *transport_id);
/* Returns the controller of a transport ID and host NQN; connects to it for its first user. */
int controller_get(const dlfs_spdk_config *config,
                   const struct spdk_nvme_transport_id *transport_id, char *message,
                   size_t message_bytes, struct controller **out);
/* Releases a controller; the last user's call disconnects it. */
void controller_put(struct controller *controller);

/* ---- admin.c ---- */

void controller_attach_queue(struct controller *controller, struct queue_link *link);
void controller_detach_queue(struct controller *controller, struct queue_link *link);
/* Main function of the admin thread; its argument is the controller. */
void *controller_main(void *argument);
/* Makes the admin thread check the connection now. */
void controller_check(struct controller *controller);
/* Makes the admin thread reset the connection. timed_out: the target did not answer in time. */
void controller_reset(struct controller *controller, bool timed_out);
/* Reads how long a newly connected controller takes to quiesce. */
void controller_read_quiesce(struct controller *controller);
/* Runs an admin command as dlfs_spdk_run does; waits up to reconnect_ms for a connection. */
int controller_run(struct controller *controller, uint32_t reconnect_ms, uint32_t timeout_ms,
                   const dlfs_nvme_command *command, void *data, uint32_t data_bytes,
                   uint32_t direction, dlfs_nvme_result *result);
/* Converts a caller's command to SPDK's, and SPDK's completion to the caller's. */
void command_encode(const dlfs_nvme_command *command, struct spdk_nvme_cmd *out);
dlfs_nvme_result command_result(const struct spdk_nvme_cpl *completion);

/* ---- memory ---------------------------------------------------------------------------------- */

struct range; /* memory that is registered with SPDK, counted */

/*
 * Registers the huge-page-aligned inner part of a range for DMA. Returns NULL if there is no such
 * part, if SPDK refuses it, or if the kernel could move the memory.
 */
struct range *range_register(enum spdk_nvme_transport_type transport, void *base, size_t bytes);
void range_release(struct range *range);
/* Returns true if a buffer lies within a range; false for a range of NULL. */
bool range_holds(const struct range *range, const void *buffer, size_t bytes);

/* ---- devices and queue pairs ----------------------------------------------------------------- */

struct device {
    dlfs_device base;
    struct controller *controller;
    uint32_t nsid;
    uint32_t flags;
    uint32_t timeout_ms;
    uint32_t reconnect_ms;
    dlfs_spdk_info info;
    bool volatile_cache; /* true if the controller has a volatile write cache */
    struct nvme_durability durability;
    struct nvme_write_limit write_limit;
    pthread_mutex_t command_lock; /* guards the two fields below */
    dlfs_queue *command_queue;    /* for flushes and single commands; created on first use */
    void *command_data;           /* DMA memory for the data of one command */
};

/* Kinds of operations that only device.c submits. They are one request each and have length 1. */
#define OP_FLUSH 100u
#define OP_COMMAND 101u /* the buffer is a struct raw_command */

struct raw_command {
    const dlfs_nvme_command *command;
    dlfs_nvme_result *result;
    void *data;
    uint32_t data_bytes;
};

int queue_create(dlfs_device *device, uint32_t depth, const struct dlfs_connect_limit *limit,
                 dlfs_queue **out);
int queue_submit(dlfs_queue *queue, const dlfs_operation *operations, uint32_t count);
int queue_poll(dlfs_queue *queue, dlfs_completion *completions, uint32_t count, int timeout_ms);
void queue_destroy(dlfs_queue *queue);
void queue_abandon(dlfs_queue *queue);
/* Returns the incarnation of the controller that ran the last operation. For the user's thread. */
uint64_t queue_incarnation(const dlfs_queue *queue);

#endif
