/*
 * A sample of up to a chunk is read and verified as a whole, whatever part of it is requested; of a
 * larger one, the parts that are requested (dlfs_reader_read_part), unless these are all of it.
 *
 * A sample goes through the open-file cache, which has one thread read it for all requests. One
 * that the kernel requests as a whole does not stay there: the kernel caches it. One that is
 * requested in parts stays pinned in the reader's memory, until the kernel has all of it. Without
 * OPEN requests nothing says when a program is done, so a sample also leaves the cache when others
 * need its room, or some time after its last use. Of a sample larger than a chunk, the reader
 * caches the chunks.
 *
 * Samples that were read ahead for a program that goes from index to index wait in the same cache.
 */
#include "operations.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dlfs/part.h"
#include "inode.h"

#define WHOLE_BYTES_MAX (UINT64_C(1) << 20) /* largest request of the kernel */
#define BUSY_POLL_BYTES_MAX (128u << 10)    /* largest read that a thread busy-polls for */
#define MOVES_MAX 20u /* most times that a request follows its dataset to other chunks */
#define PIN_SHARE 2u  /* the open files of a dataset pin up to half of its reader's share */

/* Replies with the requested part of a sample. Returns its bytes. */
static uint64_t reply_part(const struct read_request *request, const uint8_t *data, uint64_t length)
{
    uint64_t left = request->offset < length ? length - request->offset : 0;
    uint64_t bytes = request->bytes < left ? request->bytes : left;
    const uint8_t *first = bytes > 0 ? data + request->offset : NULL;
    (void)reply_data(&request->reply, first, bytes);
    return bytes;
}

static bool is_whole(const struct read_request *request, uint64_t length)
{
    return request->offset == 0 && request->bytes >= length;
}

static uint64_t key_of(const struct dataset_entry *dataset, uint64_t index)
{
    return inode_pack(dataset->number, (struct tree_node){FILE_DEPTH, index});
}

/* ---- the early read -------------------------------------------------------------------------- */

/*
 * Puts a read in the place of the present one, which it gives up under the lock, without a wait.
 * So no thread uses the reader for it any more when early_read_drop returns. The lock is held.
 */
static void replace_early_read(struct dlfs_fuse *fuse, struct early_read with)
{
    struct early_read before = fuse->early_read;
    fuse->early_read = with;
    atomic_store_explicit(&fuse->has_early_read, with.read != NULL, memory_order_relaxed);
    if (before.read != NULL) {
        dlfs_pending_read_cancel(before.read);
        dataset_return_reader(&fuse->datasets, before.dataset, before.reader);
    }
}

void early_read_drop(struct dlfs_fuse *fuse)
{
    (void)pthread_mutex_lock(&fuse->early_lock);
    replace_early_read(fuse, (struct early_read){0});
    (void)pthread_mutex_unlock(&fuse->early_lock);
}

/* Starts to read a sample, unless it is in the cache or may be requested in parts. */
static void start_early_read(struct dlfs_fuse *fuse, struct dataset_entry *dataset, uint64_t index)
{
    struct early_read early = {.dataset = dataset, .index = index};
    uint64_t length = dataset_length(dataset, index);
    if (length == 0 || length > READAHEAD_SAMPLE_BYTES_MAX ||
        length > dlfs_directory_chunk_bytes(dataset->directory) ||
        file_cache_has(&fuse->cache, key_of(dataset, index))) {
        return;
    }
    early_read_drop(fuse); /* also for its queue pair */
    dlfs_reader *reader = dataset_take_reader(&fuse->datasets, dataset, &early.reader);
    if (dlfs_reader_begin(reader, index, &early.read) < 0) {
        dataset_return_reader(&fuse->datasets, dataset, early.reader);
        return;
    }
    (void)pthread_mutex_lock(&fuse->early_lock);
    replace_early_read(fuse, early);
    (void)pthread_mutex_unlock(&fuse->early_lock);
    if (!dataset_has_reader(dataset, early.reader)) {
        early_read_drop(fuse); /* its replacement has looked before: it waits for this reader */
    }
    count(&fuse->counters.readahead_samples, 1);
}

/*
 * Returns the early read of a sample, for the caller to finish, and then to return the reader with
 * this number. NULL: there is none. Gives up that of another sample, which the program has left.
 */
