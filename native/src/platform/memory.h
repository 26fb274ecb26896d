/*
 * Memory for the library's own use: mappings shared with other processes, and memory that grows.
 * dlfs/memory.h has private mappings of a fixed length.
 */
#ifndef DLFS_MEMORY_H
#define DLFS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Returns the length that a mapping of so many bytes occupies; 0 if no address space can hold it.
 */
size_t memory_length(size_t bytes);

/* The processes that may write to shared memory. */
enum memory_writers { MEMORY_OWNER_WRITES, MEMORY_ALL_WRITE };

/*
 * Creates a file without a name, of `length` zeroed bytes (from memory_length), and maps it for
 * reading and writing. No process can change its length. `huge`: use huge pages if the machine has
 * them. With MEMORY_OWNER_WRITES no other process can ever map it for writing, nor write to it.
 * Errors: -ENOMEM, -errno.
 */
int memory_create_shared(const char *name, size_t length, bool huge, enum memory_writers writers,
                         void **base, int *descriptor);
/* Returns true unless a seal forbids mapping the first bytes of a file for writing. */
bool memory_is_writable(int descriptor, size_t length);
/*
 * Maps the first bytes of another process's file, in the same way. -EINVAL: the file is shorter, or
 * can still be made shorter.
 */
int memory_map_shared(int descriptor, size_t length, bool huge, enum memory_writers writers,
                      void **base);

/*
 * Private memory that grows without a copy: an anonymous mapping, aligned to a page, which may
 * move. Bytes that were never written are zero and take no memory. All zeroes is empty memory.
 */
struct growing_memory {
    uint8_t *base;
    size_t capacity;
};
/* Makes room for `bytes` in all, at least doubling the capacity. -ENOMEM: memory is unchanged. */
int growing_memory_reserve(struct growing_memory *memory, size_t bytes);
/* Cuts the capacity to `bytes`, 1 or more, rounded up to a page, or raises it to that. -ENOMEM. */
int growing_memory_resize(struct growing_memory *memory, size_t bytes);
/* Frees the memory, which is empty then. */
void growing_memory_free(struct growing_memory *memory);

#endif
