/*
 * An association: everything that one host has with one controller, kept up by one thread, which
 * makes all connections, keeps the controller alive, runs admin commands, and makes everything anew
 * when something fails.
 *
 * A queue pair owns the connection it uses. It talks to the association through a link: the thread
 * puts a new connection there, or the news that the present one is of the past, raises the link's
 * signal and wakes the queue pair; the queue pair looks at the signal, an atomic flag, in every
 * call, and takes the lock only when it is up. Generations number the controllers made one after
 * the other.
 *
 * The lock is held for moments: never around I/O.
 */
#ifndef DLFS_NVME_ASSOCIATION_H
#define DLFS_NVME_ASSOCIATION_H

#include <pthread.h>
#include <stdatomic.h>

#include "nvme/controller.h"
#include "nvme/writes.h"

struct nvme_counters {
    _Atomic uint64_t reconnects;
    _Atomic uint64_t retries;
    _Atomic uint64_t timeouts;
    _Atomic uint64_t digest_errors;
    _Atomic uint64_t protocol_errors;
};

/* Between one queue pair and the association; freed when both have let go. */
struct nvme_link {
    struct nvme_link *next;
    int wake;                /* an eventfd, readable when signal goes up */
    _Atomic uint32_t signal; /* 1: there is news */
    /* The rest under the association's lock. */
    uint32_t command_count;             /* wanted */
    uint16_t qid;                       /* 0: none yet */
    bool wanted;                        /* a connection is to be made */
    bool let_go;                        /* by the queue pair */
    bool in_hand;                       /* the thread is connecting it */
    bool had;                           /* it has had a connection */
    bool silent;                        /* since the last news, a generation ended in silence */
    struct nvme_connection *connection; /* made, and not yet taken */
    int code;                           /* < 0: there will be none */
    uint64_t since_ns;                  /* wanted since then */
    uint64_t retry_at_ns;
    uint32_t delay_ms;
};

/* An admin command that the thread is to run. */
struct nvme_request {
    struct nvme_request *next;
    struct nvme_exchange exchange;
    enum { NVME_REQUEST_WAITING, NVME_REQUEST_RUNNING, NVME_REQUEST_DONE } state;
    bool late; /* its budget is over: it is not tried again */
    int code;
};

enum nvme_state {
    NVME_CONNECTING, /* for the first time, or again */
    NVME_READY,
    NVME_LOST,
};

struct nvme_association {
    struct nvme_config config;
    pid_t owner;
    pthread_t thread;
    bool thread_started;
    bool locks_made;
    int wake; /* an eventfd for the thread */
    atomic_bool stop;
    struct nvme_counters counters;
    _Atomic uint64_t generation;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* state, a link or a request */
    /* Under the lock. */
    enum nvme_state state;
    bool once;        /* one round of attempts decides */
    int failure;      /* < 0: of the present generation, reported and not yet acted upon */
    int lost_code;    /* why there is none, in NVME_LOST */
    uint64_t lost_ns; /* since when */
    struct nvme_link *links;
    struct nvme_request *requests;
    uint16_t last_qid;
    uint32_t path;
    struct nvme_admin admin; /* its connection is the thread's alone */
    struct nvme_text error;  /* the last one */
    /* The thread's. */
    uint64_t made_ns;
    uint64_t down_ns;
    uint64_t keep_alive_ns; /* when the next one is due */
    uint32_t delay_ms;
    uint64_t random;
    /* The internal queue pair for flushes and single I/O commands, made when needed. */
    pthread_mutex_t service_lock;
    struct nvme_queue *service;
    struct nvme_durability durability;
    struct nvme_write_limit write_limit;
    struct nvme_association *inherited; /* of the parent process; unused, and freed with this one */
};

/* Makes one that is not connected; *out is to be started. Errors: -ENOMEM, -errno. */
int nvme_association_create(const struct nvme_config *config, struct nvme_association **out);
/*
 * Starts its thread. once: a first round of attempts that fails makes it lost, else it goes on for
 * the whole budget.
 */
int nvme_association_start(struct nvme_association *association, bool once);
/* Waits for the first controller: 0, or why there is none. */
int nvme_association_wait(struct nvme_association *association);
/* Ends the thread and frees everything. Links must have been let go. In a forked child it frees the
 * child's copy only. */
void nvme_association_destroy(struct nvme_association *association);

/* Runs an admin command, waiting for its turn. */
int nvme_association_run(struct nvme_association *association, struct nvme_request *request);

/*
 * A link with a connection, or the code of why it cannot be had. Blocks, but not while a controller
 * that was lost is looked for: the link gets its connection when that is back.
 */
int nvme_link_create(struct nvme_association *association, uint32_t command_count,
                     struct nvme_link **out);
/* foreign: in a forked child. */
void nvme_link_release(struct nvme_association *association, struct nvme_link *link, bool foreign);

/* What a queue pair finds when its link's signal is up. */
struct nvme_news {
    struct nvme_connection *connection; /* the one to use from now on; NULL: none */
    bool ended;                         /* the one in use is of the past */
    bool silent;                        /* its controller fell silent */
    int code;                           /* < 0: there will be none */
};
struct nvme_news nvme_link_news(struct nvme_association *association, struct nvme_link *link,
                                uint64_t generation);
/* A queue pair gave its connection of a generation up, because of code and reason. */
void nvme_association_report(struct nvme_association *association, uint64_t generation, int code,
                             const char *reason);
/* The same, where the fault was the connection's alone: the link gets another one. */
void nvme_link_report(struct nvme_association *association, struct nvme_link *link,
                      uint64_t generation, int code, const char *reason);
/* Raises a link's signal and wakes its queue pair. */
void nvme_link_signal(struct nvme_link *link);
/* Asks for another try after a loss. False: it is too early for that, the code is in *code. */
bool nvme_link_revive(struct nvme_association *association, struct nvme_link *link, int *code);

#endif
