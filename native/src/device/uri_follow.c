/*
 * Follows the URIs that a device itself names, in the location record of a volume: only to places
 * like those that the caller gave. The rules are those of dlfs/store/places.py; libdlfs knows no
 * discovery, memory or SPDK, so files and NVMe/TCP are left.
 *
 * It touches no device, and resolves no name of a host.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "device/uri.h"

_Static_assert(URI_PATH_BYTES_MAX < PATH_MAX, "getcwd has room for any path of a URI");

/* ---- files ----------------------------------------------------------------------------------- */

/* Appends the components of a path, without ".", ".." and empty ones. Returns false if too long. */
static bool append(char path[URI_PATH_BYTES_MAX + 1], size_t *bytes, const char *more)
{
    while (*more != '\0') {
        size_t length = strcspn(more, "/");
        if (length == 2 && memcmp(more, "..", 2) == 0) {
            while (*bytes > 0 && path[--*bytes] != '/') {
            }
        } else if (length > 0 && !(length == 1 && *more == '.')) {
            if (*bytes + 1 + length > URI_PATH_BYTES_MAX) {
                return false;
            }
            path[(*bytes)++] = '/';
            memcpy(path + *bytes, more, length);
            *bytes += length;
        }
        more += length + (more[length] == '/');
    }
    path[*bytes] = '\0';
    return true;
}

/* Makes a path absolute, by its text alone. Returns false if it is too long. */
static bool make_absolute(const char *path, char out[URI_PATH_BYTES_MAX + 1])
{
    char folder[PATH_MAX];
    size_t bytes = 0;
    out[0] = '\0';
    if (path[0] != '/' && (getcwd(folder, sizeof folder) == NULL || !append(out, &bytes, folder))) {
        return false;
    }
    return append(out, &bytes, path);
}

/* Returns the length of the folder of an absolute path. */
static size_t folder_bytes(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? 0 : (size_t)(slash - path);
}

/* Returns true if a given file is in the folder of an absolute path, by its name or where its links
 * lead. */
static bool is_known_folder(const char *path, const struct uri *given)
{
    char other[URI_PATH_BYTES_MAX + 1];
    size_t bytes = folder_bytes(path);
    if (given->kind != URI_FILE || !make_absolute(given->path, other)) {
        return false;
    }
    other[folder_bytes(other)] = '\0';
    if (strlen(other) == bytes && memcmp(other, path, bytes) == 0) {
        return true;
    }
    char *linked = realpath(other[0] == '\0' ? "/" : other, NULL);
    size_t linked_bytes = linked == NULL || linked[1] == '\0' ? 0 : strlen(linked); /* of "/": 0 */
    bool same = linked != NULL && linked_bytes == bytes && memcmp(linked, path, bytes) == 0;
    free(linked);
    return same;
}

/* ---- hosts ----------------------------------------------------------------------------------- */

static bool is_same_host(const char *one, const char *other)
{
    uint8_t a[sizeof(struct in6_addr)];
    uint8_t b[sizeof(struct in6_addr)];
    if (inet_pton(AF_INET6, one, a) == 1 && inet_pton(AF_INET6, other, b) == 1) {
        return memcmp(a, b, sizeof a) == 0;
    }
    return strcasecmp(one, other) == 0;
}

static bool has_host(const struct uri *given, const char *host)
{
    for (uint32_t i = 0; given->kind == URI_NVME_TCP && i < given->nvme.path_count; i++) {
        if (is_same_host(given->nvme.hosts[i], host)) {
            return true;
        }
    }
    return false;
}

/* Gives a URI the options of another one: keys, host, digests and times. */
static void take_options(struct uri *out, const struct uri *given)
{
    dlfs_nvme_config config = given->nvme;
    memcpy(config.hosts, out->nvme.hosts, sizeof config.hosts);
    memcpy(config.ports, out->nvme.ports, sizeof config.ports);
    config.path_count = out->nvme.path_count;
    config.nsid = out->nvme.nsid;
    config.subsystem_nqn = out->subsystem_nqn;
    memcpy(out->host_nqn, given->host_nqn, sizeof out->host_nqn);
    memcpy(out->keys, given->keys, sizeof out->keys);
    config.host_nqn = config.host_nqn != NULL ? out->host_nqn : NULL;
    config.dhchap_key = config.dhchap_key != NULL ? out->keys[URI_KEY_DHCHAP] : NULL;
    config.dhchap_ctrl_key = config.dhchap_ctrl_key != NULL ? out->keys[URI_KEY_CTRL] : NULL;
    config.tls_psk = config.tls_psk != NULL ? out->keys[URI_KEY_TLS] : NULL;
    out->nvme = config;
    out->has_host_id = given->has_host_id;
}

