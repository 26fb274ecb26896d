/*
 * CRC32C, by the processor's instruction if it has one, else by tables.
 *
 * The instruction takes 8 bytes a cycle but has a latency of 3 cycles. So the bytes are divided
 * into three lanes of equal length that are computed in parallel, and the three remainders are
 * combined at the end. A remainder is moved over n bytes by a carry-less multiplication with
 * x^(8n-33) mod P, and the instruction itself reduces the product (33 = 32 that the instruction
 * multiplies by, and 1 that reflected factors lose). The constants for every lane length up to
 * LANE_WORDS_MAX words are computed at the first use.
 *
 * Lanes fit any length: 512 bytes are three lanes of 21 words and one word more, 4096 bytes three
 * lanes of 170 words and two more.
 *
 * With 32-byte registers that can be multiplied (VPCLMULQDQ with AVX2), four of them hold the
 * state, and 128 bytes are folded into them at a time. Their 16-byte parts are moved over the
 * following bytes as above, with a constant for each half, and the instruction reduces the last 16
 * bytes. This is as fast as the lanes on bytes in the first cache, but twice as fast on others: it
 * reads them in one sequence, which the processor's prefetchers know sooner than three.
 *
 * Sources: Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction",
 * Intel, 2011; the same, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
 * Instruction", Intel, 2009, for folding; Kounavis and Berry, "A Systematic Approach to Building
 * High Performance Software-based CRC Generators", 2005, for slicing by 8.
 */
#include "platform/crc32c.h"

#include "dlfs/dlfs.h"

#include <endian.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HARDWARE_KIND "sse4.2"
#if defined(__clang__) /* for clang the instruction may be a feature of its own */
#define HARDWARE_FEATURES "sse4.2,crc32,pclmul"
#else
#define HARDWARE_FEATURES "sse4.2,pclmul"
#endif
#define HARDWARE_TARGET __attribute__((target(HARDWARE_FEATURES)))
#elif defined(__aarch64__) && defined(__AARCH64EL__)
#include <arm_acle.h>
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define HARDWARE_KIND "armv8"
#define HARDWARE_TARGET __attribute__((target("+crc+crypto")))
#endif

#if defined(__x86_64__) && !defined(DLFS_CRC32C_NARROW) /* a test selects the lanes */
#define FOLD_TARGET __attribute__((target(HARDWARE_FEATURES ",avx2,vpclmulqdq")))
#define FOLD_BYTES ((size_t)128) /* folded at a time */
#endif

#define POLYNOMIAL 0x82F63B78u /* reflected */
#define LANE_WORDS_MAX 256u
#define LANE_WORDS_MIN 4u /* combining shorter lanes costs more than they gain */
#define WORD_BYTES ((size_t)8)
#define LANES ((size_t)3)
#define FOLDS 4 /* over 16, 32, 64 and 128 bytes */
#define POWERS 64
#define AHEAD_BYTES ((size_t)4096) /* of the next sample; the processor prefetches the rest */
#define LINE_BYTES ((size_t)64)

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_bool ready;
static bool hardware;
static bool folds; /* the processor folds bytes; otherwise it computes lanes */
static uint32_t tables[8][256];
/* moves[k]: factor that moves a remainder over k words; k is at most two lanes. */
static uint32_t moves[2 * LANE_WORDS_MAX + 1];
/* factors[k]: factors of a fold over 16 << k bytes, for the low and the high half. */
static uint64_t factors[FOLDS][2];
/* powers[k]: x^(8 << k) mod P, the factor that moves a remainder over 1 << k bytes. */
static uint32_t powers[POWERS];

static uint32_t times_x(uint32_t value)
{
    return value >> 1 ^ (value & 1u ? POLYNOMIAL : 0u);
}

static void make_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++) {
            value = times_x(value);
        }
        tables[0][byte] = value;
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        for (int slice = 1; slice < 8; slice++) {
            uint32_t before = tables[slice - 1][byte];
            tables[slice][byte] = before >> 8 ^ tables[0][before & 0xff];
        }
    }
}

static void make_moves(void)
{
    uint32_t value = 0x80000000u; /* x^0 */
    for (int power = 0; power < 64 - 33; power++) {
        value = times_x(value);
    }
    for (uint32_t words = 1; words <= 2 * LANE_WORDS_MAX; words++) {
        moves[words] = value;
        for (int power = 0; power < 64; power++) {
            value = times_x(value);
        }
    }
}

