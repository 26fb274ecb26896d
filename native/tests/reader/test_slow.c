/*
 * Members that answer slowly, which are neither silent nor hung. A read of more than a slow device
 * answers within the timeout succeeds. A member is hung only for the time in which it was asked.
 */
#include "device/device.h"
#include "platform/clock.h"
#include "reader/copies_tests.h"
#include "reader/fetch.h"
#include "reader/members.h"
#include "reader/requests.h"

#define TIMEOUT_MS 1000u
#define NS_PER_BYTE UINT64_C(1907) /* of the slow device: 512 KiB a second */
#define DEPTH 64u

/* A device that answers operations one after the other, at a steady pace. */
struct pace {
    dlfs_device base;
    dlfs_device *inner;
    dlfs_device *device;
    uint64_t free_ns; /* when it has answered all that was submitted */
};

struct pace_queue {
    dlfs_queue base;
    struct pace *pace;
    dlfs_queue *inner;
    uint64_t first;
    uint64_t last;
    dlfs_operation operations[DEPTH];
    uint64_t ready_ns[DEPTH];
};

static int pace_flush(dlfs_device *device)
{
    return dlfs_device_flush(((struct pace *)device)->inner);
}

static void pace_destroy(dlfs_device *device)
{
    (void)device;
}

static int pace_submit(dlfs_queue *base, const dlfs_operation *operations, uint32_t count)
{
    struct pace_queue *queue = (struct pace_queue *)base;
    struct pace *pace = queue->pace;
    uint64_t now_ns = monotonic_ns();
    pace->free_ns = pace->free_ns > now_ns ? pace->free_ns : now_ns;
    for (uint32_t i = 0; i < count; i++) {
        pace->free_ns += operations[i].length_bytes * NS_PER_BYTE;
        queue->operations[queue->last % DEPTH] = operations[i];
        queue->ready_ns[queue->last++ % DEPTH] = pace->free_ns;
    }
    return (int)count;
}

static int pace_poll(dlfs_queue *base, dlfs_completion *completions, uint32_t count, int timeout_ms)
{
    struct pace_queue *queue = (struct pace_queue *)base;
    (void)count;
    for (int waited_ms = 0; queue->ready_ns[queue->first % DEPTH] > monotonic_ns(); waited_ms++) {
        if (timeout_ms >= 0 && waited_ms >= timeout_ms) {
            return 0;
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    CHECK_EQ(dlfs_queue_submit(queue->inner, &queue->operations[queue->first++ % DEPTH], 1), 1);
    return dlfs_queue_poll(queue->inner, completions, 1, -1);
}

static void pace_queue_destroy(dlfs_queue *base)
{
    dlfs_queue_destroy(((struct pace_queue *)base)->inner);
    free(base);
}

static const struct dlfs_queue_ops pace_queue_ops = {
    .submit = pace_submit,
    .poll = pace_poll,
    .destroy = pace_queue_destroy,
    .abandon = pace_queue_destroy,
};

static int pace_queue_create(dlfs_device *base, uint32_t depth,
                             const struct dlfs_connect_limit *limit, dlfs_queue **out)
{
    (void)limit;
    struct pace_queue *queue = calloc(1, sizeof *queue);
    CHECK(queue != NULL && depth <= DEPTH);
    queue->base.ops = &pace_queue_ops;
    queue->pace = (struct pace *)base;
    CHECK_EQ(dlfs_queue_create(queue->pace->inner, depth, &queue->inner), 0);
    *out = &queue->base;
    return 0;
}

static const struct dlfs_device_ops pace_ops = {
    .version = DLFS_EXTERNAL_VERSION,
    .queue_create = pace_queue_create,
    .flush = pace_flush,
    .destroy = pace_destroy,
};

/* Checks that all samples are read, although those queued last come after twice the timeout. */
static void a_slow_device_is_waited_for(void)
{
    struct dataset dataset;
    struct pace pace = {.free_ns = 0};
    uint64_t indices[COUNT];
    dlfs_batch *batch;
    dataset_create(&dataset, NULL);
    pace.base.ops = &pace_ops;
    pace.base.kind = "pace";
    pace.base.size_bytes = dlfs_device_size_bytes(dataset.inner);
    pace.base.block_bytes = dlfs_device_block_bytes(dataset.inner);
    pace.inner = dataset.inner;
    CHECK_EQ(dlfs_device_create_external(&pace.base, &pace.device), 0);
    dataset.device = pace.device;
    CHECK(dataset.chunk_count * CHUNK * NS_PER_BYTE > 2 * TIMEOUT_MS * UINT64_C(1000000));
    dlfs_reader *reader = reader_as(
        &dataset,
        (dlfs_reader_config){.depth = DEPTH, .memory_bytes = 8u << 20, .timeout_ms = TIMEOUT_MS});
    for (uint64_t index = 0; index < COUNT; index++) {
        indices[index] = index;
    }
    CHECK_EQ(dlfs_reader_read(reader, indices, COUNT, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    for (uint64_t i = 0; i < COUNT; i++) {
        check_sample(batch, i);
    }
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_lost_members(reader), 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
}

/*
 * Checks a span that is late after a first member failed late: the second one, which was asked just
 * now, is not hung. It is if its device gave up the span before, and was asked again.
 */
static void only_the_time_of_asking_counts(void)
{
    const dlfs_fault_config none[MEMBERS] = {0};
    struct volume volume;
    struct fetch *fetch;
    volume_create(&volume, none);
    for (uint32_t gave_up = 0; gave_up < 2; gave_up++) {
        dlfs_reader *reader = copies_reader(&volume, MEMBERS, 20 * CHUNK, TIMEOUT_MS);
        CHECK_EQ(reader_take_fetch(reader, &fetch), 0);
        CHECK_EQ(fetch_reserve_spans(fetch, 4), 0);
        uint64_t whole_ns = reader_timeout_ns(reader);
        fetch->now_ns = monotonic_ns();
        struct span *span = span_take(fetch);
        span->state = SPAN_IN_FLIGHT;
        span->begun = true;
        span->queued_member = MEMBER_NONE;
        span->begun_ns = fetch->now_ns - whole_ns;
        span->deadline_ns = fetch->now_ns - 1;
        span->silent_members = gave_up << 1;
        struct request *request = &fetch->requests[0];
        uint32_t next = request->next;
        *request = (struct request){.span = span_number(fetch, span),
                                    .member = 1,
                                    .begun_ns = fetch->now_ns - whole_ns / 100};
        requests_mark_late_members(fetch, fetch->now_ns);
        CHECK_EQ(member_is_lost(reader, 1), true);
        CHECK_EQ(member_is_hung(reader, 1), gave_up == 1);
        *request = (struct request){.member = MEMBER_NONE, .next = next};
        span_recycle(fetch, span);
        reader_return_fetch(reader, fetch);
        CHECK_EQ(dlfs_reader_destroy(reader), 0);
    }
    volume_destroy(&volume);
}

int main(void)
{
    copies_create();
    a_slow_device_is_waited_for();
    only_the_time_of_asking_counts();
    copies_destroy();
    return 0;
}
