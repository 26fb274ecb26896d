/* Certificates that a server makes for itself; see security/certificate.h. */
#include "security/certificate.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>

/* Validity of a certificate: clocks may differ by a day, and no run takes ten years. */
#define VALID_BEFORE_S (-86400L)
#define VALID_FOR_S (86400L * 3650L)

static int write_text(BIO *bio, char *out, size_t bytes)
{
    char *text = NULL;
    long length = BIO_get_mem_data(bio, &text);
    if (length <= 0) {
        return -EIO;
    }
    if ((size_t)length >= bytes) {
        return -ENOSPC;
    }
    memcpy(out, text, (size_t)length);
    out[length] = 0;
    return 0;
}

static bool sign_certificate(X509 *certificate, EVP_PKEY *key)
{
    uint64_t serial;
    X509_NAME *name = X509_get_subject_name(certificate);
    return RAND_bytes((unsigned char *)&serial, sizeof(serial)) == 1 &&
           X509_set_version(certificate, X509_VERSION_3) == 1 &&
           ASN1_INTEGER_set_uint64(X509_get_serialNumber(certificate), serial >> 1 | 1) == 1 &&
           X509_gmtime_adj(X509_getm_notBefore(certificate), VALID_BEFORE_S) != NULL &&
           X509_gmtime_adj(X509_getm_notAfter(certificate), VALID_FOR_S) != NULL &&
           X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const unsigned char *)"dlfs", -1,
                                      -1, 0) == 1 &&
           X509_set_issuer_name(certificate, name) == 1 && X509_set_pubkey(certificate, key) == 1 &&
           X509_sign(certificate, key, EVP_sha256()) > 0;
}

__attribute__((visibility("default"))) int dlfs_security_make_certificate(char *certificate,
                                                                          size_t certificate_bytes,
                                                                          char *key,
                                                                          size_t key_bytes)
{
    int result = -EIO;
    EVP_PKEY *pair = EVP_EC_gen("P-256");
    X509 *made = X509_new();
    BIO *certificate_bio = BIO_new(BIO_s_mem());
    BIO *key_bio = BIO_new(BIO_s_secmem());
    if (pair == NULL || made == NULL || certificate_bio == NULL || key_bio == NULL ||
        !sign_certificate(made, pair) || PEM_write_bio_X509(certificate_bio, made) != 1 ||
        PEM_write_bio_PrivateKey(key_bio, pair, NULL, NULL, 0, NULL, NULL) != 1) {
        goto out;
    }
    result = write_text(certificate_bio, certificate, certificate_bytes);
    if (result == 0) {
        result = write_text(key_bio, key, key_bytes);
    }
out:
    BIO_free(key_bio); /* wipes what is in it */
    BIO_free(certificate_bio);
    X509_free(made);
    EVP_PKEY_free(pair);
    return result;
}
