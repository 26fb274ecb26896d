/* Reads of members while a volume is opened; see volume/source.h. */
#include "volume/source.h"

#include <errno.h>
#include <stdlib.h>

#include "device/device.h"
#include "platform/clock.h"
#include "platform/thread.h"

#define GRACE_NS UINT64_C(1000000000) /* so that a device reports its own time-out first */
#define LEAST_NS UINT64_C(100000000)  /* so that no device fails without being asked */
#define NS_PER_MS UINT64_C(1000000)
#define NS_PER_BYTE UINT64_C(3815) /* for bytes that arrived: 256 KiB a second, as the reader */
#define PIECE_BYTES (256u << 10)

uint64_t volume_call_ns = UINT64_C(30000000000);

struct volume_limit volume_limit_begin(void)
{
    uint64_t now_ns = monotonic_ns();
    return (struct volume_limit){.began_ns = now_ns, .ends_ns = now_ns + volume_call_ns};
}

void volume_limit_admit(struct volume_limit *limit, const dlfs_device *device)
{
    uint64_t own_ns = dlfs_device_operation_ms(device) * NS_PER_MS;
    uint64_t ends_ns = limit->began_ns + own_ns + GRACE_NS;
    limit->ends_ns = limit->ends_ns > ends_ns ? limit->ends_ns : ends_ns;
}

uint64_t volume_limit_device_ns(const struct volume_limit *limit, uint32_t shares)
{
    uint64_t now_ns = monotonic_ns();
    uint64_t left_ns = limit->ends_ns > now_ns ? (limit->ends_ns - now_ns) / shares : 0;
    return now_ns + (left_ns > LEAST_NS ? left_ns : LEAST_NS);
}

int volume_source_open(struct volume_source *source, dlfs_device *device, uint32_t depth,
                       size_t bytes, uint64_t until_ns)
{
    *source = (struct volume_source){.device = device, .bytes = bytes};
    int code = dlfs_memory_map(bytes, &source->memory, NULL);
    if (code < 0) {
        return code;
    }
    code = dlfs_queue_create_until(device, depth, until_ns, &source->queue);
    if (code < 0) {
        dlfs_memory_unmap(source->memory, bytes);
        source->queue = NULL;
    }
    return code;
}

int volume_source_read(struct volume_source *source, struct volume_limit *limit,
                       uint64_t offset_bytes, uint64_t length_bytes, uint64_t until_ns)
{
    uint64_t piece_bytes = length_bytes < PIECE_BYTES ? length_bytes : PIECE_BYTES;
    int code = dlfs_queue_read_until(source->queue, source->memory, offset_bytes, length_bytes,
                                     (uint32_t)piece_bytes, until_ns);
    if (code >= 0) {
        limit->ends_ns += length_bytes * NS_PER_BYTE;
    }
    return code;
}

static void source_free(const struct volume_source *source)
{
    dlfs_queue_destroy(source->queue);
    dlfs_memory_unmap(source->memory, source->bytes);
}

static void *leave_thread(void *argument)
{
    struct volume_source *source = argument;
    source_free(source);
    dlfs_device_release(source->device);
    free(source);
    return NULL;
}

void volume_source_close(struct volume_source *source)
{
    if (source->queue == NULL) {
        return;
    }
    struct volume_source *left = NULL;
    if (dlfs_queue_ends(source->queue)) {
        source_free(source);
    } else {
        dlfs_device_retain(source->device);
        left = malloc(sizeof *left);
    }
    if (left != NULL) {
        pthread_t thread;
        *left = *source;
        if (thread_start(&thread, NULL, leave_thread, left) == 0) {
            (void)pthread_detach(thread);
        } else {
            free(left); /* the rest stays for good, as the device may write to it */
        }
    }
    source->queue = NULL;
}
