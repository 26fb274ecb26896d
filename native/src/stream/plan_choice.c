/*
 * What a stream decides when it begins: by which plan it reads, and how many slots it leaves to the
 * sample cache (reader/cache.c).
 *
 * It compares the bytes that an epoch reads from the devices. Of an epoch that takes n bytes, a
 * cache of c bytes saves the share c / n if the samples are read one by one, or chunks that the
 * epoch takes whole. Harvesting reads a chunk several times an epoch: it is for samples so much
 * smaller than a request's own cost (gap_bytes) or a block that reading them one by one is worse.
 *
 * The cache has all slots but a reserve. Where all that the epoch takes fits, that is MARGIN_SLOTS
 * and room for two samples, for reads under way: samples go to the cache as they land. Else
 * look-ahead and batches need memory for the share of samples that is not cached: twice what the
 * queues take, at most an eighth of the slots, or as many batches as consumers were seen to hold at
 * once, if that is more. Nobody tells how many that are: at first two, and twice as many when a
 * stream had no memory for its next batch. The reserve shrinks as the cache's share grows, so that
 * more memory never caches less.
 */
#include <stdlib.h>

#include "platform/mix.h"
#include "sequence/sequence.h"
#include "stream/stream.h"

#define LENGTHS_SAMPLED_MAX (UINT64_C(1) << 18) /* samples whose lengths choose_need looks at */
#define MARGIN_SLOTS 4u
#define AHEAD_BYTES (UINT64_C(8) << 20) /* of chunks read ahead */
#define CHUNKS_AHEAD 8u
/* A sample costs a request more than so many of it: one by one is no way to read it. */
#define TINY_SHARE 8u
/* Whole chunks, which are found without the cache's map, may be so many times their samples' bytes.
 */
#define PADDING_MOST 1.25
#define PACKED_RUN_SAMPLES 32u /* so that at most 1/32 of a PACKED run is lost at its end */
#define PACKED_OVERHEAD 12u    /* bytes of a packed sample: its index, and half of the alignment */
#define MAP_OVERHEAD 22u       /* ... and its places of the map */
/* What is harvested has memory for one in so many of its samples; the cache has the rest. */
#define COPY_MEMORY_SHARE 2u
#define COPY_MARGIN_SLOTS (MARGIN_SLOTS + 4u) /* with chunks on their way, and buckets */

static uint64_t shift_up(uint64_t bytes, uint32_t shift)
{
    return (bytes + (UINT64_C(1) << shift) - 1) >> shift;
}

/* How many different samples a list has; as many as its entries where memory is short. */
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

/* The samples that an epoch is made of, and how many of them choose_need looks at. */
struct length_sample {
    const dlfs_reader *reader;
    const uint64_t *chosen; /* [count] or NULL: all samples */
    uint64_t count;
    uint64_t sampled_count;
};

/* The length of the look-th sample to look at: each of them, or some that are drawn at random. */
static uint64_t sampled_length(const struct length_sample *length_sample, uint64_t look)
{
    struct location location;
    uint64_t at = length_sample->sampled_count == length_sample->count
                      ? look
                      : mix(look) % length_sample->count;
    uint64_t index = length_sample->chosen != NULL ? length_sample->chosen[at] : at;
    return reader_locate(length_sample->reader, index, &location) ? location.length : 0;
}

static uint32_t packed_run_slots(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    uint64_t wished = shift_up(PACKED_RUN_SAMPLES * stream->need.mean_bytes, reader->chunk_shift);
    if (stream->need.mean_bytes * PACKED_RUN_SAMPLES <= reader->config.chunk_bytes) {
        return 1;
    }
    uint64_t most = reader->slot_count / 4;
    uint64_t slots = wished < most ? wished : most;
    return slots > 1 ? (uint32_t)slots : 1;
}

static uint64_t run_bytes(const dlfs_stream *stream)
{
    return (uint64_t)packed_run_slots(stream) << stream->reader->chunk_shift;
}

