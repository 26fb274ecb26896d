/*
 * The sample directory: what is built is found again; what breaks a rule is refused; and bytes that
 * are wild under right checksums give an error or a miss, never an access out of bounds (run under
 * the sanitizers).
 */
#include <errno.h>
#include <stdbool.h>

#include "directory/directory_tests.h"

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void check_found(const dlfs_directory *directory, const sample_set *set)
{
    uint64_t *out = malloc((set->count + 1) * sizeof(uint64_t));
    CHECK_EQ(dlfs_directory_find(directory, set->text, set->offsets, set->count, out), 0);
    for (uint64_t i = 0; i < set->count; i++) {
        CHECK_EQ(out[i], i);
    }
    free(out);
}

static void check_names(const dlfs_directory *directory, const sample_set *set)
{
    uint64_t bytes = set->offsets[set->count] + 2 * DLFS_PATH_BYTES_MAX;
    uint8_t *text = malloc(bytes);
    uint64_t *offsets = malloc((set->count + 2) * sizeof(uint64_t));
    uint64_t index = set->count;
    while (index-- > 0) { /* backwards, and each name twice */
        const uint64_t twice[2] = {index, index};
        CHECK_EQ(dlfs_directory_names_of(directory, twice, 2, text, bytes, offsets), 2);
        CHECK_EQ(offsets[1], set->offsets[index + 1] - set->offsets[index]);
        CHECK(memcmp(text, set->text + set->offsets[index], offsets[1]) == 0);
        CHECK(memcmp(text + offsets[1], text, offsets[2] - offsets[1]) == 0);
    }
    for (uint64_t first = 0; first <= set->count; first += 13) {
        uint64_t count = set->count - first;
        CHECK_EQ(dlfs_directory_names(directory, first, count, text, bytes, offsets), count);
        CHECK_EQ(offsets[count], set->offsets[set->count] - set->offsets[first]);
        CHECK(memcmp(text, set->text + set->offsets[first], offsets[count]) == 0);
    }
    free(text);
    free(offsets);
}

static void check_order(const dlfs_directory *directory, const sample_set *set)
{
    uint64_t *order = malloc((set->count + 1) * sizeof(uint64_t));
    CHECK_EQ(dlfs_directory_order(directory, 0, set->count, order), 0);
    for (uint64_t rank = 0; rank < set->count; rank++) {
        CHECK_EQ(dlfs_location_address(&set->locations[order[rank]]), rank * SAMPLE_BYTES);
        CHECK_EQ(dlfs_directory_rank_at(directory, rank * SAMPLE_BYTES), rank);
        CHECK_EQ(dlfs_directory_rank_at(directory, rank * SAMPLE_BYTES + 1), rank + 1);
    }
    CHECK_EQ(dlfs_directory_order(directory, set->count, 1, order), -EINVAL);
    CHECK_EQ(dlfs_directory_order(directory, 1, UINT64_MAX, order), -EINVAL);
    free(order);
}

/* Opens a directory of the second halves of the samples. */
static void check_parts(const dlfs_directory *whole, const sample_set *set)
{
    uint64_t count = set->count;
    dlfs_location *locations = malloc((count + 1) * sizeof(*locations));
    dlfs_directory *parts;
    uint64_t order[2];
    for (uint64_t i = 0; i < count; i++) {
        locations[i] = set->locations[i];
        locations[i].length_low /= 2;
        locations[i].address += set->locations[i].length_low - locations[i].length_low;
    }
    CHECK_EQ(dlfs_directory_open_parts(NULL, locations, NULL, &parts), -EINVAL);
    CHECK_EQ(dlfs_directory_open_parts(whole, count > 0 ? NULL : locations, NULL, &parts),
             count > 0 ? -EINVAL : 0);
    if (count > 0) {
        CHECK_EQ(dlfs_directory_open_parts(whole, locations, NULL, &parts), 0);
    }
    CHECK_EQ(dlfs_directory_count(parts), count);
    CHECK_EQ(dlfs_directory_data_bytes(parts), set->data_bytes);
    CHECK(dlfs_directory_locations(parts) == locations);
    if (count > 1) {
        uint32_t *reversed = malloc(count * sizeof(*reversed));
        CHECK_EQ(dlfs_directory_order(parts, 0, 2, order), 0);
        CHECK_EQ(dlfs_location_address(&set->locations[order[1]]), SAMPLE_BYTES);
        dlfs_directory_close(parts);
        for (uint64_t i = 0; i < count; i++) {
            reversed[i] = (uint32_t)(count - 1 - i);
        }
        CHECK_EQ(dlfs_directory_open_parts(whole, locations, reversed, &parts), 0);
        CHECK_EQ(dlfs_directory_order(parts, 0, 2, order), 0);
        CHECK(order[0] == count - 1 && order[1] == count - 2);
        dlfs_directory_close(parts);
        parts = NULL;
        free(reversed);
    }
    dlfs_directory_close(parts);
    free(locations);
}

