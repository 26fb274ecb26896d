/* Memory for keys; see security/secret.h. */
#include "security/secret.h"

#include <string.h>
#include <sys/mman.h>

void *secret_allocate(size_t bytes)
{
    void *secret = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (secret == MAP_FAILED) {
        return NULL;
    }
    if (madvise(secret, bytes, MADV_DONTDUMP) != 0 ||
        madvise(secret, bytes, MADV_WIPEONFORK) != 0) {
        (void)munmap(secret, bytes);
        return NULL;
    }
    (void)mlock(secret, bytes); /* keeps it out of swap, as far as RLIMIT_MEMLOCK allows */
    return secret;
}

void secret_free(void *secret, size_t bytes)
{
    if (secret != NULL) {
        secret_wipe(secret, bytes);
        (void)munmap(secret, bytes);
    }
}

void secret_wipe(void *secret, size_t bytes)
{
    explicit_bzero(secret, bytes);
}