/* Returns x^power mod P, as the factor of a carry-less multiplication of reflected words. */
static uint64_t factor(unsigned power)
{
    uint32_t value = 0x80000000u; /* x^0 */
    while (power-- > 0) {
        value = times_x(value);
    }
    return (uint64_t)value << 1; /* the carry-less product of reflected values is a bit short */
}

/* Returns the product of two reflected polynomials mod P. */
static uint32_t multiply_reduced(uint32_t left, uint32_t right)
{
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        product ^= left & bit ? right : 0u;
        right = times_x(right);
    }
    return product;
}

static void make_powers(void)
{
    uint32_t value = 0x80000000u >> 8; /* x^8 */
    for (unsigned k = 0; k < POWERS; k++) {
        powers[k] = value;
        value = multiply_reduced(value, value);
    }
}

static void make_factors(void)
{
    for (unsigned k = 0; k < FOLDS; k++) {
        unsigned bits = 128u << k;
        factors[k][0] = factor(bits + 32);
        factors[k][1] = factor(bits - 32);
    }
}

static bool fold_present(void)
{
#ifdef FOLD_TARGET
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
#else
    return false;
#endif
}

static bool hardware_present(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#elif defined(HARDWARE_KIND)
    unsigned long wanted = HWCAP_CRC32 | HWCAP_PMULL;
    return (getauxval(AT_HWCAP) & wanted) == wanted;
#else
    return false;
#endif
}

static void prepare(void)
{
    make_tables();
    make_moves();
    make_factors();
    make_powers();
    hardware = hardware_present();
    folds = hardware && fold_present();
    atomic_store_explicit(&ready, true, memory_order_release);
}

static inline bool use_hardware(void)
{
    if (!atomic_load_explicit(&ready, memory_order_acquire)) {
        pthread_once(&once, prepare);
    }
    return hardware;
}

static inline uint64_t load_word(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* ---- tables ---- */

static uint32_t crc_portable(uint32_t crc, const uint8_t *at, size_t bytes)
{
    for (; bytes >= WORD_BYTES; at += WORD_BYTES, bytes -= WORD_BYTES) {
        uint64_t word = le64toh(load_word(at)) ^ crc;
        crc = tables[7][word & 0xff] ^ tables[6][word >> 8 & 0xff] ^ tables[5][word >> 16 & 0xff] ^
              tables[4][word >> 24 & 0xff] ^ tables[3][word >> 32 & 0xff] ^
              tables[2][word >> 40 & 0xff] ^ tables[1][word >> 48 & 0xff] ^ tables[0][word >> 56];
    }
    for (; bytes > 0; at++, bytes--) {
        crc = crc >> 8 ^ tables[0][(crc ^ *at) & 0xff];
    }
    return crc;
}

/* ---- the instruction ---- */

#ifdef HARDWARE_KIND

#if defined(__x86_64__)
HARDWARE_TARGET static inline uint32_t crc_word(uint32_t crc, uint64_t word)
{
    return (uint32_t)_mm_crc32_u64(crc, word);
}

HARDWARE_TARGET static inline uint32_t crc_byte(uint32_t crc, uint8_t byte)
{
    return _mm_crc32_u8(crc, byte);
}

HARDWARE_TARGET static inline uint64_t multiply(uint32_t a, uint32_t b)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)a), _mm_cvtsi32_si128((int)b), 0);
    return (uint64_t)_mm_cvtsi128_si64(product);
}
#else
HARDWARE_TARGET static inline uint32_t crc_word(uint32_t crc, uint64_t word)
{
    return __crc32cd(crc, word);
}

HARDWARE_TARGET static inline uint32_t crc_byte(uint32_t crc, uint8_t byte)
{
    return __crc32cb(crc, byte);
}

HARDWARE_TARGET static inline uint64_t multiply(uint32_t a, uint32_t b)
{
    return vgetq_lane_u64(vreinterpretq_u64_p128(vmull_p64(a, b)), 0);
}
#endif

