/* The tests of CRC32C, without registers of 32 or 64 bytes. */
#define DLFS_CRC32C_NARROW
#include "platform/crc32c.c" /* instead of the library's */
#include "platform/test_crc32c.c"
