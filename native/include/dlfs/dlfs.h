/*
 * libdlfs: the core that moves bytes.
 *
 * This header has, in the order of the layers: codes and limits, memory, checksums, hashing and
 * permutation, block devices and their queue pairs, the sample directory, the reader and its
 * streams. Its neighbours: import.h (packing samples), channel.h (a service and its clients) and
 * api.h (reading a volume by its URI).
 *
 * Conventions, for every function unless its comment says otherwise:
 *   - returns 0, or a count >= 0, on success; -errno or a DLFS_E_* code on failure; outputs come
 *     last and are untouched on failure;
 *   - offsets, sizes and lengths are in bytes; positions, indices and counts are in samples;
 *   - fields named `reserved` of a structure that the caller fills are 0, else -EINVAL;
 *   - what a function borrows must outlive the object that it makes, unless its comment says until
 *     when;
 *   - buffers belong to the caller, who keeps them alive until the operation on them has completed;
 *   - an object may be used by any thread, by one thread at a time; those used by many at once say
 *     so;
 *   - destroy functions accept NULL;
 *   - the library starts no thread that outlives the object it serves, writes no log, and calls
 *     nobody back.
 */
#ifndef DLFS_DLFS_H
#define DLFS_DLFS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_API __attribute__((visibility("default")))

/* ---- version, limits, codes ------------------------------------------------------------------ */

#define DLFS_VERSION_MAJOR 0
#define DLFS_VERSION_MINOR 1
#define DLFS_VERSION_PATCH 0
#define DLFS_VERSION ((DLFS_VERSION_MAJOR << 16) | (DLFS_VERSION_MINOR << 8) | DLFS_VERSION_PATCH)

#define DLFS_MEMBERS_MAX 64u                            /* members of a volume */
#define DLFS_REPLICAS_MAX 4u                            /* copies of a chunk */
#define DLFS_DEPTH_MAX 4096u                            /* operations in flight on one queue pair */
#define DLFS_PATH_BYTES_MAX 4095u                       /* length of a sample's path */
#define DLFS_COMPONENT_BYTES_MAX 255u                   /* length of one component of a path */
#define DLFS_SAMPLE_BYTES_MAX ((UINT64_C(1) << 40) - 1) /* 40 bits of length in a location */
#define DLFS_ADDRESS_MAX ((UINT64_C(1) << 56) - 1)      /* 56 bits of address in a location */
#define DLFS_CHUNK_BYTES_MIN 4096u
#define DLFS_CHUNK_BYTES_MAX (64u << 20)

/* Codes below -10000; their values never change. Everything else negative is -errno. */
#define DLFS_E_CHECKSUM (-10001)  /* the bytes read do not have the recorded CRC32C */
#define DLFS_E_FORMAT (-10002)    /* a structure is malformed */
#define DLFS_E_TRUNCATED (-10003) /* fewer bytes than promised: a short read, a shrunken device */
#define DLFS_E_LOST (-10004)      /* the device is gone */
#define DLFS_E_TIMEOUT (-10005)   /* no completion within the time allowed */
#define DLFS_E_CLOSED (-10006)    /* the object is shutting down */
#define DLFS_E_LIMIT (-10007)     /* a stated limit would be exceeded */
#define DLFS_E_NOT_FOUND (-10008) /* no such path */
#define DLFS_E_END (-10009)       /* the sequence has ended */
#define DLFS_E_PROTOCOL (-10010)  /* a target does not keep to the protocol */
#define DLFS_E_DIGEST (-10011)    /* what a target sent does not have its own digest */
#define DLFS_E_SERVICE (-10012)   /* the node service is gone, or does not answer */

/* DLFS_VERSION of the loaded library. Any thread. */
DLFS_API uint32_t dlfs_version(void);
/*
 * A short English phrase for a code that a function returned; never NULL. Static storage. Any
 * thread.
 */
DLFS_API const char *dlfs_strerror(int code);

/* ---- memory ---------------------------------------------------------------------------------- */

/* How dlfs_memory_map got its pages. */
#define DLFS_MEMORY_PAGES 0u       /* ordinary pages */
#define DLFS_MEMORY_TRANSPARENT 1u /* transparent huge pages were asked for */
#define DLFS_MEMORY_HUGE 2u        /* reserved huge pages (hugetlb) */

/*
 * Maps zeroed memory, private to the process (a fork copies it on write), aligned to 2 MiB when
 * bytes >= 2 MiB, else to the page: reserved huge pages if free ones are there, else transparent
 * ones, else ordinary pages. kind may be NULL. Errors: -EINVAL (bytes 0), -ENOMEM. Any thread.
 */
DLFS_API int dlfs_memory_map(size_t bytes, void **base, uint32_t *kind);
/* Unmaps what dlfs_memory_map mapped, with the same length. base may be NULL. */
DLFS_API void dlfs_memory_unmap(void *base, size_t bytes);

/* ---- CRC32C, path hash, permutation ---------------------------------------------------------- */

/*
 * CRC32C (Castagnoli, RFC 3720 appendix B.4) of data, continuing from crc (0 to start): the
 * hardware's instruction where the processor has it, found out once. Any thread. data may be NULL
 * when bytes is 0.
 */
