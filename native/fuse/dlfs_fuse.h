/*
 * libdlfs_fuse: serves the sealed samples of a volume as files, over the kernel's FUSE protocol.
 *
 * This library is private to the dlfs package: dlfs/_native/fuse.py is its only caller, and both
 * are installed together. Its functions may change from one release to the next; DLFS_FUSE_VERSION
 * says so.
 *
 * Two actors: the mount's threads, which answer the kernel from directories and readers of libdlfs;
 * and the owner, the program that created the mount. The library has no callbacks. What only the
 * owner knows (which datasets exist, how to open one, what an error means) is requested by an
 * upcall: a thread of the mount posts it and waits, the owner fetches it with dlfs_fuse_next_upcall
 * and replies with dlfs_fuse_reply_upcall.
 *
 * A dataset is known by its number in this mount, from 1; dlfs/mount/inode_numbers.py defines the
 * inode numbers and dlfs/mount/SEMANTICS.md what programs may expect of the files. The owner itself
 * answers the kernel's requests for what lies above the datasets: the root, `incoming`, and in a
 * mount of several volumes the directory of each volume.
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

#define DLFS_FUSE_VERSION 12u
#define DLFS_FUSE_DATASET_MAX 65535u  /* highest dataset number of a mount */
#define DLFS_FUSE_NAME_BYTES_MAX 255u /* longest component of a path */

/* Returns DLFS_FUSE_VERSION of the loaded library. */
DLFS_API uint32_t dlfs_fuse_version(void);

/* ---- mounting -------------------------------------------------------------------------------- */

typedef struct dlfs_fuse dlfs_fuse;

/* Flag: an earlier server of this mount has answered INIT, and the requests that it left are to be
 * sent again. */
#define DLFS_FUSE_RESUME 1u
/* Flag: all requests come through /dev/fuse, also where the kernel offers io_uring. */
#define DLFS_FUSE_NO_URING 2u
/* Flag: another process has the file system's descriptor, too, and another server may follow this
 * one. It needs DLFS_FUSE_NO_URING: the kernel's queues would end with this process, and requests
 * would wait in vain for the next one. */
#define DLFS_FUSE_KEPT 4u

typedef struct dlfs_fuse_config {
    uint32_t uid;         /* owner of every file and directory */
    uint32_t gid;         /* group of every file and directory */
    uint32_t file_mode;   /* permission bits of files; directories also get x where these have r */
    uint32_t threads_max; /* most threads that answer the kernel */
    uint32_t flags;       /* DLFS_FUSE_*, or 0 */
    uint32_t
        busy_poll_us; /* longest busy polling for the next event before a thread sleeps; 0: none */
    int32_t kernel;   /* descriptor of /dev/fuse */
    const uint8_t *init; /* the kernel's INIT request, which the owner has read from there */
    uint64_t init_bytes;
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

/*
 * Kinds of upcalls. Most are requests of the kernel, which the reply answers: LOOKUP, GETATTR,
 * READLINK, READDIR, READDIRPLUS and STATFS, by the numbers of the protocol. Two are the library's:
 */
#define DLFS_FUSE_UPCALL_OPEN_DATASET 0x10000u /* call dlfs_fuse_open_dataset, then reply */
/*
 * Log the failure; error: the errno of the request, or 0 if the reader was replaced since, so that
 * the sample is to be read again.
 */
#define DLFS_FUSE_UPCALL_REPORT_FAILURE 0x10001u
#define DLFS_FUSE_NO_READER UINT32_MAX

typedef struct dlfs_fuse_upcall {
    uint64_t id;
    uint32_t kind;
    uint32_t dataset;     /* number; for requests of the kernel, inode has it */
    dlfs_failure failure; /* for REPORT_FAILURE; member is UINT32_MAX if no single sample failed */
    uint64_t inode;       /* of a request of the kernel */
    uint64_t offset;      /* position in a listing */
    uint32_t size;        /* most bytes of a listing */
    char name[DLFS_FUSE_NAME_BYTES_MAX + 1]; /* for LOOKUP */
    uint32_t reader; /* for REPORT_FAILURE: number of the dataset's reader that failed, counted from
                        0; DLFS_FUSE_NO_READER if none did */
} dlfs_fuse_upcall;

typedef struct dlfs_fuse_reply {
    uint64_t id;         /* the upcall's */
    int32_t error;       /* 0, or an errno > 0 */
    uint32_t data_bytes; /* what the kernel gets behind the header, unless it gets an error */
    const uint8_t *data;
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
 * Registers a version of a dataset by its number, 1..DLFS_FUSE_DATASET_MAX, which is never reused,
 * unless the number is registered already; with what is known before it is opened. generation
 * distinguishes it from the same number in another mount; modified_ns counts from 1970. -EINVAL.
 */
DLFS_API int dlfs_fuse_add_dataset(dlfs_fuse *fuse, uint32_t number, uint32_t version,
                                   uint32_t generation, int64_t modified_ns);
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
/* Makes a dataset fail with ESTALE from now on, and waits until no thread uses it. -EINVAL. */
DLFS_API int dlfs_fuse_withdraw_dataset(dlfs_fuse *fuse, uint32_t number);
/* Frees cached samples that were last used at least age_ms ago. */
DLFS_API void dlfs_fuse_expire_cache(dlfs_fuse *fuse, uint32_t age_ms);

#ifdef __cplusplus
}
#endif

#endif
