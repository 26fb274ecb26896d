/*
 * Open files and block devices, and the two engines that read and write them: file.c opens a
 * device, uring.c and threads.c create its queue pairs. Internal to the part "device".
 */
#ifndef DLFS_FILE_H
#define DLFS_FILE_H

#include <errno.h>

#include "device/device.h"

/* An open file or block device; shared by both engines. */
struct dlfs_file_device {
    dlfs_device base;
    int descriptor;
};

/* Returns 0 if this process may use io_uring with the features that the engine needs, else -errno.
 */
int dlfs_uring_probe(void);
int dlfs_uring_queue_create(dlfs_device *device, uint32_t depth,
                            const struct dlfs_connect_limit *limit, dlfs_queue **out);
int dlfs_threads_queue_create(dlfs_device *device, uint32_t depth,
                              const struct dlfs_connect_limit *limit, dlfs_queue **out);
/*
 * Converts the negative errno of a read or write into the result of a completion: DLFS_E_LOST if
 * the device has gone.
 */
static inline int64_t file_result(int64_t error)
{
    bool gone = error == -ENODEV || error == -ENXIO || error == -ENOMEDIUM || error == -ESHUTDOWN;
    return gone ? DLFS_E_LOST : error;
}

#endif
