/*
 * Channels: a reader used from another process, through memory that both share.
 *
 * A service owns a reader whose sample memory (the arena) lies in a memfd: DLFS_READER_SHARED. A
 * client maps that memory read-only, once, as a dlfs_arena. Each of its concurrent callers has a
 * channel: a memfd of the channel's own with a submission ring, a completion ring, and room for
 * what is asked and answered; and a pair of connected sockets, one byte through which wakes the
 * other side. At the service a thread of the channel serves it with dlfs_reader_read and
 * dlfs_stream_next, so a blocked caller never blocks another.
 *
 * Batches are referenced in place: what an answer carries is offsets into the arena, which stays as
 * it is until the client releases the batch. A side that waits spins for a few microseconds, where
 * there is more than one processor and where that paid off lately, and then sleeps; a side makes
 * the system call that wakes the other only when the other has said that it sleeps. So a batch
 * costs no system call while both are busy.
 *
 * Where the whole dataset fits in the arena and every sample lies in one chunk, a chunk that has
 * landed there, verified, stays as long as the reader. An index in the arena says where; a client
 * that was given the dataset's directory (dlfs_client_attach) finds samples of such chunks by
 * itself: without the service, without pins, with nothing to be given back. It asks for a batch as
 * soon as one of its samples lies elsewhere.
 *
 * Wake-ups go through sockets, not eventfds, because an eventfd has one set of status flags for all
 * who hold it: a client could make the service block in it. Bytes are sent and received with
 * MSG_DONTWAIT, whatever the flags; and the death of either process, by whatever cause, ends the
 * other's sleep at once, for its end of the pair is hung up.
 *
 * Trust: the client believes the service. The service believes nothing that lies in memory which
 * the client can write: every field is copied once and then checked, what it keeps in mind about
 * batches lies in its own memory, and the channel's memfd is sealed against shrinking. A client
 * that breaks the protocol loses its channel, with all that it held. The arena is sealed against
 * writing by anybody but the service (Linux 5.1).
 *
 * Fairness: what the batches of a client pin in the arena is counted, in whole slots of a chunk
 * (where the whole dataset fits in the arena, where nobody is kept out of it: in bytes of samples),
 * over all channels of one dlfs_share. What would exceed the share is copied out of the arena into
 * the channel's own memory, as is a batch that the arena could not hold; when that is full too,
 * copied_bytes_max, the answer is DLFS_E_LIMIT: release batches, or ask for less. Likewise when all
 * that the client causes beside the arena would exceed dlfs_channel_config.memory.
 *
 * Memory: a channel's memfd has its whole length from the start, but pages only where it was
 * written to: a few for small batches; what copied batches used is given back to the system, and
 * what large answers used when the client has taken them and asks no more for a second.
 */
#ifndef DLFS_CHANNEL_H
#define DLFS_CHANNEL_H

#include <dlfs/dlfs.h>
#include <dlfs/part.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLFS_CHANNEL_SAMPLES_MAX (1u << 20) /* of one batch, at the very most */
#define DLFS_CHANNEL_BATCHES_MAX (1u << 16) /* out at once, at the very most */

/* ---- the service's side ---------------------------------------------------------------------- */

/*
 * The memfd that the arena of a reader made with DLFS_READER_SHARED lies in, to be passed to
 * clients, and its length; it stays the reader's, and open until the reader is freed. -EINVAL for
 * another reader; -ENOMEM, -errno when there is no such memory. Any threads at once.
 */
DLFS_API int dlfs_reader_arena(dlfs_reader *reader, int *descriptor, uint64_t *bytes);

/*
 * A bound on bytes that the channels of one client may cause together: pinned in one reader's
 * arena, or of the service's other memory. Any threads at once.
 */
typedef struct dlfs_share dlfs_share;
DLFS_API int dlfs_share_create(uint64_t bytes_max, dlfs_share **out);
/* What it has counts in the parent too, which is that of the client's user, and bounds it. */
DLFS_API int dlfs_share_create_within(dlfs_share *parent, uint64_t bytes_max, dlfs_share **out);
/* Raises the bound to at least so many bytes. */
DLFS_API void dlfs_share_allow(dlfs_share *share, uint64_t bytes_max);
/* It is freed with the last channel, or share within it, that uses it. */
DLFS_API void dlfs_share_destroy(dlfs_share *share);
/* The bytes that the channels have of it now. */
DLFS_API uint64_t dlfs_share_pinned_bytes(const dlfs_share *share);

