/*
 * libdlfs_fuse: the sealed samples of a volume as files, served by libfuse's low-level interface.
 *
 * A library of its own, so that libdlfs does not ask for libfuse3. It answers the kernel in threads
 * of its own, from directories and readers of libdlfs, and calls nobody: what only its owner knows
 * (which datasets there are, how to open one, what a failed read means) it asks as a question that
 * the owner fetches with dlfs_fuse_wait and answers with dlfs_fuse_answer. Inode numbers are those
 * of dlfs/staging/inode_numbers.py, and what programs may expect is in dlfs/mount/SEMANTICS.md.
 *
 * Conventions are those of dlfs.h: 0 or -errno or a DLFS_E_* code, outputs last. Unless said
 * otherwise any threads at once, as long as the object is not destroyed.
 */
#ifndef DLFS_FUSE_H
#define DLFS_FUSE_H

#include "dlfs/dlfs.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_FUSE_VERSION 2u
#define DLFS_FUSE_SLOT_MAX 65535u     /* datasets in the life of a mount */
#define DLFS_FUSE_NAME_BYTES_MAX 255u /* of one component */

/* DLFS_FUSE_VERSION of the loaded library. */
DLFS_API uint32_t dlfs_fuse_version(void);
/* libfuse's own version, such as "3.14.0". Static storage. */
DLFS_API const char *dlfs_fuse_build(void);

/* ---- mounting -------------------------------------------------------------------------------- */

typedef struct dlfs_fuse dlfs_fuse;

#define DLFS_FUSE_HANDLES                                                   \
    1u /* have the kernel open files and directories, as old ones do anyway \
        */

typedef struct dlfs_fuse_config {
    const char *mountpoint; /* absolute */
    const char *options;    /* of the mount, with commas between */
    uint64_t held_bytes;    /* memory for samples that are read in parts, or ahead */
    uint32_t uid;           /* of every file and directory */
    uint32_t gid;
    uint32_t file_mode; /* permission bits of files; directories get x where these have r */
    uint32_t threads_max;
    uint32_t root_timeout_ms; /* how long the kernel may keep what it knows of the root */
    uint32_t flags;           /* DLFS_FUSE_* */
    uint32_t busy_poll_us;    /* a thread stays awake so long for what is about to come; 0: not */
    uint32_t reserved;
} dlfs_fuse_config;

/* Mounts. Errors: -EINVAL, -ENOMEM, -EIO when the system refuses: libfuse says why on stderr. */
DLFS_API int dlfs_fuse_mount(const dlfs_fuse_config *config, dlfs_fuse **out);
/*
 * Answers the kernel until the file system is unmounted or dlfs_fuse_stop is called. Once, in one
 * thread. Returns when no request is under way any more, so with a device that hangs after its
 * reader's timeout.
 */
DLFS_API int dlfs_fuse_run(dlfs_fuse *fuse);
/* Has dlfs_fuse_run return; questions under way and later ones are answered with ENOTCONN. */
DLFS_API void dlfs_fuse_stop(dlfs_fuse *fuse);
/*
 * The mount was taken away, and what may be mounted in its place is somebody else's: destroy leaves
 * that alone.
 */
DLFS_API void dlfs_fuse_abandon(dlfs_fuse *fuse);
/* Unmounts, if that has not been done, and frees. Not while another function is called. NULL:
 * nothing. */
DLFS_API void dlfs_fuse_destroy(dlfs_fuse *fuse);

/* ---- questions ------------------------------------------------------------------------------- */

#define DLFS_FUSE_ASK_CHILD 1u /* which dataset has this name? answer: slot */
#define DLFS_FUSE_ASK_ROOT 2u  /* answer: modified_ns of the root */
#define DLFS_FUSE_ASK_LIST 3u  /* answered after dlfs_fuse_list */
#define DLFS_FUSE_ASK_SPACE 4u /* answer: capacity_bytes, free_bytes, sample_count */
#define DLFS_FUSE_ASK_OPEN 5u  /* answered after dlfs_fuse_open of the slot */
#define DLFS_FUSE_ASK_ERROR 6u /* something failed with this code: tell people; answer: error */

