/*
 * Datasets of a volume from C: mount, open, read, an epoch in its order by batches, close.
 *
 * These are the functions that "Efficient User-Level Storage Disaggregation for Deep Learning"
 * (IEEE CLUSTER 2019) gives a training program, for programs without Python. Conventions, codes,
 * devices and batches are those of dlfs.h; native/examples/epoch.c is a whole program.
 *
 *     the paper       here
 *     dlfs_mount      dlfs_mount, dlfs_mount_devices
 *     dlfs_open       dlfs_open a dataset, dlfs_find a sample: its index stands for it
 *     dlfs_read       dlfs_read, dlfs_read_sample
 *     dlfs_sequence   dlfs_begin (dlfs_sequence is a type of dlfs.h), dlfs_order
 *     dlfs_bread      dlfs_bread
 *     dlfs_close      dlfs_end, dlfs_close, dlfs_unmount
 *
 * The library reads version 1.x of the format (FORMAT.md) and checks every bound and checksum; it
 * refuses a volume that violates the format. It never writes to a volume.
 *
 * Ownership. A volume outlives its datasets: dlfs_unmount refuses otherwise. A dataset ends its
 * epoch and frees its reader and directory; batches outlive all three. Devices that the caller
 * opened outlive the volume.
 *
 * Options. A field that is 0 means the default that its comment names, so a structure of zeros is
 * valid; `reserved` must be 0, else -EINVAL.
 *
 * message, of message_bytes, gets the reason of a failure in words, in printable ASCII, with the
 * URI of the member and the offset if they are known (it may be NULL with 0). It is untouched on
 * success, and when the arguments themselves are wrong (NULL).
 */
#ifndef DLFS_API_H
#define DLFS_API_H

#include <dlfs/dlfs.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_MESSAGE_BYTES 1024u /* longest message, NUL included; longer ones are cut */
#define DLFS_NAME_BYTES_MAX 255u /* length of a dataset's name */

/* ---- volumes --------------------------------------------------------------------------------- */

/*
 * A volume at the generation that was in force when it was mounted. Immutable: any threads at once.
 * If a dataset is moved to other chunks later (dlfs rebalance, dlfs shrink), its samples are read
 * until their old chunks are written again, and then fail with DLFS_E_CHECKSUM: mount the volume
 * anew.
 */
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
 * What is read ends within 30 s, or a second more than timeout_ms and reconnect_ms of the slowest
 * member, as dlfs_open does; a member that does not answer counts as missing. Opening a file whose
 * disk hangs has no limit.
 *
 * With replicas, fewer members are enough for reading. Of a volume that was grown, any members are
 * enough, or devices that left it: the others are opened by the URIs that the volume records, if
 * they are files in the folder of a given one, or namespaces at the host of a given one, with its
 * options. Any other member must be given: a device does not decide what is opened.
 * Errors: -EINVAL (a malformed URI, no member, a member twice or of another volume); -ENOTSUP (a
 * kind of URI that needs the Python package: nvme-tcp+discover:, spdk:, mem:); the code of the
 * first member that cannot be opened (-errno for files, else as of dlfs_device_open_nvme);
 * DLFS_E_NOT_FOUND (a member is missing); DLFS_E_FORMAT, DLFS_E_CHECKSUM, DLFS_E_TRUNCATED (no
 * volume, or a damaged one); -EPROTONOSUPPORT (a newer version of the format, or another
 * draft of it); errors of devices; -ENOMEM.
 */
DLFS_API int dlfs_mount(const char *const *uris, uint32_t count, char *message,
                        uint32_t message_bytes, dlfs_volume **out);
/*
 * Mounts a volume on devices that the caller has opened (memory, another library's) and keeps open
 * until the volume is unmounted. The array is copied. NULL stands for a member that is not
 * available.
 */
DLFS_API int dlfs_mount_devices(dlfs_device *const *devices, uint32_t count, char *message,
                                uint32_t message_bytes, dlfs_volume **out);
