/*
 * The devices of a volume's members: opening them by URI, and what messages call them.
 */
#include <errno.h>
#include <stdio.h>

#include "device/host.h"
#include "device/uri.h"
#include "volume/volume.h"

#define HOST_FOLDER "/etc"

struct volume_name volume_member_name(const dlfs_volume *volume, uint32_t member)
{
    struct volume_name name;
    memcpy(name.text, volume->names[member], sizeof name.text);
    if (name.text[0] == '\0') {
        (void)snprintf(name.text, sizeof name.text, "member %u", member);
    }
    return name;
}

static int open_nvme(const struct uri *uri, const char *name, char *message, uint32_t message_bytes,
                     dlfs_device **out)
{
    char reason[DLFS_NVME_TEXT_BYTES] = "";
    char shown[DLFS_NVME_TEXT_BYTES]; /* what a target or a resolver says may be anything */
    dlfs_nvme_config config = uri->nvme;
    struct host_identity host;
    host_identity_read(HOST_FOLDER, &host);
    if (config.host_nqn == NULL) {
        config.host_nqn = host.nqn;
    }
    if (!uri->has_host_id) {
        memcpy(config.host_id, host.id, sizeof host.id);
    }
    int code = dlfs_device_open_nvme(&config, reason, sizeof reason, out);
    (void)uri_show(reason, strlen(reason), shown, sizeof shown);
    if (code < 0) {
        volume_say(message, message_bytes, "open %s: %s", name,
                   reason[0] ? shown : dlfs_strerror(code));
    }
    return code;
}

int volume_open_device(const char *uri, const char *name, char *message, uint32_t message_bytes,
                       dlfs_device **out)
{
    struct uri parsed;
    int code = uri_parse(uri, &parsed, message, message_bytes);
    if (code < 0) {
        return code;
    }
    if (parsed.kind == URI_NVME_TCP) {
        return open_nvme(&parsed, name, message, message_bytes, out);
    }
    code = dlfs_device_open_file(parsed.path, 0, DLFS_ENGINE_AUTO, out);
    if (code < 0) {
        volume_say(message, message_bytes, "open %s: %s", name,
                   code == -ENOTBLK ? "expected a regular file or a block device"
                                    : dlfs_strerror(code));
    }
    return code;
}
