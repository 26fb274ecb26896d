/*
 * Reads a part of a large sample into the caller's buffer, which need not be aligned for devices.
 *
 * The part is read window after window into private memory of bounded size, and copied from there.
 * A window is one span: its requests, one for each chunk, are sent to all members at once. A window
 * that a member delays beyond its deadline is read again into other memory, from another copy.
 */
#include "dlfs/part.h"

#include <errno.h>
#include <string.h>

#include "reader/reader.h"

#define WINDOW_BYTES (UINT64_C(8) << 20)

/* The byte range of the data space that a window covers. */
struct window {
    uint64_t address;
    uint64_t length;
    uint32_t avoided_member;
};

/* Reads the blocks of a window. Returns a code, and the address of the request that failed. */
static int read_once(struct fetch *fetch, const struct window *window,
                     struct private_memory *private_memory, uint64_t *bad_address)
{
    uint64_t mask = fetch->reader->config.block_bytes - 1;
    int code = fetch_reserve_spans(fetch, 1);
    if (code == 0) {
        code = fetch_prepare(fetch, NULL);
    }
    if (code < 0) {
        return code;
    }
    struct span *span = span_take(fetch);
    span->address = window->address & ~mask;
    span->length = ((window->address + window->length + mask) & ~mask) - span->address;
    span->memory = private_memory->base;
    span->private_memory = private_memory;
    span->avoided_member = window->avoided_member;
    fetch->now_ns = monotonic_ns();
    span_start(fetch, span);
    while ((span = fetch_take_done(fetch)) == NULL) {
        fetch_step(fetch, fetch_is_stopped(fetch) ? 0 : -1);
    }
    code = span->code;
    *bad_address = span->bad_address;
    span_recycle(fetch, span);
    return code;
}

static int read_window(struct fetch *fetch, const struct window *window, uint8_t *buffer,
                       uint64_t *bad_address)
{
    dlfs_reader *reader = fetch->reader;
    uint64_t mask = reader->config.block_bytes - 1;
    int code = DLFS_E_TIMEOUT;
    fetch->deadline_ns = monotonic_ns() + reader_timeout_ns(reader);
    fetch->slow_bytes = window->length;
    for (uint32_t tries = 0; code == DLFS_E_TIMEOUT && tries < reader->config.replicas; tries++) {
        struct private_memory *private_memory;
        if (private_memory_take(reader, window->length + 2 * (mask + 1), NULL, &private_memory) <
            0) {
            return -ENOMEM;
        }
        code = read_once(fetch, window, private_memory, bad_address);
        if (code == 0) {
            memcpy(buffer, private_memory->base + (window->address & mask), window->length);
        }
        private_memory_release(private_memory);
    }
    return code;
}

/* Finds the sample. Returns -EINVAL unless it has such a part. */
static int locate(const dlfs_reader *reader, const dlfs_part *part, struct location *location)
{
    if (part->index >= reader->sample_count || part->reserved != 0) {
        return -EINVAL;
    }
    if (part->avoided_member != DLFS_MEMBER_ANY &&
        part->avoided_member >= reader->config.member_count) {
        return -EINVAL;
    }
    if (!reader_locate(reader, part->index, location)) {
        return DLFS_E_FORMAT;
    }
    bool within = part->offset_bytes <= location->length &&
                  part->length_bytes <= location->length - part->offset_bytes;
    return within ? 0 : -EINVAL;
}

static int copy_part(struct fetch *fetch, const dlfs_part *part, const struct location *location,
                     uint8_t *buffer, dlfs_failure *failure)
{
    uint64_t done = 0;
    int code = 0;
    while (code == 0 && done < part->length_bytes) {
        uint64_t left = part->length_bytes - done;
        struct window window = {.address = location->address + part->offset_bytes + done,
                                .length = left < WINDOW_BYTES ? left : WINDOW_BYTES,
                                .avoided_member = part->avoided_member};
        uint64_t bad_address = 0;
        code = read_window(fetch, &window, buffer + done, &bad_address);
        if (code < 0 && code != -ENOMEM) {
            *failure = reader_failure(fetch->reader, part->index, code, 0, bad_address);
        }
        done += window.length;
    }
    if (code == 0) {
        fetch->stats.sample_bytes += part->length_bytes;
        fetch->stats.samples += part->offset_bytes + part->length_bytes == location->length;
    }
    return code;
}

int reader_read_part(dlfs_reader *reader, const dlfs_part *part, void *buffer,
                     const _Atomic bool *stop, dlfs_failure *failure)
{
    if (reader == NULL || part == NULL || failure == NULL ||
        (buffer == NULL && part->length_bytes > 0)) {
        return -EINVAL;
    }
    struct location location;
    *failure = (dlfs_failure){.index = part->index};
    int code = locate(reader, part, &location);
    if (code != -EINVAL) {
        *failure = reader_failure(reader, part->index, code, 0, 0);
    }
    if (code < 0 || part->length_bytes == 0) {
        return code;
    }
    struct fetch *fetch;
    code = reader_take_fetch(reader, &fetch);
    if (code < 0) {
        return code;
    }
    fetch->stop = stop;
    code = copy_part(fetch, part, &location, buffer, failure);
    reader_return_fetch(reader, fetch);
    return code;
}

DLFS_API int dlfs_reader_read_part(dlfs_reader *reader, const dlfs_part *part, void *buffer,
                                   dlfs_failure *failure)
{
    return reader_read_part(reader, part, buffer, NULL, failure);
}
