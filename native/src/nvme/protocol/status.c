/*
 * The table of completion statuses, for both NVMe initiators: error code, retryable or not, and a
 * phrase for messages. No status maps to -EINVAL, which is reserved for errors of the library's
 * caller.
 *
 * Source: NVM Express Base Specification 2.0, section 3.3.3.2.1; NVM Command Set Specification 1.0,
 * section 3.3.3.2.
 */
#include <errno.h>

#include "nvme/protocol/command.h"

#define STATUS_PERSISTENT_LOSS 0x301u
#define STATUS_TRANSITION 0x303u
#define RETRYABLE 1u /* the command may be sent again unless the status has DNR set */

struct status {
    uint16_t status; /* type << 8 | code */
    uint8_t flags;
    int code;
    const char *phrase;
};

static const struct status statuses[] = {
    {0x000, 0, 0, "success"},
    {0x001, 0, -EOPNOTSUPP, "invalid opcode"},
    {0x002, 0, -EREMOTEIO, "invalid field"},
    {0x003, 0, DLFS_E_PROTOCOL, "command ID conflict"},
    {0x004, RETRYABLE, -EIO, "data transfer error"},
    {0x005, RETRYABLE, -EIO, "aborted by a loss of power"},
    {0x006, 0, -EIO, "internal error"},
    {0x007, RETRYABLE, -EIO, "aborted on request"},
    {0x008, RETRYABLE, -EIO, "aborted because its queue was deleted"},
    {0x00B, RETRYABLE, DLFS_E_LOST, "invalid namespace or format"},
    {0x00C, 0, -EIO, "command sequence error"},
    {0x00D, 0, -EIO, "invalid SGL segment descriptor"},
    {0x00F, 0, -EIO, "invalid data SGL length"},
    {0x011, 0, -EIO, "invalid SGL descriptor type"},
    {0x016, 0, -EIO, "invalid SGL offset"},
    {0x018, 0, -EREMOTEIO, "invalid host identifier"},
    {0x019, 0, DLFS_E_LOST, "keep-alive timeout expired"},
    {0x01A, 0, -EREMOTEIO, "invalid keep-alive timeout"},
    {0x020, 0, -EROFS, "namespace is write protected"},
    {0x021, RETRYABLE, -EIO, "command interrupted"},
    {0x022, RETRYABLE, -EIO, "transient transport error"},
    {0x080, 0, -EREMOTEIO, "LBA out of range"},
    {0x081, 0, -ENOSPC, "capacity exceeded"},
    {0x082, RETRYABLE, -EIO, "namespace not ready"},
    {0x083, 0, -EBADE, "reservation conflict"},
    {0x084, RETRYABLE, -EBUSY, "format in progress"},
    {0x101, 0, -EREMOTEIO, "invalid queue identifier"},
    {0x102, 0, -EREMOTEIO, "invalid queue size"},
    {0x180, 0, -EPROTONOSUPPORT, "connect incompatible format"},
    {0x181, RETRYABLE, -EBUSY, "connect controller busy"},
    {0x182, 0, DLFS_E_NOT_FOUND, "connect invalid parameters"},
    {0x183, 0, DLFS_E_LOST, "connect restart discovery"},
    {0x184, 0, -EACCES, "connect invalid host"},
    {0x185, 0, -EREMOTEIO, "invalid queue type"},
    {0x191, 0, -EACCES, "authentication required"},
    {0x280, 0, -EIO, "write fault"},
    {0x281, 0, -EIO, "unrecovered read error"},
    {0x282, 0, -EIO, "guard check error"},
    {0x283, 0, -EIO, "application tag check error"},
    {0x284, 0, -EIO, "reference tag check error"},
    {0x286, 0, -EACCES, "access denied"},
    {0x287, 0, -EIO, "deallocated or unwritten block"},
    {0x300, RETRYABLE, DLFS_E_LOST, "internal path error"},
    {0x301, RETRYABLE, DLFS_E_LOST, "persistent loss of the path"},
    {0x302, RETRYABLE, DLFS_E_LOST, "path inaccessible"},
    {0x303, RETRYABLE, DLFS_E_LOST, "path in transition"},
    {0x360, RETRYABLE, DLFS_E_LOST, "controller pathing error"},
    {0x370, RETRYABLE, DLFS_E_LOST, "host pathing error"},
    {0x371, RETRYABLE, DLFS_E_LOST, "command aborted by host"},
};

#define STATUS_COUNT (sizeof statuses / sizeof statuses[0])

static const struct status *find(uint16_t status)
{
    for (size_t i = 0; i < STATUS_COUNT; i++) {
        if (statuses[i].status == (status & NVME_STATUS_CODE)) {
            return &statuses[i];
        }
    }
    return NULL;
}

int nvme_status_code(uint16_t status)
{
    if ((status & NVME_STATUS_CODE) == 0) {
        return 0;
    }
    const struct status *found = find(status);
    return found != NULL ? found->code : -EIO;
}

bool nvme_status_is_ana(uint16_t status)
{
    uint16_t code = status & NVME_STATUS_CODE;
    return code >= STATUS_PERSISTENT_LOSS && code <= STATUS_TRANSITION;
}

bool nvme_status_is_retryable(uint16_t status)
{
    if (nvme_status_is_ana(status)) {
        return true; /* on another path, whatever DNR says about this one */
    }
    if ((status & NVME_STATUS_DNR) != 0) {
        return false;
    }
    const struct status *found = find(status);
    return found != NULL && (found->flags & RETRYABLE) != 0;
}

const char *nvme_status_phrase(uint16_t status)
{
    const struct status *found = find(status);
    return found != NULL ? found->phrase : "a status without a name";
}
