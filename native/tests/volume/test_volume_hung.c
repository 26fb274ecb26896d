/* Mounting a volume whose device leaves reads unanswered, and cannot drop them. */
#include <dlfs/api.h>

#include <string.h>

#include "platform/clock.h"
#include "reader/gate.h"
#include "volume/source.h"

#define DEVICE_BYTES (16u << 20)
#define LONG_NS UINT64_C(30000000000) /* more than a busy machine adds */

static void mounting_ends(void)
{
    struct gate gate = {.closed = true};
    dlfs_device *inner;
    dlfs_volume *volume = NULL;
    char message[DLFS_MESSAGE_BYTES] = "";
    CHECK_EQ(dlfs_device_create_memory(DEVICE_BYTES, 512, &inner), 0);
    gate_put(&gate, inner);
    uint64_t before_ns = monotonic_ns();
    CHECK_EQ(dlfs_mount_devices(&gate.device, 1, message, sizeof message, &volume), DLFS_E_TIMEOUT);
    CHECK(strstr(message, dlfs_strerror(DLFS_E_TIMEOUT)) != NULL);
    CHECK_EQ(atomic_load(&gate.operation_count), 1); /* what is silent is not asked again */
    CHECK_EQ(dlfs_device_destroy(gate.device), 0);
    CHECK(monotonic_ns() - before_ns < LONG_NS);
    CHECK_EQ(atomic_load(&gate.destroyed_devices), 0);
    atomic_store(&gate.closed, false);
    while (atomic_load(&gate.destroyed_devices) == 0) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    CHECK_EQ(dlfs_device_destroy(inner), 0);
}

int main(void)
{
    volume_call_ns = UINT64_C(500000000);
    mounting_ends();
    return 0;
}