static void check_bounds(const dlfs_directory *directory, const sample_set *set)
{
    uint8_t path[TEXT_MAX + 1];
    for (uint64_t i = 0; i < set->count; i++) {
        uint64_t bytes = set->offsets[i + 1] - set->offsets[i];
        uint64_t index;
        memcpy(path, set->text + set->offsets[i], bytes);
        path[bytes] = 1;
        CHECK_EQ(dlfs_directory_lower_bound(directory, path, bytes, &index), 0);
        CHECK_EQ(index, i);
        CHECK_EQ(dlfs_directory_lower_bound(directory, path, bytes + 1, &index), 0);
        CHECK_EQ(index, i + 1);
    }
}

static void test_round_trip(void)
{
    const uint64_t counts[] = {0, 1, 2, 15, 16, 17, 255, 256, 257, 4097, 5000};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        sample_set set = make_samples(counts[i]);
        segment made = build(&set);
        dlfs_directory *directory = open_segment(&made);
        uint64_t bad;
        CHECK_EQ(dlfs_directory_count(directory), counts[i]);
        CHECK_EQ(dlfs_directory_data_bytes(directory), set.data_bytes);
        CHECK_EQ(dlfs_directory_names_bytes(directory), made.names_bytes);
        CHECK_EQ(dlfs_directory_verify(directory, 0, made.entries, made.entries_bytes, &bad), 0);
        CHECK_EQ(dlfs_directory_verify(directory, 1, made.names, made.names_bytes, &bad), 0);
        check_found(directory, &set);
        check_names(directory, &set);
        check_order(directory, &set);
        check_parts(directory, &set);
        check_bounds(directory, &set);
        dlfs_directory_close(directory);
        free_segment(&made);
        free_samples(&set);
    }
    dlfs_directory_close(NULL);
}

static void test_absent_paths_are_not_found(void)
{
    static const char *const absent[] = {
        "",    "train",     "train/000", "train/000/image-000000.jp", "train/000/image-000000.jpgg",
        "zzz", "train/000/"};
    sample_set set = make_samples(1000);
    segment made = build(&set);
    dlfs_directory *directory = open_segment(&made);
    for (size_t i = 0; i < sizeof(absent) / sizeof(absent[0]); i++) {
        const uint64_t offsets[2] = {0, strlen(absent[i])};
        uint64_t out = 0;
        CHECK_EQ(dlfs_directory_find(directory, (const uint8_t *)absent[i], offsets, 1, &out), 0);
        CHECK(out == UINT64_MAX);
    }
    dlfs_directory_close(directory);
    free_segment(&made);
    free_samples(&set);
}

static void test_names_come_later(void)
{
    sample_set set = make_samples(20);
    segment made = build(&set);
    dlfs_directory *directory;
    uint64_t out[20];
    uint8_t text[TEXT_MAX];
    uint64_t offsets[21];
    const uint64_t indices[4] = {19, 3, 3, 20};
    CHECK_EQ(dlfs_directory_open(made.entries, made.entries_bytes, &directory), 0);
    CHECK_EQ(dlfs_directory_find(directory, set.text, set.offsets, 20, out), -EAGAIN);
    CHECK_EQ(dlfs_directory_lower_bound(directory, set.text, 1, out), -EAGAIN);
    CHECK_EQ(dlfs_directory_names(directory, 0, 1, text, TEXT_MAX, offsets), -EAGAIN);
    CHECK_EQ(dlfs_directory_names_of(directory, indices, 1, text, TEXT_MAX, offsets), -EAGAIN);
    CHECK_EQ(dlfs_directory_attach_names(directory, made.names, made.names_bytes - 1),
             DLFS_E_TRUNCATED);
    CHECK_EQ(dlfs_directory_attach_names(directory, made.names + 1, made.names_bytes), -EINVAL);
    CHECK_EQ(dlfs_directory_attach_names(directory, made.names, made.names_bytes), 0);
    CHECK_EQ(dlfs_directory_attach_names(directory, made.names, made.names_bytes), -EALREADY);
    /* as many as fit are returned, possibly none */
    CHECK_EQ(dlfs_directory_names(directory, 3, 17, text, TEXT_MAX, offsets), 2);
    CHECK_EQ(dlfs_directory_names(directory, 3, 17, text, 5, offsets), 0);
    CHECK_EQ(dlfs_directory_names(directory, 3, 18, text, TEXT_MAX, offsets), -EINVAL);
    CHECK_EQ(dlfs_directory_names_of(directory, indices, 3, text, TEXT_MAX, offsets), 2);
    CHECK_EQ(dlfs_directory_names_of(directory, indices, 3, text, 5, offsets), 0);
    CHECK_EQ(dlfs_directory_names_of(directory, indices + 3, 1, text, TEXT_MAX, offsets), -EINVAL);
    dlfs_directory_close(directory);
    free_segment(&made);
    free_samples(&set);
}

