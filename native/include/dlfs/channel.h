/*
 * Channels: a reader used from another process, through memory that both processes share.
 *
 * Actors. A service owns an arena that lies in a memfd (DLFS_ARENA_SHARED), and readers that share
 * it. A client maps that memory read-only as a dlfs_arena_view: all of it, with the samples of all
 * datasets. Each
 * concurrent caller of a client has a channel. It consists of a memfd with a submission ring, a
 * completion ring and room for requests and answers, and of a pair of connected sockets; one byte
 * through a socket wakes the other side. At the service, one thread per channel serves it with
 * dlfs_reader_read and dlfs_stream_next, so a blocked caller never blocks another.
 *
 * Batches are referenced in place: an answer carries offsets into the arena, whose bytes do not
 * change until the client releases the batch. A waiting side spins for a few microseconds, if there
 * is more than one processor and spinning was useful lately, and then sleeps. A side makes the
 * system call that wakes the other only after the other has announced that it sleeps. So a batch
 * costs no system call while both are busy.
 *
 * Resident chunks. While a reader has channels, it may have slots of the arena reserved for its
 * whole dataset: if every sample lies in one chunk, and an eighth of the arena is left to readers
 * without. A chunk that has been read and verified then stays in the arena until the last channel
 * is gone. An index in the arena says where. A client that has the dataset's directory
 * (dlfs_client_attach) reads samples of such chunks without the service, without pins and without a
 * release. It requests a batch from the service as soon as one of the samples is not in a resident
 * chunk. A channel that was created without a reservation never reads so.
 *
 * Wake-ups use sockets rather than eventfds, because all holders of an eventfd share its status
 * flags: a client could make the service block in it. Bytes are sent and received with
 * MSG_DONTWAIT, whatever the flags. When either process dies, its end of the pair is hung up, which
 * wakes the other process at once.
 *
 * Trust. The client trusts the service. The service trusts nothing in memory that the client can
 * write: it copies each field once and then checks the copy, keeps its records of batches in its
 * own memory, and seals the channel's memfd against shrinking. A client that violates the protocol
 * loses its channel and everything pinned through it. The arena is sealed against writing by any
 * process but the service (Linux 5.1).
 *
 * Fairness. The arena memory that a client's batches pin is counted over all channels of one
 * dlfs_share, in whole slots of a chunk. (Pins of resident chunks exclude no other client and are
 * counted in bytes of samples.) The share is for the whole arena: of a reader that may hold a part
 * of the slots at present, a client may pin that part of it. A batch that would exceed it is copied
 * out of the arena into the channel's own memory, as is a batch that the arena cannot hold. When
 * that memory is full too (copied_bytes_max), the answer is DLFS_E_LIMIT: the client must release
 * batches or request less. The same answer is given when the client's other memory at the service
 * would exceed dlfs_channel_config.memory.
 *
 * Memory. A channel's memfd has its full length from the start, but occupies only the pages that
 * were written: a few for small batches. Pages of copied batches are freed after use; pages of
 * large answers are freed once the client has taken them and is idle for a second.
 */
#ifndef DLFS_CHANNEL_H
#define DLFS_CHANNEL_H

#include <dlfs/dlfs.h>
#include <dlfs/part.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_CHANNEL_SAMPLES_MAX (1u << 20) /* most samples of one batch, for any configuration */
#define DLFS_CHANNEL_BATCHES_MAX \
    (1u << 16) /* most unreleased batches of one channel, for any configuration */

/* ---- the service's side ---------------------------------------------------------------------- */

/*
 * Returns the memfd and the length of a reader's arena, for the service to pass to clients. The
 * arena owns the descriptor. Errors: -EINVAL (the arena is not shared), -ENOMEM, -errno. Any
 * threads at once.
 */
DLFS_API int dlfs_reader_arena(dlfs_reader *reader, int *descriptor, uint64_t *bytes);

/*
 * An upper bound for bytes that the channels of one client use together: either pinned in one
 * reader's arena, or other memory of the service. Any threads at once.
 */
typedef struct dlfs_share dlfs_share;
/*
 * Creates a share, within a parent, such as that of the client's user, unless that is NULL: bytes
 * count in both, and both limit them.
 */
DLFS_API int dlfs_share_create_within(dlfs_share *parent, uint64_t bytes_max, dlfs_share **out);
/* Raises the bound to bytes_max if it is lower. */
DLFS_API void dlfs_share_allow(dlfs_share *share, uint64_t bytes_max);
/* Releases the share. It is freed with the last channel, or share within it, that uses it. */
DLFS_API void dlfs_share_destroy(dlfs_share *share);

