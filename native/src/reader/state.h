/* The state of a reader: the structures that its layers share, and the locations of samples. */
#ifndef DLFS_READER_STATE_H
#define DLFS_READER_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "arena/arena.h"
#include "arena/cache_map.h"
#include "dlfs/dlfs.h"
#include "reader/batch.h"
#include "reader/prober.h"

struct fetch;

/* The state of a member that all threads share. */
struct member {
    /* 0: not lost; else time of the next probe; UINT64_MAX: there is no device */
    _Atomic uint64_t lost_until_ns;
    _Atomic uint32_t failures; /* failed requests in a row */
    _Atomic uint32_t probes;   /* probes since it was lost, which double the interval */
    _Atomic int code;          /* why it was lost, the last time */
    _Atomic bool hung;         /* lost because it did not answer within the whole timeout */
};

struct dlfs_reader {
    dlfs_reader_config config;
    dlfs_device **devices;
    struct member *members;         /* [member_count] */
    struct chunk_map *map;          /* the chunks of the dataset on the members */
    const dlfs_location *locations; /* [sample_count] as the directory stores them */
    uint64_t sample_count;
    uint64_t data_bytes;
    uint64_t chunk_count;
    uint32_t chunk_shift; /* log2 of chunk_bytes */
    /* Its share has room for the whole dataset, and chunks stay once read. */
    _Atomic bool dataset_fits;

    dlfs_arena *arena;                /* its lock guards what follows */
    struct shareholder share;         /* of the arena */
    _Atomic uint32_t slots_max;       /* slots that it may hold: its share of the arena */
    bool owns_arena;                  /* no other reader shares it */
    pthread_cond_t released;          /* a slot became free or idle, or the share has changed */
    uint64_t channels;                /* of clients that use it (reader/residents.c) */
    uint64_t resident_offset;         /* of resident_slots in the arena */
    _Atomic uint32_t *resident_slots; /* [chunk_count] slot + 1 of each resident chunk, which other
                                         processes look up; NULL without a reservation */
    struct prober prober;
    struct slot_list idle_slots; /* CHUNK, not cached, without references */
    struct cache cache;
    uint32_t *chunk_slots; /* [chunk_count] slot + 1 of a chunk that is LOADING or CHUNK, else 0 */
    uint32_t *chunk_data;  /* [chunk_count] bytes of a chunk up to the end of its last sample, in
                              whole blocks: no more of a chunk is read */
    bool in_one_chunk;     /* every sample lies in one chunk, and chunks are read whole */
    uint64_t slots_enough; /* slots with which it reads nothing twice */
    struct fetch *idle_fetches;
    struct fetch *draining_fetches; /* idle, but a device may still write for reads that were
                                       abandoned */
    struct batch *idle_batches;
    size_t idle_batches_bytes; /* of their arrays */
    size_t idle_plans_bytes;   /* of the plans of idle and draining fetches */
    uint64_t references; /* the owner's, one for each batch and one for each channel; the last one
                            frees the reader */
    uint64_t fetches_in_use;
    uint64_t open_streams;
    dlfs_stream *streams; /* list of the open ones */
    dlfs_reader_stats stats;
    dlfs_member_stats *member_stats; /* [member_count] */
    _Atomic uint64_t copy_ns;
};

/* ---- locations and slots --------------------------------------------------------------------- */

/* The location of a sample in the data space, decoded and checked. */
struct location {
    uint64_t address;
    uint64_t length;
    uint64_t chunk; /* of its first byte */
    uint32_t crc32c;
};

/* Decodes the location of a sample. Returns false if it is outside the dataset's data. */
static inline bool reader_locate(const dlfs_reader *reader, uint64_t index,
                                 struct location *location)
{
    const dlfs_location *packed = &reader->locations[index];
    location->address = dlfs_location_address(packed);
    location->length = dlfs_location_length(packed);
    location->crc32c = packed->crc32c;
    location->chunk = location->address >> reader->chunk_shift;
    return location->address <= reader->data_bytes &&
           location->length <= reader->data_bytes - location->address;
}

/* Returns true if a sample lies in one chunk. */
static inline bool location_in_one_chunk(const dlfs_reader *reader, const struct location *location)
{
    return (location->address + location->length - 1) >> reader->chunk_shift == location->chunk;
}

/* Returns the length of the part of a sample that begins at an address, in one chunk. */
static inline uint64_t location_part_length(const dlfs_reader *reader,
                                            const struct location *location, uint64_t address)
{
    uint64_t left = location->address + location->length - address;
    return left < reader->config.chunk_bytes ? left : reader->config.chunk_bytes;
}

/* Returns the address behind the last block that holds samples of a chunk. */
static inline uint64_t reader_chunk_end(const dlfs_reader *reader, uint64_t chunk)
{
    return (chunk << reader->chunk_shift) + reader->chunk_data[chunk];
}

/* Returns the address behind the last block that holds samples of a sample's chunks. */
static inline uint64_t reader_chunks_end(const dlfs_reader *reader, uint64_t address,
                                         uint64_t length)
{
    return reader_chunk_end(reader, (address + length - 1) >> reader->chunk_shift);
}

/* Returns the first byte of a slot. */
static inline uint8_t *slot_memory(const dlfs_reader *reader, uint32_t slot)
{
    return reader->arena->memory + ((size_t)slot << reader->chunk_shift);
}

/* Returns the slot that an offset of the arena lies in. */
static inline uint32_t slot_of(const dlfs_reader *reader, uint64_t arena_offset)
{
    return (uint32_t)(arena_offset >> reader->chunk_shift);
}

#endif
