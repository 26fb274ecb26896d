/*
 * Memory budgets ("shares"): each bounds the bytes that a client occupies, and lies within the
 * budget of its user where there is one. A charge applies to a share and to all its parents, or to
 * none of them. Any thread may call these functions.
 */
#include "arena/share.h"

#include <stdlib.h>

DLFS_API int dlfs_share_create_within(dlfs_share *parent, uint64_t bytes_max, dlfs_share **out)
{
    dlfs_share *share = calloc(1, sizeof(*share));
    if (share == NULL) {
        return -ENOMEM;
    }
    atomic_init(&share->bytes_max, bytes_max);
    atomic_init(&share->references, 1);
    share_reference(parent);
    share->parent = parent;
    *out = share;
    return 0;
}

void share_reference(dlfs_share *share)
{
    if (share != NULL) {
        atomic_fetch_add_explicit(&share->references, 1, memory_order_relaxed);
    }
}

DLFS_API void dlfs_share_destroy(dlfs_share *share)
{
    while (share != NULL &&
           atomic_fetch_sub_explicit(&share->references, 1, memory_order_acq_rel) == 1) {
        dlfs_share *parent = share->parent;
        free(share);
        share = parent;
    }
}

DLFS_API void dlfs_share_allow(dlfs_share *share, uint64_t bytes_max)
{
    uint64_t now = atomic_load_explicit(&share->bytes_max, memory_order_relaxed);
    while (now < bytes_max && !atomic_compare_exchange_weak(&share->bytes_max, &now, bytes_max))
        ;
}

uint64_t share_bytes_max(const dlfs_share *share)
{
    uint64_t least = UINT64_MAX;
    for (; share != NULL; share = share->parent) {
        uint64_t bytes_max = atomic_load_explicit(&share->bytes_max, memory_order_relaxed);
        least = bytes_max < least ? bytes_max : least;
    }
    return least;
}

/* Takes bytes off the shares from `share` up to, but not including, `end`. */
static void refund_up_to(dlfs_share *share, const dlfs_share *end, uint64_t bytes)
{
    for (; share != end; share = share->parent) {
        atomic_fetch_sub_explicit(&share->bytes, bytes, memory_order_relaxed);
    }
}

bool share_charge(dlfs_share *share, uint64_t bytes)
{
    return share_charge_part(share, bytes, 1, 1);
}

bool share_charge_part(dlfs_share *share, uint64_t bytes, uint32_t slots, uint32_t of)
{
    for (dlfs_share *each = share; each != NULL; each = each->parent) {
        uint64_t bytes_max = atomic_load_explicit(&each->bytes_max, memory_order_relaxed);
        bytes_max = bytes_max / of * slots + bytes_max % of * slots / of; /* rounded down */
        uint64_t before = atomic_fetch_add_explicit(&each->bytes, bytes, memory_order_relaxed);
        if (bytes > bytes_max || before > bytes_max - bytes) {
            refund_up_to(share, each->parent, bytes);
            return false;
        }
    }
    return true;
}

void share_refund(dlfs_share *share, uint64_t bytes)
{
    refund_up_to(share, NULL, bytes);
}
