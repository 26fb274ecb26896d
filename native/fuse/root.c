/*
 * The root: the owner knows what it holds, and is asked whenever the kernel asks.
 *
 * A listing in pieces goes on in the list that it began in: a position has that list's number and
 * the place in it. The kernel keeps what the root listed, so it is told when that changes.
 */
#include "service.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define LIST_SHIFT 32 /* of the list's number, in a position */
#define LIST_NUMBER_MAX INT32_MAX

int root_fill(struct dlfs_fuse *fuse, struct fuse_entry_param *entry)
{
    struct question question = {.asked = {.kind = DLFS_FUSE_ASK_ROOT}};
    int error = ask(fuse, &question);
    if (error != 0) {
        return error;
    }
    int64_t modified_ns = question.answer.modified_ns;
    memset(entry, 0, sizeof *entry);
    entry->ino = entry->attr.st_ino = ROOT_INODE;
    entry->entry_timeout = entry->attr_timeout = fuse->config.root_timeout_ms / 1e3;
    entry->attr.st_mode = S_IFDIR | fuse->config.file_mode | (fuse->config.file_mode & 0444) >> 2;
    entry->attr.st_nlink = 1;
    entry->attr.st_uid = fuse->config.uid;
    entry->attr.st_gid = fuse->config.gid;
    entry->attr.st_blksize = BLOCK_BYTES;
    struct timespec when = {modified_ns / NS_PER_S, modified_ns % NS_PER_S};
    entry->attr.st_mtim = entry->attr.st_ctim = entry->attr.st_atim = when;
    return 0;
}

static int root_child(struct dlfs_fuse *fuse, const char *name, struct fuse_entry_param *entry)
{
    struct question question = {.asked = {.kind = DLFS_FUSE_ASK_CHILD}};
    struct slot *slot;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        return root_fill(fuse, entry);
    }
    question.asked.name_bytes = (uint32_t)strlen(name);
    memcpy(question.asked.name, name, question.asked.name_bytes);
    int error = ask(fuse, &question);
    if (error == 0) {
        error = slot_known(fuse, question.answer.slot, &slot);
    }
    if (error == 0) {
        fill_directory(fuse, slot, (struct node){DATASET_DEPTH, 0}, entry);
    }
    return error;
}

void root_lookup(fuse_req_t request, const char *name)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct fuse_entry_param entry;
    int error = root_child(fuse, name, &entry);
    if (error == ENOENT) {
        reply_absent(request, fuse->config.root_timeout_ms / 1e3);
    } else if (error != 0) {
        (void)fuse_reply_err(request, error);
    } else {
        (void)fuse_reply_entry(request, &entry);
    }
}

/* ---- what it lists --------------------------------------------------------------------------- */

static void list_free(struct root_list *list)
{
    if (list != NULL) {
        free(list->names);
        free(list->slots);
    }
    free(list);
}

void root_free_lists(struct dlfs_fuse *fuse)
{
    for (uint32_t i = 0; i < ROOT_LISTS; i++) {
        list_free(fuse->lists[i]);
    }
}

static struct root_list *newest(const struct dlfs_fuse *fuse)
{
    return fuse->lists[fuse->list_number % ROOT_LISTS];
}

static struct root_list *list_make(const uint8_t *names, uint64_t names_bytes,
                                   const uint32_t *slots, uint32_t count)
{
    struct root_list *list = calloc(1, sizeof *list);
    if (list == NULL) {
        return NULL;
    }
    list->count = count;
    list->names_bytes = names_bytes;
    list->names = malloc(names_bytes + 1);
    list->slots = calloc(count + 1u, sizeof *slots);
    if (list->names == NULL || list->slots == NULL) {
        list_free(list);
        return NULL;
    }
    if (count > 0) {
        memcpy(list->names, names, names_bytes);
        memcpy(list->slots, slots, count * sizeof *slots);
    }
    return list;
}

static bool lists_agree(const struct root_list *one, const struct root_list *other)
{
    return one != NULL && one->count == other->count && one->names_bytes == other->names_bytes &&
           memcmp(one->names, other->names, one->names_bytes) == 0 &&
           memcmp(one->slots, other->slots, one->count * sizeof *one->slots) == 0;
}

