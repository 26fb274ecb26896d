/*
 * libdlfs: the core that moves bytes.
 *
 * This header includes one header for each layer. From the lowest: codes.h, memory.h, device.h,
 * nvme.h, directory.h, sequence.h, reader.h, stream.h. Six more headers are included by the
 * programs that need them: api.h (reading a volume by its URI), part.h (parts of large samples),
 * channel.h (a service and its clients), external.h (devices of other libraries), import.h
 * (writing datasets) and testing.h (devices that fail on purpose).
 *
 * Conventions, for every function unless its comment says otherwise:
 *   - returns 0, or a count >= 0, on success; -errno or a DLFS_E_* code on failure; outputs come
 *     last and are untouched on failure;
 *   - offsets, sizes and lengths are in bytes; positions, indices and counts are in samples;
 *   - fields named `reserved` of a structure that the caller fills are 0, else -EINVAL;
 *   - what a function borrows must outlive the object that it makes, unless its comment says until
 *     when;
 *   - buffers belong to the caller, who keeps them alive until the operation on them has completed;
 *   - an object may be used by any thread, by one thread at a time; those used by many at once say
 *     so;
 *   - destroy functions accept NULL;
 *   - the library starts no thread that outlives the object it serves, writes no log, and calls
 *     nobody back.
 */
#ifndef DLFS_DLFS_H
#define DLFS_DLFS_H

#include <dlfs/codes.h>
#include <dlfs/device.h>
#include <dlfs/directory.h>
#include <dlfs/memory.h>
#include <dlfs/nvme.h>
#include <dlfs/reader.h>
#include <dlfs/sequence.h>
#include <dlfs/stream.h>

#endif
