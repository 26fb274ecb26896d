/*
 * Measures what an epoch reads, and decides how many slots a stream leaves to the sample cache
 * (arena/cache.c).
 *
 * The cache has all slots but a reserve. If the whole epoch fits, the reserve is MARGIN_SLOTS and
 * room for two samples, for reads under way: samples go to the cache as they land. Otherwise
 * look-ahead and batches need memory for the share of samples that is not cached. The reserve is
 * then twice what the queues take, at most an eighth of the slots, or the batches that consumers
 * pin at a time if these are more. The number of pinned batches is an estimate: first two, and
 * doubled when a stream had no memory for its next batch. The reserve shrinks as the cached share
 * grows, so that more memory never caches less.
 */
#include <stdlib.h>

#include "platform/mix.h"
#include "sequence/sequence.h"
#include "stream/state.h"

#define LENGTHS_SAMPLED_MAX (UINT64_C(1) << 18) /* samples whose lengths need_measure reads */
#define MARGIN_SLOTS 4u
#define AHEAD_BYTES (UINT64_C(8) << 20) /* of chunks read ahead */
#define CHUNKS_AHEAD 8u
#define PACKED_RUN_SAMPLES 32u /* so that at most 1/32 of a PACKED run is lost at its end */
#define PACKED_OVERHEAD 12u    /* bytes of a packed sample: its index, and half of the alignment */
#define MAP_OVERHEAD 22u       /* bytes of a packed sample in the map */
/* Copied samples get memory for one in COPY_MEMORY_SHARE samples; the cache has the rest. */
#define COPY_MEMORY_SHARE 2u
#define COPY_MARGIN_SLOTS (MARGIN_SLOTS + 4u) /* with chunks being read, and buckets */

static uint64_t shift_up(uint64_t bytes, uint32_t shift)
{
    return (bytes + (UINT64_C(1) << shift) - 1) >> shift;
}

/* Counts the different samples of a list. Returns the number of its entries without memory. */
static uint64_t count_different(const uint64_t *list, uint64_t count, uint64_t sample_count)
{
    uint64_t *seen = calloc(sample_count / 64 + 1, sizeof(*seen));
    if (seen == NULL) {
        return count;
    }
    uint64_t different = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t bit = UINT64_C(1) << (list[i] & 63);
        different += (seen[list[i] >> 6] & bit) == 0;
        seen[list[i] >> 6] |= bit;
    }
    free(seen);
    return different;
}

/* The samples that an epoch is made of. */
struct population {
    const dlfs_reader *reader;
    const uint64_t *chosen; /* [count] or NULL: all samples */
    uint64_t count;
    uint64_t measured; /* samples whose lengths are read */
};

/* Returns the length of a measured sample: of each in turn, or of one that is drawn at random. */
static uint64_t measured_length(const struct population *population, uint64_t number)
{
    struct location location;
    uint64_t at =
        population->measured == population->count ? number : mix(number) % population->count;
    uint64_t index = population->chosen != NULL ? population->chosen[at] : at;
    return reader_locate(population->reader, index, &location) ? location.length : 0;
}

uint32_t packed_run_slots(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    uint64_t wanted = shift_up(PACKED_RUN_SAMPLES * stream->need.mean_bytes, reader->chunk_shift);
    if (stream->need.mean_bytes * PACKED_RUN_SAMPLES <= reader->config.chunk_bytes) {
        return 1;
    }
    uint64_t most = reader->slots_max / 4;
    uint64_t slots = wanted < most ? wanted : most;
    return slots > 1 ? (uint32_t)slots : 1;
}

static uint64_t run_bytes(const dlfs_stream *stream)
{
    return (uint64_t)packed_run_slots(stream) << stream->reader->chunk_shift;
}

/* Returns the bytes lost at the end of a run: on average half of the sample that does not fit, and
 * a long sample is more likely to be that one. */
static double end_bytes(const dlfs_stream *stream, const struct population *population)
{
    double run = (double)run_bytes(stream);
    double sum = 0;
    double squares = 0;
    for (uint64_t number = 0; number < population->measured; number++) {
        double length = (double)measured_length(population, number);
        length = length < run ? length : run;
        sum += length;
        squares += length * length;
    }
    return sum > 0 ? squares / (2 * sum) : 0;
}

