/*
 * One dataset's sample directory as a tree of files and directories.
 *
 * Directories with samples below them are not stored. The paths are in byte order, so a directory
 * is a range of indices; its depth and the first sample below it identify it. Directories without
 * samples are stored: they have the indices behind those of samples, and are listed last.
 * dlfs/mount/tree.py is the same in Python.
 *
 * Threads: any at once; a tree never changes.
 */
#ifndef DLFS_FUSE_TREE_H
#define DLFS_FUSE_TREE_H

#include <stdbool.h>
#include <stdint.h>

#include "dlfs/dlfs.h"

#include "inode.h"

#define PATH_TEXT_BYTES (DLFS_PATH_BYTES_MAX + 1u) /* one path and a slash */

/* ---- names ----------------------------------------------------------------------------------- */

/*
 * Finds an entry of a directory. Errors: -ENOENT; -ENOTDIR; -ESTALE, the directory does not exist
 * (its number comes from another mount); DLFS_E_FORMAT.
 */
int tree_child(const dlfs_directory *directory, struct tree_node parent, const char *name,
               struct tree_node *out);
/* Finds the directory that contains a node. The top directory contains itself. Errors as
 * tree_child. */
int tree_parent(const dlfs_directory *directory, struct tree_node node, struct tree_node *out);

/* ---- listings -------------------------------------------------------------------------------- */

#define LIST_FEW 32u   /* names decoded at a time in a range of directories */
#define LIST_MANY 256u /* names decoded at a time in a range of files */
#define LIST_TEXT_BYTES (16u << 10)

/* A directory that is being listed, with a window of decoded names. */
struct listing {
    const dlfs_directory *directory;
    struct tree_node node;
    uint64_t end;        /* index after the directory's last sample */
    uint64_t empty;      /* index of its first empty directory */
    uint64_t empty_end;  /* index after its last empty directory */
    uint64_t first;      /* index of the first decoded name */
    uint64_t count;      /* decoded names */
    uint32_t decode_max; /* names to decode next */
    uint32_t prefix_bytes;
    uint8_t prefix[PATH_TEXT_BYTES + 1]; /* common prefix of all paths in the directory */
    uint8_t text[LIST_TEXT_BYTES];
    uint64_t offsets[LIST_MANY + 1];
};

struct child {
    struct tree_node node;
    uint64_t next; /* position of the next child */
    char name[256];
};

/* Starts to list a directory. Errors as tree_child. */
int listing_begin(const dlfs_directory *directory, struct tree_node node, struct listing *listing);
/*
 * Gets the child at a position (0, or the `next` of a child). Returns 1, or 0 at the end.
 * DLFS_E_FORMAT: a name that no file system can show, or names that are out of order.
 */
int listing_child(struct listing *listing, uint64_t position, struct child *child);

#endif
