/* The derivation of TLS keys and identities; see security/tls_psk.h. */
#include "security/tls_psk.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <openssl/evp.h>

#include "security/crypto.h"
#include "security/secret.h"

#define NQN_BYTES_MAX 223u
#define CONTEXT_BYTES_MAX 255u
/* EVP_EncodeBlock's output for the longest digest, with its NUL. */
#define DIGEST_TEXT_BYTES (TLS_PSK_BYTES_MAX / 3 * 4 + 1)

static struct security_bytes bytes_of(const void *at, size_t count)
{
    return (struct security_bytes){.at = at, .count = count};
}

static struct security_bytes text_of(const char *text)
{
    return bytes_of(text, strlen(text));
}

/*
 * Computes HKDF-Extract without a salt, and HKDF-Expand-Label for as many bytes as the hash has:
 * one round of HKDF-Expand.
 */
static int expand_label(uint32_t hash, struct security_bytes input, const char *label,
                        struct security_bytes context, uint8_t out[NVME_HASH_BYTES_MAX])
{
    uint32_t count = security_hash_bytes(hash);
    uint8_t extracted[NVME_HASH_BYTES_MAX];
    uint8_t head[] = {0, (uint8_t)count, (uint8_t)strlen(label)};
    uint8_t context_count = (uint8_t)context.count;
    uint8_t round = 1;
    struct security_bytes info[] = {bytes_of(head, sizeof head), text_of(label),
                                    bytes_of(&context_count, 1), context, bytes_of(&round, 1)};
    if (context.count > CONTEXT_BYTES_MAX) {
        return -EINVAL;
    }
    int code = security_hmac(hash, bytes_of("", 0), &input, 1, extracted);
    if (code == 0) {
        code =
            security_hmac(hash, bytes_of(extracted, count), info, sizeof info / sizeof *info, out);
    }
    secret_wipe(extracted, sizeof extracted);
    return code;
}

/* Computes the retained key of a host; without a hash, it is the configured key. */
static int retain(const struct security_key *configured, const char *host_nqn,
                  uint8_t out[NVME_HASH_BYTES_MAX])
{
    struct security_bytes input = bytes_of(configured->bytes, configured->count);
    if (configured->hash == NVME_HASH_NONE) {
        memcpy(out, configured->bytes, configured->count);
        return 0;
    }
    return expand_label(configured->hash, input, "tls13 HostNQN", text_of(host_nqn), out);
}

/* Writes the base64 digest of a retained key, which identities of version 1 have. */
static int digest_text(uint32_t suite, struct security_bytes retained,
                       const struct tls_names *names, char out[DIGEST_TEXT_BYTES])
{
    uint8_t digest[NVME_HASH_BYTES_MAX];
    struct security_bytes parts[] = {text_of(names->host_nqn), text_of(" "),
                                     text_of(names->subsystem_nqn), text_of(" NVMe-over-Fabrics")};
    int code = security_hmac(suite, retained, parts, sizeof parts / sizeof *parts, digest);
    if (code == 0) {
        (void)EVP_EncodeBlock((unsigned char *)out, digest, (int)security_hash_bytes(suite));
    }
    return code;
}

/* Derives the TLS key of an identity from a retained (R) or generated (G) key: *out has its suite
 * and length. */
static int derive(struct security_bytes retained, const struct tls_names *names, uint32_t version,
                  char key_kind, struct tls_psk *out)
{
    char digest[DIGEST_TEXT_BYTES] = "";
    char context[sizeof digest + 3];
    uint8_t expanded[NVME_HASH_BYTES_MAX];
    if (version == 1) {
        int code = digest_text(out->suite, retained, names, digest);
        if (code < 0) {
            return code;
        }
    }
    (void)snprintf(out->identity, sizeof out->identity, "NVMe%u%c%02u %s %s%s%s", version, key_kind,
                   out->suite, names->host_nqn, names->subsystem_nqn, version == 1 ? " " : "",
                   digest);
    (void)snprintf(context, sizeof context, "%02u %s", out->suite, digest);
    int code = expand_label(out->suite, retained, "tls13 nvme-tls-psk",
                            text_of(version == 1 ? context : out->identity), expanded);
    if (code == 0) {
        memcpy(out->bytes, expanded, out->count);
    }
    secret_wipe(expanded, sizeof expanded);
    return code;
}

static bool names_are_short(const struct tls_names *names)
{
    return strlen(names->host_nqn) <= NQN_BYTES_MAX &&
           strlen(names->subsystem_nqn) <= NQN_BYTES_MAX;
}

int tls_psk_derive(const struct security_key *configured, const struct tls_names *names,
                   uint32_t version, struct tls_psk *out)
{
    uint8_t retained[NVME_HASH_BYTES_MAX];
    uint32_t suite = configured->count == 32 ? NVME_HASH_SHA256 : NVME_HASH_SHA384;
    bool has_hash = configured->hash != NVME_HASH_NONE;
    if (configured->count != security_hash_bytes(suite) ||
        (has_hash && configured->hash != suite) || version > TLS_IDENTITY_VERSION_MAX ||
        !names_are_short(names)) {
        return -EINVAL;
    }
    *out = (struct tls_psk){.suite = suite, .count = configured->count};
    int code = retain(configured, names->host_nqn, retained);
    if (code == 0) {
        code = derive(bytes_of(retained, configured->count), names, version, 'R', out);
    }
    secret_wipe(retained, sizeof retained);
    return code;
}

int tls_psk_derive_generated(uint32_t hash, const uint8_t *generated, const struct tls_names *names,
                             struct tls_psk *out)
{
    if (hash != NVME_HASH_SHA256 && hash != NVME_HASH_SHA384) {
        return -ENOTSUP;
    }
    if (!names_are_short(names)) {
        return -EINVAL;
    }
    *out = (struct tls_psk){.suite = hash, .count = security_hash_bytes(hash)};
    return derive(bytes_of(generated, out->count), names, TLS_IDENTITY_VERSION_MAX, 'G', out);
}
