/*
 * The order of an epoch. Over all samples: storage order, one permutation, or chunks permuted and
 * then the samples within each window of chunks. Over chosen samples: their list, a permutation of
 * it, or draws from it by weight. Any position can be computed directly, so ranks, workers and
 * resumption need no list of the order. A sample belongs to the chunk in which it starts.
 */
#include <errno.h>
#include <stdlib.h>

#include "directory/directory.h"
#include "sequence/choice.h"
#include "sequence/sequence.h"

struct dlfs_sequence {
    const dlfs_directory *directory;
    uint64_t count;
    uint64_t seed;
    uint64_t epoch;
    uint32_t kind;
    uint32_t window_chunks;
    uint32_t chunk_bytes;
    dlfs_permutation samples; /* for DLFS_ORDER_GLOBAL and DLFS_ORDER_SELECTED */
    const uint64_t *chosen;   /* [chosen_count], borrowed */
    uint64_t chosen_count;
    struct alias *table; /* [chosen_count], for DLFS_ORDER_WEIGHTED */
    uint64_t key;
    uint64_t chunk_count; /* this field and those below it are for DLFS_ORDER_CHUNK */
    uint64_t *ranks;      /* [chunk_count + 1]: first rank in storage order of each chunk */
    uint64_t *shuffled;   /* [chunk_count]: chunk at each place of the permuted order */
    uint64_t *starts;     /* [chunk_count + 1]: first position of each place */
};

static int sequence_chunks(dlfs_sequence *sequence)
{
    uint32_t chunk_bytes = sequence->chunk_bytes;
    const dlfs_directory *directory = sequence->directory;
    uint64_t chunks = dlfs_directory_data_bytes(directory) / chunk_bytes;
    if (chunks == 0) {
        chunks = 1;
    }
    sequence->chunk_count = chunks;
    sequence->ranks = calloc(chunks + 1, sizeof(uint64_t));
    sequence->shuffled = calloc(chunks, sizeof(uint64_t));
    sequence->starts = calloc(chunks + 1, sizeof(uint64_t));
    if (sequence->ranks == NULL || sequence->shuffled == NULL || sequence->starts == NULL) {
        return -ENOMEM;
    }
    for (uint64_t chunk = 1; chunk < chunks; chunk++) {
        uint64_t rank = dlfs_directory_rank_at(directory, chunk * chunk_bytes);
        if (rank < sequence->ranks[chunk - 1] || rank > sequence->count) {
            return DLFS_E_FORMAT;
        }
        sequence->ranks[chunk] = rank;
    }
    sequence->ranks[chunks] = sequence->count;
    dlfs_permutation permutation;
    int code = dlfs_permutation_init(&permutation, chunks, sequence->seed, sequence->epoch);
    if (code == 0) {
        code = dlfs_permutation_map(&permutation, 0, 1, chunks, sequence->shuffled);
    }
    for (uint64_t place = 0; code == 0 && place < chunks; place++) {
        uint64_t chunk = sequence->shuffled[place];
        sequence->starts[place + 1] =
            sequence->starts[place] + sequence->ranks[chunk + 1] - sequence->ranks[chunk];
    }
    return code;
}

DLFS_API int dlfs_sequence_create(const dlfs_directory *directory, uint32_t chunk_bytes,
                                  uint32_t kind, uint64_t seed, uint64_t epoch,
                                  uint32_t window_chunks, dlfs_sequence **out)
{
    if (directory == NULL || chunk_bytes == 0 || kind > DLFS_ORDER_CHUNK || window_chunks == 0) {
        return -EINVAL;
    }
    dlfs_sequence *sequence = calloc(1, sizeof(*sequence));
    if (sequence == NULL) {
        return -ENOMEM;
    }
    sequence->directory = directory->whole != NULL ? directory->whole : directory;
    sequence->count = dlfs_directory_count(directory);
    sequence->seed = seed;
    sequence->epoch = epoch;
    sequence->kind = kind;
    sequence->window_chunks = window_chunks;
    sequence->chunk_bytes = chunk_bytes;
    int code = 0;
    if (kind == DLFS_ORDER_GLOBAL && sequence->count > 0) {
        code = dlfs_permutation_init(&sequence->samples, sequence->count, seed, epoch);
    } else if (kind == DLFS_ORDER_CHUNK) {
        code = sequence_chunks(sequence);
    }
    if (code < 0) {
        dlfs_sequence_destroy(sequence);
        return code;
    }
    *out = sequence;
    return 0;
}

