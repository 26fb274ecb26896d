/* Hashes, HMACs and Diffie-Hellman exchanges; see security/crypto.h. */
#include "security/crypto.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/dh.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

static const struct {
    const char *name;
    uint32_t bytes;
} hashes[] = {
    [NVME_HASH_SHA256] = {"SHA256", 32},
    [NVME_HASH_SHA384] = {"SHA384", 48},
    [NVME_HASH_SHA512] = {"SHA512", 64},
};

static const struct {
    const char *name;
    uint32_t bytes;
} groups[] = {
    [NVME_DH_FFDHE2048] = {"ffdhe2048", 256},  [NVME_DH_FFDHE3072] = {"ffdhe3072", 384},
    [NVME_DH_FFDHE4096] = {"ffdhe4096", 512},  [NVME_DH_FFDHE6144] = {"ffdhe6144", 768},
    [NVME_DH_FFDHE8192] = {"ffdhe8192", 1024},
};

uint32_t security_hash_bytes(uint32_t hash)
{
    return hash < sizeof hashes / sizeof *hashes ? hashes[hash].bytes : 0;
}

int security_hash(uint32_t hash, struct security_bytes input, uint8_t out[NVME_HASH_BYTES_MAX])
{
    if (security_hash_bytes(hash) == 0) {
        return -ENOTSUP;
    }
    bool done = EVP_Q_digest(NULL, hashes[hash].name, NULL, input.at, input.count, out, NULL) == 1;
    return done ? 0 : -EIO;
}

int security_hmac(uint32_t hash, struct security_bytes key, const struct security_bytes *parts,
                  size_t count, uint8_t out[NVME_HASH_BYTES_MAX])
{
    uint32_t bytes = security_hash_bytes(hash);
    if (bytes == 0) {
        return -ENOTSUP;
    }
    char name[16];
    (void)snprintf(name, sizeof name, "%s",
                   hashes[hash].name); /* OpenSSL's parameters are not const */
    OSSL_PARAM options[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, name, 0),
                            OSSL_PARAM_construct_end()};
    EVP_MAC *mac = EVP_MAC_fetch(NULL, "HMAC", NULL);
    EVP_MAC_CTX *context = mac != NULL ? EVP_MAC_CTX_new(mac) : NULL;
    bool done = context != NULL && EVP_MAC_init(context, key.at, key.count, options) == 1;
    for (size_t i = 0; done && i < count; i++) {
        done = EVP_MAC_update(context, parts[i].at, parts[i].count) == 1;
    }
    size_t written = 0;
    done = done && EVP_MAC_final(context, out, &written, NVME_HASH_BYTES_MAX) == 1;
    EVP_MAC_CTX_free(context);
    EVP_MAC_free(mac);
    return done && written == bytes ? 0 : -EIO;
}

int security_random(void *bytes, size_t count)
{
    return RAND_bytes(bytes, (int)count) == 1 ? 0 : -EIO;
}

/* ---- Diffie-Hellman -------------------------------------------------------------------------- */

uint32_t security_dh_bytes(uint32_t group)
{
    return group < sizeof groups / sizeof *groups ? groups[group].bytes : 0;
}

/* Makes a key pair of a group; returns NULL if OpenSSL fails. */
static EVP_PKEY *make_pair(uint32_t group)
{
    char name[16];
    (void)snprintf(name, sizeof name, "%s", groups[group].name);
    OSSL_PARAM options[] = {OSSL_PARAM_construct_utf8_string(OSSL_PKEY_PARAM_GROUP_NAME, name, 0),
                            OSSL_PARAM_construct_end()};
    EVP_PKEY *pair = NULL;
    EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_from_name(NULL, "DH", NULL);
    if (context == NULL || EVP_PKEY_keygen_init(context) != 1 ||
        EVP_PKEY_CTX_set_params(context, options) != 1 || EVP_PKEY_generate(context, &pair) != 1) {
        pair = NULL;
    }
    EVP_PKEY_CTX_free(context);
    return pair;
}

/* Copies the public value of a pair, with leading zeros. */
static bool copy_public_value(EVP_PKEY *pair, uint32_t bytes, uint8_t *public_value)
{
    unsigned char *encoded = NULL;
    size_t count = EVP_PKEY_get1_encoded_public_key(pair, &encoded);
    bool done = count == bytes;
    if (done) {
        memcpy(public_value, encoded, bytes);
    }
    OPENSSL_free(encoded);
    return done;
}

static bool derive(EVP_PKEY *pair, EVP_PKEY *peer, uint32_t bytes, uint8_t *shared)
{
    size_t count = bytes;
    EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_from_pkey(NULL, pair, NULL);
    bool done = context != NULL && EVP_PKEY_derive_init(context) == 1 &&
                EVP_PKEY_CTX_set_dh_pad(context, 1) == 1 &&
                EVP_PKEY_derive_set_peer(context, peer) == 1 &&
                EVP_PKEY_derive(context, shared, &count) == 1 && count == bytes;
    EVP_PKEY_CTX_free(context);
    return done;
}

int security_dh_agree(uint32_t group, struct security_bytes peer, uint8_t *public_value,
                      uint8_t *shared)
{
    uint32_t bytes = security_dh_bytes(group);
    if (bytes == 0) {
        return -ENOTSUP;
    }
    if (peer.count != bytes) {
        return -EBADMSG;
    }
    int code = -EIO;
    EVP_PKEY *pair = make_pair(group);
    EVP_PKEY *other = EVP_PKEY_new();
    if (pair == NULL || other == NULL || EVP_PKEY_copy_parameters(other, pair) != 1) {
        goto done;
    }
    /* OpenSSL checks 1 < value < p - 1, so that nothing forces the secret into a small subgroup. */
    if (EVP_PKEY_set1_encoded_public_key(other, peer.at, peer.count) != 1) {
        code = -EBADMSG;
        goto done;
    }
    if (copy_public_value(pair, bytes, public_value) && derive(pair, other, bytes, shared)) {
        code = 0;
    }
done:
    EVP_PKEY_free(other);
    EVP_PKEY_free(pair);
    return code;
}
