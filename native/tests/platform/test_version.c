/* The version and the phrases. */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <string.h>

#include "check.h"

int main(void)
{
    CHECK_EQ(dlfs_version(), DLFS_VERSION);
    CHECK(strcmp(dlfs_strerror(0), "success") == 0);
    CHECK(strcmp(dlfs_strerror(-EIO), "Input/output error") == 0);
    for (int code = DLFS_E_CHECKSUM; code >= DLFS_E_AUTH; code--) {
        CHECK(strcmp(dlfs_strerror(code), "unknown error") != 0);
    }
    CHECK(strcmp(dlfs_strerror(DLFS_E_AUTH - 1), "unknown error") == 0);
    CHECK(strcmp(dlfs_strerror(-9999), "unknown error") == 0);
    errno = ECONNRESET;
    CHECK(strcmp(dlfs_strerror(-errno), "Connection reset by peer") == 0);
    CHECK_EQ(errno, ECONNRESET);
    return 0;
}
