/* The functions that libdlfs_security gives to libdlfs; see nvme/security.h. */
#include "security/chap.h"
#include "security/tls.h"

/* Returns the functions of this library. libdlfs finds it by name. */
__attribute__((visibility("default"))) const struct nvme_security *dlfs_security_functions(void);

const struct nvme_security *dlfs_security_functions(void)
{
    static const struct nvme_security functions = {
        .version = NVME_SECURITY_VERSION,
        .chap_open = chap_open,
        .chap_close = chap_close,
        .chap_answer = chap_answer,
        .chap_verify = chap_verify,
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
