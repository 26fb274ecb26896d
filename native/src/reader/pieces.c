/*
 * The pieces of spans, each of one chunk: which copy of the chunk a piece is asked of, and what
 * becomes of it when that copy's member does not give it. The first copy is asked unless its member
 * is lost or to be done without; each copy is asked once. A piece that no copy gives fails its
 * span.
 */
#include <errno.h>
#include <stdlib.h>

#include "reader/reader.h"

#define COPY_NONE UINT32_MAX
/* How reluctantly a copy is asked, the least first. */
#define RELUCTANCE_LOST 1u
#define RELUCTANCE_AVOIDED 2u
#define RELUCTANCE_NONE 4u

int pieces_create(struct fetch *fetch)
{
    uint32_t count = fetch->reader->config.member_count * fetch->reader->config.depth;
    fetch->pieces = calloc(count, sizeof(*fetch->pieces));
    if (fetch->pieces == NULL) {
        return -ENOMEM;
    }
    for (uint32_t number = 0; number < count; number++) {
        fetch->pieces[number].member = MEMBER_NONE;
        fetch->pieces[number].next = number + 1 < count ? number + 1 : SLOT_NONE;
    }
    fetch->pieces_resting = 0;
    fetch->pieces_again = SLOT_NONE;
    uint32_t block_bytes = fetch->reader->config.block_bytes;
    if (fetch->reader->config.replicas > 1) {
        size_t bytes = (size_t)block_bytes * fetch->reader->config.member_count;
        fetch->probe_memory = aligned_alloc(block_bytes, bytes);
        return fetch->probe_memory != NULL ? 0 : -ENOMEM;
    }
    return 0;
}

static uint32_t piece_number(const struct fetch *fetch, const struct piece *piece)
{
    return (uint32_t)(piece - fetch->pieces);
}

static uint32_t copies_mask(const dlfs_reader *reader)
{
    return (UINT32_C(1) << reader->config.replicas) - 1;
}

static void add_operation(struct fetch *fetch, uint32_t member, struct piece *piece,
                          uint8_t *memory, uint64_t offset_bytes)
{
    uint32_t depth = fetch->reader->config.depth;
    uint32_t *count = &fetch->operation_counts[member];
    fetch->operations[(size_t)member * depth + (*count)++] = (dlfs_operation){
        .buffer = memory,
        .offset_bytes = offset_bytes,
        .length_bytes = piece->length,
        .kind = DLFS_OP_READ,
        .tag = piece_number(fetch, piece),
    };
    piece->member = member;
    piece->begun_ns = fetch->now_ns;
    fetch->stats.reads++;
    fetch->stats.read_bytes += piece->length;
}

/*
 * Asks a lost member for a block whose content is not used, so that no sample waits for the answer
 * of a member that may still be silent. One at a time.
 */
static void probe(struct fetch *fetch, uint32_t member, uint64_t offset_bytes)
{
    uint64_t bit = UINT64_C(1) << member;
    uint32_t block_bytes = fetch->reader->config.block_bytes;
    uint32_t number = fetch->pieces_resting;
    if ((fetch->probing & bit) != 0 || number == SLOT_NONE ||
        !member_is_there(fetch, member, true) || !member_has_room(fetch, member)) {
        return;
    }
    struct piece *piece = &fetch->pieces[number];
    fetch->pieces_resting = piece->next;
    fetch->pieces_in_flight++;
    fetch->abandoned_pieces++;
    fetch->probing |= bit;
    *piece = (struct piece){.length = block_bytes, .span = SLOT_NONE};
    add_operation(fetch, member, piece, fetch->probe_memory + (size_t)block_bytes * member,
                  offset_bytes);
}

