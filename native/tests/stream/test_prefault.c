/*
 * Prefaulting: two threads map the memory of an epoch once, and reads wait for it, also where it
 * cannot be mapped.
 */
#define LARGE_EVERY 6u /* several steps of memory */

#include <errno.h>
#include <sys/mman.h>

#include "directory/directory.h"
#include "reader/reader_tests.h"
#include "stream/state.h"

#define STEP ((size_t)2 << 20)
#define STEPS 6u
#define BATCH 16u

static void take(dlfs_reader *reader, const dlfs_sequence *sequence, uint64_t stop)
{
    dlfs_stream_config config = {
        .sequence = sequence, .stride = 1, .count = COUNT, .plan = DLFS_PLAN_CHUNKS};
    dlfs_stream *stream;
    CHECK_EQ(dlfs_stream_create(reader, &config, &stream), 0);
    uint64_t taken = 0;
    for (dlfs_batch *batch; taken < stop && dlfs_stream_next(stream, BATCH, -1, &batch) == 0;) {
        CHECK_EQ(batch->failure_count, 0);
        for (uint64_t i = 0; i < batch->count; i++) {
            check_sample(batch, i);
        }
        taken += batch->count;
        dlfs_batch_release(batch);
    }
    CHECK(taken >= stop);
    dlfs_stream_destroy(stream);
}

/* Reads the first epoch up to a position, and the second one completely. */
static void epochs(uint64_t first_stop, uint32_t flags)
{
    struct dataset dataset;
    dataset_create(&dataset, NULL);
    CHECK(dataset.chunk_count * CHUNK > 2 * STEP);
    dlfs_reader *reader = reader_with(&dataset, DEVICE_BYTES, 0, flags);
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 3, 0, 4, &sequence),
             0);
    take(reader, sequence, first_stop);
    take(reader, sequence, COUNT);
    dlfs_sequence_destroy(sequence);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/* Plays the stream's thread, which reads into slots of a quarter of a step one after the other. */
static void reads_wait(uint8_t *arena)
{
    dlfs_reader reader = {
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .arena = arena,
        .arena_bytes = STEPS * STEP,
        .chunk_shift = 19,
        .chunk_count = STEPS * 4,
        .dataset_fits = true,
    };
    dlfs_stream stream = {.reader = &reader, .plan = DLFS_PLAN_CHUNKS};
    prefault_start(&stream);
    CHECK(reader.prefaulted);
    for (uint32_t slot = 0; slot < STEPS * 4;) {
        pthread_mutex_lock(&reader.lock);
        bool ready = prefault_covers(&stream, slot, 1);
        stream.prefault.wanted = !ready;
        bool helping = prefault_claim(&stream);
        CHECK(!ready || !helping);
        pthread_mutex_unlock(&reader.lock);
        if (helping) {
            prefault_help(&stream);
        }
        slot += ready;
    }
    prefault_stop(&stream);
    CHECK(prefault_covers(&stream, 0, STEPS * 4));
    dlfs_stream second = {.reader = &reader, .plan = DLFS_PLAN_CHUNKS};
    prefault_start(&second);
    CHECK(prefault_covers(&second, 0, 1)); /* the first stream maps it */
    prefault_stop(&second);
}

static void touched(void)
{
    void *arena;
    CHECK_EQ(dlfs_memory_map(STEPS * STEP, &arena, NULL), 0);
    reads_wait(arena);
    unsigned char resident[STEPS * STEP / 4096];
    CHECK_EQ(mincore(arena, STEPS * STEP, resident), 0);
    for (size_t page = 0; page < sizeof(resident); page++) {
        CHECK(resident[page] & 1);
    }
    dlfs_memory_unmap(arena, STEPS * STEP);
}

static void cannot_be_touched(void)
{
    void *arena = mmap(NULL, STEPS * STEP, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(arena != MAP_FAILED);
    reads_wait(arena);
    munmap(arena, STEPS * STEP);
}

int main(void)
{
    touched();
    cannot_be_touched();
    epochs(COUNT, 0);
    epochs(COUNT, DLFS_READER_SHARED);
    epochs(1, 0);
    return 0;
}
