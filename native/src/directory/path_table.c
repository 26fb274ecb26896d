/*
 * The samples of a dataset that is being written: a table of paths and locations in the order of
 * their addition, and an index that finds a path among samples and directories.
 *
 * The index is a hash table with open addressing. A slot has 24 bits of the hash, and the number of
 * a sample or of a directory; the paths themselves are compared in the text. Directories are not
 * stored as text: each is the beginning of the path of a sample. Only those that were added as such
 * have text of their own. When the index grows, the old one is freed first, and the new one is
 * made from the text.
 *
 * A call that adds samples and finds a path that breaks a rule removes what it added before.
 */
#include "directory/build.h"

#include <errno.h>
#include <stdlib.h>

#define SLOTS_MIN 64u
#define FRAGMENT_BITS 24u
#define FRAGMENT_SHIFT (64u - FRAGMENT_BITS)
#define SLOT_DIRECTORY (UINT64_C(1) << (FRAGMENT_SHIFT - 1)) /* the number is of a directory */
#define NUMBER_MASK (SLOT_DIRECTORY - 1)                     /* the number plus 1; 0: a free slot */
#define NUMBER_MAX (NUMBER_MASK - 1)
#define AHEAD 8u /* paths whose slots are brought into the cache before they are needed */

struct directory_entry {
    uint64_t offset; /* of its path in the text of samples, or of added directories */
    uint16_t bytes;  /* length of its path */
    bool own;        /* its path is in the text of added directories */
    bool added;      /* added as such */
    bool contains;   /* contains samples or directories */
};

struct dlfs_path_table {
    struct growing_memory text;      /* paths of the samples */
    struct growing_memory offsets;   /* uint64_t, around each */
    struct growing_memory locations; /* dlfs_location */
    uint64_t count;
    struct growing_memory own_text; /* paths of added directories */
    uint64_t own_bytes;
    struct growing_memory directories; /* struct directory_entry */
    uint64_t directory_count;
    struct growing_memory filled; /* uint64_t: directories that this call made contain something */
    uint64_t filled_count;
    uint64_t *slots;
    uint64_t slot_count;
    uint64_t used;
};

/* A path that is looked for. */
struct wanted {
    const uint8_t *path;
    uint32_t bytes;
    uint64_t hash;
};

static struct wanted wanted_path(const uint8_t *path, uint32_t bytes)
{
    return (struct wanted){path, bytes, dlfs_path_hash(path, bytes, 0)};
}

/* ---- the content ----------------------------------------------------------------------------- */

static uint64_t *offsets_of(const dlfs_path_table *table)
{
    return (uint64_t *)table->offsets.base;
}

static struct directory_entry *directory_at(const dlfs_path_table *table, uint64_t number)
{
    return (struct directory_entry *)table->directories.base + number;
}

static const uint8_t *directory_path(const dlfs_path_table *table,
                                     const struct directory_entry *directory)
{
    return (directory->own ? table->own_text.base : table->text.base) + directory->offset;
}

/* Returns the path of a used slot. */
static const uint8_t *slot_path(const dlfs_path_table *table, uint64_t slot, uint32_t *bytes)
{
    uint64_t number = (slot & NUMBER_MASK) - 1;
    if (slot & SLOT_DIRECTORY) {
        const struct directory_entry *directory = directory_at(table, number);
        *bytes = directory->bytes;
        return directory_path(table, directory);
    }
    const uint64_t *offsets = offsets_of(table);
    *bytes = (uint32_t)(offsets[number + 1] - offsets[number]);
    return table->text.base + offsets[number];
}

/* ---- the index ------------------------------------------------------------------------------- */

static uint64_t home_slot(const dlfs_path_table *table, uint64_t hash)
{
    return (uint64_t)((unsigned __int128)hash * table->slot_count >> 64);
}

static uint64_t slot_after(const dlfs_path_table *table, uint64_t at)
{
    return at + 1 == table->slot_count ? 0 : at + 1;
}

/* Returns where a path's slot is, or the free slot where it would be. */
static uint64_t *find_slot(const dlfs_path_table *table, const struct wanted *wanted)
{
    uint64_t fragment = wanted->hash << FRAGMENT_SHIFT;
    uint64_t at = home_slot(table, wanted->hash);
    for (;; at = slot_after(table, at)) {
        uint64_t slot = table->slots[at];
        if (slot == 0) {
            return &table->slots[at];
        }
        if ((slot ^ fragment) >> FRAGMENT_SHIFT == 0) {
            uint32_t bytes;
            const uint8_t *path = slot_path(table, slot, &bytes);
            if (bytes == wanted->bytes && memcmp(path, wanted->path, bytes) == 0) {
                return &table->slots[at];
            }
        }
    }
}

