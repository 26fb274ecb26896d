/*
 * A minimal FUSE file system on libfuse's low-level interface, with all files in memory: the limit
 * of libfuse.
 *
 *     bare_fuse MOUNTPOINT FOLDER PATHS THREADS
 *
 * It serves the files of FOLDER that PATHS names, each ended by NUL, until SIGTERM, and prints
 * "ready" when it is mounted. As in DLFS's mount, entries never expire, files are opened without a
 * message, and each thread has a descriptor of its own. A single thread uses the plain loop.
 */
#define FUSE_USE_VERSION 312

#include <errno.h>
#include <fuse3/fuse_lowlevel.h>
#include <stdbool.h>

#include "bare.h"

#define FOREVER_SECONDS 1e9
#define BLOCK_BYTES 512

/* A file or directory. Its inode number is its index in the table. */
struct node {
    const char *name;
    char *data; /* NULL for a directory */
    size_t bytes;
    size_t parent;
    size_t next; /* next node of the same bucket; 0: none */
};

static struct node *nodes;
static size_t node_count = FUSE_ROOT_ID + 1;
static size_t *buckets;
static size_t bucket_count;

/* ---- the tree -------------------------------------------------------------------------------- */

static size_t *bucket_of(size_t parent, const char *name, size_t name_bytes)
{
    uint64_t mixed = parent * UINT64_C(0x9E3779B97F4A7C15);
    for (size_t i = 0; i < name_bytes; i++)
        mixed = (mixed ^ (uint8_t)name[i]) * UINT64_C(0x100000001B3);
    return &buckets[(mixed ^ mixed >> 32) % bucket_count];
}

/* Returns the inode number of an entry; 0 if it does not exist. */
static size_t find(size_t parent, const char *name)
{
    size_t number = *bucket_of(parent, name, strlen(name));
    while (number && (nodes[number].parent != parent || strcmp(nodes[number].name, name) != 0))
        number = nodes[number].next;
    return number;
}

static size_t find_or_add(size_t parent, const char *name)
{
    size_t number = find(parent, name);
    if (number)
        return number;
    size_t *bucket = bucket_of(parent, name, strlen(name));
    number = node_count++;
    nodes[number] = (struct node){.name = name, .parent = parent, .next = *bucket};
    return *bucket = number;
}

/* Adds a file and the directories above it. The nodes point to the names in the path. */
static void add(const char *folder, char *path)
{
    size_t parent = FUSE_ROOT_ID;
    char whole[8192];
    snprintf(whole, sizeof whole, "%s/%s", folder, path);
    for (char *slash; (slash = strchr(path, '/')); path = slash + 1) {
        *slash = 0;
        parent = find_or_add(parent, path);
    }
    struct node *file = &nodes[find_or_add(parent, path)];
    file->data = load(whole, &file->bytes);
}

static void make_tree(const char *folder, char *paths, size_t bytes)
{
    size_t names = 2;
    for (size_t at = 0; at < bytes; at++)
        names += paths[at] == 0 || paths[at] == '/';
    nodes = calloc(names + FUSE_ROOT_ID, sizeof *nodes);
    bucket_count = 2 * names;
    buckets = calloc(bucket_count, sizeof *buckets);
    if (!nodes || !buckets)
        die("memory");
    for (size_t at = 0, next; at < bytes; at = next) {
        next = at + strlen(paths + at) + 1;
        add(folder, paths + at);
    }
}

/* ---- requests -------------------------------------------------------------------------------- */

static struct stat attributes_of(size_t number)
{
    const struct node *node = &nodes[number];
    bool directory = node->data == NULL;
    return (struct stat){
        .st_ino = number,
        .st_mode = directory ? S_IFDIR | 0555 : S_IFREG | 0444,
        .st_nlink = 1,
        .st_size = (off_t)node->bytes,
        .st_blocks = (blkcnt_t)((node->bytes + BLOCK_BYTES - 1) / BLOCK_BYTES),
    };
}

static void handle_init(void *unused, struct fuse_conn_info *connection)
{
    (void)unused;
    connection->want &= ~(unsigned)FUSE_CAP_ATOMIC_O_TRUNC;
}

static void handle_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    size_t number = find(parent, name);
    struct fuse_entry_param entry = {.ino = number, .entry_timeout = FOREVER_SECONDS};
    entry.attr_timeout = FOREVER_SECONDS;
    if (number)
        entry.attr = attributes_of(number);
    fuse_reply_entry(request, &entry);
}

static void handle_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
    (void)info;
    struct stat attributes = attributes_of(inode);
    fuse_reply_attr(request, &attributes, FOREVER_SECONDS);
}

static void handle_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
    (void)inode, (void)info;
    fuse_reply_err(request, ENOSYS); /* the kernel sends no more opens and closes */
}

static void handle_read(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t offset,
                        struct fuse_file_info *info)
{
    (void)info;
    const struct node *node = &nodes[inode];
    size_t at = (size_t)offset < node->bytes ? (size_t)offset : node->bytes;
    size_t left = node->bytes - at;
    fuse_reply_buf(request, node->data + at, bytes < left ? bytes : left);
}

static const struct fuse_lowlevel_ops OPERATIONS = {
    .init = handle_init,
    .lookup = handle_lookup,
    .getattr = handle_getattr,
    .open = handle_open,
    .read = handle_read,
};

/* ---- the loop -------------------------------------------------------------------------------- */

static int loop(struct fuse_session *session, unsigned threads)
{
    if (threads == 1)
        return fuse_session_loop(session);
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    if (!config)
        die("fuse_loop_cfg_create");
    fuse_loop_cfg_set_clone_fd(config, 1);
    fuse_loop_cfg_set_max_threads(config, threads);
    fuse_loop_cfg_set_idle_threads(config, threads);
    int code = fuse_session_loop_mt(session, config);
    fuse_loop_cfg_destroy(config);
    return code;
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    size_t bytes;
    char *paths = load(argv[3], &bytes);
    make_tree(argv[2], paths, bytes);
    char *options[] = {argv[0], "-o", "default_permissions,ro,fsname=bench"};
    struct fuse_args arguments = FUSE_ARGS_INIT(3, options);
    struct fuse_session *session =
        fuse_session_new(&arguments, &OPERATIONS, sizeof OPERATIONS, NULL);
    if (!session || fuse_set_signal_handlers(session) != 0 ||
        fuse_session_mount(session, argv[1]) != 0)
        return 1;
    printf("ready\n");
    fflush(stdout);
    int code = loop(session, (unsigned)strtoul(argv[4], NULL, 10));
    fuse_session_unmount(session);
    fuse_session_destroy(session);
    return code < 0 ? 1 : 0;
}