/* Returns true if all indices are below sample_count. */
static bool all_known(const uint64_t *indices, uint64_t count, uint64_t sample_count)
{
    for (uint64_t i = 0; i < count; i++) {
        if (indices[i] >= sample_count) {
            return false;
        }
    }
    return true;
}

DLFS_API int dlfs_sequence_choose(const dlfs_directory *directory, const dlfs_choice *choice,
                                  dlfs_sequence **out)
{
    if (directory == NULL || choice == NULL || choice->kind < DLFS_ORDER_LIST ||
        choice->kind > DLFS_ORDER_WEIGHTED || choice->reserved != 0 ||
        (choice->count > 0 && choice->indices == NULL)) {
        return -EINVAL;
    }
    bool weighted = choice->kind == DLFS_ORDER_WEIGHTED;
    if (weighted && (choice->weights == NULL || choice->count == 0)) {
        return -EINVAL;
    }
    if (choice->count > SIZE_MAX / 64 ||
        !all_known(choice->indices, choice->count, dlfs_directory_count(directory))) {
        return -EINVAL;
    }
    dlfs_sequence *sequence = calloc(1, sizeof(*sequence));
    if (sequence == NULL) {
        return -ENOMEM;
    }
    sequence->directory = directory;
    sequence->kind = choice->kind;
    sequence->chosen = choice->indices;
    sequence->chosen_count = choice->count;
    sequence->count = weighted ? choice->draws : choice->count;
    sequence->key = choice_key(choice->seed, choice->epoch);
    int code = 0;
    if (weighted) {
        code = alias_create(choice->weights, choice->count, &sequence->table);
    } else if (choice->kind == DLFS_ORDER_SELECTED && choice->count > 0) {
        code =
            dlfs_permutation_init(&sequence->samples, choice->count, choice->seed, choice->epoch);
    }
    if (code < 0) {
        dlfs_sequence_destroy(sequence);
        return code;
    }
    *out = sequence;
    return 0;
}

DLFS_API void dlfs_sequence_destroy(dlfs_sequence *sequence)
{
    if (sequence == NULL) {
        return;
    }
    free(sequence->table);
    free(sequence->ranks);
    free(sequence->shuffled);
    free(sequence->starts);
    free(sequence);
}

uint32_t sequence_kind(const dlfs_sequence *sequence)
{
    return sequence->kind;
}

uint64_t sequence_count(const dlfs_sequence *sequence)
{
    return sequence->count;
}

const uint64_t *sequence_chosen(const dlfs_sequence *sequence, uint64_t *count)
{
    *count = sequence->chosen != NULL ? sequence->chosen_count : sequence->count;
    return sequence->chosen;
}

bool sequence_permutes(const dlfs_sequence *sequence)
{
    return sequence->kind == DLFS_ORDER_GLOBAL || sequence->kind == DLFS_ORDER_SELECTED;
}

uint32_t sequence_window(const dlfs_sequence *sequence)
{
    return sequence->window_chunks;
}

uint64_t sequence_memory_bytes(const dlfs_sequence *sequence)
{
    return sequence->ranks != NULL ? (3 * sequence->chunk_count + 2) * sizeof(uint64_t) : 0;
}

void sequence_describe(const dlfs_sequence *sequence, struct sequence_parameters *parameters)
{
    *parameters = (struct sequence_parameters){
        .count = sequence->count,
        .seed = sequence->seed,
        .epoch = sequence->epoch,
        .kind = sequence->kind,
        .window_chunks = sequence->window_chunks,
        .chunk_bytes = sequence->chunk_bytes,
    };
}

