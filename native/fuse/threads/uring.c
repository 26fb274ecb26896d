/*
 * A thread answers one request at a time: it waits in io_uring_enter, calls the handler, and enters
 * the kernel again with the command that sends the reply and asks for the next request.
 *
 * Most replies come from the handler itself. The exception is a read of a sample that another
 * thread is reading: that thread replies, and the entry's thread waits for it.
 *
 * Processors that are offline have queues too, without which the kernel sends nothing. One thread
 * has an entry of each of them. A thread is not bound if the program may not run on its processor.
 */
#include "threads/uring.h"

#include <errno.h>

#include "mount.h"
#include "operations.h"
#include "platform/thread.h"
#include "threads/processors.h"
#include "threads/yielding.h"

#ifdef DLFS_HAVE_URING

#include <liburing.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define ENTRIES_MIN 2u /* entries of a queue, and so requests of a processor, at a time */
#define ENTRIES_MAX 16u
#define STOP UINT64_MAX           /* user data of the poll for the end */
#define ROOM_BYTES UINT64_C(8192) /* of an entry in front of its payload */

/*
 * ---- the kernel's protocol, which the headers of older systems do not have -------------------
 *
 * Source: Linux 6.14, include/uapi/linux/fuse.h, protocol 7.42.
 */

#define COMMAND_REGISTER 1u
#define COMMAND_COMMIT_AND_FETCH 2u
#define HEADER_BYTES 128u  /* of each of the two parts of a header */
#define COMMAND_OFFSET 48u /* of the command in a submission entry of 128 bytes */

/* struct fuse_uring_ent_in_out */
struct entry_state {
    uint64_t flags;
    uint64_t commit_id; /* identifies the request in COMMIT_AND_FETCH */
    uint32_t payload_bytes;
    uint32_t padding;
    uint64_t reserved;
};

/* struct fuse_uring_req_header */
struct entry_header {
    uint8_t in_out[HEADER_BYTES]; /* fuse_in_header of the request, fuse_out_header of the reply */
    uint8_t arguments[HEADER_BYTES]; /* first arguments, of an operation that has some */
    struct entry_state state;
};

/* struct fuse_uring_cmd_req */
struct entry_command {
    uint64_t flags;
    uint64_t commit_id;
    uint16_t queue;
    uint8_t padding[62]; /* to the end of the submission entry */
};

_Static_assert(sizeof(struct entry_header) == 288, "the kernel's layout");
_Static_assert(sizeof(struct entry_command) == 80, "the kernel's layout");

/* ---- entries, threads ------------------------------------------------------------------------ */

/*
 * An entry. Its memory is the header, room in front of the payload, and the payload: with its
 * headers copied to that room, a request lies in one piece, as if it had been read.
 */
struct entry {
    struct entry_header *header;
    uint8_t *payload;
    struct iovec memory[2]; /* header and payload, for REGISTER */
    uint16_t queue;
    _Atomic bool replied;
};

struct ring_thread {
    struct rings *rings;
    struct entry *entries; /* [entry_count] */
    uint32_t entry_count;
    int processor; /* to which the thread is bound, or -1 */
    bool started;
    pthread_t thread;
    struct io_uring ring;
    struct yielder yielder;
};

enum rings_phase { RINGS_STARTING, RINGS_REGISTERING, RINGS_ENDING };

struct rings {
    struct dlfs_fuse *fuse;
    int kernel;   /* the session's descriptor of /dev/fuse */
    int stopping; /* eventfd, readable from rings_stop on */
    uint32_t queue_count;
    uint32_t entry_count;
    uint32_t thread_count;
    uint64_t payload_bytes;
    _Atomic int error; /* what a ring failed with, or 0 */

    pthread_mutex_t lock; /* protects the next five fields */
    pthread_cond_t changed;
    enum rings_phase phase;
    uint32_t reports;     /* threads that have registered their entries, or failed */
    int failure;          /* of one of these */
    uint32_t *registered; /* [queue_count] entries that the kernel accepted */

    struct yielding yielding;
    struct ring_thread *threads; /* [thread_count] */
    struct entry *entries;       /* [entry_count] */
};

