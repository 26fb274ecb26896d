/*
 * Tests that a client reads samples of resident chunks itself and others through the service.
 */
#define LARGE_EVERY 1u /* no sample is larger than a chunk */

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "channel/channel.h"
#include "channel/channel_tests.h"

#define WHOLE (16u << 20) /* memory for the whole dataset */
#define THREADS 3u
#define BATCH 40u

static struct connection attach_to(const struct service *service)
{
    struct connection to = connect_to(service);
    CHECK_EQ(dlfs_client_attach(to.client, service->dataset.directory, 0), 0);
    return to;
}

static uint64_t requests_of(const dlfs_client *client)
{
    dlfs_client_stats stats;
    dlfs_client_get_stats(client, &stats);
    return stats.requests;
}

static void read_everything(dlfs_client *client)
{
    dlfs_batch *batch = read_from(client, 0, COUNT);
    check_batch(batch);
    dlfs_batch_release(batch);
}

static void disconnect(struct connection to)
{
    dlfs_client_destroy(to.client);
    wait_ended(to.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(to.channel);
}

/* Resident samples are read without a request or a pin, and they are counted. */
static void resident_samples_need_no_request(void)
{
    struct service service;
    service_start(&service, WHOLE, WHOLE, NULL);
    struct connection to = attach_to(&service);
    read_everything(to.client);
    uint64_t requests = requests_of(to.client);
    CHECK(requests > 0);
    dlfs_batch *unreleased = read_from(to.client, 3, BATCH);
    read_everything(to.client);
    check_batch(unreleased);
    CHECK_EQ(requests_of(to.client), requests);
    wait_batches_out(to.channel, 0);
    CHECK_EQ(stats_of(to.channel).pinned_bytes, 0);
    CHECK_EQ(stats_of(to.channel).samples, 2 * COUNT + BATCH);
    CHECK_EQ(stats_of(to.channel).batches, 3);
    dlfs_reader_stats stats;
    dlfs_reader_get_stats(service.reader, &stats);
    CHECK_EQ(stats.samples, 2 * COUNT + BATCH);
    CHECK_EQ(stats.sample_bytes, stats_of(to.channel).sample_bytes);
    dlfs_client_destroy(to.client); /* its batch stays valid */
    check_batch(unreleased);
    CHECK_EQ(stats_of(to.channel).ended, 0);
    dlfs_batch_release(unreleased);
    wait_ended(to.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(to.channel);
    service_stop(&service);
}

static void single_samples(void)
{
    struct service service;
    uint8_t buffer[CHUNK];
    service_start(&service, WHOLE, WHOLE, NULL);
    struct connection to = attach_to(&service);
    CHECK_EQ(dlfs_client_get(to.client, 1, buffer, sizeof(buffer), DLFS_GET_CACHED), -EAGAIN);
    read_everything(to.client);
    uint64_t requests = requests_of(to.client);
    for (uint64_t index = 0; index < COUNT; index++) {
        uint64_t length = sample_length(index);
        CHECK_EQ(dlfs_client_get(to.client, index, buffer, length, DLFS_GET_CACHED), length);
        check_bytes(buffer, index);
        if (length > 0) {
            CHECK_EQ(dlfs_client_get(to.client, index, buffer, length - 1, 0), -ERANGE);
        }
    }
    CHECK_EQ(requests_of(to.client), requests);
    uint64_t index = COUNT;
    dlfs_batch *batch;
    CHECK_EQ(dlfs_client_get(to.client, COUNT, buffer, sizeof(buffer), 0), -EINVAL);
    CHECK_EQ(dlfs_client_read(to.client, &index, 1, &batch), -EINVAL);
    CHECK_EQ(dlfs_client_read(to.client, &index, 0, &batch), 0);
    CHECK_EQ(batch->count, 0);
    dlfs_batch_release(batch);
    disconnect(to);
    service_stop(&service);
}

static uint64_t device_reads_of(dlfs_client *client)
{
    dlfs_reader_stats stats;
    CHECK_EQ(dlfs_client_reader_stats(client, &stats), 0);
    return stats.reads;
}

static void *read_and_stream(void *argument)
{
    const struct service *service = argument;
    struct connection to = attach_to(service);
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(service->dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 3, 4, 2,
                                  &sequence),
             0);
    for (uint32_t plan = DLFS_PLAN_DIRECT; plan <= DLFS_PLAN_CHUNK_COPY; plan++) {
        dlfs_stream_config config = {
            .sequence = sequence, .stride = 1, .count = COUNT, .plan = plan};
        CHECK_EQ(dlfs_client_stream_open(to.client, &config), plan);
        dlfs_batch *batch;
        for (uint64_t first = 0; dlfs_client_stream_next(to.client, 17, -1, &batch) == 0; first++) {
            check_batch(batch);
            dlfs_batch_release(batch);
            batch = read_from(to.client, first * 11, BATCH);
            check_batch(batch);
            dlfs_batch_release(batch);
        }
        CHECK_EQ(dlfs_client_stream_close(to.client), 0);
    }
    dlfs_sequence_destroy(sequence);
    disconnect(to);
    return NULL;
}

/* Memory for little more than the dataset suffices for all plans at once with resident chunks. Its
 * index takes less than a chunk. */
static void little_room_beside(void)
{
    struct service service;
    pthread_t threads[THREADS];
    struct dataset measured;
    dataset_create(&measured, NULL);
    uint64_t memory_bytes =
        (measured.chunk_count + 1 + 2 * SLOTS_MIN) * CHUNK * OTHERS_SHARE / (OTHERS_SHARE - 1) +
        CHUNK;
    dataset_destroy(&measured);
    service_start(&service, memory_bytes, memory_bytes / 2, NULL);
    for (unsigned i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, read_and_stream, &service), 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    struct connection to = attach_to(&service);
    read_everything(to.client); /* loads the chunks that no stream loaded */
    uint64_t reads = device_reads_of(to.client);
    read_everything(to.client); /* packed samples need a request to the service, but no device */
    CHECK_EQ(device_reads_of(to.client), reads);
    disconnect(to);
    service_stop(&service);
}

/* Chunks with failed samples do not become resident: each read is a request. */
static void bad_chunks(void)
{
    dlfs_fault_config faults = {.bad_first_bytes = DATA_OFFSET + 3 * CHUNK,
                                .bad_length_bytes = BLOCK};
    struct service service;
    service_start(&service, WHOLE, WHOLE, &faults);
    struct connection to = attach_to(&service);
    uint64_t failures[2];
    for (int round = 0; round < 2; round++) {
        uint64_t before = requests_of(to.client);
        dlfs_batch *batch = read_from(to.client, 0, COUNT);
        failures[round] = batch->failure_count;
        for (uint64_t i = 0; i < COUNT; i++) {
            if (batch->lengths[i] >= 0) {
                check_sample(batch, i);
            }
        }
        dlfs_batch_release(batch);
        CHECK_EQ(requests_of(to.client), before + 1);
    }
    CHECK(failures[0] > 0);
    CHECK_EQ(failures[1], failures[0]);
    disconnect(to);
    service_stop(&service);
}

/* Chunks are not resident if the dataset does not fit; attaching a directory has no effect. */
static void small_memory(void)
{
    struct service service;
    service_start(&service, 8 * CHUNK, 8 * CHUNK, NULL);
    struct connection to = attach_to(&service);
    for (uint64_t first = 0; first < 20; first++) {
        dlfs_batch *batch = read_from(to.client, first % 2, 3);
        check_batch(batch);
        dlfs_batch_release(batch);
    }
    CHECK_EQ(requests_of(to.client), 20);
    disconnect(to);
    service_stop(&service);
}

/* A client that sends no requests learns of lost members from the other clients' answers. */
static void lost_members_are_known(void)
{
    struct service service;
    service_start(&service, WHOLE, WHOLE, NULL);
    struct connection silent = attach_to(&service);
    struct connection other = attach_to(&service);
    read_everything(silent.client);
    atomic_store(&service.reader->members[0].lost_until_ns, UINT64_MAX);
    (void)dlfs_client_member_code(other.client, 0);
    read_everything(silent.client);
    CHECK_EQ(dlfs_client_lost_members(other.client), 1);
    CHECK_EQ(dlfs_client_lost_members(silent.client), 1);
    atomic_store(&service.reader->members[0].lost_until_ns, 0);
    (void)dlfs_client_member_code(other.client, 0);
    CHECK_EQ(dlfs_client_lost_members(silent.client), 0);
    disconnect(other);
    disconnect(silent);
    service_stop(&service);
}

/* The client notices the end of the service without sending requests. */
static void service_ends(void)
{
    struct service service;
    uint64_t index = 7;
    uint8_t byte;
    int code;
    service_start(&service, WHOLE, WHOLE, NULL);
    struct connection to = attach_to(&service);
    read_everything(to.client);
    dlfs_batch *unreleased = read_from(to.client, 1, BATCH);
    dlfs_channel_destroy(to.channel);
    do {
        dlfs_batch *batch;
        code = dlfs_client_read(to.client, &index, 1, &batch);
        if (code == 0) {
            dlfs_batch_release(batch);
        }
    } while (code == 0);
    CHECK_EQ(code, DLFS_E_SERVICE);
    CHECK_EQ(dlfs_client_get(to.client, index, &byte, 1, 0), DLFS_E_SERVICE);
    check_batch(unreleased);
    dlfs_client_destroy(to.client);
    dlfs_batch_release(unreleased);
    service_stop(&service);
}

/* Counts that a client reports are never added twice and never subtracted. */
static void counts_that_make_no_sense(void)
{
    struct service service;
    service_start(&service, WHOLE, WHOLE, NULL);
    struct connection to = attach_to(&service);
    struct resident_counts *reported = &to.client->memory.header->resident;
    atomic_store(&reported->samples, 100);
    CHECK_EQ(stats_of(to.channel).samples, 100);
    atomic_store(&reported->samples, 3);
    CHECK_EQ(stats_of(to.channel).samples, 100);
    atomic_store(&reported->samples, 101);
    CHECK_EQ(stats_of(to.channel).samples, 101);
    atomic_store(&reported->samples, UINT64_MAX); /* so the sums over all clients never overflow */
    CHECK_EQ(stats_of(to.channel).samples, 101);
    dlfs_reader_stats stats;
    dlfs_reader_get_stats(service.reader, &stats);
    CHECK_EQ(stats.samples, 101);
    disconnect(to);
    service_stop(&service);
}

/* A header of another build is refused, whichever record differs in size. */
static void other_builds(void)
{
    struct service service;
    service_start(&service, WHOLE, WHOLE, NULL);
    dlfs_channel_config config = channel_config(&service);
    dlfs_channel *channel;
    int memory, wake;
    CHECK_EQ(dlfs_channel_create(&config, &channel, &memory, &wake), 0);
    void *base = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    CHECK(base != MAP_FAILED);
    struct channel_header *header = base;
    uint64_t arena_bytes = header->arena_bytes;
    uint32_t *const sizes[] = {&header->layout, &header->version, &header->failure_bytes,
                               &header->stats_bytes, &header->member_stats_bytes};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct channel_memory mapped;
        *sizes[i] += 8;
        CHECK_EQ(channel_memory_open(&mapped, memory, arena_bytes), DLFS_E_FORMAT);
        *sizes[i] -= 8;
        CHECK_EQ(channel_memory_open(&mapped, memory, arena_bytes), 0);
        channel_memory_unmap(&mapped);
    }
    CHECK_EQ(munmap(base, 4096), 0);
    CHECK_EQ(close(memory), 0);
    CHECK_EQ(close(wake), 0);
    dlfs_channel_destroy(channel);
    service_stop(&service);
}