/* Computes three lanes of `words` words each; copies them to `to` if copy is set. */
HARDWARE_TARGET static inline __attribute__((always_inline)) uint32_t
crc_lanes(uint32_t crc, uint8_t *to, const uint8_t *from, size_t words, bool copy)
{
    size_t lane_bytes = words * WORD_BYTES;
    uint32_t first = crc, second = 0, third = 0;
    uint64_t a, b, c;
    for (size_t at = 0;; at += WORD_BYTES) {
        a = load_word(from + at);
        b = load_word(from + at + lane_bytes);
        c = load_word(from + at + 2 * lane_bytes);
        if (copy) {
            memcpy(to + at, &a, WORD_BYTES);
            memcpy(to + at + lane_bytes, &b, WORD_BYTES);
            memcpy(to + at + 2 * lane_bytes, &c, WORD_BYTES);
        }
        first = crc_word(first, a);
        second = crc_word(second, b);
        if (at + WORD_BYTES == lane_bytes) {
            break;
        }
        third = crc_word(third, c);
    }
    /* The products are added to the third lane's last word: one reduction for all three. */
    uint64_t moved = multiply(first, moves[2 * words]) ^ multiply(second, moves[words]);
    return crc_word(third, c ^ moved);
}

HARDWARE_TARGET static inline __attribute__((always_inline)) uint32_t
crc_hardware_any(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes, bool copy)
{
    while (bytes >= LANES * LANE_WORDS_MIN * WORD_BYTES) {
        size_t words = bytes / (LANES * WORD_BYTES);
        words = words < LANE_WORDS_MAX ? words : LANE_WORDS_MAX;
        crc = crc_lanes(crc, to, from, words, copy);
        from += LANES * words * WORD_BYTES;
        if (copy) { /* without a copy, `to` must not advance */
            to += LANES * words * WORD_BYTES;
        }
        bytes -= LANES * words * WORD_BYTES;
    }
    if (copy) {
        memcpy(to, from, bytes);
    }
    for (; bytes >= WORD_BYTES; from += WORD_BYTES, bytes -= WORD_BYTES) {
        crc = crc_word(crc, load_word(from));
    }
    for (; bytes > 0; from++, bytes--) {
        crc = crc_byte(crc, *from);
    }
    return crc;
}

#ifdef FOLD_TARGET
/* Brings bytes of the next sample into the caches, if `at` of this one is within its first ones. */
static inline __attribute__((always_inline)) void prefetch(const uint8_t *next, size_t at,
                                                           size_t bytes)
{
    for (size_t line = 0; next != NULL && at < AHEAD_BYTES && line < bytes; line += LINE_BYTES) {
        __builtin_prefetch(next + at + line);
    }
}

FOLD_TARGET static inline __m128i fold(__m128i value, __m128i next)
{
    __m128i pair = _mm_loadu_si128((const __m128i *)factors[0]);
    __m128i low = _mm_clmulepi64_si128(value, pair, 0x00);
    __m128i high = _mm_clmulepi64_si128(value, pair, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* Reduces 16 bytes to a CRC. */
FOLD_TARGET static inline uint32_t reduce(__m128i value)
{
    uint32_t crc = crc_word(0, (uint64_t)_mm_cvtsi128_si64(value));
    return crc_word(crc, (uint64_t)_mm_extract_epi64(value, 1));
}

/* Moves the two remainders in `value` over the bytes that `pair` stands for, onto `next`. */
FOLD_TARGET static inline __m256i fold_pair(__m256i value, __m256i pair, __m256i next)
{
    __m256i low = _mm256_clmulepi64_epi128(value, pair, 0x00);
    __m256i high = _mm256_clmulepi64_epi128(value, pair, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

FOLD_TARGET static inline __m256i pair_of(unsigned k)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)factors[k]));
}