static dlfs_pending_read *take_early_read(struct dlfs_fuse *fuse,
                                          const struct dataset_entry *dataset, uint64_t index,
                                          uint32_t *reader)
{
    if (!atomic_load_explicit(&fuse->has_early_read, memory_order_relaxed)) {
        return NULL;
    }
    dlfs_pending_read *read = NULL;
    (void)pthread_mutex_lock(&fuse->early_lock);
    struct early_read *early = &fuse->early_read;
    if (early->dataset == dataset && early->index == index) {
        *reader = early->reader;
        read = early->read;
        early->read = NULL;
    }
    replace_early_read(fuse, (struct early_read){0});
    (void)pthread_mutex_unlock(&fuse->early_lock);
    return read;
}

/* ---- the device ------------------------------------------------------------------------------ */

struct device_wait {
    struct receivers *receivers;
    bool slept;
};

/* Lets another thread receive. */
static void before_sleep(void *argument)
{
    struct device_wait *wait = argument;
    wait->slept = true;
    receivers_release(wait->receivers);
}

/*
 * Reads a batch, or finishes the early read of a single sample. The sole receiver busy-polls for a
 * small one, since no other thread needs it. *reader gets the number of the dataset's reader.
 */
static int read_batch(struct dlfs_fuse *fuse, struct dataset_entry *dataset,
                      const uint64_t *indices, uint64_t sample_count, uint64_t bytes,
                      uint32_t *reader, dlfs_batch **batch)
{
    struct receivers *receivers = &fuse->receivers;
    struct device_wait wait = {.receivers = receivers};
    bool busy_poll = receivers_is_sole(receivers) && bytes <= BUSY_POLL_BYTES_MAX &&
                     busy_poll_pays(&receivers->device);
    uint32_t poll_us = busy_poll ? receivers->busy_poll_us : 0;
    dlfs_pending_read *early =
        sample_count == 1 ? take_early_read(fuse, dataset, *indices, reader) : NULL;
    count(&fuse->counters.early_hits, early != NULL);
    int code =
        early != NULL
            ? dlfs_pending_read_finish(early, poll_us, before_sleep, &wait, batch)
            : dlfs_reader_read_polling(dataset_take_reader(&fuse->datasets, dataset, reader),
                                       indices, sample_count, poll_us, before_sleep, &wait, batch);
    dataset_return_reader(&fuse->datasets, dataset, *reader);
    if (busy_poll) {
        busy_poll_note(&receivers->device, !wait.slept);
    }
    return code;
}

/* ---- failures -------------------------------------------------------------------------------- */

static void read_sample(struct dlfs_fuse *fuse, struct dataset_entry *dataset, uint64_t index,
                        const struct read_request *request);

/* Answers a request with an errno; or, if that is EAGAIN, by the reader that is present now. */
static void reply_failure(struct dlfs_fuse *fuse, struct dataset_entry *dataset, uint64_t index,
                          int error, const struct read_request *request)
{
    struct read_request again = *request;
    if (error == EAGAIN && again.moves < MOVES_MAX) {
        again.moves++;
        again.next = NULL;
        read_sample(fuse, dataset, index, &again);
        return;
    }
    reply_error(&request->reply, error == EAGAIN ? EIO : error);
}

/* ---- parts of large samples ------------------------------------------------------------------ */

/* Returns true if a request is answered by the parts of a sample: it is for less than the whole
 * sample, which is larger than a chunk and was not read ahead. */
static bool takes_parts(struct dlfs_fuse *fuse, const struct dataset_entry *dataset, uint64_t index,
                        const struct read_request *request)
{
    uint64_t length = dataset_length(dataset, index);
    return length > dlfs_directory_chunk_bytes(dataset->directory) &&
           (length > WHOLE_BYTES_MAX ||
            (!is_whole(request, length) && !file_cache_has(&fuse->cache, key_of(dataset, index))));
}

/* A part on its way from the reader's memory to the kernel. */
struct sent_part {
    const struct reply_path *reply;
    uint64_t bytes;
    bool replied;
    uint8_t *gathered; /* what has come so far of a part that does not come at once */
    uint64_t gathered_bytes;
};

