/*
 * Tests the reservations of datasets that share an arena: resident chunks stay as long as a client
 * may read them, and no longer.
 */
#define LARGE_EVERY 1u /* no sample is larger than a chunk */

#include <errno.h>
#include <pthread.h>

#include "channel/channel.h"
#include "channel/channel_tests.h"

#define DATASETS 3u
#define BATCH 40u
#define ROUNDS ROUNDS_OF(6u, 2u)
#define CLIENTS 2u

/* Datasets whose readers share an arena. */
struct node {
    struct dataset datasets[DATASETS];
    dlfs_reader *readers[DATASETS];
    dlfs_arena *arena;
    dlfs_share *share;
    dlfs_arena_view *view;
};

/* Returns the slots of a dataset's reservation, whose index takes less than a chunk. */
static uint64_t reserved_slots(const struct dataset *dataset)
{
    return dataset->chunk_count + 1 + 2 * SLOTS_MIN;
}

static void start(struct node *node, double reservations)
{
    int descriptor;
    uint64_t bytes;
    for (uint32_t i = 0; i < DATASETS; i++) {
        dataset_create(&node->datasets[i], NULL);
    }
    double slots = reservations * (double)reserved_slots(&node->datasets[0]) * 8 / 7 + 1;
    node->arena = shared_arena((uint64_t)slots * CHUNK);
    for (uint32_t i = 0; i < DATASETS; i++) {
        node->readers[i] = reader_in(&node->datasets[i], node->arena, 2);
    }
    CHECK_EQ(dlfs_share_create_within(NULL, UINT64_C(1) << 40, &node->share), 0);
    CHECK_EQ(dlfs_reader_arena(node->readers[0], &descriptor, &bytes), 0);
    CHECK_EQ(dlfs_arena_view_map(descriptor, bytes, &node->view), 0);
}

static void stop(struct node *node)
{
    CHECK_EQ(share_bytes(node->share), 0);
    CHECK_EQ(node->arena->reserved, 0);
    for (uint32_t i = 0; i < DATASETS; i++) {
        CHECK_EQ(dlfs_reader_destroy(node->readers[i]), 0);
        dataset_destroy(&node->datasets[i]);
    }
    dlfs_arena_stats stats;
    dlfs_arena_get_stats(node->arena, &stats);
    CHECK_EQ(stats.held_bytes, 0);
    dlfs_arena_view_unmap(node->view);
    dlfs_share_destroy(node->share);
    dlfs_arena_destroy(node->arena);
}

static struct connection attach_to(const struct node *node, uint32_t number)
{
    dlfs_channel_config config = {.reader = node->readers[number],
                                  .share = node->share,
                                  .copied_bytes_max = 8 << 20,
                                  .samples_max = COUNT,
                                  .batches_max = 64};
    struct connection made;
    int memory;
    int wake;
    CHECK_EQ(dlfs_channel_create(&config, &made.channel, &memory, &wake), 0);
    CHECK_EQ(dlfs_client_create(node->view, memory, &wake, 0, &made.client), 0);
    close(memory);
    CHECK_EQ(dlfs_client_attach(made.client, node->datasets[number].directory, 0), 0);
    return made;
}

static bool is_reserved(const struct connection *to)
{
    return to->client->memory.header->resident_count > 0;
}

