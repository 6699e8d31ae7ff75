/* Numbers in a byte each: near what they were, the same wherever they are decoded; what has no scale comes
 * back as it was; no wire makes the decoder read or write beyond its arguments. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "comm/int8.h"
#include "tests/assert_ok.h"
#include "tests/comm/random.h"

static size_t width_of(fcdp_number number) {
    return number == FCDP_NUMBER_F32 ? 4 : number == FCDP_NUMBER_OTHER ? 1 : 2;
}

/* By other means than the code's: the value from its fields. */
static double value_of(const uint8_t *at, fcdp_number number) {
    uint32_t bits = 0;
    memcpy(&bits, at, width_of(number));
    int n_exponent = number == FCDP_NUMBER_F16 ? 5 : 8, n_all = (int)width_of(number) * 8;
    int n_fraction = n_all - 1 - n_exponent, bias = (1 << (n_exponent - 1)) - 1;
    int exponent = (int)(bits >> n_fraction & ((1u << n_exponent) - 1));
    double fraction = bits & ((1u << n_fraction) - 1), sign = bits >> (n_all - 1) ? -1 : 1;
    if (exponent == (1 << n_exponent) - 1) return fraction > 0 ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(fraction + ldexp(1, n_fraction), exponent - bias - n_fraction)
                            : ldexp(fraction, 1 - bias - n_fraction));
}

static void put(uint8_t *at, float x, fcdp_number number) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (number == FCDP_NUMBER_F32) memcpy(at, &bits, 4);
    if (number == FCDP_NUMBER_BF16) memcpy(at, (uint8_t *)&bits + 2, 2);
    if (number == FCDP_NUMBER_F16) { /* cut, of normal numbers */
        uint16_t h = (uint16_t)((bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - (112u << 23)) >> 13);
        if (fabsf(x) < 0x1p-14f) h = 0;
        memcpy(at, &h, 2);
    }
}

static double normal(test_random *random) {
    double sum = 0;
    for (int i = 0; i < 12; i++) sum += random_below(random, 1 << 20) * 0x1p-20;
    return sum - 6;
}

/* Exact size buffers: ASan sees what is touched beyond. Returns the wire's bytes. */
static size_t round_trip(const uint8_t *in, size_t bytes, fcdp_number number, uint8_t *out,
                         fcdp_rounding *rounding) {
    uint8_t *room = malloc(fcdp__int8_bound(bytes, number) + 1);
    size_t n = fcdp__int8_encode(in, bytes, number, room, rounding);
    assert_true(n <= fcdp__int8_bound(bytes, number));
    uint8_t *wire = malloc(n + !n);
    memcpy(wire, room, n);
    assert_ok(fcdp__int8_decode(out, bytes, number, wire, n));
    free(wire);
    free(room);
    return n;
}

static void test_weights_are_near_and_few_bytes(void **state) {
    (void)state;
    enum { N = 100000 };
    static const double most[FCDP_N_NUMBERS] = {1, 0.52, 0.52, 0.26};
    uint8_t *in = malloc(4 * N), *out = malloc(4 * N);
    for (fcdp_number number = FCDP_NUMBER_BF16; number < FCDP_N_NUMBERS; number++) {
        test_random random = {7};
        fcdp_rounding rounding = {0};
        size_t w = width_of(number);
        double lost = 0, whole = 0;
        for (size_t i = 0; i < N; i++) put(in + i * w, (float)(0.02 * normal(&random)), number);
        size_t n = round_trip(in, N * w, number, out, &rounding);
        assert_true((double)n <= most[number] * (double)(N * w));
        for (size_t b = 0; b < N; b += FCDP_INT8_BLOCK) {
            double largest = 0;
            size_t end = b + FCDP_INT8_BLOCK < N ? b + FCDP_INT8_BLOCK : N;
            for (size_t i = b; i < end; i++) largest = fmax(largest, fabs(value_of(in + i * w, number)));
            for (size_t i = b; i < end; i++) {
                double x = value_of(in + i * w, number), y = value_of(out + i * w, number);
                /* half a step of the scale, and half an ulp of the type */
                assert_true(fabs(y - x) <= largest / 127 * 0.50001 + fabs(y) * 0x1p-8);
                lost += (y - x) * (y - x);
                whole += x * x;
            }
        }
        print_message("number %d: %.4f of the bytes, error %.4f\n", number, (double)n / (double)(N * w),
                      sqrt(lost / whole));
        assert_true(sqrt(lost / whole) > 0.003 && sqrt(lost / whole) < 0.01);
        assert_true(fabs(rounding.lost / lost - 1) < 1e-9 && fabs(rounding.whole / whole - 1) < 1e-9);
    }
    free(in);
    free(out);
}

/* What is not finite, and what is no number, comes back as it was. */
static void test_every_length_and_kind(void **state) {
    (void)state;
    test_random random = {random_seed("test_every_length_and_kind", 1)};
    for (int round = 0; round < 3000; round++) {
        fcdp_number number = (fcdp_number)random_below(&random, FCDP_N_NUMBERS);
        size_t bytes = random_below(&random, 3000), w = width_of(number);
        uint8_t *in = malloc(bytes + !bytes), *out = malloc(bytes + !bytes);
        bool random_bytes = random_below(&random, 2);
        for (size_t i = 0; i < bytes; i++) in[i] = (uint8_t)random_next(&random);
        for (size_t i = 0; i < bytes / w && !random_bytes; i++)
            put(in + i * w, (float)normal(&random), number);
        size_t n = round_trip(in, bytes, number, out, NULL);
        if (number == FCDP_NUMBER_OTHER) assert_true(n == bytes && !memcmp(in, out, bytes));
        for (size_t i = 0; i < bytes / w && number != FCDP_NUMBER_OTHER; i++)
            if (!isfinite(value_of(in + i * w, number))) assert_memory_equal(in + i * w, out + i * w, w);
        assert_memory_equal(in + bytes / w * w, out + bytes / w * w, bytes % w);
        free(in);
        free(out);
    }
}

