/*
 * Slots that own an object, for callers that can be interrupted between any two steps, such as a
 * Python program on Ctrl-C.
 *
 * A slot is a pointer in memory that exists before the object: NULL, then the object. The function
 * that creates an object writes it into the slot, so an interruption on its return loses nothing.
 * The functions below empty the slot before they destroy the object, so it is destroyed once.
 *
 * Any threads at once.
 */
#ifndef DLFS_HANDLE_H
#define DLFS_HANDLE_H

#include <dlfs/device.h>

/* Every process may destroy the object. */
#define DLFS_PROCESS_ANY UINT32_MAX

/*
 * Returns the number of this process: the forks between the process that loaded the library and
 * this one.
 */
DLFS_API uint32_t dlfs_handle_process(void);
/*
 * Empties a slot and calls destroy with the object that was in it, if there was one. process is the
 * number of the process that may destroy it, or DLFS_PROCESS_ANY. Another process, a forked child,
 * lacks the object's threads and locks: there the slot is emptied and the object stays.
 */
DLFS_API void dlfs_handle_free(void **slot, void (*destroy)(void *object), uint32_t process);
/* Sets a descriptor to -1 and closes what it was, if it was not -1 before. */
DLFS_API void dlfs_handle_close(int *descriptor);
/*
 * Receives up to bytes from a Unix socket, without waiting, and writes descriptors that come with
 * them to the first of count places that are -1. Returns how many bytes came, 0 at the end of the
 * connection. Errors: -EAGAIN (nothing is there), -EMSGSIZE (more descriptors than places: those
 * are closed), -errno.
 */
DLFS_API int64_t dlfs_handle_receive(int socket, void *buffer, size_t bytes,
                                     int *const *descriptors, uint32_t count);

#endif
