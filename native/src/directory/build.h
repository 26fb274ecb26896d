/* The parts of writing a directory segment. */
#ifndef DLFS_DIRECTORY_BUILD_H
#define DLFS_DIRECTORY_BUILD_H

#include "directory/directory.h"
#include "dlfs/import.h"

/*
 * Encodes the names part into out[0..capacity), or only computes its length if out is NULL. *bytes
 * gets the length before rounding up. -EINVAL: a path breaks a rule, or the part is longer than
 * capacity.
 */
int dlfs_directory_encode_names(const dlfs_directory_content *content, uint8_t *out,
                                uint64_t capacity, uint64_t *bytes);

#endif
