/* The functions that libdlfs_security gives to libdlfs; see nvme/security/security.h. */
#include <openssl/crypto.h>

#include "security/chap.h"
#include "security/tls.h"

/* Returns the functions of this library, or NULL. libdlfs finds it by name. */
__attribute__((visibility("default"))) const struct nvme_security *dlfs_security_functions(void);

const struct nvme_security *dlfs_security_functions(void)
{
    /*
     * No handler at exit: a thread may still use a session while the process ends. No configuration
     * file: the machine's is for its own OpenSSL, not for the one that is linked statically here.
     */
    if (OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT | OPENSSL_INIT_NO_LOAD_CONFIG, NULL) != 1) {
        return NULL;
    }
    static const struct nvme_security functions = {
        .version = NVME_SECURITY_VERSION,
        .chap_open = chap_open,
        .chap_close = chap_close,
        .chap_answer = chap_answer,
        .chap_verify = chap_verify,
        .chap_generate_tls_key = chap_generate_tls_key,
        .tls_key_free = tls_key_free,
        .tls_open = tls_open,
        .tls_handshake = tls_handshake,
        .tls_send = tls_send,
        .tls_receive = tls_receive,
        .tls_has_buffered = tls_has_buffered,
        .tls_wants_room = tls_wants_room,
        .tls_close = tls_close,
    };
    return &functions;
}
