/* Tests the tree of a native mount: look-ups, parents, listings, and numbers of another mount. */
#include <dlfs/dlfs.h>
#include <dlfs/import.h>

#include <errno.h>
#include <string.h>

#include "check.h"
#include "tree.h"

static const char *const PATHS[] = {"a", "b-x", "b/c", "b/d/e", "b/d/f", "b/g", "x/y"};
#define PATH_COUNT (sizeof PATHS / sizeof *PATHS)
static const char *const EMPTY[] = {"b/e/f/", "c/", "m/n/", "m/o/p/", "x/q/"};
#define EMPTY_COUNT (sizeof EMPTY / sizeof *EMPTY)

struct fixture {
    dlfs_directory *directory;
    dlfs_directory_builder *builder;
};

static void pack_paths(const char *const *paths, uint64_t count, uint8_t *text, uint64_t *offsets)
{
    for (uint64_t i = 0; i < count; i++) {
        size_t bytes = strlen(paths[i]);
        memcpy(text + offsets[i], paths[i], bytes);
        offsets[i + 1] = offsets[i] + bytes;
    }
}

static void fixture_create(struct fixture *fixture)
{
    uint8_t text[256];
    uint64_t offsets[PATH_COUNT + 1] = {0};
    uint8_t empty_text[256];
    uint64_t empty_offsets[EMPTY_COUNT + 1] = {0};
    const dlfs_location locations[PATH_COUNT] = {{0}};
    pack_paths(PATHS, PATH_COUNT, text, offsets);
    pack_paths(EMPTY, EMPTY_COUNT, empty_text, empty_offsets);
    const dlfs_directory_config config = {
        .data_bytes = 4096, .chunk_bytes = 4096, .dataset_uuid = {7}};
    dlfs_directory_segment segment;
    dlfs_path_refusal refusal;
    CHECK_EQ(dlfs_directory_builder_create(&config, &fixture->builder), 0);
    CHECK_EQ(dlfs_directory_builder_add_directories(fixture->builder, empty_text, empty_offsets,
                                                    EMPTY_COUNT, &refusal),
             0);
    CHECK_EQ(dlfs_directory_builder_add(fixture->builder, text, offsets, locations, NULL,
                                        PATH_COUNT, &refusal),
             0);
    CHECK_EQ(dlfs_directory_builder_finish(fixture->builder, NULL, 0, &refusal, &segment), 0);
    CHECK_EQ(segment.empty_count, EMPTY_COUNT);
    CHECK_EQ(dlfs_directory_open(segment.entries, segment.entries_bytes, &fixture->directory), 0);
    CHECK_EQ(dlfs_directory_attach_names(fixture->directory, segment.names, segment.names_bytes),
             0);
}

static void fixture_destroy(struct fixture *fixture)
{
    dlfs_directory_close(fixture->directory);
    dlfs_directory_builder_destroy(fixture->builder);
}

static const struct tree_node TOP = {DATASET_DEPTH, 0};

static struct tree_node child_of(const struct fixture *fixture, struct tree_node parent,
                                 const char *name)
{
    struct tree_node node = {0};
    CHECK_EQ(tree_child(fixture->directory, parent, name, &node), 0);
    return node;
}

static void check_node(struct tree_node node, uint32_t depth, uint64_t index)
{
    CHECK_EQ(node.depth, depth);
    CHECK_EQ(node.index, index);
}

static void test_numbers_are_reversible(void)
{
    struct tree_node node = {DEPTH_MAX, INDEX_MAX};
    struct inode inode = inode_unpack(inode_pack(65535, node));
    CHECK_EQ(inode.dataset, 65535);
    check_node(inode.node, DEPTH_MAX, INDEX_MAX);
    CHECK_EQ(inode_unpack(ROOT_INODE).dataset, 0);
}

static void test_children_are_found(const struct fixture *fixture)
{
    struct tree_node b = child_of(fixture, TOP, "b");
    struct tree_node d = child_of(fixture, b, "d");
    check_node(child_of(fixture, TOP, "a"), FILE_DEPTH, 0);
    check_node(child_of(fixture, TOP, "b-x"), FILE_DEPTH, 1);
    check_node(b, 2, 2);
    check_node(d, 3, 3);
    check_node(child_of(fixture, d, "f"), FILE_DEPTH, 4);
    struct tree_node node;
    static const char *const absent[] = {"", "aa", "b-", "cc", "y", "zz"};
    for (uint32_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        CHECK_EQ(tree_child(fixture->directory, TOP, absent[i], &node), -ENOENT);
    }
    CHECK_EQ(tree_child(fixture->directory, d, "c", &node), -ENOENT);
    struct tree_node m = child_of(fixture, TOP, "m");
    check_node(child_of(fixture, TOP, "c"), 2, PATH_COUNT + 1);
    check_node(m, 2, PATH_COUNT + 2);
    check_node(child_of(fixture, m, "o"), 3, PATH_COUNT + 3);
    check_node(child_of(fixture, child_of(fixture, m, "o"), "p"), 4, PATH_COUNT + 3);
    check_node(child_of(fixture, b, "e"), 3, PATH_COUNT);
    CHECK_EQ(tree_child(fixture->directory, m, "p", &node), -ENOENT);
    CHECK_EQ(tree_child(fixture->directory, (struct tree_node){FILE_DEPTH, 0}, "x", &node),
             -ENOTDIR);
    CHECK_EQ(tree_child(fixture->directory, (struct tree_node){2, 99}, "x", &node), -ESTALE);
    CHECK_EQ(tree_child(fixture->directory, (struct tree_node){3, 0}, "x", &node), -ESTALE);
}

