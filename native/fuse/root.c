/*
 * The owner knows the entries of the root, so each request of the kernel becomes an upcall.
 *
 * A listing that is read in several requests continues in the listing that it began in: a position
 * has the number of that listing and the index of the next entry. The kernel caches the listing of
 * the root, so it is notified when the entries change.
 */
#include "root.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "entry.h"

#define LISTING_SHIFT 32 /* bits of a position below the number of the listing */
#define LISTING_NUMBER_MAX INT32_MAX

static const struct tree_node TOP = {DATASET_DEPTH, 0};

/* ---- look-ups -------------------------------------------------------------------------------- */

static int find_dataset(struct dlfs_fuse *fuse, const char *name, struct fuse_entry_param *entry)
{
    struct upcall upcall = {.request = {.kind = DLFS_FUSE_UPCALL_LOOKUP}};
    struct dataset_entry *dataset;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        return entry_set_root(fuse, entry);
    }
    upcall.request.name_bytes = (uint32_t)strlen(name);
    memcpy(upcall.request.name, name, upcall.request.name_bytes);
    int error = upcall_send(&fuse->upcalls, &upcall);
    if (error == 0 && upcall.reply.dataset == 0) {
        entry_set_incoming(fuse, entry);
        return 0;
    }
    if (error == 0) {
        error = dataset_find(&fuse->datasets, upcall.reply.dataset, &dataset);
    }
    if (error == 0) {
        entry_set_directory(fuse, dataset, TOP, entry);
    }
    return error;
}

void root_lookup(fuse_req_t request, const char *name)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct fuse_entry_param entry;
    int error = find_dataset(fuse, name, &entry);
    if (error == ENOENT) {
        entry_reply_absent(request, root_timeout_seconds(fuse));
    } else if (error != 0) {
        (void)fuse_reply_err(request, error);
    } else {
        (void)fuse_reply_entry(request, &entry);
    }
}

/* ---- listings -------------------------------------------------------------------------------- */

static void free_listing(struct root_listing *listing)
{
    if (listing != NULL) {
        free(listing->names);
        free(listing->datasets);
    }
    free(listing);
}

void root_free_listings(struct dlfs_fuse *fuse)
{
    for (uint32_t i = 0; i < ROOT_LISTINGS; i++) {
        free_listing(fuse->listings[i]);
    }
}

static struct root_listing *newest(const struct dlfs_fuse *fuse)
{
    return fuse->listings[fuse->last_listing % ROOT_LISTINGS];
}

static struct root_listing *make_listing(const uint8_t *names, uint64_t names_bytes,
                                         const uint32_t *datasets, uint32_t entry_count)
{
    struct root_listing *listing = calloc(1, sizeof *listing);
    if (listing == NULL) {
        return NULL;
    }
    listing->count = entry_count;
    listing->names_bytes = names_bytes;
    listing->names = malloc(names_bytes + 1);
    listing->datasets = calloc(entry_count + 1u, sizeof *datasets);
    if (listing->names == NULL || listing->datasets == NULL) {
        free_listing(listing);
        return NULL;
    }
    if (entry_count > 0) {
        memcpy(listing->names, names, names_bytes);
        memcpy(listing->datasets, datasets, entry_count * sizeof *datasets);
    }
    return listing;
}

static bool listings_equal(const struct root_listing *one, const struct root_listing *other)
{
    return one != NULL && one->count == other->count && one->names_bytes == other->names_bytes &&
           memcmp(one->names, other->names, one->names_bytes) == 0 &&
           memcmp(one->datasets, other->datasets, one->count * sizeof *one->datasets) == 0;
}

/* Returns true if the bytes are exactly that many names, none of them empty or too long. */
static bool are_names(const uint8_t *names, uint64_t bytes, uint32_t name_count)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < name_count; i++) {
        const uint8_t *end = at < bytes ? memchr(names + at, 0, bytes - at) : NULL;
        uint64_t length = end == NULL ? 0 : (uint64_t)(end - names) - at;
        if (length == 0 || length > DLFS_FUSE_NAME_BYTES_MAX) {
            return false;
        }
        at += length + 1;
    }
    return at == bytes;
}

