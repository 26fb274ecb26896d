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

/* Gets the path of a sample, or that of an empty directory and a slash. */
static int path_of(const dlfs_directory *directory, uint64_t index, struct path *path)
{
    uint64_t offsets[2];
    uint64_t count = dlfs_directory_count(directory);
    if (index >= count + dlfs_directory_empty_count(directory)) {
        return -ESTALE;
    }
    int64_t fitted =
        index < count
            ? dlfs_directory_names(directory, index, 1, path->text, sizeof path->text, offsets)
            : dlfs_directory_empty_names(directory, index - count, 1, path->text, sizeof path->text,
                                         offsets);
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

/* Returns 1 if the path of an index starts with these bytes, 0 if not, or an error code. */
static int starts_with(const dlfs_directory *directory, uint64_t index, const struct path *start)
{
    struct path path;
    int code = path_of(directory, index, &path);
    if (code < 0) {
        return code;
    }
    return path.bytes >= start->bytes && memcmp(path.text, start->text, start->bytes) == 0;
}

/* Finds the first index that does not come before a path: of samples, or of empty directories. */
static int lower_bound(const dlfs_directory *directory, bool empty, const struct path *path,
                       uint64_t *index)
{
    if (!empty) {
        return dlfs_directory_lower_bound(directory, path->text, path->bytes, index);
    }
    uint64_t number = 0;
    int code = dlfs_directory_empty_lower_bound(directory, path->text, path->bytes, &number);
    if (code == 0) {
        *index = dlfs_directory_count(directory) + number;
    }
    return code;
}

/*
 * Finds the first sample or empty directory below a directory, by its path and a slash. Returns 1,
 * 0 if there is none, or an error code.
 */
static int find_below(const dlfs_directory *directory, bool empty, const struct path *path,
                      uint64_t *index)
{
    uint64_t found = 0;
    uint64_t end = dlfs_directory_count(directory);
    end += empty ? dlfs_directory_empty_count(directory) : 0;
    int code = lower_bound(directory, empty, path, &found);
    if (code == 0 && found < end) {
        code = starts_with(directory, found, path);
    }
    if (code > 0) {
        *index = found;
    }
    return code;
}

/*
 * Finds the index of a directory by its path and a slash: its first sample, or its first empty
 * directory. -ENOENT: there is no such directory.
 */
static int first_below(const dlfs_directory *directory, const struct path *path, uint64_t *index)
{
    int code = find_below(directory, false, path, index);
    code = code == 0 ? find_below(directory, true, path, index) : code;
    return code > 0 ? 0 : code < 0 ? code : -ENOENT;
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
    code = parent.depth == DEPTH_MAX ? -ENOENT : first_below(directory, &path, &index);
    if (code == 0) {
        *out = (struct tree_node){parent.depth + 1, index};
    }
    return code;
}

int tree_parent(const dlfs_directory *directory, struct tree_node node, struct tree_node *out)
{
    struct path path;
    if (node.depth == DATASET_DEPTH) {
        *out = node;
        return 0;
    }
    if (node.depth == FILE_DEPTH && node.index >= dlfs_directory_count(directory)) {
        return -ESTALE;
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
    code = first_below(directory, &path, &found.index);
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
    listing->end = listing->empty = dlfs_directory_count(directory);
    listing->empty_end = listing->end + dlfs_directory_empty_count(directory);
    if (path.bytes == 0) {
        return 0;
    }
    code = lower_bound(directory, true, &path, &listing->empty);
    path.text[path.bytes - 1] = AFTER_SLASH;
    if (code == 0) {
        code = lower_bound(directory, true, &path, &listing->empty_end);
    }
    return code == 0 ? lower_bound(directory, false, &path, &listing->end) : code;
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

/* Gets the path of a child of a listed directory, and the byte after a slash. */
static int end_path(const struct listing *listing, const struct child *child, struct path *path)
{
    size_t bytes = strlen(child->name);
    path->bytes = listing->prefix_bytes;
    if (path->bytes + bytes >= sizeof path->text) {
        return DLFS_E_FORMAT;
    }
    memcpy(path->text, listing->prefix, path->bytes);
    memcpy(path->text + path->bytes, child->name, bytes);
    path->bytes += (uint32_t)bytes;
    path->text[path->bytes++] = AFTER_SLASH;
    return 0;
}

/* Gets the index after the last sample, or the last empty directory, of a child directory. */
static int end_of_directory(const struct listing *listing, struct child *child)
{
    struct path path;
    bool empty = child->node.index >= dlfs_directory_count(listing->directory);
    int code = end_path(listing, child, &path);
    if (code == 0) {
        code = lower_bound(listing->directory, empty, &path, &child->next);
    }
    if (code < 0) {
        return code;
    }
    return child->next > child->node.index ? 0 : DLFS_E_FORMAT;
}

/*
 * Gets the child that a path of a listed directory is or lies below, and the position behind it.
 * Returns 1, or 0 if the path is the directory's own, as that of an empty directory may be.
 */
static int child_of(const struct listing *listing, uint64_t index, const uint8_t *path,
                    uint64_t bytes, struct child *child)
{
    uint32_t prefix_bytes = listing->prefix_bytes;
    if (bytes < prefix_bytes || memcmp(path, listing->prefix, prefix_bytes) != 0) {
        return DLFS_E_FORMAT;
    }
    if (bytes == prefix_bytes && index >= dlfs_directory_count(listing->directory)) {
        return 0;
    }
    const uint8_t *name = path + prefix_bytes;
    const uint8_t *slash = memchr(name, '/', bytes - prefix_bytes);
    uint64_t name_bytes = slash != NULL ? (uint64_t)(slash - name) : bytes - prefix_bytes;
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
    int code = end_of_directory(listing, child);
    return code < 0 ? code : 1;
}

/* Gets the first subdirectory without samples at or after an index; see listing_child. */
static int next_empty_child(const struct listing *listing, uint64_t index, struct child *child)
{
    index = index > listing->empty ? index : listing->empty;
    while (index < listing->empty_end) {
        struct path path;
        uint64_t first;
        int code = path_of(listing->directory, index, &path);
        code = code < 0 ? code : child_of(listing, index, path.text, path.bytes, child);
        if (code <= 0) {
            return code;
        }
        code = end_path(listing, child, &path);
        path.text[path.bytes - 1] = '/';
        code = code < 0 ? code : find_below(listing->directory, false, &path, &first);
        if (code <= 0) { /* no sample is below it: it was not listed with these */
            return code < 0 ? code : 1;
        }
        index = child->next;
    }
    return 0;
}

int listing_child(struct listing *listing, uint64_t position, struct child *child)
{
    uint64_t index = position > listing->node.index ? position : listing->node.index;
    if (index >= listing->end) {
        return next_empty_child(listing, index, child);
    }
    int code = decode_name(listing, index);
    if (code < 0) {
        return code;
    }
    const uint64_t *offsets = listing->offsets + (index - listing->first);
    return child_of(listing, index, listing->text + offsets[0], offsets[1] - offsets[0], child);
}
