/*
 * Fuzzes the decoder of location records, and what their URIs lead to.
 *
 * An input is one byte of choices and a record. A choice corrects its checksum first, since hardly
 * any random bytes have a right one. Every entry of an accepted record must lie in it, and a URI
 * that may be followed must be one of the given directory, or of a given host with the given
 * options.
 */
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "device/uri.h"
#include "volume/volume.h"

#define AT_RECORD_BYTES 12u

enum { CHECKSUM_RIGHT = 1 };

static const char *const given[] = {
    "/given/member0",
    "nvme-tcp://10.0.0.1/nqn.2024-01.org.example:a?nsid=1&dhchap_key=own&hostnqn="
    "nqn.2024-01.org.example:host&path=[fe80::1]:4421",
};
#define GIVEN_COUNT 2u

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

static void check(int correct)
{
    if (!correct) {
        abort();
    }
}

static void check_file(const struct uri *uri)
{
    check(strncmp(uri->path, "/given/", 7) == 0 && strchr(uri->path + 7, '/') == NULL);
    check(strcmp(uri->path + 7, "..") != 0);
}

static int is_given_host(const char *host)
{
    struct in6_addr expected;
    struct in6_addr found;
    check(inet_pton(AF_INET6, "fe80::1", &expected) == 1);
    return strcmp(host, "10.0.0.1") == 0 ||
           (inet_pton(AF_INET6, host, &found) == 1 && memcmp(&found, &expected, sizeof found) == 0);
}

static void check_nvme(const struct uri *uri)
{
    const dlfs_nvme_config *nvme = &uri->nvme;
    check(nvme->path_count >= 1 && nvme->path_count <= DLFS_NVME_PATHS_MAX);
    for (uint32_t i = 0; i < nvme->path_count; i++) {
        check(is_given_host(nvme->hosts[i]));
    }
    check(nvme->dhchap_key == uri->keys[URI_KEY_DHCHAP] && strcmp(nvme->dhchap_key, "own") == 0);
    check(nvme->tls_psk == NULL && nvme->dhchap_ctrl_key == NULL && nvme->concat == 0);
    check(strcmp(nvme->host_nqn, "nqn.2024-01.org.example:host") == 0);
    check(nvme->subsystem_nqn == uri->subsystem_nqn && nvme->nsid >= 1);
}

static void check_entry(const struct volume_member_location *member, const uint8_t *record)
{
    static struct uri uri;
    char message[1024] = "";
    check(member->uuid >= record &&
          (const uint8_t *)member->uri + member->uri_bytes <= record + VOLUME_LOCATIONS_BYTES_MAX);
    char *text = strndup(member->uri, member->uri_bytes);
    check(text != NULL);
    int code = uri_follow(text, given, GIVEN_COUNT, &uri, message, sizeof message);
    free(text);
    if (code < 0) {
        check(message[0] != '\0' && strlen(message) < sizeof message);
    } else if (uri.kind == URI_FILE) {
        check_file(&uri);
    } else {
        check_nvme(&uri);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    uint8_t *record = calloc(1, VOLUME_LOCATIONS_BYTES_MAX);
    struct volume_locations found;
    check(record != NULL);
    if (count > 1) {
        size_t length = count - 1;
        length = length < VOLUME_LOCATIONS_BYTES_MAX ? length : VOLUME_LOCATIONS_BYTES_MAX;
        memcpy(record, bytes + 1, length);
        uint32_t end = volume_u32(record + AT_RECORD_BYTES) - (uint32_t)sizeof(uint32_t);
        if ((bytes[0] & CHECKSUM_RIGHT) && end <= VOLUME_LOCATIONS_BYTES_MAX - sizeof(uint32_t)) {
            uint32_t crc32c = dlfs_crc32c(0, record, end);
            memcpy(record + end, &crc32c, sizeof crc32c);
        }
    }
    if (volume_locations_decode(record, &found)) {
        check(found.count <= DLFS_MEMBERS_MAX);
        for (uint32_t i = 0; i < found.count; i++) {
            check_entry(&found.members[i], record);
        }
    }
    free(record);
    return 0;
}
