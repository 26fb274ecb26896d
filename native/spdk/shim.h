/*
 * What the shim's parts share: the environment (environment.c), controllers and their admin thread
 * (controller.c, admin.c), memory that devices may reach (memory.c), queue pairs (queue.c,
 * request.c) and the devices made of them (device.c).
 *
 * Locks, in the order in which they are taken: the registry's (controllers opened and closed), a
 * controller's, a queue pair's, a controller's admin lock. A queue pair's lock is held by whoever
 * calls SPDK with it: its user, or the admin thread when it resets the controller. It is never
 * contended otherwise, so that it costs next to nothing.
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

#include "dlfs_spdk.h"
#include "nvme/writes.h"

#define NS_PER_MS UINT64_C(1000000)

void shim_sleep_ns(uint64_t duration_ns);

/* ---- environment ----------------------------------------------------------------------------- */

/* Starts it on the first call, else checks that it suits; message gets what is wrong. */
int environment_start(const dlfs_spdk_config *config, bool needs_pci, char *message,
                      size_t message_bytes);
/* Whether this process is a fork of the one that started it. */
bool environment_is_foreign(void);

/* The text of SPDK's first errors since a mark, joined; empty when there were none. */
unsigned log_mark(void);
void log_text(unsigned mark, char *text, size_t text_bytes);

/* ---- controllers ----------------------------------------------------------------------------- */

enum controller_state {
    CONTROLLER_READY,
    CONTROLLER_DOWN, /* being connected again */
    CONTROLLER_LOST, /* for good: the device was removed */
};

struct queue;

struct controller {
    struct controller *next; /* in the registry */
    struct spdk_nvme_ctrlr *spdk;
    struct spdk_nvme_transport_id transport_id;
    char host_nqn[SPDK_NVMF_NQN_MAX_LEN + 1];
    uint32_t digests; /* DLFS_SPDK_*_DIGEST */
    uint32_t users;
    uint32_t timeout_ms;
    uint32_t connect_ms;
    uint32_t queues_wanted; /* for I/O; a controller may grant fewer */
    bool fabrics;

    pthread_mutex_t lock;       /* queues */
    pthread_mutex_t admin_lock; /* whoever polls the admin queue */
    struct queue *queues;
    _Atomic int state; /* enum controller_state; changes under all the locks */
    _Atomic uint64_t down_since_ns;
    _Atomic uint64_t generation; /* controllers that were lost, so far; changes as state does */
    _Atomic uint64_t quiesce_ns; /* see nvme_quiesce_ms */

    pthread_t thread;
    sem_t wake;
    _Atomic bool stopping;
    _Atomic bool reset_wanted;
    _Atomic bool silent; /* why: no answer in time */
    _Atomic bool removed;
    _Atomic uint64_t heartbeat_ns; /* when the one in flight was sent, else 0 */
    uint64_t heartbeat_next_ns;
    uint32_t heartbeat_ms;
    uint64_t retry_at_ns;
    uint64_t backoff_ns;
    uint32_t attempts; /* in vain, since it went down */
};

/* SPDK's text, with what it may leave out over TCP and RDMA. */
int transport_parse(const char *text, struct spdk_nvme_transport_id *transport_id);
/* Connects, or joins a connection of this process. */
int controller_get(const dlfs_spdk_config *config,
                   const struct spdk_nvme_transport_id *transport_id, char *message,
                   size_t message_bytes, struct controller **out);
void controller_put(struct controller *controller);
/* Ends all admin threads, before SPDK's own destructors run. */
void controller_stop_all(void);
void controller_attach_queue(struct controller *controller, struct queue *queue);
void controller_detach_queue(struct controller *controller, struct queue *queue);
/* The admin thread, given its controller. */
void *controller_main(void *argument);
/* Has the admin thread look at the connection now. */
void controller_check(struct controller *controller);
/* Has it make a new one; silent: since the target did not answer in time. */
void controller_reset(struct controller *controller, bool silent);
/* Notes how long the controller that was just made takes to quiesce. */
void controller_note_quiesce(struct controller *controller);
/* As dlfs_spdk_run for the admin queue. buffer is memory that the device may reach. */
int controller_run(struct controller *controller, uint32_t reconnect_ms, uint32_t timeout_ms,
                   dlfs_spdk_command *command, void *data, uint32_t data_bytes);
void command_encode(const dlfs_spdk_command *command, struct spdk_nvme_cmd *out);
void command_answer(dlfs_spdk_command *command, const struct spdk_nvme_cpl *completion);

/* ---- memory ---------------------------------------------------------------------------------- */

struct range; /* registered with SPDK, counted */

/*
 * Registers the huge-page-aligned inside of a range for DMA. NULL when there is no such inside or
 * SPDK refuses, and where the memory could move under the device.
 */
struct range *range_register(enum spdk_nvme_transport_type transport, void *base, size_t bytes);
void range_release(struct range *range);
bool range_holds(const struct range *range, const void *buffer, size_t bytes);

/* ---- queue pairs ----------------------------------------------------------------------------- */

struct device {
    struct dlfs_external external; /* first: what callers hold */
    struct controller *controller;
    uint32_t nsid;
    uint32_t flags;
    uint32_t timeout_ms;
    uint32_t reconnect_ms;
    dlfs_spdk_info info;
    bool volatile_cache; /* the controller has one */
    struct nvme_durability durability;
    struct nvme_write_limit write_limit;
    pthread_mutex_t command_lock; /* the queue pair of flushes and single commands */
    struct queue *command_queue;  /* made when it is first needed */
    void *command_data;
};

/* Operations that only the shim itself submits, beside DLFS_OP_READ and DLFS_OP_WRITE; they go in
 * one piece, and have a length of 1. */
#define OP_FLUSH 100u
#define OP_COMMAND 101u /* the buffer is a struct raw_command */

struct raw_command {
    dlfs_spdk_command *command;
    void *data;
    uint32_t data_bytes;
};

int queue_create(void *device, uint32_t depth, void **out);
int queue_submit(void *queue, const dlfs_operation *operations, uint32_t count);
int queue_poll(void *queue, dlfs_completion *completions, uint32_t count, int timeout_ms);
int queue_register(void *queue, void *base, size_t bytes);
void queue_destroy(void *queue);
void queue_abandon(void *queue);
/* Of the controller that ran the operation which was polled last. The queue pair's user only. */
uint64_t queue_generation(const struct queue *queue);

/* For the admin thread. */
struct queue *queue_next(const struct queue *queue);
void queue_link(struct queue *queue, struct queue *next);
void queue_lock(struct queue *queue);
void queue_unlock(struct queue *queue);
/* The controller is of the past. Over fabrics SPDK's queue pair goes with it. silent: since the
 * target did not answer in time. With the lock held. */
void queue_leave(struct queue *queue, bool silent);

#endif