static uint64_t slot_value(uint64_t hash, uint64_t number, uint64_t kind)
{
    return hash << FRAGMENT_SHIFT | kind | (number + 1);
}

/* Inserts a path that is not in the index. */
static void insert(dlfs_path_table *table, const struct wanted *wanted, uint64_t number,
                   uint64_t kind)
{
    uint64_t at = home_slot(table, wanted->hash);
    while (table->slots[at] != 0) {
        at = slot_after(table, at);
    }
    table->slots[at] = slot_value(wanted->hash, number, kind);
    table->used++;
}

/* Makes an index of the given size from the first `count` samples and the directories. -ENOMEM. */
static int make_index(dlfs_path_table *table, uint64_t slot_count, uint64_t count)
{
    dlfs_path_table_shrink(table);
    table->slots = calloc(slot_count, sizeof(*table->slots));
    if (table->slots == NULL) {
        return -ENOMEM;
    }
    table->slot_count = slot_count;
    for (uint64_t row = 0; row < count; row++) {
        const uint64_t *offsets = offsets_of(table);
        struct wanted wanted = wanted_path(table->text.base + offsets[row],
                                           (uint32_t)(offsets[row + 1] - offsets[row]));
        insert(table, &wanted, row, 0);
    }
    for (uint64_t number = 0; number < table->directory_count; number++) {
        const struct directory_entry *directory = directory_at(table, number);
        struct wanted wanted = wanted_path(directory_path(table, directory), directory->bytes);
        insert(table, &wanted, number, SLOT_DIRECTORY);
    }
    return 0;
}

/* Returns the slots that an index of so many paths has at the least: at most 17/20 are used. */
static uint64_t slots_for(uint64_t used)
{
    return used + used / 17 * 3 + SLOTS_MIN;
}

/* Makes room for more paths in the index, which has `count` samples. -ENOMEM. */
static int reserve_slots(dlfs_path_table *table, uint64_t more, uint64_t count)
{
    uint64_t used = table->slots != NULL ? table->used : count + table->directory_count;
    uint64_t least = slots_for(used + more);
    if (table->slots != NULL && least <= table->slot_count) {
        return 0;
    }
    uint64_t grown = table->slots != NULL ? table->slot_count + table->slot_count / 2 : SLOTS_MIN;
    return make_index(table, least > grown ? least : grown, count);
}

/* Removes a path from the index, and moves those after it that would not be found any more. */
static void erase(dlfs_path_table *table, const uint8_t *path, uint32_t path_bytes)
{
    struct wanted wanted = wanted_path(path, path_bytes);
    uint64_t hole = (uint64_t)(find_slot(table, &wanted) - table->slots);
    for (uint64_t at = slot_after(table, hole); table->slots[at] != 0; at = slot_after(table, at)) {
        uint32_t bytes;
        const uint8_t *other = slot_path(table, table->slots[at], &bytes);
        uint64_t home = home_slot(table, dlfs_path_hash(other, bytes, 0));
        bool stays = hole < at ? home > hole && home <= at : home > hole || home <= at;
        if (!stays) {
            table->slots[hole] = table->slots[at];
            hole = at;
        }
    }
    table->slots[hole] = 0;
    table->used--;
}

/* ---- adding ---------------------------------------------------------------------------------- */

/* The counts of a table before a call, which may have to be undone. */
struct mark {
    uint64_t count;
    uint64_t directory_count;
    uint64_t own_bytes;
};

static struct mark mark_of(dlfs_path_table *table)
{
    table->filled_count = 0;
    return (struct mark){table->count, table->directory_count, table->own_bytes};
}

/* Removes the samples mark.count..rows-1 and the directories after the mark. */
static void undo(dlfs_path_table *table, const struct mark *mark, uint64_t rows)
{
    const uint64_t *offsets = offsets_of(table);
    if (table->slots != NULL) {
        while (table->directory_count > mark->directory_count) {
            const struct directory_entry *last = directory_at(table, table->directory_count - 1);
            erase(table, directory_path(table, last), last->bytes);
            table->directory_count--;
        }
        for (uint64_t row = rows; row-- > mark->count;) {
            erase(table, table->text.base + offsets[row],
                  (uint32_t)(offsets[row + 1] - offsets[row]));
        }
    }
    for (uint64_t i = 0; i < table->filled_count; i++) {
        directory_at(table, ((const uint64_t *)table->filled.base)[i])->contains = false;
    }
    table->directory_count = mark->directory_count;
    table->own_bytes = mark->own_bytes;
    table->count = mark->count;
}