void need_measure(dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    const dlfs_sequence *sequence = stream->config.sequence;
    struct epoch_need *need = &stream->need;
    struct population population = {.reader = reader};
    population.chosen = sequence_chosen(sequence, &population.count);
    population.measured =
        population.count < LENGTHS_SAMPLED_MAX ? population.count : LENGTHS_SAMPLED_MAX;
    uint64_t bytes = 0;
    for (uint64_t number = 0; number < population.measured; number++) {
        uint64_t length = measured_length(&population, number);
        bytes += length;
        need->largest_bytes = length > need->largest_bytes ? length : need->largest_bytes;
    }
    uint64_t mean = population.measured ? bytes / population.measured : 0;
    uint64_t positions = sequence_count(sequence);
    uint64_t block = reader->config.block_bytes;
    need->mean_bytes = mean ? mean : 1;
    need->end_bytes = end_bytes(stream, &population);
    need->samples = population.count;
    if (sequence_kind(sequence) == DLFS_ORDER_LIST) {
        need->samples = count_different(population.chosen, positions, reader->sample_count);
    }
    need->samples = positions < need->samples ? positions : need->samples;
    need->bytes = need->samples == population.measured ? bytes : need->samples * mean;
    need->read_bytes = mean % block == 0 ? need->mean_bytes : mean + block;
    need->partial = population.chosen != NULL && need->samples < reader->sample_count;
}

/* ---- packed samples -------------------------------------------------------------------------- */

uint64_t map_samples(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    uint64_t fit = ((uint64_t)reader->slots_max << reader->chunk_shift) /
                   (stream->need.mean_bytes + PACKED_OVERHEAD + MAP_OVERHEAD);
    return stream->need.samples < fit ? stream->need.samples : fit;
}

static uint64_t map_slots(const dlfs_stream *stream)
{
    return shift_up(cache_map_bytes(map_samples(stream)), stream->reader->chunk_shift);
}

/* Returns the bytes of the packed samples of the whole epoch. */
static uint64_t packed_bytes(const struct epoch_need *need)
{
    return need->bytes + need->samples * PACKED_OVERHEAD;
}

uint64_t needed_slots(const dlfs_stream *stream)
{
    const struct epoch_need *need = &stream->need;
    uint64_t bytes = packed_bytes(need);
    bytes += (bytes / run_bytes(stream) + 1) * (uint64_t)need->end_bytes;
    return shift_up(bytes, stream->reader->chunk_shift) + map_slots(stream);
}

/*
 * Returns the memory that a sample takes where it lands, with the bytes before the next sample that
 * are read with it. In a list, neighbours may be as near to one another as its share of the samples
 * implies.
 */
static double landing_bytes(const dlfs_stream *stream)
{
    const struct epoch_need *need = &stream->need;
    if (sequence_kind(stream->config.sequence) != DLFS_ORDER_LIST || need->samples == 0) {
        return (double)need->read_bytes;
    }
    double between = (double)stream->reader->data_bytes / (double)need->samples;
    double gap = (double)stream->reader->config.gap_bytes;
    return (double)need->read_bytes + (between < gap ? between : gap) / 3;
}

uint32_t packed_slots(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    const struct epoch_need *need = &stream->need;
    uint64_t slots = reader->slots_max;
    uint64_t needed = needed_slots(stream);
    uint64_t margin = MARGIN_SLOTS + 2 * shift_up(need->largest_bytes, reader->chunk_shift);
    uint64_t reserve = margin;
    if (needed + margin > slots || stream->cache_crowded) {
        double missing = stream->cache_crowded ? 1 : 1 - (double)slots / (double)needed;
        double sample = (missing > 0 ? missing : 0) * landing_bytes(stream) /
                        (double)reader->config.chunk_bytes;
        double batches = sample * (double)stream->awaited_max * reader->cache.batches_pinned;
        double lookahead = 2 * sample * reader->config.depth * reader->config.member_count;
        lookahead = lookahead < (double)slots / 8 ? lookahead : (double)slots / 8;
        double wanted = (double)margin + (batches > lookahead ? batches : lookahead);
        reserve = wanted < (double)slots ? (uint64_t)wanted + 1 : slots;
    }
    return subtract_or_zero(slots, reserve + map_slots(stream));
}

