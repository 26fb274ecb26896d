/* The checks of received PDUs against the command in flight, on a queue pair without a socket. */
#include <stdlib.h>

#include "check.h"
#include "nvme/transfer.h"

#include <dlfs/dlfs.h>

#define BYTES 8192u

static uint8_t data[BYTES];

/* Returns a queue pair that has one command. */
static struct nvme_queue *queue_with(struct nvme_command *command)
{
    struct nvme_queue *queue = calloc(1, sizeof *queue);
    CHECK(queue != NULL);
    queue->commands = command;
    queue->command_count = 1;
    nvme_list_clear(&queue->sendable);
    return queue;
}

static struct nvme_command command_of(uint8_t kind)
{
    return (struct nvme_command){.buffer = data,
                                 .length_bytes = BYTES,
                                 .kind = kind,
                                 .in_flight = true,
                                 .to_host = kind == DLFS_OP_READ || kind == NVME_OP_PASSTHROUGH};
}

/* Returns the code for the header of a C2HData, and its destination in *destination. */
static int begin(struct nvme_command *command, uint32_t offset, uint32_t bytes, uint8_t flags,
                 uint8_t **destination)
{
    struct nvme_queue *queue = queue_with(command);
    struct nvme_pdu pdu = {.offset_bytes = offset, .data_bytes = bytes, .flags = flags};
    const char *reason = NULL;
    int code = nvme_queue_sink.begin_data(queue, &pdu, destination, &reason);
    CHECK_EQ(reason != NULL, code < 0);
    free(queue);
    return code;
}

static void test_data(void)
{
    struct nvme_command command = command_of(DLFS_OP_READ);
    uint8_t *destination = NULL;
    CHECK_EQ(begin(&command, 0, BYTES, NVME_PDU_LAST, &destination), 0);
    CHECK(destination == data);
    CHECK_EQ(begin(&command, 0, 4096, 0, &destination), 0);
    CHECK_EQ(begin(&command, 0, BYTES, 0, &destination), DLFS_E_PROTOCOL);
    CHECK_EQ(begin(&command, 0, 4096, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
    CHECK_EQ(begin(&command, 0, BYTES + 4, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
    CHECK_EQ(begin(&command, 4096, 4096, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
    command.transferred_bytes = 4096;
    CHECK_EQ(begin(&command, 4096, 4096, NVME_PDU_LAST, &destination), 0);
    CHECK(destination == data + 4096);
    CHECK_EQ(begin(&command, 0, 4096, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
    CHECK_EQ(begin(&command, 4096, 4100, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
    command.last_seen = true;
    CHECK_EQ(begin(&command, 4096, 4096, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);

    /* A passthrough command may get less than it asked for. */
    command = command_of(NVME_OP_PASSTHROUGH);
    CHECK_EQ(begin(&command, 0, 4096, NVME_PDU_LAST, &destination), 0);
    CHECK_EQ(begin(&command, 0, BYTES + 4, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
}

static void test_data_of_other_commands(void)
{
    uint8_t *destination = NULL;
    struct nvme_command command = command_of(DLFS_OP_WRITE);
    CHECK_EQ(begin(&command, 0, BYTES, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
    command = command_of(DLFS_OP_READ);
    command.in_flight = false;
    CHECK_EQ(begin(&command, 0, BYTES, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
    command = command_of(DLFS_OP_READ);
    command.cid = 0x8000; /* an earlier command had this entry */
    CHECK_EQ(begin(&command, 0, BYTES, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
    command = command_of(DLFS_OP_READ);
    command.sends_pending = 1; /* it is to be sent again */
    CHECK_EQ(begin(&command, 0, BYTES, NVME_PDU_LAST, &destination), DLFS_E_PROTOCOL);
}

/* Returns the code for an R2T. */
static int request(struct nvme_command *command, uint32_t offset, uint32_t bytes)
{
    struct nvme_queue *queue = queue_with(command);
    struct nvme_pdu pdu = {.offset_bytes = offset, .data_bytes = bytes, .tag = 77};
    const char *reason = NULL;
    int code = nvme_queue_sink.on_r2t(queue, &pdu, &reason);
    CHECK_EQ(reason != NULL, code < 0);
    CHECK_EQ(queue->sendable.first, code < 0 ? NVME_NONE : 0);
    free(queue);
    return code;
}

static void test_requests_to_transfer(void)
{
    struct nvme_command command = command_of(DLFS_OP_WRITE);
    CHECK_EQ(request(&command, 0, 0), DLFS_E_PROTOCOL);
    CHECK_EQ(request(&command, 4096, 4096), DLFS_E_PROTOCOL);
    CHECK_EQ(request(&command, 0, BYTES + 4), DLFS_E_PROTOCOL);
    CHECK_EQ(request(&command, 0, 4096), 0);
    CHECK_EQ(command.r2t_left_bytes, 4096);
    CHECK_EQ(command.r2t_tag, 77);
    CHECK_EQ(command.sends_pending, 1);
    CHECK_EQ(request(&command, 0, 4096), DLFS_E_PROTOCOL); /* the first is not answered yet */
    CHECK_EQ(request(&command, 4096, 4096), DLFS_E_PROTOCOL);
    command.r2t_left_bytes = 0;
    command.transferred_bytes = 4096;
    CHECK_EQ(request(&command, 0, 4096), DLFS_E_PROTOCOL);
    CHECK_EQ(request(&command, 4096, 4100), DLFS_E_PROTOCOL);
    CHECK_EQ(request(&command, 4096, 4096), 0);
    command = command_of(DLFS_OP_READ);
    CHECK_EQ(request(&command, 0, 4096), DLFS_E_PROTOCOL);
    command = command_of(DLFS_OP_WRITE);
    command.in_flight = false;
    CHECK_EQ(request(&command, 0, 4096), DLFS_E_PROTOCOL);
}

/* Returns the code for a CQE of a command that succeeded. */
static int complete(struct nvme_command *command)
{
    struct nvme_queue *queue = queue_with(command);
    struct nvme_pdu pdu = {.cqe = {.status = 0}};
    const char *reason = NULL;
    int code = nvme_queue_sink.on_cqe(queue, &pdu, &reason);
    CHECK_EQ(reason != NULL, code < 0);
    free(queue);
    return code;
}

static void test_early_completions(void)
{
    struct nvme_command command = command_of(DLFS_OP_READ);
    command.transferred_bytes = BYTES - 4;
    CHECK_EQ(complete(&command), DLFS_E_PROTOCOL);
    command = command_of(DLFS_OP_WRITE);
    CHECK_EQ(complete(&command), DLFS_E_PROTOCOL);
    command.transferred_bytes = BYTES;
    command.sends_pending = 1;
    CHECK_EQ(complete(&command), DLFS_E_PROTOCOL);
    command.in_flight = false;
    CHECK_EQ(complete(&command), DLFS_E_PROTOCOL);
}

int main(void)
{
    test_data();
    test_data_of_other_commands();
    test_requests_to_transfer();
    test_early_completions();
    return 0;
}
