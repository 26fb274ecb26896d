/*
 * Cuts the stream of bytes that a controller sends into PDUs, and puts their data in place. No I/O:
 * whoever owns it asks where the next bytes are to go, fetches them, and says how many came.
 *
 * Data of at least NVME_DIRECT_BYTES goes straight to its destination; what is smaller, and all
 * headers, come through a staging buffer, so that many PDUs share one system call at the price of
 * one copy. A PDU may be split at any byte.
 */
#ifndef DLFS_NVME_RECEIVER_H
#define DLFS_NVME_RECEIVER_H

#include <sys/uio.h>

#include "nvme/pdu.h"

/* From this length on a system call costs less than copying. */
#define NVME_DIRECT_BYTES 16384u
/*
 * How much to stage while only large data is expected: a response and the next PDU's header fit,
 * and hardly any of its data.
 */
#define NVME_STAGE_HEADS_BYTES 128u

/*
 * Who takes what was received. Each returns 0, or a negative code with *reason, which ends the
 * connection.
 */
struct nvme_sink {
    /* A C2HData has begun: *destination gets the place of its data. */
    int (*place)(void *context, const struct nvme_pdu *pdu, uint8_t **destination,
                 const char **reason);
    /* Its data is there; sound: as its digest says, if there is one. */
    int (*arrived)(void *context, const struct nvme_pdu *pdu, bool sound, const char **reason);
    int (*response)(void *context, const struct nvme_pdu *pdu, const char **reason);
    int (*ready)(void *context, const struct nvme_pdu *r2t, const char **reason);
};

enum nvme_stage { NVME_STAGE_HEADER, NVME_STAGE_PADDING, NVME_STAGE_DATA, NVME_STAGE_DIGEST };

struct nvme_receiver {
    struct nvme_terms terms;
    const struct nvme_sink *sink;
    void *context;
    uint8_t *staging;
    uint32_t staging_bytes; /* >= NVME_HEAD_BYTES_MAX */
    uint32_t first;         /* staged and not yet looked at: staging[first..last) */
    uint32_t last;
    enum nvme_stage stage;
    struct nvme_pdu pdu;   /* the C2HData under way, beyond NVME_STAGE_HEADER */
    uint8_t *destination;  /* of the next byte of its data */
    uint32_t left_bytes;   /* of its data */
    uint32_t crc32c;       /* of the data that came */
    uint32_t direct_bytes; /* that the last call of nvme_receiver_space gave out in place */
    const char *reason;    /* why the stream ended, once nvme_receiver_take failed */
};

void nvme_receiver_init(struct nvme_receiver *receiver, const struct nvme_terms *terms,
                        uint8_t *staging, uint32_t staging_bytes);
/*
 * Where the next bytes go: the number of vectors, 1 or 2. stage_bytes (>=
 * NVME_STAGE_HEADS_BYTES) bounds what is staged.
 */
int nvme_receiver_space(struct nvme_receiver *receiver, uint32_t stage_bytes,
                        struct iovec vectors[2]);
/*
 * bytes came, in the places that nvme_receiver_space gave out. Returns 0, or the code that ended
 * the stream: DLFS_E_PROTOCOL, DLFS_E_DIGEST, DLFS_E_LOST (the controller said goodbye), or what
 * the sink returned.
 */
int nvme_receiver_take(struct nvme_receiver *receiver, size_t bytes);
/* Whether the stream stands between two PDUs. */
bool nvme_receiver_is_empty(const struct nvme_receiver *receiver);

#endif
