/*
 * Tests a client that writes arbitrary bytes into the memory of its channel. It may lose the
 * channel and its batches. The service continues, and another client reads correct samples.
 */
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "channel/channel.h"
#include "channel/channel_tests.h"
#include "platform/memory.h"

#define MEMORY (1u << 20)
#define ROUNDS ROUNDS_OF(200u, 50u)
#define ENTRIES 400u

struct attacker {
    struct channel_memory memory;
    struct ring submissions;
    struct ring completions;
    dlfs_channel *channel;
    int wake;
    uint64_t state;
    uint64_t numbers[8]; /* numbers of batches that it may have */
    uint32_t number_count;
};

/* Returns a pseudo-random number (splitmix64). */
static uint64_t some(struct attacker *attacker)
{
    uint64_t value = attacker->state += UINT64_C(0x9e3779b97f4a7c15);
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

static uint64_t below(struct attacker *attacker, uint64_t limit)
{
    return some(attacker) % limit;
}

static void attacker_open(struct attacker *attacker, const struct service *service, uint64_t seed)
{
    dlfs_channel_config config = channel_config(service);
    int memory;
    *attacker = (struct attacker){.state = seed};
    CHECK_EQ(dlfs_channel_create(&config, &attacker->channel, &memory, &attacker->wake), 0);
    int arena;
    uint64_t arena_bytes;
    CHECK_EQ(dlfs_reader_arena(service->reader, &arena, &arena_bytes), 0);
    CHECK_EQ(channel_memory_open(&attacker->memory, memory, arena_bytes), 0);
    /* Neither side can shorten the memory that the other side has mapped. */
    CHECK_EQ(ftruncate(memory, 0), -1);
    close(memory);
    struct channel_memory *open = &attacker->memory;
    attacker->submissions = ring_over(&open->header->submissions, open->submissions,
                                      sizeof(struct submission), open->submission_count);
    attacker->completions = ring_over(&open->header->completions, open->completions,
                                      sizeof(struct completion), COMPLETION_COUNT);
}

static void attacker_close(struct attacker *attacker)
{
    close(attacker->wake);
    int code = wait_end(attacker->channel);
    CHECK(code == DLFS_E_PROTOCOL || code == DLFS_E_CLOSED);
    dlfs_channel_destroy(attacker->channel);
    channel_memory_unmap(&attacker->memory);
}

static void poke(struct attacker *attacker)
{
    (void)send(attacker->wake, "x", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Draws a number that is correct, nearly correct, or wrong. */
static uint64_t any_value(struct attacker *attacker)
{
    switch (below(attacker, 6)) {
    case 0:
        return below(attacker, COUNT);
    case 1:
        return COUNT - 1 + below(attacker, 3);
    case 2:
        return UINT64_MAX - below(attacker, 3);
    case 3:
        return UINT64_C(1) << below(attacker, 64);
    case 4:
        return attacker->number_count ? attacker->numbers[below(attacker, attacker->number_count)]
                                      : 0;
    default:
        return below(attacker, 20);
    }
}

/* Draws a value that the service accepts, more often than another one. */
static uint64_t mostly(struct attacker *attacker, uint64_t accepted)
{
    return below(attacker, 4) ? accepted : any_value(attacker);
}

static void any_request_area(struct attacker *attacker)
{
    uint64_t *words = (uint64_t *)(void *)attacker->memory.request;
    for (uint64_t i = 0; i < COUNT; i++) {
        words[i] = below(attacker, 50) ? below(attacker, COUNT) : any_value(attacker);
    }
    if (below(attacker, 2)) {
        struct stream_request request = {
            .sequence = {.count = COUNT,
                         .seed = some(attacker),
                         .kind = (uint32_t)below(attacker, 7),
                         .window_chunks = (uint32_t)any_value(attacker),
                         .chunk_bytes = CHUNK},
            .config = {.sequence = (const dlfs_sequence *)(uintptr_t)some(attacker),
                       .first = mostly(attacker, 0),
                       .stride = mostly(attacker, 1),
                       .count = mostly(attacker, 1 + below(attacker, COUNT / 4)),
                       .group = mostly(attacker, below(attacker, 9)),
                       .group_stride = mostly(attacker, 8 + below(attacker, 8)),
                       .plan = (uint32_t)below(attacker, 5)},
        };
        memcpy(attacker->memory.request, &request, sizeof(request));
    }
}

/* Takes answers and records their batches, so that a full ring does not stop the service. */
static void take_answers(struct attacker *attacker)
{
    struct completion answer;
    while (ring_take(&attacker->completions, &answer) == 1) {
        if (answer.memory != BATCH_NONE) {
            attacker->numbers[attacker->number_count++ % 8] = answer.number;
        }
    }
    if (attacker->number_count > 8) {
        attacker->number_count = 8;
    }
}

/* Sends requests with arbitrary contents through a correct ring. */
static void wrong_requests(struct attacker *attacker)
{
    for (uint32_t i = 0; i < ENTRIES && stats_of(attacker->channel).ended == 0; i++) {
        struct submission asked = {
            .tag = some(attacker),
            .operation =
                (uint32_t)(below(attacker, 200) ? OPERATION_READ + below(attacker, OPERATION_PART)
                                                : any_value(attacker)),
            .flags = below(attacker, 4) ? 0 : (uint32_t)any_value(attacker),
            .value = any_value(attacker),
            .limit = any_value(attacker),
        };
        /* Requests that end the channel are rare, so that the others are tested as well. */
        if (asked.operation == OPERATION_RELEASE && below(attacker, 100)) {
            if (attacker->number_count == 0) {
                continue;
            }
            asked.value = attacker->numbers[--attacker->number_count];
        }
        if ((asked.operation == OPERATION_READ || asked.operation == OPERATION_CHOOSE) &&
            below(attacker, 50)) {
            asked.value = below(attacker, COUNT + 1);
        }
        any_request_area(attacker);
        (void)ring_put(&attacker->submissions, &asked);
        poke(attacker);
        bool waits = below(attacker, 8);
        do {
            take_answers(attacker);
        } while (waits && stats_of(attacker->channel).ended == 0 &&
                 atomic_load(&attacker->submissions.positions->head) !=
                     attacker->submissions.position &&
                 sched_yield() == 0);
    }
}

/* Overwrites arbitrary words between valid requests; rarely the positions of the rings. */
static void scribble(struct attacker *attacker)
{
    uint64_t *words = (uint64_t *)(void *)attacker->memory.base;
    uint64_t all = attacker->memory.bytes / sizeof(uint64_t);
    uint64_t first = (size_t)(attacker->memory.request - attacker->memory.base) / sizeof(uint64_t);
    for (uint32_t i = 0; i < 20000 && stats_of(attacker->channel).ended == 0; i++) {
        uint64_t at = first + below(attacker, below(attacker, 2) ? COUNT : all - first);
        if (below(attacker, 500) == 0) {
            at = below(attacker, first);
        }
        words[at] = any_value(attacker);
        if (below(attacker, 16)) {
            continue;
        }
        struct submission read = {.operation = OPERATION_READ, .value = below(attacker, 20)};
        (void)ring_put(&attacker->submissions, &read);
        poke(attacker);
        take_answers(attacker);
    }
}

static void *neighbour(void *argument)
{
    struct connection *to = argument;
    for (uint64_t first = 0; first < 150; first++) {
        dlfs_batch *batch = read_from(to->client, first, 20);
        check_batch(batch);
        dlfs_batch_release(batch);
    }
    return NULL;
}

/* Releasing a batch twice, or one that was never delivered, ends the channel. */
static void double_release(struct service *service)
{
    struct attacker attacker;
    struct completion answer;
    attacker_open(&attacker, service, 1);
    memset(attacker.memory.request, 0, sizeof(uint64_t));
    struct submission read = {.operation = OPERATION_READ, .value = 1};
    CHECK(ring_put(&attacker.submissions, &read));
    poke(&attacker);
    while (ring_take(&attacker.completions, &answer) == 0) {
        sched_yield();
    }
    struct submission release = {.operation = OPERATION_RELEASE, .value = answer.number};
    CHECK(ring_put(&attacker.submissions, &release));
    wait_batches_out(attacker.channel, 0);
    CHECK_EQ(stats_of(attacker.channel).ended, 0);
    CHECK(ring_put(&attacker.submissions, &release));
    poke(&attacker);
    wait_ended(attacker.channel, DLFS_E_PROTOCOL);
    attacker_close(&attacker);
}

int main(void)
{
    struct service service;
    service_start(&service, MEMORY, MEMORY / 2, NULL);
    double_release(&service);
    struct connection to = connect_to(&service);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, neighbour, &to), 0);
    uint64_t broken = 0;
    uint64_t samples = 0;
    for (uint64_t seed = 0; seed < ROUNDS; seed++) {
        struct attacker attacker;
        attacker_open(&attacker, &service, seed);
        if (seed % 2) {
            wrong_requests(&attacker);
        } else {
            scribble(&attacker);
        }
        dlfs_channel_stats stats = stats_of(attacker.channel);
        broken += stats.ended == DLFS_E_PROTOCOL;
        samples += stats.samples;
        attacker_close(&attacker);
    }
    CHECK(broken > ROUNDS / 4);
    CHECK(samples > ROUNDS * 10);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    dlfs_client_destroy(to.client);
    wait_ended(to.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(to.channel);
    check_memory(&service.dataset, service.reader, MEMORY);
    service_stop(&service);
    return 0;
}
