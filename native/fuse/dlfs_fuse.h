/*
 * libdlfs_fuse: serves the sealed samples of a volume as files, through libfuse's low-level
 * interface.
 *
 * This library is private to the dlfs package: dlfs/_native/fuse.py is its only caller, and both
 * are installed together. Its functions may change from one release to the next; DLFS_FUSE_VERSION
 * says so. It is separate from libdlfs so that libdlfs does not depend on libfuse3.
 *
 * Two actors: the mount's threads, which answer the kernel from directories and readers of libdlfs;
 * and the owner, the program that created the mount. The library has no callbacks. What only the
 * owner knows (which datasets exist, how to open one, what an error means) is requested by an
 * upcall: a thread of the mount posts it and waits, the owner fetches it with dlfs_fuse_next_upcall
 * and replies with dlfs_fuse_reply_upcall.
 *
 * A dataset is known by its number in this mount, from 1; dlfs/mount/inode_numbers.py defines the
 * inode numbers and dlfs/mount/SEMANTICS.md what programs may expect of the files. In a mount of
 * several volumes, the root lists a directory for each volume, which has a number too. The upper
 * directories, those above the datasets, are the root (number 0) and the volumes' directories.
 *
 * Conventions are those of dlfs.h: functions return 0, -errno or a DLFS_E_* code; outputs come
 * last. Threads: any at once unless said otherwise, until the mount is destroyed.
 */
#ifndef DLFS_FUSE_H
#define DLFS_FUSE_H

#include "dlfs/dlfs.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_FUSE_VERSION 10u
#define DLFS_FUSE_DATASET_MAX 65535u  /* highest dataset number of a mount */
#define DLFS_FUSE_NAME_BYTES_MAX 255u /* longest component of a path */

/* Returns DLFS_FUSE_VERSION of the loaded library. */
DLFS_API uint32_t dlfs_fuse_version(void);

/* ---- mounting -------------------------------------------------------------------------------- */

typedef struct dlfs_fuse dlfs_fuse;

/* Flag: the kernel sends OPEN and OPENDIR requests, as kernels without FUSE_NO_OPEN_SUPPORT do. */
#define DLFS_FUSE_OPEN_REQUESTS 1u
/* Flag: an earlier server of this mount has answered INIT, and the requests that it left are to be
 * sent again. */
#define DLFS_FUSE_RESUME 2u
/* Flag: all requests come through /dev/fuse, also where the kernel offers io_uring. */
#define DLFS_FUSE_NO_URING 4u
/* Flag: another process has the file system's descriptor, too, and another server may follow this
 * one. It needs DLFS_FUSE_NO_URING: the kernel's queues would end with this process, and requests
 * would wait in vain for the next one. */
#define DLFS_FUSE_KEPT 8u

typedef struct dlfs_fuse_config {
    uint32_t uid;         /* owner of every file and directory */
    uint32_t gid;         /* group of every file and directory */
    uint32_t file_mode;   /* permission bits of files; directories also get x where these have r */
    uint32_t threads_max; /* most threads that answer the kernel */
    uint32_t
        root_timeout_ms; /* time for which the kernel may cache entries of an upper directory */
    uint32_t flags;      /* DLFS_FUSE_*, or 0 */
    uint32_t
        busy_poll_us; /* longest busy polling for the next event before a thread sleeps; 0: none */
    int32_t kernel;   /* descriptor of /dev/fuse */
    const uint8_t *init; /* the kernel's INIT request, which the owner has read from there */
    uint64_t init_bytes;
    const char *incoming_link; /* target of the symbolic link `incoming` in the root; NULL: the root
                                  has none */
} dlfs_fuse_config;

/*
 * Creates the server of a file system that the owner has mounted, and unmounts. The owner closes
 * the descriptor after dlfs_fuse_destroy. Errors: -EINVAL; -ENOMEM.
 */
