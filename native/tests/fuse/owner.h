/* The owner of a mount under test: a thread that answers the upcalls for one dataset. */
#ifndef DLFS_FUSE_OWNER_H
#define DLFS_FUSE_OWNER_H

#include <errno.h>
#include <linux/fuse.h>
#include <stdatomic.h>
#include <string.h>

#include "dlfs_fuse.h"
#include "inode.h"
#include "reader/reader_tests.h"

#define DATASET 3u /* number of the dataset, whose name is `data` */
#define VOLUME 7u  /* number of the directory of its volume, `pets`, in a nested mount */

struct owner {
    dlfs_fuse *fuse;
    dlfs_directory *directory;
    dlfs_reader *reader;
    bool nested;
    pthread_t thread;
    _Atomic bool volume_is_gone;
};

/* The root lists the dataset, or `pets`, which lists it then. */
static inline bool owner_has(const struct owner *owner, const dlfs_fuse_upcall *upcall,
                             uint64_t *inode)
{
    const struct tree_node top = {DATASET_DEPTH, 0};
    bool in_root = upcall->inode == ROOT_INODE;
    bool lists_volume = owner->nested && in_root;
    *inode = inode_pack(lists_volume ? VOLUME : DATASET, top);
    return upcall->kind != FUSE_LOOKUP || strcmp(upcall->name, lists_volume ? "pets" : "data") == 0;
}

/* Sets what the kernel gets: attributes of a directory, alone or with a name in front or behind. */
static inline uint32_t owner_answer(const struct owner *owner, const dlfs_fuse_upcall *upcall,
                                    uint64_t inode, uint8_t *data)
{
    const struct fuse_attr attributes = {
        .ino = upcall->kind == FUSE_GETATTR ? upcall->inode : inode, .mode = 040555, .nlink = 1};
    const struct fuse_entry_out entry = {.nodeid = inode, .attr = attributes};
    const struct fuse_attr_out alone = {.attr = attributes};
    const struct fuse_dirent item = {.ino = inode, .off = 1, .namelen = 4, .type = 4};
    uint32_t bytes = 0;
    if (upcall->kind == FUSE_GETATTR) {
        memcpy(data, &alone, sizeof alone);
        return sizeof alone;
    }
    if (upcall->kind == FUSE_STATFS) {
        memset(data, 0, sizeof(struct fuse_statfs_out));
        return sizeof(struct fuse_statfs_out);
    }
    if (upcall->kind != FUSE_READDIR) {
        memcpy(data, &entry, sizeof entry);
        bytes = sizeof entry;
    }
    if (upcall->kind != FUSE_LOOKUP) {
        memcpy(data + bytes, &item, FUSE_NAME_OFFSET);
        const char *name = owner->nested && upcall->inode == ROOT_INODE ? "pets" : "data";
        memcpy(data + bytes + FUSE_NAME_OFFSET, name, 4);
        memset(data + bytes + FUSE_NAME_OFFSET + 4, 0, 4);
        bytes += (uint32_t)FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + 4u);
    }
    return upcall->offset > 0 ? 0 : bytes;
}

static inline void *answer_upcalls(void *argument)
{
    struct owner *owner = argument;
    dlfs_fuse_upcall upcall;
    int code;
    while ((code = dlfs_fuse_next_upcall(owner->fuse, 100, &upcall)) >= 0) {
        uint8_t data[512];
        uint64_t inode;
        dlfs_fuse_reply reply = {.id = upcall.id, .data = data};
        if (code == 0) {
            continue;
        }
        if (upcall.kind == DLFS_FUSE_UPCALL_OPEN_DATASET) {
            CHECK_EQ(dlfs_fuse_open_dataset(owner->fuse, DATASET, owner->directory, owner->reader),
                     0);
        } else if (upcall.kind == DLFS_FUSE_UPCALL_REPORT_FAILURE) {
            reply.error = EIO;
        } else if (upcall.inode != ROOT_INODE && atomic_load(&owner->volume_is_gone)) {
            reply.error = ESTALE;
        } else if (!owner_has(owner, &upcall, &inode)) {
            reply.error = ENOENT;
        } else {
            reply.data_bytes = owner_answer(owner, &upcall, inode, data);
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
