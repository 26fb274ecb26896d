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
    struct sequence_parameters order;
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
    uint32_t chunk_bytes = sequence->order.chunk_bytes;
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
        if (rank < sequence->ranks[chunk - 1] || rank > sequence->order.count) {
            return DLFS_E_FORMAT;
        }
        sequence->ranks[chunk] = rank;
    }
    sequence->ranks[chunks] = sequence->order.count;
    dlfs_permutation permutation;
    int code =
        dlfs_permutation_init(&permutation, chunks, sequence->order.seed, sequence->order.epoch);
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

/* Returns a new sequence to its creator, or destroys it after an error. */
static int finish(dlfs_sequence *sequence, int code, dlfs_sequence **out)
{
    if (code < 0) {
        dlfs_sequence_destroy(sequence);
    } else {
        *out = sequence;
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
    sequence->order = (struct sequence_parameters){
        dlfs_directory_count(directory), seed, epoch, kind, window_chunks, chunk_bytes, 0};
    int code = 0;
    if (kind == DLFS_ORDER_GLOBAL && sequence->order.count > 0) {
        code = dlfs_permutation_init(&sequence->samples, sequence->order.count, seed, epoch);
    } else if (kind == DLFS_ORDER_CHUNK) {
        code = sequence_chunks(sequence);
    }
    return finish(sequence, code, out);
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
    if ((weighted && (choice->weights == NULL || choice->count == 0)) ||
        choice->count > SIZE_MAX / 64) {
        return -EINVAL;
    }
    uint64_t sample_count = dlfs_directory_count(directory);
    for (uint64_t i = 0; i < choice->count; i++) {
        if (choice->indices[i] >= sample_count) {
            return -EINVAL;
        }
    }
    dlfs_sequence *sequence = calloc(1, sizeof(*sequence));
    if (sequence == NULL) {
        return -ENOMEM;
    }
    sequence->directory = directory;
    sequence->order.kind = choice->kind;
    sequence->chosen = choice->indices;
    sequence->chosen_count = choice->count;
    sequence->order.count = weighted ? choice->draws : choice->count;
    sequence->key = choice_key(choice->seed, choice->epoch);
    int code = 0;
    if (weighted) {
        code = alias_create(choice->weights, choice->count, &sequence->table);
    } else if (choice->kind == DLFS_ORDER_SELECTED && choice->count > 0) {
        code =
            dlfs_permutation_init(&sequence->samples, choice->count, choice->seed, choice->epoch);
    }
    return finish(sequence, code, out);
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
    return sequence->order.kind;
}

uint64_t sequence_count(const dlfs_sequence *sequence)
{
    return sequence->order.count;
}

const uint64_t *sequence_chosen(const dlfs_sequence *sequence, uint64_t *count)
{
    *count = sequence->chosen != NULL ? sequence->chosen_count : sequence->order.count;
    return sequence->chosen;
}

bool sequence_permutes(const dlfs_sequence *sequence)
{
    return sequence->order.kind == DLFS_ORDER_GLOBAL || sequence->order.kind == DLFS_ORDER_SELECTED;
}

uint32_t sequence_window(const dlfs_sequence *sequence)
{
    return sequence->order.window_chunks;
}

uint64_t sequence_memory_bytes(const dlfs_sequence *sequence)
{
    return sequence->ranks != NULL ? (3 * sequence->chunk_count + 2) * sizeof(uint64_t) : 0;
}

void sequence_describe(const dlfs_sequence *sequence, struct sequence_parameters *parameters)
{
    *parameters = sequence->order;
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
    uint64_t low = place - place % sequence->order.window_chunks;
    uint64_t high = low + sequence->order.window_chunks;
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
    uint64_t window = low / sequence->order.window_chunks + 1;
    int code = dlfs_permutation_init(&permutation, size, sequence->order.seed ^ (window << 32),
                                     sequence->order.epoch);
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
    if (sequence->order.kind == DLFS_ORDER_SELECTED) {
        code = dlfs_permutation_map(&sequence->samples, first, stride, count, out);
    }
    for (uint64_t i = 0; code == 0 && i < count; i++) {
        uint64_t place = first + i * stride;
        if (sequence->order.kind == DLFS_ORDER_SELECTED) {
            place = out[i];
        } else if (sequence->order.kind == DLFS_ORDER_WEIGHTED) {
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
    if (stride == 0 || first >= sequence->order.count ||
        count - 1 > (sequence->order.count - 1 - first) / stride) {
        return -EINVAL;
    }
    if (sequence->order.kind == DLFS_ORDER_GLOBAL) {
        return dlfs_permutation_map(&sequence->samples, first, stride, count, out);
    }
    if (sequence->order.kind >= DLFS_ORDER_LIST) {
        return fill_chosen(sequence, first, stride, count, out);
    }
    if (sequence->order.kind == DLFS_ORDER_STORAGE) {
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
