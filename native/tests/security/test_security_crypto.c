/* Hashes, HMACs and Diffie-Hellman of libdlfs_security, against published vectors. */
#include "check.h"
#include "security/crypto.h"

#include <errno.h>
#include <string.h>

static void check_hex(const uint8_t *bytes, size_t count, const char *expected)
{
    static const char digits[] = "0123456789abcdef";
    CHECK_EQ(strlen(expected), 2 * count);
    for (size_t i = 0; i < count; i++) {
        CHECK_EQ(digits[bytes[i] >> 4], expected[2 * i]);
        CHECK_EQ(digits[bytes[i] & 15], expected[2 * i + 1]);
    }
}

/* FIPS 180-4's "abc". */
static void test_hash(void)
{
    uint8_t out[NVME_HASH_BYTES_MAX];
    const struct security_bytes input = {"abc", 3};
    CHECK_EQ(security_hash(NVME_HASH_SHA256, input, out), 0);
    check_hex(out, 32, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ(security_hash(NVME_HASH_SHA384, input, out), 0);
    check_hex(out, 48,
              "cb00753f45a35e8bb5a03d699ac65007272c32ab0eded1631a8b605a43ff5bed"
              "8086072ba1e7cc2358baeca134c825a7");
    CHECK_EQ(security_hash(NVME_HASH_NONE, input, out), -ENOTSUP);
    CHECK_EQ(security_hash(4, input, out), -ENOTSUP);
}

/* RFC 4231, test case 2. */
static void test_hmac(void)
{
    uint8_t out[NVME_HASH_BYTES_MAX];
    const struct security_bytes parts[] = {{"what do ya want ", 16}, {"for nothing?", 12}};
    const struct security_bytes key = {"Jefe", 4};
    CHECK_EQ(security_hmac(NVME_HASH_SHA256, key, parts, 2, out), 0);
    check_hex(out, 32, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK_EQ(security_hmac(NVME_HASH_SHA384, key, parts, 2, out), 0);
    check_hex(out, 48,
              "af45d2e376484031617f78d2b58a6b1b9c7ef464f5a01b47e42ec3736322445e"
              "8e2240ca5e69e2c78b3239ecfab21649");
    CHECK_EQ(security_hmac(NVME_HASH_SHA512, key, parts, 2, out), 0);
    check_hex(out, 64,
              "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea250554"
              "9758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737");
    CHECK_EQ(security_hmac(4, key, parts, 2, out), -ENOTSUP);
}

/* The generator 2 is a valid public value; its secret is this side's own public value. */
static void test_dh(void)
{
    static uint8_t peer[NVME_DH_BYTES_MAX];
    static uint8_t own[NVME_DH_BYTES_MAX];
    static uint8_t shared[NVME_DH_BYTES_MAX];
    for (uint32_t group = NVME_DH_FFDHE2048; group <= NVME_DH_FFDHE8192; group++) {
        uint32_t bytes = security_dh_bytes(group);
        memset(peer, 0, sizeof peer);
        peer[bytes - 1] = 2;
        CHECK_EQ(security_dh_agree(group, (struct security_bytes){peer, bytes}, own, shared), 0);
        CHECK(memcmp(own, shared, bytes) == 0);
    }
}

static void test_dh_refuses(void)
{
    static uint8_t peer[NVME_DH_BYTES_MAX];
    static uint8_t own[NVME_DH_BYTES_MAX];
    static uint8_t shared[NVME_DH_BYTES_MAX];
    const struct security_bytes value = {peer, 256};
    CHECK_EQ(security_dh_agree(NVME_DH_FFDHE2048, value, own, shared), -EBADMSG); /* 0 */
    peer[255] = 1;
    CHECK_EQ(security_dh_agree(NVME_DH_FFDHE2048, value, own, shared), -EBADMSG); /* 1 */
    memset(peer, 0xff, sizeof peer);
    CHECK_EQ(security_dh_agree(NVME_DH_FFDHE2048, value, own, shared), -EBADMSG); /* > p */
    peer[255] = 2;
    CHECK_EQ(security_dh_agree(NVME_DH_FFDHE3072, value, own, shared), -EBADMSG); /* short */
    CHECK_EQ(security_dh_agree(NVME_DH_NONE, value, own, shared), -ENOTSUP);
    CHECK_EQ(security_dh_agree(NVME_DH_FFDHE8192 + 1, value, own, shared), -ENOTSUP);
}

int main(void)
{
    test_hash();
    test_hmac();
    test_dh();
    test_dh_refuses();
    return 0;
}