/* ---- what is refused ------------------------------------------------------------------------- */

/* Adds paths in two calls, split at `split`. Returns the rule that is broken, or 0. */
static uint32_t rule_of_paths(const char *text, const uint64_t *offsets, uint64_t count,
                              uint64_t split)
{
    static const dlfs_location locations[4];
    dlfs_directory_builder *builder = builder_of(0);
    dlfs_path_refusal refusal;
    const uint8_t *names = (const uint8_t *)text;
    int code =
        dlfs_directory_builder_add(builder, names, offsets, locations, NULL, split, &refusal);
    if (code == 0) {
        char *copy = strdup(text); /* the memory of the first call is gone */
        memset(copy, '!', offsets[split]);
        code = dlfs_directory_builder_add(builder, (const uint8_t *)copy, offsets + split,
                                          locations, NULL, count - split, &refusal);
        free(copy);
    }
    CHECK_EQ(code, refusal.rule == 0 ? 0 : -EINVAL);
    if (code < 0) { /* nothing but the end is possible */
        uint32_t rule = refusal.rule;
        CHECK_EQ(dlfs_directory_builder_add(builder, names, offsets, locations, NULL, 0, &refusal),
                 -EINVAL);
        refusal.rule = rule;
    }
    dlfs_directory_builder_destroy(builder);
    return refusal.rule;
}

static uint32_t rule_of_two(const char *first, const char *second)
{
    char text[2 * DLFS_PATH_BYTES_MAX + 8];
    const uint64_t offsets[3] = {0, strlen(first), strlen(first) + strlen(second)};
    memcpy(text, first, offsets[1]);
    memcpy(text + offsets[1], second, strlen(second) + 1);
    uint32_t rule = rule_of_paths(text, offsets, 2, 2);
    CHECK_EQ(rule_of_paths(text, offsets, 2, 1), rule);
    return rule;
}

static void test_bad_paths_are_refused(void)
{
    char component[DLFS_COMPONENT_BYTES_MAX + 2];
    static const char *const bad[] = {"", "/b", "b/", "b//c", "b/./c", "b/..", ".", "..", "b/."};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_EQ(rule_of_two("!", bad[i]), DLFS_PATH_MALFORMED);
    }
    CHECK_EQ(rule_of_two("a", "b"), 0);
    CHECK_EQ(rule_of_two("b", "a"), DLFS_PATH_UNSORTED);
    CHECK_EQ(rule_of_two("a", "a"), DLFS_PATH_REPEATED);
    CHECK_EQ(rule_of_two("ab", "a"), DLFS_PATH_UNSORTED);
    CHECK_EQ(rule_of_two("a", "ab"), 0);
    CHECK_EQ(rule_of_two("a", "a/b"), DLFS_PATH_BELOW_SAMPLE);
    CHECK_EQ(rule_of_two("...", ".a/..b"), 0);
    CHECK_EQ(rule_of_two(".a/..b", "b"), 0);
    memset(component, 'x', sizeof(component));
    component[DLFS_COMPONENT_BYTES_MAX] = 0;
    CHECK_EQ(rule_of_two("a", component), 0);
    component[DLFS_COMPONENT_BYTES_MAX] = 'x';
    component[DLFS_COMPONENT_BYTES_MAX + 1] = 0;
    CHECK_EQ(rule_of_two("a", component), DLFS_PATH_MALFORMED);
}

static void test_sample_cannot_be_a_directory(void)
{
    /* "a!" and "a." sort between "a" and "a/b". */
    static const char text[] = "aa!a.a/b";
    const uint64_t offsets[] = {0, 1, 3, 5, 8};
    for (uint64_t split = 0; split <= 4; split++) {
        CHECK_EQ(rule_of_paths(text, offsets, 4, split), DLFS_PATH_BELOW_SAMPLE);
    }
    CHECK_EQ(rule_of_paths(text, offsets, 3, 1), 0);
}