/* Whether that many names, none empty or too long, fill the bytes. */
static bool names_fit(const uint8_t *names, uint64_t bytes, uint32_t count)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *end = at < bytes ? memchr(names + at, 0, bytes - at) : NULL;
        uint64_t length = end == NULL ? 0 : (uint64_t)(end - names) - at;
        if (length == 0 || length > DLFS_FUSE_NAME_BYTES_MAX) {
            return false;
        }
        at += length + 1;
    }
    return at == bytes;
}

DLFS_API int dlfs_fuse_list(dlfs_fuse *fuse, const uint8_t *names, uint64_t names_bytes,
                            const uint32_t *slots, uint32_t count)
{
    if (!names_fit(names, names_bytes, count)) {
        return -EINVAL;
    }
    struct root_list *list = list_make(names, names_bytes, slots, count);
    if (list == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_lock(&fuse->lock);
    bool changed = !lists_agree(newest(fuse), list);
    if (changed) {
        fuse->list_number = fuse->list_number == LIST_NUMBER_MAX ? 1 : fuse->list_number + 1;
        list->number = fuse->list_number;
        struct root_list **place = &fuse->lists[fuse->list_number % ROOT_LISTS];
        struct root_list *oldest = *place;
        *place = list;
        list = oldest;
    }
    (void)pthread_mutex_unlock(&fuse->lock);
    list_free(list);
    if (changed) { /* ENOENT where the kernel knows nothing of it */
        (void)fuse_lowlevel_notify_inval_inode(fuse->session, ROOT_INODE, 0, 0);
    }
    return 0;
}

/* Fills a reply from a list, from a place on; the lock is held. */
static size_t list_root(fuse_req_t request, const struct root_list *list, uint32_t first,
                        char *reply, size_t bytes, bool plus)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    const char *name = list->names;
    size_t used = 0;
    for (uint32_t i = 0; i < list->count; i++, name += strlen(name) + 1) {
        struct fuse_entry_param entry;
        struct slot *slot;
        if (i < first || slot_known(fuse, list->slots[i], &slot) != 0) {
            continue;
        }
        fill_directory(fuse, slot, (struct node){DATASET_DEPTH, 0}, &entry);
        off_t next = (off_t)list->number << LIST_SHIFT | (off_t)(i + 1);
        size_t more = add_entry(request, reply + used, bytes - used, name, &entry, next, plus);
        if (more > bytes - used) {
            break;
        }
        used += more;
    }
    return used;
}

void root_readdir(fuse_req_t request, size_t bytes, off_t position, bool plus)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct question question = {.asked = {.kind = DLFS_FUSE_ASK_LIST}};
    int error = position == 0 ? ask(fuse, &question) : 0;
    char *reply = error == 0 ? malloc(bytes) : NULL;
    if (reply == NULL) {
        (void)fuse_reply_err(request, error != 0 ? error : ENOMEM);
        return;
    }
    size_t used = 0;
    (void)pthread_mutex_lock(&fuse->lock);
    uint32_t number = (uint32_t)(position >> LIST_SHIFT);
    struct root_list *list = position == 0 ? newest(fuse) : fuse->lists[number % ROOT_LISTS];
    if (list != NULL && position != 0 && list->number != number) {
        list = newest(fuse); /* begun too long ago */
    }
    if (list != NULL) {
        used = list_root(request, list, (uint32_t)position, reply, bytes, plus);
    }
    (void)pthread_mutex_unlock(&fuse->lock);
    (void)fuse_reply_buf(request, reply, used);
    free(reply);
}

void handle_statfs(fuse_req_t request, fuse_ino_t inode)
{
    (void)inode;
    struct question question = {.asked = {.kind = DLFS_FUSE_ASK_SPACE}};
    int error = ask(fuse_of(request), &question);
    if (error != 0) {
        (void)fuse_reply_err(request, error);
        return;
    }
    struct statvfs space = {
        .f_bsize = BLOCK_BYTES,
        .f_frsize = BLOCK_BYTES,
        .f_blocks = question.answer.capacity_bytes / BLOCK_BYTES,
        .f_bfree = question.answer.free_bytes / BLOCK_BYTES,
        .f_bavail = question.answer.free_bytes / BLOCK_BYTES,
        .f_files = question.answer.sample_count,
        .f_namemax = DLFS_FUSE_NAME_BYTES_MAX,
    };
    (void)fuse_reply_statfs(request, &space);
}
