/*
 * The lower bound of the cost of reading samples by io_uring. Each sample is one O_DIRECT read of
 * the blocks that contain it, DEPTH of them in flight, with registered file and buffers. Samples
 * are neither checked nor stored.
 *
 *     bare_uring FILE LOCATIONS DEPTH SECONDS COUNT OUTPUT
 *
 * LOCATIONS is a file of pairs of u64: byte offset and length. After SECONDS no more reads are
 * started. After the clock has stopped, the bytes of the first COUNT samples are written to the
 * file OUTPUT, in their order.
 */
#include <liburing.h>

#include "bare.h"

#define BLOCK 4096u

static struct location *locations;
static size_t count;
static char *buffers;
static size_t buffer_bytes;
static int fixed = 1;

static uint64_t first_block(const struct location *location)
{
    return location->offset & ~(uint64_t)(BLOCK - 1);
}

static uint64_t span_bytes(const struct location *location)
{
    uint64_t end = (location->offset + location->length + BLOCK - 1) & ~(uint64_t)(BLOCK - 1);
    return end - first_block(location);
}

static void prepare(struct io_uring *ring, int file, unsigned depth)
{
    int code = io_uring_queue_init(depth, ring, 0);
    if (code < 0 || io_uring_register_files(ring, &file, 1) < 0)
        die("io_uring");
    struct iovec *vectors = calloc(depth, sizeof(*vectors));
    for (unsigned i = 0; vectors && i < depth; i++)
        vectors[i] = (struct iovec){buffers + i * buffer_bytes, buffer_bytes};
    fixed = vectors && io_uring_register_buffers(ring, vectors, depth) == 0;
    free(vectors);
}

static void submit(struct io_uring *ring, unsigned number, size_t at)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    char *buffer = buffers + number * buffer_bytes;
    unsigned length = (unsigned)span_bytes(&locations[at]);
    if (fixed)
        io_uring_prep_read_fixed(sqe, 0, buffer, length, first_block(&locations[at]), (int)number);
    else
        io_uring_prep_read(sqe, 0, buffer, length, first_block(&locations[at]));
    io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, (uint64_t)number << 48 | at);
}

static void check(const struct io_uring_cqe *cqe)
{
    size_t at = cqe->user_data & ((UINT64_C(1) << 48) - 1);
    uint64_t wanted = locations[at].offset + locations[at].length - first_block(&locations[at]);
    if (cqe->res < 0 || (uint64_t)cqe->res < wanted) {
        fprintf(stderr, "read of sample %zu: %d\n", at, cqe->res);
        exit(1);
    }
}

static size_t race(struct io_uring *ring, unsigned depth, double until)
{
    size_t next = 0;
    size_t done = 0;
    for (; next < depth && next < count; next++)
        submit(ring, (unsigned)next, next);
    while (done < next) {
        if (io_uring_submit_and_wait(ring, 1) < 0)
            die("submit");
        int more = now_s() < until;
        struct io_uring_cqe *cqe;
        unsigned head;
        unsigned seen = 0;
        io_uring_for_each_cqe(ring, head, cqe)
        {
            check(cqe);
            seen++;
            if (more && next < count)
                submit(ring, (unsigned)(cqe->user_data >> 48), next++);
        }
        io_uring_cq_advance(ring, seen);
        done += seen;
    }
    return done;
}

static void write_samples(int file, size_t wanted, const char *path)
{
    FILE *out = fopen(path, "wb");
    for (size_t i = 0; i < wanted && i < count; i++) {
        size_t length = (size_t)span_bytes(&locations[i]);
        if (!out || pread(file, buffers, length, (off_t)first_block(&locations[i])) < 0 ||
            fwrite(buffers + locations[i].offset % BLOCK, 1, locations[i].length, out) !=
                locations[i].length)
            die(path);
    }
    if (!out || fclose(out) != 0)
        die(path);
}

int main(int argc, char **argv)
{
    if (argc != 7)
        return 2;
    size_t bytes;
    locations = (struct location *)load(argv[2], &bytes);
    count = bytes / sizeof(struct location);
    unsigned depth = (unsigned)strtoul(argv[3], NULL, 10);
    buffer_bytes = BLOCK;
    for (size_t i = 0; i < count; i++)
        if (span_bytes(&locations[i]) > buffer_bytes)
            buffer_bytes = (size_t)span_bytes(&locations[i]);
    buffers = allocate(buffer_bytes * depth);
    memset(buffers, 1, buffer_bytes * depth);
    int file = open(argv[1], O_RDONLY | O_DIRECT);
    if (file < 0)
        die(argv[1]);
    struct io_uring ring;
    prepare(&ring, file, depth);
    double cpu = cpu_s();
    double start = now_s();
    size_t done = race(&ring, depth, start + strtod(argv[4], NULL));
    double seconds = now_s() - start;
    cpu = cpu_s() - cpu;
    uint64_t total = 0;
    for (size_t i = 0; i < done; i++)
        total += locations[i].length;
    report(done, total, seconds, cpu);
    write_samples(file, strtoul(argv[5], NULL, 10), argv[6]);
    return 0;
}
