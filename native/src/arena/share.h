/* Memory budgets of clients and users ("shares"), which channels and private memory charge. */
#ifndef DLFS_SHARE_H
#define DLFS_SHARE_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "dlfs/channel.h"

struct dlfs_share {
    _Atomic uint64_t bytes_max;  /* the budget */
    _Atomic uint64_t bytes;      /* charged now */
    _Atomic uint32_t references; /* the owner's, and one for each holder of charged bytes */
    dlfs_share *parent;          /* the budget that this one is a part of, or NULL */
};

/* A NULL share is a budget without a bound, in all of these functions. */

/* Returns the least budget of the share and its parents; UINT64_MAX without a bound. */
uint64_t share_bytes_max(const dlfs_share *share);
/* Takes a reference, which dlfs_share_destroy gives up. */
void share_reference(dlfs_share *share);
/* Charges bytes to the share and to all of its parents. Returns false, and charges none of them,
 * if the bytes exceed one of the budgets. */
bool share_charge(dlfs_share *share, uint64_t bytes);
/* Charges bytes as share_charge does, where the budgets are for `of` slots of memory, of which
 * `slots` may be used: so much less of each budget may be charged. */
bool share_charge_part(dlfs_share *share, uint64_t bytes, uint32_t slots, uint32_t of);
/* Takes charged bytes off the share and off all of its parents. */
void share_refund(dlfs_share *share, uint64_t bytes);

#endif