static void disconnect(struct connection to)
{
    dlfs_client_destroy(to.client);
    wait_ended(to.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(to.channel);
}

static uint64_t requests_of(const dlfs_client *client)
{
    dlfs_client_stats stats;
    dlfs_client_get_stats(client, &stats);
    return stats.requests;
}

static void read_everything(dlfs_client *client, uint64_t first)
{
    for (uint64_t at = 0; at < COUNT; at += BATCH) {
        dlfs_batch *batch = read_from(client, first + at, BATCH);
        check_batch(batch);
        dlfs_batch_release(batch);
    }
}

/* Reads everything from memory: returns true if none of it takes a request. */
static bool reads_alone(dlfs_client *client)
{
    uint64_t requests = requests_of(client);
    read_everything(client, 0);
    return requests_of(client) == requests;
}

static uint64_t slots_used(dlfs_reader *reader)
{
    dlfs_reader_stats stats;
    dlfs_reader_get_stats(reader, &stats);
    return stats.held_bytes / CHUNK;
}

static void read_all_here(dlfs_reader *reader)
{
    uint64_t indices[COUNT];
    dlfs_batch *batch;
    for (uint64_t i = 0; i < COUNT; i++) {
        indices[i] = i;
    }
    CHECK_EQ(dlfs_reader_read(reader, indices, COUNT, &batch), 0);
    check_batch(batch);
    dlfs_batch_release(batch);
}

/* Two datasets want all of their chunks to stay, and one of them has room. The other one has it
 * when the first has no client any more. */
static void first_come(void)
{
    struct node node;
    start(&node, 1.2);
    struct connection first = attach_to(&node, 0);
    struct connection second = attach_to(&node, 1);
    CHECK(is_reserved(&first));
    CHECK(!is_reserved(&second));
    CHECK_EQ(node.arena->reserved, reserved_slots(&node.datasets[0]));
    read_everything(first.client, 0);
    dlfs_batch *unreleased = read_from(first.client, 5, BATCH);
    read_everything(second.client, 1);
    CHECK(reads_alone(first.client));
    CHECK(!reads_alone(second.client));
    check_batch(unreleased);
    struct connection again = attach_to(&node, 0);
    CHECK(is_reserved(&again));
    CHECK(reads_alone(again.client));
    disconnect(again);
    dlfs_client_destroy(first.client); /* its batch keeps the channel */
    struct connection third = attach_to(&node, 1);
    CHECK(!is_reserved(&third));
    read_everything(third.client, 3);
    check_batch(unreleased);
    dlfs_batch_release(unreleased);
    wait_ended(first.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(first.channel);
    CHECK_EQ(node.arena->reserved, 0);
    struct connection fourth = attach_to(&node, 1);
    CHECK(is_reserved(&fourth));
    read_everything(fourth.client, 0);
    read_everything(second.client, 2);
    CHECK(reads_alone(fourth.client));
    disconnect(fourth);
    disconnect(third);
    disconnect(second);
    stop(&node);
}

/* Chunks loaded before the first client came are in the index at once. */
static void what_is_loaded_is_entered(void)
{
    struct node node;
    start(&node, 1.5);
    read_all_here(node.readers[0]);
    struct connection to = attach_to(&node, 0);
    CHECK(is_reserved(&to));
    CHECK(reads_alone(to.client));
    uint64_t used = slots_used(node.readers[0]);
    disconnect(to);
    CHECK_EQ(slots_used(node.readers[0]), used - 1); /* the index */
    struct connection other = attach_to(&node, 1);
    CHECK(is_reserved(&other));
    read_everything(other.client, 0);
    CHECK(reads_alone(other.client));
    CHECK(slots_used(node.readers[0]) < used - 1); /* it was evicted */
    disconnect(other);
    stop(&node);
}

/* A service that closes a dataset while a client has batches of it leaves them their bytes. */
static void a_revoked_channel_keeps_its_bytes(bool resident)
{
    struct node node;
    start(&node, resident ? 1.2 : 0.8);
    struct connection first = attach_to(&node, 0);
    CHECK_EQ(is_reserved(&first), resident);
    read_everything(first.client, 0);
    dlfs_batch *unreleased = read_from(first.client, 5, BATCH);
    dlfs_channel_revoke(first.channel);
    dlfs_channel_revoke(first.channel);
    CHECK_EQ(dlfs_reader_destroy(node.readers[0]), 0);
    node.readers[0] = NULL;
    uint64_t index = 3;
    dlfs_batch *batch;
    int code;
    do { /* it checks every millisecond */
        code = dlfs_client_read(first.client, &index, 1, &batch);
        if (code == 0) {
            check_batch(batch);
            dlfs_batch_release(batch);
        }
    } while (code == 0);
    CHECK_EQ(code, DLFS_E_SERVICE);
    struct connection other = attach_to(&node, 1);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        read_everything(other.client, round);
        check_batch(unreleased);
    }
    CHECK_EQ(stats_of(first.channel).ended, 0);
    dlfs_client_destroy(first.client);
    dlfs_batch_release(unreleased);
    wait_ended(first.channel, DLFS_E_CLOSED);
    dlfs_channel_destroy(first.channel);
    disconnect(other);
    stop(&node);
}

/* To destroy a revoked channel does not wait for its client. */
static void a_revoked_channel_is_destroyed(void)
{
    struct node node;
    start(&node, 1.2);
    struct connection to = attach_to(&node, 0);
    dlfs_batch *unreleased = read_from(to.client, 5, BATCH);
    dlfs_channel_revoke(to.channel);
    dlfs_channel_destroy(to.channel);
    dlfs_client_destroy(to.client);
    dlfs_batch_release(unreleased);
    stop(&node);
}

/* A chunk that becomes resident while batches pin it is charged until they are released. */
static void charges_add_up(void)
{
    struct node node;
    start(&node, 1.2);
    struct connection occupier = attach_to(&node, 0);
    struct connection pins = attach_to(&node, 1);
    dlfs_batch *before = read_from(pins.client, 0, BATCH);
    uint64_t slots = stats_of(pins.channel).pinned_bytes;
    CHECK(slots > 0);
    CHECK_EQ(slots % CHUNK, 0);
    disconnect(occupier);
    struct connection other = attach_to(&node, 1);
    CHECK(is_reserved(&other));
    dlfs_batch *again = read_from(pins.client, 0, BATCH);
    dlfs_batch *more = read_from(pins.client, 1, COUNT);
    dlfs_batch_release(before);
    read_everything(pins.client, 0);
    check_batch(again);
    dlfs_batch_release(more);
    dlfs_batch_release(again);
    wait_batches_out(pins.channel, 0);
    CHECK_EQ(stats_of(pins.channel).pinned_bytes, 0);
    disconnect(pins);
    disconnect(other);
    stop(&node);
}

struct visitor {
    const struct node *node;
    uint32_t number;
};

/* Connects, reads, and leaves, again and again. */
static void *visit(void *argument)
{
    const struct visitor *visitor = argument;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t number = (visitor->number + round) % DATASETS;
        struct connection to = attach_to(visitor->node, number);
        dlfs_batch *unreleased = read_from(to.client, round, BATCH);
        read_everything(to.client, round);
        read_everything(to.client, round + 1);
        check_batch(unreleased);
        if (round % 3 == 0) {
            dlfs_channel_revoke(to.channel);
            check_batch(unreleased);
        }
        dlfs_batch_release(unreleased);
        disconnect(to);
    }
    return NULL;
}

