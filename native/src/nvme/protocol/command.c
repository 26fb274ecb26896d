/* Encodes submission queue entries and decodes Identify data; see nvme/protocol/command.h. */
#include "nvme/protocol/command.h"

#include <errno.h>

#include "device/device.h"

#define ENTRY_PSDT_SGL 0x40u
#define SGL_IN_CAPSULE 0x01u /* data block, by offset */
#define SGL_TRANSPORT 0x5Au  /* transport data block */
#define FABRICS_PROPERTY_SET 0x00u
#define FABRICS_CONNECT 0x01u
#define FABRICS_PROPERTY_GET 0x04u
#define CONNECT_NO_FLOW_CONTROL 0x04u
#define CONTROLLER_TYPE_DISCOVERY 2u
#define CMIC_ANA 0x08u
#define DESCRIPTOR_EUI64 1u
#define DESCRIPTOR_NGUID 2u
#define DESCRIPTOR_UUID 3u
#define DESCRIPTOR_COMMAND_SET 4u
#define COMMAND_SET_NVM 0u
#define BLOCK_SHIFT_MIN 9u
#define BLOCK_SHIFT_MAX 16u

void nvme_entry_finish(uint8_t *entry, uint16_t cid, enum nvme_transfer transfer,
                       uint32_t data_bytes)
{
    entry[1] = ENTRY_PSDT_SGL;
    nvme_put16(entry + 2, cid);
    memset(entry + 24, 0, 16);
    nvme_put32(entry + 32, data_bytes);
    entry[39] = transfer == NVME_IN_CAPSULE ? SGL_IN_CAPSULE : SGL_TRANSPORT;
}

void nvme_entry_transfer(uint8_t *entry, uint8_t opcode, uint32_t nsid, uint64_t first_block,
                         uint32_t block_count)
{
    memset(entry, 0, NVME_ENTRY_BYTES);
    entry[0] = opcode;
    nvme_put32(entry + 4, nsid);
    nvme_put64(entry + 40, first_block);
    nvme_put32(entry + 48, block_count - 1);
}

void nvme_entry_command(uint8_t *entry, const dlfs_nvme_command *command)
{
    memset(entry, 0, NVME_ENTRY_BYTES);
    entry[0] = (uint8_t)command->opcode;
    nvme_put32(entry + 4, command->nsid);
    nvme_put32(entry + 40, command->cdw10);
    nvme_put32(entry + 44, command->cdw11);
    nvme_put32(entry + 48, command->cdw12);
    nvme_put32(entry + 52, command->cdw13);
    nvme_put32(entry + 56, command->cdw14);
    nvme_put32(entry + 60, command->cdw15);
}

static void fabrics_entry(uint8_t *entry, uint8_t type)
{
    memset(entry, 0, NVME_ENTRY_BYTES);
    entry[0] = NVME_FABRICS;
    entry[4] = type;
}

void nvme_entry_connect(uint8_t *entry, uint16_t qid, uint16_t sq_size, uint32_t kato_ms)
{
    fabrics_entry(entry, FABRICS_CONNECT);
    nvme_put16(entry + 42, qid);
    nvme_put16(entry + 44, sq_size);
    entry[46] = CONNECT_NO_FLOW_CONTROL;
    nvme_put32(entry + 48, kato_ms);
}

void nvme_connect_data(uint8_t data[NVME_CONNECT_BYTES], const uint8_t host_id[16],
                       uint16_t controller_id, const char *subsystem_nqn, const char *host_nqn)
{
    memset(data, 0, NVME_CONNECT_BYTES);
    memcpy(data, host_id, 16);
    nvme_put16(data + 16, controller_id);
    memcpy(data + 256, subsystem_nqn, strnlen(subsystem_nqn, DLFS_NVME_NQN_BYTES_MAX));
    memcpy(data + 512, host_nqn, strnlen(host_nqn, DLFS_NVME_NQN_BYTES_MAX));
}

void nvme_entry_property_get(uint8_t *entry, uint32_t offset, bool eight_bytes)
{
    fabrics_entry(entry, FABRICS_PROPERTY_GET);
    entry[40] = eight_bytes ? 1 : 0;
    nvme_put32(entry + 44, offset);
}

void nvme_entry_property_set(uint8_t *entry, uint32_t offset, uint32_t value)
{
    fabrics_entry(entry, FABRICS_PROPERTY_SET);
    nvme_put32(entry + 44, offset);
    nvme_put64(entry + 48, value);
}

/* ---- Identify -------------------------------------------------------------------------------- */