DLFS_API uint32_t dlfs_crc32c(uint32_t crc, const void *data, size_t bytes);
/* The same by tables only, for tests and for processors without the instruction. */
DLFS_API uint32_t dlfs_crc32c_portable(uint32_t crc, const void *data, size_t bytes);
/*
 * Copies bytes and returns their CRC32C as dlfs_crc32c would, reading the source once. No overlap.
 */
DLFS_API uint32_t dlfs_crc32c_copy(uint32_t crc, void *destination, const void *source,
                                   size_t bytes);
/* "avx512", "sse4.2", "armv8" or "portable". */
DLFS_API const char *dlfs_crc32c_kind(void);
/* crcs[i] = CRC32C of the i-th block of block_bytes in data[0..bytes); the last may be shorter. */
DLFS_API void dlfs_crc32c_blocks(const void *data, size_t bytes, size_t block_bytes,
                                 uint32_t *crcs);

/* XXH64 of a path with a seed. Any thread. */
DLFS_API uint64_t dlfs_path_hash(const void *path, size_t bytes, uint64_t seed);

/*
 * A keyed bijection on 0..size-1: a generalised Feistel network over Z_a x Z_b with a*b >= size,
 * walked until the value falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
 * CT-RSA 2002, method 3). A plain value: copy it freely. Constant memory, any position computable,
 * inverse too.
 */
#define DLFS_PERMUTATION_ROUNDS_MAX 24u
typedef struct dlfs_permutation {
    uint64_t size;  /* samples */
    uint64_t left;  /* a */
    uint64_t right; /* b */
    uint32_t rounds;
    uint32_t reserved;
    uint64_t keys[DLFS_PERMUTATION_ROUNDS_MAX];
} dlfs_permutation;
/*
 * Errors: -EINVAL when size is 0 or above 2^62. The same (size, seed, stream) gives the same
 * bijection for ever.
 */
DLFS_API int dlfs_permutation_init(dlfs_permutation *permutation, uint64_t size, uint64_t seed,
                                   uint64_t stream);
/*
 * out[i] = image of first + i*stride, for i in 0..count-1. All positions must be < size, else
 * -EINVAL.
 */
DLFS_API int dlfs_permutation_map(const dlfs_permutation *permutation, uint64_t first,
                                  uint64_t stride, size_t count, uint64_t *out);
/* out[i] = the position whose image is values[i]. -EINVAL when a value is >= size. */
DLFS_API int dlfs_permutation_invert(const dlfs_permutation *permutation, const uint64_t *values,
                                     size_t count, uint64_t *out);

/* ---- block devices --------------------------------------------------------------------------- */

typedef struct dlfs_device dlfs_device;
typedef struct dlfs_queue dlfs_queue;

#define DLFS_OPEN_WRITE 1u /* else read-only */
/* Never O_DIRECT (file systems without it fall back to this by themselves). */
#define DLFS_OPEN_BUFFERED 2u

#define DLFS_ENGINE_AUTO 0u    /* io_uring where the kernel allows it, else threads */
#define DLFS_ENGINE_URING 1u   /* io_uring or an error */
#define DLFS_ENGINE_THREADS 2u /* a pool of threads with preadv/pwritev */

/*
 * Opens a regular file or a block device. Uses O_DIRECT unless told otherwise or the file system
 * refuses it. Errors: -errno of open; -ENOTBLK when it is neither; -ENOSYS or -EPERM when engine is
 * URING and the kernel has none or forbids it.
 */
DLFS_API int dlfs_device_open_file(const char *path, uint32_t flags, uint32_t engine,
                                   dlfs_device **out);
/*
 * A device in memory, zeroed. size_bytes: a multiple of block_bytes; block_bytes: a power of two,
 * 512..65536.
 */
DLFS_API int dlfs_device_create_memory(uint64_t size_bytes, uint32_t block_bytes,
                                       dlfs_device **out);

/*
 * A device over another that fails on purpose, from a seed; for tests of what stands above a
 * device.
 */
typedef struct dlfs_fault_config {
    uint64_t seed;
    uint32_t error_per_million; /* operations completed with -EIO */
    uint32_t short_per_million; /* reads completed with fewer bytes than asked */
    uint32_t flip_per_million;  /* reads that succeed with one bit flipped */
    uint32_t stall_per_million; /* operations delayed by stall_ms */
    uint32_t stall_ms;
    uint32_t reorder;         /* 1: completions are handed out in a random order */
    uint64_t bad_first_bytes; /* reads touching [bad_first, bad_first+bad_length) always fail with
                                 -EIO */
    uint64_t bad_length_bytes;
    uint64_t lost_from;  /* the device is lost from this operation of all on, counted from 1; 0:
                            never */
    uint32_t lost_polls; /* 1: once it is lost, polls fail; 0: operations complete with
                            DLFS_E_LOST */
    uint32_t reserved;
} dlfs_fault_config;
/* Borrows inner, which must outlive the new device. */
DLFS_API int dlfs_device_create_fault(dlfs_device *inner, const dlfs_fault_config *config,
                                      dlfs_device **out);
/*
 * Loses a faulty device (1) or brings it back (0): while it is lost, operations, flushes and new
 * queue pairs fail with DLFS_E_LOST. -EINVAL: it is of another kind. Any thread.
 */
DLFS_API int dlfs_device_fault_lose(dlfs_device *device, uint32_t lost);

