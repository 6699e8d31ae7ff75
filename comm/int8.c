/* int8.c - blocks of numbers as bytes and a scale.
 *
 * Each block is widened to float32, where all arithmetic is, and narrowed again. What is decoded is one
 * product, rounded once to float32 and once to the array's type: no order of operations is left to a
 * compiler.
 */
#include "comm/int8.h"

#include <string.h>

enum { MOST = 127, F32_INFINITY = 0x7f800000 };
static const uint32_t AS_IT_IS = UINT32_MAX; /* a NaN */
/* Magnitudes beyond these have no scale whose products are finite, or whose inverse is. */
static const float LARGEST = 1e38f, SMALLEST = 1e-30f;

static size_t width_of(fcdp_number number) {
    return number == FCDP_NUMBER_F32 ? 4 : 2;
}

/* ---- numbers ---- */

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float f16_widen(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return float_of(sign | F32_INFINITY | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x400) return float_of(sign | ((magnitude << 13) + (112u << 23)));
    float tiny = (float)magnitude * 0x1p-24f; /* exact */
    return sign ? -tiny : tiny;
}

/* Of a finite number, to the nearest, ties to even. */
static uint16_t f16_narrow(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more */
    if (magnitude < 0x38800000) {              /* below 2^-14: float32 has the ulp there */
        float at = float_of(magnitude) + 0.5f; /* whose ulp is 2^-24 */
        return (uint16_t)(sign | (bits_of(at) - bits_of(0.5f)));
    }
    uint32_t half = magnitude - (112u << 23);
    return (uint16_t)(sign | (half + 0xfff + (half >> 13 & 1)) >> 13);
}

