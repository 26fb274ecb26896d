/*
 * Encodes NVMe commands as submission queue entries, maps completion statuses to error codes, and
 * decodes Identify data. No I/O.
 *
 * Source: NVM Express Base Specification 2.0 (sections 3.3.3, 3.6, 5.16, 5.17, 5.27, 6), NVM
 * Command Set Specification 1.0.
 */
#ifndef DLFS_NVME_COMMAND_H
#define DLFS_NVME_COMMAND_H

#include "dlfs/dlfs.h"
#include "nvme/protocol/pdu.h"

#define NVME_OPCODE_FLUSH 0x00u
#define NVME_OPCODE_WRITE 0x01u
#define NVME_OPCODE_READ 0x02u
#define NVME_ADMIN_GET_LOG_PAGE 0x02u
#define NVME_ADMIN_IDENTIFY 0x06u
#define NVME_ADMIN_SET_FEATURES 0x09u
#define NVME_ADMIN_GET_FEATURES 0x0Au
#define NVME_ADMIN_ASYNC_EVENT 0x0Cu
#define NVME_ADMIN_KEEP_ALIVE 0x18u
#define NVME_FABRICS 0x7Fu

#define NVME_PROPERTY_CAP 0x00u
#define NVME_PROPERTY_CC 0x14u
#define NVME_PROPERTY_CSTS 0x1Cu

#define NVME_IDENTIFY_NAMESPACE 0x00u
#define NVME_IDENTIFY_CONTROLLER 0x01u
#define NVME_IDENTIFY_DESCRIPTORS 0x03u
#define NVME_FEATURE_QUEUES 0x07u
#define NVME_FEATURE_EVENTS 0x0Bu

#define NVME_IDENTIFY_BYTES 4096u
#define NVME_CONNECT_BYTES 1024u

#define NVME_STATUS_DNR 0x4000u
#define NVME_STATUS_CODE 0x07FFu /* type and code, without DNR, More and CRD */
/* Status of Connect while the controller still has a queue of that ID from a closed connection. */
#define NVME_STATUS_SEQUENCE_ERROR 0x00Cu
#define NVME_STATUS_UNKNOWN_SUBSYSTEM 0x182u

/* The way of a command's data: none, to the host, in the command's capsule, or after an R2T. */
enum nvme_transfer { NVME_NO_DATA, NVME_TO_HOST, NVME_IN_CAPSULE, NVME_BY_R2T };

/* Completes an entry: sets its command ID and its SGL for data_bytes of data. */
void nvme_entry_finish(uint8_t *entry, uint16_t cid, enum nvme_transfer transfer,
                       uint32_t data_bytes);
/* Encodes a read or write of whole blocks. As with all encoders, nvme_entry_finish comes next. */
void nvme_entry_transfer(uint8_t *entry, uint8_t opcode, uint32_t nsid, uint64_t first_block,
                         uint32_t block_count);
/* Encodes a command of any other kind. */
void nvme_entry_command(uint8_t *entry, const dlfs_nvme_command *command);

/*
 * Encodes Fabrics Connect. kato_ms is for the admin queue (qid 0) only. sq_size is 0's based. The
 * submission queue has no flow control, so that reads may end with a SUCCESS flag.
 */
void nvme_entry_connect(uint8_t *entry, uint16_t qid, uint16_t sq_size, uint32_t kato_ms);
void nvme_connect_data(uint8_t data[NVME_CONNECT_BYTES], const uint8_t host_id[16],
                       uint16_t controller_id, const char *subsystem_nqn, const char *host_nqn);
void nvme_entry_property_get(uint8_t *entry, uint32_t offset, bool eight_bytes);
void nvme_entry_property_set(uint8_t *entry, uint32_t offset, uint32_t value);

/* ---- statuses ---- */

/* Returns the library's error code for the status of a read, write or flush; 0 for success. */
int nvme_status_code(uint16_t status);
/* Returns true if the same command may succeed later, on this controller or after a reconnect. */
bool nvme_status_is_retryable(uint16_t status);
/* Returns true for a status of ANA: the controller has not executed the command, and does not serve
 * the namespace now. */
bool nvme_status_is_ana(uint16_t status);
/* Returns a phrase such as "invalid host"; never NULL. */
const char *nvme_status_phrase(uint16_t status);

/* ---- Identify ---- */

/* The fields of Identify Controller that the initiator uses. */
struct nvme_controller {
    uint32_t transfer_bytes_max; /* MDTS; UINT32_MAX: no limit */
    uint32_t capsule_bytes_max;  /* most data bytes in a command capsule of an I/O queue */
    uint32_t quiesce_ms;         /* CQT; 0: not reported */
    uint32_t keepalive_step_ms;  /* KAS: granularity of the keep-alive timeout; 0: unknown */
    uint32_t notices;            /* OAES: events that it offers */
    uint32_t ana_group_count;    /* NANAGRPID */
    uint32_t ana_transition_ms;  /* ANATT: longest time of a change between two ANA states */
    uint16_t id;
    bool write_cache;
    bool discovery;
    bool reports_ana; /* CMIC: it reports asymmetric namespace access */
};
/*
 * Decodes Identify Controller. page_bytes: the controller's smallest page, from CAP.MPSMIN. Errors:
 * DLFS_E_PROTOCOL with *reason.
 */
int nvme_decode_controller(const uint8_t data[NVME_IDENTIFY_BYTES], uint64_t page_bytes,
                           struct nvme_controller *controller, const char **reason);

/* The fields of Identify Namespace and its identification descriptors that the initiator uses. */
struct nvme_namespace {
    uint64_t size_bytes;
    uint32_t block_bytes;
    uint32_t ana_group; /* ANAGRPID; 0: none */
    bool write_protected;
    uint8_t id_kind; /* DLFS_NVME_ID_* */
    uint8_t id[16];
};
/*
 * Decodes Identify Namespace. descriptors: the identification descriptors, or zeros. Errors with
 * *reason: DLFS_E_NOT_FOUND for a missing namespace, -ENOTSUP for one that cannot be used.
 */
int nvme_decode_namespace(const uint8_t data[NVME_IDENTIFY_BYTES],
                          const uint8_t descriptors[NVME_IDENTIFY_BYTES],
                          struct nvme_namespace *out, const char **reason);

#endif
