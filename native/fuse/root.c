/*
 * The owner knows the entries of an upper directory, so each request of the kernel becomes an
 * upcall.
 *
 * A listing that is read in several requests continues in the listing that it began in: a position
 * has the number of that listing and the index of the next entry. The kernel caches a listing as
 * long as the directory has the same modification time, which the owner changes with the entries.
 */
#include "root.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "entry.h"

#define LISTINGS 8u      /* past listings of a directory that a reader can continue */
#define LISTING_SHIFT 32 /* bits of a position below the number of the listing */
#define LISTING_NUMBER_MAX INT32_MAX

/* The entries of an upper directory at one time. */
struct upper_listing {
    uint32_t number; /* of this listing, counted from 1 */
    uint32_t count;  /* entries */
    uint64_t names_bytes;
    char *names;        /* each ends with NUL */
    uint32_t *datasets; /* number of each entry */
};

/* The last listings of one upper directory. */
struct upper_listings {
    uint32_t directory; /* number */
    uint32_t last;      /* number of the newest listing; 0: none */
    struct upper_listing *listings[LISTINGS];
    struct upper_listings *next; /* of another directory; there are as many as volumes */
};

static const struct tree_node TOP = {DATASET_DEPTH, 0};

bool root_is_upper(struct dlfs_fuse *fuse, uint64_t inode, struct dataset_entry **volume)
{
    struct inode parts = inode_unpack(inode);
    *volume = NULL;
    if (inode == ROOT_INODE) {
        return true;
    }
    return parts.node.depth == DATASET_DEPTH &&
           dataset_find(&fuse->datasets, parts.dataset, volume) == 0 && is_volume(*volume);
}

int root_set_parent(struct dlfs_fuse *fuse, const struct dataset_entry *dataset,
                    struct fuse_entry_out *entry)
{
    struct dataset_entry *volume = NULL;
    uint32_t number = dataset->info.volume;
    int error = number == 0 ? 0 : dataset_find(&fuse->datasets, number, &volume);
    return error != 0 ? error : entry_ask_upper(fuse, volume, entry);
}

static uint32_t number_of(const struct dataset_entry *volume)
{
    return volume == NULL ? 0 : volume->info.number;
}

/* ---- look-ups -------------------------------------------------------------------------------- */

static int look_up(struct dlfs_fuse *fuse, const struct dataset_entry *volume, const char *name,
                   struct fuse_entry_out *entry)
{
    struct upcall upcall = {
        .request = {.kind = DLFS_FUSE_UPCALL_LOOKUP, .dataset = number_of(volume)}};
    struct dataset_entry *dataset;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        return entry_ask_upper(fuse, name[1] == '.' ? NULL : volume, entry);
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
    if (error == 0 && is_volume(dataset)) {
        entry_set_upper(fuse, dataset, upcall.reply.modified_ns, entry);
    } else if (error == 0) {
        entry_set_directory(fuse, dataset, TOP, entry);
    }
    return error;
}

void root_lookup(const struct request *request, const struct dataset_entry *volume)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct fuse_entry_out entry;
    int error = look_up(fuse, volume, request->name, &entry);
    if (error == ENOENT) {
        entry_reply_absent(request, true);
    } else if (error != 0) {
        reply_error(&request->reply, error);
    } else {
        (void)reply_data(&request->reply, &entry, sizeof entry);
    }
}

/* ---- listings -------------------------------------------------------------------------------- */

static void free_listing(struct upper_listing *listing)
{
    if (listing != NULL) {
        free(listing->names);
        free(listing->datasets);
    }
    free(listing);
}

static void free_upper(struct upper_listings *upper)
{
    for (uint32_t i = 0; i < LISTINGS; i++) {
        free_listing(upper->listings[i]);
    }
    free(upper);
}

/* Returns where the pointer to the listings of a directory is, or the end of the list. */
static struct upper_listings **find_upper(struct dlfs_fuse *fuse, uint32_t directory)
{
    struct upper_listings **at = &fuse->listings;
    while (*at != NULL && (*at)->directory != directory) {
        at = &(*at)->next;
    }
    return at;
}

void root_free_listings(struct dlfs_fuse *fuse, uint32_t directory)
{
    (void)pthread_mutex_lock(&fuse->listings_lock);
    struct upper_listings **at = find_upper(fuse, directory);
    struct upper_listings *upper = *at;
    if (upper != NULL) {
        *at = upper->next;
        free_upper(upper);
    }
    (void)pthread_mutex_unlock(&fuse->listings_lock);
}

void root_free_all_listings(struct dlfs_fuse *fuse)
{
    while (fuse->listings != NULL) {
        root_free_listings(fuse, fuse->listings->directory);
    }
}

/* Returns the listings of a directory, made on first use; NULL without memory. */
static struct upper_listings *make_upper(struct dlfs_fuse *fuse, uint32_t directory)
{
    struct upper_listings **at = find_upper(fuse, directory);
    if (*at == NULL) {
        *at = calloc(1, sizeof **at);
        if (*at != NULL) {
            (*at)->directory = directory;
        }
    }
    return *at;
}

static struct upper_listing *newest(const struct upper_listings *upper)
{
    return upper->listings[upper->last % LISTINGS];
}