static _Thread_local struct entry *handled; /* entry whose request this thread has not answered */

static void begin_phase(struct rings *rings, enum rings_phase phase)
{
    (void)pthread_mutex_lock(&rings->lock);
    rings->phase = phase;
    (void)pthread_cond_broadcast(&rings->changed);
    (void)pthread_mutex_unlock(&rings->lock);
}

static void report(struct rings *rings, int code)
{
    (void)pthread_mutex_lock(&rings->lock);
    rings->reports++;
    rings->failure = code < 0 ? code : rings->failure;
    (void)pthread_cond_broadcast(&rings->changed);
    (void)pthread_mutex_unlock(&rings->lock);
}

/* Waits for the end of the first phase. Returns true if entries are to be registered. */
static bool wait_for_registration(struct rings *rings)
{
    (void)pthread_mutex_lock(&rings->lock);
    while (rings->phase == RINGS_STARTING) {
        (void)pthread_cond_wait(&rings->changed, &rings->lock);
    }
    bool registering = rings->phase == RINGS_REGISTERING;
    (void)pthread_mutex_unlock(&rings->lock);
    return registering;
}

/* Returns true if the error is that of a connection that has ended. */
static bool is_end(int code)
{
    return code == -ENOTCONN || code == -ECONNABORTED || code == -ENODEV || code == -ECANCELED;
}

/*
 * Notes that a ring has failed. Without its thread programs may wait without end, so the mount
 * ends; the loop ends by itself with the connection.
 */
static void fail(struct rings *rings, int code)
{
    if (!is_end(code)) {
        atomic_store(&rings->error, code);
        dlfs_fuse_stop(rings->fuse);
    }
}

/* ---- commands -------------------------------------------------------------------------------- */

/* Prepares a command. The ring always has room, because an entry has at most one. */
static void prepare(struct ring_thread *thread, struct entry *entry, uint32_t operation,
                    uint64_t commit_id)
{
    struct io_uring_sqe *request = io_uring_get_sqe(&thread->ring);
    struct entry_command command = {.commit_id = commit_id, .queue = entry->queue};
    bool registers = operation == COMMAND_REGISTER;
    io_uring_prep_rw(IORING_OP_URING_CMD, request, 0, registers ? entry->memory : NULL,
                     registers ? 2 : 0, 0);
    request->cmd_op = operation;
    request->flags |= IOSQE_FIXED_FILE; /* file 0 is /dev/fuse */
    memcpy((uint8_t *)request + COMMAND_OFFSET, &command, sizeof command);
    io_uring_sqe_set_data64(request, (uint64_t)(entry - thread->entries));
}

/* Prepares the command that sends the reply of an entry and asks for its next request. */
static void prepare_reply(struct ring_thread *thread, struct entry *entry)
{
    yielder_answer(&thread->yielder, receivers_is_sole(&thread->rings->fuse->receivers));
    prepare(thread, entry, COMMAND_COMMIT_AND_FETCH, entry->header->state.commit_id);
}

/* Returns true for an error after which the same call may succeed. */
static bool is_transient(int code)
{
    return code == -EINTR || code == -EAGAIN || code == -EBUSY;
}

/* Registers the thread's entries. Returns 0, or a negative code if the kernel has not all. */
static int register_entries(struct ring_thread *thread)
{
    struct rings *rings = thread->rings;
    struct io_uring_cqe *completion;
    for (uint32_t i = 0; i < thread->entry_count; i++) {
        prepare(thread, &thread->entries[i], COMMAND_REGISTER, 0);
    }
    int code = io_uring_submit(&thread->ring); /* serve_one submits what is left */
    if (code < 0 && !is_transient(code)) {
        fail(rings, code);
        return code;
    }
    /* A refusal is there at once; an accepted command completes with its first request. */
    if (io_uring_peek_cqe(&thread->ring, &completion) == 0 && completion->res < 0) {
        return completion->res;
    }
    (void)pthread_mutex_lock(&rings->lock);
    for (uint32_t i = 0; i < thread->entry_count; i++) {
        rings->registered[thread->entries[i].queue]++;
    }
    (void)pthread_mutex_unlock(&rings->lock);
    return 0;
}

