/*
 * A mount inside the library: its slots, its questions, what the root lists, and its handlers.
 *
 *     session.c    mounting, the loop, capabilities
 *     listen.c     which threads listen to the kernel
 *     question.c   what is asked of the owner
 *     slot.c       datasets: known, open, withdrawn
 *     attribute.c  attributes, names below datasets, listings, extended attributes
 *     root.c       the root and the file system as a whole
 *     read.c       bytes; held.c keeps what will be asked for again
 *     stream/ahead.c      which samples to read before they are asked for
 *
 * Source: libfuse, fuse_lowlevel.h; Linux, fs/fuse and include/uapi/linux/fuse.h.
 */
#ifndef DLFS_FUSE_SERVICE_H
#define DLFS_FUSE_SERVICE_H

#define FUSE_USE_VERSION 312

#include <fuse3/fuse_lowlevel.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ahead.h"
#include "dlfs_fuse.h"
#include "held.h"
#include "listen.h"
#include "tree.h"

#define FOREVER_SECONDS 1e9
#define BLOCK_BYTES 4096u
#define DISK_BLOCK_BYTES 512u /* the unit of st_blocks, whatever the file system */
#define NS_PER_S 1000000000
#define NS_PER_MS 1000000
#define ROOT_LISTS 8u /* that a listing in pieces can go on in */

enum slot_state { SLOT_EMPTY, SLOT_KNOWN, SLOT_OPEN, SLOT_WITHDRAWN };

/* A version of a dataset. What is known is set before the state says so, and stays. */
struct slot {
    _Atomic uint32_t state; /* enum slot_state */
    _Atomic uint32_t users; /* of the dataset */
    dlfs_fuse_slot known;
    const dlfs_directory *directory;
    dlfs_reader *reader;
    const dlfs_location *locations;
    uint64_t count;
};

/* A question, on the stack of the thread that asks. */
struct question {
    dlfs_fuse_question asked;
    dlfs_fuse_answer answer;
    bool fetched;
    bool answered;
    struct question *next;
};

/* What the root listed at some time. */
struct root_list {
    uint32_t number;
    uint32_t count;
    uint64_t names_bytes;
    char *names;
    uint32_t *slots;
};

struct counters {
    _Atomic uint64_t lookups;
    _Atomic uint64_t opens;
    _Atomic uint64_t reads;
    _Atomic uint64_t read_bytes;
    _Atomic uint64_t ahead;
    _Atomic uint64_t ahead_used;
    _Atomic uint64_t questions;
};

struct dlfs_fuse {
    dlfs_fuse_config config; /* without its texts */
    struct fuse_session *session;
    bool mounted;
    bool handles; /* the kernel opens files; else it needs no open at all */
    bool directory_handles;
    pthread_mutex_t lock; /* of all that follows, but for slots, held and counters */
    pthread_cond_t asked;
    pthread_cond_t answered;
    pthread_cond_t left; /* a slot that is withdrawn, or the loop */
    bool stopping;
    bool running;
    pthread_t loop;
    struct question *questions; /* in the order of asking */
    uint64_t ticket;
    struct root_list *lists[ROOT_LISTS];
    uint32_t list_number;
    struct held *held;
    struct ahead ahead;
    struct listening listening;
    struct counters counters;
    struct slot slots[DLFS_FUSE_SLOT_MAX + 1];
};

static inline void count(_Atomic uint64_t *counter, uint64_t more)
{
    (void)atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

static inline struct dlfs_fuse *fuse_of(fuse_req_t request)
{
    return fuse_req_userdata(request);
}

/* question.c; they return 0 or an errno > 0, ENOTCONN once the mount ends. */
int ask(struct dlfs_fuse *fuse, struct question *question);
/* Has somebody told of a failure, of a sample or of a dataset as a whole; its errno. */
int ask_error(struct dlfs_fuse *fuse, uint32_t slot, const dlfs_failure *failure);
/* The errno of a code: as it is where it says what a program may expect, else asked. */
int errno_for(struct dlfs_fuse *fuse, uint32_t slot, int code);

/* slot.c; they return 0 or an errno > 0. */
/* What is known of a slot: ESTALE if nothing is, or it was withdrawn. */
int slot_known(struct dlfs_fuse *fuse, uint32_t number, struct slot **out);
/* A slot with its dataset, opened if need be; slot_leave it. */
int slot_enter(struct dlfs_fuse *fuse, uint32_t number, struct slot **out);
void slot_leave(struct dlfs_fuse *fuse, struct slot *slot);
static inline uint64_t slot_length(const struct slot *slot, uint64_t index)
{
    return dlfs_location_length(&slot->locations[index]);
}

/* attribute.c */
void fill_file(const struct dlfs_fuse *fuse, const struct slot *slot, uint64_t index,
               struct fuse_entry_param *entry);
void fill_directory(const struct dlfs_fuse *fuse, const struct slot *slot, struct node node,
                    struct fuse_entry_param *entry);
/* Adds an entry to a reply of bytes in all; what it would take, which may be more. */
size_t add_entry(fuse_req_t request, char *reply, size_t bytes, const char *name,
                 const struct fuse_entry_param *entry, off_t next, bool plus);
void reply_absent(fuse_req_t request, double seconds);
void handle_lookup(fuse_req_t request, fuse_ino_t parent, const char *name);
void handle_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info);
void handle_readdir(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t position,
                    struct fuse_file_info *info);
void handle_readdirplus(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t position,
                        struct fuse_file_info *info);
void handle_getxattr(fuse_req_t request, fuse_ino_t inode, const char *name, size_t bytes);
void handle_listxattr(fuse_req_t request, fuse_ino_t inode, size_t bytes);

/* root.c */
int root_fill(struct dlfs_fuse *fuse, struct fuse_entry_param *entry);
void root_lookup(fuse_req_t request, const char *name);
void root_readdir(fuse_req_t request, size_t bytes, off_t position, bool plus);
void root_free_lists(struct dlfs_fuse *fuse);
void handle_statfs(fuse_req_t request, fuse_ino_t inode);

/* read.c */
void handle_read(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t offset,
                 struct fuse_file_info *info);
/* A program has found a sample, and is likely to read it; the slot is entered. */
void read_ahead_of(struct dlfs_fuse *fuse, struct slot *slot, uint64_t index);

#endif
