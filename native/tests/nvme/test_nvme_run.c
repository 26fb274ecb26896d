/* Single commands by dlfs_nvme_run, its arguments, and the codes of a target that refuses. */
#include "device/device_tests.h"
#include "nvme/nvme_target.h"

#define IDENTIFY 0x06u
#define READ 0x02u
#define FEATURES 0x09u
#define PAGE 4096u

static void test_commands(void)
{
    struct target *target = target_start(3, true, 65536);
    fill_pattern(target->memory, TARGET_BYTES, 8);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    uint8_t *page = aligned_memory(PAGE);
    dlfs_nvme_result result;
    dlfs_nvme_command command = {.opcode = IDENTIFY, .cdw10 = 1};
    for (uint32_t i = 0; i < 3; i++) {
        memset(page, 0, PAGE);
        CHECK_EQ(dlfs_nvme_run(device, DLFS_NVME_QUEUE_ADMIN, &command, page, PAGE,
                               DLFS_NVME_DATA_IN, &result),
                 0);
        CHECK_EQ(result.status, 0);
        CHECK_EQ(page[77], 5);
    }
    command = (dlfs_nvme_command){.opcode = READ, .nsid = 1, .cdw10 = 16, .cdw12 = 7};
    CHECK_EQ(
        dlfs_nvme_run(device, DLFS_NVME_QUEUE_IO, &command, page, PAGE, DLFS_NVME_DATA_IN, &result),
        0);
    CHECK_EQ(result.status, 0);
    CHECK(memcmp(page, target->memory + 16 * (size_t)TARGET_BLOCK, PAGE) == 0);
    command = (dlfs_nvme_command){.opcode = FEATURES, .cdw10 = 7};
    CHECK_EQ(dlfs_nvme_run(device, DLFS_NVME_QUEUE_ADMIN, &command, NULL, 0, DLFS_NVME_DATA_NONE,
                           &result),
             0);
    CHECK_EQ(result.value, 7 | 7 << 16);
    dlfs_nvme_status status;
    CHECK_EQ(dlfs_nvme_get_status(device, &status), 0);
    CHECK_EQ(status.connected, 1);
    CHECK_EQ(status.reconnects + status.retries + status.protocol_errors, 0);
    CHECK(status.last_error[0] == '\0');
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(page);
    target_free(target);
}

static void test_wrong_arguments(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    dlfs_device *memory = make_memory();
    uint8_t *page = aligned_memory(PAGE);
    dlfs_nvme_result result;
    dlfs_nvme_command command = {.opcode = IDENTIFY, .cdw10 = 1};
    dlfs_nvme_command large = {.opcode = UINT8_MAX + 1};
    CHECK_EQ(dlfs_nvme_run(memory, 0, &command, page, PAGE, 1, &result), -ENOTSUP);
    CHECK_EQ(dlfs_nvme_run(NULL, 0, &command, page, PAGE, 1, &result), -ENOTSUP);
    CHECK_EQ(dlfs_nvme_run(device, 2, &command, page, PAGE, 1, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, NULL, page, PAGE, 1, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &large, page, PAGE, 1, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &command, page, PAGE, 1, NULL), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &command, page, PAGE, 3, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &command, page, PAGE, 0, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &command, page, 0, 1, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &command, NULL, PAGE, 1, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &command, NULL, 0, 1, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &command, page, 0, 0, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &command, NULL, PAGE, 0, &result), -EINVAL);
    CHECK_EQ(dlfs_nvme_run(device, 0, &command, page, DLFS_NVME_DATA_BYTES_MAX + 4, 1, &result),
             -EINVAL);
    dlfs_nvme_status status;
    CHECK_EQ(dlfs_nvme_get_status(memory, &status), -ENOTSUP);
    CHECK_EQ(dlfs_nvme_get_status(NULL, &status), -ENOTSUP);
    CHECK_EQ(dlfs_device_destroy(memory), 0);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    free(page);
    target_free(target);
}

/* A connection that is lost during the set-up says nothing of the namespace. */
static void test_loss_during_the_set_up(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device;
    char message[DLFS_NVME_TEXT_BYTES] = "";
    atomic_store(&target->no_identify, true);
    CHECK_EQ(dlfs_device_open_nvme(&config, message, sizeof message, &device), DLFS_E_LOST);
    CHECK(message[0] != '\0');
    atomic_store(&target->no_identify, false);
    config.nsid = 2;
    CHECK_EQ(dlfs_device_open_nvme(&config, message, sizeof message, &device), DLFS_E_NOT_FOUND);
    target_free(target);
}

/* The code for an unknown subsystem is that of the admin queue only. */
static void test_refusals(void)
{
    struct target *target = target_start(0, true, 65536);
    dlfs_nvme_config config = target_config(target);
    dlfs_device *device = target_open(&config);
    dlfs_queue *queue;
    atomic_store(&target->refuse_io, 0x4182);
    CHECK_EQ(dlfs_queue_create(device, 4, &queue), -EREMOTEIO);
    atomic_store(&target->refuse_io, 0x4184);
    CHECK_EQ(dlfs_queue_create(device, 4, &queue), -EACCES);
    CHECK_EQ(dlfs_device_destroy(device), 0);
    char message[DLFS_NVME_TEXT_BYTES] = "";
    config.subsystem_nqn = TARGET_NQN ".other";
    CHECK_EQ(dlfs_device_open_nvme(&config, message, sizeof message, &device), DLFS_E_NOT_FOUND);
    CHECK(strstr(message, "is unknown to the target") != NULL);
    target_free(target);
}

int main(void)
{
    test_commands();
    test_wrong_arguments();
    test_loss_during_the_set_up();
    test_refusals();
    return 0;
}