/* Adds a directory to a free slot of the index. -ENOMEM. */
static int add_entry(dlfs_path_table *table, uint64_t *slot, uint64_t hash,
                     const struct directory_entry *entry)
{
    uint64_t number = table->directory_count;
    if (number > NUMBER_MAX ||
        growing_memory_reserve(&table->directories, (number + 1) * sizeof(*entry)) < 0) {
        return -ENOMEM;
    }
    *directory_at(table, number) = *entry;
    *slot = slot_value(hash, number, SLOT_DIRECTORY);
    table->directory_count++;
    table->used++;
    return 0;
}

/* Notes that a known directory contains something now. -ENOMEM. */
static int fill_directory(dlfs_path_table *table, uint64_t number)
{
    if (growing_memory_reserve(&table->filled, (table->filled_count + 1) * sizeof(number)) < 0) {
        return -ENOMEM;
    }
    ((uint64_t *)table->filled.base)[table->filled_count++] = number;
    directory_at(table, number)->contains = true;
    return 0;
}

static uint32_t parent_bytes(const uint8_t *path, uint32_t bytes)
{
    while (bytes > 0 && path[bytes - 1] != '/') {
        bytes--;
    }
    return bytes > 0 ? bytes - 1 : 0;
}

/*
 * Adds the directories that contain a path, up to the first one that contains something already.
 * `offset` and `own` say where in the table the path is. Errors: -EINVAL (one is a sample, of
 * refusal->prefix_bytes), -ENOMEM.
 */
static int add_parents(dlfs_path_table *table, uint64_t offset, bool own, uint32_t bytes,
                       uint64_t samples, dlfs_path_refusal *refusal)
{
    const uint8_t *path = (own ? table->own_text.base : table->text.base) + offset;
    for (uint32_t parent = parent_bytes(path, bytes); parent > 0;
         parent = parent_bytes(path, parent)) {
        int code = reserve_slots(table, 1, samples);
        if (code < 0) {
            return code;
        }
        struct wanted wanted = wanted_path(path, parent);
        uint64_t *slot = find_slot(table, &wanted);
        if (*slot == 0) {
            const struct directory_entry entry = {
                .offset = offset, .bytes = (uint16_t)parent, .own = own, .contains = true};
            code = add_entry(table, slot, wanted.hash, &entry);
        } else if ((*slot & SLOT_DIRECTORY) == 0) {
            refusal->rule = DLFS_PATH_BELOW_SAMPLE;
            refusal->prefix_bytes = parent;
            return -EINVAL;
        } else {
            uint64_t number = (*slot & NUMBER_MASK) - 1;
            if (directory_at(table, number)->contains) {
                return 0;
            }
            code = fill_directory(table, number);
        }
        if (code < 0) {
            return code;
        }
    }
    return 0;
}

/* Copies new paths behind those of the table, whose count stays. Errors: -EINVAL, -ENOMEM. */
static int append(dlfs_path_table *table, const uint8_t *names, const uint64_t *offsets,
                  uint64_t count)
{
    uint64_t first = table->count;
    for (uint64_t i = 0; i < count; i++) {
        if (offsets[i + 1] < offsets[i]) {
            return -EINVAL;
        }
    }
    if (count > NUMBER_MAX - first) {
        return -ENOMEM;
    }
    uint64_t end = offsets_of(table)[first];
    uint64_t bytes = offsets[count] - offsets[0];
    if (growing_memory_reserve(&table->text, end + bytes) < 0 ||
        growing_memory_reserve(&table->offsets, (first + count + 1) * sizeof(*offsets)) < 0 ||
        growing_memory_reserve(&table->locations, (first + count) * sizeof(dlfs_location)) < 0) {
        return -ENOMEM;
    }
    if (bytes > 0) {
        memcpy(table->text.base + end, names + offsets[0], bytes);
    }
    for (uint64_t i = 0; i < count; i++) {
        offsets_of(table)[first + i + 1] = end + (offsets[i + 1] - offsets[0]);
    }
    return 0;
}

