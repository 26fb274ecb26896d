/*
 * Datasets of a volume from C: mount, open, read, an epoch in its order by batches, close.
 *
 * The functions that "Efficient User-Level Storage Disaggregation for Deep Learning" (IEEE CLUSTER
 * 2019) gives a training program, for programs without Python. Conventions, codes, devices and
 * batches are those of dlfs.h; native/examples/epoch.c is a whole program.
 *
 *     the paper       here
 *     dlfs_mount      dlfs_mount, dlfs_mount_devices
 *     dlfs_open       dlfs_open a dataset, dlfs_find a sample: its index stands for it
 *     dlfs_read       dlfs_read
 *     dlfs_sequence   dlfs_begin (dlfs_sequence is a type of dlfs.h), dlfs_order
 *     dlfs_bread      dlfs_bread
 *     dlfs_close      dlfs_close, dlfs_unmount
 *
 * What is on media is read as FORMAT.md says, versions 1.x, every bound and checksum checked:
 * a volume that breaks a rule is refused. Nothing is ever written.
 *
 * message, of message_bytes, gets why a function failed, in words (may be NULL with 0).
 */
#ifndef DLFS_API_H
#define DLFS_API_H

#include "dlfs/dlfs.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_MESSAGE_BYTES 512u  /* holds any message of this header */
#define DLFS_NAME_BYTES_MAX 255u /* length of a dataset's name */

/* ---- volumes --------------------------------------------------------------------------------- */

/* A volume at the generation that it was mounted at. Immutable: any threads at once. */
typedef struct dlfs_volume dlfs_volume;

/*
 * Opens the members of a volume, files or block devices in any order, and mounts it. With
 * replicas, fewer members are enough for reading. Errors: -EINVAL (no member, a member twice or of
 * another volume); -errno of the first member that cannot be opened; DLFS_E_NOT_FOUND, a member is
 * missing; DLFS_E_FORMAT, DLFS_E_CHECKSUM, DLFS_E_TRUNCATED, it is no volume or a damaged one;
 * -EPROTONOSUPPORT, a newer version of the format; errors of devices; -ENOMEM.
 */
DLFS_API int dlfs_mount(const char *const *paths, uint32_t count, char *message,
                        uint32_t message_bytes, dlfs_volume **out);
/*
 * The same with devices that the caller has opened (NVMe over TCP, memory, another library's), and
 * keeps open until the volume is unmounted. NULL stands for a member that cannot be had.
 */
DLFS_API int dlfs_mount_devices(dlfs_device *const *devices, uint32_t count, char *message,
                                uint32_t message_bytes, dlfs_volume **out);
/* Closes a volume. -EBUSY, and nothing happens, while datasets of it are open. NULL: 0. */
DLFS_API int dlfs_unmount(dlfs_volume *volume);

typedef struct dlfs_dataset_info {
    char name[DLFS_NAME_BYTES_MAX + 1]; /* as stored, ended by NUL */
    uint32_t version;
    uint8_t uuid[16];
    uint64_t sample_count;
    uint64_t sample_bytes; /* the sum of all lengths */
} dlfs_dataset_info;
/* All versions of all datasets, numbered from 0 by name and version. */
DLFS_API uint32_t dlfs_dataset_count(const dlfs_volume *volume);
/* -EINVAL: there is no such number. */
DLFS_API int dlfs_dataset_describe(const dlfs_volume *volume, uint32_t number,
                                   dlfs_dataset_info *info);

/* ---- datasets -------------------------------------------------------------------------------- */

/* An open dataset. Any threads at once, but for dlfs_begin and dlfs_bread: one at a time. */
typedef struct dlfs_dataset dlfs_dataset;

/* 0 in any field: its default. */
typedef struct dlfs_open_options {
    uint64_t memory_bytes; /* sample memory: cached, read ahead, lent to batches; 256 MiB */
    uint32_t version;      /* of the dataset; the newest */
    uint32_t depth;        /* operations in flight per member and thread; 128 */
    uint32_t timeout_ms;   /* for one read with all its retries; 30000 */
    uint32_t reserved;
} dlfs_open_options;