static void test_parents_are_found(const struct fixture *fixture)
{
    struct tree_node node;
    CHECK_EQ(tree_parent(fixture->directory, (struct tree_node){FILE_DEPTH, 4}, &node), 0);
    check_node(node, 3, 3);
    CHECK_EQ(tree_parent(fixture->directory, node, &node), 0);
    check_node(node, 2, 2);
    CHECK_EQ(tree_parent(fixture->directory, node, &node), 0);
    check_node(node, DATASET_DEPTH, 0);
    CHECK_EQ(tree_parent(fixture->directory, node, &node), 0);
    check_node(node, DATASET_DEPTH, 0);
    CHECK_EQ(tree_parent(fixture->directory, (struct tree_node){FILE_DEPTH, 99}, &node), -ESTALE);
    CHECK_EQ(tree_parent(fixture->directory, (struct tree_node){FILE_DEPTH, PATH_COUNT}, &node),
             -ESTALE);
    CHECK_EQ(tree_parent(fixture->directory, (struct tree_node){4, PATH_COUNT + 3}, &node), 0);
    check_node(node, 3, PATH_COUNT + 3);
    CHECK_EQ(tree_parent(fixture->directory, node, &node), 0);
    check_node(node, 2, PATH_COUNT + 2);
    CHECK_EQ(tree_parent(fixture->directory, (struct tree_node){3, PATH_COUNT}, &node), 0);
    check_node(node, 2, 2); /* "b", which has samples, too */
}

/* Lists from a position on and compares the names, joined by spaces. */
static void check_listing(const struct fixture *fixture, struct tree_node node, uint64_t position,
                          const char *expected)
{
    static struct listing listing;
    char listed[256] = "";
    struct child child;
    CHECK_EQ(listing_begin(fixture->directory, node, &listing), 0);
    while (listing_child(&listing, position, &child) > 0) {
        strncat(listed, child.name, sizeof listed - strlen(listed) - 1);
        strncat(listed, " ", sizeof listed - strlen(listed) - 1);
        CHECK(child.next > position);
        position = child.next;
    }
    CHECK(strcmp(listed, expected) == 0);
}

static void test_listings(const struct fixture *fixture)
{
    struct tree_node b = child_of(fixture, TOP, "b");
    check_listing(fixture, TOP, 0, "a b-x b x c m ");
    check_listing(fixture, TOP, 1, "b-x b x c m ");
    check_listing(fixture, TOP, 6, "x c m ");
    check_listing(fixture, TOP, 7, "c m ");
    check_listing(fixture, TOP, PATH_COUNT + 2, "m ");
    check_listing(fixture, TOP, PATH_COUNT + 4, "");
    check_listing(fixture, child_of(fixture, TOP, "c"), 0, "");
    check_listing(fixture, child_of(fixture, TOP, "m"), 0, "n o ");
    check_listing(fixture, child_of(fixture, TOP, "x"), 0, "y q ");
    check_listing(fixture, child_of(fixture, b, "e"), 0, "f ");
    check_listing(fixture, b, 0, "c d g e ");
    check_listing(fixture, b, 3, "d g e ");
    check_listing(fixture, child_of(fixture, b, "d"), 0, "e f ");
    static struct listing listing;
    CHECK_EQ(listing_begin(fixture->directory, (struct tree_node){FILE_DEPTH, 0}, &listing),
             -ENOTDIR);
    CHECK_EQ(listing_begin(fixture->directory, (struct tree_node){2, 50}, &listing), -ESTALE);
}

/* An index that is not the first of a directory: an error or a part of it, never names outside. */
static void test_invented_numbers(const struct fixture *fixture)
{
    static struct listing listing;
    for (uint32_t depth = 1; depth < 6; depth++) {
        for (uint64_t index = 0; index < PATH_COUNT + EMPTY_COUNT + 2; index++) {
            struct tree_node node = {depth, index};
            struct child child;
            uint64_t position = 0;
            if (listing_begin(fixture->directory, node, &listing) < 0) {
                continue;
            }
            while (listing_child(&listing, position, &child) > 0) {
                position = child.next;
            }
            CHECK(position <= PATH_COUNT + EMPTY_COUNT);
        }
    }
}

int main(void)
{
    struct fixture fixture;
    fixture_create(&fixture);
    test_numbers_are_reversible();
    test_children_are_found(&fixture);
    test_parents_are_found(&fixture);
    test_listings(&fixture);
    test_invented_numbers(&fixture);
    fixture_destroy(&fixture);
    return 0;
}
