/* codec_cpu.h - what of the codec (codec.c) depends on the processor: bits moved side by side and back, and
 * the planes of 64 values. All of it is here twice: for any processor, and for x86-64 with AVX2 and a fast
 * pext.
 */
#ifndef FCDP_CODEC_CPU_H
#define FCDP_CODEC_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "comm/codec.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little endian, as they are on every GPU"
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define FAST __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt")))
#endif
/* A part of each copy of the coder of blocks. There `bits` of a value (16 or 32) and `fast` are constants. */
#define EACH static inline __attribute__((always_inline))

enum {
    WORD_VALUES = 64,
    BLOCK_VALUES = FCDP_DELTA_BLOCK,
    BLOCK_WORDS = BLOCK_VALUES / WORD_VALUES,
};
static const uint64_t EVEN = 0x5555555555555555; /* every other bit, from the lowest on */

/* The values of a block: whole words of 64, the last ones padded. */
typedef union values {
    uint16_t z16[BLOCK_VALUES];
    uint32_t z32[BLOCK_VALUES];
} values;

EACH uint32_t z_at(const values *v, unsigned bits, size_t i) {
    return bits == 16 ? v->z16[i] : v->z32[i];
}

EACH void z_set(values *v, unsigned bits, size_t i, uint32_t z) {
    if (bits == 16)
        v->z16[i] = (uint16_t)z;
    else
        v->z32[i] = z;
}

static inline uint64_t load64(const void *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* ---- bits ---- */

EACH unsigned count(uint64_t x) {
    return (unsigned)__builtin_popcountll(x);
}

/* The bits of x where the mask has ones, side by side. The assembler's name, since the intrinsics are for
 * functions of one processor. */
EACH uint64_t extract(uint64_t x, uint64_t mask, bool fast) {
    uint64_t bits = 0;
#if defined(__x86_64__)
    if (fast) {
        __asm__("pext %2, %1, %0" : "=r"(bits) : "r"(x), "r"(mask));
        return bits;
    }
#endif
    (void)fast;
    for (unsigned i = 0; mask; i++, mask &= mask - 1) bits |= (x >> __builtin_ctzll(mask) & 1) << i;
    return bits;
}

/* The lowest bits of x, to where the mask has ones. */
EACH uint64_t deposit(uint64_t x, uint64_t mask, bool fast) {
    uint64_t bits = 0;
#if defined(__x86_64__)
    if (fast) {
        __asm__("pdep %2, %1, %0" : "=r"(bits) : "r"(x), "r"(mask));
        return bits;
    }
#endif
    (void)fast;
    for (; mask; x >>= 1, mask &= mask - 1) bits |= (mask & -mask) & -(x & 1);
    return bits;
}

/* The bits of x at even positions, in the lower half. */
EACH uint64_t evens(uint64_t x, bool fast) {
#if defined(__x86_64__)
    if (fast) return extract(x, EVEN, fast);
#endif
    (void)fast;
    x &= EVEN;
    x = (x | x >> 1) & 0x3333333333333333;
    x = (x | x >> 2) & 0x0f0f0f0f0f0f0f0f;
    x = (x | x >> 4) & 0x00ff00ff00ff00ff;
    x = (x | x >> 8) & 0x0000ffff0000ffff;
    return (x | x >> 16) & 0xffffffff;
}

/* The lower half of x, to even positions. */
EACH uint64_t spread(uint64_t x, bool fast) {
#if defined(__x86_64__)
    if (fast) return deposit(x, EVEN, fast);
#endif
    (void)fast;
    x &= 0xffffffff;
    x = (x | x << 16) & 0x0000ffff0000ffff;
    x = (x | x << 8) & 0x00ff00ff00ff00ff;
    x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
    x = (x | x << 2) & 0x3333333333333333;
    return (x | x << 1) & EVEN;
}

/* ---- planes ---- */

#if defined(__x86_64__)
/* The bytes `at` of 32 values. */
FAST static inline __m256i bytes_avx2(const values *v, size_t first, unsigned bits, unsigned at) {
    __m128i by = _mm_cvtsi32_si128((int)(8 * at));
    if (bits == 16) {
        const __m256i *z = (const __m256i *)(v->z16 + first), low = _mm256_set1_epi16(0xff);
        __m256i a = _mm256_and_si256(_mm256_srl_epi16(_mm256_loadu_si256(z), by), low);
        __m256i b = _mm256_and_si256(_mm256_srl_epi16(_mm256_loadu_si256(z + 1), by), low);
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
    }
    const __m256i *z = (const __m256i *)(v->z32 + first), low = _mm256_set1_epi32(0xff);
    __m256i a = _mm256_and_si256(_mm256_srl_epi32(_mm256_loadu_si256(z), by), low);
    __m256i b = _mm256_and_si256(_mm256_srl_epi32(_mm256_loadu_si256(z + 1), by), low);
    __m256i c = _mm256_and_si256(_mm256_srl_epi32(_mm256_loadu_si256(z + 2), by), low);
    __m256i d = _mm256_and_si256(_mm256_srl_epi32(_mm256_loadu_si256(z + 3), by), low);
    __m256i all = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    return _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

FAST static inline void bytes_of_avx2(const values *v, size_t word, unsigned bits, unsigned at,
                                      uint8_t bytes_out[WORD_VALUES]) {
    for (unsigned i = 0; i < WORD_VALUES; i += 32)
        _mm256_storeu_si256((__m256i *)(bytes_out + i), bytes_avx2(v, word * WORD_VALUES + i, bits, at));
}

FAST static inline void split_avx2(const values *v, size_t word, unsigned bits, unsigned at, unsigned n,
                                   uint64_t (*bit)[BLOCK_WORDS]) {
    __m256i low = bytes_avx2(v, word * WORD_VALUES, bits, at);
    __m256i high = bytes_avx2(v, word * WORD_VALUES + WORD_VALUES / 2, bits, at);
    __m128i by = _mm_cvtsi32_si128((int)(8 - n));
    low = _mm256_sll_epi16(low, by); /* bit n-1 to each byte's highest: only that one is read */
    high = _mm256_sll_epi16(high, by);
    for (unsigned j = n; j-- > 0;) {
        uint32_t of_low = (uint32_t)_mm256_movemask_epi8(low), of_high = (uint32_t)_mm256_movemask_epi8(high);
        bit[j][word] = of_low | (uint64_t)of_high << 32;
        low = _mm256_add_epi8(low, low);
        high = _mm256_add_epi8(high, high);
    }
}

/* Which of 64 values have a bit in the bytes `from` and above. */
FAST static inline uint64_t nonzero_avx2(const values *v, size_t word, unsigned bits, unsigned from) {
    uint64_t mask = 0;
    for (unsigned half = 0; half < 2; half++) {
        __m256i any = bytes_avx2(v, word * WORD_VALUES + half * 32, bits, from);
        for (unsigned at = from + 1; at < bits / 8; at++)
            any = _mm256_or_si256(any, bytes_avx2(v, word * WORD_VALUES + half * 32, bits, at));
        __m256i zero = _mm256_cmpeq_epi8(any, _mm256_setzero_si256());
        mask |= (uint64_t)~(uint32_t)_mm256_movemask_epi8(zero) << 32 * half;
    }
    return mask;
}

/* Of 32 bits, bytes: 0 or -1. */
FAST static inline __m256i each_bit(uint32_t bits) {
    const __m256i to = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i of = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), to);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, of), of);
}