typedef struct dlfs_channel_config {
    dlfs_reader *reader;       /* borrowed; made with DLFS_READER_SHARED */
    dlfs_share *share;         /* what the client may pin */
    uint64_t copied_bytes_max; /* memory for batches that are copied out of the arena */
    uint32_t samples_max;      /* of one batch, 1..DLFS_CHANNEL_SAMPLES_MAX */
    uint32_t batches_max;      /* that the client has at once, 1..DLFS_CHANNEL_BATCHES_MAX */
    uint32_t flags;            /* none yet: 0 */
    uint32_t reserved;
    dlfs_share *memory; /* what it may cause beside the arena: arrays, plans, choices and copies of
                           its requests, batches and streams. NULL: no bound */
} dlfs_channel_config;

/* The service's end of a channel. */
typedef struct dlfs_channel dlfs_channel;
/*
 * Makes a channel and starts the thread that serves it. memory and wake are the client's
 * descriptors, and the caller's to pass to it and then to close: while a copy of wake is open
 * anywhere, the client's death is not noticed. Errors: -EINVAL, -ENOMEM, -errno.
 */
DLFS_API int dlfs_channel_create(const dlfs_channel_config *config, dlfs_channel **out, int *memory,
                                 int *wake);
/*
 * Ends the thread, within the reader's timeout if it is at a read, and gives back all that the
 * client had. The client's next call, or the one it sleeps in, has DLFS_E_SERVICE; its batches may
 * change under it from now on, so close a channel only when its client is gone or is to go.
 */
DLFS_API void dlfs_channel_destroy(dlfs_channel *channel);

typedef struct dlfs_channel_stats {
    uint64_t samples; /* given out, as batches and one at a time; with what the client read without
                         asking, here and in the reader's counters as it says itself */
    uint64_t sample_bytes;
    uint64_t batches;
    uint64_t batches_out;    /* that the client has now */
    uint64_t pinned_bytes;   /* in the arena, now */
    uint64_t copied_bytes;   /* of the memory for copied batches, now */
    uint64_t copied_batches; /* since the beginning */
    uint64_t refusals;       /* answers DLFS_E_LIMIT */
    uint64_t failures;       /* samples that could not be given */
    uint64_t wakes;          /* system calls that woke the client */
    uint64_t sleeps;         /* of the service's thread */
    uint64_t busy_ns;        /* time between taking a request and answering it */
    uint64_t memory_bytes;   /* of dlfs_channel_config.memory, now; without blocks of batches */
    int32_t ended; /* 0: it serves. DLFS_E_CLOSED: the client is gone, or the channel was closed;
                      DLFS_E_PROTOCOL: the client broke the protocol. Nothing is pinned then. */
    uint32_t under_way; /* 1: a request is being served */
} dlfs_channel_stats;
/* Any threads at once. */
DLFS_API void dlfs_channel_get_stats(dlfs_channel *channel, dlfs_channel_stats *stats);

/* ---- the client's side ----------------------------------------------------------------------- */

/* A reader's arena in another process, mapped read-only. Any threads at once. */
typedef struct dlfs_arena dlfs_arena;
/* The descriptor stays the caller's, who may close it. Errors: -EINVAL (too short), -errno. */
DLFS_API int dlfs_arena_map(int descriptor, uint64_t bytes, dlfs_arena **out);
/* It is unmapped with the last client that uses it. */
DLFS_API void dlfs_arena_unmap(dlfs_arena *arena);

/*
 * The client's end of a channel. Any threads: one call at a time is under way, others wait for it;
 * dlfs_batch_release of its batches never waits. Not in a forked child, which must close its copy
 * of the wake descriptor and leave the rest alone.
 */
typedef struct dlfs_client dlfs_client;
/*
 * memory stays the caller's, who may close it; wake is the client's from now on, unless this fails.
 * timeout_ms: for one answer, then the service is given up as lost (DLFS_E_SERVICE); 0: as long as
 * it takes. Errors: -EINVAL, -ENOMEM, -errno, DLFS_E_FORMAT (the
 * memory is not a channel of this version for this arena).
 */