/* A header that does not match the directory is refused. */
static void wrong_directories(void)
{
    struct service service;
    service_start(&service, WHOLE, WHOLE, NULL);
    struct connection to = connect_to(&service);
    const dlfs_directory *directory = service.dataset.directory;
    struct channel_header *header = to.client->memory.header;
    const struct channel_header right = *header;
    CHECK_EQ(dlfs_client_attach(to.client, NULL, 0), -EINVAL);
    CHECK_EQ(dlfs_client_attach(NULL, directory, 0), -EINVAL);
    header->resident_count++;
    CHECK_EQ(dlfs_client_attach(to.client, directory, 0), -EINVAL);
    header->resident_count = right.resident_count;
    header->resident_offset = right.arena_bytes;
    CHECK_EQ(dlfs_client_attach(to.client, directory, 0), -EINVAL);
    header->resident_offset = right.resident_offset + 1;
    CHECK_EQ(dlfs_client_attach(to.client, directory, 0), -EINVAL);
    header->resident_offset = right.resident_offset;
    header->chunk_shift = 60;
    CHECK_EQ(dlfs_client_attach(to.client, directory, 0), -EINVAL);
    header->chunk_shift = right.chunk_shift;
    CHECK_EQ(dlfs_client_attach(to.client, directory, 0), 0);
    read_everything(to.client);
    disconnect(to);
    service_stop(&service);
}

