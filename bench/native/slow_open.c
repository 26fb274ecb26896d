/*
 * A library to preload: opening a file below a folder takes SLOW_OPEN_MS
 * longer, as over a network.
 *
 * It delays only openat of a path relative to a folder, for reading: as
 * importers open the files of a folder. Threads wait side by side.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

typedef int open_function(int, const char *, int, ...);

static void wait_for_server(int directory, const char *path, int flags)
{
    const char *text = getenv("SLOW_OPEN_MS");
    if (text == NULL || directory == AT_FDCWD || path[0] == '/' || (flags & O_DIRECTORY) != 0 ||
        (flags & O_ACCMODE) != O_RDONLY) {
        return;
    }
    long ms = strtol(text, NULL, 10);
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

int openat(int directory, const char *path, int flags, ...)
{
    static open_function *next;
    if (next == NULL) {
        next = (open_function *)dlsym(RTLD_NEXT, "openat");
    }
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    wait_for_server(directory, path, flags);
    return next(directory, path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return openat(directory, path, flags, mode);
}