/* ---- requests -------------------------------------------------------------------------------- */

static void wait_for_reply(struct rings *rings, struct entry *entry)
{
    if (atomic_load_explicit(&entry->replied, memory_order_acquire)) {
        return;
    }
    (void)pthread_mutex_lock(&rings->lock);
    while (!atomic_load_explicit(&entry->replied, memory_order_acquire)) {
        (void)pthread_cond_wait(&rings->changed, &rings->lock);
    }
    (void)pthread_mutex_unlock(&rings->lock);
}

static void set_reply(struct rings *rings, struct entry *entry,
                      const struct fuse_out_header *header, uint64_t payload_bytes)
{
    memcpy(entry->header->in_out, header, sizeof *header);
    entry->header->state.payload_bytes = (uint32_t)payload_bytes;
    if (entry == handled) {
        atomic_store_explicit(&entry->replied, true, memory_order_release);
        return;
    }
    (void)pthread_mutex_lock(&rings->lock);
    atomic_store_explicit(&entry->replied, true, memory_order_release);
    (void)pthread_cond_broadcast(&rings->changed);
    (void)pthread_mutex_unlock(&rings->lock);
}

/* Copies a reply to the entry of its request. */
static bool send_to_entry(const struct reply_path *path, const struct iovec *parts, int part_count)
{
    struct rings *rings = path->fuse->rings;
    struct entry *entry = path->entry;
    struct fuse_out_header header;
    uint64_t bytes = 0;
    memcpy(&header, parts[0].iov_base, sizeof header);
    for (int i = 1; i < part_count && header.error == 0; i++) {
        if (parts[i].iov_len > rings->payload_bytes - bytes) {
            header.error = -EIO;
            bytes = 0;
        } else {
            memcpy(entry->payload + bytes, parts[i].iov_base, parts[i].iov_len);
            bytes += parts[i].iov_len;
        }
    }
    set_reply(rings, entry, &header, bytes);
    return true;
}

/* Handles the request of an entry, and waits for the reply. */
static void handle(struct ring_thread *thread, struct entry *entry)
{
    struct rings *rings = thread->rings;
    struct fuse_in_header header;
    memcpy(&header, entry->header->in_out, sizeof header);
    uint64_t payload_bytes = entry->header->state.payload_bytes;
    uint64_t argument_bytes = header.len - sizeof header - payload_bytes;
    const struct reply_path path = {
        .fuse = rings->fuse, .unique = header.unique, .send = send_to_entry, .entry = entry};
    atomic_store_explicit(&entry->replied, false, memory_order_relaxed);
    handled = entry;
    if (payload_bytes > rings->payload_bytes || argument_bytes > HEADER_BYTES) {
        reply_error(&path, EIO);
    } else {
        uint8_t *arguments = entry->payload - argument_bytes;
        memcpy(arguments, entry->header->arguments, argument_bytes);
        memcpy(arguments - sizeof header, &header, sizeof header);
        (void)serve_request(&path, arguments - sizeof header, header.len);
    }
    wait_for_reply(rings, entry);
    prepare_reply(thread, entry);
    handled = NULL;
}

/* ---- threads --------------------------------------------------------------------------------- */

/* Sends the replies that are ready and handles a request. Returns false at the end. */
static bool serve_one(struct ring_thread *thread)
{
    struct io_uring_cqe *completion;
    int code = io_uring_submit_and_wait(&thread->ring, 1);
    if (code < 0 && !is_transient(code)) {
        fail(thread->rings, code);
        return false;
    }
    if (io_uring_peek_cqe(&thread->ring, &completion) != 0) {
        return true;
    }
    uint64_t data = io_uring_cqe_get_data64(completion);
    code = completion->res;
    io_uring_cqe_seen(&thread->ring, completion);
    if (data == STOP) {
        return false;
    }
    if (code < 0) {
        fail(thread->rings, code);
        return false;
    }
    handle(thread, &thread->entries[data]);
    return true;
}

