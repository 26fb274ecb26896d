/* The members of a reader: which of them are lost, and which have the copies of a chunk. */
#ifndef DLFS_MEMBERS_H
#define DLFS_MEMBERS_H

#include "platform/clock.h"
#include "reader/chunk_map.h"
#include "reader/state.h"

int members_create(dlfs_reader *reader);
/* Notes that a member answered a request; it is no longer lost. */
void member_succeeded(dlfs_reader *reader, uint32_t member);
/* Notes that a request failed; the member is lost if its device is gone or it fails repeatedly. */
void member_failed(dlfs_reader *reader, uint32_t member, int code);
/* Marks a member as lost, for the reason that the code gives. */
void member_set_lost(dlfs_reader *reader, uint32_t member, int code);
/* Marks a member as hung: it left a read without an answer for the whole timeout. Until it answers
 * the thread of prober.c, reads that need it fail at once. */
void member_set_hung(dlfs_reader *reader, uint32_t member);
/* Notes that a member answered with an error: it is lost still, but not hung. */
void member_answered_error(dlfs_reader *reader, uint32_t member);
/* Claims the next probe of a lost member for the caller. Returns false if none is due. */
bool member_take_probe(dlfs_reader *reader, uint32_t member);

/* Finds a copy of an address. */
static inline struct member_location member_locate(const dlfs_reader *reader, uint64_t address,
                                                   uint32_t copy)
{
    return chunk_map_locate(reader->map, address, copy);
}

static inline bool member_is_lost(const dlfs_reader *reader, uint32_t member)
{
    return atomic_load_explicit(&reader->members[member].lost_until_ns, memory_order_relaxed) != 0;
}

static inline bool member_is_hung(const dlfs_reader *reader, uint32_t member)
{
    return member_is_lost(reader, member) &&
           atomic_load_explicit(&reader->members[member].hung, memory_order_relaxed);
}

#endif
