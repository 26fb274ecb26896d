/* Finds the addresses of hosts; see nvme/controller.h. */
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "nvme/controller.h"
#include "platform/thread.h"

/* State of one request to the resolver. The thread that asks may outlive the one that waits for it.
 */
struct lookup {
    struct nvme_path path;
    int done; /* an eventfd, readable from the answer on */
    atomic_bool answered;
    int error; /* of getaddrinfo */
    int count;
    struct nvme_address addresses[NVME_ADDRESSES_MAX];
    atomic_int users;
};

static void lookup_release(struct lookup *lookup)
{
    if (atomic_fetch_sub(&lookup->users, 1) == 1) {
        (void)close(lookup->done);
        free(lookup);
    }
}

/* Asks for the addresses of lookup->path; flags: AI_NUMERICHOST, or 0. */
static void ask(struct lookup *lookup, int flags)
{
    char port[8];
    (void)snprintf(port, sizeof port, "%u", lookup->path.port);
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    lookup->error = getaddrinfo(lookup->path.host, port, &hints, &found);
    if (lookup->error != 0) {
        return;
    }
    for (const struct addrinfo *one = found; one != NULL && lookup->count < NVME_ADDRESSES_MAX;
         one = one->ai_next) {
        struct nvme_address *address = &lookup->addresses[lookup->count++];
        memcpy(&address->bytes, one->ai_addr, one->ai_addrlen);
        address->length = one->ai_addrlen;
    }
    freeaddrinfo(found);
}

static void *lookup_thread(void *argument)
{
    struct lookup *lookup = argument;
    ask(lookup, 0);
    atomic_store(&lookup->answered, true); /* the members above are read after it */
    uint64_t one = 1;
    (void)!write(lookup->done, &one, sizeof one);
    lookup_release(lookup);
    return NULL;
}

/* Asks in a thread, which alone waits for as long as the resolver does. Returns 0, or an error of
 * nvme_wait or of making the thread. */
static int ask_in_thread(struct lookup *lookup, const struct nvme_deadline *deadline)
{
    pthread_t thread;
    lookup->done = eventfd(0, EFD_CLOEXEC);
    if (lookup->done < 0) {
        return -errno;
    }
    atomic_store(&lookup->users, 2);
    int code = thread_start(&thread, NULL, lookup_thread, lookup);
    if (code < 0) {
        atomic_store(&lookup->users, 1);
        return code;
    }
    (void)pthread_detach(thread);
    code = nvme_wait(deadline, lookup->done, POLLIN);
    return code == 0 && !atomic_load(&lookup->answered) ? DLFS_E_TIMEOUT : code;
}

/* Returns the number of addresses that were found, or an error with its text. */
static int take(const struct lookup *lookup, struct nvme_address addresses[NVME_ADDRESSES_MAX],
                struct nvme_text *text)
{
    if (lookup->error != 0) {
        nvme_text_format(text, "find the address of %s: %s", lookup->path.host,
                         gai_strerror(lookup->error));
        return lookup->error == EAI_NONAME ? DLFS_E_NOT_FOUND : DLFS_E_LOST;
    }
    memcpy(addresses, lookup->addresses, sizeof lookup->addresses);
    return lookup->count;
}

int nvme_resolve(const struct nvme_path *path, const struct nvme_deadline *deadline,
                 struct nvme_address addresses[NVME_ADDRESSES_MAX], struct nvme_text *text)
{
    struct lookup *lookup = calloc(1, sizeof *lookup);
    if (lookup == NULL) {
        nvme_text_format(text, "find the address of %s: no memory", path->host);
        return -ENOMEM;
    }
    lookup->path = *path;
    lookup->done = -1;
    atomic_init(&lookup->users, 1);
    ask(lookup, AI_NUMERICHOST);
    int code = 0;
    if (lookup->error == EAI_NONAME) { /* it is a name */
        code = ask_in_thread(lookup, deadline);
    }
    if (code == 0) {
        code = take(lookup, addresses, text);
    } else if (code == DLFS_E_TIMEOUT) {
        nvme_text_format(text, "find the address of %s: the resolver does not answer", path->host);
    } else {
        nvme_text_format(text, "find the address of %s: %s", path->host, dlfs_strerror(code));
    }
    lookup_release(lookup);
    return code;
}