/* Replies with a part that comes at once; gathers one that does not. */
static void send_pieces(void *argument, const struct iovec *pieces, uint32_t piece_count)
{
    struct sent_part *part = argument;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < piece_count; i++) {
        bytes += pieces[i].iov_len;
    }
    if (bytes == part->bytes) {
        part->replied = true;
        (void)reply_pieces(part->reply, pieces, piece_count);
        return;
    }
    if (part->gathered_bytes == 0) {
        part->gathered = malloc(part->bytes);
    }
    for (uint32_t i = 0; i < piece_count && part->gathered != NULL; i++) {
        memcpy(part->gathered + part->gathered_bytes, pieces[i].iov_base, pieces[i].iov_len);
        part->gathered_bytes += pieces[i].iov_len;
    }
}

/* Reads the requested part of a large sample. */
static void read_part(struct dlfs_fuse *fuse, struct dataset_entry *dataset, uint64_t index,
                      const struct read_request *request)
{
    uint64_t left = dataset_length(dataset, index) - request->offset;
    dlfs_part part = {.index = index,
                      .offset_bytes = request->offset,
                      .length_bytes = request->bytes < left ? request->bytes : left};
    struct sent_part sent = {.reply = &request->reply, .bytes = part.length_bytes};
    receivers_release(&fuse->receivers);
    uint32_t reader;
    dlfs_failure failure;
    int code = dlfs_reader_send_part(dataset_take_reader(&fuse->datasets, dataset, &reader), &part,
                                     send_pieces, &sent, &failure);
    dataset_return_reader(&fuse->datasets, dataset, reader);
    if (code < 0) {
        failure.member = failure.code == 0 ? UINT32_MAX : failure.member; /* of the whole read */
        failure.code = code;
        int error = upcall_report_failure(&fuse->upcalls, dataset->number, reader, &failure);
        reply_failure(fuse, dataset, index, error, request);
    } else if (!sent.replied && sent.gathered_bytes == part.length_bytes) {
        (void)reply_data(&request->reply, sent.gathered, sent.gathered_bytes);
    } else if (!sent.replied) {
        reply_error(&request->reply, ENOMEM);
    }
    free(sent.gathered);
}

/*
 * Brings a range of a sample into the reader's memory, until the thread is to end. Failures are
 * left to the requests for it.
 */
static void load_range(struct dlfs_fuse *fuse, struct dataset_entry *dataset,
                       const struct file_range *range)
{
    dlfs_part part = {range->index, range->offset, range->bytes};
    uint32_t reader;
    dlfs_failure failure;
    (void)dlfs_reader_load_part(dataset_take_reader(&fuse->datasets, dataset, &reader), &part,
                                &fuse->readahead_thread.ending, &failure);
    dataset_return_reader(&fuse->datasets, dataset, reader);
}

/* Reads ahead in a file that a program reads in order, after one of its requests. */
static void read_ahead_in_file(struct dlfs_fuse *fuse, struct dataset_entry *dataset,
                               uint64_t index, const struct read_request *request)
{
    struct readahead_job job = {.dataset = dataset->number};
    job.range = readahead_in_file(&fuse->readahead, dataset->number, index, request->offset,
                                  request->bytes, dataset_length(dataset, index),
                                  dataset_share_bytes(&fuse->datasets, dataset));
    if (job.range.bytes > 0) {
        readahead_thread_post(&fuse->readahead_thread, &job);
    }
}

/* ---- whole samples --------------------------------------------------------------------------- */

/*
 * Ends the reading of a sample, and answers all requests that were queued for it: with its bytes,
 * or the failure of a reader. It is cached with its batch, unless that is NULL.
 */
static void end_sample(struct dlfs_fuse *fuse, struct dataset_entry *dataset,
                       struct cached_file *sample, struct pinned_batch *pinned, const uint8_t *data,
                       uint32_t reader, const dlfs_failure *failure)
{
    uint64_t index = inode_unpack(sample->key).node.index;
    uint64_t length = sample->bytes;
    struct read_request *request = file_cache_finish(&fuse->cache, sample, pinned, data);
    int error = 0;
    if (request != NULL && failure != NULL) {
        error = upcall_report_failure(&fuse->upcalls, dataset->number, reader, failure);
    }
    uint64_t sent_bytes = 0;
    while (request != NULL) {
        struct read_request *next = request->next;
        if (failure != NULL) {
            reply_failure(fuse, dataset, index, error, request);
        } else {
            sent_bytes += reply_part(request, data, length);
        }
        free(request);
        request = next;
    }
    if (pinned != NULL) {
        file_cache_unpin(&fuse->cache, sample, sent_bytes);
    }
}

