/* The rules for writes of both initiators: flushes, leases, repetitions; see
 * nvme/protocol/writes.h. */
#include "nvme/protocol/writes.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "asleep.h"
#include "check.h"
#include "dlfs/dlfs.h"
#include "platform/clock.h"

/* ---- flush ----------------------------------------------------------------------------------- */

struct controller {
    struct nvme_durability durability;
    struct nvme_flushed answer;
    int code;
    bool writes_meanwhile; /* a write completes on incarnation 1 during the flush */
    bool flushes_twice;    /* another flush waits while this one runs */
    pthread_t second;
    _Atomic pid_t second_id;
};

static int flush(struct controller *controller);

static void *flush_second(void *argument)
{
    struct controller *controller = argument;
    atomic_store(&controller->second_id, gettid());
    return (void *)(intptr_t)flush(controller);
}

static int answer_flush(void *argument, struct nvme_flushed *flushed)
{
    struct controller *controller = argument;
    if (controller->flushes_twice) {
        controller->flushes_twice = false;
        CHECK_EQ(pthread_create(&controller->second, NULL, flush_second, controller), 0);
        while (atomic_load(&controller->second_id) == 0) {
        }
        wait_until_asleep(atomic_load(&controller->second_id));
    }
    if (controller->writes_meanwhile) {
        nvme_durability_note(&controller->durability, 1);
    }
    *flushed = controller->answer;
    return controller->code;
}

static int flush(struct controller *controller)
{
    bool lost = false;
    int code = nvme_durability_flush(&controller->durability, answer_flush, controller, &lost);
    CHECK(!lost || code == -EIO);
    return code;
}

static void make(struct controller *controller, uint64_t incarnation)
{
    *controller = (struct controller){.answer = {.incarnation = incarnation, .cached = true}};
    nvme_durability_init(&controller->durability);
}

static void test_a_flush_speaks_for_its_own_controller_only(void)
{
    struct controller controller;
    make(&controller, 1);
    CHECK_EQ(flush(&controller), 0);
    nvme_durability_note(&controller.durability, 1);
    CHECK_EQ(flush(&controller), 0);
    nvme_durability_note(&controller.durability, 2);
    nvme_durability_note(&controller.durability, 1);
    controller.answer.incarnation = 2;
    CHECK_EQ(flush(&controller), -EIO);
    CHECK_EQ(flush(&controller), 0); /* it is reported once */
    nvme_durability_note(&controller.durability, 1);
    controller.answer.cached = false;
    CHECK_EQ(flush(&controller), 0);
    nvme_durability_destroy(&controller.durability);
}

static void test_a_failed_flush_forgets_no_write(void)
{
    struct controller controller;
    make(&controller, 1);
    nvme_durability_note(&controller.durability, 1);
    controller.code = DLFS_E_LOST;
    CHECK_EQ(flush(&controller), DLFS_E_LOST);
    controller.code = 0;
    controller.answer.incarnation = 2;
    CHECK_EQ(flush(&controller), -EIO);
    nvme_durability_destroy(&controller.durability);
}

static void test_a_write_that_ends_during_a_flush_is_for_the_next(void)
{
    struct controller controller;
    make(&controller, 1);
    controller.writes_meanwhile = true;
    CHECK_EQ(flush(&controller), 0);
    controller.writes_meanwhile = false;
    controller.answer.incarnation = 2;
    CHECK_EQ(flush(&controller), -EIO);
    nvme_durability_destroy(&controller.durability);
}

static void test_a_flush_that_waits_for_its_turn_learns_of_the_loss(void)
{
    struct controller controller;
    make(&controller, 2);
    nvme_durability_note(&controller.durability, 1);
    controller.flushes_twice = true;
    CHECK_EQ(flush(&controller), -EIO);
    void *code = NULL;
    CHECK_EQ(pthread_join(controller.second, &code), 0);
    CHECK_EQ((intptr_t)code, -EIO);
    CHECK_EQ(flush(&controller), 0);
    nvme_durability_destroy(&controller.durability);
}

/* ---- leases ---------------------------------------------------------------------------------- */

static void test_a_permit_is_for_one_controller_and_a_time(void)
{
    struct nvme_write_limit limit;
    nvme_write_limit_init(&limit);
    CHECK_EQ(nvme_write_permit(&limit, 7), 0);
    nvme_write_limit_set(&limit, 7, boottime_ns() + UINT64_C(3600000000000));
    CHECK_EQ(nvme_write_permit(&limit, 7), 0);
    CHECK_EQ(nvme_write_permit(&limit, 8), -EAGAIN);
    nvme_write_limit_set(&limit, 8, boottime_ns());
    CHECK_EQ(nvme_write_permit(&limit, 8), -EKEYEXPIRED);
    CHECK_EQ(nvme_write_permit(&limit, 7), -EKEYEXPIRED);
    nvme_write_limit_set(&limit, 0, DLFS_WRITES_FREE);
    CHECK_EQ(nvme_write_permit(&limit, 8), 0);
}

/* ---- repetition ------------------------------------------------------------------------------ */

static void test_how_long_a_controller_takes_to_quiesce(void)
{
    CHECK_EQ(nvme_quiesce_ms(40, 10000, 0), 40);
    CHECK_EQ(nvme_quiesce_ms(40, 0, 0), 40);
    CHECK_EQ(nvme_quiesce_ms(0, 500, 0), 1500);
    CHECK_EQ(nvme_quiesce_ms(0, 500, 100), 1500);
    CHECK_EQ(nvme_quiesce_ms(0, 500, 10000), 11000); /* KAS: it counts in steps of 10 s */
    CHECK_EQ(nvme_quiesce_ms(0, 10001, 10000), 21000);
    CHECK_EQ(nvme_quiesce_ms(0, 0, 100), 0);
}

static void test_which_writes_start_again(void)
{
    CHECK_EQ(nvme_unanswered_write_code(DLFS_E_LOST, 100, 99), 0);
    CHECK_EQ(nvme_unanswered_write_code(DLFS_E_LOST, 100, 100), DLFS_E_LOST);
    CHECK_EQ(nvme_unanswered_write_code(DLFS_E_DIGEST, 100, 0), DLFS_E_LOST);
    CHECK_EQ(nvme_unanswered_write_code(DLFS_E_TIMEOUT, 100, 1), DLFS_E_TIMEOUT);
    CHECK_EQ(nvme_unanswered_write_code(-EKEYEXPIRED, 100, 1), -EKEYEXPIRED);
}

int main(void)
{
    test_a_flush_speaks_for_its_own_controller_only();
    test_a_failed_flush_forgets_no_write();
    test_a_write_that_ends_during_a_flush_is_for_the_next();
    test_a_flush_that_waits_for_its_turn_learns_of_the_loss();
    test_a_permit_is_for_one_controller_and_a_time();
    test_how_long_a_controller_takes_to_quiesce();
    test_which_writes_start_again();
    return 0;
}