/*
 * Closes a volume. Returns -EBUSY, and does nothing, while datasets of it are open. NULL: returns
 * 0.
 */
DLFS_API int dlfs_unmount(dlfs_volume *volume);

typedef struct dlfs_dataset_info {
    char name[DLFS_NAME_BYTES_MAX + 1]; /* as stored, with a final NUL */
    uint32_t version;
    uint8_t uuid[16];
    uint64_t sample_count;
    uint64_t sample_bytes; /* sum of the lengths of all samples */
} dlfs_dataset_info;
/*
 * Returns the number of dataset versions in the volume. They are numbered from 0, by name and
 * version.
 */
DLFS_API uint32_t dlfs_dataset_count(const dlfs_volume *volume);
/* Describes one dataset version. -EINVAL: there is no such number. */
DLFS_API int dlfs_dataset_describe(const dlfs_volume *volume, uint32_t number,
                                   dlfs_dataset_info *info);

/* ---- datasets -------------------------------------------------------------------------------- */

/*
 * An open dataset. Any threads may read samples at once, also while an epoch is under way. One
 * thread at a time uses the epoch: dlfs_begin, dlfs_order, dlfs_bread, dlfs_end, dlfs_close.
 */
typedef struct dlfs_dataset dlfs_dataset;

typedef struct dlfs_open_options {
    uint64_t memory_bytes; /* sample memory: cached, read ahead and pinned by batches; 0: 256 MiB */
    uint32_t version;      /* version of the dataset; 0: the newest */
    uint32_t depth;        /* operations in flight for each member and thread; 0: 128 */
    uint32_t timeout_ms;   /* upper bound of one read or batch including retries; 0: 30000, or the
                              members' timeout_ms + reconnect_ms if that is longer */
    uint32_t reserved;     /* 0 */
} dlfs_open_options;

/*
 * Opens a dataset by name: reads its directory into memory and checks all of it. options NULL: all
 * defaults. The volume must stay mounted. Errors: DLFS_E_NOT_FOUND (no such dataset or version);
 * DLFS_E_FORMAT, DLFS_E_CHECKSUM (every copy of its directory is damaged, or the dataset was
 * removed after the volume was mounted); errors of devices; -ENOMEM; -EINVAL, DLFS_E_LIMIT
 * (options).
 */
DLFS_API int dlfs_open(dlfs_volume *volume, const char *name, const dlfs_open_options *options,
                       char *message, uint32_t message_bytes, dlfs_dataset **out);
/*
 * Ends the epoch under way and closes the dataset; batches already returned stay valid. Returns
 * -EBUSY while a call of another thread is under way: the epoch has ended, and the dataset stays
 * open. NULL: returns 0.
 */
DLFS_API int dlfs_close(dlfs_dataset *dataset);

/* Returns the number of samples. Their indices are 0..count-1, in the order of their paths. */
DLFS_API uint64_t dlfs_count(const dlfs_dataset *dataset);
/* Returns the index of the sample with this path. Errors: DLFS_E_NOT_FOUND, DLFS_E_FORMAT. */
DLFS_API int64_t dlfs_find(const dlfs_dataset *dataset, const char *path);
/*
 * Writes the path of a sample with a final NUL, and returns its length. text_bytes is at least
 * DLFS_PATH_BYTES_MAX + 1. Errors: -EINVAL, DLFS_E_FORMAT.
 */
DLFS_API int64_t dlfs_path(const dlfs_dataset *dataset, uint64_t index, char *text,
                           uint64_t text_bytes);
/* Returns the length of a sample. -EINVAL: no such index. */
DLFS_API int64_t dlfs_length(const dlfs_dataset *dataset, uint64_t index);
/*
 * Reads one sample, verified, and returns its length. Errors: -EINVAL (no such index), -ERANGE (it
 * is longer than buffer_bytes; dlfs_length returns its length), DLFS_E_CHECKSUM, DLFS_E_FORMAT,
 * errors of devices.
 */