FAST static inline void join_avx2(const uint64_t (*bit)[BLOCK_WORDS], size_t word, unsigned n,
                                  uint8_t bytes_out[WORD_VALUES]) {
    __m256i low = _mm256_setzero_si256(), high = low;
    for (unsigned j = n; j-- > 0;) {
        low = _mm256_sub_epi8(_mm256_add_epi8(low, low), each_bit((uint32_t)bit[j][word]));
        high = _mm256_sub_epi8(_mm256_add_epi8(high, high), each_bit((uint32_t)(bit[j][word] >> 32)));
    }
    _mm256_storeu_si256((__m256i *)bytes_out, low);
    _mm256_storeu_si256((__m256i *)(bytes_out + 32), high);
}

FAST static inline void combine_avx2(uint8_t bytes[][WORD_VALUES], size_t word, unsigned bits, values *v) {
    for (unsigned i = 0; i < WORD_VALUES && bits == 16; i += 16) {
        __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(bytes[0] + i)));
        __m256i high = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(bytes[1] + i)));
        _mm256_storeu_si256((__m256i *)(v->z16 + word * WORD_VALUES + i),
                            _mm256_or_si256(low, _mm256_slli_epi16(high, 8)));
    }
    for (unsigned i = 0; i < WORD_VALUES && bits == 32; i += 8) {
        __m256i z = _mm256_setzero_si256();
        for (unsigned at = 4; at-- > 0;) {
            __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(bytes[at] + i)));
            z = _mm256_or_si256(_mm256_slli_epi32(z, 8), byte);
        }
        _mm256_storeu_si256((__m256i *)(v->z32 + word * WORD_VALUES + i), z);
    }
}
#endif

/* A matrix of 8 x 8 bits, the byte r its row r: transposed. */
EACH uint64_t transposed(uint64_t x) {
    uint64_t t = (x ^ x >> 7) & 0x00aa00aa00aa00aa;
    x ^= t ^ t << 7;
    t = (x ^ x >> 14) & 0x0000cccc0000cccc;
    x ^= t ^ t << 14;
    t = (x ^ x >> 28) & 0x00000000f0f0f0f0;
    return x ^ t ^ t << 28;
}

