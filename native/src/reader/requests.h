/* The requests of a span: to which member each of them is sent, and what happens if that fails. */
#ifndef DLFS_REQUESTS_H
#define DLFS_REQUESTS_H

#include "reader/span.h"

/* Allocates the requests of a fetch. */
int requests_create(struct fetch *fetch);
/*
 * Makes the next request of a span. Returns true also when no member can be asked and it failed;
 * false when the member's queue is full, which it notes in `full_members`.
 */
bool request_begin(struct fetch *fetch, struct span *span, uint64_t *full_members);
/* Sends requests that failed on one member to another one. */
void requests_resend(struct fetch *fetch, uint64_t *full_members);
/* Handles the answer to a request. */
void request_complete(struct fetch *fetch, uint64_t number, int64_t result);
/* Destroys the queue pair of a member that failed as a whole, and redirects its requests. */
void member_queue_failed(struct fetch *fetch, uint32_t member, int code);
/* Marks members as lost or hung that have requests of spans that are late. */
void requests_mark_late_members(struct fetch *fetch, uint64_t queued_until_ns);
/* Marks members as lost that were silent for silence_max_ns, and redirects the spans that wait for
 * them if another copy can be read. */
void requests_redirect_silent(struct fetch *fetch, uint64_t silence_max_ns);
/* Returns true if only hung members have the rest of a span. */
bool span_is_unreachable(const struct fetch *fetch, const struct span *span);
/* Ends the spans in flight that wait for hung members, if there are no other copies. */
void requests_abandon_hung(struct fetch *fetch);
/*
 * Reads a block from a lost member without using its content. So no sample waits for the answer of
 * a member that may still be silent. One probe of a member is in flight at a time.
 */
void member_probe(struct fetch *fetch, uint32_t member, uint64_t offset_bytes);

#endif
