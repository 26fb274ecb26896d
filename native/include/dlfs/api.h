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
 *     dlfs_read       dlfs_read, dlfs_read_sample
 *     dlfs_sequence   dlfs_begin (dlfs_sequence is a type of dlfs.h), dlfs_order
 *     dlfs_bread      dlfs_bread
 *     dlfs_close      dlfs_end, dlfs_close, dlfs_unmount
 *
 * What is on media is read as FORMAT.md says, versions 1.x, every bound and checksum checked:
 * a volume that breaks a rule is refused. Nothing is ever written.
 *
 * Ownership. A volume outlives its datasets; dlfs_unmount sees to that. A dataset ends its epoch
 * and frees its reader and directory; batches outlive all three. Devices that the caller opened
 * outlive the volume.
 *
 * Options. A field that is 0 means the default that its comment names, so that a structure of zeros
 * is valid; `reserved` must be 0, else -EINVAL.
 *
 * message, of message_bytes, gets the reason of a failure in words, with the URI of the member and
 * the offset where they are known, in printable ASCII (may be NULL with 0). It is untouched on
 * success, and where the arguments themselves are wrong (NULL).
 */
#ifndef DLFS_API_H
#define DLFS_API_H

#include <dlfs/dlfs.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_MESSAGE_BYTES 1024u /* of a message, NUL included; longer ones are cut */
#define DLFS_NAME_BYTES_MAX 255u /* length of a dataset's name */

/* ---- volumes --------------------------------------------------------------------------------- */

/* A volume at the generation that it was mounted at. Immutable: any threads at once. */
typedef struct dlfs_volume dlfs_volume;

/*
 * Opens the members of a volume, in any order, and mounts it. uris[i] names one device, as in
 * Python and on the command line:
 *
 *     /data/vol0.img, vol0.img             a file or a disk
 *     file:PATH                            the same, %-escapes decoded
 *     nvme-tcp://HOST[:PORT]/NQN?nsid=N    a namespace of an NVMe/TCP target; options follow as
 *                                          &KEY=VALUE: path, hostnqn, hostid, hdgst, ddgst,
 *                                          timeout_ms, connect_ms, keepalive_ms, reconnect_ms,
 *                                          busy_poll_us (`dlfs uri` explains them)
 *
 * With replicas, fewer members are enough for reading. Errors: -EINVAL, a malformed URI, no member,
 * a member twice or of another volume; -ENOTSUP, a URI of a kind that needs the Python package
 * (nvme-tcp+discover:, spdk:, mem:); the code of the first member that cannot be opened, -errno for
 * files, else as dlfs_device_open_nvme; DLFS_E_NOT_FOUND, a member is missing; DLFS_E_FORMAT,
 * DLFS_E_CHECKSUM, DLFS_E_TRUNCATED, it is no volume or a damaged one; -EPROTONOSUPPORT, a newer
 * version of the format; errors of devices; -ENOMEM.
 */
DLFS_API int dlfs_mount(const char *const *uris, uint32_t count, char *message,
                        uint32_t message_bytes, dlfs_volume **out);
/*
 * The same with devices that the caller has opened (memory, another library's), and keeps open
 * until the volume is unmounted; the array is copied. NULL stands for a member that cannot be had.
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

/*
 * An open dataset. Samples are read by any threads at once, also while an epoch is under way. The
 * epoch is used by one thread at a time: dlfs_begin, dlfs_order, dlfs_bread, dlfs_end, dlfs_close.
 */
typedef struct dlfs_dataset dlfs_dataset;

typedef struct dlfs_open_options {
    uint64_t memory_bytes; /* sample memory: cached, read ahead, lent to batches; 0: 256 MiB */
    uint32_t version;      /* of the dataset; 0: the newest */
    uint32_t depth;        /* operations in flight per member and thread; 0: 128 */
    uint32_t timeout_ms;   /* for one read or batch with all its retries; 0: 30000, or longer where
                              the members' timeout_ms + reconnect_ms are */
    uint32_t reserved;     /* 0 */
} dlfs_open_options;

/*
 * Opens a dataset by name: reads its directory into memory and checks all of it. options may be
 * NULL: all defaults. The volume must stay mounted. Errors: DLFS_E_NOT_FOUND, no such dataset or
 * version; DLFS_E_FORMAT, DLFS_E_CHECKSUM, its directory is damaged in every copy, or the dataset
 * was removed since the volume was mounted; errors of devices; -ENOMEM; -EINVAL, DLFS_E_LIMIT
 * (options).
 */