static struct upper_listing *make_listing(const uint8_t *names, uint64_t names_bytes,
                                          const uint32_t *datasets, uint32_t entry_count)
{
    struct upper_listing *listing = calloc(1, sizeof *listing);
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

static bool listings_equal(const struct upper_listing *one, const struct upper_listing *other)
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

/* Makes a listing the newest one. Returns one that is to be freed: the oldest, or the same. */
static struct upper_listing *add_listing(struct upper_listings *upper,
                                         struct upper_listing *listing)
{
    upper->last = upper->last == LISTING_NUMBER_MAX ? 1 : upper->last + 1;
    listing->number = upper->last;
    struct upper_listing **at = &upper->listings[listing->number % LISTINGS];
    struct upper_listing *oldest = *at;
    *at = listing;
    return oldest;
}

int root_set_listing(struct dlfs_fuse *fuse, uint32_t directory, const uint8_t *names,
                     uint64_t names_bytes, const uint32_t *datasets, uint32_t entry_count)
{
    if (directory > DLFS_FUSE_DATASET_MAX || !are_names(names, names_bytes, entry_count)) {
        return -EINVAL;
    }
    struct upper_listing *listing = make_listing(names, names_bytes, datasets, entry_count);
    if (listing == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_lock(&fuse->listings_lock);
    struct upper_listings *upper = make_upper(fuse, directory);
    if (upper != NULL && !listings_equal(newest(upper), listing)) {
        listing = add_listing(upper, listing);
    }
    (void)pthread_mutex_unlock(&fuse->listings_lock);
    free_listing(listing);
    return upper == NULL ? -ENOMEM : 0;
}

/*
 * Sets the attributes of an entry; 0 is `incoming`. A volume's directory gets an inode number of 0:
 * the kernel then looks it up when a program needs its attributes, whose time needs an upcall.
 * Returns false if there is no such entry.
 */
static bool set_entry(struct dlfs_fuse *fuse, uint32_t number, struct fuse_entry_out *entry)
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
    entry->nodeid = is_volume(dataset) ? 0 : entry->nodeid;
    return true;
}

/* Fills a reply with entries from index `first` on; the caller has the lock. Returns its bytes. */
static size_t fill_reply(struct dlfs_fuse *fuse, const struct upper_listing *listing,
                         uint32_t first, uint8_t *reply, size_t bytes, bool plus)
{
    const char *name = listing->names;
    size_t used = 0;
    for (uint32_t i = 0; i < listing->count; i++, name += strlen(name) + 1) {
        struct fuse_entry_out entry;
        if (i < first || !set_entry(fuse, listing->datasets[i], &entry)) {
            continue;
        }
        uint64_t next = (uint64_t)listing->number << LISTING_SHIFT | (i + 1);
        size_t more = entry_append(reply + used, bytes - used, name, &entry, next, plus);
        if (more > bytes - used) {
            break;
        }
        used += more;
    }
    return used;
}

/* Returns the listing that a position lies in, or the newest one; the caller has the lock. */
static struct upper_listing *listing_at(struct dlfs_fuse *fuse, uint32_t directory,
                                        uint64_t position)
{
    const struct upper_listings *upper = *find_upper(fuse, directory);
    uint32_t number = (uint32_t)(position >> LISTING_SHIFT);
    struct upper_listing *listing = upper == NULL ? NULL : upper->listings[number % LISTINGS];
    if (upper != NULL && (position == 0 || (listing != NULL && listing->number != number))) {
        listing = newest(upper); /* a new listing, or one whose beginning is no longer stored */
    }
    return listing;
}

void root_readdir(const struct request *request, const struct dataset_entry *volume,
                  const struct fuse_read_in *read, bool plus)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct upcall upcall = {
        .request = {.kind = DLFS_FUSE_UPCALL_LIST, .dataset = number_of(volume)}};
    int error = read->offset == 0 ? upcall_send(&fuse->upcalls, &upcall) : 0;
    uint8_t *reply = error == 0 ? malloc(read->size + 1u) : NULL;
    if (reply == NULL) {
        reply_error(&request->reply, error != 0 ? error : ENOMEM);
        return;
    }
    size_t used = 0;
    (void)pthread_mutex_lock(&fuse->listings_lock);
    struct upper_listing *listing = listing_at(fuse, number_of(volume), read->offset);
    if (listing != NULL) {
        used = fill_reply(fuse, listing, (uint32_t)read->offset, reply, read->size, plus);
    }
    (void)pthread_mutex_unlock(&fuse->listings_lock);
    (void)reply_data(&request->reply, reply, used);
    free(reply);
}

/* ---- space ----------------------------------------------------------------------------------- */

void handle_statfs(const struct request *request)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct upcall upcall = {.request = {.kind = DLFS_FUSE_UPCALL_STATFS,
                                        .dataset = inode_unpack(request->inode).dataset}};
    int error = upcall_send(&fuse->upcalls, &upcall);
    if (error != 0) {
        reply_error(&request->reply, error);
        return;
    }
    const struct fuse_statfs_out space = {.st = {
                                              .blocks = upcall.reply.capacity_bytes / BLOCK_BYTES,
                                              .bfree = upcall.reply.free_bytes / BLOCK_BYTES,
                                              .bavail = upcall.reply.free_bytes / BLOCK_BYTES,
                                              .files = upcall.reply.sample_count,
                                              .bsize = BLOCK_BYTES,
                                              .namelen = DLFS_FUSE_NAME_BYTES_MAX,
                                              .frsize = BLOCK_BYTES,
                                          }};
    (void)reply_data(&request->reply, &space, sizeof space);
}
