/*
 * Chooses the plan of a stream, and prepares the sample cache for it.
 *
 * The choice compares the bytes that an epoch reads from the devices. Of an epoch of n bytes, a
 * cache of c bytes saves the share c / n if the samples are read one by one, or as chunks that the
 * epoch uses whole. The chunk copy plan reads a chunk several times an epoch. It suits samples that
 * are so much smaller than a block, or than a request's own cost (gap_bytes), that reading them one
 * by one is worse.
 */
#include "sequence/sequence.h"
#include "stream/state.h"

/* A sample is tiny if gap_bytes is more than TINY_SHARE times its length: its request costs more
 * than its bytes. */
#define TINY_SHARE 8u
/* Largest ratio of whole chunks, which need no map, to the bytes of their samples. */
#define PADDING_MAX 1.25

/* Bytes that one sample costs. */
struct cost {
    double bytes;        /* that are read */
    double with_request; /* including the cost of its request in bytes */
};

/* Returns the cost of samples that are read one by one; cached ones cost nothing. */
static struct cost direct_cost(const dlfs_stream *stream)
{
    double bytes = (double)stream->need.read_bytes;
    double missing = 1 - (double)packed_slots(stream) / (double)needed_slots(stream);
    missing = missing > 0 ? missing : 0;
    return (struct cost){missing * bytes,
                         missing * (bytes + (double)stream->reader->config.gap_bytes)};
}

/* Returns the cost of samples copied out of chunks, if `mixed` samples are in random order. */
static struct cost chunk_copy_cost(const dlfs_stream *stream, double per_chunk, double selected,
                                   double mixed)
{
    const dlfs_reader *reader = stream->reader;
    const dlfs_stream_config *config = &stream->config;
    uint32_t cached = stream->need.partial ? 0 : chunk_copy_cache_slots(reader);
    double lookahead = (double)chunk_copy_lookahead(reader, stream->need.mean_bytes, cached);
    double copied = lookahead / mixed / selected;
    double own_share = config->group ? (double)config->group / (double)config->group_stride
                                     : 1.0 / (double)config->stride;
    copied = copied < own_share ? copied : own_share;
    double chunk = (double)reader->config.chunk_bytes;
    double missing = 1 - (double)cached / (double)reader->chunk_count;
    double reads = (missing > 0 ? missing : 0) / (1 + per_chunk * copied);
    /* At the beginning of an epoch all chunks are read for what fits: about twice the bytes. */
    return (struct cost){2 * chunk * reads, (chunk + (double)reader->config.gap_bytes) * reads};
}

/* Chooses the plan of an order that uses a chunk's samples soon one after the other. */
static uint32_t plan_in_sequence(const dlfs_stream *stream, double per_chunk)
{
    const dlfs_reader *reader = stream->reader;
    double chunks = (double)(reader->config.chunk_bytes + reader->config.gap_bytes);
    double direct = (double)(stream->need.read_bytes + reader->config.gap_bytes);
    if ((reader->config.flags & DLFS_READER_PARTS) == 0) { /* else compare what is read at first */
        chunks *= 1 - (double)chunk_slots(stream) / (double)reader->chunk_count;
        direct = direct_cost(stream).with_request;
    }
    return chunks <= direct * per_chunk ? DLFS_PLAN_CHUNKS : DLFS_PLAN_DIRECT;
}

/* Chooses the plan of a reader whose memory holds the whole dataset. */
static uint32_t plan_in_memory(const dlfs_stream *stream, double per_chunk, bool tiny)
{
    const dlfs_reader_config *config = &stream->reader->config;
    double request = tiny ? (double)config->gap_bytes : 0;
    double direct = (request + (double)stream->need.read_bytes) * per_chunk;
    double most = stream->need.partial ? direct : direct * PADDING_MAX;
    return request + (double)config->chunk_bytes > most ? DLFS_PLAN_DIRECT : DLFS_PLAN_CHUNKS;
}

static uint32_t choose_plan(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    const dlfs_sequence *sequence = stream->config.sequence;
    const struct epoch_need *need = &stream->need;
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
    /* If memory holds all chunks of a window, each of them is read once. */
    bool windowed = kind == DLFS_ORDER_CHUNK && sequence_window(sequence) > reader->slots_max;
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
               ? DLFS_PLAN_CHUNK_COPY
               : DLFS_PLAN_DIRECT;
}