typedef struct dlfs_fuse_question {
    uint64_t ticket;
    uint32_t kind;        /* DLFS_FUSE_ASK_* */
    uint32_t slot;        /* of ASK_OPEN, ASK_ERROR */
    dlfs_failure failure; /* of ASK_ERROR; where it is of a sample, its member is not UINT32_MAX */
    uint32_t name_bytes;
    uint8_t name[DLFS_FUSE_NAME_BYTES_MAX + 1]; /* of ASK_CHILD */
    uint32_t reserved;
} dlfs_fuse_question;

typedef struct dlfs_fuse_answer {
    uint64_t ticket;
    int32_t error; /* 0, or an errno > 0 */
    uint32_t slot;
    int64_t modified_ns; /* since 1970 */
    uint64_t capacity_bytes;
    uint64_t free_bytes;
    uint64_t sample_count;
} dlfs_fuse_answer;

/*
 * Fetches the next question: 1, or 0 when there was none in time. timeout_ms < 0 waits for ever.
 * -ESHUTDOWN: there will be none any more.
 */
DLFS_API int dlfs_fuse_wait(dlfs_fuse *fuse, int timeout_ms, dlfs_fuse_question *question);
/* -ENOENT: nobody waits for an answer to that ticket any more. */
DLFS_API int dlfs_fuse_answer_question(dlfs_fuse *fuse, const dlfs_fuse_answer *answer);

/* ---- datasets -------------------------------------------------------------------------------- */

/* What is known of a dataset before it is opened. */
typedef struct dlfs_fuse_slot {
    uint32_t number; /* 1..DLFS_FUSE_SLOT_MAX, never used again */
    uint32_t version;
    uint32_t generation; /* tells it from one of the same number in another mount */
    uint32_t reserved;
    int64_t modified_ns;
} dlfs_fuse_slot;
/* Makes a slot known; again does nothing. -EINVAL. */
DLFS_API int dlfs_fuse_define(dlfs_fuse *fuse, const dlfs_fuse_slot *slot);
/*
 * Gives a slot its dataset, which stays the caller's and is used until dlfs_fuse_withdraw; the
 * directory has its names. Again does nothing. -EINVAL, -ESTALE when it was withdrawn.
 */
DLFS_API int dlfs_fuse_open(dlfs_fuse *fuse, uint32_t slot, const dlfs_directory *directory,
                            dlfs_reader *reader);
/* Has a slot answer ESTALE from now on, and waits until nobody uses its dataset. -EINVAL. */
DLFS_API int dlfs_fuse_withdraw(dlfs_fuse *fuse, uint32_t slot);
/*
 * What the root lists, in this order: name i is the i-th of names, each ended by NUL, and means
 * slots[i]. When it differs from before, what the kernel knows of the root is forgotten. -EINVAL,
 * -ENOMEM.
 */
DLFS_API int dlfs_fuse_list(dlfs_fuse *fuse, const uint8_t *names, uint64_t names_bytes,
                            const uint32_t *slots, uint32_t count);

/* ---- memory ---------------------------------------------------------------------------------- */

/* Gives up held samples that nobody has used for so long. */
DLFS_API void dlfs_fuse_expire(dlfs_fuse *fuse, uint32_t age_ms);

typedef struct dlfs_fuse_stats {
    uint64_t lookups;    /* of samples and directories, by name */
    uint64_t opens;      /* of files and directories: one each where the kernel needs none */
    uint64_t reads;      /* requests for bytes */
    uint64_t read_bytes; /* given out */
    uint64_t ahead;      /* samples read before they were asked for */
    uint64_t ahead_used; /* ... and then asked for */
    uint64_t questions;
    uint64_t held_bytes; /* now */
} dlfs_fuse_stats;
DLFS_API void dlfs_fuse_get_stats(dlfs_fuse *fuse, dlfs_fuse_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