DLFS_API int dlfs_open(dlfs_volume *volume, const char *name, const dlfs_open_options *options,
                       char *message, uint32_t message_bytes, dlfs_dataset **out);
/*
 * Ends the epoch under way and closes the dataset; batches given out stay valid. -EBUSY while
 * another thread's call is under way: the epoch has ended, and the dataset is open. NULL: 0.
 */
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
/*
 * Reads one sample, verified, and returns its length. Errors: -EINVAL, no such index; -ERANGE, it
 * is longer than buffer_bytes (dlfs_length tells); DLFS_E_CHECKSUM; DLFS_E_FORMAT; errors of
 * devices.
 */
DLFS_API int64_t dlfs_read(dlfs_dataset *dataset, uint64_t index, void *buffer,
                           uint64_t buffer_bytes);
/* The same; when it fails, failure (may be NULL) gets the code, the member and the offset. */
DLFS_API int64_t dlfs_read_sample(dlfs_dataset *dataset, uint64_t index, void *buffer,
                                  uint64_t buffer_bytes, dlfs_failure *failure);
/*
 * Writes a failure of dlfs_read_sample, or of a batch of this dataset, in words: the sample's
 * index, path and length, the member's URI, the offset on it, and the reason. -EINVAL: it is no
 * failure of a sample of this dataset.
 */
DLFS_API int dlfs_describe_failure(const dlfs_dataset *dataset, const dlfs_failure *failure,
                                   char *message, uint32_t message_bytes);

/*
 * What dlfs_reader_read, dlfs_reader_get_stats and others of dlfs.h take. Borrowed: valid until
 * dlfs_close, which frees them.
 */
DLFS_API dlfs_reader *dlfs_dataset_reader(dlfs_dataset *dataset);
DLFS_API const dlfs_directory *dlfs_dataset_directory(const dlfs_dataset *dataset);

/* ---- an epoch -------------------------------------------------------------------------------- */

/*
 * One rank's part of one epoch: positions position + rank, position + rank + world_size, ... All
 * zeros: epoch 0 of seed 0 for a single rank, in storage order, which is not shuffled.
 */
typedef struct dlfs_epoch {
    uint64_t seed;
    uint64_t epoch;         /* each has an order of its own */
    uint64_t position;      /* global: samples that all ranks together have had already */
    uint32_t order;         /* DLFS_ORDER_STORAGE (0), DLFS_ORDER_GLOBAL or DLFS_ORDER_CHUNK */
    uint32_t window_chunks; /* of DLFS_ORDER_CHUNK; 0: 64 */
    uint32_t rank;          /* < world_size */
    uint32_t world_size;    /* 0: 1 */
    uint32_t plan;          /* DLFS_PLAN_*; 0: DLFS_PLAN_AUTO */
    uint32_t reserved;      /* 0 */
} dlfs_epoch;
/*
 * Begins an epoch, and starts a thread that reads it ahead; one under way ends. The order is that
 * of the Python API for the same arguments. dlfs_end ends it. -EINVAL, -ENOMEM; then there is no
 * epoch under way.
 */
DLFS_API int dlfs_begin(dlfs_dataset *dataset, const dlfs_epoch *epoch);
/*
 * Ends the epoch under way, before or after its last sample: ends its thread, which may wait for
 * reads in flight, and gives back the memory that was read ahead. Batches given out stay valid. No
 * epoch, or NULL: nothing. dlfs_close does it too.
 */
DLFS_API void dlfs_end(dlfs_dataset *dataset);
/*
 * out[i] = the index at position first + i of the epoch's global order, for all ranks. -EINVAL:
 * past the end, or no epoch under way.
 */
DLFS_API int dlfs_order(const dlfs_dataset *dataset, uint64_t first, uint64_t count, uint64_t *out);
/*
 * This rank's next count samples as one batch, fewer at the end; DLFS_E_END when there are none
 * left. Blocks. Samples that failed are listed in the batch (dlfs_describe_failure), not an error
 * of the call. Give it back with dlfs_batch_release, in any thread. -EINVAL: no epoch under way, or
 * count 0.
 */
DLFS_API int dlfs_bread(dlfs_dataset *dataset, uint64_t count, dlfs_batch **out);

#ifdef __cplusplus
}
#endif

#endif
