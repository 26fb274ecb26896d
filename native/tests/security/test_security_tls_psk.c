/*
 * TLS keys and identities against public values: the identities of libnvme's tests; and keys that
 * another program computed from the same inputs by RFC 5869 and RFC 8446.
 */
#include "security/tls_psk.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

#define CONFIGURED                                                                                \
    {                                                                                             \
        0x55, 0x12, 0xDB, 0xB6, 0x73, 0x7D, 0x01, 0x06, 0xF6, 0x59, 0x75, 0xB7, 0x73, 0xDF, 0xB0, \
            0x11, 0xFF, 0xC3, 0x44, 0xBC, 0xF4, 0x42, 0xE2, 0xDD, 0x6D, 0x8B, 0xC4, 0x87, 0x0B,   \
            0x5D, 0x5B, 0x03, 0xFF, 0xC3, 0x44, 0xBC, 0xF4, 0x42, 0xE2, 0xDD, 0x6D, 0x8B, 0xC4,   \
            0x87, 0x0B, 0x5D, 0x5B, 0x03                                                          \
    }

static const struct tls_names names = {"nqn.psk-test-host", "nqn.psk-test-subsys"};

static const struct vector {
    uint32_t hash;
    uint32_t count;
    uint32_t version;
    const char *identity;
    const char *key; /* hexadecimal */
} vectors[] = {
    {NVME_HASH_SHA256, 32, 1,
     "NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=",
     "8fc3c0badfd4c0c66fa3ca33aadd0314f85536cc9bc47338b60f3e6e563786ca"},
    {NVME_HASH_SHA384, 48, 1,
     "NVMe1R02 nqn.psk-test-host nqn.psk-test-subsys "
     "QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
     "a2b2f943f479fc682555cec89857c80ed004ce92f32a973d5764155bb7e36b17"
     "a85368a0666d250afac9282dda2e62ca"},
    {NVME_HASH_SHA256, 32, 0, "NVMe0R01 nqn.psk-test-host nqn.psk-test-subsys",
     "05c6503551ad136e6ee32e6eeb3f6d500b69701d84ec71e328f65c7f51566f68"},
    {NVME_HASH_SHA384, 48, 0, "NVMe0R02 nqn.psk-test-host nqn.psk-test-subsys",
     "f42ba63824cdfe421914c582921f85b5b5b7e2d4df084caeedc9be20b212e8bb"
     "0fe8a23e9d59a1c8fc6449da4970a78d"},
};

static void test_vectors(void)
{
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        const struct vector *vector = &vectors[i];
        struct security_key key = {
            .hash = vector->hash, .count = vector->count, .bytes = CONFIGURED};
        struct tls_psk psk;
        char text[2 * TLS_PSK_BYTES_MAX + 1] = "";
        CHECK_EQ(tls_psk_derive(&key, &names, vector->version, &psk), 0);
        CHECK(strcmp(psk.identity, vector->identity) == 0);
        CHECK_EQ(psk.suite, vector->hash);
        CHECK_EQ(psk.count, vector->count);
        for (uint32_t at = 0; at < psk.count; at++) {
            (void)snprintf(text + (size_t)2 * at, 3, "%02x", psk.bytes[at]);
        }
        CHECK(strcmp(text, vector->key) == 0);
    }
}

/* Checks that a key without a hash is used as it is, and that its length selects the suite. */
static void test_without_hash(void)
{
    const uint32_t counts[] = {32, 48};
    for (uint32_t i = 0; i < 2; i++) {
        struct security_key plain = {
            .hash = NVME_HASH_NONE, .count = counts[i], .bytes = CONFIGURED};
        struct tls_psk psk;
        CHECK_EQ(tls_psk_derive(&plain, &names, 0, &psk), 0);
        CHECK_EQ(psk.suite, i == 0 ? NVME_HASH_SHA256 : NVME_HASH_SHA384);
        CHECK(strcmp(psk.identity, vectors[2 + i].identity) == 0);
        struct security_key hashed = plain;
        struct tls_psk other;
        hashed.hash = psk.suite;
        CHECK_EQ(tls_psk_derive(&hashed, &names, 0, &other), 0);
        CHECK(memcmp(psk.bytes, other.bytes, psk.count) != 0);
    }
}

static void test_refusals(void)
{
    struct security_key key = {.hash = NVME_HASH_SHA256, .count = 32, .bytes = CONFIGURED};
    struct tls_psk psk;
    char nqn[225];
    memset(nqn, 'n', sizeof nqn - 1);
    nqn[224] = '\0';
    struct tls_names long_names = {nqn, names.subsystem_nqn};
    CHECK_EQ(tls_psk_derive(&key, &long_names, 1, &psk), -EINVAL);
    nqn[223] = '\0';
    struct tls_names longest = {nqn, nqn};
    CHECK_EQ(tls_psk_derive(&key, &longest, 1, &psk), 0);
    CHECK_EQ(strlen(psk.identity), 9 + 223 + 1 + 223 + 1 + 44);
    /* An identity of version 0 is a context of HKDF-Expand-Label, which has at most 255 bytes. */
    CHECK_EQ(tls_psk_derive(&key, &longest, 0, &psk), -EINVAL);
    CHECK_EQ(tls_psk_derive(&key, &names, 2, &psk), -EINVAL);
    key.count = 48;
    CHECK_EQ(tls_psk_derive(&key, &names, 1, &psk), -EINVAL);
    key.count = 31;
    CHECK_EQ(tls_psk_derive(&key, &names, 1, &psk), -EINVAL);
    key.count = 32;
    key.hash = NVME_HASH_SHA512;
    CHECK_EQ(tls_psk_derive(&key, &names, 1, &psk), -EINVAL);
    CHECK(psk.identity[0] == 'N'); /* the last success: a refusal leaves the output */
}

int main(void)
{
    test_vectors();
    test_without_hash();
    test_refusals();
    return 0;
}