static const dlfs_failure *failure_at(const dlfs_batch *batch, uint64_t position)
{
    for (uint64_t i = 0; i < batch->failure_count; i++) {
        if (batch->failures[i].position == position) {
            return &batch->failures[i];
        }
    }
    return NULL;
}

/* Returns what the open files of a dataset may pin. */
static uint64_t pinned_bytes_max(struct dlfs_fuse *fuse, struct dataset_entry *dataset)
{
    return dataset_share_bytes(&fuse->datasets, dataset) / PIN_SHARE;
}

/* Returns what samples of these bytes may pin: they begin anywhere in slots, of which they fill
 * more than half if they are several. */
static uint64_t pinned_bytes(const struct dataset_entry *dataset, uint64_t bytes, bool several)
{
    return (several ? 2 * bytes : bytes) + dlfs_directory_chunk_bytes(dataset->directory);
}

/*
 * Reads samples that file_cache_find has added, as one batch. They stay in the cache if there is a
 * reservation, unless the reader had no slots for them.
 */
static void load(struct dlfs_fuse *fuse, struct dataset_entry *dataset,
                 struct cached_file **samples, uint32_t sample_count, struct pinned_batch *reserved)
{
    uint64_t indices[READAHEAD_SAMPLES_MAX] = {0};
    uint64_t bytes = 0;
    dlfs_batch *batch = NULL;
    for (uint32_t i = 0; i < sample_count; i++) {
        indices[i] = inode_unpack(samples[i]->key).node.index;
        bytes += samples[i]->bytes;
    }
    uint32_t reader;
    int code = read_batch(fuse, dataset, indices, sample_count, bytes, &reader, &batch);
    bool stays =
        code == 0 && reserved != NULL && dataset_has_memory(&fuse->datasets, dataset, batch->base);
    if (stays) {
        reserved->batch = batch;
    }
    for (uint32_t i = 0; i < sample_count; i++) {
        dlfs_failure whole = {.index = indices[i], .code = code, .member = UINT32_MAX};
        const dlfs_failure *failure = code < 0 ? &whole : failure_at(batch, i);
        const uint8_t *data = failure == NULL ? batch->base + batch->offsets[i] : NULL;
        end_sample(fuse, dataset, samples[i], stays && failure == NULL ? reserved : NULL, data,
                   reader, failure);
    }
    file_cache_end_batch(&fuse->cache, reserved);
    if (code == 0 && !stays) {
        dlfs_batch_release(batch);
    }
}

/* Returns how many of the samples from first on are to be read ahead: as many as have room. */
static uint32_t samples_with_room(struct dlfs_fuse *fuse, struct dataset_entry *dataset,
                                  uint64_t first, uint32_t sample_count, uint64_t *bytes)
{
    uint64_t most = pinned_bytes_max(fuse, dataset);
    uint32_t found = 0;
    for (*bytes = 0; found < sample_count; found++) {
        uint64_t length = dataset_length(dataset, first + found);
        if (length > READAHEAD_SAMPLE_BYTES_MAX ||
            pinned_bytes(dataset, *bytes + length, true) > most) {
            break;
        }
        *bytes += length;
    }
    return found;
}

/* Reads samples first..first+sample_count-1 into the cache, except those that it has. */
static void read_ahead(struct dlfs_fuse *fuse, struct dataset_entry *dataset, uint64_t first,
                       uint32_t sample_count)
{
    struct cached_file *samples[READAHEAD_SAMPLES_MAX];
    uint32_t added = 0;
    uint64_t bytes;
    sample_count = samples_with_room(fuse, dataset, first, sample_count, &bytes);
    struct pinned_batch *reserved =
        file_cache_begin_batch(&fuse->cache, &dataset->pins, pinned_bytes(dataset, bytes, true),
                               pinned_bytes_max(fuse, dataset));
    if (reserved == NULL) {
        return;
    }
    for (uint64_t index = first; index < first + sample_count; index++) {
        uint64_t length = dataset_length(dataset, index);
        if (length > 0 && file_cache_find(&fuse->cache, key_of(dataset, index), length, NULL,
                                          &samples[added]) == FILE_CACHE_MISS) {
            added++;
        }
    }
    count(&fuse->counters.readahead_samples, added);
    if (added > 0) {
        load(fuse, dataset, samples, added, reserved);
    } else {
        file_cache_end_batch(&fuse->cache, reserved);
    }
}

