/*
 * Tests the loss of a member, and that it answers again in the middle of that: in another thread,
 * between any two writes. The source is included, with a hook at each of its atomic writes.
 */
#include <stdatomic.h>

#include "check.h"
#include "reader/members.h"

static dlfs_reader tested;
static struct member states[2];
static void (*hook)(void); /* called once, before a write */
static uint32_t writes_left;

static void before_write(void)
{
    void (*call)(void) = hook;
    if (call != NULL && writes_left-- == 0) {
        hook = NULL;
        call();
    }
}

#undef atomic_store
#define atomic_store(object, value) \
    (before_write(), atomic_store_explicit(object, value, memory_order_seq_cst))
#include "reader/members.c"

static void succeed(void)
{
    member_succeeded(&tested, 1);
}

static void lose(void)
{
    member_set_lost(&tested, 1, DLFS_E_LOST);
}

static void lose_and_succeed(void)
{
    lose();
    succeed();
}

/* Runs one change, and another before one of its writes; both orders, at every write. */
static void changes_overlap(void (*change)(void), void (*other)(void), bool lost)
{
    for (uint32_t write = 0; write < 8; write++) {
        states[1] = (struct member){.failures = 0};
        if (lost) {
            lose();
        }
        writes_left = write;
        hook = other;
        change();
        hook = NULL;
        succeed();
        CHECK_EQ(dlfs_reader_lost_members(&tested), 0);
    }
}

int main(void)
{
    tested.members = states;
    tested.config.member_count = 2;
    tested.config.replicas = 2;
    changes_overlap(lose, succeed, false);
    changes_overlap(lose, lose_and_succeed, false);
    changes_overlap(succeed, lose, true);
    changes_overlap(succeed, succeed, true);
    changes_overlap(succeed, lose_and_succeed, true);
    return 0;
}