DLFS_API int64_t dlfs_read(dlfs_dataset *dataset, uint64_t index, void *buffer,
                           uint64_t buffer_bytes);
/*
 * Reads like dlfs_read. After an error, failure (may be NULL) gets the code, the member and the
 * offset.
 */
DLFS_API int64_t dlfs_read_sample(dlfs_dataset *dataset, uint64_t index, void *buffer,
                                  uint64_t buffer_bytes, dlfs_failure *failure);
/*
 * Describes a failure of dlfs_read_sample, or of a batch of this dataset, in words: the sample's
 * index, path and length, the member's URI, the offset on it, and the reason. -EINVAL: it is not a
 * failure of a sample of this dataset.
 */
DLFS_API int dlfs_describe_failure(const dlfs_dataset *dataset, const dlfs_failure *failure,
                                   char *message, uint32_t message_bytes);

/*
 * Return the reader and the directory of a dataset, for functions of dlfs.h such as
 * dlfs_reader_read and dlfs_reader_get_stats. They are valid until dlfs_close, which frees them.
 */
DLFS_API dlfs_reader *dlfs_dataset_reader(dlfs_dataset *dataset);
DLFS_API const dlfs_directory *dlfs_dataset_directory(const dlfs_dataset *dataset);

/* ---- an epoch -------------------------------------------------------------------------------- */

/*
 * The share of one rank in one epoch: positions position + rank, position + rank + world_size, ...
 * A structure of zeros is epoch 0 of seed 0 for a single rank, in storage order, which is not
 * shuffled.
 */
typedef struct dlfs_epoch {
    uint64_t seed;
    uint64_t epoch;         /* number of the epoch; each has its own order */
    uint64_t position;      /* global position of the first sample to read: samples that all ranks
                               together have read before */
    uint32_t order;         /* DLFS_ORDER_STORAGE (0), DLFS_ORDER_GLOBAL or DLFS_ORDER_CHUNK */
    uint32_t window_chunks; /* for DLFS_ORDER_CHUNK; 0: 64 */
    uint32_t rank;          /* < world_size */
    uint32_t world_size;    /* 0: 1 */
    uint32_t plan;          /* DLFS_PLAN_*; 0: DLFS_PLAN_AUTO */
    uint32_t reserved;      /* 0 */
} dlfs_epoch;
/*
 * Begins an epoch, and starts a thread that reads it ahead; an epoch under way ends. The order is
 * the same as in Python for the same arguments. Errors: -EINVAL, -ENOMEM; no epoch is under way
 * then.
 */
DLFS_API int dlfs_begin(dlfs_dataset *dataset, const dlfs_epoch *epoch);
/*
 * Ends the epoch under way, before or after its last sample: ends its thread, which may wait for
 * reads in flight, and frees the memory that was read ahead. Batches already returned stay valid.
 * Without an epoch, or with NULL, it does nothing. dlfs_close ends the epoch too.
 */
DLFS_API void dlfs_end(dlfs_dataset *dataset);
/*
 * Sets out[i] to the index at position first + i of the epoch's global order over all ranks.
 * -EINVAL: past the end, or no epoch under way.
 */
DLFS_API int dlfs_order(const dlfs_dataset *dataset, uint64_t first, uint64_t count, uint64_t *out);
/*
 * Returns this rank's next count samples as one batch, or fewer at the end. Blocks. Failed samples
 * are listed in the batch (dlfs_describe_failure) and are no error of the call. Any thread may
 * release the batch with dlfs_batch_release. Errors: DLFS_E_END (no samples are left), -EINVAL (no
 * epoch under way, or count 0).
 */
DLFS_API int dlfs_bread(dlfs_dataset *dataset, uint64_t count, dlfs_batch **out);

#ifdef __cplusplus
}
#endif

#endif