/* Whether a member that is lost may be asked for a piece all the same. */
static bool is_worth_asking(struct fetch *fetch, uint32_t member, uint64_t offset_bytes, bool *due)
{
    dlfs_reader *reader = fetch->reader;
    *due = member_probe(reader, member);
    if (*due && reader->config.replicas > 1) {
        *due = false;
        probe(fetch, member, offset_bytes);
    }
    return *due || !member_is_hung(reader, member);
}

/* The copy to ask for a piece, and where it lies; COPY_NONE when none is left. */
static uint32_t choose_copy(struct fetch *fetch, const struct span *span, const struct piece *piece,
                            uint32_t *member, uint64_t *offset_bytes)
{
    dlfs_reader *reader = fetch->reader;
    uint32_t chosen = COPY_NONE;
    uint32_t least = RELUCTANCE_NONE;
    for (uint32_t copy = 0; copy < reader->config.replicas && least > 0; copy++) {
        uint32_t candidate;
        uint64_t offset;
        if (piece->tried >> copy & 1) {
            continue;
        }
        member_locate(reader, piece->address, copy, &candidate, &offset);
        bool due = true;
        if (member_is_lost(reader, candidate) && !is_worth_asking(fetch, candidate, offset, &due)) {
            continue;
        }
        uint32_t reluctance = due ? 0 : RELUCTANCE_LOST;
        reluctance += candidate == span->avoided ? RELUCTANCE_AVOIDED : 0;
        if (reluctance < least && member_is_there(fetch, candidate, due)) {
            least = reluctance;
            chosen = copy;
            *member = candidate;
            *offset_bytes = offset;
        }
    }
    return chosen;
}

enum placed { PLACED, PLACED_FULL, PLACED_NOWHERE };

/* Makes an operation of a piece; PLACED_FULL when its member has no room, which is noted. */
static enum placed piece_place(struct fetch *fetch, struct piece *piece, uint64_t *full_members)
{
    struct span *span = &fetch->spans[piece->span];
    uint32_t member;
    uint64_t offset;
    uint32_t copy = choose_copy(fetch, span, piece, &member, &offset);
    if (copy == COPY_NONE) {
        return PLACED_NOWHERE;
    }
    if (!member_has_room(fetch, member)) {
        *full_members |= UINT64_C(1) << member;
        return PLACED_FULL;
    }
    add_operation(fetch, member, piece, span->memory + (piece->address - span->address), offset);
    piece->copy = copy;
    span->asked |= UINT64_C(1) << member;
    fetch->stats.failovers += copy > 0;
    return PLACED;
}

/* Why no copy of a piece can be had: what was told of the first one's member. */
static int absence_code(const dlfs_reader *reader, const struct piece *piece)
{
    uint32_t member;
    uint64_t offset;
    member_locate(reader, piece->address, 0, &member, &offset);
    int code = dlfs_reader_member_code(reader, member);
    return code < 0 ? code : DLFS_E_LOST;
}

static void piece_rest(struct fetch *fetch, struct piece *piece)
{
    fetch->pieces_in_flight--;
    piece->member = MEMBER_NONE;
    piece->next = fetch->pieces_resting;
    fetch->pieces_resting = piece_number(fetch, piece);
}

static void piece_end(struct fetch *fetch, struct piece *piece, int code)
{
    struct span *span = &fetch->spans[piece->span];
    if (span->abandoned) {
        fetch->abandoned_pieces--;
    }
    piece_rest(fetch, piece);
    span_piece_ended(fetch, span, piece, code);
}

