/* A host name with several addresses, of which the target listens on one, as with localhost. */
#include <arpa/inet.h>
#include <netdb.h>

#include "nvme/nvme_target.h"

#define NAME "two.example"

static struct addrinfo *make_address(int family, const char *numbers, const char *port,
                                     struct addrinfo *next)
{
    struct addrinfo *made = calloc(1, sizeof *made + sizeof(struct sockaddr_storage));
    CHECK(made != NULL);
    made->ai_family = family;
    made->ai_addr = (struct sockaddr *)(made + 1);
    made->ai_next = next;
    if (family == AF_INET6) {
        struct sockaddr_in6 *address = (struct sockaddr_in6 *)(made + 1);
        address->sin6_family = AF_INET6;
        address->sin6_port = htons((uint16_t)atoi(port));
        CHECK_EQ(inet_pton(family, numbers, &address->sin6_addr), 1);
        made->ai_addrlen = sizeof *address;
    } else {
        struct sockaddr_in *address = (struct sockaddr_in *)(made + 1);
        address->sin_family = AF_INET;
        address->sin_port = htons((uint16_t)atoi(port));
        CHECK_EQ(inet_pton(family, numbers, &address->sin_addr), 1);
        made->ai_addrlen = sizeof *address;
    }
    return made;
}

/* Replaces the system's resolver: returns this test's addresses. */
int getaddrinfo(const char *name, const char *port, const struct addrinfo *hints,
                struct addrinfo **found)
{
    CHECK(strcmp(name, NAME) == 0);
    if ((hints->ai_flags & AI_NUMERICHOST) != 0) {
        return EAI_NONAME;
    }
    struct addrinfo *last = make_address(AF_INET, "127.0.0.1", port, NULL);
    *found = make_address(AF_INET6, "::1", port, last);
    return 0;
}

void freeaddrinfo(struct addrinfo *found)
{
    while (found != NULL) {
        struct addrinfo *next = found->ai_next;
        free(found);
        found = next;
    }
}

int main(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    config.hosts[0] = NAME;
    dlfs_device *device = target_open(&config);
    CHECK_EQ(dlfs_device_flush(device), 0);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    target_free(target);
    return 0;
}
