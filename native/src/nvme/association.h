/*
 * An association: the admin connection and all I/O connections of one host to one controller.
 *
 * Its thread (thread.c) opens all connections, sends keep-alives, runs admin commands, and connects
 * again when a connection fails. Callers (association.c) submit admin commands to the thread and
 * wait for them.
 *
 * A queue pair owns the connection that it uses, and has a link to the association. When the thread
 * has a new connection for it, or closes the present controller, it changes the link, sets the
 * link's signal and wakes the queue pair. The queue pair reads the signal, an atomic flag, in every
 * call, and takes the association's lock only when it is set.
 *
 * An incarnation is the number of a controller: each one that the thread connects, after the one
 * before has failed, has the next.
 *
 * Locks: association->lock guards the fields below it. No thread does I/O while it holds it.
 */
#ifndef DLFS_NVME_ASSOCIATION_H
#define DLFS_NVME_ASSOCIATION_H

#include <pthread.h>
#include <stdatomic.h>

#include "nvme/controller.h"
#include "nvme/protocol/writes.h"

struct nvme_counters {
    _Atomic uint64_t reconnects;
    _Atomic uint64_t retries;
    _Atomic uint64_t timeouts;
    _Atomic uint64_t digest_errors;
    _Atomic uint64_t protocol_errors;
    _Atomic uint64_t path_moves;
    _Atomic uint64_t events[NVME_EVENT_KINDS]; /* by kind */
};

/* The link between one queue pair and the association; freed when both have released it. */
struct nvme_link {
    struct nvme_link *next;
    int wake;                /* an eventfd, readable after signal was set */
    _Atomic uint32_t signal; /* 1: the fields below have changed */
    /* Guarded by the association's lock. */
    uint32_t command_count;             /* commands in flight that the queue pair wants */
    uint16_t qid;                       /* 0: none yet */
    bool needs_connection;              /* the thread shall connect it */
    bool connecting;                    /* the thread is connecting it */
    bool released;                      /* the queue pair does not use the link any more */
    bool was_connected;                 /* it had a connection before */
    bool timed_out;                     /* a timeout ended an incarnation since the last update */
    struct nvme_connection *connection; /* connected, and not yet taken by the queue pair */
    int code;                           /* < 0: why it will get no connection */
    uint64_t since_ns;                  /* when needs_connection or code was set */
    uint64_t retry_at_ns;               /* time of the next attempt to connect */
    uint32_t backoff_ms;                /* pause before it */
};

/* An admin command for the thread to run. */
struct nvme_admin_request {
    struct nvme_admin_request *next;
    struct nvme_exchange *exchange;
    enum { NVME_REQUEST_WAITING, NVME_REQUEST_RUNNING, NVME_REQUEST_DONE } state;
    bool no_retry;     /* its time limit has passed: it is not sent again */
    bool authenticate; /* no exchange: the thread authenticates the admin queue anew */
    int code;
};

enum nvme_state {
    NVME_CONNECTING, /* for the first time or again */
    NVME_READY,
    NVME_LOST,
};

struct nvme_association {
    struct nvme_config config;
    pid_t owner;
    pthread_t thread;
    int wake; /* an eventfd for the thread */
    bool thread_started;
    atomic_bool stop;
    atomic_bool write_protected; /* the namespace has become read-only */
    struct nvme_counters counters;
    _Atomic uint64_t incarnation;
    _Atomic uint32_t writes_in_flight; /* commands of all queue pairs that are no reads */
    atomic_bool writes_paused;         /* no command but reads may be issued */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* state, a link or a request */
    /* Under the lock. */
    enum nvme_state state;
    int failure;         /* < 0: error of the present incarnation that the thread has not handled */
    bool single_round;   /* NVME_LOST after one failed round of attempts */
    bool namespace_gone; /* the failure is the namespace's: the controller is lost at once */
    bool check_ana;      /* a command ended with an ANA status: the thread shall read the state */
    int lost_code;       /* in NVME_LOST: why */
    uint64_t lost_ns;    /* in NVME_LOST: since when */
    bool thread_ended;   /* the thread uses nothing any more but the lock, which it releases */
    bool abandoned;      /* the thread frees the association when it ends */
    struct nvme_link *links;
    struct nvme_admin_request *requests;
    uint64_t namespace_bytes; /* present size of the namespace; the device's size does not change */
    uint32_t path;            /* index of the path in use */
    uint32_t health_warnings; /* critical warnings that the controller last reported, as bits */
    uint32_t new_path_count;  /* paths for the thread to take; 0: none */
    uint16_t last_qid;
    struct nvme_path new_paths[DLFS_NVME_PATHS_MAX];
    char event[DLFS_NVME_EVENT_BYTES]; /* description of the last event; empty: none */
    struct nvme_admin admin;           /* only the thread uses its connection */
    struct nvme_text error;            /* the last error message */
    /* Used by the thread only. */
    uint64_t connected_ns;     /* when the present incarnation was connected; 0: never */
    uint64_t disconnected_ns;  /* when the last incarnation ended */
    uint64_t keep_alive_ns;    /* when the last keep-alive ended */
    uint64_t probe_ns;         /* when to look for an optimized path; UINT64_MAX: never */
    uint64_t random;           /* state of the random numbers that shorten pauses */
    uint32_t backoff_ms;       /* pause before the next round of attempts */
    uint32_t first_path;       /* index of the path that a round of attempts begins with */
    uint32_t transition_ms;    /* longest ANATT if all paths are in the ANA state change; else 0 */
    uint32_t probe_ms;         /* pause before the probe after that */
    uint32_t probe_path;       /* index of the path that was probed last */
    uint64_t authenticated_ns; /* when the admin queue was last authenticated */
    /* The internal queue pair for flushes and single I/O commands, created on first use. */
    pthread_mutex_t passthrough_lock;
    struct nvme_queue *passthrough_queue;
    struct nvme_durability durability;
    struct nvme_write_limit write_limit;
    struct nvme_association *inherited; /* the parent process's; unused, freed with this one */
};

