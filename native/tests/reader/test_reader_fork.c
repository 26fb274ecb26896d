/* A forked child leaves the batches of its parent alone, whose threads and locks it lacks. */
#include <dlfs/dlfs.h>

#include <sys/wait.h>
#include <unistd.h>

#include "reader/reader_tests.h"

static void must_not_release(struct batch *batch)
{
    (void)batch;
    _exit(2);
}

int main(void)
{
    struct dataset dataset;
    dlfs_batch *batch;
    uint64_t index = 0;
    dataset_create(&dataset, NULL);
    dlfs_reader *reader = reader_over(&dataset, 1 << 20, 0);
    CHECK_EQ(dlfs_reader_read(reader, &index, 1, &batch), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        ((struct batch *)batch)->release = must_not_release;
        dlfs_batch_release(batch);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_sample(batch, 0);
    dlfs_batch_release(batch);
    CHECK_EQ(dlfs_reader_destroy(reader), 0);
    dataset_destroy(&dataset);
    return 0;
}