int nvme_decode_controller(const uint8_t data[NVME_IDENTIFY_BYTES], uint64_t page_bytes,
                           struct nvme_controller *controller, const char **reason)
{
    uint32_t capsule = nvme_get32(data + 1792); /* IOCCSZ, in 16 bytes */
    uint64_t transfer = UINT32_MAX;
    if (data[77] > 0 && data[77] < 20) {
        transfer = page_bytes << data[77];
    }
    *controller = (struct nvme_controller){
        .transfer_bytes_max = transfer < UINT32_MAX ? (uint32_t)transfer : UINT32_MAX,
        .quiesce_ms = nvme_get16(data + 386), /* NVM Express Base Specification 2.1 */
        .keepalive_step_ms = nvme_get16(data + 320) * 100u,
        .notices = nvme_get32(data + 92),
        .ana_group_count = nvme_get32(data + 348),
        .ana_transition_ms = data[342] * 1000u,
        .id = nvme_get16(data + 78),
        .write_cache = (data[525] & 1) != 0,
        .discovery = data[111] == CONTROLLER_TYPE_DISCOVERY,
        .reports_ana = (data[76] & CMIC_ANA) != 0};
    if (controller->discovery) {
        return 0; /* the remaining fields describe I/O queues, which it lacks */
    }
    if (capsule < 4 || capsule > UINT32_MAX / 16) {
        return nvme_protocol_error(reason, "Identify Controller: expected an IOCCSZ of at least 4");
    }
    if (nvme_get16(data + 1800) != 0) {
        return nvme_protocol_error(reason, "Identify Controller: expected ICDOFF 0");
    }
    controller->capsule_bytes_max = capsule * 16 - NVME_ENTRY_BYTES;
    return 0;
}

/* Sets the identifier if its kind ranks higher than the present one's: UUID, NGUID, EUI64. */
static void keep_id(struct nvme_namespace *out, uint8_t kind, const uint8_t *id, size_t bytes)
{
    static const uint8_t zeros[sizeof out->id];
    if (kind <= out->id_kind || memcmp(id, zeros, bytes) == 0) {
        return;
    }
    out->id_kind = kind;
    memset(out->id, 0, sizeof out->id);
    memcpy(out->id, id, bytes);
}

/* Decodes identification descriptors; returns false if the namespace has another command set. */
static bool take_descriptors(const uint8_t *data, struct nvme_namespace *out)
{
    bool usable = true;
    size_t position = 0;
    while (position + 4 <= NVME_IDENTIFY_BYTES && data[position + 1] != 0) {
        uint8_t kind = data[position];
        uint8_t bytes = data[position + 1];
        const uint8_t *id = data + position + 4;
        position += 4u + bytes;
        if (position > NVME_IDENTIFY_BYTES) {
            break;
        }
        if (kind == DESCRIPTOR_UUID && bytes == 16) {
            keep_id(out, DLFS_NVME_ID_UUID, id, 16);
        } else if (kind == DESCRIPTOR_NGUID && bytes == 16) {
            keep_id(out, DLFS_NVME_ID_NGUID, id, 16);
        } else if (kind == DESCRIPTOR_EUI64 && bytes == 8) {
            keep_id(out, DLFS_NVME_ID_EUI64, id, 8);
        } else if (kind == DESCRIPTOR_COMMAND_SET && bytes == 1) {
            usable = id[0] == COMMAND_SET_NVM;
        }
    }
    return usable;
}

int nvme_decode_namespace(const uint8_t data[NVME_IDENTIFY_BYTES],
                          const uint8_t descriptors[NVME_IDENTIFY_BYTES],
                          struct nvme_namespace *out, const char **reason)
{
    uint64_t block_count = nvme_get64(data);
    if (block_count == 0) {
        *reason = "there is no such namespace, or it is not active";
        return DLFS_E_NOT_FOUND;
    }
    uint32_t index = data[26] & 15u;
    if (data[25] >= 16) { /* NLBAF, 0's based: more formats than four bits can number */
        index |= (uint32_t)(data[26] >> 1) & 0x30u;
    }
    const uint8_t *format = data + 128 + (size_t)index * 4;
    if (nvme_get16(format) != 0) {
        *reason = "the namespace is formatted with metadata";
        return -ENOTSUP;
    }
    if (format[2] < BLOCK_SHIFT_MIN || format[2] > BLOCK_SHIFT_MAX) {
        *reason = "the namespace's blocks are not of 512..65536 bytes";
        return -ENOTSUP;
    }
    if (block_count > (uint64_t)INT64_MAX >> format[2]) {
        *reason = "the namespace is larger than 8 EiB";
        return -ENOTSUP;
    }
    *out = (struct nvme_namespace){.size_bytes = block_count << format[2],
                                   .block_bytes = UINT32_C(1) << format[2],
                                   .ana_group = nvme_get32(data + 92),
                                   .write_protected = (data[99] & 1) != 0,
                                   .id_kind = DLFS_NVME_ID_NONE};
    keep_id(out, DLFS_NVME_ID_EUI64, data + 120, 8);
    keep_id(out, DLFS_NVME_ID_NGUID, data + 104, 16);
    if (!take_descriptors(descriptors, out)) {
        *reason = "the namespace is not of the NVM command set";
        return -ENOTSUP;
    }
    return 0;
}
