/*
 * Keys for TLS that DH-HMAC-CHAP generates, against the values of the unit tests of Linux
 * (drivers/nvme/common/tests/auth_kunit.c of Linux 7.1); and what a session generates.
 */
#include "security/chap.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "security/crypto.h"

static const struct tls_names names = {"hostnqn", "subsysnqn"};

static const struct vector {
    uint32_t hash;
    uint32_t count;
    const char *generated; /* hexadecimal */
    const char *identity;  /* NULL: no cipher suite has this hash */
    const char *key;
} vectors[] = {
    {NVME_HASH_SHA256, 32, "1733c59fa7f48fcf37f5f26fc4ff0268ad4f78e030f4f3b0bfd1d47e7bb1447a",
     "NVMe1G01 hostnqn subsysnqn OldoKuTfKddMuyCznAZojkWD7P4D9/AtzDzLimtOxqI=",
     "3c17da628474a04d2247c4cab47968c915388193f7c071bd9489cc3666cd7cc8"},
    {NVME_HASH_SHA384, 48,
     "f14b2dd3234c459694d3bc63f8968bd6b37c2c6de849e22e11874900"
     "1ce4bbe8640b9e3a748cb11ce4b1d71d359cce39",
     "NVMe1G02 hostnqn subsysnqn "
     "cffMWk8TSS7HOQebjgYEIkrPrjWPV4JE5cdPB8WhEvY4JBW5YynKyv66XscN4A9n",
     "2774753233537b3fa50eb7d16a8e43457d85f4906c005b2236616c5d"
     "80939d0898fff15bb8b77119d2be0aac423e7590"},
    {NVME_HASH_SHA512, 64,
     "9c9f089a618b47d2d75f4b6c28070424487b445dd96e70c4c09b55e8b6000152"
     "a3363c3454043f38f0b85036ded40655350aa87b8b6a282b5c1acae16233dd5b",
     NULL, NULL},
};

static void check_hex(const uint8_t *bytes, uint32_t count, const char *expected)
{
    char text[2 * NVME_HASH_BYTES_MAX + 1] = "";
    for (uint32_t at = 0; at < count; at++) {
        (void)snprintf(text + (size_t)2 * at, 3, "%02x", bytes[at]);
    }
    CHECK(strcmp(text, expected) == 0);
}

static void test_vectors(void)
{
    uint8_t session_key[NVME_HASH_BYTES_MAX];
    uint8_t host_challenge[NVME_HASH_BYTES_MAX];
    uint8_t controller_challenge[NVME_HASH_BYTES_MAX];
    for (int i = 0; i < (int)NVME_HASH_BYTES_MAX; i++) {
        session_key[i] = (uint8_t)('A' + i);
        host_challenge[i] = (uint8_t)i;
        controller_challenge[i] = (uint8_t)(0xFF - i);
    }
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        const struct vector *vector = &vectors[i];
        uint8_t generated[NVME_HASH_BYTES_MAX];
        struct tls_psk psk;
        CHECK_EQ(chap_generate_psk(vector->hash, session_key, host_challenge, controller_challenge,
                                   generated),
                 0);
        check_hex(generated, vector->count, vector->generated);
        int code = tls_psk_derive_generated(vector->hash, generated, &names, &psk);
        CHECK_EQ(code, vector->identity != NULL ? 0 : -ENOTSUP);
        if (code == 0) {
            CHECK(strcmp(psk.identity, vector->identity) == 0);
            CHECK_EQ(psk.count, vector->count);
            check_hex(psk.bytes, psk.count, vector->key);
        }
    }
}

/* A challenge is also sent without a key of the controller, for the generated key alone. */
static void test_session(void)
{
    static uint8_t value[NVME_DH_BYTES_MAX];
    const uint8_t challenge[NVME_HASH_BYTES_MAX] = {1};
    const uint8_t second[NVME_HASH_BYTES_MAX] = {2}; /* none may be used twice */
    const uint8_t third[NVME_HASH_BYTES_MAX] = {3};
    struct nvme_chap session = {.host_nqn = "hostnqn", .subsystem_nqn = "subsysnqn"};
    struct nvme_chap_answer answer;
    struct nvme_tls_key *key = NULL;
    struct nvme_chap_challenge asked = {.hash = NVME_HASH_SHA256,
                                        .group = NVME_DH_FFDHE2048,
                                        .sequence = 1,
                                        .secure_channel = NVME_CHANNEL_NEW,
                                        .value = challenge,
                                        .public_value = value,
                                        .public_value_bytes = 256};
    value[255] = 2; /* the generator: the secret is this side's public value */
    session.host_key.count = 32;
    CHECK_EQ(chap_answer(&session, &asked, &answer), 0);
    CHECK(answer.has_challenge);
    CHECK_EQ(answer.sequence, 0);
    CHECK_EQ(chap_generate_tls_key(&session, &key), 0);
    uint8_t session_key[NVME_HASH_BYTES_MAX];
    uint8_t generated[NVME_HASH_BYTES_MAX];
    struct tls_psk expected;
    const struct security_bytes secret = {answer.public_value, 256};
    CHECK_EQ(security_hash(NVME_HASH_SHA256, secret, session_key), 0);
    CHECK_EQ(
        chap_generate_psk(NVME_HASH_SHA256, session_key, challenge, answer.challenge, generated),
        0);
    CHECK_EQ(tls_psk_derive_generated(NVME_HASH_SHA256, generated, &names, &expected), 0);
    CHECK(memcmp(&key->psk, &expected, sizeof expected) == 0);
    tls_key_free(key);
    asked.group = NVME_DH_NONE;
    asked.value = second;
    CHECK_EQ(chap_answer(&session, &asked, &answer), 0);
    CHECK_EQ(chap_generate_tls_key(&session, &key), -ENOTSUP);
    asked.secure_channel = NVME_CHANNEL_NONE;
    asked.value = third;
    CHECK_EQ(chap_answer(&session, &asked, &answer), 0);
    CHECK(!answer.has_challenge);
}

int main(void)
{
    test_vectors();
    test_session();
    return 0;
}
