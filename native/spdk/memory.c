/*
 * Registers callers' memory for DMA by devices.
 *
 * The memory must not move. For PCIe devices with an IOMMU, VFIO pins registered memory. Without an
 * IOMMU, SPDK reads the physical addresses once and the kernel may move the pages later: such
 * memory is not registered, and data is copied through SPDK's memory. RDMA devices pin registered
 * memory. TCP needs no registration.
 *
 * SPDK refuses to register memory twice, but queue pairs often register the same range. Therefore
 * this file counts the users of each range.
 *
 * Source: SPDK, "Direct Memory Access (DMA) From User Space"; spdk/env.h, spdk_mem_register.
 */
#include "shim.h"

#include <stdlib.h>

#define HUGE_PAGE_BYTES (UINT64_C(2) << 20)

struct range {
    struct range *next;
    uintptr_t start;
    size_t bytes;
    uint32_t users;
};

static struct {
    pthread_mutex_t lock;
    struct range *first;
} ranges = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct range *find(uintptr_t start, size_t bytes)
{
    struct range *range = ranges.first;
    while (range != NULL && (range->start != start || range->bytes != bytes)) {
        range = range->next;
    }
    return range;
}

static struct range *add(uintptr_t start, size_t bytes)
{
    struct range *range = calloc(1, sizeof *range);
    if (range == NULL || spdk_mem_register((void *)start, bytes) != 0) {
        free(range);
        return NULL;
    }
    range->start = start;
    range->bytes = bytes;
    range->next = ranges.first;
    ranges.first = range;
    return range;
}

struct range *range_register(enum spdk_nvme_transport_type transport, void *base, size_t bytes)
{
    if (transport == SPDK_NVME_TRANSPORT_PCIE && !spdk_iommu_is_enabled()) {
        return NULL;
    }
    uintptr_t mask = (uintptr_t)HUGE_PAGE_BYTES - 1;
    uintptr_t end = ((uintptr_t)base + bytes) & ~mask;
    uintptr_t start = ((uintptr_t)base + mask) & ~mask;
    if (end <= start) {
        return NULL;
    }
    (void)pthread_mutex_lock(&ranges.lock);
    struct range *range = find(start, end - start);
    if (range == NULL) {
        range = add(start, end - start);
    }
    if (range != NULL) {
        range->users++;
    }
    (void)pthread_mutex_unlock(&ranges.lock);
    return range;
}

void range_release(struct range *range)
{
    if (range == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&ranges.lock);
    range->users--;
    if (range->users == 0) {
        struct range **link = &ranges.first;
        while (*link != range) {
            link = &(*link)->next;
        }
        *link = range->next;
        (void)spdk_mem_unregister((void *)range->start, range->bytes);
        free(range);
    }
    (void)pthread_mutex_unlock(&ranges.lock);
}

bool range_holds(const struct range *range, const void *buffer, size_t bytes)
{
    uintptr_t start = (uintptr_t)buffer;
    return range != NULL && start >= range->start && bytes <= range->bytes &&
           start - range->start <= range->bytes - bytes;
}