/*
 * A device of another library, as dlfs/external.h describes; the description is copied. The new
 * device owns external->device from here on. Errors, with nothing taken over: -EINVAL (sizes),
 * -EPROTONOSUPPORT (built for another version of external.h), -ENOMEM.
 */
struct dlfs_external;
DLFS_API int dlfs_device_create_external(const struct dlfs_external *external, dlfs_device **out);

/*
 * Frees a device. Its queue pairs must have been destroyed: -EBUSY otherwise, and nothing is freed.
 * What else borrows the device must be gone too, which is not checked: a fault device over it,
 * readers (dlfs_reader_config), volumes (dlfs_mount_devices of api.h). No other thread may be using
 * it. NULL: 0.
 */
DLFS_API int dlfs_device_destroy(dlfs_device *device);
/* The next four: any threads at once. */
DLFS_API uint64_t dlfs_device_size_bytes(const dlfs_device *device);
DLFS_API uint32_t dlfs_device_block_bytes(const dlfs_device *device);
/* "uring", "threads", "memory", "nvme-tcp", "fault", or the word of another library. */
DLFS_API const char *dlfs_device_kind(const dlfs_device *device);
/* Makes every write that has completed durable. Blocks. -errno. */
DLFS_API int dlfs_device_flush(dlfs_device *device);

/*
 * Makes a queue pair: one thread's private path to a device, which must outlive it. depth:
 * 1..DLFS_DEPTH_MAX operations in flight. Any threads may make and destroy queue pairs of one
 * device at once, and use many of them at once; a single one is used and destroyed by one thread at
 * a time, which need not be the one that made it. Errors: -EINVAL (depth); -ENOMEM; -errno of what
 * the kind needs (io_uring, threads); of NVMe over TCP those said there; DLFS_E_LOST. It belongs to
 * the process that made it: in a forked child it can be destroyed, which neither waits nor touches
 * the parent's; every other call returns DLFS_E_CLOSED. A child may go on using the device.
 */
DLFS_API int dlfs_queue_create(dlfs_device *device, uint32_t depth, dlfs_queue **out);
/* Waits for what is in flight, then frees. */
DLFS_API void dlfs_queue_destroy(dlfs_queue *queue);
DLFS_API uint32_t dlfs_queue_depth(const dlfs_queue *queue);
/* Operations submitted and not yet returned by poll. */
DLFS_API uint32_t dlfs_queue_in_flight(const dlfs_queue *queue);
/*
 * Announces one memory range that most operations will use, so that the device can pin it
 * (registered buffers). A hint: 0 also when the device has no use for it or the process may not
 * lock that much memory. Replaces any earlier range; nothing may be in flight (-EBUSY). base NULL
 * withdraws it.
 */
DLFS_API int dlfs_queue_register(dlfs_queue *queue, void *base, size_t bytes);

#define DLFS_OP_READ 0u
#define DLFS_OP_WRITE 1u

typedef struct dlfs_operation {
    void *buffer;          /* aligned to the device's block size */
    uint64_t offset_bytes; /* a multiple of the block size */
    uint32_t length_bytes; /* a multiple of the block size, > 0 */
    uint32_t kind;         /* DLFS_OP_* */
    uint64_t tag;          /* the caller's own, returned with the completion */
} dlfs_operation;

typedef struct dlfs_completion {
    uint64_t tag;
    int64_t result; /* length_bytes, or an error code; a short transfer is DLFS_E_TRUNCATED */
} dlfs_completion;

/*
 * Submits up to count operations with one system call at most; returns how many were accepted
 * (fewer when the queue is full, 0 is possible). Errors, with nothing accepted: -EINVAL for a
 * misaligned or out-of-range operation, -EROFS for a write on a read-only device. */
DLFS_API int dlfs_queue_submit(dlfs_queue *queue, const dlfs_operation *operations, uint32_t count);
/*
 * Returns up to count completions, waiting up to timeout_ms for the first one (0: does not wait,
 * -1: for ever). 0 when nothing is in flight or the time has passed.
 */
DLFS_API int dlfs_queue_poll(dlfs_queue *queue, dlfs_completion *completions, uint32_t count,
                             int timeout_ms);
/*
 * A file descriptor that becomes readable when a poll with timeout 0 may have something to do or to
 * return, for those who wait for several queue pairs at once (ppoll, epoll). It is the queue
 * pair's own, the same for its whole life: wait for it and do nothing else. It may be readable for
 * nothing; and since some devices need a push that nothing announces (the kernel was short of
 * memory), poll every 100 ms at least. -ENOTSUP where the kind has none: it must then be polled.
 */
DLFS_API int dlfs_queue_descriptor(dlfs_queue *queue);
/*
 * Reads or writes one whole range of any length (in block multiples) through the queue pair, in
 * pieces of up to piece_bytes at its full depth, and waits. Nothing else may be in flight. The
 * first error ends it.
 */
DLFS_API int dlfs_queue_transfer(dlfs_queue *queue, uint32_t kind, void *buffer,
                                 uint64_t offset_bytes, uint64_t length_bytes,
                                 uint32_t piece_bytes);

/* ---- NVMe over TCP --------------------------------------------------------------------------- */

#define DLFS_NVME_PATHS_MAX 4u
#define DLFS_NVME_NQN_BYTES_MAX 223u
#define DLFS_NVME_DATA_BYTES_MAX 4096u /* of a single command's data */
#define DLFS_NVME_TEXT_BYTES 512u      /* holds any message of this part */

