/* The library's threads leave the signals of the process to the program's own threads. */
#include <dirent.h>
#include <signal.h>
#include <string.h>

#include "channel/channel_tests.h"
#include "platform/thread.h"

#define SIGNALS_MAX 32

static bool is_fault(int number)
{
    return number == SIGBUS || number == SIGFPE || number == SIGILL || number == SIGSEGV ||
           number == SIGTRAP;
}

/* Returns the signals that a thread of this process blocks, as bits; UINT64_MAX if it has ended. */
static uint64_t blocked_by(const char *thread)
{
    char path[64];
    char line[256];
    unsigned long long blocked = UINT64_MAX;
    (void)snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
    FILE *status = fopen(path, "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL) {
        (void)sscanf(line, "SigBlk: %llx", &blocked);
    }
    if (status != NULL) {
        (void)fclose(status);
    }
    return blocked;
}

/* Checks every thread but this one; returns their number. */
static int check_threads(void)
{
    int count = 0;
    DIR *threads = opendir("/proc/self/task");
    CHECK(threads != NULL);
    const struct dirent *entry;
    while ((entry = readdir(threads)) != NULL) {
        if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid()) {
            continue;
        }
        uint64_t blocked = blocked_by(entry->d_name);
        for (int number = 1; number < SIGNALS_MAX; number++) {
            CHECK((blocked >> (number - 1) & 1) || is_fault(number) || number == SIGKILL ||
                  number == SIGSTOP);
        }
        count++;
    }
    (void)closedir(threads);
    return count;
}

static void *note_mask(void *argument)
{
    CHECK_EQ(pthread_sigmask(SIG_SETMASK, NULL, argument), 0);
    return NULL;
}

static void test_a_thread_blocks_signals(void)
{
    pthread_t thread;
    sigset_t mask;
    sigset_t own;
    CHECK_EQ(thread_start(&thread, NULL, note_mask, &mask), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(pthread_sigmask(SIG_SETMASK, NULL, &own), 0);
    for (int number = 1; number < SIGNALS_MAX; number++) {
        if (number != SIGKILL && number != SIGSTOP) {
            CHECK_EQ(sigismember(&mask, number), !is_fault(number));
        }
        CHECK_EQ(sigismember(&own, number), 0);
    }
}

/* Starts all kinds of threads: a channel's, a stream's, and the one that reads a whole dataset. */
static void test_threads_of_readers_block_signals(void)
{
    struct service service;
    service_start(&service, 64u << 20, 64u << 20, NULL);
    int before = check_threads();
    struct connection connection = connect_to(&service);
    dlfs_sequence *sequence;
    CHECK_EQ(dlfs_sequence_create(service.dataset.directory, CHUNK, DLFS_ORDER_GLOBAL, 1, 0, 1,
                                  &sequence),
             0);
    dlfs_stream_config config = {.sequence = sequence, .stride = 1, .count = COUNT};
    dlfs_stream *stream;
    CHECK_EQ(dlfs_stream_create(service.reader, &config, &stream), 0);
    CHECK(check_threads() >= before + 2);
    dlfs_stream_destroy(stream);
    dlfs_sequence_destroy(sequence);
    dlfs_channel_destroy(connection.channel);
    dlfs_client_destroy(connection.client);
    service_stop(&service);
}

int main(void)
{
    test_a_thread_blocks_signals();
    test_threads_of_readers_block_signals();
    return 0;
}