bool piece_begin(struct fetch *fetch, struct span *span, uint64_t *full_members)
{
    if (fetch->pieces_resting == SLOT_NONE) { /* some wait for room elsewhere */
        *full_members = UINT64_MAX;
        return false;
    }
    uint32_t chunk_bytes = fetch->reader->config.chunk_bytes;
    struct piece *piece = &fetch->pieces[fetch->pieces_resting];
    fetch->pieces_resting = piece->next; /* at once: a probe may need one, too */
    uint64_t address = span->address + span->submitted;
    uint64_t length = chunk_bytes - (address & (chunk_bytes - 1));
    uint64_t left = span->length - span->submitted;
    *piece = (struct piece){
        .address = address,
        .length = (uint32_t)(length < left ? length : left),
        .span = (uint32_t)(span - fetch->spans),
        .member = MEMBER_NONE,
    };
    enum placed placed = piece_place(fetch, piece, full_members);
    if (placed == PLACED_FULL) {
        piece->next = fetch->pieces_resting;
        fetch->pieces_resting = piece_number(fetch, piece);
        return false;
    }
    span->submitted += piece->length;
    span->in_flight++;
    fetch->pieces_in_flight++;
    if (placed == PLACED_NOWHERE) {
        piece_end(fetch, piece, absence_code(fetch->reader, piece));
    }
    return true;
}

void pieces_ask_again(struct fetch *fetch, uint64_t *full_members)
{
    uint32_t number = fetch->pieces_again;
    fetch->pieces_again = SLOT_NONE;
    while (number != SLOT_NONE) {
        struct piece *piece = &fetch->pieces[number];
        const struct span *span = &fetch->spans[piece->span];
        uint32_t next = piece->next;
        int code = span->abandoned ? DLFS_E_TIMEOUT : span->code;
        enum placed placed = code < 0 ? PLACED_NOWHERE : piece_place(fetch, piece, full_members);
        if (placed == PLACED_FULL) {
            piece->next = fetch->pieces_again;
            fetch->pieces_again = number;
        } else if (placed == PLACED_NOWHERE) {
            piece_end(fetch, piece, code < 0 ? code : absence_code(fetch->reader, piece));
        }
        number = next;
    }
}

/* Which bucket of dlfs_member_stats a latency belongs to. */
static uint32_t latency_bucket(uint64_t latency_ns)
{
    uint64_t latency_us = latency_ns / 1000;
    uint32_t bucket = latency_us < 2 ? 0 : 63 - (uint32_t)__builtin_clzll(latency_us);
    return bucket < DLFS_LATENCY_BUCKETS ? bucket : DLFS_LATENCY_BUCKETS - 1;
}

static void count_answer(struct fetch *fetch, const struct piece *piece, int64_t result)
{
    dlfs_member_stats *stats = &fetch->member_stats[piece->member];
    uint64_t latency_ns = fetch->now_ns - piece->begun_ns;
    stats->reads++;
    stats->read_bytes += result > 0 ? (uint64_t)result : 0;
    stats->errors += result < 0;
    stats->latency_ns += latency_ns;
    stats->latency[latency_bucket(latency_ns)]++;
}

void piece_answer(struct fetch *fetch, uint64_t number, int64_t result)
{
    struct piece *piece = &fetch->pieces[number];
    uint32_t member = piece->member;
    count_answer(fetch, piece, result);
    if (result >= 0) {
        member_worked(fetch->reader, member);
    } else {
        member_failed(fetch->reader, member, (int)result);
    }
    if (piece->span == SLOT_NONE) {
        fetch->probing &= ~(UINT64_C(1) << member);
        fetch->abandoned_pieces--;
        piece_rest(fetch, piece);
        return;
    }
    const struct span *span = &fetch->spans[piece->span];
    if (result >= 0) {
        piece_end(fetch, piece, 0);
        return;
    }
    piece->tried |= UINT32_C(1) << piece->copy;
    if (span->abandoned || span->code < 0 || piece->tried == copies_mask(fetch->reader)) {
        piece_end(fetch, piece, (int)result);
        return;
    }
    fetch->stats.read_errors++;
    piece->member = MEMBER_NONE;
    piece->next = fetch->pieces_again;
    fetch->pieces_again = (uint32_t)number;
}

