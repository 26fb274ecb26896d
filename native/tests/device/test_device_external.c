/* A device of another library, whose functions use a device in memory. */
#include <sys/wait.h>

#include "device/device.h"
#include "device/device_tests.h"

struct other {
    dlfs_device base;
    dlfs_device *memory;
    uint32_t destroyed;
    uint32_t flushed;
    uint32_t queues;
    uint32_t abandoned;
    int refuse; /* result of creating a queue pair */
    uint64_t incarnation;
    uint64_t until_ns;
};

struct other_queue {
    dlfs_queue base;
    dlfs_queue *memory;
};

static struct other *owner; /* device of the queue pairs under test */

static int other_flush(dlfs_device *device)
{
    struct other *other = (struct other *)device;
    other->flushed++;
    return -EIO;
}

static void other_destroy(dlfs_device *device)
{
    struct other *other = (struct other *)device;
    other->destroyed++;
    CHECK_EQ(dlfs_device_destroy(other->memory), 0);
}

static int other_submit(dlfs_queue *queue, const dlfs_operation *operations, uint32_t count)
{
    return dlfs_queue_submit(((struct other_queue *)queue)->memory, operations, count);
}

static int other_poll(dlfs_queue *queue, dlfs_completion *completions, uint32_t count,
                      int timeout_ms)
{
    return dlfs_queue_poll(((struct other_queue *)queue)->memory, completions, count, timeout_ms);
}

static void other_queue_free(dlfs_queue *queue)
{
    dlfs_queue_destroy(((struct other_queue *)queue)->memory);
    free(queue);
}

static void other_queue_destroy(dlfs_queue *queue)
{
    other_queue_free(queue);
    owner->queues--;
}

static void other_queue_abandon(dlfs_queue *queue)
{
    owner->abandoned++;
    other_queue_free(queue);
}

static const struct dlfs_queue_ops other_queue_ops = {
    .submit = other_submit,
    .poll = other_poll,
    .destroy = other_queue_destroy,
    .abandon = other_queue_abandon,
};

static int other_queue_create(dlfs_device *device, uint32_t depth,
                              const struct dlfs_connect_limit *limit, dlfs_queue **out)
{
    (void)limit;
    struct other *other = (struct other *)device;
    if (other->refuse < 0) {
        return other->refuse;
    }
    struct other_queue *queue = calloc(1, sizeof *queue);
    CHECK(queue != NULL);
    CHECK_EQ(dlfs_queue_create(other->memory, depth, &queue->memory), 0);
    queue->base.ops = &other_queue_ops;
    other->queues++;
    *out = &queue->base;
    return 0;
}

static int other_incarnation(dlfs_device *device, uint64_t *incarnation)
{
    *incarnation = ((struct other *)device)->incarnation;
    return 0;
}

static int other_limit_writes(dlfs_device *device, uint64_t incarnation, uint64_t until_ns)
{
    struct other *other = (struct other *)device;
    other->incarnation = incarnation;
    other->until_ns = until_ns;
    return 0;
}

static const struct dlfs_device_ops other_ops = {
    .version = DLFS_EXTERNAL_VERSION,
    .queue_create = other_queue_create,
    .flush = other_flush,
    .destroy = other_destroy,
    .incarnation = other_incarnation,
    .limit_writes = other_limit_writes,
};

static struct other describe(dlfs_device *memory)
{
    return (struct other){.base = {.ops = &other_ops,
                                   .kind = "other",
                                   .size_bytes = DEVICE_BYTES,
                                   .block_bytes = 4096,
                                   .writable = true},
                          .memory = memory};
}

static void test_refuses_what_does_not_fit(void)
{
    dlfs_device *device = NULL;
    struct dlfs_device_ops newer = other_ops;
    newer.version++;
    struct other bad = describe(NULL);
    bad.base.ops = &newer;
    CHECK_EQ(dlfs_device_create_external(&bad.base, &device), -EPROTONOSUPPORT);
    bad = describe(NULL);
    bad.base.block_bytes = 1000;
    CHECK_EQ(dlfs_device_create_external(&bad.base, &device), -EINVAL);
    bad = describe(NULL);
    bad.base.block_bytes = 256;
    CHECK_EQ(dlfs_device_create_external(&bad.base, &device), -EINVAL);
    bad = describe(NULL);
    bad.base.size_bytes = 4097;
    CHECK_EQ(dlfs_device_create_external(&bad.base, &device), -EINVAL);
    bad.base.size_bytes = 0;
    CHECK_EQ(dlfs_device_create_external(&bad.base, &device), -EINVAL);
    CHECK_EQ(dlfs_device_create_external(NULL, &device), -EINVAL);
    CHECK(device == NULL);
    CHECK_EQ(bad.destroyed, 0);
}