static void many_at_once(double reservations)
{
    struct node node;
    struct visitor visitors[DATASETS * CLIENTS];
    pthread_t threads[DATASETS * CLIENTS];
    start(&node, reservations);
    for (uint32_t i = 0; i < DATASETS * CLIENTS; i++) {
        visitors[i] = (struct visitor){&node, i};
        CHECK_EQ(pthread_create(&threads[i], NULL, visit, &visitors[i]), 0);
    }
    for (uint32_t i = 0; i < DATASETS * CLIENTS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    stop(&node);
}

/* Has samples cached by themselves: every `every`th, by epochs of the direct plan. */
static void pack_selected(const struct node *node, uint32_t number, uint32_t every)
{
    uint64_t indices[COUNT];
    uint64_t count = 0;
    for (uint64_t i = 0; i < COUNT; i += every) {
        indices[count++] = i;
    }
    const dlfs_choice choice = {
        .kind = DLFS_ORDER_SELECTED, .seed = 5, .indices = indices, .count = count};
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_choose(node->datasets[number].directory, &choice, &sequence), 0);
    const dlfs_stream_config config = {
        .sequence = sequence, .stride = 1, .count = count, .plan = DLFS_PLAN_DIRECT};
    for (uint32_t epoch = 0; epoch < 2; epoch++) {
        dlfs_stream *stream;
        dlfs_batch *batch;
        int code;
        CHECK_EQ(dlfs_stream_create(node->readers[number], &config, &stream), 0);
        while ((code = dlfs_stream_next(stream, 8, -1, &batch)) == 0) {
            check_batch(batch);
            dlfs_batch_release(batch);
        }
        CHECK_EQ(code, DLFS_E_END);
        dlfs_stream_destroy(stream);
    }
    dlfs_sequence_destroy(sequence);
}

/* Samples of a closed reader, which a batch has kept in the arena, make room for those of another
 * one. The closed reader's directory is gone by then. */
static void a_closed_reader_makes_room(void)
{
    struct node node;
    uint64_t index = 3;
    dlfs_batch *batch;
    start(&node, 0.75);
    pack_selected(&node, 0, 2);
    CHECK(node.readers[0]->cache.count > 0);
    CHECK_EQ(dlfs_reader_read(node.readers[0], &index, 1, &batch), 0);
    CHECK_EQ(dlfs_reader_destroy(node.readers[0]), 0);
    node.readers[0] = NULL;
    dataset_destroy(&node.datasets[0]);
    pack_selected(&node, 1, 1);
    check_sample(batch, 0);
    dlfs_batch_release(batch);
    dataset_create(&node.datasets[0], NULL);
    stop(&node);
}

/* Chunks become resident although samples were packed before: then no copy is found instead. */
static void packed_samples_give_way(void)
{
    struct node node;
    start(&node, 1.2);
    pack_selected(&node, 0, 1);
    struct connection to = attach_to(&node, 0);
    CHECK(is_reserved(&to));
    read_everything(to.client, 0);
    CHECK(reads_alone(to.client));
    disconnect(to);
    stop(&node);
}

int main(void)
{
    first_come();
    what_is_loaded_is_entered();
    a_revoked_channel_keeps_its_bytes(true);
    a_revoked_channel_keeps_its_bytes(false);
    a_revoked_channel_is_destroyed();
    charges_add_up();
    a_closed_reader_makes_room();
    packed_samples_give_way();
    many_at_once(0.5);
    many_at_once(1.2);
    many_at_once(2.2);
    many_at_once(4);
    return 0;
}