/* Rows of 8 bytes: transposed, by halves, quarters and bytes. */
EACH void rows_transpose(uint64_t rows[8]) {
    for (int by = 4; by > 0; by /= 2) {
        uint64_t mask = by == 4 ? 0x00000000ffffffff : by == 2 ? 0x0000ffff0000ffff : 0x00ff00ff00ff00ff;
        for (int r = 0; r < 8; r++) {
            if (r & by) continue;
            uint64_t t = (rows[r] >> 8 * by ^ rows[r + by]) & mask;
            rows[r + by] ^= t;
            rows[r] ^= t << 8 * by;
        }
    }
}

/* The bytes `at` of 64 values. */
EACH void bytes_of(const values *v, size_t word, unsigned bits, unsigned at, uint8_t bytes_out[WORD_VALUES],
                   bool fast) {
#if defined(__x86_64__)
    if (fast) {
        bytes_of_avx2(v, word, bits, at, bytes_out);
        return;
    }
#endif
    (void)fast;
    for (size_t i = 0; i < WORD_VALUES; i++)
        bytes_out[i] = (uint8_t)(z_at(v, bits, word * WORD_VALUES + i) >> 8 * at);
}

/* The bits 0 .. n-1 of these bytes, to bit[0 .. n-1][word]. */
EACH void split(const values *v, size_t word, unsigned bits, unsigned at, unsigned n,
                uint64_t (*bit)[BLOCK_WORDS], bool fast) {
#if defined(__x86_64__)
    if (fast) {
        split_avx2(v, word, bits, at, n, bit);
        return;
    }
#endif
    uint8_t bytes[WORD_VALUES];
    uint64_t rows[8];
    bytes_of(v, word, bits, at, bytes, fast);
    for (int r = 0; r < 8; r++) rows[r] = transposed(load64(bytes + 8 * r));
    rows_transpose(rows);
    for (unsigned j = 0; j < n; j++) bit[j][word] = rows[j];
}

/* Which of 64 values have a bit in the bytes `from` and above. */
EACH uint64_t nonzero(const values *v, size_t word, unsigned bits, unsigned from, bool fast) {
#if defined(__x86_64__)
    if (fast) return nonzero_avx2(v, word, bits, from);
#endif
    (void)fast;
    uint8_t is[WORD_VALUES];
    uint64_t mask = 0;
    for (size_t i = 0; i < WORD_VALUES; i++) is[i] = z_at(v, bits, word * WORD_VALUES + i) >> 8 * from != 0;
    for (int r = 0; r < 8; r++) mask |= load64(is + 8 * r) * 0x0102040810204080 >> 56 << 8 * r;
    return mask;
}

/* The bytes that split() read the planes of. The bits n .. 7 become zero. */
EACH void join(const uint64_t (*bit)[BLOCK_WORDS], size_t word, unsigned n, uint8_t bytes_out[WORD_VALUES],
               bool fast) {
#if defined(__x86_64__)
    if (fast) {
        join_avx2(bit, word, n, bytes_out);
        return;
    }
#endif
    (void)fast;
    uint64_t rows[8] = {0};
    for (unsigned j = 0; j < n; j++) rows[j] = bit[j][word];
    rows_transpose(rows);
    for (int r = 0; r < 8; r++) {
        rows[r] = transposed(rows[r]);
        memcpy(bytes_out + 8 * r, &rows[r], 8);
    }
}

/* 64 values of their bytes. */
EACH void combine(uint8_t bytes[][WORD_VALUES], size_t word, unsigned bits, values *v, bool fast) {
#if defined(__x86_64__)
    if (fast) {
        combine_avx2(bytes, word, bits, v);
        return;
    }
#endif
    (void)fast;
    if (bits == 16) {
        for (size_t i = 0; i < WORD_VALUES; i++)
            v->z16[word * WORD_VALUES + i] = (uint16_t)(bytes[0][i] | bytes[1][i] << 8);
    } else {
        for (size_t i = 0; i < WORD_VALUES; i++)
            v->z32[word * WORD_VALUES + i] = bytes[0][i] | (uint32_t)bytes[1][i] << 8 |
                                             (uint32_t)bytes[2][i] << 16 | (uint32_t)bytes[3][i] << 24;
    }
}

#if defined(__x86_64__)
/* AVX2, saved by the system, and a pext that is not microcode, as it is in AMD's family 17h and Hygon's 18h.
 * By cpuid: __builtin_cpu_supports says no to everything where zig links a program. */
static inline bool has_fast(void) {
    unsigned a, b, c, d, xcr0, high;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    unsigned family = (a >> 8 & 15) + ((a >> 8 & 15) == 15 ? a >> 20 & 255 : 0);
    if (family == 0x17 || family == 0x18 || !(c & bit_OSXSAVE) || !(c & bit_AVX) || !(c & bit_POPCNT))
        return false;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if ((xcr0 & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(b & bit_AVX2) || !(b & bit_BMI) || !(b & bit_BMI2)) return false;
    return __get_cpuid(0x80000001, &a, &b, &c, &d) && c & bit_LZCNT;
}
#endif

#endif
