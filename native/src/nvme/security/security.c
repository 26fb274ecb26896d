/* Loads libdlfs_security; see nvme/security/security.h. */
#include "nvme/security/security.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY_NAME "libdlfs_security.so"

/* Writes the path of the library, in the folder of libdlfs. Returns false if it has no path. */
static bool library_path(char path[PATH_MAX])
{
    Dl_info info;
    if (dladdr((const void *)(uintptr_t)&nvme_security_load, &info) == 0 ||
        info.dli_fname == NULL) {
        return false;
    }
    const char *slash = strrchr(info.dli_fname, '/');
    int folder_bytes = slash != NULL ? (int)(slash - info.dli_fname) + 1 : 0;
    int bytes = snprintf(path, PATH_MAX, "%.*s" LIBRARY_NAME, folder_bytes, info.dli_fname);
    return slash != NULL && bytes < PATH_MAX;
}

static const struct nvme_security *load(char message[NVME_SECURITY_TEXT_BYTES])
{
    char path[PATH_MAX];
    if (!library_path(path)) {
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES,
                       "load " LIBRARY_NAME ": no path of "
                       "libdlfs is known");
        return NULL;
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    const struct nvme_security *(*get)(void) = NULL;
    if (library != NULL) {
        void *symbol = dlsym(library, NVME_SECURITY_SYMBOL);
        memcpy(&get, &symbol, sizeof get); /* ISO C converts no object pointer to a function */
    }
    if (get == NULL) {
        const char *why = dlerror();
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES,
                       "keys need %.300s, which was built without OpenSSL's headers or does not "
                       "load: %.80s",
                       path, why != NULL ? why : "no functions");
        return NULL;
    }
    const struct nvme_security *found = get();
    if (found == NULL) {
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES, "%.300s: OpenSSL does not start", path);
        return NULL;
    }
    if (found->version != NVME_SECURITY_VERSION) {
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES, "%.300s: expected version %u, got %u",
                       path, NVME_SECURITY_VERSION, found->version);
        return NULL;
    }
    return found;
}

int nvme_security_load(const struct nvme_security **out, char message[NVME_SECURITY_TEXT_BYTES])
{
    /* No lock, which a forked child could find taken; dlopen opens a library once. */
    static const struct nvme_security *_Atomic loaded;
    const struct nvme_security *found = atomic_load(&loaded);
    if (found == NULL) {
        found = load(message);
        atomic_store(&loaded, found);
    }
    if (found == NULL) {
        return -ENOTSUP;
    }
    *out = found;
    return 0;
}