#define DLFS_NVME_HEADER_DIGEST 1u
#define DLFS_NVME_DATA_DIGEST 2u

/*
 * A controller of an NVMe subsystem over TCP, and one namespace of it as a block device. Several
 * paths are several addresses of one subsystem: the first that answers is used, and the others in
 * turn when it is lost.
 *
 * One thread serves a device: it makes all connections, keeps the controller alive, and makes
 * everything anew when something fails. Each queue pair has a connection of its own, which only its
 * user's calls read and write; it costs nothing while idle.
 *
 * Time. A command unanswered for timeout_ms ends all connections to the controller: nobody can tell
 * whether a silent target will still act. Then, as after any other failure, the controller is
 * connected to again, with growing pauses, for up to reconnect_ms. Reads are issued again. A write
 * that met silence may still be executed later, behind newer ones, and ends with DLFS_E_TIMEOUT. A
 * write whose connection was closed or reset may be pending there too: it is issued again once the
 * controller has quiesced, after its Command Quiesce Time, else the keep-alive timeout and a
 * second; with neither, or too little time, it ends with DLFS_E_LOST. Every operation ends within
 * timeout_ms + reconnect_ms of being submitted (counting only while its queue pair is polled): with
 * DLFS_E_TIMEOUT at the latest, with DLFS_E_LOST when the controller could not be reached again. A
 * lost device stays lost for a second; the next operation after that has it looked for once more.
 * A wrong data digest costs only its command another try, one of a header its queue pair a new
 * connection.
 *
 * A flush fails with -EIO when the controller has a volatile write cache and was lost after a write
 * that the flush was to make durable; those that come after it speak for new writes only.
 * Making a queue pair waits for its connection, but not while a controller that was lost is looked
 * for: operations wait then, each for its own time. Where the target has no more of them, readers
 * take turns; others wait 5 s for one, then it is DLFS_E_LIMIT.
 *
 * In a forked child a device connects anew with the first queue pair that the child makes.
 */
typedef struct dlfs_nvme_config {
    const char *hosts[DLFS_NVME_PATHS_MAX]; /* names, or addresses without brackets; copied, as is
                                               all text */
    uint32_t ports[DLFS_NVME_PATHS_MAX];
    uint32_t path_count;
    uint32_t nsid; /* 0: the controller alone, for dlfs_nvme_run; a device of 0 bytes */
    const char *subsystem_nqn;
    const char *host_nqn;
    uint8_t host_id[16];
    uint32_t digests;      /* DLFS_NVME_*_DIGEST: all of them or an error */
    uint32_t timeout_ms;   /* of one command, > 0 */
    uint32_t connect_ms;   /* of one attempt on one path, > 0; names take as long as the system's
                              resolver allows */
    uint32_t keepalive_ms; /* within which the target must hear from us; 0: no keep-alive */
    uint32_t reconnect_ms; /* 0: a device that fails is lost at once */
    uint32_t busy_poll_us; /* poll sleeps when nothing has come for so long; 0: at once */
    uint32_t flags;        /* DLFS_OPEN_WRITE or 0 */
    uint32_t reserved;
} dlfs_nvme_config;

/*
 * Opens a namespace; size and block size are the target's. message, of message_bytes, gets why it
 * failed, in words (may be NULL). Tries each path once. Errors: -EINVAL; -ENOMEM; DLFS_E_LOST,
 * nobody there; DLFS_E_TIMEOUT, no answer; DLFS_E_NOT_FOUND, no such host, subsystem or namespace;
 * -EACCES, the target does not allow this host; -EROFS, it is write-protected; -ENOTSUP, a
 * namespace or target that this initiator cannot use; DLFS_E_PROTOCOL, DLFS_E_DIGEST; other codes
 * of a refusing target.
 */
DLFS_API int dlfs_device_open_nvme(const dlfs_nvme_config *config, char *message,
                                   uint32_t message_bytes, dlfs_device **out);

/* The dwords of a command that a caller decides. */
typedef struct dlfs_nvme_command {
    uint32_t opcode;
    uint32_t nsid;
    uint32_t cdw10;
    uint32_t cdw11;
    uint32_t cdw12;
    uint32_t cdw13;
    uint32_t cdw14;
    uint32_t cdw15;
} dlfs_nvme_command;

typedef struct dlfs_nvme_result {
    uint64_t value;  /* dwords 0 and 1 of the completion */
    uint32_t status; /* status code type << 8 | status code; 0: success */
    uint32_t reserved;
} dlfs_nvme_result;

#define DLFS_NVME_QUEUE_ADMIN 0u
#define DLFS_NVME_QUEUE_IO 1u
#define DLFS_NVME_DATA_NONE 0u
#define DLFS_NVME_DATA_IN 1u  /* data is filled by the controller */
#define DLFS_NVME_DATA_OUT 2u /* data is for the controller */
/*
 * Runs one command and waits, at most as long as an operation may take. What the controller answers
 * is in result, whatever its status. A command whose fate is unknown because its connection was
 * lost is not run again, unless it only reads: DLFS_E_LOST, or DLFS_E_TIMEOUT. -ENOTSUP on other
 * kinds of device, and for I/O commands on a controller without I/O queues. -EINVAL for too much
 * data. Any threads at once.
 */