/* ---- the streams of a reader ----------------------------------------------------------------- */

/* Returns the most bytes to read for the cache at a time: twice what the queues take, and a chunk
 * at least. */
static uint64_t to_cache_bytes_max(const dlfs_stream *stream)
{
    const dlfs_reader *reader = stream->reader;
    uint64_t queues = 2 * (uint64_t)reader->config.depth * reader->config.member_count;
    uint64_t memory = (uint64_t)reader->slots_max << reader->chunk_shift >> 2;
    uint64_t most = queues * stream->need.read_bytes;
    most = most > reader->config.chunk_bytes ? most : reader->config.chunk_bytes;
    return most < memory ? most : memory;
}

/* Returns the samples that an epoch gives until each was given once. */
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
    pthread_mutex_lock(&reader->arena->lock); /* the plan depends on the other streams */
    arena_divide(reader->arena);
    stream->share_changes = reader->share.changes;
    stream->plan = choose_plan(stream);
    stream->to_cache_bytes_max = to_cache_bytes_max(stream);
    stream_size_cache(stream);
    if (stream->plan == DLFS_PLAN_CHUNKS && reader->dataset_fits) {
        fill_want(reader, subtract_or_zero(reader->chunk_count, reader->share.chunks)); /* all */
    }
    if (stream->cached_slots > 0 && stream->plan == DLFS_PLAN_DIRECT) {
        cache_reserve_map(reader, map_samples(stream));
    }
    reader->cache.batches_pinned /= reader->cache.batches_pinned > CACHE_BATCHES_PINNED_MIN ? 2 : 1;
    cache_begin_epoch(reader, epoch_samples(stream));
    stream->next = reader->streams;
    reader->streams = stream;
    reader_divide_slots(reader);
    pthread_mutex_unlock(&reader->arena->lock);
}

/* Divides the slots again, for a stream that needs another share of them. */
static void resize_cache(dlfs_stream *stream)
{
    if (stream->plan != DLFS_PLAN_CHUNK_COPY) { /* which has divided its memory already */
        stream_size_cache(stream);
    }
    reader_divide_slots(stream->reader);
}

void plan_batch_grew(dlfs_stream *stream)
{
    if (stream->awaited <= stream->awaited_max) {
        return;
    }
    stream->awaited_max = stream->awaited;
    resize_cache(stream);
}

void plan_memory_ran_out(dlfs_stream *stream)
{
    if (stream->cached_slots == 0 || stream->plan != DLFS_PLAN_DIRECT) {
        return;
    }
    if (!stream->cache_crowded && needed_slots(stream) <= stream->reader->slots_max) {
        stream->cache_crowded = true; /* another selection's samples fill the cache */
    } else {
        stream->reader->cache.batches_pinned *= 2;
    }
    resize_cache(stream);
}

/*
 * Gives up what was read ahead, from its end on, until the reader holds no more than its share.
 * What is being read meanwhile is given up as it lands: it would take the memory of what is needed
 * first. What nothing holds any more is evicted, or the look-ahead would find it and hold it again.
 */
static void give_up(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    uint64_t first = stream->head + stream->awaited;
    for (uint64_t at = stream->filled; at > first && share_is_pinned(reader); at--) {
        struct entry *entry = entry_at(stream, at - 1);
        if (entry->state == ENTRY_READY && entry->length > 0 && !entry->in_bucket) {
            entry_give_up(stream, at - 1);
        }
        entry->given_up = entry->state == ENTRY_WAITING;
    }
    arena_evict_excess(reader);
}

void plan_follow_share(dlfs_stream *stream)
{
    dlfs_reader *reader = stream->reader;
    stream->share_changes = reader->share.changes;
    if (stream->plan == DLFS_PLAN_CHUNKS && choose_plan(stream) != DLFS_PLAN_CHUNKS) {
        stream->plan = DLFS_PLAN_DIRECT; /* chunks would be evicted before they are used */
        cache_reserve_map(reader, map_samples(stream));
    }
    stream->to_cache_bytes_max = to_cache_bytes_max(stream);
    resize_cache(stream);
    give_up(stream);
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
    if (stream->reader->streams == NULL && stream->head < stream->config.count) {
        fill_pause(stream->reader);
    }
    reader_divide_slots(stream->reader);
}