typedef struct dlfs_channel_config {
    dlfs_reader *reader;       /* borrowed until the channel is revoked or destroyed; its arena has
                                  DLFS_ARENA_SHARED */
    dlfs_share *share;         /* bounds the arena memory that the client pins */
    uint64_t copied_bytes_max; /* bounds the memory for batches that are copied out of the arena */
    uint32_t samples_max;      /* most samples of one batch, 1..DLFS_CHANNEL_SAMPLES_MAX */
    uint32_t batches_max;      /* most unreleased batches, 1..DLFS_CHANNEL_BATCHES_MAX */
    uint32_t flags;            /* 0: none are defined */
    uint32_t reserved;
    dlfs_share
        *memory; /* bounds the client's other memory at the service: arrays, plans, chosen samples
                    and copies of its requests, batches and streams. NULL: no bound */
} dlfs_channel_config;

/* The service's end of a channel. */
typedef struct dlfs_channel dlfs_channel;
/*
 * Creates a channel and starts the thread that serves it. memory and wake are descriptors for the
 * client, which the caller passes to it and then closes: while any other copy of wake is open, the
 * service does not notice the client's death. Errors: -EINVAL, -ENOMEM, -errno.
 */
DLFS_API int dlfs_channel_create(const dlfs_channel_config *config, dlfs_channel **out, int *memory,
                                 int *wake);
/*
 * Ends the service of a channel, within the reader's timeout if it is reading: the client's next
 * call, or the one that it is waiting in, returns DLFS_E_SERVICE. The bytes of its batches stay
 * until it has closed its end; then dlfs_channel_stats.ended is set. Meanwhile the reader may be
 * destroyed. One call at a time.
 */
DLFS_API void dlfs_channel_revoke(dlfs_channel *channel);
/*
 * Ends the thread, within the reader's timeout if it is reading, and releases everything of the
 * client. The client's next call, or the one that it is waiting in, returns DLFS_E_SERVICE. The
 * bytes of its batches may change from now on, so close a channel only after its client has ended
 * or is to end.
 */
DLFS_API void dlfs_channel_destroy(dlfs_channel *channel);

typedef struct dlfs_channel_stats {
    uint64_t samples; /* samples delivered, in batches and one at a time, including those that the
                         client reads from resident chunks by itself, as it reports them */
    uint64_t sample_bytes;
    uint64_t batches;
    uint64_t batches_out;    /* batches that the client has not released */
    uint64_t pinned_bytes;   /* arena memory that the client pins at present */
    uint64_t copied_bytes;   /* memory in use for copied batches at present */
    uint64_t copied_batches; /* batches copied since the channel was created */
    uint64_t refusals;       /* answers with DLFS_E_LIMIT */
    uint64_t failures;       /* samples that could not be read */
    uint64_t wakes;          /* system calls that woke the client */
    uint64_t sleeps;         /* waits of the service's thread that slept */
    uint64_t busy_ns;        /* time between taking a request and answering it */
    uint64_t
        memory_bytes; /* bytes of dlfs_channel_config.memory in use, without blocks of batches */
    int32_t ended; /* 0: the channel is served. DLFS_E_CLOSED: the client has ended, or the channel
                      was closed; DLFS_E_PROTOCOL: the client violated the protocol. Nothing is
                      pinned then. */
    uint32_t under_way; /* 1: a request is being served */
} dlfs_channel_stats;
/* Fills the statistics. Any threads at once. */
DLFS_API void dlfs_channel_get_stats(dlfs_channel *channel, dlfs_channel_stats *stats);

/* ---- the client's side ----------------------------------------------------------------------- */

/* A reader's arena in another process, mapped read-only. Any threads at once. */
typedef struct dlfs_arena_view dlfs_arena_view;
/*
 * Maps the arena. The caller keeps the descriptor and may close it. Errors: -EINVAL (the file is
 * too short), -errno.
 */
DLFS_API int dlfs_arena_view_map(int descriptor, uint64_t bytes, dlfs_arena_view **out);
/* Returns the address and the length of the mapping. */
DLFS_API void dlfs_arena_view_memory(const dlfs_arena_view *arena, const void **base,
                                     uint64_t *bytes);
/* Releases the mapping, which is unmapped with the last client that uses it. */
DLFS_API void dlfs_arena_view_unmap(dlfs_arena_view *arena);

/*
 * The client's end of a channel. Any threads: one call is under way at a time, the others wait for
 * it; dlfs_batch_release of its batches never waits. A forked child must not use it: it closes its
 * copy of the wake descriptor and leaves the rest alone.
 */
typedef struct dlfs_client dlfs_client;
/*
 * Creates the client's end. The caller keeps memory and may close it; the client takes wake, which
 * is -1 from now on, unless this call fails. timeout_ms is the longest wait for one answer, and 4 s
 * for each MiB of its samples, after which the service counts as lost (DLFS_E_SERVICE); 0: no
 * limit. Only with the directory (dlfs_client_attach) does it know how long the samples of a batch
 * are. Errors: -EINVAL, -ENOMEM, -errno, DLFS_E_FORMAT (the memory is not a channel of this version
 * for this arena).
 */
