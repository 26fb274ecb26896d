/* The processors of the system, by their numbers in sysfs. */
#ifndef DLFS_FUSE_PROCESSORS_H
#define DLFS_FUSE_PROCESSORS_H

#include <stdbool.h>
#include <stdint.h>

#define PROCESSORS_MAX 1024u
#define PROCESSOR_LIST_BYTES 4096u /* longest list */

/* Returns how many processors the system may have; 0 if their numbers are unknown or have gaps. */
uint32_t processors_possible(void);
/* Reads the list of processors that are online. Returns false if it is unknown. */
bool processors_read_online(char *list);
/* Returns true if a list such as "0-3,8" has a number. */
bool processors_has(const char *list, uint32_t number);

#endif