/* Of a finite number. */
static uint16_t bf16_narrow(float x) {
    uint32_t bits = bits_of(x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void widen(const uint8_t *from, size_t n, fcdp_number number, float *out) {
    uint16_t halves[FCDP_INT8_BLOCK];
    if (number == FCDP_NUMBER_F32) {
        memcpy(out, from, n * sizeof *out);
        return;
    }
    memcpy(halves, from, n * sizeof *halves);
    for (size_t i = 0; i < n && number == FCDP_NUMBER_BF16; i++) out[i] = float_of((uint32_t)halves[i] << 16);
    for (size_t i = 0; i < n && number == FCDP_NUMBER_F16; i++) out[i] = f16_widen(halves[i]);
}

static void narrow(const float *from, size_t n, fcdp_number number, uint8_t *out) {
    uint16_t halves[FCDP_INT8_BLOCK];
    if (number == FCDP_NUMBER_F32) {
        memcpy(out, from, n * sizeof *from);
        return;
    }
    for (size_t i = 0; i < n && number == FCDP_NUMBER_BF16; i++) halves[i] = bf16_narrow(from[i]);
    for (size_t i = 0; i < n && number == FCDP_NUMBER_F16; i++) halves[i] = f16_narrow(from[i]);
    memcpy(out, halves, n * sizeof *halves);
}

/* ---- a block ---- */

/* AS_IT_IS: it has none. */
static uint32_t scale_of(const float *x, size_t n, float *inverse_out) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    *inverse_out = 0;
    if (most == 0) return 0;
    if (most > bits_of(LARGEST) || most < bits_of(SMALLEST)) return AS_IT_IS;
    *inverse_out = (float)MOST / float_of(most);
    return bits_of(float_of(most) / (float)MOST);
}

/* The sum with 1.5 * 2^23 has the nearest integer in its lowest bits. */
static void quantise(const float *x, size_t n, float inverse, int8_t *out) {
    const float magic = 0x1.8p23f;
    for (size_t i = 0; i < n; i++) out[i] = (int8_t)(bits_of(x[i] * inverse + magic) - bits_of(magic));
}

static void block_decode(const int8_t *q, size_t n, float scale, fcdp_number number, uint8_t *out) {
    float x[FCDP_INT8_BLOCK];
    for (size_t i = 0; i < n; i++) x[i] = (float)q[i] * scale;
    narrow(x, n, number, out);
}

static void measure(const float *x, const int8_t *q, size_t n, float scale, fcdp_number number,
                    fcdp_rounding *rounding) {
    uint8_t narrowed[FCDP_INT8_BLOCK * sizeof(float)];
    float y[FCDP_INT8_BLOCK];
    block_decode(q, n, scale, number, narrowed);
    widen(narrowed, n, number, y);
    for (size_t i = 0; i < n; i++) {
        double lost = (double)y[i] - (double)x[i];
        rounding->lost += lost * lost;
        rounding->whole += (double)x[i] * (double)x[i];
    }
}

/* ---- an array ---- */

static size_t blocks_of(size_t bytes, fcdp_number number) {
    size_t n = number == FCDP_NUMBER_OTHER ? 0 : bytes / width_of(number);
    return n / FCDP_INT8_BLOCK + (n % FCDP_INT8_BLOCK != 0);
}

static size_t numbers_in(size_t bytes, fcdp_number number, size_t block) {
    size_t left = bytes / width_of(number) - block * FCDP_INT8_BLOCK;
    return left < FCDP_INT8_BLOCK ? left : FCDP_INT8_BLOCK;
}

size_t fcdp__int8_bound(size_t bytes, fcdp_number number) {
    return bytes + blocks_of(bytes, number) * sizeof(uint32_t);
}

size_t fcdp__int8_encode(const void *from, size_t bytes, fcdp_number number, void *wire_out,
                         fcdp_rounding *rounding) {
    const uint8_t *in = from;
    uint8_t *wire = wire_out;
    size_t n_blocks = blocks_of(bytes, number), at = n_blocks * sizeof(uint32_t), done = 0;
    for (size_t b = 0; b < n_blocks; b++) {
        float x[FCDP_INT8_BLOCK], inverse;
        int8_t q[FCDP_INT8_BLOCK];
        size_t n = numbers_in(bytes, number, b), n_bytes = n * width_of(number);
        widen(in + done, n, number, x);
        uint32_t scale = scale_of(x, n, &inverse);
        memcpy(wire + b * sizeof scale, &scale, sizeof scale);
        if (scale == AS_IT_IS) {
            memcpy(wire + at, in + done, n_bytes);
            at += n_bytes;
        } else {
            quantise(x, n, inverse, q);
            memcpy(wire + at, q, n);
            at += n;
            if (rounding) measure(x, q, n, float_of(scale), number, rounding);
        }
        done += n_bytes;
    }
    memcpy(wire + at, in + done, bytes - done);
    return at + bytes - done;
}

/* A scale that no encoder makes would give numbers that are not finite. */
fcdp_status fcdp__int8_decode(void *out, size_t bytes, fcdp_number number, const void *wire_in,
                              size_t wire_bytes) {
    const uint8_t *wire = wire_in;
    uint8_t *to = out;
    size_t n_blocks = blocks_of(bytes, number), at = n_blocks * sizeof(uint32_t), done = 0;
    if (at > wire_bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "a wire of %zu bytes has no scales of %zu blocks", wire_bytes,
                          n_blocks);
    for (size_t b = 0; b < n_blocks; b++) {
        int8_t q[FCDP_INT8_BLOCK];
        uint32_t scale;
        memcpy(&scale, wire + b * sizeof scale, sizeof scale);
        size_t n = numbers_in(bytes, number, b), n_bytes = n * width_of(number);
        size_t coded = scale == AS_IT_IS ? n_bytes : n;
        if (coded > wire_bytes - at || (scale != AS_IT_IS && scale > bits_of(LARGEST / 100)))
            return fcdp__fail(FCDP_ERR_INVALID, "block %zu of %zu has no sense on a wire with %zu bytes left",
                              b, n_blocks, wire_bytes - at);
        if (scale == AS_IT_IS) {
            memcpy(to + done, wire + at, n_bytes);
        } else {
            memcpy(q, wire + at, n);
            block_decode(q, n, float_of(scale), number, to + done);
        }
        at += coded;
        done += n_bytes;
    }
    if (wire_bytes - at != bytes - done)
        return fcdp__fail(FCDP_ERR_INVALID, "a wire of %zu bytes has %zu behind its last block, not %zu",
                          wire_bytes, wire_bytes - at, bytes - done);
    memcpy(to + done, wire + at, bytes - done);
    return FCDP_OK;
}