DLFS_API int dlfs_client_create(dlfs_arena_view *arena, int memory, int *wake, uint32_t timeout_ms,
                                dlfs_client **out);
#define DLFS_CLIENT_PARTS \
    1u /* the directory is of parts of the samples, which are never resident */
/*
 * Gives the client the directory of the dataset, or of the parts of its samples that the channel
 * reads. It lets the client read samples of resident chunks without the service; it then checks
 * every millisecond that the service is still there. The directory's entries part must stay in
 * memory until the client is destroyed; the handle is not used after the call. No call may be under
 * way. flags: DLFS_CLIENT_*. -EINVAL: the directory is not of the channel's dataset.
 */
DLFS_API int dlfs_client_attach(dlfs_client *client, const dlfs_directory *directory,
                                uint32_t flags);
/*
 * Closes the stream. The channel ends with the last of its batches; those already returned stay
 * valid. No call may be under way.
 */
DLFS_API void dlfs_client_destroy(dlfs_client *client);

/*
 * Reads like dlfs_reader_read. Any thread releases the batch with dlfs_batch_release;
 * dlfs_batch_gather accepts it. Further errors: DLFS_E_LIMIT (more samples or batches than the
 * channel allows, or no memory left for this client), DLFS_E_SERVICE (the service, or the channel,
 * has ended).
 */
DLFS_API int dlfs_client_read(dlfs_client *client, const uint64_t *indices, uint64_t count,
                              dlfs_batch **out);
/*
 * Reads like dlfs_reader_get. With DLFS_GET_CACHED, a sample too large for the channel's memory is
 * -EAGAIN.
 */
DLFS_API int64_t dlfs_client_get(dlfs_client *client, uint64_t index, void *buffer,
                                 uint64_t buffer_bytes, uint32_t flags);
/*
 * Reads like dlfs_reader_read_part, by requests of a few MiB, each answered within the timeout.
 * Further errors: DLFS_E_SERVICE.
 */
DLFS_API int dlfs_client_read_part(dlfs_client *client, const dlfs_part *part, void *buffer,
                                   dlfs_failure *failure);
/*
 * Fills the statistics of the service's reader, for all of its clients, like dlfs_reader_get_stats.
 */
DLFS_API int dlfs_client_reader_stats(dlfs_client *client, dlfs_reader_stats *stats);
/* Fills the statistics of one member, like dlfs_reader_get_member_stats. */
DLFS_API int dlfs_client_member_stats(dlfs_client *client, uint32_t member,
                                      dlfs_member_stats *stats);
/* Returns the code of the last loss of a member, like dlfs_reader_member_code. */
DLFS_API int dlfs_client_member_code(dlfs_client *client, uint32_t member);
/*
 * Returns the lost members as of the last answer to any client of that arena, like
 * dlfs_reader_lost_members. Does not wait.
 */
DLFS_API uint64_t dlfs_client_lost_members(const dlfs_client *client);
/* Returns the most samples that one batch may have. */
DLFS_API uint64_t dlfs_client_samples_max(const dlfs_client *client);

/*
 * Opens the channel's stream at the service, like dlfs_stream_create, with a sequence of the same
 * parameters over the service's directory. For an order over chosen samples, the service is sent
 * the indices of this stream; DLFS_E_LIMIT if they are more than both the dataset's samples and
 * DLFS_CHANNEL_SAMPLES_MAX. Returns the plan in use (DLFS_PLAN_*). Errors: -EBUSY (a stream is
 * open), -EINVAL (also if the sequence is not of the service's dataset and chunk size).
 */
DLFS_API int dlfs_client_stream_open(dlfs_client *client, const dlfs_stream_config *config);
/*
 * Returns the next batch, like dlfs_stream_next. After DLFS_E_LIMIT, the next call with the same
 * count returns the same samples, once there is memory for them.
 */
DLFS_API int dlfs_client_stream_next(dlfs_client *client, uint64_t count, int timeout_ms,
                                     dlfs_batch **out);
/* Closes the stream; batches already returned stay valid. Errors: DLFS_E_SERVICE. */
DLFS_API int dlfs_client_stream_close(dlfs_client *client);

typedef struct dlfs_client_stats {
    uint64_t requests;
    uint64_t wakes;  /* system calls that woke the service */
    uint64_t sleeps; /* waits for an answer that slept */
} dlfs_client_stats;
/* Fills the statistics. Any threads at once. */
DLFS_API void dlfs_client_get_stats(const dlfs_client *client, dlfs_client_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
