/*
 * The least that reading samples by io_uring can cost: each sample is one O_DIRECT read of the
 * blocks it touches, `depth` of them in flight, registered file and buffers, nothing checked,
 * nothing kept.
 *
 *     bare_uring FILE PLACES DEPTH SECONDS KEPT KEPT_FILE
 *
 * PLACES holds pairs of u64: byte offset and length. After SECONDS no more reads are started. The
 * bytes of the first KEPT samples are written to KEPT_FILE, in their order, after the clock stops.
 */
#include <liburing.h>

#include "bare.h"

#define BLOCK 4096u

static struct place *places;
static size_t count;
static char *buffers;
static size_t buffer_bytes;
static int fixed = 1;

static uint64_t first_block(const struct place *place)
{
    return place->offset & ~(uint64_t)(BLOCK - 1);
}

static uint64_t span_bytes(const struct place *place)
{
    uint64_t end = (place->offset + place->length + BLOCK - 1) & ~(uint64_t)(BLOCK - 1);
    return end - first_block(place);
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

static void submit(struct io_uring *ring, unsigned slot, size_t at)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    char *buffer = buffers + slot * buffer_bytes;
    unsigned length = (unsigned)span_bytes(&places[at]);
    if (fixed)
        io_uring_prep_read_fixed(sqe, 0, buffer, length, first_block(&places[at]), (int)slot);
    else
        io_uring_prep_read(sqe, 0, buffer, length, first_block(&places[at]));
    io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, (uint64_t)slot << 48 | at);
}

static void check(const struct io_uring_cqe *cqe)
{
    size_t at = cqe->user_data & ((UINT64_C(1) << 48) - 1);
    uint64_t wanted = places[at].offset + places[at].length - first_block(&places[at]);
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

static void keep(int file, size_t kept, const char *path)
{
    FILE *out = fopen(path, "wb");
    for (size_t i = 0; i < kept && i < count; i++) {
        size_t length = (size_t)span_bytes(&places[i]);
        if (!out || pread(file, buffers, length, (off_t)first_block(&places[i])) < 0 ||
            fwrite(buffers + places[i].offset % BLOCK, 1, places[i].length, out) !=
                places[i].length)
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
    places = (struct place *)load(argv[2], &bytes);
    count = bytes / sizeof(struct place);
    unsigned depth = (unsigned)strtoul(argv[3], NULL, 10);
    buffer_bytes = BLOCK;
    for (size_t i = 0; i < count; i++)
        if (span_bytes(&places[i]) > buffer_bytes)
            buffer_bytes = (size_t)span_bytes(&places[i]);
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
        total += places[i].length;
    report(done, total, seconds, cpu);
    keep(file, strtoul(argv[5], NULL, 10), argv[6]);
    return 0;
}