/* Returns the last place in low..high-1 whose first position is <= position. */
static uint64_t place_at(const dlfs_sequence *sequence, uint64_t position, uint64_t low,
                         uint64_t high)
{
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (sequence->starts[middle] <= position) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/*
 * Fills positions first, first + stride, ... that lie in the same window as `first`. Returns how
 * many, or a code.
 */
static int64_t fill_window(const dlfs_sequence *sequence, uint64_t first, uint64_t stride,
                           uint64_t count, uint64_t *out)
{
    uint64_t place = place_at(sequence, first, 0, sequence->chunk_count);
    uint64_t low = place - place % sequence->window_chunks;
    uint64_t high = low + sequence->window_chunks;
    if (high > sequence->chunk_count) {
        high = sequence->chunk_count;
    }
    uint64_t start = sequence->starts[low];
    uint64_t size = sequence->starts[high] - start;
    uint64_t offset = first - start;
    uint64_t here = (size - offset - 1) / stride + 1;
    if (here > count) {
        here = count;
    }

    /*
     * The permutations of windows use streams above those of chunks; epochs count in the low half.
     */
    dlfs_permutation permutation;
    uint64_t window = low / sequence->window_chunks + 1;
    int code =
        dlfs_permutation_init(&permutation, size, sequence->seed ^ (window << 32), sequence->epoch);
    if (code == 0) {
        code = dlfs_permutation_map(&permutation, offset, stride, here, out);
    }
    for (uint64_t i = 0; code == 0 && i < here; i++) {
        uint64_t position = start + out[i];
        place = place_at(sequence, position, low, high);
        uint64_t rank =
            sequence->ranks[sequence->shuffled[place]] + position - sequence->starts[place];
        code = dlfs_directory_order(sequence->directory, rank, 1, &out[i]);
    }
    return code < 0 ? code : (int64_t)here;
}

static int fill_storage(const dlfs_sequence *sequence, uint64_t first, uint64_t stride,
                        uint64_t count, uint64_t *out)
{
    if (stride == 1) {
        return dlfs_directory_order(sequence->directory, first, count, out);
    }
    int code = 0;
    for (uint64_t i = 0; code == 0 && i < count; i++) {
        code = dlfs_directory_order(sequence->directory, first + i * stride, 1, &out[i]);
    }
    return code;
}

/* Fills positions of an order over chosen samples. */
static int fill_chosen(const dlfs_sequence *sequence, uint64_t first, uint64_t stride,
                       uint64_t count, uint64_t *out)
{
    int code = 0;
    if (sequence->kind == DLFS_ORDER_SELECTED) {
        code = dlfs_permutation_map(&sequence->samples, first, stride, count, out);
    }
    for (uint64_t i = 0; code == 0 && i < count; i++) {
        uint64_t place = first + i * stride;
        if (sequence->kind == DLFS_ORDER_SELECTED) {
            place = out[i];
        } else if (sequence->kind == DLFS_ORDER_WEIGHTED) {
            place = alias_draw(sequence->table, sequence->chosen_count, sequence->key, place);
        }
        out[i] = sequence->chosen[place];
    }
    return code;
}

DLFS_API int dlfs_sequence_fill(const dlfs_sequence *sequence, uint64_t first, uint64_t stride,
                                uint64_t count, uint64_t *out)
{
    if (count == 0) {
        return 0;
    }
    if (stride == 0 || first >= sequence->count ||
        count - 1 > (sequence->count - 1 - first) / stride) {
        return -EINVAL;
    }
    if (sequence->kind == DLFS_ORDER_GLOBAL) {
        return dlfs_permutation_map(&sequence->samples, first, stride, count, out);
    }
    if (sequence->kind >= DLFS_ORDER_LIST) {
        return fill_chosen(sequence, first, stride, count, out);
    }
    if (sequence->kind == DLFS_ORDER_STORAGE) {
        return fill_storage(sequence, first, stride, count, out);
    }
    while (count > 0) {
        int64_t filled = fill_window(sequence, first, stride, count, out);
        if (filled < 0) {
            return (int)filled;
        }
        first += (uint64_t)filled * stride;
        count -= (uint64_t)filled;
        out += filled;
    }
    return 0;
}
