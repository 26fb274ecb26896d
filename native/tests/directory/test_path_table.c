/*
 * The table of paths: what is added is found, a call that is refused leaves nothing, also when the
 * index grows in it, and directories are empty until something is added below them.
 */
#include <dlfs/import.h>

#include <errno.h>
#include <string.h>

#include "check.h"

#define TEXT_MAX 64u

/* Paths and their locations, which a call adds. */
struct batch {
    uint64_t count;
    char *text;
    uint64_t *offsets;
    dlfs_location *locations;
};

/* "PREFIX/00/000017" and so on, from `first` on, a hundred to a directory. */
static struct batch make_batch(const char *prefix, uint64_t first, uint64_t count)
{
    struct batch batch = {.count = count};
    batch.text = malloc((count + 1) * TEXT_MAX);
    batch.offsets = calloc(count + 1, sizeof(*batch.offsets));
    batch.locations = calloc(count + 1, sizeof(*batch.locations));
    for (uint64_t i = 0; i < count; i++) {
        char *at = batch.text + batch.offsets[i];
        unsigned long long number = first + i;
        batch.offsets[i + 1] =
            batch.offsets[i] +
            (uint64_t)snprintf(at, TEXT_MAX, "%s/%02llu/%06llu", prefix, number / 100, number);
        batch.locations[i].crc32c = (uint32_t)number;
    }
    return batch;
}

static void free_batch(struct batch *batch)
{
    free(batch->text);
    free(batch->offsets);
    free(batch->locations);
}

static int add(dlfs_path_table *table, const struct batch *batch, dlfs_path_refusal *refusal)
{
    return dlfs_path_table_add(table, (const uint8_t *)batch->text, batch->offsets,
                               batch->locations, batch->count, refusal);
}

/* Returns the rule that a path breaks as the last one of a call of some other paths; 0: none. */
static uint32_t rule_of(dlfs_path_table *table, const char *path, uint64_t others)
{
    struct batch batch = make_batch("other", 0, others);
    dlfs_path_refusal refusal;
    dlfs_path_table_view view;
    dlfs_path_table_get_view(table, &view);
    uint64_t before = view.count;
    uint64_t bytes = strlen(path);
    memcpy(batch.text + batch.offsets[others], path, bytes);
    batch.offsets = realloc(batch.offsets, (others + 2) * sizeof(*batch.offsets));
    batch.offsets[others + 1] = batch.offsets[others] + bytes;
    batch.count++;
    int code = dlfs_path_table_add(table, (const uint8_t *)batch.text, batch.offsets, NULL,
                                   batch.count, &refusal);
    CHECK_EQ(code, refusal.rule == 0 ? 0 : -EINVAL);
    CHECK(code == 0 || refusal.index == others);
    dlfs_path_table_get_view(table, &view);
    CHECK_EQ(view.count, before);
    for (uint64_t i = 0; i < others; i++) {
        uint64_t row;
        CHECK_EQ(dlfs_path_table_find(table, (const uint8_t *)batch.text + batch.offsets[i],
                                      batch.offsets[i + 1] - batch.offsets[i], &row),
                 0);
    }
    free_batch(&batch);
    return refusal.rule;
}

static void check_found(dlfs_path_table *table, const struct batch *batch, uint64_t first)
{
    for (uint64_t i = 0; i < batch->count; i++) {
        uint64_t row;
        CHECK_EQ(dlfs_path_table_find(table, (const uint8_t *)batch->text + batch->offsets[i],
                                      batch->offsets[i + 1] - batch->offsets[i], &row),
                 1);
        CHECK_EQ(row, first + i);
    }
}

static void test_what_is_added_is_found(void)
{
    dlfs_path_table *table;
    dlfs_path_refusal refusal;
    dlfs_path_table_view view;
    CHECK_EQ(dlfs_path_table_create(&table), 0);
    struct batch whole = make_batch("a", 0, 5000);
    for (uint64_t first = 0; first < 5000; first += 500) {
        struct batch batch = make_batch("a", first, 500);
        CHECK_EQ(add(table, &batch, &refusal), 0);
        CHECK_EQ(add(table, &batch, &refusal), -EINVAL);
        CHECK_EQ(refusal.rule, DLFS_PATH_REPEATED);
        free_batch(&batch);
    }
    check_found(table, &whole, 0);
    dlfs_path_table_get_view(table, &view);
    CHECK_EQ(view.count, 5000);
    CHECK_EQ(view.offsets[5000], whole.offsets[5000]);
    CHECK(memcmp(view.names, whole.text, whole.offsets[5000]) == 0);
    CHECK_EQ(view.locations[4321].crc32c, 4321);
    dlfs_path_table_shrink(table);
    check_found(table, &whole, 0);
    free_batch(&whole);
    dlfs_path_table_destroy(table);
    dlfs_path_table_destroy(NULL);
}