DLFS_API int dlfs_nvme_run(dlfs_device *device, uint32_t queue, const dlfs_nvme_command *command,
                           void *data, uint32_t data_bytes, uint32_t direction,
                           dlfs_nvme_result *result);

#define DLFS_NVME_ID_NONE 0u
#define DLFS_NVME_ID_EUI64 1u
#define DLFS_NVME_ID_NGUID 2u
#define DLFS_NVME_ID_UUID 3u

/* What is known of a device's target, and what has happened to it so far. */
typedef struct dlfs_nvme_status {
    uint64_t reconnects; /* controllers made anew */
    uint64_t retries;    /* commands issued again */
    uint64_t timeouts;
    uint64_t digest_errors;
    uint64_t protocol_errors;
    uint32_t connected;
    uint32_t path;               /* in use, or used last */
    uint32_t transfer_bytes_max; /* of one command */
    uint32_t queue_count_max;
    uint32_t write_cache; /* 1: writes are durable only after a flush */
    uint32_t controller_id;
    uint32_t id_kind; /* DLFS_NVME_ID_*: the namespace's own identifier, the best there is */
    uint32_t reserved;
    uint8_t id[16];
    char last_error[DLFS_NVME_TEXT_BYTES]; /* empty: none so far */
} dlfs_nvme_status;
/* -ENOTSUP on other kinds of device. Any threads at once. */
DLFS_API int dlfs_nvme_get_status(dlfs_device *device, dlfs_nvme_status *status);
DLFS_API int dlfs_nvme_get_generation(dlfs_device *device, uint64_t *generation);
#define DLFS_NVME_WRITES_FREE INT64_MAX /* no lease */
/* A lease: writes go out through the controller of that generation (get_generation: in use, or made
 * next) and before until_ns of CLOCK_BOOTTIME. Through later ones they wait; from until_ns on
 * nothing of one is sent, and it ends with -EKEYEXPIRED. Over in a forked child. NVMe/TCP, SPDK. */
DLFS_API int dlfs_nvme_limit_writes(dlfs_device *device, uint64_t generation, uint64_t until_ns);

/* ---- the sample directory -------------------------------------------------------------------- */

/*
 * Where a sample lies and what its bytes add up to; 16 bytes, little-endian, as on media
 * (FORMAT.md). The address is in the dataset's own data space: chunk number * chunk_bytes + offset
 * in the chunk.
 */
typedef struct dlfs_location {
    uint32_t crc32c;
    uint32_t length_low; /* bits 0..31 of the length */
    uint64_t address;    /* bits 0..55 the address, bits 56..63 are bits 32..39 of the length */
} dlfs_location;
/* The first byte of the sample in the dataset's data space. */
static inline uint64_t dlfs_location_address(const dlfs_location *location)
{
    return location->address & DLFS_ADDRESS_MAX;
}
/* The length of the sample, in bytes. */
static inline uint64_t dlfs_location_length(const dlfs_location *location)
{
    return (location->address >> 56) << 32 | location->length_low;
}
/* The CRC32C of the sample's bytes. */
static inline uint32_t dlfs_location_crc32c(const dlfs_location *location)
{
    return location->crc32c;
}

/*
 * The frozen directory of one dataset: the bytes of its directory segment, as on media, in memory
 * that the caller owns and keeps until the directory is closed (read-only is enough). It must
 * outlive the readers and the sequences made over it, which borrow it; batches do without it.
 * Immutable: any threads at once.
 */
typedef struct dlfs_directory dlfs_directory;

/* Sizes of a directory segment's parts, computed from what goes in. */
typedef struct dlfs_directory_plan {
    uint64_t sample_count;
    uint64_t entries_bytes; /* header, locations, order, tree: loaded at open */
    uint64_t names_bytes;   /* name blocks and their offsets: loaded when names are needed */
    uint64_t hash_seed;     /* the smallest seed with which no 16 paths share a hash */
} dlfs_directory_plan;

/*
 * Plans, then encodes, the directory of count samples whose paths, in strictly rising byte order,
 * are names[offsets[i]..offsets[i+1]). entries and names are written whole: plan->entries_bytes and
 * names_bytes, both multiples of 4096. Errors: -EINVAL for paths out of order or over the limits,
 * locations over data_bytes or overlapping; -ENOMEM.
 */
DLFS_API int dlfs_directory_plan_build(const uint8_t *names, const uint64_t *offsets,
                                       uint64_t count, dlfs_directory_plan *plan);
DLFS_API int dlfs_directory_build(const dlfs_directory_plan *plan, const uint8_t *names,
                                  const uint64_t *offsets, const dlfs_location *locations,
                                  const uint8_t dataset_uuid[16], uint64_t data_bytes,
                                  void *entries, void *names_out);

/*
 * Opens a directory over its entries part. Checks the header and every section's bounds, not every
 * block's checksum (dlfs_directory_verify does that). Errors: DLFS_E_FORMAT, DLFS_E_TRUNCATED,
 * DLFS_E_CHECKSUM.
 */
DLFS_API int dlfs_directory_open(const void *entries, uint64_t entries_bytes, dlfs_directory **out);
/* Frees a directory; the memory it was opened over stays the caller's. NULL: nothing. */
DLFS_API void dlfs_directory_close(dlfs_directory *directory);
/* Gives the directory its names part, once; until then functions on names return -EAGAIN. */
DLFS_API int dlfs_directory_attach_names(dlfs_directory *directory, const void *names,
                                         uint64_t names_bytes);
