/*
 * The state of one mount. The files of this folder, each of which uses only those above it:
 *
 *     inode.h            inode numbers
 *     request.c          requests and replies
 *     tree.c             a dataset's directory as a tree
 *     open_file_cache.c  samples that stay in memory
 *     readahead.c        which samples to read before they are requested
 *     readahead_thread.c a thread that reads ahead
 *     receivers.c        which threads receive requests, and busy polling
 *     upcall.c           requests to the owner
 *     dataset.c          the datasets by number
 *     mount.h            all of these together
 *     operations.h       the handlers of requests:
 *     read.c             contents of files
 *     names.c            attributes, look-ups and listings
 *     xattr.c            extended attributes
 *     processors.c       the processors of the system
 *     yielding.c         keeps a program on the processor that answers it
 *     operations.c       the table of handlers
 *     uring.c            requests and replies over io_uring
 *     loop.c             requests and replies over /dev/fuse
 *     owner.c            functions of dlfs_fuse.h: upcalls and datasets
 *     session.c          the others: creating and running a mount
 *
 * Source: Linux, fs/fuse and include/uapi/linux/fuse.h.
 */
#ifndef DLFS_FUSE_MOUNT_H
#define DLFS_FUSE_MOUNT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "dataset.h"
#include "dlfs_fuse.h"
#include "open_file_cache.h"
#include "readahead.h"
#include "readahead_thread.h"
#include "request.h"
#include "threads/loop.h"
#include "threads/receivers.h"
#include "upcall.h"

/* Most data of a request and of its reply, but for larger pages. */
#define REQUEST_DATA_BYTES_MAX (1u << 20)
#define PAGE_BYTES_MIN 4096u

struct rings;

/* Events so far. The tests read them; in a running server a debugger can. */
struct counters {
    _Atomic uint64_t opens;
    _Atomic uint64_t reads;
    _Atomic uint64_t readahead_samples; /* samples read before they were requested */
    _Atomic uint64_t early_hits;        /* of these, early reads that were requested later */
};

/*
 * The early read: the read of a sample that was started when its file was looked up, so that the
 * device works while the program sends its request for the content. No thread waits for it. There
 * is one at a time: it serves a program that opens and reads one file after the other.
 */
struct early_read {
    dlfs_pending_read *read;       /* NULL: there is none */
    struct dataset_entry *dataset; /* whose reader is taken until the read ends */
    uint64_t index;
    uint32_t reader; /* number of the dataset's reader */
};

struct dlfs_fuse {
    dlfs_fuse_config config; /* its `init` is NULL */
    uint8_t *init_request;   /* [init_bytes of the config] */
    bool open_requests;      /* the kernel sends OPEN; otherwise the first is refused with ENOSYS */
    bool opendir_requests;   /* the same for OPENDIR */

    pthread_mutex_t lock; /* protects the next two fields */
    pthread_cond_t ended; /* dlfs_fuse_run */
    bool stopping;
    bool running;
    struct loop loop;

    struct open_file_cache cache;
    struct readahead readahead;
    struct receivers receivers;
    struct upcall_queue upcalls;
    struct counters counters;
    _Atomic int uring; /* what dlfs_fuse_uring returns */
    struct readahead_thread
        readahead_thread;       /* runs while the kernel sends requests over io_uring */
    struct rings *rings;        /* set before the first request; NULL: all come through /dev/fuse */
    pthread_mutex_t early_lock; /* protects the next field */
    struct early_read early_read;
    _Atomic bool has_early_read; /* now, or a moment ago */
    struct dataset_table datasets;
};

static inline void count(_Atomic uint64_t *counter, uint64_t more)
{
    (void)atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

/* Returns true if the kernel sends requests over io_uring. */
static inline bool is_over_uring(const struct dlfs_fuse *fuse)
{
    return atomic_load_explicit(&fuse->uring, memory_order_relaxed) > 0;
}

#endif
