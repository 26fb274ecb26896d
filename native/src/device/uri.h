/*
 * Device URIs that libdlfs opens without Python: paths, file: and nvme-tcp:.
 *
 * The grammar is that of dlfs/block/uri.py, whose tests give both parsers the same texts. Both
 * exist since programs in C open volumes without Python, and most URIs of Python are of other
 * kinds. Parsing reads at most URI_BYTES_MAX bytes, allocates nothing and touches no device.
 */
#ifndef DLFS_URI_H
#define DLFS_URI_H

#include <stdbool.h>

#include "dlfs/dlfs.h"

#define URI_BYTES_MAX 8192u
#define URI_PATH_BYTES_MAX 4095u
#define URI_HOST_BYTES_MAX 253u

/* The options that name keys: dhchap_key, dhchap_ctrl_key, tls_psk. */
#define URI_KEYS 3u
#define URI_KEY_DHCHAP 0u
#define URI_KEY_CTRL 1u
#define URI_KEY_TLS 2u
#define URI_KEY_NAME_BYTES_MAX 64u

enum uri_kind { URI_FILE, URI_NVME_TCP };

/* A parsed URI. The fields of nvme point into it, so it must not be copied. */
struct uri {
    uint32_t kind;                     /* enum uri_kind */
    uint32_t has_host_id;              /* 1: nvme.host_id was given */
    char path[URI_PATH_BYTES_MAX + 1]; /* for URI_FILE, with a final NUL */
    char hosts[DLFS_NVME_PATHS_MAX][URI_HOST_BYTES_MAX + 1];
    char subsystem_nqn[DLFS_NVME_NQN_BYTES_MAX + 1];
    char host_nqn[DLFS_NVME_NQN_BYTES_MAX + 1]; /* empty: not given */
    char keys[URI_KEYS][URI_KEY_NAME_BYTES_MAX + 1];
    dlfs_nvme_config nvme; /* for URI_NVME_TCP; host_nqn NULL: not given */
};

/*
 * Parses a URI that ends with NUL. message gets the expected and the found text. Errors: -EINVAL (a
 * malformed URI), -ENOTSUP (a kind that only the Python package opens).
 */
int uri_parse(const char *text, struct uri *out, char *message, uint32_t message_bytes);

/*
 * Opens the device of a URI for reading. `name` stands for the device in messages. Errors: those of
 * uri_parse, dlfs_device_open_file and dlfs_device_open_nvme; message gets the reason.
 */
int uri_open_device(const char *uri, const char *name, char *message, uint32_t message_bytes,
                    dlfs_device **out);
/* The same for a parsed URI. */
int uri_open_parsed(const struct uri *uri, const char *name, char *message, uint32_t message_bytes,
                    dlfs_device **out);

/*
 * Parses a URI that a device of a volume names, and that may be followed since it is like one that
 * the caller gave: a file in the same folder, or a namespace of the same host. It then has the
 * options of the given URI. Errors: those of uri_parse; DLFS_E_NOT_FOUND, with the reason in
 * message: it must not be opened.
 */
int uri_follow(const char *recorded, const char *const *given, uint32_t count, struct uri *out,
               char *message, uint32_t message_bytes);

/*
 * Writes text for a message: bytes other than printable ASCII as \xNN, cut to fit shown_bytes (> 3)
 * and then ended by "...". Returns shown.
 */
const char *uri_show(const char *text, size_t bytes, char *shown, size_t shown_bytes);

/* Returns true if text is an NVMe Qualified Name. */
bool uri_is_nqn(const char *text, size_t bytes);
/* Reads a UUID in its 36 characters with hyphens. Returns false if text is not one. */
bool uri_read_uuid(const char *text, size_t bytes, uint8_t out[16]);

#endif