/* ---- used by devices and queue pairs ---- */

/* Creates an association without a thread. Errors: -ENOMEM, -errno. */
int nvme_association_create(const struct nvme_config *config, struct nvme_association **out);
/* Waits until the first attempts have ended. Returns 0 if a controller is connected, else why not.
 */
int nvme_association_wait(struct nvme_association *association);
/*
 * Ends the thread and frees the association. All links must have been released. Does not wait for a
 * target that is slow to answer the shutdown: then the thread frees the association, which ends
 * within half a second. In a forked child, frees the child's copy only.
 */
void nvme_association_destroy(struct nvme_association *association);

/* Gives the thread new paths, 1 to DLFS_NVME_PATHS_MAX. */
void nvme_association_set_paths(struct nvme_association *association, const struct nvme_path *paths,
                                uint32_t path_count);
/* Hands an admin command to the thread and waits for its completion. */
int nvme_association_run(struct nvme_association *association, struct nvme_admin_request *request);

/*
 * Creates a link and waits for its connection. Does not wait while the thread connects again after
 * a failure: then the link gets its connection later. Returns 0, or why there is no connection:
 * DLFS_E_TIMEOUT at the limit, which may be NULL.
 */
int nvme_link_create(struct nvme_association *association, uint32_t command_count,
                     const struct dlfs_connect_limit *limit, struct nvme_link **out);
/* Releases a link. in_child: the link belongs to the parent process. */
void nvme_link_release(struct nvme_association *association, struct nvme_link *link, bool in_child);

/* The changes of a link since its queue pair last took an update. */
struct nvme_link_update {
    struct nvme_connection *connection; /* the connection to use from now on; NULL: none */
    bool is_over;                       /* the incarnation in use has ended */
    bool timed_out;                     /* it ended because the controller did not answer */
    int code;                           /* < 0: why there will be no connection */
};
/* Takes the changes of a link, and clears its signal. incarnation: the one in use. */
struct nvme_link_update nvme_link_take_update(struct nvme_association *association,
                                              struct nvme_link *link, uint64_t incarnation);
/* Reports that a queue pair closed its connection of an incarnation; the thread ends that one. */
void nvme_association_report(struct nvme_association *association, uint64_t incarnation, int code,
                             const char *reason);
/* Reports that a connection failed on its own, as by a wrong header digest; the thread connects
 * only this link again. */
void nvme_link_report(struct nvme_association *association, struct nvme_link *link,
                      uint64_t incarnation, int code, const char *reason);
/* Reports that a command of an incarnation ended with an ANA status; the thread reads the state. */
void nvme_association_check_ana(struct nvme_association *association, uint64_t incarnation);
/* Sets a link's signal and wakes its queue pair. */
void nvme_link_signal(struct nvme_link *link);
/* Lets the thread try again after a loss. Returns false, and why in *code, if it is too early. */
bool nvme_link_retry_lost(struct nvme_association *association, struct nvme_link *link, int *code);

/* ---- used by the thread, with the lock held ---- */

/* Ends the thread's use of a link; frees the link if its queue pair has released it. */
void nvme_link_connect_end(struct nvme_association *association, struct nvme_link *link);
/* Records an error, counts it by its code, and marks the present incarnation as failed. */
void nvme_fail_incarnation(struct nvme_association *association, int code, const char *reason);

/* ---- used by the thread, without the lock ---- */

/* Notes the end of the thread, which does not use the association any more. */
void nvme_association_thread_ended(struct nvme_association *association);
/* Marks the present incarnation as failed, unless it is. namespace_gone: see the association. */
void nvme_association_fail(struct nvme_association *association, int code, bool namespace_gone,
                           const char *reason);

/* ---- incarnation.c ---- */

/* Returns a deadline ms from now, which a wake-up of the thread does not end but a stop does. */
struct nvme_deadline nvme_association_deadline(struct nvme_association *association, uint64_t ms);
/* Returns the pause that follows a pause, in milliseconds. */
uint32_t nvme_next_backoff_ms(uint32_t backoff_ms);
/* Closes all connections of the present incarnation and begins the next. With the lock held. */
void nvme_association_end_incarnation(struct nvme_association *association);

/* ---- thread.c ---- */

/*
 * Starts the association's thread. single_round: the association is lost if the first round of
 * attempts fails; else the thread goes on for reconnect_ms.
 */
int nvme_association_start(struct nvme_association *association, bool single_round);

#endif