static void test_what_has_no_scale_is_exact(void **state) {
    (void)state;
    static const float strange[] = {INFINITY, -INFINITY, NAN, 3.4e38f, -1e38f * 1.01f};
    float in[3 * FCDP_INT8_BLOCK], out[3 * FCDP_INT8_BLOCK];
    test_random random = {3};
    for (size_t k = 0; k < sizeof strange / sizeof *strange; k++) {
        for (size_t i = 0; i < 3 * FCDP_INT8_BLOCK; i++) in[i] = (float)normal(&random);
        in[FCDP_INT8_BLOCK + 5] = strange[k];
        (void)round_trip((uint8_t *)in, sizeof in, FCDP_NUMBER_F32, (uint8_t *)out, NULL);
        assert_memory_equal(in + FCDP_INT8_BLOCK, out + FCDP_INT8_BLOCK, FCDP_INT8_BLOCK * sizeof *in);
        size_t n_equal = 0;
        for (size_t i = 0; i < FCDP_INT8_BLOCK; i++) n_equal += in[i] == out[i];
        assert_true(n_equal < FCDP_INT8_BLOCK / 8); /* of another block */
    }
    for (size_t i = 0; i < 3 * FCDP_INT8_BLOCK; i++) in[i] = (float)normal(&random) * 1e-33f;
    (void)round_trip((uint8_t *)in, sizeof in, FCDP_NUMBER_F32, (uint8_t *)out, NULL);
    assert_memory_equal(in, out, sizeof in);
    memset(in, 0, sizeof in);
    (void)round_trip((uint8_t *)in, sizeof in, FCDP_NUMBER_F32, (uint8_t *)out, NULL);
    assert_memory_equal(in, out, sizeof in);
}

/* Each half, rounded from float32: it decodes to itself where it is a block's only number. */
static void test_every_half(void **state) {
    (void)state;
    for (fcdp_number number = FCDP_NUMBER_BF16; number <= FCDP_NUMBER_F16; number++)
        for (uint32_t bits = 0; bits < 1 << 16; bits++) {
            uint8_t wire[8], in[2] = {(uint8_t)bits, (uint8_t)(bits >> 8)}, out[2];
            size_t n = fcdp__int8_encode(in, 2, number, wire, NULL);
            assert_ok(fcdp__int8_decode(out, 2, number, wire, n));
            bool is_zero = (bits & 0x7fff) == 0; /* whose sign is lost */
            if (!is_zero && memcmp(in, out, 2))
                fail_msg("number %d, %#x: %02x%02x", number, bits, out[1], out[0]);
        }
}

/* Every byte flipped, every length: refused, or of other numbers, or of the same; never out of bounds. */
static void test_a_damaged_wire_harms_nothing(void **state) {
    (void)state;
    enum { N = 300 };
    test_random random = {random_seed("test_a_damaged_wire_harms_nothing", 1)};
    for (fcdp_number number = FCDP_NUMBER_OTHER; number < FCDP_N_NUMBERS; number++) {
        size_t bytes = N * width_of(number), n_refused = 0, n_other = 0, n_same = 0;
        uint8_t in[4 * N], right[4 * N], room[4 * N + 16];
        memset(in, 0x41, sizeof in);
        for (size_t i = 0; i < N && number != FCDP_NUMBER_OTHER; i++)
            put(in + i * width_of(number), (float)normal(&random), number);
        size_t n = fcdp__int8_encode(in, bytes, number, room, NULL);
        assert_ok(fcdp__int8_decode(right, bytes, number, room, n));
        for (size_t at = 0; at < n; at++)
            for (int bit = 0; bit < 8; bit++) {
                uint8_t *wire = malloc(n), *out = malloc(bytes);
                memcpy(wire, room, n);
                wire[at] ^= (uint8_t)(1 << bit);
                fcdp_status status = fcdp__int8_decode(out, bytes, number, wire, n);
                bool same = !status && !memcmp(out, right, bytes);
                n_refused += status != FCDP_OK;
                n_other += !status && !same;
                n_same += same;
                /* low bits of a scale may fall to the rounding of a 16-bit type */
                if (same) assert_true(at < 2 * sizeof(float) && number != FCDP_NUMBER_F32);
                free(wire);
                free(out);
            }
        for (size_t cut = 0; cut < n; cut++) {
            uint8_t *wire = malloc(cut + !cut), *out = malloc(bytes);
            memcpy(wire, room, cut);
            assert_int_equal(fcdp__int8_decode(out, bytes, number, wire, cut), FCDP_ERR_INVALID);
            free(wire);
            free(out);
        }
        print_message("number %d: %zu flips refused, %zu seen in the numbers, %zu without effect\n", number,
                      n_refused, n_other, n_same);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights_are_near_and_few_bytes), cmocka_unit_test(test_every_length_and_kind),
        cmocka_unit_test(test_what_has_no_scale_is_exact),     cmocka_unit_test(test_every_half),
        cmocka_unit_test(test_a_damaged_wire_harms_nothing),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