static void test_a_refusal_names_the_path(void)
{
    static const char text[] = "aa/b!a/b";
    const uint64_t offsets[] = {0, 1, 5, 8};
    static const dlfs_location locations[3];
    const uint64_t order[] = {0, 2};
    const uint64_t directory_offsets[] = {0, 2, 6};
    dlfs_path_refusal refusal;
    dlfs_directory_builder *builder = builder_of(0);
    CHECK_EQ(dlfs_directory_builder_add(builder, (const uint8_t *)text, offsets, locations, order,
                                        2, &refusal),
             -EINVAL);
    CHECK(refusal.rule == DLFS_PATH_BELOW_SAMPLE && refusal.index == 1 && !refusal.is_directory);
    CHECK_EQ(refusal.prefix_bytes, 1);
    dlfs_directory_builder_destroy(builder);
    builder = builder_of(0);
    CHECK_EQ(dlfs_directory_builder_add_directories(builder, (const uint8_t *)"a/b/c/",
                                                    directory_offsets, 2, &refusal),
             0);
    CHECK_EQ(dlfs_directory_builder_add(builder, (const uint8_t *)"b/c", offsets, locations, NULL,
                                        1, &refusal),
             0);
    dlfs_directory_segment built;
    CHECK_EQ(dlfs_directory_builder_finish(builder, NULL, 0, &refusal, &built), -EINVAL);
    CHECK(refusal.rule == DLFS_PATH_BELOW_SAMPLE && refusal.index == 1 && refusal.is_directory);
    CHECK_EQ(refusal.prefix_bytes, 1);
    CHECK_EQ(dlfs_directory_builder_finish(builder, NULL, 0, &refusal, &built), -EINVAL);
    dlfs_directory_builder_destroy(builder);
    dlfs_directory_builder_destroy(NULL);
}

static void test_bad_locations_are_refused(void)
{
    sample_set set = make_samples(10);
    CHECK_EQ(build_code(&set), 0);
    set.data_bytes = 0;
    CHECK_EQ(build_code(&set), -EINVAL);
    set.data_bytes = CHUNK_BYTES;
    dlfs_location *last = &set.locations[9];
    last->length_low = SAMPLE_BYTES + 1; /* not the last in order: overlaps its neighbour */
    CHECK_EQ(build_code(&set), -EINVAL);
    last->length_low = SAMPLE_BYTES;
    last->address |= UINT64_C(1) << 56; /* 4 GiB longer */
    CHECK_EQ(build_code(&set), -EINVAL);
    set.data_bytes = UINT64_C(2) * CHUNK_BYTES;
    last->address = CHUNK_BYTES - 1; /* neither in one chunk nor from the start of one on */
    CHECK_EQ(build_code(&set), -EINVAL);
    last->length_low = 0; /* samples without bytes may be anywhere */
    last->address = set.locations[0].address + 50;
    CHECK_EQ(build_code(&set), 0);
    free_samples(&set);
}

static void test_bad_sizes_are_refused(void)
{
    const dlfs_directory_config bad[] = {{.chunk_bytes = 0},
                                         {.chunk_bytes = 5000},
                                         {.chunk_bytes = DLFS_CHUNK_BYTES_MAX * 2},
                                         {.chunk_bytes = CHUNK_BYTES, .data_bytes = 1}};
    dlfs_directory_builder *builder = NULL;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_EQ(dlfs_directory_builder_create(&bad[i], &builder), -EINVAL);
    }
    CHECK(builder == NULL);
}

/* XXH64 of a path of 16 bytes is a bijection of either half: the second one that gives the same
 * hash as another path. */