void read_ahead_job(void *fuse, const struct readahead_job *job)
{
    struct dlfs_fuse *mount = fuse;
    struct dataset_entry *dataset;
    if (dataset_acquire(&mount->datasets, job->dataset, &dataset) == 0) {
        if (job->range.bytes > 0) {
            load_range(mount, dataset, &job->range);
        } else {
            read_ahead(mount, dataset, job->plan.first, job->plan.count);
        }
        dataset_release(&mount->datasets, dataset);
    }
}

static void read_ahead_in_sequence(struct dlfs_fuse *fuse, struct dataset_entry *dataset,
                                   uint64_t index)
{
    struct readahead_plan plan = readahead_advance(&fuse->readahead, dataset->number, index,
                                                   dataset->locations, dataset->count);
    struct readahead_job job = {.dataset = dataset->number, .plan = plan};
    if (plan.count > 0 && is_over_uring(fuse)) {
        readahead_thread_post(&fuse->readahead_thread, &job);
    } else if (plan.count > 0) {
        read_ahead(fuse, dataset, plan.first, plan.count);
    }
}

void read_ahead_on_lookup(struct dlfs_fuse *fuse, struct dataset_entry *dataset, uint64_t index)
{
    /*
     * If one program uses the mount, its request for the content comes next. If several do, other
     * requests come first: over io_uring they would wait for this thread; through /dev/fuse other
     * threads receive them.
     */
    bool sole = receivers_is_sole(&fuse->receivers);
    if ((is_over_uring(fuse) && !sole) || !readahead_on_lookup(&fuse->readahead)) {
        return;
    }
    if (sole) {
        start_early_read(fuse, dataset, index);
    } else {
        read_ahead(fuse, dataset, index, 1);
    }
    read_ahead_in_sequence(fuse, dataset, index);
}

/* ---- requests -------------------------------------------------------------------------------- */

static void read_sample(struct dlfs_fuse *fuse, struct dataset_entry *dataset, uint64_t index,
                        const struct read_request *request)
{
    uint64_t length = dataset_length(dataset, index);
    struct pinned_batch *reserved = NULL;
    struct cached_file *sample;
    if (takes_parts(fuse, dataset, index, request)) {
        read_part(fuse, dataset, index, request);
        read_ahead_in_file(fuse, dataset, index, request);
        return;
    }
    switch (file_cache_find(&fuse->cache, key_of(dataset, index), length, request, &sample)) {
    case FILE_CACHE_HIT:
        file_cache_unpin(&fuse->cache, sample, reply_part(request, sample->data, sample->bytes));
        break;
    case FILE_CACHE_MISS:
        if (!is_whole(request, length)) {
            reserved = file_cache_begin_batch(&fuse->cache, &dataset->pins,
                                              pinned_bytes(dataset, length, false),
                                              pinned_bytes_max(fuse, dataset));
        }
        load(fuse, dataset, &sample, 1, reserved);
        break;
    case FILE_CACHE_QUEUED:
        break;
    case FILE_CACHE_NO_MEMORY:
        reply_error(&request->reply, ENOMEM);
        break;
    }
}

void handle_read(const struct kernel_request *request)
{
    struct dlfs_fuse *fuse = fuse_of(request);
    struct inode inode = inode_unpack(request->inode);
    struct fuse_read_in read;
    memcpy(&read, request->arguments, sizeof read);
    uint64_t index = inode.node.index;
    struct read_request part = {.reply = request->reply, .offset = read.offset, .bytes = read.size};
    struct dataset_entry *dataset;
    count(&fuse->counters.reads, 1);
    int error = request->inode == ROOT_INODE || inode.node.depth != FILE_DEPTH
                    ? EISDIR
                    : dataset_acquire(&fuse->datasets, inode.dataset, &dataset);
    if (error != 0) {
        reply_error(&request->reply, error);
        return;
    }
    uint64_t length = index < dataset->count ? dataset_length(dataset, index) : 0;
    if (index >= dataset->count) {
        reply_error(&request->reply, ESTALE);
    } else if (part.offset >= length) {
        (void)reply_part(&part, NULL, 0);
    } else {
        read_sample(fuse, dataset, index, &part);
    }
    if (read.offset == 0 && index < dataset->count) {
        readahead_on_read(&fuse->readahead);
        read_ahead_in_sequence(fuse, dataset, index);
    }
    dataset_release(&fuse->datasets, dataset);
}