void member_break(struct fetch *fetch, uint32_t member, int code)
{
    const dlfs_reader_config *config = &fetch->reader->config;
    /* It may not be used before its memory is safe: no device writes behind a destroyed queue. */
    dlfs_queue_destroy(fetch->queues[member]);
    fetch->queues[member] = NULL;
    fetch->operation_counts[member] = 0;
    for (uint32_t number = 0; number < config->member_count * config->depth; number++) {
        if (fetch->pieces[number].member == member) {
            piece_answer(fetch, number, code);
        }
    }
    member_lose(fetch->reader, member, code);
}

/* ---- members that do not answer -------------------------------------------------------------- */

/* For how long a member has answered nothing, while it had this piece. */
static uint64_t silence_ns(const struct fetch *fetch, const struct piece *piece)
{
    uint64_t answered = fetch->answered_ns[piece->member];
    return fetch->now_ns - (answered > piece->begun_ns ? answered : piece->begun_ns);
}

void span_blame(struct fetch *fetch, const struct span *span)
{
    const dlfs_reader_config *config = &fetch->reader->config;
    uint64_t half_ns = reader_patience_ns(fetch->reader, 0) / 2;
    uint32_t blamed = (uint32_t)(span - fetch->spans);
    for (uint32_t number = 0; number < config->member_count * config->depth; number++) {
        const struct piece *piece = &fetch->pieces[number];
        if (piece->member == MEMBER_NONE || piece->span != blamed) {
            continue;
        }
        if (silence_ns(fetch, piece) >= half_ns) {
            member_hang(fetch->reader, piece->member);
        } else if (config->replicas > 1) {
            member_lose(fetch->reader, piece->member, DLFS_E_TIMEOUT);
        }
    }
}

/* Whether another copy of a piece can be had; lost members that are due are asked if they are back.
 */
static bool piece_can_turn(struct fetch *fetch, const struct piece *piece)
{
    dlfs_reader *reader = fetch->reader;
    bool can = false;
    for (uint32_t copy = 0; copy < reader->config.replicas; copy++) {
        uint32_t member;
        uint64_t offset;
        member_locate(reader, piece->address, copy, &member, &offset);
        if (member == piece->member) {
            continue;
        }
        if (!member_is_lost(reader, member)) {
            can = true;
        } else if (member_probe(reader, member)) {
            probe(fetch, member, offset);
        }
    }
    return can;
}

void pieces_turn(struct fetch *fetch, uint64_t patience_ns)
{
    const dlfs_reader_config *config = &fetch->reader->config;
    for (uint32_t number = 0; number < config->member_count * config->depth; number++) {
        const struct piece *piece = &fetch->pieces[number];
        if (piece->member == MEMBER_NONE || piece->span == SLOT_NONE) {
            continue;
        }
        struct span *span = &fetch->spans[piece->span];
        if (span->abandoned || silence_ns(fetch, piece) < patience_ns) {
            continue;
        }
        member_lose(fetch->reader, piece->member, DLFS_E_TIMEOUT);
        if (piece_can_turn(fetch, piece)) {
            span_turn(fetch, span);
        }
    }
}

/* Whether there is no point in waiting for a member: it is hung, and no probe is due, or there is
 * no room for one. */
static bool member_is_hopeless(const struct fetch *fetch, uint32_t member)
{
    bool stuck = fetch->queues[member] != NULL && !member_has_room(fetch, member);
    return member_is_hung(fetch->reader, member) &&
           (stuck || !member_is_due(fetch->reader, member));
}

bool span_is_hopeless(const struct fetch *fetch, const struct span *span)
{
    const dlfs_reader *reader = fetch->reader;
    if (dlfs_reader_lost_members(reader) == 0) {
        return false;
    }
    for (uint32_t copy = 0; copy < reader->config.replicas; copy++) {
        uint32_t member;
        uint64_t offset;
        member_locate(reader, span->address + span->submitted, copy, &member, &offset);
        if (!member_is_hopeless(fetch, member)) {
            return false;
        }
    }
    return true;
}
