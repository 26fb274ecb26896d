/* Resident chunks, which clients of a service read by themselves; see reader/residents.c. */
#ifndef DLFS_RESIDENTS_H
#define DLFS_RESIDENTS_H

#include <stdint.h>

#include "dlfs/dlfs.h"

#define OTHERS_SHARE 8u /* divisor of the arena's slots that reservations leave to others */

/* The index of a reader's resident chunks. */
struct residents {
    uint64_t offset; /* of the index in the arena */
    uint64_t count;  /* its entries; 0 without an index */
};

/* Counts a channel of an attached reader, which gets a reservation if there is room, and takes a
 * reference to the reader. Returns the index, which stays until residents_leave. */
struct residents residents_enter(dlfs_reader *reader);
/* Takes a channel off whose client has closed its end, and the reference. The last one ends the
 * reservation. */
void residents_leave(dlfs_reader *reader);

#endif
