/* Extended attributes: index, CRC32C and version of a sample, and the version of a dataset. */
#include "operations.h"

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
static void reply_value(const struct kernel_request *request, const char *value, size_t value_bytes)
{
    struct fuse_getxattr_in room;
    const struct fuse_getxattr_out length = {.size = (uint32_t)value_bytes};
    memcpy(&room, request->arguments, sizeof room);
    if (room.size == 0) {
        (void)reply_data(&request->reply, &length, sizeof length);
    } else if (value_bytes > room.size) {
        reply_error(&request->reply, ERANGE);
    } else {
        (void)reply_data(&request->reply, value, value_bytes);
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

void handle_getxattr(const struct kernel_request *request)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(request->inode);
    const char *name = request->name;
    char value[VALUE_BYTES];
    struct dataset_entry *dataset = NULL;
    int value_bytes = 0;
    int error = is_above_datasets(&fuse->datasets, request->inode)
                    ? ENODATA
                    : dataset_find(&fuse->datasets, inode.dataset, &dataset);
    bool version = inode.node.depth <= DATASET_DEPTH && strcmp(name, XATTR_VERSION) == 0;
    if (error == 0 && version) {
        value_bytes = snprintf(value, sizeof value, "%" PRIu32, dataset->version);
    } else if (error == 0 && inode.node.depth == FILE_DEPTH) {
        error = dataset_acquire(&fuse->datasets, inode.dataset, &dataset);
        if (error == 0) {
            value_bytes = write_file_value(dataset, inode.node.index, name, value);
            dataset_release(&fuse->datasets, dataset);
        }
    }
    if (error != 0 || value_bytes <= 0) {
        reply_error(&request->reply, error != 0 ? error : ENODATA);
    } else {
        reply_value(request, value, (size_t)value_bytes);
    }
}

void handle_listxattr(const struct kernel_request *request)
{
    static const char of_file[] = XATTR_INDEX "\0" XATTR_CRC32C "\0" XATTR_VERSION;
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(request->inode);
    struct dataset_entry *dataset;
    bool above = is_above_datasets(&fuse->datasets, request->inode);
    int error = above ? 0 : dataset_find(&fuse->datasets, inode.dataset, &dataset);
    if (error != 0) {
        reply_error(&request->reply, error);
    } else if (above || inode.node.depth > DATASET_DEPTH) {
        reply_value(request, "", 0);
    } else if (inode.node.depth == DATASET_DEPTH) {
        reply_value(request, XATTR_VERSION, sizeof XATTR_VERSION);
    } else {
        reply_value(request, of_file, sizeof of_file);
    }
}