static uint64_t rotate(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

static uint64_t mixed(uint64_t lane)
{
    return rotate(lane * UINT64_C(0xC2B2AE3D27D4EB4F), 31) * UINT64_C(0x9E3779B185EBCA87);
}

static uint64_t inverse(uint64_t odd)
{
    uint64_t found = odd;
    for (uint32_t i = 0; i < 6; i++) {
        found *= 2 - odd * found;
    }
    return found;
}

static uint64_t after_first(uint64_t lane)
{
    const uint64_t start = UINT64_C(0x27D4EB2F165667C5) + 16;
    return rotate(start ^ mixed(lane), 27) * UINT64_C(0x9E3779B185EBCA87) +
           UINT64_C(0x85EBCA77C2B2AE63);
}

/* Writes a path that begins with 8 given bytes and hashes as one that is all 'z' with seed 0. False
 * if it is no valid path. */
static bool collide(const char *beginning, uint8_t *path)
{
    uint64_t wanted;
    uint64_t first;
    memset(&wanted, 'z', 8);
    memcpy(&first, beginning, 8);
    uint64_t lane = (after_first(wanted) ^ mixed(wanted)) ^ after_first(first);
    lane = rotate(lane * inverse(UINT64_C(0x9E3779B185EBCA87)), 64 - 31) *
           inverse(UINT64_C(0xC2B2AE3D27D4EB4F));
    memcpy(path, beginning, 8);
    memcpy(path + 8, &lane, 8);
    return memchr(path, 0, 16) == NULL && memchr(path, '/', 16) == NULL;
}

/* With 16 equal hashes, a second seed is chosen; 15 are as many as may be. */
static void test_equal_hashes_take_another_seed(void)
{
    for (uint64_t count = 15; count <= 16; count++) {
        sample_set set = make_samples(count);
        char beginning[9] = "aaaaaaaa";
        for (uint64_t i = 0; i < count; beginning[7]++) {
            uint8_t *path = set.text + i * 16;
            if (collide(beginning, path)) {
                set.offsets[++i] = (uint64_t)(path - set.text) + 16;
                CHECK_EQ(dlfs_path_hash(path, 16, 0), dlfs_path_hash("zzzzzzzzzzzzzzzz", 16, 0));
            }
        }
        segment made = build(&set);
        CHECK_EQ(made.hash_seed, count == 16);
        CHECK_EQ(header_of(&made)->hash_seed, made.hash_seed);
        dlfs_directory *directory = open_segment(&made);
        check_found(directory, &set);
        dlfs_directory_close(directory);
        free_segment(&made);
        free_samples(&set);
    }
}

/* What is added in calls of any length gives the same bytes. */
static void test_calls_do_not_matter(void)
{
    sample_set set = make_samples(1000);
    segment whole = build(&set);
    const uint64_t steps[] = {1, 7, 16, 999};
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        dlfs_directory_builder *builder = builder_of(set.data_bytes);
        dlfs_path_refusal refusal;
        for (uint64_t first = 0; first < set.count; first += steps[i]) {
            uint64_t left = set.count - first;
            CHECK_EQ(add_samples(builder, &set, first, left < steps[i] ? left : steps[i], &refusal),
                     0);
        }
        segment made;
        CHECK_EQ(finish(builder, &set, &made), 0);
        CHECK_EQ(made.entries_bytes, whole.entries_bytes);
        CHECK_EQ(made.names_bytes, whole.names_bytes);
        CHECK(memcmp(made.entries, whole.entries, whole.entries_bytes) == 0);
        CHECK(memcmp(made.names, whole.names, whole.names_bytes) == 0);
        free_segment(&made);
    }
    free_segment(&whole);
    free_samples(&set);
}

/* ---- empty directories ----------------------------------------------------------------------- */

/* Builds a segment of a sample and a directory. Returns the rule that is broken, or 0, and sets
 * *count to the number of empty directories. */
static uint32_t rule_with_directory(const char *sample, const char *directory, uint64_t *count)
{
    const uint64_t offsets[2] = {0, strlen(sample)};
    const uint64_t directory_offsets[2] = {0, strlen(directory)};
    static const dlfs_location locations[1];
    dlfs_directory_builder *builder = builder_of(0);
    dlfs_directory_segment built = {.empty_count = 99};
    dlfs_path_refusal refusal;
    int code = dlfs_directory_builder_add_directories(builder, (const uint8_t *)directory,
                                                      directory_offsets, 1, &refusal);
    if (code == 0) {
        code = dlfs_directory_builder_add(builder, (const uint8_t *)sample, offsets, locations,
                                          NULL, 1, &refusal);
    }
    if (code == 0) {
        code = dlfs_directory_builder_finish(builder, NULL, 0, &refusal, &built);
    }
    CHECK_EQ(code, refusal.rule == 0 ? 0 : -EINVAL);
    CHECK(code == 0 || refusal.is_directory);
    *count = built.empty_count;
    dlfs_directory_builder_destroy(builder);
    return refusal.rule;
}

static void check_directory(const char *sample, const char *directory, uint32_t rule,
                            uint64_t expected)
{
    uint64_t count;
    CHECK_EQ(rule_with_directory(sample, directory, &count), rule);
    CHECK_EQ(count, rule == 0 ? expected : 99);
}

static void test_empty_directories_are_alone(void)
{
    check_directory("a/b", "a/c/", 0, 1);
    check_directory("a/b", "a-/", 0, 1);
    check_directory("a-b", "a/", 0, 1);
    check_directory("b", "a/", 0, 1);
    check_directory("a", "b", DLFS_PATH_MALFORMED, 0); /* no '/' behind it */
    check_directory("a", "b//", DLFS_PATH_MALFORMED, 0);
    check_directory("a", "/", DLFS_PATH_MALFORMED, 0);
    check_directory("a", "", DLFS_PATH_MALFORMED, 0);
    check_directory("a", "../", DLFS_PATH_MALFORMED, 0);
    check_directory("a", "a/", DLFS_PATH_BELOW_SAMPLE, 0);
    check_directory("a", "a/b/", DLFS_PATH_BELOW_SAMPLE, 0);
    check_directory("a/b", "a/", 0, 0); /* it is not empty */
    check_directory("a/b/c", "a/", 0, 0);
}

