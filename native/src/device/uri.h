/*
 * Device URIs as a program without Python takes them: paths, file: and nvme-tcp:.
 *
 * The grammar is that of dlfs/block/uri.py, whose tests give both parsers the same texts. Parsing
 * reads at most URI_BYTES_MAX bytes, allocates nothing and touches no device.
 */
#ifndef DLFS_URI_H
#define DLFS_URI_H

#include <stdbool.h>

#include "dlfs/dlfs.h"

#define URI_BYTES_MAX 8192u
#define URI_PATH_BYTES_MAX 4095u
#define URI_HOST_BYTES_MAX 253u

enum uri_kind { URI_FILE, URI_NVME_TCP };

/* A parsed URI. nvme points into it: do not copy it. */
struct uri {
    uint32_t kind;                     /* enum uri_kind */
    uint32_t has_host_id;              /* 1: nvme.host_id was given */
    char path[URI_PATH_BYTES_MAX + 1]; /* of URI_FILE, ended by NUL */
    char hosts[DLFS_NVME_PATHS_MAX][URI_HOST_BYTES_MAX + 1];
    char subsystem_nqn[DLFS_NVME_NQN_BYTES_MAX + 1];
    char host_nqn[DLFS_NVME_NQN_BYTES_MAX + 1]; /* empty: not given */
    dlfs_nvme_config nvme;                      /* of URI_NVME_TCP; host_nqn NULL: not given */
};

/*
 * Parses a URI that ends with NUL. message gets what was expected and what was found. Errors:
 * -EINVAL, it is malformed; -ENOTSUP, it is of a kind that only the Python package opens.
 */
int uri_parse(const char *text, struct uri *out, char *message, uint32_t message_bytes);

/*
 * Writes text for a message: what is not printable ASCII as \xNN, cut to fit shown_bytes, > 3, and
 * then ended by "...". Returns shown.
 */
const char *uri_show(const char *text, size_t bytes, char *shown, size_t shown_bytes);

/* Whether text is an NVMe Qualified Name. */
bool uri_is_nqn(const char *text, size_t bytes);
/* Reads a UUID in its form with hyphens, of 36 characters. False: it is none. */
bool uri_read_uuid(const char *text, size_t bytes, uint8_t out[16]);

#endif