/* Folds runs of FOLD_BYTES, at least one; copies them to `to` unless that is NULL. */
FOLD_TARGET static uint32_t crc_fold(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes,
                                     const uint8_t *next)
{
    __m256i seen[4] = {0};
    __m256i pair = pair_of(3);
    for (size_t at = 0; at < bytes; at += FOLD_BYTES) {
        prefetch(next, at, FOLD_BYTES);
        for (size_t part = 0; part < 4; part++) {
            __m256i now = _mm256_loadu_si256((const __m256i *)(from + at + 32 * part));
            if (to != NULL) {
                _mm256_storeu_si256((__m256i *)(to + at + 32 * part), now);
            }
            if (at == 0 && part == 0) {
                __m128i start = _mm_cvtsi32_si128((int)crc);
                now = _mm256_xor_si256(now, _mm256_zextsi128_si256(start));
            }
            seen[part] = fold_pair(seen[part], pair, now);
        }
    }
    pair = pair_of(1);
    __m256i all = fold_pair(seen[0], pair, seen[1]);
    all = fold_pair(all, pair, seen[2]);
    all = fold_pair(all, pair, seen[3]);
    return reduce(fold(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}
#endif

HARDWARE_TARGET static uint32_t crc_hardware(uint32_t crc, uint8_t *to, const uint8_t *from,
                                             size_t bytes, const uint8_t *next)
{
#ifdef FOLD_TARGET
    if (folds && bytes >= FOLD_BYTES) {
        size_t now = bytes & ~(FOLD_BYTES - 1);
        crc = crc_fold(crc, to, from, now, next);
        to = to != NULL ? to + now : NULL;
        from += now;
        bytes -= now;
    }
#else
    (void)next;
#endif
    return to != NULL ? crc_hardware_any(crc, to, from, bytes, true)
                      : crc_hardware_any(crc, NULL, from, bytes, false);
}

#else /* no instruction is known for this processor: use_hardware() is always false */

#define HARDWARE_KIND "portable"

static uint32_t crc_hardware(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes,
                             const uint8_t *next)
{
    (void)to;
    (void)next;
    return crc_portable(crc, from, bytes);
}

#endif

/* Computes a CRC by the instruction or by tables. */
static uint32_t crc_any(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes,
                        const uint8_t *next)
{
    if (bytes == 0) {
        return crc;
    }
    if (use_hardware()) {
        return ~crc_hardware(~crc, to, from, bytes, next);
    }
    if (to != NULL) {
        memcpy(to, from, bytes);
    }
    return ~crc_portable(~crc, from, bytes);
}

uint32_t crc32c_sample(uint8_t *to, const uint8_t *from, size_t bytes, const uint8_t *next)
{
    return crc_any(0, to, from, bytes, next);
}

/* ---- what the header promises ---- */

uint32_t dlfs_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    return crc_any(crc, NULL, data, bytes, NULL);
}

uint32_t dlfs_crc32c_portable(uint32_t crc, const void *data, size_t bytes)
{
    if (bytes == 0) {
        return crc;
    }
    (void)use_hardware(); /* makes the tables too */
    return ~crc_portable(~crc, data, bytes);
}

uint32_t dlfs_crc32c_copy(uint32_t crc, void *destination, const void *source, size_t bytes)
{
    return crc_any(crc, destination, source, bytes, NULL);
}

const char *dlfs_crc32c_kind(void)
{
    if (!use_hardware()) {
        return "portable";
    }
#ifdef FOLD_TARGET
    if (folds) {
        return "avx2";
    }
#endif
    return HARDWARE_KIND;
}

void dlfs_crc32c_blocks(const void *data, size_t bytes, size_t block_bytes, uint32_t *crcs)
{
    const uint8_t *at = data;
    for (; bytes > 0; crcs++) {
        size_t now = bytes < block_bytes ? bytes : block_bytes;
        *crcs = dlfs_crc32c(0, at, now);
        at += now;
        bytes -= now;
    }
}

void dlfs_crc32c_combine(uint32_t *crcs, const uint32_t *following, const uint64_t *following_bytes,
                         uint64_t count)
{
    (void)use_hardware(); /* makes the powers */
    uint64_t bytes_before = 0;
    uint32_t move = 0x80000000u; /* x^(8 * bytes_before) */
    for (uint64_t i = 0; i < count; i++) {
        if (following_bytes[i] != bytes_before) { /* often all lengths are equal */
            bytes_before = following_bytes[i];
            move = 0x80000000u;
            for (uint64_t left = bytes_before; left != 0; left &= left - 1) {
                move = multiply_reduced(move, powers[__builtin_ctzll(left)]);
            }
        }
        crcs[i] = multiply_reduced(move, crcs[i]) ^ following[i];
    }
}
