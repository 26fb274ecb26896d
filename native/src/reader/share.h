/* Shares, for all that charges a client with what it causes: channels, and blocks of batches. */
#ifndef DLFS_SHARE_H
#define DLFS_SHARE_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "dlfs/channel.h"

struct dlfs_share {
    _Atomic uint64_t bytes_max;
    _Atomic uint64_t bytes;
    _Atomic uint32_t references; /* the owner's, and of all that may still give something back */
    dlfs_share *parent;          /* or NULL */
};

/* In all of these NULL is a share without a bound. */
void share_reference(dlfs_share *share);
/* False, and nothing is taken, when it would be more than the share, or one that it lies in, has.
 */
bool share_charge(dlfs_share *share, uint64_t bytes);
void share_refund(dlfs_share *share, uint64_t bytes);

#endif
