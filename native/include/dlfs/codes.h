/*
 * Version, limits and error codes. The conventions of all functions are in dlfs.h.
 */
#ifndef DLFS_PUBLIC_CODES_H
#define DLFS_PUBLIC_CODES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_API __attribute__((visibility("default")))

#define DLFS_VERSION_MAJOR 0
#define DLFS_VERSION_MINOR 1
#define DLFS_VERSION_PATCH 0
#define DLFS_VERSION ((DLFS_VERSION_MAJOR << 16) | (DLFS_VERSION_MINOR << 8) | DLFS_VERSION_PATCH)

#define DLFS_MEMBERS_MAX 64u          /* members of one volume */
#define DLFS_REPLICAS_MAX 4u          /* copies of one chunk */
#define DLFS_GROUPS_MAX 20u           /* groups of members of one volume */
#define DLFS_DEPTH_MAX 4096u          /* operations in flight on one queue pair */
#define DLFS_PATH_BYTES_MAX 4095u     /* length of a sample's path, in bytes */
#define DLFS_COMPONENT_BYTES_MAX 255u /* length of one component of a path, in bytes */
/* A location (directory.h) stores the length of a sample in 40 bits and its address in 56. */
#define DLFS_SAMPLE_BYTES_MAX ((UINT64_C(1) << 40) - 1)
#define DLFS_ADDRESS_MAX ((UINT64_C(1) << 56) - 1)
#define DLFS_CHUNK_BYTES_MIN 4096u
#define DLFS_CHUNK_BYTES_MAX (64u << 20)

/* Error codes of the library; their values never change. Any other negative result is -errno. */
#define DLFS_E_CHECKSUM (-10001)  /* the bytes read do not match the recorded CRC32C */
#define DLFS_E_FORMAT (-10002)    /* a structure is malformed */
#define DLFS_E_TRUNCATED (-10003) /* fewer bytes than expected: short read, shrunken device */
#define DLFS_E_LOST (-10004)      /* the device cannot be reached any more */
#define DLFS_E_TIMEOUT (-10005)   /* no completion within the time allowed */
#define DLFS_E_CLOSED (-10006)    /* the object is shutting down, or is the parent process's */
#define DLFS_E_LIMIT (-10007)     /* a stated limit would be exceeded */
#define DLFS_E_NOT_FOUND (-10008) /* no such path */
#define DLFS_E_END (-10009)       /* the sequence has ended */
#define DLFS_E_PROTOCOL (-10010)  /* the target violates the NVMe/TCP protocol */
#define DLFS_E_DIGEST (-10011)    /* a PDU of the target does not match its own digest */
#define DLFS_E_SERVICE (-10012)   /* the node service has ended, or does not answer */
#define DLFS_E_AUTH (-10013)      /* this host or the target was not authenticated */

/* Returns DLFS_VERSION of the loaded library. Any threads at once. */
DLFS_API uint32_t dlfs_version(void);
/*
 * Returns a short English phrase for a code that a function returned, in static memory; never NULL.
 * Any threads at once.
 */
DLFS_API const char *dlfs_strerror(int code);

#ifdef __cplusplus
}
#endif

#endif