DLFS_API int dlfs_client_create(dlfs_arena *arena, int memory, int wake, uint32_t timeout_ms,
                                dlfs_client **out);
/*
 * Lets the client read what lies in chunks that stay without asking the service, which it looks
 * after every millisecond then; nothing changes where no chunks stay. The directory is the
 * dataset's, and its entries part stays where it is until the client is destroyed; the handle is
 * not used later. No call may be under way. -EINVAL: it is not of the channel's dataset.
 */
DLFS_API int dlfs_client_attach(dlfs_client *client, const dlfs_directory *directory);
/*
 * Closes the stream and ends the channel, together with the last of its batches: those given out
 * stay valid. No call may be under way.
 */
DLFS_API void dlfs_client_destroy(dlfs_client *client);

/*
 * As dlfs_reader_read; the batch is released with dlfs_batch_release, by any thread, and can be
 * used with dlfs_batch_gather. Errors besides: DLFS_E_LIMIT (more samples than the channel takes,
 * more batches than it counts, or no memory left for this client), DLFS_E_SERVICE (the service, or
 * the channel, is gone).
 */
DLFS_API int dlfs_client_read(dlfs_client *client, const uint64_t *indices, uint64_t count,
                              dlfs_batch **out);
/* As dlfs_reader_get; a sample too large for the channel's memory is -EAGAIN with DLFS_GET_KEPT. */
DLFS_API int64_t dlfs_client_get(dlfs_client *client, uint64_t index, void *buffer,
                                 uint64_t buffer_bytes, uint32_t flags);
/*
 * As dlfs_reader_read_part, by requests of a few MiB, each answered within the timeout. Errors
 * besides: DLFS_E_SERVICE.
 */
DLFS_API int dlfs_client_read_part(dlfs_client *client, const dlfs_part *part, void *buffer,
                                   dlfs_failure *failure);
/* As dlfs_reader_get_stats: of the service's reader, for all of its clients. */
DLFS_API int dlfs_client_reader_stats(dlfs_client *client, dlfs_reader_stats *stats);
/* As dlfs_reader_get_member_stats. */
DLFS_API int dlfs_client_member_stats(dlfs_client *client, uint32_t member,
                                      dlfs_member_stats *stats);
/* As dlfs_reader_member_code. */
DLFS_API int dlfs_client_member_code(dlfs_client *client, uint32_t member);
/* As dlfs_reader_lost_members, as of the last answer to a client of that arena. Does not wait. */
DLFS_API uint64_t dlfs_client_lost_members(const dlfs_client *client);
/* Whether the channel is of no more use: every call has DLFS_E_SERVICE. Does not wait. */
DLFS_API int dlfs_client_is_lost(const dlfs_client *client);
/* The most samples that one batch may have. */
DLFS_API uint64_t dlfs_client_samples_max(const dlfs_client *client);

/*
 * As dlfs_stream_create: opens the channel's stream, at the service, with a sequence of the same
 * parameters over the service's directory; of one over chosen samples, the service is sent the
 * indices of this stream: DLFS_E_LIMIT when they are more than the dataset has samples and more
 * than DLFS_CHANNEL_SAMPLES_MAX. Returns the plan in use (DLFS_PLAN_*). -EBUSY while it has one;
 * -EINVAL also when the sequence is not of the service's dataset and chunk size.
 */
DLFS_API int dlfs_client_stream_open(dlfs_client *client, const dlfs_stream_config *config);
/*
 * As dlfs_stream_next. After DLFS_E_LIMIT the same samples are given by the next call with the same
 * count, once there is room for them.
 */
DLFS_API int dlfs_client_stream_next(dlfs_client *client, uint64_t count, int timeout_ms,
                                     dlfs_batch **out);
/* Batches given out stay valid. Errors: DLFS_E_SERVICE. */
DLFS_API int dlfs_client_stream_close(dlfs_client *client);

typedef struct dlfs_client_stats {
    uint64_t requests;
    uint64_t wakes;  /* system calls that woke the service */
    uint64_t sleeps; /* waits for an answer that slept */
} dlfs_client_stats;
/* Any threads at once. */
DLFS_API void dlfs_client_get_stats(const dlfs_client *client, dlfs_client_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
