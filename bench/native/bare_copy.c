/*
 * The lower bound of the cost of returning copies of samples: memcpy of each sample from memory
 * that contains all of them into a batch, without checks.
 *
 *     bare_copy LOCATIONS BATCH SECONDS
 *
 * LOCATIONS is a file of pairs of u64: offset in that memory, and length.
 */
#include "bare.h"

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    size_t bytes;
    struct location *locations = (struct location *)load(argv[1], &bytes);
    size_t count = bytes / sizeof(*locations);
    size_t batch = strtoul(argv[2], NULL, 10);
    uint64_t end = 1;
    uint64_t longest = 1;
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t last = locations[i].offset + locations[i].length;
        end = last > end ? last : end;
        longest = locations[i].length > longest ? locations[i].length : longest;
        sum += locations[i].length;
    }
    /* Room for twice the mean batch. A larger batch continues at the front. */
    uint64_t room = longest + 2 * batch * (sum / (count ? count : 1));
    char *memory = allocate(end);
    char *target = allocate(room);
    memset(memory, 1, end);
    memset(target, 2, room);
    double until = now_s() + strtod(argv[3], NULL);
    double cpu = cpu_s();
    double start = now_s();
    uint64_t total = 0;
    size_t done = 0;
    do {
        size_t used = 0;
        for (size_t i = 0; i < batch; i++, done++) {
            const struct location *location = &locations[done % count];
            if (used + location->length > room)
                used = 0;
            memcpy(target + used, memory + location->offset, location->length);
            used += location->length;
            total += location->length;
        }
        __asm__ volatile("" ::"r"(target) : "memory");
    } while (now_s() < until);
    report(done, total, now_s() - start, cpu_s() - cpu);
    return 0;
}