/* Bytes lost at the end of a run: half of the sample that does not fit, which may be any byte's. */
static double end_bytes(const dlfs_stream *stream, const struct length_sample *length_sample)
{
    double run = (double)run_bytes(stream);
    double sum = 0;
    double squares = 0;
    for (uint64_t look = 0; look < length_sample->sampled_count; look++) {
        double length = (double)sampled_length(length_sample, look);
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
    struct need *need = &stream->need;
    struct length_sample length_sample = {.reader = reader};
    length_sample.chosen = sequence_chosen(sequence, &length_sample.count);
    length_sample.sampled_count =
        length_sample.count < LENGTHS_SAMPLED_MAX ? length_sample.count : LENGTHS_SAMPLED_MAX;
    uint64_t bytes = 0;
    for (uint64_t look = 0; look < length_sample.sampled_count; look++) {
        uint64_t length = sampled_length(&length_sample, look);
        bytes += length;
        need->largest_bytes = length > need->largest_bytes ? length : need->largest_bytes;
    }
    uint64_t mean = length_sample.sampled_count ? bytes / length_sample.sampled_count : 0;
    uint64_t positions = sequence_count(sequence);
    uint64_t block = reader->config.block_bytes;
    need->mean_bytes = mean ? mean : 1;
    need->end_bytes = end_bytes(stream, &length_sample);
    need->samples = length_sample.count;
    if (sequence_kind(sequence) == DLFS_ORDER_LIST) {
        need->samples = count_different(length_sample.chosen, positions, reader->sample_count);
    }
    need->samples = positions < need->samples ? positions : need->samples;
    need->bytes = need->samples == length_sample.sampled_count ? bytes : need->samples * mean;
    need->read_bytes = mean % block == 0 ? need->mean_bytes : mean + block;
    need->partial = length_sample.chosen != NULL && need->samples < reader->sample_count;
}

/* ---- how much is cached ---------------------------------------------------------------------- */

/* Samples that the map has to have places for. */
static uint64_t map_samples(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    uint64_t fit = ((uint64_t)reader->slot_count << reader->chunk_shift) /
                   (stream->need.mean_bytes + PACKED_OVERHEAD + MAP_OVERHEAD);
    return stream->need.samples < fit ? stream->need.samples : fit;
}

static uint64_t map_slots(const dlfs_stream *stream)
{
    return shift_up(cache_map_bytes(map_samples(stream)), stream->reader->chunk_shift);
}

/* Bytes of the packed samples of the whole epoch. */
static uint64_t packed_bytes(const struct need *need)
{
    return need->bytes + need->samples * PACKED_OVERHEAD;
}

/* Slots that they would take, with the map and what is lost at the ends of runs. */
static uint64_t needed_slots(const dlfs_stream *stream)
{
    const struct need *need = &stream->need;
    uint64_t bytes = packed_bytes(need);
    bytes += (bytes / run_bytes(stream) + 1) * (uint64_t)need->end_bytes;
    return shift_up(bytes, stream->reader->chunk_shift) + map_slots(stream);
}

/* What is left of a number of slots. */
static uint32_t left(uint64_t slots, uint64_t taken)
{
    return (uint32_t)(slots > taken ? slots - taken : 0);
}

/*
 * Memory that a sample takes where it lands, with what lies between it and the next one and is read
 * with it: in a list, neighbours may be as near to one another as the share of samples in it says.
 */
static double landing_bytes(const dlfs_stream *stream)
{
    const struct need *need = &stream->need;
    if (sequence_kind(stream->config.sequence) != DLFS_ORDER_LIST || need->samples == 0) {
        return (double)need->read_bytes;
    }
    double between = (double)stream->reader->data_bytes / (double)need->samples;
    double gap = (double)stream->reader->config.gap_bytes;
    return (double)need->read_bytes + (between < gap ? between : gap) / 3;
}

/* Slots of packed samples, with the map: all but the reserve for samples that are not cached. */
static uint32_t packed_slots(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    const struct need *need = &stream->need;
    uint64_t slots = reader->slot_count;
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
        double wished = (double)margin + (batches > lookahead ? batches : lookahead);
        reserve = wished < (double)slots ? (uint64_t)wished + 1 : slots;
    }
    return left(slots, reserve + map_slots(stream));
}

/*
 * Slots of whole chunks. Of c chunks, l cached ones leave (1 - l / c) of the windows and of the
 * look-ahead to be read.
 */
static uint32_t chunk_slots(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    double slots = reader->slot_count;
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
    uint64_t in_bucket = reader->chunk_count / COPY_MEMORY_SHARE;
    uint64_t slots = reader->slot_count;
    uint64_t cached =
        slots > in_bucket ? (slots - in_bucket) * COPY_MEMORY_SHARE / (COPY_MEMORY_SHARE - 1) : 0;
    uint32_t most = left(slots, COPY_MARGIN_SLOTS);
    return cached < most ? (uint32_t)cached : most;
}

/*
 * What is missing is to be spread evenly over each epoch, the first one as well: so the samples of
 * a share of the chunks are cached. They fill about as much memory; the slots are the bound. Where
 * only an unlucky packing would leave samples out, all may be cached.
 */
