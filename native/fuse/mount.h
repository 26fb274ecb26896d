/*
 * The state of one mount. The files of this folder, each of which uses only those above it:
 *
 *     inode.h            inode numbers
 *     request.c          requests and replies
 *     tree.c             a dataset's directory as a tree
 *     open_file_cache.c  samples that stay in memory
 *     thread.h           starting threads
 *     readahead.c        which samples to read before they are requested
 *     readahead_thread.c a thread that reads ahead
 *     receivers.c        which threads receive requests, and busy polling
 *     upcall.c           requests to the owner
 *     dataset.c          the datasets by number
 *     early_read.c       a read that is begun with its look-up
 *     mount.h            all of these together
 *     entry.c            attributes of files and directories, and replies that carry them
 *     root.c             the upper directories: the root, and those of volumes
 *     read.c             contents of files
 *     names.c            look-ups and listings
 *     xattr.c            extended attributes
 *     processors.c       the processors of the system
 *     uring_protocol.h   the kernel's structures for io_uring
 *     yielding.c         keeps a program on the processor that answers it
 *     operations.c       the table of handlers
 *     uring.c            requests and replies over io_uring; uring_absent.c without liburing
 *     loop.c             requests and replies over /dev/fuse
 *     session.c          the functions of dlfs_fuse.h
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
#include "early_read.h"
#include "loop.h"
#include "open_file_cache.h"
#include "readahead.h"
#include "readahead_thread.h"
#include "receivers.h"
#include "request.h"
#include "upcall.h"

/* Most data of a request and of its reply, but for larger pages. */
#define REQUEST_DATA_BYTES_MAX (1u << 20)
#define PAGE_BYTES_MIN 4096u

struct rings;
struct upper_listings;

struct counters {
    _Atomic uint64_t lookups;
    _Atomic uint64_t opens;
    _Atomic uint64_t reads;
    _Atomic uint64_t read_bytes;
    _Atomic uint64_t readahead_samples;
    _Atomic uint64_t readahead_hits;
};

struct dlfs_fuse {
    dlfs_fuse_config config; /* its strings are NULL */
    uint8_t *init_request;   /* [init_bytes of the config] */
    bool open_requests;      /* the kernel sends OPEN; otherwise the first is refused with ENOSYS */
    bool opendir_requests;   /* the same for OPENDIR */

    pthread_mutex_t lock; /* protects the next two fields */
    pthread_cond_t ended; /* dlfs_fuse_run */
    bool stopping;
    bool running;
    struct loop loop;

    pthread_mutex_t listings_lock; /* protects the next field */
    struct upper_listings *listings;

    struct open_file_cache cache;
    struct readahead readahead;
    struct receivers receivers;
    struct upcall_queue upcalls;
    struct counters counters;
    _Atomic int uring;   /* what dlfs_fuse_uring returns */
    int64_t started_ns;  /* since 1970 */
    char *incoming_link; /* target of the link `incoming`; NULL: there is none */
    struct readahead_thread
        readahead_thread; /* runs while the kernel sends requests over io_uring */
    struct rings *rings;  /* set before the first request; NULL: all come through /dev/fuse */
    struct early_read early_read;
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
