/* The same tests of CRC32C on a processor without registers of 64 bytes, or as if on one. */
#define DLFS_CRC32C_NARROW
#include "platform/crc32c.c" /* instead of the library's */
#include "platform/test_crc32c.c"
