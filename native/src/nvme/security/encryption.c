/* TLS over the socket of a connection; see nvme/security/encryption.h. */
#include "nvme/security/encryption.h"

#include <poll.h>

#include "nvme/protocol/pdu.h"

/* The first bytes of TLS records (RFC 8446, 5.1): content type and major version. */
#define RECORD_ALERT 21
#define RECORD_HANDSHAKE 22
#define TLS_MAJOR 3
/* Longest wait for the answer to a ClientHello that finds out whether a port speaks TLS. */
#define PROBE_NS (UINT64_C(500) * NVME_NANOSECONDS_PER_MS)

_Static_assert(NVME_SECURITY_TEXT_BYTES <= DLFS_NVME_TEXT_BYTES, "messages fit");

int nvme_encrypt(const struct nvme_security *security, const struct nvme_tls_config *config,
                 int descriptor, const struct nvme_deadline *deadline, struct nvme_tls **out,
                 struct nvme_text *text)
{
    struct nvme_tls *tls = NULL;
    int code = security->tls_open(config, descriptor, &tls, text->bytes);
    while (code == 0) {
        int events = security->tls_handshake(tls, text->bytes);
        if (events == 0) {
            *out = tls;
            return 0;
        }
        code = events < 0 ? events : nvme_wait(deadline, descriptor, (short)events);
        if (events > 0 && code == DLFS_E_TIMEOUT) {
            nvme_text_format(text, "no answer in the TLS handshake");
        }
    }
    security->tls_close(tls, false);
    return code;
}

/*
 * A ClientHello without a key: TLS 1.3, TLS_AES_128_GCM_SHA256, x25519. Any TLS server answers it,
 * most with an alert. Its random number and key share are constants, since no session follows.
 */
/* clang-format off */
static const uint8_t client_hello[NVME_IC_BYTES] = {
    22, 3, 1, 0, 123, 1, 0, 0, 119, 3, 3,                  /* record, ClientHello, old version */
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, /* random number */
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, /* ... its second half */
    0, 0, 2, 0x13, 1, 1, 0,                                /* suite; no compression */
    0, 76,                                                 /* extensions: */
    0, 43, 0, 3, 2, 3, 4,                                  /* supported versions */
    0, 10, 0, 4, 0, 2, 0, 29,                              /* supported groups */
    0, 13, 0, 4, 0, 2, 4, 3,                               /* signature algorithms */
    0, 45, 0, 2, 1, 1,                                     /* modes of pre-shared keys */
    0, 51, 0, 38, 0, 36, 0, 29, 0, 32,                     /* key share */
    9, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, /* ... its value */
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, /* ... its second half */
    0, 21, 0, 1, 0,                                        /* padding, to the length of an ICReq */
};
/* clang-format on */

bool nvme_answers_tls(int descriptor, const struct nvme_deadline *deadline)
{
    uint8_t first[2] = {0};
    struct nvme_deadline limit = nvme_deadline_within(deadline, PROBE_NS);
    return send(descriptor, client_hello, sizeof client_hello, MSG_NOSIGNAL) ==
               (ssize_t)sizeof client_hello &&
           nvme_wait(&limit, descriptor, POLLIN) == 0 &&
           recv(descriptor, first, sizeof first, 0) == (ssize_t)sizeof first &&
           (first[0] == RECORD_ALERT || first[0] == RECORD_HANDSHAKE) && first[1] == TLS_MAJOR;
}
