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

#define DLFS_MEMBERS_MAX 64u                            /* members of a volume */
#define DLFS_REPLICAS_MAX 4u                            /* copies of a chunk */
#define DLFS_DEPTH_MAX 4096u                            /* operations in flight on one queue pair */
#define DLFS_PATH_BYTES_MAX 4095u                       /* length of a sample's path */
#define DLFS_COMPONENT_BYTES_MAX 255u                   /* length of one component of a path */
#define DLFS_SAMPLE_BYTES_MAX ((UINT64_C(1) << 40) - 1) /* 40 bits of length in a location */
#define DLFS_ADDRESS_MAX ((UINT64_C(1) << 56) - 1)      /* 56 bits of address in a location */
#define DLFS_CHUNK_BYTES_MIN 4096u
#define DLFS_CHUNK_BYTES_MAX (64u << 20)

/* Codes below -10000; their values never change. Everything else negative is -errno. */
#define DLFS_E_CHECKSUM (-10001)  /* the bytes read do not have the recorded CRC32C */
#define DLFS_E_FORMAT (-10002)    /* a structure is malformed */
#define DLFS_E_TRUNCATED (-10003) /* fewer bytes than promised: a short read, a shrunken device */
#define DLFS_E_LOST (-10004)      /* the device is gone */
#define DLFS_E_TIMEOUT (-10005)   /* no completion within the time allowed */
#define DLFS_E_CLOSED (-10006)    /* the object is shutting down */
#define DLFS_E_LIMIT (-10007)     /* a stated limit would be exceeded */
#define DLFS_E_NOT_FOUND (-10008) /* no such path */
#define DLFS_E_END (-10009)       /* the sequence has ended */
#define DLFS_E_PROTOCOL (-10010)  /* a target does not keep to the protocol */
#define DLFS_E_DIGEST (-10011)    /* what a target sent does not have its own digest */
#define DLFS_E_SERVICE (-10012)   /* the node service is gone, or does not answer */

/* DLFS_VERSION of the loaded library. Any thread. */
DLFS_API uint32_t dlfs_version(void);
/*
 * A short English phrase for a code that a function returned; never NULL. Static storage. Any
 * thread.
 */
DLFS_API const char *dlfs_strerror(int code);

#ifdef __cplusplus
}
#endif

#endif
