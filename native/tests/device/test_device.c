/* Every engine and the memory device: validation, depth, order of tags, transfers, registration,
 * flush. */
#include <poll.h>

#include "device/device_tests.h"

#define PIECES 64u
#define PIECE_BYTES 4096u

static void test_validation(dlfs_device *device)
{
    dlfs_queue *queue = NULL;
    CHECK_EQ(dlfs_queue_create(device, 0, &queue), -EINVAL);
    CHECK_EQ(dlfs_queue_create(device, DLFS_DEPTH_MAX + 1, &queue), -EINVAL);
    CHECK(queue == NULL);
    queue = make_queue(device, 4);
    uint8_t *buffer = aligned_memory(8192);
    uint64_t size = dlfs_device_size_bytes(device);
    uint32_t block = dlfs_device_block_bytes(device);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, NULL, 0, block), -EINVAL);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer + 1, 0, block), -EINVAL);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 1, block), -EINVAL);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, 0), -EINVAL);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, 0, block + 1), -EINVAL);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, size, block), -EINVAL);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, size - block, 2 * block), -EINVAL);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, buffer, UINT64_MAX - block + 1, block), -EINVAL);
    CHECK_EQ(do_operation(queue, 2, buffer, 0, block), -EINVAL);
    CHECK_EQ(dlfs_queue_submit(queue, NULL, 1), -EINVAL);
    CHECK_EQ(dlfs_queue_in_flight(queue), 0);
    dlfs_completion completion;
    CHECK_EQ(dlfs_queue_poll(queue, &completion, 1, -1), 0);
    /* If one of two operations is invalid, the queue pair accepts neither. */
    dlfs_operation pair[2] = {{buffer, 0, block, DLFS_OP_READ, 1},
                              {buffer, 1, block, DLFS_OP_READ, 2}};
    CHECK_EQ(dlfs_queue_submit(queue, pair, 2), -EINVAL);
    CHECK_EQ(dlfs_queue_in_flight(queue), 0);
    CHECK_EQ(dlfs_device_destroy(device), -EBUSY);
    dlfs_queue_destroy(queue);
    free(buffer);
}

/* Writes numbered blocks, then reads them in batches larger than the queue's depth. */
static void test_pieces(dlfs_device *device, uint32_t depth, int registered)
{
    dlfs_queue *queue = make_queue(device, depth);
    CHECK_EQ(dlfs_queue_depth(queue), depth);
    size_t bytes = (size_t)PIECES * PIECE_BYTES;
    uint8_t *out = aligned_memory(bytes);
    uint8_t *in = aligned_memory(bytes);
    fill_pattern(out, bytes, depth);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_WRITE, out, 0, bytes, PIECE_BYTES), 0);
    CHECK_EQ(dlfs_device_flush(device), 0);
    if (registered) {
        CHECK_EQ(dlfs_queue_register(queue, in, bytes / 2),
                 0); /* the other half is outside the registered range */
    }
    dlfs_operation operations[PIECES];
    for (uint32_t i = 0; i < PIECES; i++) {
        uint32_t place = (i * 37u) % PIECES;
        operations[i] =
            (dlfs_operation){in + (size_t)place * PIECE_BYTES, (uint64_t)place * PIECE_BYTES,
                             PIECE_BYTES, DLFS_OP_READ, place};
    }
    uint8_t seen[PIECES] = {0};
    uint32_t submitted = 0;
    uint32_t done = 0;
    while (done < PIECES) {
        int accepted = dlfs_queue_submit(queue, operations + submitted, PIECES - submitted);
        CHECK(accepted >= 0);
        submitted += (uint32_t)accepted;
        CHECK(dlfs_queue_in_flight(queue) <= depth);
        CHECK_EQ(dlfs_queue_in_flight(queue), submitted - done);
        dlfs_completion completions[16];
        int got = dlfs_queue_poll(queue, completions, 16, -1);
        CHECK(got > 0);
        for (int i = 0; i < got; i++) {
            CHECK_EQ(completions[i].result, PIECE_BYTES);
            CHECK_EQ(seen[completions[i].tag]++, 0);
        }
        done += (uint32_t)got;
    }
    CHECK(memcmp(in, out, bytes) == 0);
    dlfs_queue_destroy(queue);
    free(in);
    free(out);
}

static void test_transfer(dlfs_device *device)
{
    dlfs_queue *queue = make_queue(device, 3);
    uint64_t size = dlfs_device_size_bytes(device);
    uint32_t block = dlfs_device_block_bytes(device);
    uint8_t *out = aligned_memory(size);
    uint8_t *in = aligned_memory(size);
    fill_pattern(out, size, 5);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_WRITE, out, 0, size, 3 * PIECE_BYTES), 0);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, in, 0, size, 1u << 20), 0);
    CHECK(memcmp(in, out, size) == 0);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, in, 0, 0, block), 0);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, in, 0, block, 0), -EINVAL);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, in, 0, block + 1, block), -EINVAL);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, in, block, size, block), -EINVAL);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, in, 0, UINT64_MAX - block + 1, block),
             -EINVAL);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, in, 0, (uint64_t)2 * block, block + 1),
             -EINVAL);
    dlfs_operation one = {in, 0, block, DLFS_OP_READ, 1};
    CHECK_EQ(dlfs_queue_submit(queue, &one, 1), 1);
    CHECK_EQ(dlfs_queue_transfer(queue, DLFS_OP_READ, in, 0, block, block), -EBUSY);
    CHECK_EQ(dlfs_queue_register(queue, in, size), -EBUSY);
    dlfs_queue_destroy(queue); /* waits for the operation */
    free(in);
    free(out);
}

