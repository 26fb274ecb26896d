/*
 * Splits the byte stream from a controller into PDUs and delivers their data. No I/O: its owner
 * asks for the buffers of the next bytes, receives into them, and reports how many bytes came.
 *
 * Data of NVME_DIRECT_BYTES or more is received directly into its destination. Smaller data and all
 * headers pass through a staging buffer, so that many PDUs share one system call at the cost of one
 * copy. The stream may be split between calls at any byte.
 */
#ifndef DLFS_NVME_RECEIVER_H
#define DLFS_NVME_RECEIVER_H

#include <sys/uio.h>

#include "nvme/protocol/pdu.h"

/* Data length from which on a system call costs less than a copy. */
#define NVME_DIRECT_BYTES 16384u
/*
 * Bytes to stage while only large data is expected: a response capsule and the next PDU's header
 * fit, and hardly any of that PDU's data.
 */
#define NVME_STAGE_HEADS_BYTES 128u

/*
 * Callbacks for received PDUs. Each returns 0, or a negative code with *reason, after which the
 * owner closes the connection.
 */
struct nvme_sink {
    /* Called at the header of a C2HData; sets *destination to where its data belongs. */
    int (*begin_data)(void *context, const struct nvme_pdu *pdu, uint8_t **destination,
                      const char **reason);
    /* Called when that data is complete; digest_valid is false if its digest does not match. */
    int (*end_data)(void *context, const struct nvme_pdu *pdu, bool digest_valid,
                    const char **reason);
    int (*on_cqe)(void *context, const struct nvme_pdu *pdu, const char **reason);
    int (*on_r2t)(void *context, const struct nvme_pdu *r2t, const char **reason);
};

enum nvme_stage { NVME_STAGE_HEADER, NVME_STAGE_PADDING, NVME_STAGE_DATA, NVME_STAGE_DIGEST };

struct nvme_receiver {
    struct nvme_terms terms;
    const struct nvme_sink *sink; /* set by the owner, as context is */
    void *context;
    uint8_t *staging;
    uint32_t staging_bytes; /* >= NVME_HEAD_BYTES_MAX */
    uint32_t first;         /* staging[first..last) is received and not yet decoded */
    uint32_t last;
    enum nvme_stage stage;
    struct nvme_pdu pdu;   /* the present C2HData, in all stages but NVME_STAGE_HEADER */
    uint8_t *destination;  /* address of the next byte of its data */
    uint32_t left_bytes;   /* bytes of its data still to come */
    uint32_t crc32c;       /* CRC32C of its data so far */
    uint32_t direct_bytes; /* bytes of its destination that the last nvme_receiver_space returned */
    const char *reason;    /* why nvme_receiver_take failed */
};

void nvme_receiver_init(struct nvme_receiver *receiver, const struct nvme_terms *terms,
                        uint8_t *staging, uint32_t staging_bytes);
/*
 * Fills vectors with the buffers of the next bytes and returns their number, 1 or 2. At most
 * stage_bytes (>= NVME_STAGE_HEADS_BYTES) are staged.
 */
int nvme_receiver_space(struct nvme_receiver *receiver, uint32_t stage_bytes,
                        struct iovec vectors[2]);
/*
 * Processes bytes that were received into the buffers of nvme_receiver_space. Returns 0, or the
 * code that ends the stream: DLFS_E_PROTOCOL, DLFS_E_DIGEST, DLFS_E_LOST (the controller terminated
 * the connection), or the sink's.
 */
int nvme_receiver_take(struct nvme_receiver *receiver, size_t bytes);
/* Returns true if no PDU is partly received. */
bool nvme_receiver_is_empty(const struct nvme_receiver *receiver);

#endif
