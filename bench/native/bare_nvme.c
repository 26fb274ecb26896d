/*
 * The lower bound of the cost of reading blocks by DLFS's own NVMe/TCP initiator: random reads of
 * one size, DEPTH of them in flight, into BUFFERS buffers one after the other.
 *
 *     bare_nvme HOST PORT NQN NSID BLOCK_BYTES DEPTH BUFFERS CHECKED SECONDS
 *
 * With as many buffers as reads in flight, the buffers stay in the processor's caches. With as many
 * as a batch has samples they do not, like the memory of a batch. If CHECKED is 1, the CRC32C of
 * each block is computed.
 */
#include <dlfs/dlfs.h>

#include "bare.h"

#define DEPTH_MAX 1024u
#define GROUPS 4u /* completions are polled, and reads submitted, by quarters of the depth */
#define BUSY_POLL_US 1000u

static dlfs_queue *queue;
static uint64_t blocks, state = 88172645463325252u;
static uint32_t block_bytes, depth, buffers, in_flight, next_buffer;
static uint8_t *memory;

static void fail(const char *what, int code)
{
    fprintf(stderr, "bare_nvme: %s: code %d\n", what, code);
    exit(1);
}

static uint64_t random_block(void)
{
    state ^= state << 13; /* xorshift64 */
    state ^= state >> 7;
    state ^= state << 17;
    return state % blocks;
}

static void open_queue(char **arguments)
{
    dlfs_nvme_config config = {
        .hosts = {arguments[1]},
        .ports = {(uint32_t)strtoul(arguments[2], NULL, 10)},
        .path_count = 1,
        .nsid = (uint32_t)strtoul(arguments[4], NULL, 10),
        .subsystem_nqn = arguments[3],
        .host_nqn = "nqn.2024-01.org.dlfs:bench-bare",
        .host_id = {1},
        .timeout_ms = 10000,
        .connect_ms = 3000,
        .keepalive_ms = 60000,
        .reconnect_ms = 0,
        .busy_poll_us = BUSY_POLL_US,
    };
    char message[256] = "";
    dlfs_device *device;
    int code = dlfs_device_open_nvme(&config, message, sizeof message, &device);
    if (code < 0)
        fail(message, code);
    blocks = dlfs_device_size_bytes(device) / block_bytes;
    code = dlfs_queue_create(device, depth, &queue);
    if (code < 0)
        fail("make a queue pair", code);
}

static void fill_queue(void)
{
    dlfs_operation operations[DEPTH_MAX];
    uint32_t count = 0;
    for (; in_flight + count < depth; count++) {
        uint8_t *buffer = memory + (uint64_t)next_buffer * block_bytes;
        operations[count] = (dlfs_operation){.buffer = buffer,
                                             .offset_bytes = random_block() * block_bytes,
                                             .length_bytes = block_bytes,
                                             .kind = DLFS_OP_READ,
                                             .tag = next_buffer};
        next_buffer = (next_buffer + 1) % buffers;
    }
    for (uint32_t sent = 0; sent < count;) {
        int accepted = dlfs_queue_submit(queue, operations + sent, count - sent);
        if (accepted < 0)
            fail("submit", accepted);
        sent += (uint32_t)accepted;
        in_flight += (uint32_t)accepted;
    }
}

/* Polls completions, and returns their number. */
static uint32_t poll_some(int checked, uint32_t *crc)
{
    dlfs_completion completions[DEPTH_MAX];
    int count = dlfs_queue_poll(queue, completions, (depth + GROUPS - 1) / GROUPS, -1);
    if (count < 0)
        fail("poll", count);
    for (int i = 0; i < count; i++) {
        if (completions[i].result != (int64_t)block_bytes)
            fail("read", (int)completions[i].result);
        if (checked)
            *crc ^= dlfs_crc32c(0, memory + completions[i].tag * block_bytes, block_bytes);
    }
    in_flight -= (uint32_t)count;
    return (uint32_t)count;
}

int main(int argc, char **argv)
{
    if (argc != 10)
        return 2;
    block_bytes = (uint32_t)strtoul(argv[5], NULL, 10);
    depth = (uint32_t)strtoul(argv[6], NULL, 10);
    buffers = (uint32_t)strtoul(argv[7], NULL, 10);
    int checked = atoi(argv[8]);
    if (block_bytes == 0 || depth == 0 || depth > DEPTH_MAX || buffers < depth)
        return 2;
    memory = allocate((uint64_t)buffers * block_bytes);
    memset(memory, 1, (uint64_t)buffers * block_bytes);
    open_queue(argv);
    uint64_t done = 0;
    uint32_t crc = 0;
    double cpu = cpu_s();
    double start = now_s();
    double until = start + strtod(argv[9], NULL);
    do {
        fill_queue();
        done += poll_some(checked, &crc);
    } while (now_s() < until);
    double seconds = now_s() - start;
    report(done, done * block_bytes, seconds, cpu_s() - cpu);
    fprintf(stderr, "%08x\n", crc); /* so that the compiler computes it */
    return 0;                       /* reads in flight end with the process */
}
