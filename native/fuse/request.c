/* A reply is a header and data, sent in one call from where the data lies. */
#include "request.h"

bool send_to_device(const struct reply_path *path, const struct iovec *parts, int part_count)
{
    return writev(path->kernel, parts, part_count) >= 0;
}

static bool reply(const struct reply_path *path, int error, const void *data, size_t bytes)
{
    struct fuse_out_header header = {
        .len = (uint32_t)(sizeof header + bytes), .error = -error, .unique = path->unique};
    const struct iovec parts[] = {
        {.iov_base = &header, .iov_len = sizeof header},
        {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes},
    };
    return path->send(path, parts, bytes > 0 ? 2 : 1);
}

void reply_error(const struct reply_path *path, int error)
{
    (void)reply(path, error, NULL, 0);
}

bool reply_data(const struct reply_path *path, const void *data, size_t bytes)
{
    return reply(path, 0, data, bytes);
}
