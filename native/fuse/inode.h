/*
 * Inode numbers: a dataset's number, a depth and a sample index in one integer.
 *
 * Depth 0 is the file of that sample. Depth d >= 1 is a directory: the first d-1 components of the
 * path of that sample, which is the first sample below it. Empty directories are numbered behind
 * the samples. dlfs/mount/inode_numbers.py defines the same layout in Python.
 */
#ifndef DLFS_FUSE_INODE_H
#define DLFS_FUSE_INODE_H

#include <stdint.h>

#define ROOT_INODE 1u
#define INDEX_BITS 36u
#define DEPTH_BITS 12u
#define INDEX_MAX ((UINT64_C(1) << INDEX_BITS) - 1)
#define DEPTH_MAX ((1u << DEPTH_BITS) - 1)
#define FILE_DEPTH 0u
#define DATASET_DEPTH 1u /* the top directory of a dataset, or the directory of a volume */

/* A file (depth 0) or a directory of a dataset. */
struct tree_node {
    uint32_t depth;
    uint64_t index; /* the file's sample, or the first sample below the directory; without one, the
                       samples' count plus the number of its first empty directory */
};

struct inode {
    uint32_t dataset; /* number */
    struct tree_node node;
};

static inline uint64_t inode_pack(uint32_t dataset, struct tree_node node)
{
    return (uint64_t)dataset << (INDEX_BITS + DEPTH_BITS) | (uint64_t)node.depth << INDEX_BITS |
           node.index;
}

static inline struct inode inode_unpack(uint64_t number)
{
    struct tree_node node = {(uint32_t)(number >> INDEX_BITS) & DEPTH_MAX, number & INDEX_MAX};
    return (struct inode){(uint32_t)(number >> (INDEX_BITS + DEPTH_BITS)), node};
}

#endif
