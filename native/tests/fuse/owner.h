/* The owner of a mount under test: a thread that answers the upcalls for one dataset. */
#ifndef DLFS_FUSE_OWNER_H
#define DLFS_FUSE_OWNER_H

#include <errno.h>
#include <string.h>

#include "dlfs_fuse.h"
#include "reader/reader_tests.h"

#define DATASET 3u /* number of the dataset, whose name is `data` */
#define VOLUME 7u  /* number of the directory of its volume, `pets`, in a nested mount */

struct owner {
    dlfs_fuse *fuse;
    dlfs_directory *directory;
    dlfs_reader *reader;
    bool nested;
    pthread_t thread;
};

static inline void *answer_upcalls(void *argument)
{
    struct owner *owner = argument;
    dlfs_fuse_upcall upcall;
    int code;
    while ((code = dlfs_fuse_next_upcall(owner->fuse, 100, &upcall)) >= 0) {
        dlfs_fuse_reply reply = {.id = upcall.id, .dataset = DATASET};
        if (code == 0) {
            continue;
        }
        bool in_root = owner->nested && upcall.dataset == 0;
        const char *name = in_root ? "pets" : "data";
        if (upcall.kind == DLFS_FUSE_UPCALL_LOOKUP && strcmp((char *)upcall.name, name) != 0) {
            reply.error = ENOENT;
        } else if (upcall.kind == DLFS_FUSE_UPCALL_LOOKUP && in_root) {
            reply.dataset = VOLUME;
            reply.modified_ns = 1000;
        } else if (upcall.kind == DLFS_FUSE_UPCALL_OPEN_DATASET) {
            CHECK_EQ(dlfs_fuse_open_dataset(owner->fuse, DATASET, owner->directory, owner->reader),
                     0);
        } else if (upcall.kind == DLFS_FUSE_UPCALL_REPORT_FAILURE) {
            reply.error = EIO;
        }
        (void)dlfs_fuse_reply_upcall(owner->fuse, &reply);
    }
    CHECK_EQ(code, -ESHUTDOWN);
    return NULL;
}

static inline void owner_begin(struct owner *owner)
{
    CHECK_EQ(pthread_create(&owner->thread, NULL, answer_upcalls, owner), 0);
}

/* Waits for the end of the thread, which comes with that of the mount. */
static inline void owner_end(struct owner *owner)
{
    CHECK_EQ(pthread_join(owner->thread, NULL), 0);
}

#endif
