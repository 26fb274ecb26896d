/* Mixing of 64-bit values, for keys and for random numbers that are a function of a counter. */
#ifndef DLFS_MIX_H
#define DLFS_MIX_H

#include <stdint.h>

#define MIX_GOLDEN UINT64_C(0x9E3779B97F4A7C15)
#define MIX_STREAM_SALT UINT64_C(0xD1B54A32D192ED03)

/* The finaliser of splitmix64. */
static inline uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ value >> 27) * UINT64_C(0x94D049BB133111EB);
    return value ^ value >> 31;
}

#endif