static void test_directories_come_sorted_and_first(void)
{
    const uint64_t offsets[] = {0, 2, 4, 6};
    static const dlfs_location locations[1];
    const uint8_t *text = (const uint8_t *)"b/a/a/";
    dlfs_path_refusal refusal;
    for (uint64_t first = 0; first < 2; first++) { /* one that is before, and an equal one */
        dlfs_directory_builder *builder = builder_of(0);
        CHECK_EQ(
            dlfs_directory_builder_add_directories(builder, text, offsets + first, 1, &refusal), 0);
        CHECK_EQ(
            dlfs_directory_builder_add_directories(builder, text, offsets + first + 1, 1, &refusal),
            -EINVAL);
        CHECK(refusal.rule == DLFS_PATH_UNSORTED && refusal.index == 1);
        dlfs_directory_builder_destroy(builder);
    }
    dlfs_directory_builder *builder = builder_of(0);
    CHECK_EQ(dlfs_directory_builder_add(builder, (const uint8_t *)"xx", offsets, locations, NULL, 1,
                                        &refusal),
             0);
    CHECK_EQ(dlfs_directory_builder_add_directories(builder, text, offsets, 1, &refusal), -EINVAL);
    dlfs_directory_builder_destroy(builder);
}

/* Those of many blocks are found and decoded, and searched apart from the samples. */
static void test_empty_directories_are_found(void)
{
    sample_set set = make_samples(100);
    dlfs_directory_builder *builder = builder_of(set.data_bytes);
    dlfs_path_refusal refusal;
    char text[40 * 8];
    uint64_t offsets[41] = {0};
    for (uint64_t i = 0; i < 40; i++) {
        offsets[i + 1] =
            offsets[i] + (uint64_t)snprintf(text + offsets[i], 8, "e%02u/x/", (unsigned)i);
    }
    segment made;
    CHECK_EQ(dlfs_directory_builder_add_directories(builder, (const uint8_t *)text, offsets, 40,
                                                    &refusal),
             0);
    CHECK_EQ(add_samples(builder, &set, 0, set.count, &refusal), 0);
    CHECK_EQ(finish(builder, &set, &made), 0);
    dlfs_directory *directory = open_segment(&made);
    check_found(directory, &set);
    check_names(directory, &set);
    CHECK_EQ(dlfs_directory_empty_count(directory), 40);
    uint8_t decoded[40 * 8];
    uint64_t ends[41];
    CHECK_EQ(dlfs_directory_empty_names(directory, 3, 37, decoded, sizeof(decoded), ends), 37);
    CHECK(memcmp(decoded, text + offsets[3], offsets[40] - offsets[3]) == 0);
    CHECK_EQ(dlfs_directory_empty_names(directory, 3, 38, decoded, sizeof(decoded), ends), -EINVAL);
    for (uint64_t i = 0; i < 40; i++) {
        const uint8_t *path = (const uint8_t *)text + offsets[i];
        uint64_t number;
        CHECK_EQ(dlfs_directory_empty_lower_bound(directory, path, 4, &number), 0);
        CHECK_EQ(number, i);
        CHECK_EQ(dlfs_directory_empty_lower_bound(directory, path, 7, &number), 0);
        CHECK_EQ(number, i + 1);
    }
    dlfs_directory_close(directory);
    free_segment(&made);
    free_samples(&set);
}

/* ---- equal hashes and wide indices ----------------------------------------------------------- */

/*
 * Equal hashes can straddle two leaves. No paths are known that show it, so the tree is given them
 * by hand: the samples of the last slots of leaf 0 and the first of leaf 1 get the hash of one of
 * them.
 */
static void test_equal_hashes_straddle_leaves(void)
{
    sample_set set = make_samples(32);
    segment made = build(&set);
    dlfs_directory_header *header = header_of(&made);
    uint32_t *left = (uint32_t *)(made.entries + header->leaves_offset);
    uint32_t *right = left + 32;
    uint64_t *separators = (uint64_t *)(made.entries + header->separators_offset);
    uint32_t moved = right[16]; /* the sample in the first entry of leaf 1 */
    right[16] = left[16 + 15];  /* exchanged with the last one of leaf 0 ... */
    left[16 + 15] = moved;
    left[15] = (uint32_t)separators[1]; /* ... which has the hash that leaf 1 begins with */
    seal(&made);
    dlfs_directory *directory = open_segment(&made);
    const uint64_t offsets[2] = {0, set.offsets[moved + 1] - set.offsets[moved]};
    uint64_t out;
    CHECK_EQ(dlfs_directory_find(directory, set.text + set.offsets[moved], offsets, 1, &out), 0);
    CHECK_EQ(out, moved);
    dlfs_directory_close(directory);
    free_segment(&made);
    free_samples(&set);
}

