/*
 * The members of a reader: tracks which of them are lost.
 *
 * A member is lost when its device says so, when it does not answer in time, or when many requests
 * in a row fail while another copy can be read. A lost member gets no requests but one probe now
 * and then, at intervals that double. One successful answer makes it a normal member again. Where
 * there is no other copy, a lost member gets requests all the same, unless it is hung: it left a
 * read without an answer for the whole timeout. Only a thread of the reader asks a hung member
 * (prober.c).
 *
 * Threads: all threads of a reader share this state. Each field is atomic by itself; two fields
 * may be seen in states of different times. member_succeeded clears `hung` before `lost_until_ns`,
 * so that it cannot clear the mark of a later loss.
 */
#include "reader/members.h"

#include <errno.h>
#include <stdlib.h>

#define FAILURES_MAX 8u               /* in a row, until a member is lost */
#define PROBE_NS UINT64_C(1000000000) /* from the loss of a member to the first probe */
#define PROBE_DOUBLINGS_MAX 6u        /* of the interval between probes: about a minute */
#define NEVER UINT64_MAX

int members_create(dlfs_reader *reader)
{
    uint32_t count = reader->config.member_count;
    reader->members = calloc(count, sizeof(*reader->members));
    if (reader->members == NULL) {
        return -ENOMEM;
    }
    for (uint32_t member = 0; member < count; member++) {
        if (reader->devices[member] != NULL) {
            continue;
        }
        if (reader->config.replicas == 1) {
            return -EINVAL;
        }
        atomic_init(&reader->members[member].lost_until_ns, NEVER);
        atomic_init(&reader->members[member].code, DLFS_E_LOST);
    }
    return 0;
}

void member_succeeded(dlfs_reader *reader, uint32_t number)
{
    struct member *member = &reader->members[number];
    if (atomic_load_explicit(&member->failures, memory_order_relaxed) != 0) {
        atomic_store_explicit(&member->failures, 0, memory_order_relaxed);
    }
    if (!member_is_lost(reader, number)) {
        return;
    }
    atomic_store(&member->probes, 0);
    atomic_store(&member->hung, false); /* before another thread may mark it as lost again */
    atomic_store(&member->lost_until_ns, 0);
}

void member_failed(dlfs_reader *reader, uint32_t number, int code)
{
    struct member *member = &reader->members[number];
    bool gone = code == DLFS_E_LOST || code == DLFS_E_TIMEOUT || code == DLFS_E_AUTH;
    bool has_copies = reader->config.replicas > 1;
    if (!gone && (!has_copies || atomic_fetch_add(&member->failures, 1) + 1 < FAILURES_MAX)) {
        return;
    }
    member_set_lost(reader, number, code);
}

void member_set_lost(dlfs_reader *reader, uint32_t number, int code)
{
    struct member *member = &reader->members[number];
    uint64_t not_lost = 0;
    if (!atomic_compare_exchange_strong(&member->lost_until_ns, &not_lost,
                                        monotonic_ns() + PROBE_NS)) {
        return;
    }
    atomic_store(&member->code, code);
}

void member_set_hung(dlfs_reader *reader, uint32_t number)
{
    member_set_lost(reader, number, DLFS_E_TIMEOUT);
    if (!atomic_exchange(&reader->members[number].hung, true)) {
        atomic_store(&reader->prober.wanted, true);
    }
}

void member_answered_error(dlfs_reader *reader, uint32_t number)
{
    atomic_store(&reader->members[number].hung, false);
}

bool member_take_probe(dlfs_reader *reader, uint32_t number)
{
    struct member *member = &reader->members[number];
    uint64_t until = atomic_load(&member->lost_until_ns);
    uint64_t now = monotonic_ns();
    if (until == NEVER || now < until || atomic_load(&member->hung)) {
        return false;
    }
    /* Without another copy every read waits for the probe, so the interval stays short. */
    bool has_copies = reader->config.replicas > 1;
    uint32_t doublings = has_copies ? atomic_load(&member->probes) + 1 : 0;
    doublings = doublings < PROBE_DOUBLINGS_MAX ? doublings : PROBE_DOUBLINGS_MAX;
    if (!atomic_compare_exchange_strong(&member->lost_until_ns, &until,
                                        now + (PROBE_NS << doublings))) {
        return false;
    }
    atomic_store(&member->probes, doublings);
    return true;
}

DLFS_API uint64_t dlfs_reader_lost_members(const dlfs_reader *reader)
{
    uint64_t lost = 0;
    for (uint32_t member = 0; member < reader->config.member_count; member++) {
        lost |= (uint64_t)member_is_lost(reader, member) << member;
    }
    return lost;
}

DLFS_API int dlfs_reader_member_code(const dlfs_reader *reader, uint32_t member)
{
    if (member >= reader->config.member_count) {
        return -EINVAL;
    }
    return atomic_load(&reader->members[member].code);
}
