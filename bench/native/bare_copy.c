/*
 * The least that handing samples out by copying can cost: memcpy of each from memory that holds
 * all of them, one behind the other into a batch, no checks.
 *
 *     bare_copy PLACES BATCH SECONDS
 *
 * PLACES holds pairs of u64: offset in that memory and length.
 */
#include "bare.h"

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    size_t bytes;
    struct place *places = (struct place *)load(argv[1], &bytes);
    size_t count = bytes / sizeof(*places);
    size_t batch = strtoul(argv[2], NULL, 10);
    uint64_t end = 1;
    uint64_t longest = 1;
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t last = places[i].offset + places[i].length;
        end = last > end ? last : end;
        longest = places[i].length > longest ? places[i].length : longest;
        sum += places[i].length;
    }
    /* Twice the mean batch; one that is larger goes on at the front. */
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
            const struct place *place = &places[done % count];
            if (used + place->length > room)
                used = 0;
            memcpy(target + used, memory + place->offset, place->length);
            used += place->length;
            total += place->length;
        }
        __asm__ volatile("" ::"r"(target) : "memory");
    } while (now_s() < until);
    report(done, total, now_s() - start, cpu_s() - cpu);
    return 0;
}
