/*
 * Tests the end of a write's command: a move to another path begins as soon as no change is in
 * flight, and by then must see that the write is not flushed. The source is included, with a hook
 * where it counts the changes down.
 */
#include <stdatomic.h>
#include <string.h>

#include "check.h"

static void before_count(void);

#undef atomic_fetch_sub
#define atomic_fetch_sub(object, value) \
    (before_count(), atomic_fetch_sub_explicit(object, value, memory_order_seq_cst))
#include "nvme/operations.c"

#define GENERATION 5u
#define STATUS_FAILED 0x4002u /* Invalid Field in Command, Do Not Retry */

static struct nvme_association one_association;
static struct nvme_connection one_connection = {.incarnation = GENERATION};
static struct nvme_operation one_operations[1];
static struct nvme_command one_commands[2];
static dlfs_completion one_done[1];
static struct nvme_queue one_queue;
static uint32_t counted;
static uint64_t expected;

static void before_count(void)
{
    counted++;
    CHECK_EQ(atomic_load(&one_association.durability.unflushed), expected);
}

/* Lets one operation of some commands of a kind be in flight. */
static void begin(uint8_t kind, uint32_t command_count)
{
    nvme_durability_init(&one_association.durability);
    one_operations[0] = (struct nvme_operation){
        .kind = kind, .length_bytes = 4096, .commands_in_flight = command_count};
    one_queue = (struct nvme_queue){.base.depth = 1,
                                    .association = &one_association,
                                    .connection = &one_connection,
                                    .operations = one_operations,
                                    .commands = one_commands,
                                    .done = one_done,
                                    .in_flight_count = command_count,
                                    .small_count = command_count};
    nvme_list_clear(&one_queue.waiting);
    nvme_list_clear(&one_queue.delayed);
    for (uint32_t number = 0; number < command_count; number++) {
        one_commands[number] = (struct nvme_command){.kind = kind, .in_flight = true};
    }
    bool changes = kind != DLFS_OP_READ;
    one_queue.write_count = one_queue.change_count = changes ? command_count : 0;
    atomic_store(&one_association.writes_in_flight, one_queue.change_count);
    counted = 0;
}

int main(void)
{
    begin(DLFS_OP_WRITE, 1);
    expected = GENERATION;
    nvme_command_end(&one_queue, 0, 0);
    CHECK_EQ(counted, 1);
    CHECK_EQ(one_queue.done_count, 1);
    CHECK_EQ(atomic_load(&one_association.writes_in_flight), 0);

    begin(DLFS_OP_WRITE, 2);
    expected = UINT64_MAX; /* the other command is in flight: no move begins */
    nvme_command_end(&one_queue, 0, 0);
    CHECK_EQ(atomic_load(&one_association.writes_in_flight), 1);
    expected = GENERATION;
    nvme_command_end(&one_queue, 1, 0);
    CHECK_EQ(counted, 2);

    begin(DLFS_OP_WRITE, 1);
    expected = UINT64_MAX; /* nothing is to be flushed */
    nvme_command_end(&one_queue, 0, STATUS_FAILED);
    CHECK_EQ(counted, 1);
    CHECK_EQ(atomic_load(&one_association.writes_in_flight), 0);
    CHECK(one_done[0].result < 0);

    begin(DLFS_OP_READ, 1);
    nvme_command_end(&one_queue, 0, 0);
    CHECK_EQ(counted, 0);
    CHECK_EQ(one_queue.done_count, 1);
    return 0;
}
