/* Merging sorted paths: order, full targets, sources that end, and paths that are there twice. */
#include <dlfs/import.h>

#include <errno.h>
#include <string.h>

#include "check.h"

#define SOURCES 5u
#define EACH 200u
#define BYTES 8u /* of a path */

static uint8_t names[SOURCES][EACH * BYTES + 1];
static uint64_t offsets[EACH + 1];
static dlfs_location locations[SOURCES][EACH];
static uint64_t rows[SOURCES][EACH];

/* Source s has the paths s, s + SOURCES, s + 2 * SOURCES and so on. */
static void make_sources(dlfs_path_source *sources)
{
    for (uint64_t i = 0; i <= EACH; i++) {
        offsets[i] = i * BYTES;
    }
    for (uint64_t s = 0; s < SOURCES; s++) {
        for (uint64_t i = 0; i < EACH; i++) {
            rows[s][i] = i * SOURCES + s;
            locations[s][i].crc32c = (uint32_t)rows[s][i];
            CHECK_EQ(snprintf((char *)names[s] + i * BYTES, BYTES + 1, "%08llu",
                              (unsigned long long)rows[s][i]),
                     BYTES);
        }
        sources[s] = (dlfs_path_source){.names = names[s],
                                        .offsets = offsets,
                                        .locations = locations[s],
                                        .rows = rows[s],
                                        .count = EACH};
    }
}

static void test_merge(uint64_t capacity, uint64_t names_bytes)
{
    dlfs_path_source sources[SOURCES];
    uint8_t *merged_names = malloc(names_bytes + 1);
    uint64_t *merged_offsets = malloc((capacity + 1) * sizeof(uint64_t));
    dlfs_location *merged_locations = malloc((capacity + 1) * sizeof(dlfs_location));
    uint64_t *merged_rows = malloc((capacity + 1) * sizeof(uint64_t));
    const dlfs_path_target target = {.names = merged_names,
                                     .offsets = merged_offsets,
                                     .locations = merged_locations,
                                     .rows = merged_rows,
                                     .names_bytes = names_bytes,
                                     .capacity = capacity};
    make_sources(sources);
    uint64_t done = 0;
    uint32_t repeated;
    while (done < SOURCES * EACH) {
        int64_t count = dlfs_paths_merge(sources, SOURCES, &target, &repeated);
        CHECK(count > 0);
        for (int64_t i = 0; i < count; i++, done++) {
            char expected[BYTES + 1];
            CHECK_EQ(snprintf(expected, sizeof(expected), "%08llu", (unsigned long long)done),
                     BYTES);
            CHECK_EQ(merged_rows[i], done);
            CHECK_EQ(merged_locations[i].crc32c, done);
            CHECK_EQ(merged_offsets[i + 1] - merged_offsets[i], BYTES);
            CHECK(memcmp(merged_names + merged_offsets[i], expected, BYTES) == 0);
        }
    }
    CHECK_EQ(dlfs_paths_merge(sources, SOURCES, &target, &repeated), 0);
    CHECK_EQ(dlfs_paths_merge(NULL, 0, &target, &repeated), 0);
    CHECK_EQ(dlfs_paths_merge(NULL, 1, &target, &repeated), -EINVAL);
    free(merged_names);
    free(merged_offsets);
    free(merged_locations);
    free(merged_rows);
}

static void test_a_path_that_is_there_twice(uint64_t at)
{
    dlfs_path_source sources[SOURCES];
    uint8_t merged_names[SOURCES * EACH * BYTES];
    uint64_t merged_offsets[SOURCES * EACH + 1];
    dlfs_location merged_locations[SOURCES * EACH];
    uint64_t merged_rows[SOURCES * EACH];
    const dlfs_path_target target = {.names = merged_names,
                                     .offsets = merged_offsets,
                                     .locations = merged_locations,
                                     .rows = merged_rows,
                                     .names_bytes = sizeof(merged_names),
                                     .capacity = SOURCES * EACH};
    make_sources(sources);
    memcpy(names[1] + at * BYTES, names[4] + at * BYTES, BYTES);
    uint32_t repeated = SOURCES;
    int64_t code;
    do {
        code = dlfs_paths_merge(sources, SOURCES, &target, &repeated);
    } while (code > 0);
    CHECK_EQ(code, -EEXIST);
    CHECK(repeated == 1 || repeated == 4);
    CHECK_EQ(sources[repeated].next, at);
}

static void test_a_target_without_room(void)
{
    dlfs_path_source sources[SOURCES];
    uint8_t merged_names[BYTES];
    uint64_t merged_offsets[3];
    dlfs_location merged_locations[2];
    uint64_t merged_rows[2];
    dlfs_path_target target = {.names = merged_names,
                               .offsets = merged_offsets,
                               .locations = merged_locations,
                               .rows = merged_rows,
                               .names_bytes = BYTES,
                               .capacity = 2};
    uint32_t repeated;
    make_sources(sources);
    CHECK_EQ(dlfs_paths_merge(sources, SOURCES, &target, &repeated), 1);
    target.names_bytes = BYTES - 1;
    CHECK_EQ(dlfs_paths_merge(sources, SOURCES, &target, &repeated), -EINVAL);
    target.capacity = 0;
    CHECK_EQ(dlfs_paths_merge(sources, SOURCES, &target, &repeated), 0);
}

int main(void)
{
    test_a_target_without_room();
    test_merge(1, BYTES);
    test_merge(7, 7 * BYTES);
    test_merge(SOURCES * EACH, 10 * BYTES + 3);
    test_merge(SOURCES * EACH, SOURCES * EACH * BYTES);
    test_a_path_that_is_there_twice(0);
    test_a_path_that_is_there_twice(100);
    test_a_path_that_is_there_twice(EACH - 1);
    return 0;
}
