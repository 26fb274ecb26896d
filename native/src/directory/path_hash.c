/*
 * XXH64 of a path.
 *
 * Source: Yann Collet, "xxHash fast digest algorithm", doc/xxhash_spec.md of
 * github.com/Cyan4973/xxHash, section "XXH64 Algorithm Description".
 */
#include "dlfs/dlfs.h"

#include <endian.h>
#include <string.h>

#define PRIME_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME_3 UINT64_C(0x165667B19E3779F9)
#define PRIME_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME_5 UINT64_C(0x27D4EB2F165667C5)
#define STRIPE_BYTES 32

static uint64_t rotate(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

static uint64_t load64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return le64toh(value);
}

static uint32_t load32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return le32toh(value);
}

static uint64_t round64(uint64_t accumulator, uint64_t lane)
{
    return rotate(accumulator + lane * PRIME_2, 31) * PRIME_1;
}

static uint64_t merge(uint64_t hash, uint64_t accumulator)
{
    return (hash ^ round64(0, accumulator)) * PRIME_1 + PRIME_4;
}

/* Hashes the whole stripes of at[0..bytes), bytes >= STRIPE_BYTES. */
static uint64_t hash_stripes(const uint8_t *at, size_t bytes, uint64_t seed)
{
    uint64_t a = seed + PRIME_1 + PRIME_2, b = seed + PRIME_2, c = seed, d = seed - PRIME_1;
    for (; bytes >= STRIPE_BYTES; at += STRIPE_BYTES, bytes -= STRIPE_BYTES) {
        a = round64(a, load64(at));
        b = round64(b, load64(at + 8));
        c = round64(c, load64(at + 16));
        d = round64(d, load64(at + 24));
    }
    uint64_t hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
    return merge(merge(merge(merge(hash, a), b), c), d);
}

/* Hashes the bytes after the stripes: fewer than STRIPE_BYTES. */
static uint64_t hash_tail(uint64_t hash, const uint8_t *at, size_t bytes)
{
    for (; bytes >= 8; at += 8, bytes -= 8) {
        hash = rotate(hash ^ round64(0, load64(at)), 27) * PRIME_1 + PRIME_4;
    }
    if (bytes >= 4) {
        hash = rotate(hash ^ load32(at) * PRIME_1, 23) * PRIME_2 + PRIME_3;
        at += 4;
        bytes -= 4;
    }
    for (; bytes > 0; at++, bytes--) {
        hash = rotate(hash ^ *at * PRIME_5, 11) * PRIME_1;
    }
    return hash;
}

uint64_t dlfs_path_hash(const void *path, size_t bytes, uint64_t seed)
{
    const uint8_t *at = path;
    size_t striped = bytes / STRIPE_BYTES * STRIPE_BYTES;
    uint64_t hash = striped > 0 ? hash_stripes(at, striped, seed) : seed + PRIME_5;
    hash += bytes;
    if (bytes > striped) {
        hash = hash_tail(hash, at + striped, bytes - striped);
    }
    hash = (hash ^ hash >> 33) * PRIME_2;
    hash = (hash ^ hash >> 29) * PRIME_3;
    return hash ^ hash >> 32;
}