/* ---- chunks ---------------------------------------------------------------------------------- */

/* Solves for n: n cached ones of c chunks leave (1 - n / c) of the windows and of the look-ahead to
 * be read. */
uint32_t chunk_slots(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    double slots = reader->slots_max;
    double chunks = (double)reader->chunk_count;
    double window = sequence_kind(stream->config.sequence) == DLFS_ORDER_CHUNK
                        ? sequence_window(stream->config.sequence)
                        : 1;
    double lookahead = (double)(AHEAD_BYTES >> reader->chunk_shift);
    double transit = window + (lookahead < slots / 8 ? lookahead : slots / 8);
    double least =
        CHUNKS_AHEAD + 2.0 * (double)shift_up(stream->need.largest_bytes, reader->chunk_shift);
    if (transit >= chunks || slots <= least + transit) {
        return 0;
    }
    return (uint32_t)((slots - least - transit) / (1 - transit / chunks));
}

uint32_t chunk_copy_cache_slots(const dlfs_reader *reader)
{
    uint64_t copied = reader->chunk_count / COPY_MEMORY_SHARE;
    uint64_t slots = reader->slots_max;
    uint64_t cached =
        slots > copied ? (slots - copied) * COPY_MEMORY_SHARE / (COPY_MEMORY_SHARE - 1) : 0;
    uint32_t most = subtract_or_zero(slots, COPY_MARGIN_SLOTS);
    return cached < most ? (uint32_t)cached : most;
}

/* ---- division of the slots ------------------------------------------------------------------- */

/*
 * Returns the bound of cache_spread for cached chunks. The missing samples are to be spread evenly
 * over each epoch, also the first one, so the samples of a share of the chunks are cached. The
 * samples fill about that share of the memory; the slots are the actual bound. All samples may be
 * cached if only unlucky packing could leave some of them out.
 */
static uint64_t cached_share(const dlfs_stream *stream)
{
    uint64_t needed = needed_slots(stream);
    uint64_t slots = stream->reader->cache.slots_max;
    bool fits = shift_up(packed_bytes(&stream->need), stream->reader->chunk_shift) <= slots;
    return fits ? UINT64_MAX : (slots << 32) / needed;
}

void stream_size_cache(dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    if (stream->plan == DLFS_PLAN_DIRECT) {
        stream->cached_slots = packed_slots(stream);
    } else if (reader->dataset_fits) {
        stream->cached_slots = 0; /* chunks stay even if they are not cached */
    } else if (stream->plan == DLFS_PLAN_CHUNKS) {
        stream->cached_slots = chunk_slots(stream);
    } else {
        stream->cached_slots = stream->need.partial ? 0 : chunk_copy_cache_slots(reader);
    }
}

/*
 * The cache has the slots that the open streams' reserves leave; without a stream, as many as
 * before. But a reader that holds the whole dataset then caches nothing: chunks that are read stay
 * instead.
 */
void reader_divide_slots(dlfs_reader *reader)
{
    uint64_t reserve = 0;
    uint32_t extent = 1;
    bool packs = false;
    for (const dlfs_stream *stream = reader->streams; stream != NULL; stream = stream->next) {
        reserve += subtract_or_zero(reader->slots_max, stream->cached_slots);
        uint32_t slots = packed_run_slots(stream);
        extent = slots > extent ? slots : extent;
        packs |= stream->plan == DLFS_PLAN_DIRECT;
    }
    if (reader->streams == NULL) {
        reserve =
            reader->dataset_fits ? reader->slots_max : reader->slots_max - reader->cache.slots_max;
    }
    cache_set_limits(reader, subtract_or_zero(reader->slots_max, reserve), extent, packs);
    for (dlfs_stream *stream = reader->streams; stream != NULL; stream = stream->next) {
        stream->cached_share = cached_share(stream);
    }
}
