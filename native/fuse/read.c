/*
 * Bytes of samples: verified as a whole, whatever part of them is asked for.
 *
 * A file that the kernel asks for in one request goes from the reader's memory straight to the
 * kernel, which keeps it. What is asked for in parts is read once and held meanwhile, until the
 * kernel has all of it. Without open there is nothing that says how long that takes, so it is held
 * at most until others need the room, or nobody has asked for a while.
 *
 * Large samples pass by the reader's memory. To keep them there as well would cost more than to
 * read them: fresh pages for each, and a copy.
 */
#include "service.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SAMPLE_BYTES_MAX (UINT64_C(4) << 30) /* larger ones would be held in memory whole */
#define WHOLE_BYTES_MAX (UINT64_C(1) << 20)  /* what the kernel asks for at once at most */
#define AWAKE_BYTES_MAX (128u << 10)         /* a larger reading is slept for */

/* Returns how many bytes that were. */
static uint64_t reply_bytes(struct dlfs_fuse *fuse, const struct waiter *waiter,
                            const uint8_t *data, uint64_t length)
{
    uint64_t left = waiter->offset < length ? length - waiter->offset : 0;
    uint64_t bytes = waiter->bytes < left ? waiter->bytes : left;
    const uint8_t *first = bytes > 0 ? data + waiter->offset : NULL;
    count(&fuse->counters.read_bytes, bytes);
    (void)fuse_reply_buf(waiter->request, (const char *)first, bytes);
    return bytes;
}

static bool is_whole(const struct waiter *waiter, uint64_t length)
{
    return waiter->offset == 0 && waiter->bytes >= length;
}

/* ---- from the device --------------------------------------------------------------------------
 */

struct sleeper {
    struct listening *listening;
    bool slept;
};

static void fall_asleep(void *argument)
{
    struct sleeper *sleeper = argument;
    sleeper->slept = true;
    listen_leave(sleeper->listening);
}

/* Reads a batch; stays awake for a small one, where nobody else has anything to ask. */
static int read_batch(struct dlfs_fuse *fuse, const struct slot *slot, const uint64_t *indices,
                      uint64_t sample_count, uint64_t bytes, dlfs_batch **batch)
{
    struct listening *listening = &fuse->listening;
    struct sleeper sleeper = {.listening = listening};
    bool awake =
        listen_alone(listening) && bytes <= AWAKE_BYTES_MAX && wakefulness_pays(&listening->device);
    int code =
        dlfs_reader_read_awake(slot->reader, indices, sample_count, awake ? listening->awake_us : 0,
                               fall_asleep, &sleeper, batch);
    if (awake) {
        wakefulness_tried(&listening->device, !sleeper.slept);
    }
    return code;
}

/* ---- one sample, in one request -------------------------------------------------------------- */

static void reply_failed(struct dlfs_fuse *fuse, const struct slot *slot,
                         const dlfs_failure *failure, const struct waiter *waiter)
{
    (void)fuse_reply_err(waiter->request, ask_error(fuse, slot->known.number, failure));
}

static void read_whole(struct dlfs_fuse *fuse, const struct slot *slot, uint64_t index,
                       const struct waiter *waiter)
{
    dlfs_batch *batch;
    int code = read_batch(fuse, slot, &index, 1, slot_length(slot, index), &batch);
    if (code < 0) {
        dlfs_failure failure = {.index = index, .code = code, .member = UINT32_MAX};
        reply_failed(fuse, slot, &failure, waiter);
        return;
    }
    if (batch->failure_count > 0) {
        reply_failed(fuse, slot, &batch->failures[0], waiter);
    } else {
        (void)reply_bytes(fuse, waiter, batch->base + batch->offsets[0],
                          (uint64_t)batch->lengths[0]);
    }
    dlfs_batch_release(batch);
}

/* ---- samples that are held ------------------------------------------------------------------- */

