/*
 * Fuzzes the parser of device URIs.
 *
 * An input is a URI, in memory of exactly its length so that ASan detects one byte too many. An
 * accepted URI must keep to the bounds that callers rely on, and an error must have a message.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "device/uri.h"

#define MESSAGE_BYTES 1024u

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

static void check(int correct)
{
    if (!correct) {
        abort();
    }
}

static void check_nvme(const struct uri *uri)
{
    const dlfs_nvme_config *nvme = &uri->nvme;
    check(nvme->path_count >= 1 && nvme->path_count <= DLFS_NVME_PATHS_MAX);
    for (uint32_t i = 0; i < nvme->path_count; i++) {
        check(nvme->hosts[i] == uri->hosts[i] && uri->hosts[i][0] != '\0');
        check(strlen(uri->hosts[i]) <= URI_HOST_BYTES_MAX);
        check(nvme->ports[i] >= 1 && nvme->ports[i] <= UINT16_MAX);
    }
    check(nvme->subsystem_nqn == uri->subsystem_nqn);
    check(uri_is_nqn(uri->subsystem_nqn, strlen(uri->subsystem_nqn)));
    check(nvme->host_nqn == NULL || uri_is_nqn(uri->host_nqn, strlen(uri->host_nqn)));
    check(nvme->nsid >= 1 && nvme->nsid < UINT32_MAX);
    check(nvme->timeout_ms > 0 && nvme->connect_ms > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static struct uri uri;
    char message[MESSAGE_BYTES] = "";
    char *text = malloc(count + 1);
    check(text != NULL);
    memcpy(text, bytes, count);
    text[count] = '\0';
    int code = uri_parse(text, &uri, message, sizeof message);
    if (code < 0) {
        check(code == -EINVAL || code == -ENOTSUP);
        check(message[0] != '\0' && strlen(message) < sizeof message - 1);
        for (const char *at = message; *at; at++) {
            check(*at >= ' ' && *at <= '~');
        }
    } else if (uri.kind == URI_NVME_TCP) {
        check_nvme(&uri);
    } else {
        check(uri.kind == URI_FILE && uri.path[0] != '\0');
        check(strlen(uri.path) <= URI_PATH_BYTES_MAX);
    }
    free(text);
    return 0;
}