DLFS_API int dlfs_fuse_create(const dlfs_fuse_config *config, dlfs_fuse **out);
/*
 * Answers the kernel, INIT first, until the file system is unmounted or dlfs_fuse_stop is called.
 * Call it once, from one thread. It returns when the last request under way has been answered: with
 * a device that hangs, that takes as long as its reader's timeout.
 */
DLFS_API int dlfs_fuse_run(dlfs_fuse *fuse);
/*
 * Makes dlfs_fuse_run return. Upcalls under way and later ones fail with ENOTCONN. The call waits
 * for a tenth of a second at most; call it again until dlfs_fuse_run has returned.
 */
DLFS_API void dlfs_fuse_stop(dlfs_fuse *fuse);
/* Frees. Call it when no other function of the mount is running. Accepts NULL. */
DLFS_API void dlfs_fuse_destroy(dlfs_fuse *fuse);

/*
 * Returns how many io_uring queues the kernel sends requests to, or why it sends them through
 * /dev/fuse: -EOPNOTSUPP, the kernel does not offer io_uring (Linux 6.14 with fuse.enable_uring
 * does); -ECANCELED, DLFS_FUSE_NO_URING; -EINPROGRESS, it has not sent anything yet; others, why
 * the queues could not be created.
 */
DLFS_API int dlfs_fuse_uring(dlfs_fuse *fuse);

/* ---- upcalls --------------------------------------------------------------------------------- */

/* Kinds of upcalls, and the fields of the reply that the owner sets. */
/*
 * Find the dataset, or the directory of a volume, that a name in an upper directory stands for:
 * dataset; 0: `incoming`. For a volume's directory also modified_ns.
 */
#define DLFS_FUSE_UPCALL_LOOKUP 1u
#define DLFS_FUSE_UPCALL_TIME 2u         /* modification time of an upper directory: modified_ns */
#define DLFS_FUSE_UPCALL_LIST 3u         /* call dlfs_fuse_set_listing, then reply */
#define DLFS_FUSE_UPCALL_STATFS 4u       /* capacity_bytes, free_bytes, sample_count */
#define DLFS_FUSE_UPCALL_OPEN_DATASET 5u /* call dlfs_fuse_open_dataset, then reply */
/*
 * Log the failure; error: the errno of the request, or EAGAIN if the reader was replaced since, so
 * that the sample is to be read again.
 */
#define DLFS_FUSE_UPCALL_REPORT_FAILURE 6u
#define DLFS_FUSE_NO_READER UINT32_MAX

typedef struct dlfs_fuse_upcall {
    uint64_t id;
    uint32_t kind;    /* DLFS_FUSE_UPCALL_* */
    uint32_t dataset; /* number: for LOOKUP, TIME and LIST of the upper directory; for STATFS of the
                         upper directory or the dataset that the program has named */
    dlfs_failure failure; /* for REPORT_FAILURE; member is UINT32_MAX if no single sample failed */
    uint32_t name_bytes;
    uint8_t name[DLFS_FUSE_NAME_BYTES_MAX + 1]; /* for LOOKUP */
    uint32_t reader; /* for REPORT_FAILURE: number of the dataset's reader that failed, counted from
                        0; DLFS_FUSE_NO_READER if none did */
} dlfs_fuse_upcall;

typedef struct dlfs_fuse_reply {
    uint64_t id;         /* the upcall's */
    int32_t error;       /* 0, or an errno > 0 */
    uint32_t dataset;    /* number, of a dataset or a volume's directory */
    int64_t modified_ns; /* since 1970 */
    uint64_t capacity_bytes;
    uint64_t free_bytes;
    uint64_t sample_count;
} dlfs_fuse_reply;

/*
 * Fetches the next upcall. Returns 1, or 0 if none came within timeout_ms; a negative timeout waits
 * without limit. -ESHUTDOWN: the mount has ended and posts no more.
 */