/* Answers all who waited for a sample, with its bytes or the failure. */
static void finish(struct dlfs_fuse *fuse, const struct slot *slot, struct held_sample *sample,
                   const dlfs_failure *failure)
{
    struct waiter *waiter = held_end(fuse->held, sample, failure == NULL);
    int error = 0;
    if (waiter != NULL && failure != NULL) {
        error = ask_error(fuse, slot->known.number, failure);
    }
    uint64_t given_bytes = 0;
    while (waiter != NULL) {
        struct waiter *next = waiter->next;
        if (failure != NULL) {
            (void)fuse_reply_err(waiter->request, error);
        } else {
            given_bytes += reply_bytes(fuse, waiter, sample->data, sample->bytes);
        }
        free(waiter);
        waiter = next;
    }
    if (failure == NULL) {
        held_release(fuse->held, sample, given_bytes);
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

/* Reads samples that were begun, as one batch. */
static void load(struct dlfs_fuse *fuse, const struct slot *slot, struct held_sample **samples,
                 uint32_t sample_count)
{
    uint64_t indices[AHEAD_SAMPLES] = {0};
    uint64_t bytes = 0;
    dlfs_batch *batch = NULL;
    for (uint32_t i = 0; i < sample_count; i++) {
        indices[i] = place_unpack(samples[i]->key).node.index;
    }
    for (uint32_t i = 0; i < sample_count; i++) {
        bytes += samples[i]->bytes;
    }
    int code = read_batch(fuse, slot, indices, sample_count, bytes, &batch);
    for (uint32_t i = 0; i < sample_count; i++) {
        dlfs_failure whole = {.index = indices[i], .code = code, .member = UINT32_MAX};
        const dlfs_failure *failure = code < 0 ? &whole : failure_at(batch, i);
        if (failure == NULL) {
            memcpy(samples[i]->own, batch->base + batch->offsets[i], samples[i]->bytes);
        }
        finish(fuse, slot, samples[i], failure);
    }
    if (code == 0) {
        dlfs_batch_release(batch);
    }
}

/*
 * Reads a sample that was begun, and is too large to be copied without need: it stays in its batch.
 * The reader does not keep it, since the kernel will.
 */
static void load_large(struct dlfs_fuse *fuse, const struct slot *slot, struct held_sample *sample)
{
    uint64_t index = place_unpack(sample->key).node.index;
    dlfs_batch *batch = NULL;
    listen_leave(&fuse->listening);
    int code = dlfs_reader_read_apart(slot->reader, &index, 1, &batch);
    dlfs_failure whole = {.index = index, .code = code, .member = UINT32_MAX};
    const dlfs_failure *failure = code < 0 ? &whole : failure_at(batch, 0);
    if (failure == NULL) {
        sample->batch = batch;
        sample->data = batch->base + batch->offsets[0];
    }
    finish(fuse, slot, sample, failure);
    if (code == 0 && failure != NULL) {
        dlfs_batch_release(batch);
    }
}

static uint64_t key_of(const struct slot *slot, uint64_t index)
{
    return place_pack(slot->known.number, (struct node){FILE_DEPTH, index});
}

/* Reads samples first..first+sample_count-1 that are not held, before anybody asks. */
static void load_ahead(struct dlfs_fuse *fuse, const struct slot *slot, uint64_t first,
                       uint32_t sample_count)
{
    struct held_sample *samples[AHEAD_SAMPLES];
    uint32_t begun = 0;
    for (uint64_t index = first; index < first + sample_count; index++) {
        uint64_t length = slot_length(slot, index);
        bool wanted = length > 0 && length <= AHEAD_SAMPLE_BYTES_MAX;
        if (wanted &&
            held_begin(fuse->held, key_of(slot, index), length, true, &samples[begun]) == 0) {
            begun++;
        }
    }
    count(&fuse->counters.ahead, begun);
    if (begun > 0) {
        load(fuse, slot, samples, begun);
    }
}

static void follow(struct dlfs_fuse *fuse, const struct slot *slot, uint64_t index)
{
    uint64_t first;
    uint32_t samples =
        ahead_follow(&fuse->ahead, slot->known.number, index, slot->locations, slot->count, &first);
    if (samples > 0) {
        load_ahead(fuse, slot, first, samples);
    }
}

void read_ahead_of(struct dlfs_fuse *fuse, struct slot *slot, uint64_t index)
{
    if (!ahead_looked_up(&fuse->ahead)) {
        return;
    }
    load_ahead(fuse, slot, index, 1);
    follow(fuse, slot, index);
}

/* Reads a sample that is asked for in parts, for all who do. False: it is there by now. */
static bool load_held(struct dlfs_fuse *fuse, const struct slot *slot, uint64_t index,
                      const struct waiter *waiter)
{
    struct held_sample *sample;
    struct held_sample *other;
    bool ahead;
    uint64_t key = key_of(slot, index);
    listen_leave(&fuse->listening); /* it may have to wait for room */
    int code = held_begin(fuse->held, key, slot_length(slot, index), false, &sample);
    if (code == -EEXIST) {
        return false;
    }
    if (code < 0) {
        (void)fuse_reply_err(waiter->request, -code);
        return true;
    }
    if (held_find(fuse->held, key, waiter, &ahead, &other) != HELD_PARKED) {
        (void)fuse_reply_err(waiter->request, ENOMEM);
    }
    if (sample->own == NULL) {
        load_large(fuse, slot, sample);
    } else {
        load(fuse, slot, &sample, 1);
    }
    return true;
}

/* ---- requests -------------------------------------------------------------------------------- */

static void read_sample(struct dlfs_fuse *fuse, const struct slot *slot, uint64_t index,
                        const struct waiter *waiter)
{
    uint64_t length = slot_length(slot, index);
    bool done = false;
    while (!done) {
        struct held_sample *sample;
        bool ahead;
        enum held_found found = held_find(fuse->held, key_of(slot, index), waiter, &ahead, &sample);
        count(&fuse->counters.ahead_used, ahead);
        done = true;
        if (found == HELD_DATA) {
            held_release(fuse->held, sample,
                         reply_bytes(fuse, waiter, sample->data, sample->bytes));
        } else if (found == HELD_NO_MEMORY) {
            (void)fuse_reply_err(waiter->request, ENOMEM);
        } else if (found == HELD_NONE && is_whole(waiter, length) && length <= WHOLE_BYTES_MAX) {
            read_whole(fuse, slot, index, waiter);
        } else if (found == HELD_NONE) {
            done = load_held(fuse, slot, index, waiter);
        }
    }
}

void handle_read(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t offset,
                 struct fuse_file_info *info)
{
    (void)info;
    struct dlfs_fuse *fuse = fuse_of(request);
    struct place place = place_unpack(inode);
    uint64_t index = place.node.index;
    struct waiter waiter = {.request = request, .offset = (uint64_t)offset, .bytes = bytes};
    struct slot *slot;
    count(&fuse->counters.reads, 1);
    int error = inode == ROOT_INODE || place.node.depth != FILE_DEPTH
                    ? EISDIR
                    : slot_enter(fuse, place.slot, &slot);
    if (error != 0) {
        (void)fuse_reply_err(request, error);
        return;
    }
    uint64_t length = index < slot->count ? slot_length(slot, index) : 0;
    if (index >= slot->count) {
        (void)fuse_reply_err(request, ESTALE);
    } else if (waiter.offset >= length) {
        (void)reply_bytes(fuse, &waiter, NULL, 0);
    } else if (length > SAMPLE_BYTES_MAX) {
        dlfs_failure failure = {.index = index, .code = DLFS_E_LIMIT, .member = UINT32_MAX};
        reply_failed(fuse, slot, &failure, &waiter);
    } else {
        read_sample(fuse, slot, index, &waiter);
    }
    if (offset == 0 && index < slot->count) {
        ahead_was_read(&fuse->ahead);
        follow(fuse, slot, index);
    }
    slot_leave(fuse, slot);
}