int root_set_listing(struct dlfs_fuse *fuse, const uint8_t *names, uint64_t names_bytes,
                     const uint32_t *datasets, uint32_t entry_count)
{
    if (!are_names(names, names_bytes, entry_count)) {
        return -EINVAL;
    }
    struct root_listing *listing = make_listing(names, names_bytes, datasets, entry_count);
    if (listing == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_lock(&fuse->listings_lock);
    bool changed = !listings_equal(newest(fuse), listing);
    if (changed) {
        uint32_t last = fuse->last_listing;
        fuse->last_listing = last == LISTING_NUMBER_MAX ? 1 : last + 1;
        listing->number = fuse->last_listing;
        struct root_listing **at = &fuse->listings[listing->number % ROOT_LISTINGS];
        struct root_listing *oldest = *at;
        *at = listing;
        listing = oldest;
    }
    (void)pthread_mutex_unlock(&fuse->listings_lock);
    free_listing(listing);
    if (changed) { /* fails with ENOENT if the kernel has nothing cached */
        (void)fuse_lowlevel_notify_inval_inode(fuse->session, ROOT_INODE, 0, 0);
    }
    return 0;
}

/* Sets the attributes of an entry; 0 is `incoming`. Returns false if there is no such dataset. */
static bool set_entry(struct dlfs_fuse *fuse, uint32_t number, struct fuse_entry_param *entry)
{
    struct dataset_entry *dataset;
    if (number == 0) {
        entry_set_incoming(fuse, entry);
        return true;
    }
    if (dataset_find(&fuse->datasets, number, &dataset) != 0) {
        return false;
    }
    entry_set_directory(fuse, dataset, TOP, entry);
    return true;
}

/* Fills a reply with entries from index `first` on; the caller has the lock. Returns its bytes. */
static size_t fill_reply(fuse_req_t request, const struct root_listing *listing, uint32_t first,
                         char *reply, size_t bytes, bool plus)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    const char *name = listing->names;
    size_t used = 0;
    for (uint32_t i = 0; i < listing->count; i++, name += strlen(name) + 1) {
        struct fuse_entry_param entry;
        if (i < first || !set_entry(fuse, listing->datasets[i], &entry)) {
            continue;
        }
        off_t next = (off_t)listing->number << LISTING_SHIFT | (off_t)(i + 1);
        size_t more = entry_append(request, reply + used, bytes - used, name, &entry, next, plus);
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
    struct upcall upcall = {.request = {.kind = DLFS_FUSE_UPCALL_LIST_ROOT}};
    int error = position == 0 ? upcall_send(&fuse->upcalls, &upcall) : 0;
    char *reply = error == 0 ? malloc(bytes) : NULL;
    if (reply == NULL) {
        (void)fuse_reply_err(request, error != 0 ? error : ENOMEM);
        return;
    }
    size_t used = 0;
    (void)pthread_mutex_lock(&fuse->listings_lock);
    uint32_t number = (uint32_t)(position >> LISTING_SHIFT);
    struct root_listing *listing = fuse->listings[number % ROOT_LISTINGS];
    if (position == 0 || (listing != NULL && listing->number != number)) {
        listing = newest(fuse); /* a new listing, or one whose beginning is no longer stored */
    }
    if (listing != NULL) {
        used = fill_reply(request, listing, (uint32_t)position, reply, bytes, plus);
    }
    (void)pthread_mutex_unlock(&fuse->listings_lock);
    (void)fuse_reply_buf(request, reply, used);
    free(reply);
}

/* ---- space ----------------------------------------------------------------------------------- */

void handle_statfs(fuse_req_t request, fuse_ino_t inode)
{
    (void)inode;
    struct dlfs_fuse *fuse = fuse_of(request);
    struct upcall upcall = {.request = {.kind = DLFS_FUSE_UPCALL_STATFS}};
    int error = upcall_send(&fuse->upcalls, &upcall);
    if (error != 0) {
        (void)fuse_reply_err(request, error);
        return;
    }
    struct statvfs space = {
        .f_bsize = BLOCK_BYTES,
        .f_frsize = BLOCK_BYTES,
        .f_blocks = upcall.reply.capacity_bytes / BLOCK_BYTES,
        .f_bfree = upcall.reply.free_bytes / BLOCK_BYTES,
        .f_bavail = upcall.reply.free_bytes / BLOCK_BYTES,
        .f_files = upcall.reply.sample_count,
        .f_namemax = DLFS_FUSE_NAME_BYTES_MAX,
    };
    (void)fuse_reply_statfs(request, &space);
}