DLFS_API int dlfs_fuse_next_upcall(dlfs_fuse *fuse, int timeout_ms, dlfs_fuse_upcall *upcall);
/* Completes an upcall. -ENOENT: no thread waits for a reply to this id any more. */
DLFS_API int dlfs_fuse_reply_upcall(dlfs_fuse *fuse, const dlfs_fuse_reply *reply);

/* ---- datasets -------------------------------------------------------------------------------- */

/*
 * Attributes of one version of a dataset that are known before it is opened; or of the directory of
 * a volume, which is never opened.
 */
typedef struct dlfs_fuse_dataset {
    uint32_t number; /* 1..DLFS_FUSE_DATASET_MAX; never reused by a mount */
    uint32_t version;
    uint32_t generation; /* distinguishes it from the same number in another mount */
    uint32_t
        volume; /* number of the upper directory that has it; of a volume's directory: itself */
    int64_t modified_ns; /* since 1970 */
} dlfs_fuse_dataset;
/* Registers a dataset or a volume's directory, unless the number is registered already. -EINVAL. */
DLFS_API int dlfs_fuse_add_dataset(dlfs_fuse *fuse, const dlfs_fuse_dataset *dataset);
/*
 * Attaches directory and reader to a registered dataset. Both stay the caller's and are used until
 * dlfs_fuse_withdraw_dataset; the directory must have its names attached. Does nothing if the
 * dataset is open. -EINVAL; -ESTALE if it was withdrawn.
 */
DLFS_API int dlfs_fuse_open_dataset(dlfs_fuse *fuse, uint32_t number,
                                    const dlfs_directory *directory, dlfs_reader *reader);
/*
 * Has later reads of an open dataset use another reader, of the same directory. Reads under way end
 * with the one before, which stays in use until dlfs_fuse_await_reader has returned 1. Waits while
 * the reader before the present one is in use. One call at a time. -EINVAL; -ESTALE if the dataset
 * is not open.
 */
DLFS_API int dlfs_fuse_replace_reader(dlfs_fuse *fuse, uint32_t number, dlfs_reader *reader);
/*
 * Returns 1 if no reader but the present one is in use; else 0, or waits if wait is not 0. -EINVAL.
 */
DLFS_API int dlfs_fuse_await_reader(dlfs_fuse *fuse, uint32_t number, int wait);
/*
 * Makes a dataset or the directory of a volume fail with ESTALE from now on, and waits until no
 * thread uses it. The datasets of a volume are withdrawn one by one. -EINVAL.
 */
DLFS_API int dlfs_fuse_withdraw_dataset(dlfs_fuse *fuse, uint32_t number);
/*
 * Sets the entries that an upper directory lists, in this order. The i-th name (each ends with NUL)
 * is the dataset or volume numbers[i], or `incoming` if that is 0. The kernel drops its cached
 * listing when the directory gets another modification time. -EINVAL, -ENOMEM.
 */
DLFS_API int dlfs_fuse_set_listing(dlfs_fuse *fuse, uint32_t directory, const uint8_t *names,
                                   uint64_t names_bytes, const uint32_t *numbers,
                                   uint32_t entry_count);
/* ---- memory and statistics ------------------------------------------------------------------- */

/* Frees cached samples that were last used at least age_ms ago. */
DLFS_API void dlfs_fuse_expire_cache(dlfs_fuse *fuse, uint32_t age_ms);

typedef struct dlfs_fuse_stats {
    uint64_t lookups;           /* LOOKUP requests */
    uint64_t opens;             /* OPEN and OPENDIR requests */
    uint64_t reads;             /* READ requests */
    uint64_t read_bytes;        /* bytes sent to the kernel */
    uint64_t readahead_samples; /* samples read before they were requested */
    uint64_t readahead_hits;    /* of these, samples that were requested later */
    uint64_t upcalls;
    uint64_t cached_bytes; /* sample memory that open files may pin now */
} dlfs_fuse_stats;
DLFS_API void dlfs_fuse_get_stats(dlfs_fuse *fuse, dlfs_fuse_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
