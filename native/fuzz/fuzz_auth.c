/*
 * Fuzzes what decides about a connection before the target is trusted: the messages of
 * authentication, the representations of keys, and the file of nvme-cli.
 *
 * The first byte of an input chooses the parser. The remainder is in memory of exactly its length,
 * so that ASan detects one byte too many. What is accepted must keep to the bounds that callers
 * rely on, and an error must have words.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dlfs/codes.h"
#include "nvme/protocol/auth_message.h"
#include "security/key.h"

#define TRANSACTION 0x1234u

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

static void check(int correct)
{
    if (!correct) {
        abort();
    }
}

static void check_refusal(int code, const struct nvme_auth_refusal *refusal)
{
    check(code == DLFS_E_AUTH);
    check(refusal->reason != NULL && refusal->reason[0] != '\0');
}

static void try_challenge(const uint8_t *bytes, size_t count, uint8_t secure_channel)
{
    struct nvme_chap_challenge challenge;
    struct nvme_auth_refusal refusal = {.reason = NULL};
    int code =
        nvme_auth_decode_challenge(bytes, count, TRANSACTION, secure_channel, &challenge, &refusal);
    if (code < 0) {
        check_refusal(code, &refusal);
        return;
    }
    check(challenge.hash >= NVME_HASH_SHA256 && challenge.hash <= NVME_HASH_SHA512);
    check(challenge.group <= NVME_DH_FFDHE8192 && challenge.sequence != 0);
    check(secure_channel == NVME_CHANNEL_NONE ||
          (challenge.hash != NVME_HASH_SHA512 && challenge.group != NVME_DH_NONE));
    check(challenge.public_value_bytes <= NVME_DH_BYTES_MAX);
    check(challenge.value > bytes && challenge.public_value > challenge.value);
    check(challenge.public_value + challenge.public_value_bytes <= bytes + count);
}

static void try_success(const uint8_t *bytes, size_t count)
{
    const uint8_t *response = NULL;
    struct nvme_auth_refusal refusal = {.reason = NULL};
    int code = nvme_auth_decode_success1(bytes, count, TRANSACTION, NVME_HASH_BYTES_MAX, &response,
                                         &refusal);
    if (code < 0) {
        check_refusal(code, &refusal);
        return;
    }
    check(response == NULL || response + NVME_HASH_BYTES_MAX <= bytes + count);
}

static void try_key(enum security_key_kind kind, const char *text, size_t count)
{
    struct security_key key;
    const char *why = NULL;
    int code = security_key_parse(kind, text, count, &key, &why);
    if (code < 0) {
        check(code == DLFS_E_AUTH && why != NULL && why[0] != '\0');
        return;
    }
    check(key.count == 32 || key.count == 48 || key.count == 64);
    check(key.hash <= NVME_HASH_SHA512);
}

static void try_json(enum security_key_kind kind, const char *text, size_t count)
{
    char *whole = strndup(text, count);
    check(whole != NULL);
    char found[SECURITY_KEY_TEXT_BYTES_MAX + 1];
    const struct security_key_query query = {
        .kind = kind, .name = "name", .host_nqn = "h", .subsystem_nqn = "s"};
    int code = security_key_find_in_json(&query, whole, found);
    check(code == 0 || code == -EBADMSG);
    check(strlen(found) < sizeof found);
    free(whole);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    if (count == 0) {
        return 0;
    }
    size_t length = count - 1;
    uint8_t *input = malloc(length > 0 ? length : 1);
    check(input != NULL);
    memcpy(input, bytes + 1, length);
    enum security_key_kind kind = (enum security_key_kind)(bytes[0] / 4 % 3);
    switch (bytes[0] % 4) {
    case 0:
        try_challenge(input, length, bytes[0] / 4 % 2 == 0 ? NVME_CHANNEL_NONE : NVME_CHANNEL_NEW);
        break;
    case 1:
        try_success(input, length);
        break;
    case 2:
        try_key(kind, (const char *)input, length);
        break;
    default:
        try_json(kind, (const char *)input, length);
        break;
    }
    free(input);
    return 0;
}
