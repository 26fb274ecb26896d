/*
 * Slots: known by the owner's word, open when somebody first needs the dataset, withdrawn for good.
 *
 * A user counts himself first and then looks at the state; who withdraws sets the state first and
 * then looks at the count. So either the user sees that the slot is withdrawn, or he is waited for.
 */
#include "service.h"

#include <errno.h>

static uint32_t state_of(struct slot *slot)
{
    return atomic_load(&slot->state);
}

int slot_known(struct dlfs_fuse *fuse, uint32_t number, struct slot **out)
{
    if (number == 0 || number > DLFS_FUSE_SLOT_MAX) {
        return ESTALE;
    }
    struct slot *slot = &fuse->slots[number];
    uint32_t state = state_of(slot);
    if (state != SLOT_KNOWN && state != SLOT_OPEN) {
        return ESTALE;
    }
    *out = slot;
    return 0;
}

int slot_enter(struct dlfs_fuse *fuse, uint32_t number, struct slot **out)
{
    struct slot *slot;
    int error = slot_known(fuse, number, &slot);
    if (error == 0 && state_of(slot) == SLOT_KNOWN) {
        struct question question = {.asked = {.kind = DLFS_FUSE_ASK_OPEN, .slot = number}};
        error = ask(fuse, &question);
    }
    if (error != 0) {
        return error;
    }
    (void)atomic_fetch_add(&slot->users, 1);
    if (state_of(slot) != SLOT_OPEN) {
        slot_leave(fuse, slot);
        return ESTALE;
    }
    *out = slot;
    return 0;
}

void slot_leave(struct dlfs_fuse *fuse, struct slot *slot)
{
    if (atomic_fetch_sub(&slot->users, 1) > 1 || state_of(slot) == SLOT_OPEN) {
        return;
    }
    (void)pthread_mutex_lock(&fuse->lock);
    (void)pthread_cond_broadcast(&fuse->left);
    (void)pthread_mutex_unlock(&fuse->lock);
}

/* ---- the owner's side ------------------------------------------------------------------------ */

DLFS_API int dlfs_fuse_define(dlfs_fuse *fuse, const dlfs_fuse_slot *slot)
{
    if (slot->number == 0 || slot->number > DLFS_FUSE_SLOT_MAX) {
        return -EINVAL;
    }
    struct slot *ours = &fuse->slots[slot->number];
    (void)pthread_mutex_lock(&fuse->lock);
    if (state_of(ours) == SLOT_EMPTY) {
        ours->known = *slot;
        atomic_store(&ours->state, SLOT_KNOWN);
    }
    (void)pthread_mutex_unlock(&fuse->lock);
    return 0;
}

DLFS_API int dlfs_fuse_open(dlfs_fuse *fuse, uint32_t number, const dlfs_directory *directory,
                            dlfs_reader *reader)
{
    if (number == 0 || number > DLFS_FUSE_SLOT_MAX || directory == NULL || reader == NULL) {
        return -EINVAL;
    }
    struct slot *slot = &fuse->slots[number];
    (void)pthread_mutex_lock(&fuse->lock);
    uint32_t state = state_of(slot);
    if (state == SLOT_KNOWN) {
        slot->directory = directory;
        slot->reader = reader;
        slot->locations = dlfs_directory_locations(directory);
        slot->count = dlfs_directory_count(directory);
        atomic_store(&slot->state, SLOT_OPEN);
    }
    (void)pthread_mutex_unlock(&fuse->lock);
    if (state == SLOT_WITHDRAWN) {
        return -ESTALE;
    }
    return state == SLOT_EMPTY ? -EINVAL : 0;
}

DLFS_API int dlfs_fuse_withdraw(dlfs_fuse *fuse, uint32_t number)
{
    if (number == 0 || number > DLFS_FUSE_SLOT_MAX) {
        return -EINVAL;
    }
    struct slot *slot = &fuse->slots[number];
    (void)pthread_mutex_lock(&fuse->lock);
    atomic_store(&slot->state, SLOT_WITHDRAWN);
    while (atomic_load(&slot->users) > 0) {
        (void)pthread_cond_wait(&fuse->left, &fuse->lock);
    }
    (void)pthread_mutex_unlock(&fuse->lock);
    return 0;
}