static void test_register(dlfs_device *device)
{
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *memory = aligned_memory(1u << 20);
    uint8_t *other = aligned_memory(8192);
    fill_pattern(other, 8192, 11);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, other, 0, 8192), 8192);
    CHECK_EQ(dlfs_queue_register(queue, memory, 0), -EINVAL);
    CHECK_EQ(dlfs_queue_register(queue, memory, SIZE_MAX), -EINVAL);
    CHECK_EQ(dlfs_queue_register(queue, memory, 1u << 20), 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, memory + (1u << 20) - 8192, 0, 8192), 8192);
    CHECK(memcmp(memory + (1u << 20) - 8192, other, 8192) == 0);
    CHECK_EQ(dlfs_queue_register(queue, other, 8192), 0); /* replaces the earlier range */
    memset(other, 0, 8192);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, other, 0, 8192), 8192);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, memory, 0, 8192), 8192);
    CHECK(memcmp(memory, other, 8192) == 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, other, 8192, 4096), 4096);
    CHECK_EQ(dlfs_queue_register(queue, NULL, 0), 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, other, 8192, 4096), 4096);
    CHECK(memcmp(memory, other, 4096) == 0);
    dlfs_queue_destroy(queue);
    free(other);
    free(memory);
}

/* Waits for completions on the descriptor alone, many times over. */
static void test_descriptor(dlfs_device *device)
{
    dlfs_queue *queue = make_queue(device, 4);
    uint8_t *buffer = aligned_memory(8192);
    struct pollfd waited = {.fd = dlfs_queue_descriptor(queue), .events = POLLIN};
    if (waited.fd < 0) {
        CHECK_EQ(waited.fd, -ENOTSUP);
    }
    for (uint32_t round = 0; waited.fd >= 0 && round < 100; round++) {
        dlfs_completion completion;
        dlfs_operation operation = {buffer, (uint64_t)round * 4096, 4096, DLFS_OP_READ, round};
        CHECK_EQ(poll(&waited, 1, 0), 0); /* nothing is in flight */
        CHECK_EQ(dlfs_queue_submit(queue, &operation, 1), 1);
        int got = 0;
        while (got == 0) {
            CHECK(poll(&waited, 1, -1) == 1 || errno == EINTR);
            got = dlfs_queue_poll(queue, &completion, 1, 0);
        }
        CHECK_EQ(got, 1);
        CHECK_EQ(completion.tag, round);
    }
    dlfs_queue_destroy(queue);
    free(buffer);
}

static void test_device(dlfs_device *device, const char *kind)
{
    CHECK(strcmp(dlfs_device_kind(device), kind) == 0);
    CHECK_EQ(dlfs_device_size_bytes(device), DEVICE_BYTES);
    test_validation(device);
    test_pieces(device, 1, 0);
    test_pieces(device, 7, 1);
    test_pieces(device, 128, 0);
    test_transfer(device);
    test_register(device);
    test_descriptor(device);
    CHECK_EQ(dlfs_device_destroy(device), 0);
}

int main(void)
{
    char path[4096];
    make_file(path, sizeof path, DEVICE_BYTES);
    if (uring_works()) {
        test_device(open_file(path, DLFS_OPEN_WRITE, DLFS_ENGINE_URING), "uring");
        test_device(open_file(path, DLFS_OPEN_WRITE | DLFS_OPEN_BUFFERED, DLFS_ENGINE_AUTO),
                    "uring");
    }
    test_device(open_file(path, DLFS_OPEN_WRITE, DLFS_ENGINE_THREADS), "threads");
    test_device(open_file(path, DLFS_OPEN_WRITE | DLFS_OPEN_BUFFERED, DLFS_ENGINE_THREADS),
                "threads");
    CHECK_EQ(unlink(path), 0);
    test_device(make_memory(), "memory");
    dlfs_device *inner = make_memory();
    dlfs_device *fault = NULL;
    CHECK_EQ(dlfs_device_create_fault(inner, &(dlfs_fault_config){.seed = 1, .reorder = 1}, &fault),
             0);
    test_device(fault, "fault");
    CHECK_EQ(dlfs_device_destroy(inner), 0);
    CHECK_EQ(dlfs_device_destroy(NULL), 0);
    dlfs_queue_destroy(NULL);
    dlfs_device *none = NULL;
    CHECK_EQ(dlfs_device_create_memory(0, 512, &none), -EINVAL);
    CHECK_EQ(dlfs_device_create_memory(1000, 512, &none), -EINVAL);
    CHECK_EQ(dlfs_device_create_memory(4096, 256, &none), -EINVAL);
    CHECK_EQ(dlfs_device_create_memory(1u << 20, 1u << 17, &none), -EINVAL);
    CHECK_EQ(dlfs_device_create_memory(6144, 1536, &none), -EINVAL);
    CHECK_EQ(dlfs_device_create_memory(UINT64_C(1) << 60, 4096, &none), -ENOMEM);
    CHECK(none == NULL);
    return 0;
}
