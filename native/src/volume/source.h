/*
 * Reading of members while a volume or a dataset is opened: one limit for the whole call, and reads
 * that end at a time whatever the device does.
 */
#ifndef DLFS_VOLUME_SOURCE_H
#define DLFS_VOLUME_SOURCE_H

#include "volume/volume.h"

/* The limit of a call: one time for all that it waits for. */
struct volume_limit {
    uint64_t began_ns;
    uint64_t ends_ns;
    uint64_t silent_members; /* members that left a read of the call unanswered, as bits */
};

extern uint64_t
    volume_call_ns; /* time of a call, unless a device has longer ones; tests shorten it */
struct volume_limit volume_limit_begin(void);
/* Gives the call the time in which a device ends an operation by itself, and a second more. */
void volume_limit_admit(struct volume_limit *limit, const dlfs_device *device);
/* Returns when a device is given up that gets one of `shares` equal shares of the time left. */
uint64_t volume_limit_device_ns(const struct volume_limit *limit, uint32_t shares);

/* A queue pair, and the memory that it reads into. */
struct volume_source {
    dlfs_device *device;
    dlfs_queue *queue; /* NULL: the source is closed */
    void *memory;
    size_t bytes;
};

/* Opens a source with memory of so many bytes. Errors: those of devices, -ENOMEM. */
int volume_source_open(struct volume_source *source, dlfs_device *device, uint32_t depth,
                       size_t bytes, uint64_t until_ns);
/*
 * Reads whole blocks into the source's memory, and moves the limit for the bytes that came.
 * DLFS_E_TIMEOUT: the device did not answer until until_ns; then the source must be closed.
 */
int volume_source_read(struct volume_source *source, struct volume_limit *limit,
                       uint64_t offset_bytes, uint64_t length_bytes, uint64_t until_ns);
/* Closes a source. If its reads hang, a thread waits for them, and the memory stays until then. */
void volume_source_close(struct volume_source *source);

#endif