/* Adds an appended sample to the index, unless its path breaks a rule. Errors: -EINVAL, -ENOMEM. */
static int index_sample(dlfs_path_table *table, uint64_t row, const struct wanted *wanted,
                        dlfs_path_refusal *refusal)
{
    uint64_t *slot = find_slot(table, wanted);
    if (*slot != 0) {
        refusal->rule = *slot & SLOT_DIRECTORY ? DLFS_PATH_IS_DIRECTORY : DLFS_PATH_REPEATED;
        return -EINVAL;
    }
    *slot = slot_value(wanted->hash, row, 0);
    table->used++;
    return 0;
}

/* Returns true if a row lies in a directory, not the root, that another row lies in or below. */
static bool shares_directory(const dlfs_path_table *table, uint64_t row, uint64_t other)
{
    const uint64_t *offsets = offsets_of(table);
    const uint8_t *path = table->text.base + offsets[row];
    uint32_t parent = parent_bytes(path, (uint32_t)(offsets[row + 1] - offsets[row]));
    return parent > 0 && offsets[other + 1] - offsets[other] > parent &&
           memcmp(path, table->text.base + offsets[other], parent + 1) == 0;
}

/*
 * Adds the appended samples table->count.. to the index, some at a time: hashes are computed and
 * slots brought into the cache first. *added gets the end of those that are in the index. Errors:
 * -EINVAL, -ENOMEM.
 */
static int index_samples(dlfs_path_table *table, uint64_t count, uint64_t *added,
                         dlfs_path_refusal *refusal)
{
    const uint64_t first = table->count;
    struct wanted ahead[AHEAD];
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t *offsets = offsets_of(table);
        uint64_t row = first + i;
        if (i % AHEAD == 0) {
            int code = reserve_slots(table, AHEAD, row);
            if (code < 0) {
                return code;
            }
            for (uint64_t k = 0; k < AHEAD && i + k < count; k++) {
                uint64_t bytes = offsets[row + k + 1] - offsets[row + k];
                ahead[k] = wanted_path(table->text.base + offsets[row + k],
                                       bytes > DLFS_PATH_BYTES_MAX ? 0 : (uint32_t)bytes);
                __builtin_prefetch(&table->slots[home_slot(table, ahead[k].hash)], 1);
            }
        }
        refusal->index = i;
        uint64_t bytes = offsets[row + 1] - offsets[row];
        if (!dlfs_path_is_valid(table->text.base + offsets[row], bytes)) {
            refusal->rule = DLFS_PATH_MALFORMED;
            return -EINVAL;
        }
        int code = index_sample(table, row, &ahead[i % AHEAD], refusal);
        if (code < 0) {
            return code;
        }
        *added = row + 1;
        if (row == 0 || !shares_directory(table, row, row - 1)) {
            code = add_parents(table, offsets[row], false, (uint32_t)bytes, row + 1, refusal);
        }
        if (code < 0) {
            return code;
        }
    }
    return 0;
}

int dlfs_path_table_add(dlfs_path_table *table, const uint8_t *names, const uint64_t *offsets,
                        const dlfs_location *locations, uint64_t count, dlfs_path_refusal *refusal)
{
    if (table == NULL || refusal == NULL || (count > 0 && (names == NULL || offsets == NULL))) {
        return -EINVAL;
    }
    *refusal = (dlfs_path_refusal){.rule = 0};
    if (count == 0) {
        return 0;
    }
    struct mark mark = mark_of(table);
    uint64_t added = mark.count;
    int code = append(table, names, offsets, count);
    if (code == 0) {
        code = index_samples(table, count, &added, refusal);
    }
    if (code < 0 || locations == NULL) {
        undo(table, &mark, added);
        return code;
    }
    memcpy((dlfs_location *)table->locations.base + mark.count, locations,
           count * sizeof(*locations));
    table->count += count;
    return 0;
}

/* Adds a directory whose path lies at the end of the text of directories. */
static int add_own(dlfs_path_table *table, uint32_t bytes, dlfs_path_refusal *refusal)
{
    uint64_t offset = table->own_bytes;
    int code = reserve_slots(table, 1, table->count);
    if (code < 0) {
        return code;
    }
    struct wanted wanted = wanted_path(table->own_text.base + offset, bytes);
    uint64_t *slot = find_slot(table, &wanted);
    if (*slot & SLOT_DIRECTORY) {
        directory_at(table, (*slot & NUMBER_MASK) - 1)->added = true;
        return 0;
    }
    if (*slot != 0) {
        refusal->rule = DLFS_PATH_BELOW_SAMPLE;
        refusal->prefix_bytes = bytes;
        return -EINVAL;
    }
    const struct directory_entry entry = {
        .offset = offset, .bytes = (uint16_t)bytes, .own = true, .added = true};
    code = add_entry(table, slot, wanted.hash, &entry);
    if (code == 0) {
        table->own_bytes += bytes;
        code = add_parents(table, offset, true, bytes, table->count, refusal);
    }
    return code;
}

