/*
 * Memory for keys and what is computed from them: it is left out of core dumps, forked children
 * find zeros in it, and it is wiped before it is freed.
 */
#ifndef DLFS_SECURITY_SECRET_H
#define DLFS_SECURITY_SECRET_H

#include <stddef.h>

/* Returns zeroed memory of its own pages, or NULL. */
void *secret_allocate(size_t bytes);
/* Wipes and frees memory of secret_allocate; NULL does nothing. */
void secret_free(void *secret, size_t bytes);
/* Overwrites memory; the compiler does not remove the call. */
void secret_wipe(void *secret, size_t bytes);

#endif
