/*
 * One dataset's sample directory as a tree of files and directories, and its inode numbers.
 *
 * Directories are stored nowhere: the paths are in byte order, so a directory is a run of indices
 * and is known by its depth and the first sample below it. dlfs/mount/tree.py says the same in
 * Python, and dlfs/staging/inode_numbers.py has the numbers. A tree never changes: any threads may
 * use it at once.
 */
#ifndef DLFS_FUSE_TREE_H
#define DLFS_FUSE_TREE_H

#include <stdbool.h>
#include <stdint.h>

#include "dlfs/dlfs.h"

#define ROOT_INODE 1u
#define INDEX_BITS 36u
#define DEPTH_BITS 12u
#define INDEX_MAX ((UINT64_C(1) << INDEX_BITS) - 1)
#define DEPTH_MAX ((1u << DEPTH_BITS) - 1)
#define FILE_DEPTH 0u
#define DATASET_DEPTH 1u
#define PATH_TEXT_BYTES (DLFS_PATH_BYTES_MAX + 1u) /* of one path and a slash */

/* A file (depth 0) or a directory: its depth, and the first sample below it. */
struct node {
    uint32_t depth;
    uint64_t index;
};

/* What an inode number says. */
struct place {
    uint32_t slot;
    struct node node;
};

static inline uint64_t place_pack(uint32_t slot, struct node node)
{
    return (uint64_t)slot << (INDEX_BITS + DEPTH_BITS) | (uint64_t)node.depth << INDEX_BITS |
           node.index;
}

static inline struct place place_unpack(uint64_t inode)
{
    struct node node = {(uint32_t)(inode >> INDEX_BITS) & DEPTH_MAX, inode & INDEX_MAX};
    return (struct place){(uint32_t)(inode >> (INDEX_BITS + DEPTH_BITS)), node};
}

/* ---- what leads where ------------------------------------------------------------------------ */

/*
 * Finds an entry of a directory. Errors: -ENOENT; -ESTALE, there is no such directory (a number of
 * another mount); DLFS_E_FORMAT.
 */
int tree_child(const dlfs_directory *directory, struct node parent, const char *name,
               struct node *out);
/* The directory that holds a node; the top is its own. Errors as of tree_child. */
int tree_parent(const dlfs_directory *directory, struct node node, struct node *out);

/* ---- listings -------------------------------------------------------------------------------- */

#define LIST_FEW 32u   /* names decoded at a time where directories come one after the other */
#define LIST_MANY 256u /* ... and where files do */
#define LIST_TEXT_BYTES (16u << 10)

/* A directory being listed: what its paths start with, and names decoded ahead. */
struct listing {
    const dlfs_directory *directory;
    struct node node;
    uint64_t end;   /* the index behind its last sample */
    uint64_t first; /* of the names decoded */
    uint64_t count; /* of them */
    uint32_t ahead; /* how many to decode next */
    uint32_t prefix_bytes;
    uint8_t prefix[PATH_TEXT_BYTES + 1];
    uint8_t text[LIST_TEXT_BYTES];
    uint64_t offsets[LIST_MANY + 1];
};

struct child {
    struct node node;
    uint64_t next; /* where the next child is: the position to go on from */
    char name[256];
};

int listing_begin(const dlfs_directory *directory, struct node node, struct listing *listing);
/*
 * The child at a position (0, or a child's next): 1, 0 at the end, or DLFS_E_FORMAT where names are
 * such as no file system can show, or would not advance.
 */
int listing_child(struct listing *listing, uint64_t position, struct child *child);

#endif
