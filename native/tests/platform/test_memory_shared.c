/*
 * Memory for several processes: aligned, sealed, and mapped without touching what other threads of
 * the process map meanwhile, whether huge pages are reserved or not.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <dlfs/dlfs.h>

#include "check.h"
#include "platform/memory.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define LENGTH (2 * HUGE_PAGE)
#define OTHERS 3
#define OTHERS_BYTES ((size_t)3 << 20)
#define ROUNDS ROUNDS_OF(6000, 200)

static atomic_bool finished;

/* Maps, writes, reads back and unmaps private memory until the rounds are over. */
static void *other_thread(void *argument)
{
    const uint8_t mark = *(const uint8_t *)argument;
    const size_t step = 64u << 10; /* a few of its pages, so that it is mapped more often */
    while (!atomic_load(&finished)) {
        uint8_t *own =
            mmap(NULL, OTHERS_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(own != MAP_FAILED);
        for (size_t at = 0; at < OTHERS_BYTES; at += step) {
            own[at] = mark;
        }
        for (size_t at = 0; at < OTHERS_BYTES; at += step) {
            CHECK_EQ(own[at], mark);
        }
        CHECK_EQ(munmap(own, OTHERS_BYTES), 0);
    }
    return NULL;
}

static void test_memory_of_other_threads_stays(void)
{
    pthread_t others[OTHERS];
    uint8_t marks[OTHERS];
    for (size_t i = 0; i < OTHERS; i++) {
        marks[i] = (uint8_t)(i + 1);
        CHECK_EQ(pthread_create(&others[i], NULL, other_thread, &marks[i]), 0);
    }
    for (int round = 0; round < ROUNDS; round++) {
        void *base;
        int descriptor;
        CHECK_EQ(memory_create_shared("dlfs-test", LENGTH, true, MEMORY_OWNER_WRITES, &base,
                                      &descriptor),
                 0);
        CHECK_EQ(munmap(base, LENGTH), 0);
        CHECK_EQ(close(descriptor), 0);
    }
    atomic_store(&finished, true);
    for (size_t i = 0; i < OTHERS; i++) {
        CHECK_EQ(pthread_join(others[i], NULL), 0);
    }
}

/* Memory can be mapped again, except as its seal forbids. */
static void test_mapped_again(void)
{
    void *base, *again, *untouched = &base;
    int descriptor = -1;
    CHECK_EQ(
        memory_create_shared("dlfs-test", LENGTH, true, MEMORY_OWNER_WRITES, &base, &descriptor),
        0);
    CHECK_EQ((uintptr_t)base % HUGE_PAGE, 0);
    memcpy((uint8_t *)base + LENGTH - 4, "last", 4);
    CHECK_EQ(memory_map_shared(descriptor, LENGTH, true, MEMORY_OWNER_WRITES, &again), 0);
    CHECK_EQ((uintptr_t)again % HUGE_PAGE, 0);
    CHECK(memcmp((uint8_t *)again + LENGTH - 4, "last", 4) == 0);
    CHECK_EQ(memory_map_shared(descriptor, LENGTH, true, MEMORY_ALL_WRITE, &untouched), -EPERM);
    CHECK(untouched == &base);
    CHECK_EQ(munmap(again, LENGTH), 0);
    CHECK_EQ(munmap(base, LENGTH), 0);
    CHECK_EQ(close(descriptor), 0);
}

/* Memory that all may write stays writable; sealed memory cannot be written, whatever its pages. */
static void test_seals(void)
{
    void *base;
    int descriptor;
    for (int huge = 0; huge < 2; huge++) {
        CHECK_EQ(
            memory_create_shared("dlfs-test", LENGTH, huge, MEMORY_ALL_WRITE, &base, &descriptor),
            0);
        CHECK(memory_is_writable(descriptor, LENGTH));
        CHECK_EQ(ftruncate(descriptor, 0), -1);
        munmap(base, LENGTH);
        close(descriptor);
        CHECK_EQ(memory_create_shared("dlfs-test", LENGTH, huge, MEMORY_OWNER_WRITES, &base,
                                      &descriptor),
                 0);
        CHECK(!memory_is_writable(descriptor, LENGTH));
        CHECK_EQ(pwrite(descriptor, "x", 1, 0), -1);
        munmap(base, LENGTH);
        close(descriptor);
    }
}

int main(void)
{
    test_mapped_again();
    test_seals();
    test_memory_of_other_threads_stays();
    return 0;
}