static int layout_of(uint64_t sample_count, uint64_t names_bytes, dlfs_directory_layout *layout)
{
    const dlfs_directory_counts counts = {.sample_count = sample_count, .names_bytes = names_bytes};
    return dlfs_directory_layout_compute(&counts, layout);
}

static void test_layout_beyond_32_bits(void)
{
    dlfs_directory_layout layout;
    CHECK_EQ(layout_of(UINT32_MAX - 1, 4096, &layout), 0);
    CHECK_EQ(layout.index_bytes, 4);
    CHECK_EQ(layout_of(UINT32_MAX, 4096, &layout), 0);
    CHECK_EQ(layout.index_bytes, 8);
    CHECK_EQ(layout_of(UINT64_C(1) << 40, UINT64_C(1) << 44, &layout), 0);
    CHECK(layout.entries_bytes > (UINT64_C(36) << 40));
    CHECK(layout.entries_bytes < (UINT64_C(37) << 40) + (UINT64_C(1) << 35));
    CHECK_EQ(layout_of(DLFS_DIRECTORY_SAMPLES_MAX, DLFS_DIRECTORY_NAMES_BYTES_MAX, &layout), 0);
    CHECK(layout.level_count <= DLFS_DIRECTORY_LEVELS_MAX);
    CHECK_EQ(layout_of(DLFS_DIRECTORY_SAMPLES_MAX + 1, 4096, &layout), -EINVAL);
    CHECK_EQ(layout_of(1, DLFS_DIRECTORY_NAMES_BYTES_MAX + 1, &layout), -EINVAL);
}

/* Indices of 8 bytes, without four billion samples: a small directory laid out by hand as a large
 * one would be. */
static void test_wide_indices(void)
{
    _Alignas(64) uint8_t leaf[16 * 12] = {0};
    uint64_t order[3] = {2, 0, 1};
    uint64_t separators[16];
    sample_set set = make_samples(3);
    segment made = build(&set);
    dlfs_directory *plain = open_segment(&made);
    dlfs_directory wide = *plain;
    for (uint32_t slot = 0; slot < 16; slot++) {
        uint32_t fingerprint = ((const uint32_t *)plain->leaves)[slot];
        uint32_t index = ((const uint32_t *)plain->leaves)[16 + slot];
        uint64_t stored = index == UINT32_MAX ? UINT64_MAX : index;
        memcpy(leaf + slot * 4, &fingerprint, 4);
        memcpy(leaf + 64 + slot * 8, &stored, 8);
    }
    memcpy(separators, plain->separators, sizeof(separators));
    wide.layout.index_bytes = 8;
    wide.layout.leaf_bytes = sizeof(leaf);
    wide.leaves = leaf;
    wide.order = order;
    wide.separators = separators;
    check_found(&wide, &set);
    CHECK_EQ(dlfs_directory_order_at(&wide, 0), 2);
    uint64_t got[3];
    CHECK_EQ(dlfs_directory_order(&wide, 0, 3, got), 0);
    CHECK_EQ(got[2], 1);
    dlfs_directory_close(plain);
    free_segment(&made);
    free_samples(&set);
}

/* ---- damage and malice ----------------------------------------------------------------------- */

static void test_open_refuses(void)
{
    sample_set set = make_samples(100);
    segment made = build(&set);
    dlfs_directory_header *header = header_of(&made);
    dlfs_directory_header good = *header;
    dlfs_directory *directory = NULL;
    uint64_t bytes = made.entries_bytes;

    CHECK_EQ(dlfs_directory_open(made.entries, 100, &directory), DLFS_E_TRUNCATED);
    CHECK_EQ(dlfs_directory_open(made.entries, bytes - 1, &directory), DLFS_E_TRUNCATED);
    CHECK_EQ(dlfs_directory_open(made.entries + 8, bytes, &directory), -EINVAL);
    header->magic[0] ^= 1;
    CHECK_EQ(dlfs_directory_open(made.entries, bytes, &directory), DLFS_E_FORMAT);
    *header = good;
    header->data_bytes ^= 1;
    CHECK_EQ(dlfs_directory_open(made.entries, bytes, &directory), DLFS_E_CHECKSUM);
    *header = good;
    made.entries[header->entries_checksums_offset] ^= 1;
    CHECK_EQ(dlfs_directory_open(made.entries, bytes, &directory), DLFS_E_CHECKSUM);
    made.entries[header->entries_checksums_offset] ^= 1;
    /* Each 4 bytes of the header in turn, invalid, with a right checksum. */
    for (size_t at = 8; at < offsetof(dlfs_directory_header, reserved); at += 4) {
        if ((at >= 16 && at < 32) ||
            (at >= 40 && at < 56)) { /* UUID, data_bytes, hash_seed: other values are valid */
            continue;
        }
        *header = good;
        memset((uint8_t *)header + at, 0xff, 4);
        header->header_crc32c =
            dlfs_crc32c(0, header, offsetof(dlfs_directory_header, header_crc32c));
        int code = dlfs_directory_open(made.entries, bytes, &directory);
        bool tables = at == offsetof(dlfs_directory_header, tables_crc32c);
        CHECK(tables ? code == DLFS_E_CHECKSUM : code == DLFS_E_FORMAT || code == DLFS_E_TRUNCATED);
    }
    CHECK(directory == NULL);
    free_segment(&made);
    free_samples(&set);
}

