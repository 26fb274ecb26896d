/*
 * Converts paths to nodes and back, by looking paths up in the directory and by bisecting its
 * names.
 *
 * Bytes from media are not trusted: a name is copied only if it fits, and a listing that would not
 * advance is an error.
 */
#include "tree.h"

#include <errno.h>
#include <string.h>

#define AFTER_SLASH '0' /* the byte after '/': prefix + this byte bounds a directory's range */
#define NAME_BYTES_MAX 255u

_Static_assert(AFTER_SLASH == '/' + 1, "ranges of directories");
_Static_assert(LIST_TEXT_BYTES >= DLFS_PATH_BYTES_MAX, "at least one name fits");

/* A path that is being built, with room for a slash. */
struct path {
    uint32_t bytes;
    uint8_t text[PATH_TEXT_BYTES];
};

/* Gets the path of a sample. */
static int path_of(const dlfs_directory *directory, uint64_t index, struct path *path)
{
    uint64_t offsets[2];
    if (index >= dlfs_directory_count(directory)) {
        return -ESTALE;
    }
    int64_t fitted =
        dlfs_directory_names(directory, index, 1, path->text, sizeof path->text, offsets);
    if (fitted < 0) {
        return (int)fitted;
    }
    path->bytes = fitted == 1 ? (uint32_t)offsets[1] : 0;
    return 0;
}

/* Cuts a path after its count-th slash. Returns false if it has fewer. */
static bool path_cut(struct path *path, uint32_t count)
{
    uint32_t at = 0;
    for (; count > 0 && at < path->bytes; at++) {
        count -= path->text[at] == '/';
    }
    path->bytes = at;
    return count == 0;
}

static uint32_t path_slashes(const struct path *path)
{
    uint32_t count = 0;
    for (uint32_t at = 0; at < path->bytes; at++) {
        count += path->text[at] == '/';
    }
    return count;
}

/* Gets the prefix of all paths below a directory: nothing, or its path and a slash. */
static int prefix_of(const dlfs_directory *directory, struct tree_node node, struct path *path)
{
    path->bytes = 0;
    if (node.depth == FILE_DEPTH) {
        return -ENOTDIR;
    }
    if (node.depth == DATASET_DEPTH) {
        return 0;
    }
    int code = path_of(directory, node.index, path);
    if (code < 0) {
        return code;
    }
    return path_cut(path, node.depth - 1) ? 0 : -ESTALE;
}

/* Returns 1 if a sample's path starts with these bytes, 0 if not, or an error code. */
static int starts_with(const dlfs_directory *directory, uint64_t index, const struct path *start)
{
    struct path path;
    int code = path_of(directory, index, &path);
    if (code < 0) {
        return code;
    }
    return path.bytes >= start->bytes && memcmp(path.text, start->text, start->bytes) == 0;
}

int tree_child(const dlfs_directory *directory, struct tree_node parent, const char *name,
               struct tree_node *out)
{
    struct path path;
    int code = prefix_of(directory, parent, &path);
    if (code < 0) {
        return code;
    }
    size_t name_bytes = strlen(name);
    if (path.bytes + name_bytes > DLFS_PATH_BYTES_MAX) {
        return -ENOENT;
    }
    memcpy(path.text + path.bytes, name, name_bytes);
    path.bytes += (uint32_t)name_bytes;
    const uint64_t offsets[2] = {0, path.bytes};
    uint64_t index;
    code = dlfs_directory_find(directory, path.text, offsets, 1, &index);
    if (code < 0) {
        return code;
    }
    if (index != UINT64_MAX) {
        *out = (struct tree_node){FILE_DEPTH, index};
        return 0;
    }
    path.text[path.bytes++] = '/';
    code = dlfs_directory_lower_bound(directory, path.text, path.bytes, &index);
    if (code < 0) {
        return code;
    }
    if (index >= dlfs_directory_count(directory) || parent.depth == DEPTH_MAX) {
        return -ENOENT;
    }
    code = starts_with(directory, index, &path);
    if (code <= 0) {
        return code < 0 ? code : -ENOENT;
    }
    *out = (struct tree_node){parent.depth + 1, index};
    return 0;
}

int tree_parent(const dlfs_directory *directory, struct tree_node node, struct tree_node *out)
{
    struct path path;
    if (node.depth == DATASET_DEPTH) {
        *out = node;
        return 0;
    }
    int code = path_of(directory, node.index, &path);
    if (code < 0) {
        return code;
    }
    uint32_t depth = node.depth != FILE_DEPTH ? node.depth - 1 : path_slashes(&path) + 1;
    if (depth == DATASET_DEPTH) {
        *out = (struct tree_node){DATASET_DEPTH, 0};
        return 0;
    }
    if (!path_cut(&path, depth - 1)) {
        return -ESTALE;
    }
    struct tree_node found = {depth, 0};
    code = dlfs_directory_lower_bound(directory, path.text, path.bytes, &found.index);
    if (code == 0) {
        *out = found;
    }
    return code;
}

