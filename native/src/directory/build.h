/* The parts of writing a directory segment: the rules of paths, and the names part. */
#ifndef DLFS_DIRECTORY_BUILD_H
#define DLFS_DIRECTORY_BUILD_H

#include "directory/directory.h"
#include "dlfs/import.h"
#include "platform/memory.h"

/* Returns true if a path keeps the rules of FORMAT.md, section 6, that concern it alone. */
bool dlfs_path_is_valid(const uint8_t *path, uint64_t bytes);
/* Returns the length of the common beginning of two paths, at most `limit`. */
uint32_t dlfs_common_bytes(const uint8_t *a, const uint8_t *b, uint32_t limit);

/* Paths in rising order, and the state to compare the next one with. All zeroes before the first.
 */
struct path_walk {
    const uint8_t *previous; /* path before the next one */
    uint32_t previous_bytes;
    uint32_t depth;                          /* depth of the stack */
    uint16_t stack[DLFS_PATH_BYTES_MAX + 1]; /* lengths of the samples' paths that the previous
                                                path begins with, or is */
    uint8_t saved[DLFS_PATH_BYTES_MAX];      /* the previous path between two calls */
};
/*
 * Takes the next path, of a sample, or of a directory with a '/' behind it. Returns the rule that
 * it breaks, or 0; *common gets the length of its common beginning with the path before it.
 */
uint32_t dlfs_path_walk_next(struct path_walk *walk, const uint8_t *path, uint64_t bytes,
                             bool directory, uint32_t *common);
/* Copies the previous path, whose memory belongs to the caller. */
void dlfs_path_walk_save(struct path_walk *walk);

/* Encoded paths in name blocks. All zeroes before the first. */
struct name_list {
    struct growing_memory text;
    struct growing_memory starts; /* uint64_t: position of each block in the text */
    uint64_t bytes;               /* length of the text */
    uint64_t count;               /* encoded paths */
};
/*
 * Encodes the next path, of which `shared` bytes are those of the path before it in the list.
 * -ENOMEM.
 */
int dlfs_name_list_add(struct name_list *list, const uint8_t *path, uint32_t bytes,
                       uint32_t shared);
/*
 * Makes the names part of two lists: the first one's text becomes the whole part, of *bytes. The
 * second list is freed. -ENOMEM.
 */
int dlfs_name_lists_join(struct name_list *samples, struct name_list *empty, uint64_t *bytes);
void dlfs_name_list_free(struct name_list *list);

#endif