static uint64_t cached_share(const dlfs_stream *stream)
{
    uint64_t needed = needed_slots(stream);
    uint64_t slots = stream->reader->cache.slots_max;
    bool fits = shift_up(packed_bytes(&stream->need), stream->reader->chunk_shift) <= slots;
    return fits ? UINT64_MAX : (slots << 32) / needed;
}

static uint32_t cached_slots(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    if (stream->plan == DLFS_PLAN_DIRECT) {
        return packed_slots(stream);
    }
    if (reader->dataset_fits) {
        return 0; /* chunks stay without being cached */
    }
    if (stream->plan == DLFS_PLAN_CHUNKS) {
        return chunk_slots(stream);
    }
    return stream->need.partial ? 0 : chunk_copy_cache_slots(reader);
}

/* ---- the plan -------------------------------------------------------------------------------- */

/* Whether memory holds all chunks of a window, so that each of them is read once. */
static bool window_fits(const dlfs_reader *reader, const dlfs_sequence *sequence)
{
    return sequence_window(sequence) <= reader->slot_count;
}

/* Bytes that one sample costs; with those of its request, or without. */
struct cost {
    double bytes;
    double with_request;
};

/* The cost of samples that are read one by one, those that are cached not at all. */
static struct cost direct_cost(const dlfs_stream *stream)
{
    double bytes = (double)stream->need.read_bytes;
    double missing = 1 - (double)packed_slots(stream) / (double)needed_slots(stream);
    missing = missing > 0 ? missing : 0;
    return (struct cost){missing * bytes,
                         missing * (bytes + (double)stream->reader->config.gap_bytes)};
}

/* ... of samples that are harvested, where `mixed` samples lie in random order. */
static struct cost chunk_copy_cost(const dlfs_stream *stream, double per_chunk, double selected,
                                   double mixed)
{
    const dlfs_reader *reader = stream->reader;
    const dlfs_stream_config *config = &stream->config;
    uint32_t cached = stream->need.partial ? 0 : chunk_copy_cache_slots(reader);
    double lookahead = (double)chunk_copy_lookahead(reader, stream->need.mean_bytes, cached);
    double kept = lookahead / mixed / selected;
    double share = config->group ? (double)config->group / (double)config->group_stride
                                 : 1.0 / (double)config->stride;
    kept = kept < share ? kept : share;
    double chunk = (double)reader->config.chunk_bytes;
    double missing = 1 - (double)cached / (double)reader->chunk_count;
    double reads = (missing > 0 ? missing : 0) / (1 + per_chunk * kept);
    /* At the beginning of an epoch all chunks are read, and give what fits: twice, on the whole. */
    return (struct cost){2 * chunk * reads, (chunk + (double)reader->config.gap_bytes) * reads};
}

/* The plan of an order that takes a chunk's samples one soon after the other. */
static uint32_t plan_in_sequence(const dlfs_stream *stream, double per_chunk)
{
    const dlfs_reader *reader = stream->reader;
    double missing = 1 - (double)chunk_slots(stream) / (double)reader->chunk_count;
    double chunks = missing * (double)(reader->config.chunk_bytes + reader->config.gap_bytes);
    return chunks <= direct_cost(stream).with_request * per_chunk ? DLFS_PLAN_CHUNKS
                                                                  : DLFS_PLAN_DIRECT;
}

/* The plan of a reader whose memory takes the whole dataset. */
static uint32_t plan_in_memory(const dlfs_stream *stream, double per_chunk, bool tiny)
{
    const dlfs_reader_config *config = &stream->reader->config;
    double request = tiny ? (double)config->gap_bytes : 0;
    double direct = (request + (double)stream->need.read_bytes) * per_chunk;
    double most = stream->need.partial ? direct : direct * PADDING_MOST;
    return request + (double)config->chunk_bytes > most ? DLFS_PLAN_DIRECT : DLFS_PLAN_CHUNKS;
}

static uint32_t choose_plan(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    const dlfs_sequence *sequence = stream->config.sequence;
    const struct need *need = &stream->need;
    if (stream->config.plan != DLFS_PLAN_AUTO) {
        return stream->config.plan;
    }
    uint32_t kind = sequence_kind(sequence);
    double selected = need->partial ? (double)need->samples / (double)reader->sample_count : 1;
    double per_chunk = selected * (double)reader->sample_count / (double)reader->chunk_count;
    bool tiny = need->mean_bytes * TINY_SHARE < reader->config.gap_bytes;
    if (reader->dataset_fits) {
        return plan_in_memory(stream, per_chunk, tiny);
    }
    bool windowed = kind == DLFS_ORDER_CHUNK && !window_fits(reader, sequence);
    if (!sequence_permutes(sequence) && !windowed) {
        return kind >= DLFS_ORDER_LIST ? DLFS_PLAN_DIRECT : plan_in_sequence(stream, per_chunk);
    }
    double mixed = (double)reader->sample_count;
    if (windowed && sequence_window(sequence) < reader->chunk_count) {
        mixed = per_chunk * (double)sequence_window(sequence);
    }
    struct cost direct = direct_cost(stream);
    struct cost copy = chunk_copy_cost(stream, per_chunk, selected, mixed);
    bool fewer_bytes = copy.bytes < direct.bytes || (tiny && !need->partial);
    return per_chunk > 1 && fewer_bytes && copy.with_request < direct.with_request
               ? DLFS_PLAN_HARVEST
               : DLFS_PLAN_DIRECT;
}