static void *run(void *argument)
{
    struct ring_thread *thread = argument;
    struct rings *rings = thread->rings;
    receivers_enter_ring(&rings->fuse->receivers);
    yielder_init(&thread->yielder, &rings->yielding);
    if (thread->processor >= 0) {
        cpu_set_t processors;
        CPU_ZERO(&processors);
        CPU_SET((size_t)thread->processor, &processors);
        (void)pthread_setaffinity_np(pthread_self(), sizeof processors, &processors);
    }
    if (wait_for_registration(rings)) {
        int code = io_uring_enable_rings(&thread->ring);
        (void)io_uring_register_ring_fd(&thread->ring); /* spares a look-up; may fail */
        code = code < 0 ? code : register_entries(thread);
        report(rings, code);
        while (code == 0 && serve_one(thread)) {
        }
    }
    yielder_end(&thread->yielder);
    io_uring_queue_exit(&thread->ring);
    return NULL;
}

/* Starts a thread with a ring, which is the thread's from when it enables the ring. */
static int start(struct ring_thread *thread)
{
    struct rings *rings = thread->rings;
    unsigned flags = IORING_SETUP_SQE128 | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
                     IORING_SETUP_R_DISABLED;
    int code = io_uring_queue_init(thread->entry_count + 1, &thread->ring, flags);
    if (code < 0) {
        return code;
    }
    struct io_uring_sqe *request = io_uring_get_sqe(&thread->ring);
    io_uring_prep_poll_add(request, rings->stopping, POLLIN);
    io_uring_sqe_set_data64(request, STOP);
    code = io_uring_register_files(&thread->ring, &rings->kernel, 1);
    code = code < 0 ? code : thread_start(&thread->thread, NULL, run, thread);
    if (code < 0) {
        io_uring_queue_exit(&thread->ring);
    }
    thread->started = code == 0;
    return code;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Gives each online processor some threads with an entry each, and the others one thread. */
static void lay_out(struct rings *rings, const char *online, uint32_t depth)
{
    cpu_set_t allowed;
    struct entry *entry = rings->entries;
    struct ring_thread *thread = rings->threads;
    bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    for (uint32_t i = 0; i < rings->queue_count; i++) {
        bool bound = known && i < CPU_SETSIZE && CPU_ISSET(i, &allowed);
        for (uint32_t j = 0; j < depth && processors_has(online, i); j++) {
            entry->queue = (uint16_t)i;
            *thread++ = (struct ring_thread){.rings = rings,
                                             .entries = entry++,
                                             .entry_count = 1,
                                             .processor = bound ? (int)i : -1};
        }
    }
    *thread = (struct ring_thread){.rings = rings, .entries = entry, .processor = -1};
    for (uint32_t i = 0; i < rings->queue_count; i++) {
        if (!processors_has(online, i)) {
            entry++->queue = (uint16_t)i;
            thread->entry_count++;
        }
    }
    rings->thread_count = (uint32_t)(thread - rings->threads) + (thread->entry_count > 0);
    rings->entry_count = (uint32_t)(entry - rings->entries);
}

static int create(struct dlfs_fuse *fuse, struct rings *rings)
{
    char online[PROCESSOR_LIST_BYTES];
    rings->fuse = fuse;
    rings->kernel = fuse->config.kernel;
    rings->stopping = eventfd(0, EFD_CLOEXEC);
    (void)pthread_mutex_init(&rings->lock, NULL);
    (void)pthread_cond_init(&rings->changed, NULL);
    yielding_start(&rings->yielding);
    rings->queue_count = processors_possible();
    if (rings->queue_count == 0 || !processors_read_online(online)) {
        return -ENOSYS;
    }
    uint32_t online_count = 0;
    for (uint32_t i = 0; i < rings->queue_count; i++) {
        online_count += processors_has(online, i);
    }
    uint32_t depth = fuse->config.threads_max / (online_count > 0 ? online_count : 1);
    depth = depth < ENTRIES_MIN ? ENTRIES_MIN : depth;
    depth = depth > ENTRIES_MAX ? ENTRIES_MAX : depth;
    rings->registered = calloc(rings->queue_count, sizeof *rings->registered);
    rings->threads = calloc((size_t)online_count * depth + 1, sizeof *rings->threads);
    rings->entries = calloc((size_t)rings->queue_count * depth, sizeof *rings->entries);
    if (rings->stopping < 0 || rings->registered == NULL || rings->threads == NULL ||
        rings->entries == NULL) {
        return -ENOMEM;
    }
    lay_out(rings, online, depth);
    return 0;
}

/* Allocates the memory of all entries. */
static int allocate(struct rings *rings)
{
    for (uint32_t i = 0; i < rings->entry_count; i++) {
        struct entry *entry = &rings->entries[i];
        uint8_t *memory = mmap(NULL, ROOM_BYTES + rings->payload_bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); /* its pages come with use */
        if (memory == MAP_FAILED) {
            return -ENOMEM;
        }
        entry->header = (struct entry_header *)memory;
        entry->payload = memory + ROOM_BYTES;
        entry->memory[0] = (struct iovec){memory, sizeof *entry->header};
        entry->memory[1] = (struct iovec){entry->payload, rings->payload_bytes};
    }
    return 0;
}

int rings_start(struct dlfs_fuse *fuse, uint64_t payload_bytes, struct rings **out)
{
    struct rings *rings = calloc(1, sizeof *rings);
    if (rings == NULL) {
        return -ENOMEM;
    }
    rings->payload_bytes = payload_bytes;
    int code = create(fuse, rings);
    code = code < 0 ? code : allocate(rings);
    for (uint32_t i = 0; code == 0 && i < rings->thread_count; i++) {
        code = start(&rings->threads[i]);
    }
    if (code < 0) {
        rings_destroy(rings);
        return code;
    }
    *out = rings;
    return (int)rings->queue_count;
}

int rings_register(struct rings *rings)
{
    begin_phase(rings, RINGS_REGISTERING);
    (void)pthread_mutex_lock(&rings->lock);
    while (rings->reports < rings->thread_count) {
        (void)pthread_cond_wait(&rings->changed, &rings->lock);
    }
    int failure = rings->failure;
    (void)pthread_mutex_unlock(&rings->lock);
    /* The kernel uses the queues once each has an entry, and /dev/fuse otherwise. */
    for (uint32_t i = 0; i < rings->queue_count; i++) {
        if (rings->registered[i] == 0) {
            (void)rings_stop(rings);
            return failure;
        }
    }
    return 0;
}

int rings_stop(struct rings *rings)
{
    begin_phase(rings, RINGS_ENDING);
    if (rings->stopping >= 0) {
        (void)eventfd_write(rings->stopping, 1);
    }
    for (uint32_t i = 0; i < rings->thread_count; i++) {
        if (rings->threads[i].started) {
            (void)pthread_join(rings->threads[i].thread, NULL);
            rings->threads[i].started = false;
        }
    }
    return atomic_load(&rings->error);
}

void rings_destroy(struct rings *rings)
{
    if (rings == NULL) {
        return;
    }
    (void)rings_stop(rings);
    for (uint32_t i = 0; i < rings->entry_count; i++) {
        if (rings->entries[i].header != NULL) {
            (void)munmap(rings->entries[i].header, ROOM_BYTES + rings->payload_bytes);
        }
    }
    if (rings->stopping >= 0) {
        (void)close(rings->stopping);
    }
    free(rings->entries);
    free(rings->threads);
    free(rings->registered);
    yielding_stop(&rings->yielding);
    (void)pthread_cond_destroy(&rings->changed);
    (void)pthread_mutex_destroy(&rings->lock);
    free(rings);
}

#else

int rings_start(struct dlfs_fuse *fuse, uint64_t payload_bytes, struct rings **out)
{
    (void)fuse, (void)payload_bytes, (void)out;
    return -ENOSYS;
}

int rings_register(struct rings *rings)
{
    (void)rings;
    return -ENOSYS;
}

int rings_stop(struct rings *rings)
{
    (void)rings;
    return 0;
}

void rings_destroy(struct rings *rings)
{
    (void)rings;
}

#endif
