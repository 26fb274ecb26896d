/* What nvme/association.c and the association's thread, nvme/thread.c, have of each other. */
#ifndef DLFS_NVME_THREAD_H
#define DLFS_NVME_THREAD_H

#include "nvme/association.h"

void *nvme_thread_main(void *argument);
/* The thread has done with a link; frees it when its queue pair has let go. With the lock held. */
void nvme_link_put_down(struct nvme_association *association, struct nvme_link *link);
/* Notes that something failed, and counts why. With the lock held. */
void nvme_note(struct nvme_association *association, int code, const char *reason);
/* The same of the present generation as a whole. With the lock held. */
void nvme_fail(struct nvme_association *association, int code, const char *reason);

#endif