static void test_a_refused_call_leaves_nothing(void)
{
    const uint64_t counts[] = {0, 1, 7, 8, 9, 60, 5000}; /* the last one makes the index grow */
    dlfs_path_table *table;
    dlfs_path_refusal refusal;
    CHECK_EQ(dlfs_path_table_create(&table), 0);
    struct batch batch = make_batch("a", 0, 300);
    CHECK_EQ(add(table, &batch, &refusal), 0);
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        CHECK_EQ(rule_of(table, "a/01/000123", counts[i]), DLFS_PATH_REPEATED);
        CHECK_EQ(rule_of(table, "a/01", counts[i]), DLFS_PATH_IS_DIRECTORY);
        CHECK_EQ(rule_of(table, "a", counts[i]), DLFS_PATH_IS_DIRECTORY);
        CHECK_EQ(rule_of(table, "a/01/000123/x/y", counts[i]), DLFS_PATH_BELOW_SAMPLE);
        CHECK_EQ(rule_of(table, "a//b", counts[i]), DLFS_PATH_MALFORMED);
        CHECK_EQ(rule_of(table, "", counts[i]), DLFS_PATH_MALFORMED);
        CHECK_EQ(rule_of(table, "b", counts[i]), 0); /* only checked */
    }
    CHECK_EQ(rule_of(table, "other/00/000003", 9), DLFS_PATH_REPEATED);
    CHECK_EQ(rule_of(table, "other/00", 9), DLFS_PATH_IS_DIRECTORY);
    CHECK_EQ(rule_of(table, "other", 9), DLFS_PATH_IS_DIRECTORY);
    CHECK_EQ(rule_of(table, "other/00/000003/x", 9), DLFS_PATH_BELOW_SAMPLE);
    check_found(table, &batch, 0);
    const uint64_t offsets[] = {0, 5};
    CHECK_EQ(
        dlfs_path_table_add(table, (const uint8_t *)"other", offsets, batch.locations, 1, &refusal),
        0); /* no call left a directory behind */
    const uint64_t falling[] = {1, 0};
    CHECK_EQ(
        dlfs_path_table_add(table, (const uint8_t *)"x", falling, batch.locations, 1, &refusal),
        -EINVAL);
    CHECK_EQ(refusal.rule, 0);
    free_batch(&batch);
    dlfs_path_table_destroy(table);
}

static uint32_t rule_of_directory(dlfs_path_table *table, const char *path)
{
    dlfs_path_refusal refusal;
    int code = dlfs_path_table_add_directory(table, (const uint8_t *)path, strlen(path), &refusal);
    CHECK_EQ(code, refusal.rule == 0 ? 0 : -EINVAL);
    return refusal.rule;
}

static void check_empty(const dlfs_path_table *table, const char *expected)
{
    uint8_t text[64];
    uint64_t offsets[9];
    uint64_t bytes;
    uint64_t count =
        dlfs_path_table_empty_directories(table, text, sizeof(text), offsets, 8, &bytes);
    CHECK_EQ(bytes, strlen(expected));
    CHECK(memcmp(text, expected, bytes) == 0);
    CHECK(count == 0 || offsets[count] == bytes);
    CHECK_EQ(dlfs_path_table_empty_directories(table, NULL, 0, NULL, 0, &bytes), count);
}

static void test_directories_are_empty_until_filled(void)
{
    dlfs_path_table *table;
    const dlfs_location location = {.address = 0};
    dlfs_path_refusal refusal;
    CHECK_EQ(dlfs_path_table_create(&table), 0);
    CHECK_EQ(rule_of_directory(table, "a/b"), 0);
    CHECK_EQ(rule_of_directory(table, "a"), 0);
    CHECK_EQ(rule_of_directory(table, "c"), 0);
    CHECK_EQ(rule_of_directory(table, "c"), 0);
    CHECK_EQ(rule_of_directory(table, "c/"), DLFS_PATH_MALFORMED);
    check_empty(table, "a/b/c/");
    CHECK_EQ(rule_of(table, "a/b/x", 3), 0); /* only checked: it fills no directory */
    check_empty(table, "a/b/c/");
    CHECK_EQ(rule_of(table, "c", 3), DLFS_PATH_IS_DIRECTORY);
    const uint64_t offsets[] = {0, 5, 8};
    CHECK_EQ(
        dlfs_path_table_add(table, (const uint8_t *)"a/b/xc/.", offsets, &location, 2, &refusal),
        -EINVAL); /* the first path filled a directory, which is empty again */
    check_empty(table, "a/b/c/");
    CHECK_EQ(dlfs_path_table_add(table, (const uint8_t *)"a/b/x", offsets, &location, 1, &refusal),
             0);
    check_empty(table, "c/");
    CHECK_EQ(rule_of_directory(table, "a/b/x"), DLFS_PATH_BELOW_SAMPLE);
    CHECK_EQ(rule_of_directory(table, "a/b/x/y"), DLFS_PATH_BELOW_SAMPLE);
    CHECK_EQ(rule_of_directory(table, "c/d/e"), 0);
    check_empty(table, "c/d/e/");
    dlfs_path_table_destroy(table);
}

int main(void)
{
    test_what_is_added_is_found();
    test_a_refused_call_leaves_nothing();
    test_directories_are_empty_until_filled();
    return 0;
}
