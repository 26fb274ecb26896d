/* Opens the block device that a URI names, for reading. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "device/host.h"
#include "device/uri.h"

#define HOST_FOLDER "/etc"

static void describe(char *message, uint32_t message_bytes, const char *name, const char *reason)
{
    if (message != NULL && message_bytes > 0) {
        (void)snprintf(message, message_bytes, "open %s: %s", name, reason);
    }
}

static int open_nvme(const struct uri *uri, const char *name, char *message, uint32_t message_bytes,
                     dlfs_device **out)
{
    char reason[DLFS_NVME_TEXT_BYTES] = "";
    char shown[DLFS_NVME_TEXT_BYTES]; /* a target's or resolver's text may be anything */
    dlfs_nvme_config config = uri->nvme;
    struct host_identity host;
    int code =
        host_identity_read(HOST_FOLDER, config.host_nqn, uri->has_host_id ? config.host_id : NULL,
                           &host, reason, sizeof reason);
    if (code < 0) {
        describe(message, message_bytes, name, reason);
        return code;
    }
    config.host_nqn = host.nqn;
    memcpy(config.host_id, host.id, sizeof host.id);
    code = dlfs_device_open_nvme(&config, reason, sizeof reason, out);
    (void)uri_show(reason, strlen(reason), shown, sizeof shown);
    if (code < 0) {
        describe(message, message_bytes, name, reason[0] ? shown : dlfs_strerror(code));
    }
    return code;
}

int uri_open_parsed(const struct uri *uri, const char *name, char *message, uint32_t message_bytes,
                    dlfs_device **out)
{
    if (uri->kind == URI_NVME_TCP) {
        return open_nvme(uri, name, message, message_bytes, out);
    }
    int code = dlfs_device_open_file(uri->path, 0, DLFS_ENGINE_AUTO, out);
    if (code < 0) {
        describe(message, message_bytes, name,
                 code == -ENOTBLK ? "expected a regular file or a block device"
                                  : dlfs_strerror(code));
    }
    return code;
}

int uri_open_device(const char *uri, const char *name, char *message, uint32_t message_bytes,
                    dlfs_device **out)
{
    struct uri parsed;
    int code = uri_parse(uri, &parsed, message, message_bytes);
    return code < 0 ? code : uri_open_parsed(&parsed, name, message, message_bytes, out);
}