/*
 * Checks every block of a part (0: entries, 1: names) in memory at base against the checksums in
 * the entries; *bad_block is the first bad one (an index of 4096-byte blocks of that part). The
 * entries that the directory is open over are also checked to list all samples in storage order.
 * DLFS_E_CHECKSUM, DLFS_E_FORMAT (the order).
 */
DLFS_API int dlfs_directory_verify(const dlfs_directory *directory, uint32_t part, const void *base,
                                   uint64_t bytes, uint64_t *bad_block);

DLFS_API uint64_t dlfs_directory_count(const dlfs_directory *directory);
DLFS_API uint64_t dlfs_directory_data_bytes(const dlfs_directory *directory);
/* Length of the names part that the header announces. */
DLFS_API uint64_t dlfs_directory_names_bytes(const dlfs_directory *directory);
/*
 * The location array itself, [count], in index order; valid as long as the directory. Taken apart
 * by dlfs_location_address and its like.
 */
DLFS_API const dlfs_location *dlfs_directory_locations(const dlfs_directory *directory);
/*
 * out[i] = the index of the sample at rank first+i in storage order (by address). -EINVAL out of
 * range.
 */
DLFS_API int dlfs_directory_order(const dlfs_directory *directory, uint64_t first, uint64_t count,
                                  uint64_t *out);
/*
 * The rank in storage order of the first sample whose address is >= address (count when there is
 * none).
 */
DLFS_API uint64_t dlfs_directory_rank_at(const dlfs_directory *directory, uint64_t address);

/*
 * Looks paths up in batches: out[i] = the index of paths[offsets[i]..offsets[i+1]), or UINT64_MAX
 * when there is no such sample. The hash finds, the name decides. -EAGAIN without names;
 * DLFS_E_FORMAT for a malformed tree.
 */
DLFS_API int dlfs_directory_find(const dlfs_directory *directory, const uint8_t *paths,
                                 const uint64_t *offsets, uint64_t count, uint64_t *out);
/* The index of the first sample whose path is >= path in byte order (count when there is none). */
DLFS_API int dlfs_directory_lower_bound(const dlfs_directory *directory, const uint8_t *path,
                                        uint64_t path_bytes, uint64_t *index);
/*
 * Decodes paths first..first+count-1 into text[0..text_bytes) one behind the other,
 * offsets[0..count] around them. Returns how many fitted (>= 1 unless text_bytes is under
 * DLFS_PATH_BYTES_MAX). DLFS_E_FORMAT, -EINVAL, -EAGAIN.
 */
DLFS_API int64_t dlfs_directory_names(const dlfs_directory *directory, uint64_t first,
                                      uint64_t count, uint8_t *text, uint64_t text_bytes,
                                      uint64_t *offsets);

/* ---- the reader ------------------------------------------------------------------------------ */

/* A run of chunks of the volume's chunk space that holds a run of the dataset's chunks. */
typedef struct dlfs_extent {
    uint64_t first_chunk; /* volume chunk number; copy c of it lies on member (number + c) %
                             member_count, in row c * band_rows + number / member_count */
    uint64_t chunk_count;
} dlfs_extent;

#define DLFS_READER_SHARED 1u /* the sample memory can be mapped by other processes: channel.h */

typedef struct dlfs_reader_config {
    dlfs_device *const *devices; /* [member_count], in member order; the array is copied, the
                                    devices are borrowed until dlfs_reader_destroy. With replicas >
                                    1, NULL for a member that cannot be had */
    uint32_t member_count;
    uint32_t chunk_bytes;
    uint32_t block_bytes;       /* the volume's, a multiple of every device's */
    uint32_t depth;             /* operations in flight per member and thread */
    uint64_t data_offset_bytes; /* of row 0 on each member */
    const dlfs_extent *extents; /* copied */
    uint64_t extent_count;
    const dlfs_directory *directory; /* borrowed until dlfs_reader_destroy */
    uint64_t memory_bytes; /* budget of the sample memory: cached, read ahead, lent to batches */
    uint64_t gap_bytes;    /* two samples nearer than this are read by one request */
    uint32_t retry_count;  /* of a failed or short read, before the sample is reported */
    uint32_t timeout_ms;   /* for one read or batch of a stream, all retries and copies included;
                              4 s more for each MiB that comes bit by bit; then DLFS_E_TIMEOUT */
    uint32_t flags;        /* DLFS_READER_* */
    uint32_t replicas;     /* copies of each chunk, 1..DLFS_REPLICAS_MAX, at most member_count */
    uint64_t band_rows;    /* rows of each copy's band; of no use with one copy */
} dlfs_reader_config;

/*
 * Reads the samples of one dataset. Any threads at once. With replicas, what one member does not
 * give, or gives with a wrong checksum, is read from another; a member that is lost (DLFS_E_LOST,
 * DLFS_E_TIMEOUT, a sixteenth of timeout_ms without an answer, many failures in a row) is left
 * alone but for a probe now and then. Reads of one without another copy that left a read without an
 * answer for all its time end at once with DLFS_E_TIMEOUT until a probe is due.
 */