static bool is_same_text(const char *one, const char *other)
{
    return one == other || (one != NULL && other != NULL && strcmp(one, other) == 0);
}

static bool has_same_keys(const struct uri *one, const struct uri *other)
{
    return is_same_text(one->nvme.dhchap_key, other->nvme.dhchap_key) &&
           is_same_text(one->nvme.dhchap_ctrl_key, other->nvme.dhchap_ctrl_key) &&
           is_same_text(one->nvme.tls_psk, other->nvme.tls_psk);
}

/* Marks the paths of a URI that are at a host of a given one, as bits. */
static uint32_t known_paths(const struct uri *out, const struct uri *given)
{
    uint32_t known = 0;
    for (uint32_t i = 0; i < out->nvme.path_count; i++) {
        known |= has_host(given, out->nvme.hosts[i]) ? 1u << i : 0;
    }
    return known;
}

/* Keeps the marked paths of a URI. */
static void keep_paths(struct uri *out, uint32_t known)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < out->nvme.path_count; i++) {
        if ((known & 1u << i) != 0) {
            out->nvme.hosts[count] = out->nvme.hosts[i];
            out->nvme.ports[count++] = out->nvme.ports[i];
        }
    }
    out->nvme.path_count = count;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static int refuse(const struct uri *out, char *message, uint32_t message_bytes)
{
    char shown[DLFS_NVME_TEXT_BYTES];
    const char *what = out->kind == URI_FILE ? out->path : out->nvme.hosts[0];
    if (message != NULL && message_bytes > 0) {
        (void)snprintf(
            message, message_bytes,
            "a device of the volume names a member %s %s, and it was not opened: no given URI is "
            "of that %s; if it is a member, add it to the URIs of the volume",
            out->kind == URI_FILE ? "at" : "of the host",
            uri_show(what, strlen(what), shown, sizeof shown),
            out->kind == URI_FILE ? "folder" : "host");
    }
    return DLFS_E_NOT_FOUND;
}

static int follow_file(struct uri *out, const char *const *given, uint32_t count, char *message,
                       uint32_t message_bytes)
{
    struct uri other;
    char path[URI_PATH_BYTES_MAX + 1];
    bool known = false;
    if (!make_absolute(out->path, path)) {
        return refuse(out, message, message_bytes);
    }
    for (uint32_t i = 0; !known && i < count; i++) {
        known = uri_parse(given[i], &other, NULL, 0) >= 0 && is_known_folder(path, &other);
    }
    memcpy(out->path, path, sizeof path); /* without "..", which a link could lead elsewhere */
    return known ? 0 : refuse(out, message, message_bytes);
}

static int follow_nvme(struct uri *out, const char *const *given, uint32_t count, char *message,
                       uint32_t message_bytes)
{
    struct uri chosen;
    struct uri other;
    uint32_t known = 0;
    bool found = false;
    /* A given URI of the same subsystem; else the first at a host of the recorded one. */
    for (uint32_t i = 0; i < 2 * count && !found; i++) {
        found = uri_parse(given[i % count], &chosen, NULL, 0) >= 0 && known_paths(out, &chosen) &&
                (i >= count || strcmp(chosen.subsystem_nqn, out->subsystem_nqn) == 0);
    }
    if (!found) {
        return refuse(out, message, message_bytes);
    }
    /* A host that has another key, or none, must not be asked to prove what this key proves. */
    for (uint32_t i = 0; i < count; i++) {
        if (uri_parse(given[i], &other, NULL, 0) >= 0 && has_same_keys(&chosen, &other)) {
            known |= known_paths(out, &other);
        }
    }
    keep_paths(out, known);
    take_options(out, &chosen);
    return 0;
}

int uri_follow(const char *recorded, const char *const *given, uint32_t count, struct uri *out,
               char *message, uint32_t message_bytes)
{
    int code = uri_parse(recorded, out, message, message_bytes);
    if (code < 0) {
        return code;
    }
    return out->kind == URI_FILE ? follow_file(out, given, count, message, message_bytes)
                                 : follow_nvme(out, given, count, message, message_bytes);
}
