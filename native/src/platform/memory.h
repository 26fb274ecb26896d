/* Memory for this library's own use, beside what dlfs.h has of it. */
#ifndef DLFS_MEMORY_H
#define DLFS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

/* The length that a mapping of so many bytes occupies; 0 when no address space can hold it. */
size_t memory_length(size_t bytes);

/* Who else may write to shared memory. */
enum memory_writers { MEMORY_OWNER_WRITES, MEMORY_ALL_WRITE };

/*
 * Makes a file without a name, of `length` zeroed bytes (as of memory_length) that nobody can make
 * shorter or longer, and maps it for reading and writing. `huge`: of huge pages where the machine
 * gives them. With MEMORY_OWNER_WRITES nobody else can ever map it for writing, nor write to it.
 * 0, -ENOMEM or -errno.
 */
int memory_create_shared(const char *name, size_t length, bool huge, enum memory_writers writers,
                         void **base, int *descriptor);
/* Returns true unless a seal forbids to map the first bytes of a file for writing. */
bool memory_is_writable(int descriptor, size_t length);
/*
 * Maps the first bytes of another process's file, in the same way. -EINVAL when it is shorter, or
 * may yet be made so.
 */
int memory_map_shared(int descriptor, size_t length, bool huge, enum memory_writers writers,
                      void **base);

#endif