/* ---- the streams of a reader ----------------------------------------------------------------- */

/* Bytes that may be under way to the cache: twice what the queues take, and a chunk at least. */
static uint64_t to_cache_bytes_max(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    uint64_t queues = 2 * (uint64_t)reader->config.depth * reader->config.member_count;
    uint64_t memory = (uint64_t)reader->slot_count << reader->chunk_shift >> 2;
    uint64_t most = queues * stream->need.read_bytes;
    most = most > reader->config.chunk_bytes ? most : reader->config.chunk_bytes;
    return most < memory ? most : memory;
}

/*
 * The cache has what the streams' reserves leave; when none reads, what the last one left. But
 * where memory takes the whole dataset it then has nothing: chunks that are read stay instead.
 */
static void divide_cache(dlfs_reader *reader)
{
    uint64_t reserve = 0;
    uint32_t extent = 1;
    bool packs = false;
    for (const dlfs_stream *stream = reader->streams; stream != NULL; stream = stream->next) {
        reserve += reader->slot_count - stream->cached_slots;
        uint32_t slots = packed_run_slots(stream);
        extent = slots > extent ? slots : extent;
        packs |= stream->plan == DLFS_PLAN_DIRECT;
    }
    if (reader->streams == NULL) {
        reserve = reader->dataset_fits ? reader->slot_count
                                       : reader->slot_count - reader->cache.slots_max;
    }
    cache_set_limits(reader, left(reader->slot_count, reserve), extent, packs);
    for (dlfs_stream *stream = reader->streams; stream != NULL; stream = stream->next) {
        stream->cached_share = cached_share(stream);
    }
}

/* Samples that an epoch gives out until each has had its turn. */
static uint64_t epoch_samples(const dlfs_stream *stream)
{
    uint64_t chosen;
    uint64_t count = sequence_count(stream->config.sequence);
    (void)sequence_chosen(stream->config.sequence, &chosen);
    return chosen > count ? chosen : count;
}

void plan_begin(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    pthread_mutex_lock(&reader->lock); /* what other streams lend and cache counts */
    stream->plan = choose_plan(stream);
    stream->to_cache_bytes_max = to_cache_bytes_max(stream);
    stream->cached_slots = cached_slots(stream);
    if (stream->cached_slots > 0 && stream->plan == DLFS_PLAN_DIRECT) {
        cache_reserve_map(reader, map_samples(stream));
    }
    reader->cache.batches_pinned /= reader->cache.batches_pinned > CACHE_BATCHES_PINNED_MIN ? 2 : 1;
    cache_begin_epoch(reader, epoch_samples(stream));
    stream->next = reader->streams;
    reader->streams = stream;
    divide_cache(reader);
    pthread_mutex_unlock(&reader->lock);
}

void plan_batch_grew(dlfs_stream *stream)
{
    if (stream->awaited <= stream->awaited_max) {
        return;
    }
    stream->awaited_max = stream->awaited;
    if (stream->plan != DLFS_PLAN_HARVEST) { /* which has divided its memory */
        stream->cached_slots = cached_slots(stream);
    }
    divide_cache(stream->reader);
}

void plan_memory_ran_out(dlfs_stream *stream)
{
    if (stream->cached_slots == 0 || stream->plan != DLFS_PLAN_DIRECT) {
        return;
    }
    if (!stream->cache_crowded && needed_slots(stream) <= stream->reader->slot_count) {
        stream->cache_crowded = true; /* what is cached is another selection's */
    } else {
        stream->reader->cache.batches_pinned *= 2;
    }
    stream->cached_slots = cached_slots(stream);
    divide_cache(stream->reader);
}

void plan_end(dlfs_stream *stream)
{
    dlfs_stream **at = &stream->reader->streams;
    while (*at != NULL && *at != stream) {
        at = &(*at)->next;
    }
    if (*at != NULL) {
        *at = stream->next;
    }
    divide_cache(stream->reader);
}