int dlfs_path_table_add_directory(dlfs_path_table *table, const uint8_t *path, uint64_t bytes,
                                  dlfs_path_refusal *refusal)
{
    if (table == NULL || path == NULL || refusal == NULL) {
        return -EINVAL;
    }
    *refusal = (dlfs_path_refusal){.is_directory = 1};
    if (bytes >= DLFS_PATH_BYTES_MAX || !dlfs_path_is_valid(path, bytes)) {
        refusal->rule = DLFS_PATH_MALFORMED;
        return -EINVAL;
    }
    if (growing_memory_reserve(&table->own_text, table->own_bytes + bytes) < 0) {
        return -ENOMEM;
    }
    struct mark mark = mark_of(table);
    memcpy(table->own_text.base + table->own_bytes, path, bytes);
    int code = add_own(table, (uint32_t)bytes, refusal);
    if (code < 0) {
        undo(table, &mark, table->count);
    }
    return code;
}

/* ---- reading --------------------------------------------------------------------------------- */

int dlfs_path_table_create(dlfs_path_table **out)
{
    dlfs_path_table *table = out != NULL ? calloc(1, sizeof(*table)) : NULL;
    if (table == NULL || growing_memory_reserve(&table->offsets, sizeof(uint64_t)) < 0) {
        free(table);
        return out == NULL ? -EINVAL : -ENOMEM;
    }
    *out = table;
    return 0;
}

void dlfs_path_table_destroy(dlfs_path_table *table)
{
    if (table == NULL) {
        return;
    }
    growing_memory_free(&table->text);
    growing_memory_free(&table->offsets);
    growing_memory_free(&table->locations);
    growing_memory_free(&table->own_text);
    growing_memory_free(&table->directories);
    growing_memory_free(&table->filled);
    dlfs_path_table_shrink(table);
    free(table);
}

int dlfs_path_table_find(dlfs_path_table *table, const uint8_t *path, uint64_t bytes, uint64_t *row)
{
    if (table == NULL || path == NULL || row == NULL) {
        return -EINVAL;
    }
    if (bytes > DLFS_PATH_BYTES_MAX) {
        return 0;
    }
    int code = reserve_slots(table, 0, table->count);
    if (code < 0) {
        return code;
    }
    struct wanted wanted = wanted_path(path, (uint32_t)bytes);
    uint64_t slot = *find_slot(table, &wanted);
    if (slot == 0 || slot & SLOT_DIRECTORY) {
        return 0;
    }
    *row = (slot & NUMBER_MASK) - 1;
    return 1;
}

void dlfs_path_table_get_view(const dlfs_path_table *table, dlfs_path_table_view *view)
{
    *view = (dlfs_path_table_view){.count = table->count,
                                   .names = table->text.base,
                                   .offsets = offsets_of(table),
                                   .locations = (const dlfs_location *)table->locations.base};
}

uint64_t dlfs_path_table_empty_directories(const dlfs_path_table *table, uint8_t *names,
                                           uint64_t names_bytes, uint64_t *offsets,
                                           uint64_t capacity, uint64_t *bytes)
{
    uint64_t found = 0;
    uint64_t used = 0;
    for (uint64_t number = 0; number < table->directory_count; number++) {
        const struct directory_entry *directory = directory_at(table, number);
        if (!directory->added || directory->contains) {
            continue;
        }
        if (found < capacity && used + directory->bytes + 1 <= names_bytes) {
            memcpy(names + used, directory_path(table, directory), directory->bytes);
            names[used + directory->bytes] = '/';
            offsets[found] = used;
            offsets[found + 1] = used + directory->bytes + 1;
        }
        used += directory->bytes + UINT64_C(1);
        found++;
    }
    *bytes = used;
    return found;
}

void dlfs_path_table_shrink(dlfs_path_table *table)
{
    free(table->slots);
    table->slots = NULL;
    table->slot_count = 0;
    table->used = 0;
}
