/*
 * libdlfs, the C library under the Python package: devices, sample directories, readers, streams.
 *
 * This header includes one header for each layer. From the lowest: codes.h, memory.h, device.h,
 * nvme.h, directory.h, sequence.h, arena.h, reader.h, stream.h. Five more headers are included by
 * the programs that need them: api.h (reading a volume by its URI), part.h (parts of large
 * samples), channel.h (the shared memory of a node service and its clients), handle.h (owners of
 * objects) and import.h (writing datasets).
 *
 * Conventions of every function, unless its comment says otherwise:
 *
 *  - A function returns 0 or a count >= 0 on success, -errno or a DLFS_E_* code on failure. Outputs
 *    are the last arguments and are untouched on failure.
 *  - Offsets, sizes and lengths are in bytes; positions, indices and counts are in samples.
 *  - Fields named `reserved` of a structure that the caller fills are 0; otherwise -EINVAL.
 *  - An object that a function borrows must outlive the object that the function creates.
 *  - Buffers belong to the caller, who keeps them alive until the operation on them has completed.
 *  - An object may be used by any thread, but by one thread at a time. Objects and functions that
 *    several threads may use at once say so.
 *  - Destroy functions accept NULL.
 *  - The library starts no thread that outlives the object it serves. It writes no log, and calls
 * no function of the program other than those that it was given as an argument.
 */
#ifndef DLFS_DLFS_H
#define DLFS_DLFS_H

#include <dlfs/arena.h>
#include <dlfs/codes.h>
#include <dlfs/device.h>
#include <dlfs/directory.h>
#include <dlfs/memory.h>
#include <dlfs/nvme.h>
#include <dlfs/reader.h>
#include <dlfs/sequence.h>
#include <dlfs/stream.h>

#endif
