/* CRC32C of samples one after the other. */
#ifndef DLFS_PLATFORM_CRC32C_H
#define DLFS_PLATFORM_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/*
 * Returns the CRC32C of a sample, and copies it to `to` unless that is NULL. Meanwhile brings the
 * first bytes at `next`, unless that is NULL, into the processor's caches: a device has written
 * the sample that comes next to memory, and loading it takes as long as its checksum.
 */
uint32_t crc32c_sample(uint8_t *to, const uint8_t *from, size_t bytes, const uint8_t *next);

#endif