typedef struct dlfs_reader dlfs_reader;
/* Errors: -EINVAL, -ENOMEM, DLFS_E_LIMIT. Maps no memory until the first read. */
DLFS_API int dlfs_reader_create(const dlfs_reader_config *config, dlfs_reader **out);
/*
 * Closes the reader's queue pairs and frees it; memory that batches still use goes with the last of
 * them. -EBUSY, and nothing happens, while a stream or a call is under way.
 */
DLFS_API int dlfs_reader_destroy(dlfs_reader *reader);

/* A sample that could not be given, and why. */
typedef struct dlfs_failure {
    uint64_t position; /* in the batch */
    uint64_t index;
    int32_t code;
    uint32_t member;
    uint64_t offset_bytes; /* on the member */
    uint32_t crc_expected;
    uint32_t crc_got;
} dlfs_failure;

/*
 * The samples of one read. Sample i is base[offsets[i]..offsets[i]+lengths[i]); those that failed
 * have length -1. The bytes stay where they are until dlfs_batch_release. Read-only for the caller.
 */
typedef struct dlfs_batch {
    const uint8_t *base;
    uint64_t base_bytes;
    uint64_t count;
    const int64_t *offsets;  /* in one piece with what follows: */
    const int64_t *lengths;  /* offsets + count */
    const uint64_t *indices; /* lengths + count */
    const dlfs_failure *failures;
    uint64_t failure_count;
    uint64_t lost_members; /* as dlfs_reader_lost_members, when the batch was given */
} dlfs_batch;

/*
 * Reads samples by index, verified, as one batch: sorted by location, neighbours merged, the
 * device's queue full. Blocks. Failed samples are listed, not an error of the call. Errors: -EINVAL
 * (an index out of range), -ENOMEM, errors of the device as a whole.
 */
DLFS_API int dlfs_reader_read(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                              dlfs_batch **out);
/* The same, into memory of the batch's own: nothing is kept, and the budget is left to others. */
DLFS_API int dlfs_reader_read_apart(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                                    dlfs_batch **out);
/*
 * The same, but looks for what the devices answer for awake_us before it sleeps, and calls
 * sleeps(argument) before it does, once: for those whose other work is to go on meanwhile.
 */
DLFS_API int dlfs_reader_read_awake(dlfs_reader *reader, const uint64_t *indices, uint64_t count,
                                    uint32_t awake_us, void (*sleeps)(void *argument),
                                    void *argument, dlfs_batch **out);
/*
 * Gives a batch back, once: its memory may then be read into again. Any thread, at any time: also
 * while others use the reader or the stream that it came from, and after these were destroyed.
 * NULL: nothing.
 */
DLFS_API void dlfs_batch_release(dlfs_batch *batch);
/*
 * Copies sample i to destination + offsets[i], for every sample that did not fail, into memory of
 * destination_bytes. DLFS_E_LIMIT when one would not fit; nothing has been copied then.
 */
DLFS_API int dlfs_batch_gather(const dlfs_batch *batch, void *destination,
                               uint64_t destination_bytes, const uint64_t *offsets);

#define DLFS_GET_KEPT 1u /* only what is in memory: never waits for a device */
/*
 * Copies one sample, verified, into buffer. Returns its length. Errors: -ERANGE when it is longer
 * than buffer_bytes, -EAGAIN with DLFS_GET_KEPT when it is not in memory, -EINVAL, or the code of
 * the failure, which a read of the same sample tells in full.
 */
DLFS_API int64_t dlfs_reader_get(dlfs_reader *reader, uint64_t index, void *buffer,
                                 uint64_t buffer_bytes, uint32_t flags);

typedef struct dlfs_reader_stats {
    uint64_t samples; /* given out */
    uint64_t sample_bytes;
    uint64_t cache_hits; /* samples that were in memory already */
    uint64_t reads;      /* requests to devices */
    uint64_t read_bytes;
    uint64_t checksum_errors;
    uint64_t read_errors;
    uint64_t retries;
    uint64_t private_batches; /* batches with memory of their own: the budget was lent out */
    uint64_t memory_bytes;    /* mapped for the budget now */
    uint64_t wait_ns;         /* time that consumers waited for streams */
    uint64_t failovers;       /* requests for another copy than a chunk's first */
    /* Where the time of those who read goes, callers of dlfs_reader_read and threads of streams: */
    uint64_t plan_ns;   /* finding samples in memory, sorting and merging the others */
    uint64_t device_ns; /* waiting for devices, and taking in what they send */
    uint64_t verify_ns; /* checking what came, and with DLFS_PLAN_HARVEST copying it */
    uint64_t rest_ns;   /* streams only: nothing to do until the consumer takes or releases more */
    uint64_t copy_ns;   /* copying samples out of batches (dlfs_batch_gather) */
} dlfs_reader_stats;
DLFS_API void dlfs_reader_get_stats(dlfs_reader *reader, dlfs_reader_stats *stats);

#define DLFS_LATENCY_BUCKETS 24
/* Of one member, since the reader was made. */
typedef struct dlfs_member_stats {
    uint64_t reads; /* requests that ended */
    uint64_t read_bytes;
    uint64_t errors;
    uint64_t queue_pairs; /* of this process to the member's device now, those at rest included */
    uint64_t queue_pairs_max;               /* ... that it may have */
    uint64_t latency_ns;                    /* of all of them, from their submission to their end */
    uint64_t latency[DLFS_LATENCY_BUCKETS]; /* [k]: below 2^(k+1) us, and no less than the one
                                               before; the last: all that took longer */
} dlfs_member_stats;
/* -EINVAL when there is no such member. Any threads at once. */
DLFS_API int dlfs_reader_get_member_stats(dlfs_reader *reader, uint32_t member,
                                          dlfs_member_stats *stats);