/* Calls every function; each result must be an error or within bounds. */
static void ask_everything(segment *made, const sample_set *set)
{
    dlfs_directory *directory;
    if (dlfs_directory_open(made->entries, made->entries_bytes, &directory) < 0) {
        return;
    }
    CHECK_EQ(dlfs_directory_attach_names(directory, made->names, made->names_bytes), 0);
    uint64_t *out = malloc((set->count + 1) * sizeof(uint64_t));
    uint8_t *text = malloc(UINT64_C(1) << 16);
    if (dlfs_directory_find(directory, set->text, set->offsets, set->count, out) == 0) {
        for (uint64_t i = 0; i < set->count; i++) {
            CHECK(out[i] < set->count || out[i] == UINT64_MAX);
        }
    }
    if (dlfs_directory_order(directory, 0, set->count, out) == 0) {
        for (uint64_t i = 0; i < set->count; i++) {
            CHECK(out[i] < set->count);
        }
    }
    int64_t got = dlfs_directory_names(directory, 0, set->count, text, UINT64_C(1) << 16, out);
    CHECK(got <= (int64_t)set->count);
    const uint64_t last = set->count - 1;
    CHECK(dlfs_directory_names_of(directory, &last, 1, text, UINT64_C(1) << 16, out) <= 1);
    for (uint64_t i = 0; i < set->count; i += 17) {
        uint64_t index;
        CHECK(dlfs_directory_rank_at(directory, i * SAMPLE_BYTES) <= set->count);
        if (dlfs_directory_lower_bound(directory, set->text + set->offsets[i],
                                       set->offsets[i + 1] - set->offsets[i], &index) == 0) {
            CHECK(index <= set->count);
        }
    }
    free(text);
    free(out);
    dlfs_directory_close(directory);
}

static void test_wild_bytes_stay_in_bounds(void)
{
    static const uint8_t wild[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    sample_set set = make_samples(600);
    segment good = build(&set);
    segment bad = {.entries = allocate(good.entries_bytes),
                   .names = allocate(good.names_bytes),
                   .entries_bytes = good.entries_bytes,
                   .names_bytes = good.names_bytes};
    uint64_t sections = header_of(&good)->locations_offset;
    uint64_t state = 88172645463325252;
    for (uint32_t round = 0; round < 3000; round++) {
        memcpy(bad.entries, good.entries, good.entries_bytes);
        memcpy(bad.names, good.names, good.names_bytes);
        uint64_t changes = 1 + next_random(&state) % 30;
        for (uint64_t i = 0; i < changes; i++) {
            bool names = next_random(&state) % 2;
            uint64_t bytes = names ? bad.names_bytes : bad.entries_bytes - sections;
            uint8_t *base = names ? bad.names : bad.entries + sections;
            uint64_t width = UINT64_C(1) << next_random(&state) % 5;
            uint64_t at = next_random(&state) % (bytes - width);
            memset(base + at, wild[next_random(&state) % sizeof(wild)], width);
        }
        seal(&bad);
        ask_everything(&bad, &set);
    }
    free_segment(&bad);
    free_segment(&good);
    free_samples(&set);
}

int main(void)
{
    test_round_trip();
    test_absent_paths_are_not_found();
    test_names_come_later();
    test_bad_paths_are_refused();
    test_sample_cannot_be_a_directory();
    test_a_refusal_names_the_path();
    test_bad_locations_are_refused();
    test_bad_sizes_are_refused();
    test_calls_do_not_matter();
    test_equal_hashes_take_another_seed();
    test_empty_directories_are_alone();
    test_directories_come_sorted_and_first();
    test_empty_directories_are_found();
    test_equal_hashes_straddle_leaves();
    test_layout_beyond_32_bits();
    test_wide_indices();
    test_open_refuses();
    test_wild_bytes_stay_in_bounds();
    return 0;
}