/* An index entry outside the arena is ignored: the client sends a request. */
static void wrong_indices(void)
{
    struct service service;
    service_start(&service, WHOLE, WHOLE, NULL);
    struct connection to = attach_to(&service);
    struct channel_header *header = to.client->memory.header;
    uint32_t slots = (uint32_t)(service.reader->arena->bytes / CHUNK);
    for (uint64_t chunk = 0; chunk < header->resident_count; chunk++) {
        atomic_store(&service.reader->resident_slots[chunk], slots + 1);
    }
    read_everything(to.client);
    uint64_t requests = requests_of(to.client);
    CHECK(requests > 0);
    header->chunk_shift = 33; /* the end of that slot is 2^64, which is 0 */
    header->resident_count = 1;
    CHECK_EQ(dlfs_client_attach(to.client, service.dataset.directory, 0), 0);
    atomic_store(&service.reader->resident_slots[0], UINT32_C(1) << 31);
    dlfs_batch *batch = read_from(to.client, 0, BATCH);
    check_batch(batch);
    dlfs_batch_release(batch);
    CHECK_EQ(requests_of(to.client), requests + 1);
    disconnect(to);
    service_stop(&service);
}

int main(void)
{
    resident_samples_need_no_request();
    single_samples();
    little_room_beside();
    bad_chunks();
    small_memory();
    lost_members_are_known();
    service_ends();
    counts_that_make_no_sense();
    other_builds();
    wrong_directories();
    wrong_indices();
    return 0;
}