/* ---- listings -------------------------------------------------------------------------------- */

int listing_begin(const dlfs_directory *directory, struct tree_node node, struct listing *listing)
{
    struct path path;
    int code = prefix_of(directory, node, &path);
    if (code < 0) {
        return code;
    }
    listing->directory = directory;
    listing->node = node;
    listing->first = listing->count = 0;
    listing->decode_max = LIST_FEW;
    listing->prefix_bytes = path.bytes;
    memcpy(listing->prefix, path.text, path.bytes);
    listing->end = dlfs_directory_count(directory);
    if (path.bytes == 0) {
        return 0;
    }
    path.text[path.bytes - 1] = AFTER_SLASH;
    return dlfs_directory_lower_bound(directory, path.text, path.bytes, &listing->end);
}

/* Makes sure that the name of a sample is in the decoded window. */
static int decode_name(struct listing *listing, uint64_t index)
{
    uint64_t at = index - listing->first;
    if (index >= listing->first && at < listing->count) {
        return 0;
    }
    /* The window is left at its end after files only; a jump past it skipped a directory. */
    bool follows = listing->count > 0 && at == listing->count;
    listing->decode_max = follows ? listing->decode_max * 2 : LIST_FEW;
    if (listing->decode_max > LIST_MANY) {
        listing->decode_max = LIST_MANY;
    }
    uint64_t left = listing->end - index;
    int64_t fitted = dlfs_directory_names(listing->directory, index,
                                          left < listing->decode_max ? left : listing->decode_max,
                                          listing->text, LIST_TEXT_BYTES, listing->offsets);
    if (fitted <= 0) {
        return fitted < 0 ? (int)fitted : DLFS_E_FORMAT;
    }
    listing->first = index;
    listing->count = (uint64_t)fitted;
    return 0;
}

static bool is_file_name(const uint8_t *name, uint64_t bytes)
{
    if (bytes == 0 || bytes > NAME_BYTES_MAX || memchr(name, 0, bytes) != NULL) {
        return false;
    }
    return !(name[0] == '.' && (bytes == 1 || (bytes == 2 && name[1] == '.')));
}

/* Gets the index after the last sample of a child directory. */
static int end_of_directory(struct listing *listing, const struct child *child, uint64_t *next)
{
    struct path path = {.bytes = listing->prefix_bytes};
    size_t bytes = strlen(child->name);
    if (path.bytes + bytes >= sizeof path.text) {
        return DLFS_E_FORMAT;
    }
    memcpy(path.text, listing->prefix, path.bytes);
    memcpy(path.text + path.bytes, child->name, bytes);
    path.bytes += (uint32_t)bytes;
    path.text[path.bytes++] = AFTER_SLASH;
    int code = dlfs_directory_lower_bound(listing->directory, path.text, path.bytes, next);
    if (code < 0) {
        return code;
    }
    return *next > child->node.index ? 0 : DLFS_E_FORMAT;
}

int listing_child(struct listing *listing, uint64_t position, struct child *child)
{
    uint64_t index = position > listing->node.index ? position : listing->node.index;
    if (index >= listing->end) {
        return 0;
    }
    int code = decode_name(listing, index);
    if (code < 0) {
        return code;
    }
    const uint64_t *offsets = listing->offsets + (index - listing->first);
    const uint8_t *path = listing->text + offsets[0];
    uint64_t bytes = offsets[1] - offsets[0];
    if (bytes < listing->prefix_bytes ||
        memcmp(path, listing->prefix, listing->prefix_bytes) != 0) {
        return DLFS_E_FORMAT;
    }
    const uint8_t *name = path + listing->prefix_bytes;
    bytes -= listing->prefix_bytes;
    const uint8_t *slash = memchr(name, '/', bytes);
    uint64_t name_bytes = slash != NULL ? (uint64_t)(slash - name) : bytes;
    if (!is_file_name(name, name_bytes)) {
        return DLFS_E_FORMAT;
    }
    memcpy(child->name, name, name_bytes);
    child->name[name_bytes] = '\0';
    child->next = index + 1;
    child->node = (struct tree_node){FILE_DEPTH, index};
    if (slash == NULL) {
        return 1;
    }
    if (listing->node.depth == DEPTH_MAX) {
        return DLFS_E_FORMAT;
    }
    child->node.depth = listing->node.depth + 1;
    code = end_of_directory(listing, child, &child->next);
    return code < 0 ? code : 1;
}