static void test_a_library_need_not_limit_writes(void)
{
    struct other other = describe(make_memory());
    struct dlfs_device_ops fewer = other_ops;
    fewer.incarnation = NULL;
    fewer.limit_writes = NULL;
    other.base.ops = &fewer;
    dlfs_device *device = NULL;
    uint64_t incarnation = 0;
    CHECK_EQ(dlfs_device_create_external(&other.base, &device), 0);
    CHECK_EQ(dlfs_device_incarnation(device, &incarnation), -ENOTSUP);
    CHECK_EQ(dlfs_device_limit_writes(device, 0, 0), -ENOTSUP);
    CHECK_EQ(dlfs_device_incarnation(other.memory, &incarnation), -ENOTSUP);
    CHECK_EQ(dlfs_device_destroy(device), 0);
}

static void test_hands_everything_on(void)
{
    struct other other = describe(make_memory());
    owner = &other;
    dlfs_device *device = NULL;
    CHECK_EQ(dlfs_device_create_external(&other.base, &device), 0);
    CHECK_EQ(dlfs_device_size_bytes(device), DEVICE_BYTES);
    CHECK_EQ(dlfs_device_block_bytes(device), 4096);
    CHECK_EQ(strcmp(dlfs_device_kind(device), "other"), 0);
    CHECK_EQ(dlfs_device_flush(device), -EIO);
    CHECK_EQ(other.flushed, 1);
    uint64_t incarnation = 0;
    CHECK_EQ(dlfs_device_limit_writes(device, 7, 8), 0);
    CHECK_EQ(other.until_ns, 8);
    CHECK_EQ(dlfs_device_incarnation(device, &incarnation), 0);
    CHECK_EQ(incarnation, 7);
    other.refuse = -EMFILE;
    dlfs_queue *queue = NULL;
    CHECK_EQ(dlfs_queue_create(device, 4, &queue), -EMFILE);
    CHECK(queue == NULL);
    other.refuse = 0;
    queue = make_queue(device, 4);
    uint8_t *out = aligned_memory(8192);
    uint8_t *in = aligned_memory(8192);
    fill_pattern(out, 8192, 3);
    CHECK_EQ(do_operation(queue, DLFS_OP_WRITE, out, 4096, 8192), 8192);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, in, 4096, 8192), 8192);
    CHECK_EQ(memcmp(in, out, 8192), 0);
    CHECK_EQ(do_operation(queue, DLFS_OP_READ, in, 512, 4096),
             -EINVAL); /* its own block size counts */
    CHECK_EQ(dlfs_queue_register(queue, in, 8192), 0);
    CHECK_EQ(dlfs_queue_descriptor(queue), -ENOTSUP);
    CHECK_EQ(dlfs_device_destroy(device), -EBUSY);
    dlfs_queue_destroy(queue);
    CHECK_EQ(other.queues, 0);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    CHECK_EQ(other.destroyed, 1);
    free(in);
    free(out);
}

static void test_a_child_abandons_its_copy(void)
{
    struct other other = describe(make_memory());
    owner = &other;
    dlfs_device *device = NULL;
    CHECK_EQ(dlfs_device_create_external(&other.base, &device), 0);
    dlfs_queue *queue = make_queue(device, 4);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dlfs_queue_destroy(queue);
        _exit(other.abandoned == 1 && other.queues == 1 ? 0 : 1);
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    dlfs_queue_destroy(queue);
    CHECK_EQ(dlfs_device_destroy(device), 0);
}

int main(void)
{
    test_refuses_what_does_not_fit();
    test_a_library_need_not_limit_writes();
    test_hands_everything_on();
    test_a_child_abandons_its_copy();
    return 0;
}
