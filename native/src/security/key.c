/* The text in which keys are stored; see security/key.h. */
#include "security/key.h"

#include <endian.h>
#include <string.h>

#include "dlfs/codes.h"
#include "security/secret.h"

#define DHCHAP_PREFIX "DHHC-1:"
#define TLS_PREFIX "NVMeTLSkey-1:"
#define CRC32_POLYNOMIAL UINT32_C(0xEDB88320) /* IEEE 802.3, bits reversed */

bool security_key_name_is_valid(const char *name)
{
    size_t count = strnlen(name, NVME_KEY_NAME_BYTES_MAX + 1);
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    return count > 0 && count <= NVME_KEY_NAME_BYTES_MAX && name[0] != '.' &&
           strspn(name, allowed) == count;
}

static uint32_t crc32(const uint8_t *bytes, size_t count)
{
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (CRC32_POLYNOMIAL & (0 - (crc & 1)));
        }
    }
    return ~crc;
}

/* Returns the value of a base64 digit, or -1. */
static int base64_value(char c)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *found = c != '\0' ? strchr(digits, c) : NULL;
    return found != NULL ? (int)(found - digits) : -1;
}

/* Decodes padded base64 of at most `room` bytes; returns their number, or 0 if it is none. */
static size_t base64_decode(const char *text, size_t count, uint8_t *out, size_t room)
{
    size_t padding = count > 0 && text[count - 1] == '=' ? 1 : 0;
    padding += padding == 1 && count > 1 && text[count - 2] == '=' ? 1 : 0;
    if (count == 0 || count % 4 != 0 || count / 4 * 3 - padding > room) {
        return 0;
    }
    size_t written = 0;
    uint32_t bits = 0;
    for (size_t i = 0; i < count - padding; i++) {
        int value = base64_value(text[i]);
        if (value < 0) {
            return 0;
        }
        bits = bits << 6 | (uint32_t)value;
        if (i % 4 != 0) { /* 6 bits complete no byte; 12, 18 and 24 each complete one */
            out[written++] = (uint8_t)(bits >> (6 - 2 * (i % 4)));
        }
    }
    uint32_t unused = padding == 0 ? 0 : padding == 1 ? 3 : 15;
    return (bits & unused) == 0 ? written : 0;
}

/* Returns true if a key of that hash may have that length. */
static bool length_is_valid(enum security_key_kind kind, uint32_t hash, size_t count)
{
    size_t hash_bytes = hash == NVME_HASH_SHA256 ? 32 : hash == NVME_HASH_SHA384 ? 48 : 64;
    bool known = count == 32 || count == 48 || (count == 64 && kind != SECURITY_KEY_TLS);
    return known && (hash == NVME_HASH_NONE || count == hash_bytes);
}

static const char *parse(enum security_key_kind kind, const char *text, size_t count,
                         struct security_key *key)
{
    const char *prefix = kind == SECURITY_KEY_TLS ? TLS_PREFIX : DHCHAP_PREFIX;
    uint32_t hash_max = kind == SECURITY_KEY_TLS ? NVME_HASH_SHA384 : NVME_HASH_SHA512;
    size_t prefix_bytes = strlen(prefix);
    if (count < prefix_bytes || memcmp(text, prefix, prefix_bytes) != 0) {
        return kind == SECURITY_KEY_TLS ? "it does not begin with NVMeTLSkey-1:"
                                        : "it does not begin with DHHC-1:";
    }
    text += prefix_bytes;
    count -= prefix_bytes;
    if (count < 3 || text[0] != '0' || text[1] < '0' || (uint32_t)(text[1] - '0') > hash_max ||
        text[2] != ':') {
        return "its hash is unknown";
    }
    key->hash = (uint32_t)(text[1] - '0');
    text += 3;
    count -= 3;
    if (count < 1 || text[count - 1] != ':') {
        return "it does not end with a colon: it may have been cut";
    }
    size_t bytes = base64_decode(text, count - 1, key->bytes, sizeof key->bytes);
    if (bytes <= SECURITY_KEY_CRC_BYTES) {
        return "it is not base64, or too long";
    }
    bytes -= SECURITY_KEY_CRC_BYTES;
    if (!length_is_valid(kind, key->hash, bytes)) {
        return "its length does not fit its hash";
    }
    uint32_t crc;
    memcpy(&crc, key->bytes + bytes, sizeof crc);
    if (le32toh(crc) != crc32(key->bytes, bytes)) {
        return "its CRC does not match: it is damaged";
    }
    key->count = (uint32_t)bytes;
    return NULL;
}

int security_key_parse(enum security_key_kind kind, const char *text, size_t count,
                       struct security_key *key, const char **reason)
{
    const char *why = parse(kind, text, count, key);
    if (why != NULL) {
        secret_wipe(key, sizeof *key);
        *reason = why;
        return DLFS_E_AUTH;
    }
    return 0;
}
