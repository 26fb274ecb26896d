/* The functions that libdlfs_security gives to libdlfs; see nvme/security.h. */
#include "security/chap.h"

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
    };
    return &functions;
}