/* The members that are lost now, as bits by number; those without a device are not among them. */
DLFS_API uint64_t dlfs_reader_lost_members(const dlfs_reader *reader);
/* Why a member was lost, the last time: a code; 0 when it never was. -EINVAL: no such member. */
DLFS_API int dlfs_reader_member_code(const dlfs_reader *reader, uint32_t member);

/* ---- streams: an epoch read ahead ------------------------------------------------------------ */

#define DLFS_ORDER_STORAGE 0u /* storage order */
#define DLFS_ORDER_GLOBAL 1u  /* one permutation of all samples */
#define DLFS_ORDER_CHUNK 2u   /* chunks permuted, then the samples within each window of chunks */

typedef struct dlfs_sequence dlfs_sequence;
/*
 * The order of one epoch over the whole dataset: a function of (directory, chunk_bytes, kind, seed,
 * epoch, window). Borrows the directory. Immutable: any threads at once. window_chunks matters for
 * DLFS_ORDER_CHUNK only. Memory: constant, but 24 bytes a chunk for DLFS_ORDER_CHUNK.
 */
DLFS_API int dlfs_sequence_create(const dlfs_directory *directory, uint32_t chunk_bytes,
                                  uint32_t kind, uint64_t seed, uint64_t epoch,
                                  uint32_t window_chunks, dlfs_sequence **out);

/* Orders over chosen samples. */
#define DLFS_ORDER_LIST 3u     /* as they stand; one may stand there more than once */
#define DLFS_ORDER_SELECTED 4u /* a permutation of them */
#define DLFS_ORDER_WEIGHTED 5u /* draws from them with replacement, in proportion to weights */
typedef struct dlfs_choice {
    uint32_t kind;
    uint32_t reserved;
    uint64_t seed; /* of DLFS_ORDER_SELECTED and DLFS_ORDER_WEIGHTED */
    uint64_t epoch;
    const uint64_t *indices; /* [count] borrowed until the sequence is destroyed */
    const double *weights;   /* [count] of DLFS_ORDER_WEIGHTED; not kept */
    uint64_t count;
    uint64_t draws; /* of DLFS_ORDER_WEIGHTED: positions of the order */
} dlfs_choice;
/*
 * As dlfs_sequence_create, over chosen samples. Memory: 16 bytes a weight. Errors: -EINVAL: an
 * index is out of range, a weight is negative or not finite, or none is positive; -ENOMEM.
 */
DLFS_API int dlfs_sequence_choose(const dlfs_directory *directory, const dlfs_choice *choice,
                                  dlfs_sequence **out);
DLFS_API void dlfs_sequence_destroy(dlfs_sequence *sequence);
/* out[i] = the index at global position first + i*stride. -EINVAL past the end. */
DLFS_API int dlfs_sequence_fill(const dlfs_sequence *sequence, uint64_t first, uint64_t stride,
                                uint64_t count, uint64_t *out);

#define DLFS_PLAN_AUTO 0u
/* Each sample read where it lands, neighbours in the look-ahead merged. */
#define DLFS_PLAN_DIRECT 1u
#define DLFS_PLAN_CHUNKS 2u  /* whole chunks, kept until their last sample is used, or longer */
#define DLFS_PLAN_HARVEST 3u /* whole chunks, of which the samples needed soonest are kept */

typedef struct dlfs_stream_config {
    const dlfs_sequence *sequence; /* borrowed until dlfs_stream_destroy */
    uint64_t first;                /* global position of this consumer's first sample */
    uint64_t stride;               /* ranks: the next sample is `stride` positions on */
    uint64_t count;                /* samples this consumer will take */
    /* Consumers that share a rank's batches: behind `group` samples, the next one lies group_stride
     * positions behind the first of them. 0: all samples are one group. */
    uint64_t group;
    uint64_t group_stride; /* > (group - 1) * stride; unused if group is 0 */
    uint32_t plan;         /* DLFS_PLAN_* */
    uint32_t reserved;
} dlfs_stream_config;

typedef struct dlfs_stream dlfs_stream;
/* Starts one thread that reads ahead within the reader's memory budget. */
DLFS_API int dlfs_stream_create(dlfs_reader *reader, const dlfs_stream_config *config,
                                dlfs_stream **out);
/*
 * The next count samples of the stream (fewer at its end), waiting for them up to timeout_ms (-1:
 * as long as it takes; the batch becomes ready or fails within the reader's timeout). -EAGAIN
 * when the time has passed: call again. DLFS_E_END when there are none left.
 */
DLFS_API int dlfs_stream_next(dlfs_stream *stream, uint64_t count, int timeout_ms,
                              dlfs_batch **out);
/* Ends the thread and gives back what was read ahead; batches given out stay valid. */
DLFS_API void dlfs_stream_destroy(dlfs_stream *stream);
/* The plan in use (DLFS_PLAN_*). */
DLFS_API uint32_t dlfs_stream_plan(const dlfs_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
