/* Stands in for uring.c where liburing is missing: all requests come through /dev/fuse. */
#include "uring.h"

#ifndef DLFS_HAVE_URING

#include <errno.h>

int rings_start(struct dlfs_fuse *fuse, void (*stop)(struct dlfs_fuse *fuse), struct rings **out)
{
    (void)fuse, (void)stop, (void)out;
    return -ENOSYS;
}

int rings_allocate(struct rings *rings, uint64_t payload_bytes)
{
    (void)rings, (void)payload_bytes;
    return -ENOSYS;
}

int rings_register(struct rings *rings)
{
    (void)rings;
    return -ENOSYS;
}

int rings_stop(struct rings *rings)
{
    (void)rings;
    return 0;
}

void rings_destroy(struct rings *rings)
{
    (void)rings;
}

#endif
