/* Extended attributes: index, CRC32C and version of a sample, and the version of a dataset. */
#include "xattr.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "inode.h"

#define XATTR_INDEX "user.dlfs.index"
#define XATTR_CRC32C "user.dlfs.crc32c"
#define XATTR_VERSION "user.dlfs.version"
#define VALUE_BYTES 24u /* room for the longest value */

/* Replies with a value; or with its length if the program passed no buffer. */
static void reply_value(fuse_req_t request, const char *value, size_t value_bytes, size_t bytes)
{
    if (bytes == 0) {
        (void)fuse_reply_xattr(request, value_bytes);
    } else if (value_bytes > bytes) {
        (void)fuse_reply_err(request, ERANGE);
    } else {
        (void)fuse_reply_buf(request, value, value_bytes);
    }
}

/* Writes an attribute that only files have. Returns its length; 0 if no such attribute exists. */
static int write_file_value(const struct dataset_entry *dataset, uint64_t index, const char *name,
                            char *value)
{
    if (index < dataset->count && strcmp(name, XATTR_INDEX) == 0) {
        return snprintf(value, VALUE_BYTES, "%" PRIu64, index);
    }
    if (index < dataset->count && strcmp(name, XATTR_CRC32C) == 0) {
        return snprintf(value, VALUE_BYTES, "%08" PRIx32, dataset->locations[index].crc32c);
    }
    return 0;
}

void handle_getxattr(fuse_req_t request, fuse_ino_t number, const char *name, size_t bytes)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(number);
    char value[VALUE_BYTES];
    struct dataset_entry *dataset = NULL;
    int value_bytes = 0;
    int error =
        inode.dataset == 0 ? ENODATA : dataset_find(&fuse->datasets, inode.dataset, &dataset);
    bool version = inode.node.depth <= DATASET_DEPTH && strcmp(name, XATTR_VERSION) == 0;
    if (error == 0 && version && !is_volume(dataset)) {
        value_bytes = snprintf(value, sizeof value, "%" PRIu32, dataset->info.version);
    } else if (error == 0 && inode.node.depth == FILE_DEPTH) {
        error = dataset_acquire(&fuse->datasets, inode.dataset, &dataset);
        if (error == 0) {
            value_bytes = write_file_value(dataset, inode.node.index, name, value);
            dataset_release(&fuse->datasets, dataset);
        }
    }
    if (error != 0 || value_bytes <= 0) {
        (void)fuse_reply_err(request, error != 0 ? error : ENODATA);
    } else {
        reply_value(request, value, (size_t)value_bytes, bytes);
    }
}

void handle_listxattr(fuse_req_t request, fuse_ino_t number, size_t bytes)
{
    static const char of_file[] = XATTR_INDEX "\0" XATTR_CRC32C "\0" XATTR_VERSION;
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(number);
    struct dataset_entry *dataset;
    int error = inode.dataset == 0 ? 0 : dataset_find(&fuse->datasets, inode.dataset, &dataset);
    if (error != 0) {
        (void)fuse_reply_err(request, error);
    } else if (inode.dataset == 0 || inode.node.depth > DATASET_DEPTH || is_volume(dataset)) {
        reply_value(request, "", 0, bytes);
    } else if (inode.node.depth == DATASET_DEPTH) {
        reply_value(request, XATTR_VERSION, sizeof XATTR_VERSION, bytes);
    } else {
        reply_value(request, of_file, sizeof of_file, bytes);
    }
}
