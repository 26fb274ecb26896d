/*
 * A device that allows few queue pairs. More threads than that read from it, by batches and by
 * streams, and each gets a queue pair in turn. A user of its own queue pair gets one too, or an
 * error if there is none. Unused queue pairs are idle, for any thread to use.
 */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include "platform/clock.h"
#include "platform/thread.h"
#include "reader/gate.h"
#include "reader/reader_tests.h"

#define THREADS 12u
#define QUEUES 3u
#define TURNS ROUNDS_OF(20000u, 4000u)
#define BATCHES ROUNDS_OF(200u, 60u)
#define EPOCHS ROUNDS_OF(4u, 2u)

static struct dataset dataset;
static struct gate gate;

static dlfs_reader *make_reader(uint64_t memory_bytes)
{
    return reader_as(&dataset, (dlfs_reader_config){.depth = 4,
                                                    .memory_bytes = memory_bytes,
                                                    .gap_bytes = 8192,
                                                    .timeout_ms = 60000});
}

static void check_no_failure(const dlfs_batch *batch)
{
    if (batch->failure_count > 0) {
        CHECK_EQ(batch->failures[0].code, 0); /* prints it */
    }
}

static void *read_batches(void *argument)
{
    dlfs_reader *reader = argument;
    for (uint64_t round = 0; round < BATCHES; round++) {
        uint64_t indices[16];
        dlfs_batch *batch;
        for (uint64_t i = 0; i < 16; i++) {
            indices[i] = (round * 16 + i) * 7 % COUNT;
        }
        CHECK_EQ(dlfs_reader_read(reader, indices, 16, &batch), 0);
        check_no_failure(batch);
        for (uint64_t i = 0; i < 16; i++) {
            check_sample(batch, i);
        }
        dlfs_batch_release(batch);
    }
    return NULL;
}

static void *read_epochs(void *argument)
{
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        dlfs_sequence *sequence;
        dlfs_stream *stream;
        dlfs_batch *batch;
        int code;
        CHECK_EQ(dlfs_sequence_create(dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 5, epoch, 1,
                                      &sequence),
                 0);
        dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT};
        CHECK_EQ(dlfs_stream_create(argument, &config, &stream), 0);
        while ((code = dlfs_stream_next(stream, 16, -1, &batch)) == 0) {
            check_no_failure(batch);
            for (uint64_t i = 0; i < batch->count; i++) {
                check_sample(batch, i);
            }
            dlfs_batch_release(batch);
        }
        CHECK_EQ(code, DLFS_E_END);
        dlfs_stream_destroy(stream);
        dlfs_sequence_destroy(sequence);
    }
    return NULL;
}

/* The readers have memory for a part of the dataset only: they keep reading. */
static void more_threads_than_queue_pairs(uint32_t readers)
{
    dlfs_reader *made[THREADS];
    pthread_t threads[THREADS];
    for (uint32_t i = 0; i < readers; i++) {
        made[i] = make_reader(THREADS * 8 * CHUNK / readers);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQ(
            thread_start(&threads[i], NULL, i % 2 ? read_batches : read_epochs, made[i % readers]),
            0);
    }
    dlfs_queue *own; /* queue pair of another user, created in between */
    CHECK_EQ(dlfs_queue_create(gate.device, 1, &own), 0);
    dlfs_queue_destroy(own);
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK(atomic_load(&gate.queues) <= QUEUES);
    for (uint32_t i = 0; i < readers; i++) {
        CHECK_EQ(dlfs_reader_destroy(made[i]), 0);
    }
}

/* Idle queue pairs are used again, and destroyed in favour of another depth. */
static void idle_ones_are_used_again(void)
{
    dlfs_queue *queues[QUEUES];
    dlfs_reader *reader = make_reader(8u << 20);
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read(reader, (const uint64_t[]){1, 2}, 2, &batch), 0);
    dlfs_batch_release(batch);
    uint32_t open = atomic_load(&gate.queues);
    CHECK(open > 0);
    CHECK_EQ(dlfs_queues_idle(gate.device), open);
    for (uint32_t i = 0; i < QUEUES; i++) {
        CHECK_EQ(dlfs_queue_create(gate.device, 2, &queues[i]), 0);
    }
    CHECK_EQ(dlfs_queues_idle(gate.device), 0);
    dlfs_queue *more;
    CHECK_EQ(dlfs_queue_create(gate.device, 2, &more), DLFS_E_LIMIT);
    for (uint32_t i = 0; i < QUEUES; i++) {
        dlfs_queue_destroy(queues[i]);
    }
    CHECK_EQ(dlfs_reader_read(reader, (const uint64_t[]){3, 4}, 2, &batch), 0);
    CHECK_EQ(batch->failure_count, 0);
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
}

/* A refusal for queue pairs that are destroyed meanwhile is not one for good. */
static void a_refusal_may_be_out_of_date(void)
{
    dlfs_queue *queues[QUEUES];
    dlfs_queue *made;
    struct dlfs_queue_waiter waiter = {.queue = NULL};
    CHECK_EQ(dlfs_queues_idle(gate.device), 0);
    atomic_store(&gate.queues_max, 1);
    CHECK_EQ(dlfs_queue_acquire(gate.device, 4, &waiter, &queues[0]), 0);
    atomic_store(&gate.destroyed, queues[0]);
    CHECK_EQ(dlfs_queue_acquire(gate.device, 4, &waiter, &made), -EAGAIN);
    CHECK_EQ(atomic_load(&gate.queues), 0);
    int code;
    while ((code = dlfs_queue_acquire(gate.device, 4, &waiter, &made)) == -EAGAIN) {
        sched_yield(); /* the refusal holds for a while */
    }
    CHECK_EQ(code, 0);
    dlfs_queue_destroy(made);
    atomic_store(&gate.queues_max, QUEUES);
}

