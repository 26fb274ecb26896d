/*
 * Fuzzes the decoders of the ANA log and the Changed Namespace List.
 *
 * An input is four bytes, a group or namespace, and a log. The log is copied into memory of exactly
 * its length, so that ASan detects one byte too many.
 */
#include <stdlib.h>
#include <string.h>

#include "dlfs/dlfs.h"
#include "nvme/protocol/notices.h"
#include "nvme/protocol/pdu.h"

#define NUMBER_BYTES 4u

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    if (count < NUMBER_BYTES) {
        return 0;
    }
    uint32_t number = nvme_get32(bytes);
    size_t log_bytes = count - NUMBER_BYTES;
    uint8_t *log = malloc(log_bytes > 0 ? log_bytes : 1);
    if (log == NULL) {
        abort();
    }
    memcpy(log, bytes + NUMBER_BYTES, log_bytes);
    uint32_t state = DLFS_NVME_ANA_CHANGE;
    const char *reason = NULL;
    int code = nvme_decode_ana(log, log_bytes, number, &state, &reason);
    bool valid = code == 0 && reason == NULL && nvme_ana_rank(state) <= NVME_RANK_UNUSABLE &&
                 (state == DLFS_NVME_ANA_NONE || strcmp(nvme_ana_word(state), "not reported") != 0);
    if (!valid && (code != DLFS_E_PROTOCOL || reason == NULL)) {
        abort();
    }
    if (nvme_namespace_changed(log, log_bytes, number) && log_bytes < NUMBER_BYTES) {
        abort();
    }
    (void)nvme_event_phrase(number);
    free(log);
    return 0;
}
