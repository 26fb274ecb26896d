/*
 * Block devices that fail on purpose, for tests of the code above a device. The C tests are linked
 * with them; the Python tests load them as libdlfs_fault.so. The conventions are those of dlfs.h.
 */
#ifndef DLFS_TESTS_FAULT_H
#define DLFS_TESTS_FAULT_H

#include <dlfs/device.h>

/*
 * Failures that a device passes to its users instead of the results of the device below it. Their
 * choice is a function of the seed.
 */
typedef struct dlfs_fault_config {
    uint64_t seed;
    uint32_t error_per_million; /* operations completed with -EIO */
    uint32_t short_per_million; /* reads completed with fewer bytes than requested */
    uint32_t flip_per_million;  /* reads that succeed with one bit flipped */
    uint32_t stall_per_million; /* operations delayed by stall_ms */
    uint32_t stall_ms;
    uint32_t reorder;         /* 1: completions are returned in a random order */
    uint64_t bad_first_bytes; /* reads that touch [bad_first, bad_first + bad_length) always fail
                                 with -EIO */
    uint64_t bad_length_bytes;
    uint64_t lost_from;  /* number of the operation, counted from 1 over all queue pairs, at which
                            the device is lost; 0: never */
    uint32_t lost_polls; /* once the device is lost, 1: polls fail; 0: operations complete with
                            DLFS_E_LOST */
    uint32_t reserved;
} dlfs_fault_config;
/*
 * Creates a device of kind "fault" over another one. It borrows inner, which must outlive it, and
 * also the reads that hang when their reader is destroyed.
 */
DLFS_API int dlfs_device_create_fault(dlfs_device *inner, const dlfs_fault_config *config,
                                      dlfs_device **out);
/*
 * Makes a faulty device lost (1) or reachable again (0). While it is lost, operations, flushes and
 * the creation of queue pairs fail with DLFS_E_LOST. -EINVAL: the device is of another kind. Any
 * threads at once.
 */
DLFS_API int dlfs_device_fault_lose(dlfs_device *device, uint32_t lost);

#endif