/* A queue pair handed over while another is created for the same waiter is not lost. */
static void none_is_lost_between_two(void)
{
    dlfs_queue *queues[QUEUES];
    dlfs_queue *made;
    struct dlfs_queue_waiter waiters[QUEUES + 1] = {{.queue = NULL}};
    for (uint32_t i = 0; i < QUEUES; i++) {
        CHECK_EQ(dlfs_queue_acquire(gate.device, 4, &waiters[i], &queues[i]), 0);
    }
    CHECK_EQ(dlfs_queue_acquire(gate.device, 4, &waiters[QUEUES], &made), -EAGAIN);
    dlfs_queue_destroy(queues[0]); /* now the target accepts another one */
    gate.released = queues[1];
    CHECK_EQ(dlfs_queue_acquire(gate.device, 4, &waiters[QUEUES], &made), 0);
    CHECK_EQ(dlfs_queues_idle(gate.device), 1);
    dlfs_queue_release(made);
    dlfs_queue_release(queues[2]);
    CHECK_EQ(dlfs_queues_idle(gate.device), QUEUES);
}

static void *acquire_and_release(void *device)
{
    struct dlfs_queue_waiter waiter = {.queue = NULL};
    dlfs_queue *queue;
    CHECK_EQ(dlfs_queue_acquire(device, 4, &waiter, &queue), 0);
    dlfs_queue_release(queue);
    return NULL;
}

/* A thread waits for the only queue pair that the target has while another thread connects it. */
static void the_first_is_waited_for(void)
{
    struct gate narrow = {.queues_max = 1, .holds_created = true};
    struct dlfs_queue_waiter waiter = {.queue = NULL};
    dlfs_queue *made;
    pthread_t first;
    gate_put(&narrow, dataset.inner);
    CHECK_EQ(thread_start(&first, NULL, acquire_and_release, narrow.device), 0);
    while (atomic_load(&narrow.queues) == 0) {
        sched_yield();
    }
    CHECK_EQ(dlfs_queue_acquire(narrow.device, 4, &waiter, &made), -EAGAIN);
    atomic_store(&narrow.holds_created, false);
    pthread_join(first, NULL);
    CHECK_EQ(dlfs_queue_acquire(narrow.device, 4, &waiter, &made), 0); /* that was handed over */
    dlfs_queue_release(made);
    CHECK_EQ(dlfs_device_destroy(narrow.device), 0);
}

static void *take_turns(void *device)
{
    struct dlfs_queue_waiter waiter = {.queue = NULL};
    dlfs_queue *queue;
    for (uint32_t turn = 0; turn < TURNS; turn++) {
        int code;
        while ((code = dlfs_queue_acquire(device, 4, &waiter, &queue)) == -EAGAIN) {
            int state;
            while ((state = waiter.state) == DLFS_WAITER_QUEUED &&
                   !dlfs_queue_waiter_is_due(&waiter, monotonic_ns())) {
                sched_yield();
            }
            CHECK(state != DLFS_WAITER_NONE);
        }
        CHECK_EQ(code, 0);
        dlfs_queue_release(queue);
    }
    return NULL;
}

/* A waiter is in line until it is served, and a queue pair just released has not expired. */
static void two_threads_take_turns(uint32_t queues_max)
{
    struct gate narrow = {.queues_max = queues_max};
    struct dlfs_queue_waiter waiter = {.queue = NULL};
    pthread_t threads[2];
    dlfs_queue *first;
    gate_put(&narrow, dataset.inner);
    CHECK_EQ(dlfs_queue_acquire(narrow.device, 4, &waiter, &first), 0);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(thread_start(&threads[i], NULL, take_turns, narrow.device), 0);
    }
    dlfs_queue_release(first);
    for (uint32_t i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK(atomic_load(&narrow.created) <= queues_max);
    CHECK_EQ(dlfs_device_destroy(narrow.device), 0);
}

/* A forked child inherits no queue pair. */
static void a_child_makes_its_own(void)
{
    dlfs_reader *reader = make_reader(8u << 20);
    dlfs_batch *batch;
    CHECK_EQ(dlfs_reader_read(reader, (const uint64_t[]){1, 2}, 2, &batch), 0);
    dlfs_batch_release(batch);
    CHECK(dlfs_queues_idle(gate.device) > 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dlfs_queue *own;
        atomic_store(&gate.queues, 0);
        CHECK_EQ(dlfs_queue_create(gate.device, 4, &own), 0);
        CHECK_EQ(dlfs_queues_idle(gate.device), 0);
        dlfs_queue_destroy(own);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK(dlfs_queues_idle(gate.device) > 0);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    CHECK_EQ(dlfs_queues_idle(gate.device), 0);
}

int main(void)
{
    dataset_create(&dataset, NULL);
    gate_put(&gate, dataset.inner);
    atomic_store(&gate.queues_max, QUEUES);
    dataset.device = gate.device;
    a_refusal_may_be_out_of_date();
    idle_ones_are_used_again();
    none_is_lost_between_two();
    the_first_is_waited_for();
    two_threads_take_turns(1);
    two_threads_take_turns(2);
    a_child_makes_its_own();
    more_threads_than_queue_pairs(1);
    more_threads_than_queue_pairs(THREADS);
    dataset_destroy(&dataset);
    CHECK_EQ(atomic_load(&gate.queues), 0);
    return 0;
}
