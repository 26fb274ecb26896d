/*
 * One epoch of a dataset, from C: mount a volume, look a sample up by its path, read it, take the
 * epoch's global order, and read all of it in batches.
 *
 *     cc -std=c17 -Inative/include native/examples/epoch.c -Ldlfs/_native -ldlfs \
 *         -Wl,-rpath,$PWD/dlfs/_native -o epoch
 *     ./epoch photos 7 volume.img
 *     ./epoch photos 7 'nvme-tcp://10.0.0.5/nqn.2024-01.org.example:disk0?nsid=1'
 *
 * prints a line for every sample in the order of seed 7: its index, its length, the CRC32C of its
 * bytes as they arrived, and its path. A volume of several members takes the URI of each.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "dlfs/api.h"

#define BATCH_SAMPLES 64u

static int failed(const char *what, int64_t code, const char *message)
{
    fprintf(stderr, "epoch: %s: %s (%s)\n", what, message, dlfs_strerror((int)code));
    return 1;
}

static int sample_failed(const dlfs_dataset *dataset, const dlfs_failure *failure)
{
    char message[DLFS_MESSAGE_BYTES] = "";
    (void)dlfs_describe_failure(dataset, failure, message, sizeof message);
    return failed("read", failure->code, message);
}

/* Finds a sample by its path and reads it by itself: what a batch gave must be the same. */
static int read_one(dlfs_dataset *dataset, const char *path, uint32_t expected_crc32c)
{
    dlfs_failure failure;
    int64_t index = dlfs_find(dataset, path);
    if (index < 0) {
        return failed("find", index, path);
    }
    int64_t length = dlfs_length(dataset, (uint64_t)index);
    void *buffer = malloc((size_t)length + 1);
    if (buffer == NULL) {
        return failed("read", DLFS_E_LIMIT, "no memory");
    }
    int64_t got = dlfs_read_sample(dataset, (uint64_t)index, buffer, (uint64_t)length, &failure);
    uint32_t crc32c = got < 0 ? 0 : dlfs_crc32c(0, buffer, (size_t)got);
    free(buffer);
    if (got < 0) {
        return sample_failed(dataset, &failure);
    }
    return crc32c == expected_crc32c ? 0 : failed("read", DLFS_E_CHECKSUM, path);
}

/* Prints the samples of a batch, which must be those that come next in the order. */
static int print_batch(dlfs_dataset *dataset, const dlfs_batch *batch, const uint64_t *order)
{
    char path[DLFS_PATH_BYTES_MAX + 1];
    if (batch->failure_count > 0) {
        return sample_failed(dataset, &batch->failures[0]);
    }
    for (uint64_t i = 0; i < batch->count; i++) {
        const uint8_t *sample = batch->base + batch->offsets[i];
        uint32_t crc32c = dlfs_crc32c(0, sample, (size_t)batch->lengths[i]);
        int64_t code = dlfs_path(dataset, batch->indices[i], path, sizeof path);
        if (code < 0 || batch->indices[i] != order[i]) {
            return failed("read a batch", code, "another sample than the order says");
        }
        printf("%" PRIu64 " %" PRId64 " %08" PRIx32 " %s\n", batch->indices[i], batch->lengths[i],
               crc32c, path);
        if (i == 0 && read_one(dataset, path, crc32c) != 0) {
            return 1;
        }
    }
    return 0;
}

static int run(dlfs_dataset *dataset, uint64_t seed)
{
    dlfs_epoch epoch = {.seed = seed, .order = DLFS_ORDER_GLOBAL}; /* the rest: defaults */
    uint64_t count = dlfs_count(dataset), done = 0;
    uint64_t *order = malloc((size_t)(count + 1) * sizeof *order);
    dlfs_batch *batch = NULL;
    if (order == NULL) {
        return failed("begin", DLFS_E_LIMIT, "no memory");
    }
    int code = dlfs_begin(dataset, &epoch);
    if (code >= 0) {
        code = dlfs_order(dataset, 0, count, order);
    }
    int wrong = code < 0 ? failed("begin", code, "the epoch") : 0;
    while (!wrong && (code = dlfs_bread(dataset, BATCH_SAMPLES, &batch)) >= 0) {
        wrong = print_batch(dataset, batch, order + done);
        done += batch->count;
        dlfs_batch_release(batch);
    }
    if (!wrong && (code != DLFS_E_END || done != count)) {
        wrong = failed("read a batch", code, "the epoch ended early");
    }
    dlfs_end(dataset);
    free(order);
    return wrong;
}

int main(int count, char **arguments)
{
    char message[DLFS_MESSAGE_BYTES] = "";
    dlfs_volume *volume;
    dlfs_dataset *dataset;
    if (count < 4) {
        fprintf(stderr, "usage: epoch DATASET SEED URI...\n");
        return 2;
    }
    const char *const *uris = (const char *const *)(arguments + 3);
    int code = dlfs_mount(uris, (uint32_t)count - 3, message, sizeof message, &volume);
    if (code < 0) {
        return failed("mount", code, message);
    }
    code = dlfs_open(volume, arguments[1], NULL, message, sizeof message, &dataset);
    if (code < 0) {
        (void)dlfs_unmount(volume);
        return failed("open", code, message);
    }
    int wrong = run(dataset, strtoull(arguments[2], NULL, 10));
    (void)dlfs_close(dataset);
    (void)dlfs_unmount(volume);
    return wrong;
}
