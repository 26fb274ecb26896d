/*
 * Block devices that fail on purpose, for tests of the code above a device. The conventions are
 * those of dlfs.h, which does not include this header.
 */
#ifndef DLFS_PUBLIC_TESTING_H
#define DLFS_PUBLIC_TESTING_H

#include <dlfs/device.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A device over another that fails on purpose, from a seed; for tests of what stands above a
 * device.
 */
typedef struct dlfs_fault_config {
    uint64_t seed;
    uint32_t error_per_million; /* operations completed with -EIO */
    uint32_t short_per_million; /* reads completed with fewer bytes than asked */
    uint32_t flip_per_million;  /* reads that succeed with one bit flipped */
    uint32_t stall_per_million; /* operations delayed by stall_ms */
    uint32_t stall_ms;
    uint32_t reorder;         /* 1: completions are handed out in a random order */
    uint64_t bad_first_bytes; /* reads touching [bad_first, bad_first+bad_length) always fail with
                                 -EIO */
    uint64_t bad_length_bytes;
    uint64_t lost_from;  /* the device is lost from this operation of all on, counted from 1; 0:
                            never */
    uint32_t lost_polls; /* 1: once it is lost, polls fail; 0: operations complete with
                            DLFS_E_LOST */
    uint32_t reserved;
} dlfs_fault_config;
/* Borrows inner, which must outlive the new device. */
DLFS_API int dlfs_device_create_fault(dlfs_device *inner, const dlfs_fault_config *config,
                                      dlfs_device **out);
/*
 * Loses a faulty device (1) or brings it back (0): while it is lost, operations, flushes and new
 * queue pairs fail with DLFS_E_LOST. -EINVAL: it is of another kind. Any thread.
 */
DLFS_API int dlfs_device_fault_lose(dlfs_device *device, uint32_t lost);

#ifdef __cplusplus
}
#endif

#endif