/*
 * Opens a dataset by name: reads its directory into memory and checks all of it. options may be
 * NULL. The volume must stay mounted. Errors: DLFS_E_NOT_FOUND, no such dataset or version;
 * DLFS_E_FORMAT, DLFS_E_CHECKSUM, its directory is damaged in every copy, or the dataset was
 * removed since the volume was mounted; errors of devices; -ENOMEM; -EINVAL, DLFS_E_LIMIT
 * (options).
 */
DLFS_API int dlfs_open(dlfs_volume *volume, const char *name, const dlfs_open_options *options,
                       char *message, uint32_t message_bytes, dlfs_dataset **out);
/* Closes a dataset; batches given out stay valid. -EBUSY while a call is under way. NULL: 0. */
DLFS_API int dlfs_close(dlfs_dataset *dataset);

/* Samples; their indices are 0..count-1, in the order of their paths. */
DLFS_API uint64_t dlfs_count(const dlfs_dataset *dataset);
/* The index of the sample with this path. Errors: DLFS_E_NOT_FOUND, DLFS_E_FORMAT. */
DLFS_API int64_t dlfs_find(const dlfs_dataset *dataset, const char *path);
/*
 * The path of a sample, ended by NUL; returns its length. text_bytes: at least
 * DLFS_PATH_BYTES_MAX + 1. Errors: -EINVAL, DLFS_E_FORMAT.
 */
DLFS_API int64_t dlfs_path(const dlfs_dataset *dataset, uint64_t index, char *text,
                           uint64_t text_bytes);
/* The length of a sample. -EINVAL: no such index. */
DLFS_API int64_t dlfs_length(const dlfs_dataset *dataset, uint64_t index);
/* Reads one sample, verified; as dlfs_reader_get. */
DLFS_API int64_t dlfs_read(dlfs_dataset *dataset, uint64_t index, void *buffer,
                           uint64_t buffer_bytes);

/* What dlfs_reader_read, dlfs_reader_get_stats and others of dlfs.h take; borrowed. */
DLFS_API dlfs_reader *dlfs_dataset_reader(dlfs_dataset *dataset);
DLFS_API const dlfs_directory *dlfs_dataset_directory(const dlfs_dataset *dataset);

/* ---- an epoch -------------------------------------------------------------------------------- */

/* One rank's part of one epoch: positions position + rank, position + rank + world_size, ... */
typedef struct dlfs_epoch {
    uint64_t seed;
    uint64_t epoch;         /* each has an order of its own */
    uint64_t position;      /* global: samples that all ranks together have had already */
    uint32_t order;         /* DLFS_ORDER_* */
    uint32_t window_chunks; /* of DLFS_ORDER_CHUNK; 0: 64 */
    uint32_t rank;
    uint32_t world_size; /* > 0 */
    uint32_t plan;       /* DLFS_PLAN_* */
    uint32_t reserved;
} dlfs_epoch;
/*
 * Begins an epoch, and reading it ahead; one under way ends. The order is that of the Python API
 * for the same arguments. -EINVAL, -ENOMEM; then there is no epoch under way.
 */
DLFS_API int dlfs_begin(dlfs_dataset *dataset, const dlfs_epoch *epoch);
/*
 * out[i] = the index at position first + i of the epoch's global order, for all ranks. -EINVAL:
 * past the end, or no epoch under way.
 */
DLFS_API int dlfs_order(const dlfs_dataset *dataset, uint64_t first, uint64_t count, uint64_t *out);
/*
 * This rank's next count samples as one batch, fewer at the end; DLFS_E_END when there are none
 * left. Blocks. Samples that failed are listed in the batch, not an error of the call. Give it back
 * with dlfs_batch_release. -EINVAL: no epoch under way, or count 0.
 */
DLFS_API int dlfs_bread(dlfs_dataset *dataset, uint64_t count, dlfs_batch **out);

#ifdef __cplusplus
}
#endif

#endif
