/* A reply is a header and data, sent in one call from where the data lies. */
#include "request.h"

bool send_to_device(const struct reply_path *path, const struct iovec *parts, int part_count)
{
    return writev(path->kernel, parts, part_count) >= 0;
}

static bool reply(const struct reply_path *path, int error, const struct iovec *pieces,
                  uint32_t count)
{
    struct fuse_out_header header = {.len = sizeof header, .error = -error, .unique = path->unique};
    struct iovec parts[1 + REPLY_PIECES_MAX] = {{.iov_base = &header, .iov_len = sizeof header}};
    for (uint32_t i = 0; i < count; i++) {
        parts[1 + i] = pieces[i];
        header.len += (uint32_t)pieces[i].iov_len;
    }
    return path->send(path, parts, 1 + (int)count);
}

void reply_error(const struct reply_path *path, int error)
{
    (void)reply(path, error, NULL, 0);
}

bool reply_data(const struct reply_path *path, const void *data, size_t bytes)
{
    const struct iovec piece = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
    return reply(path, 0, &piece, bytes > 0);
}

bool reply_pieces(const struct reply_path *path, const struct iovec *pieces, uint32_t count)
{
    return reply(path, 0, pieces, count);
}
