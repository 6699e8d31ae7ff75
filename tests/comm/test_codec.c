/* The codec of differences: what it decodes is what was encoded, for any bytes; no wire makes it read or
 * write beyond its arguments; every processor's code makes the same wire. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "comm/codec.h"
#include "comm/fingerprint.h"
#include "tests/assert_ok.h"
#include "tests/comm/random.h"

enum { GUARD_BYTES = 64, GUARD = 0xa5 };

/* ---- arrays between guards ---- */

/* `bytes` of an allocation's middle, `shift` bytes from where it is aligned; what is around them is guarded.
 * Where ASan runs, the end of the allocation is the end of the bytes. */
typedef struct guarded {
    uint8_t *memory, *bytes;
    size_t n, n_behind;
} guarded;

static guarded guarded_create(size_t n, size_t shift) {
#if defined(__SANITIZE_ADDRESS__)
    size_t n_behind = 0;
#else
    size_t n_behind = GUARD_BYTES;
#endif
    guarded g = {malloc(GUARD_BYTES + shift + n + n_behind), NULL, n, n_behind};
    assert_non_null(g.memory);
    g.bytes = g.memory + GUARD_BYTES + shift;
    memset(g.memory, GUARD, GUARD_BYTES + shift + n + n_behind);
    return g;
}

static void guarded_check(const guarded *g) {
    for (const uint8_t *at = g->memory; at < g->bytes; at++)
        if (*at != GUARD) fail_msg("written %td bytes before the begin", g->bytes - at);
    for (size_t i = 0; i < g->n_behind; i++)
        if (g->bytes[g->n + i] != GUARD) fail_msg("written %zu bytes behind the end", i);
}

static void guarded_destroy(guarded *g) {
    guarded_check(g);
    free(g->memory);
}

/* Encodes with the processor's code and with the portable one, decodes by both, elsewhere and in place.
 * Returns the wire's bytes. */
static size_t round_trip(const uint8_t *base, const uint8_t *now, size_t n, unsigned element_bytes,
                         test_random *seed) {
    size_t bound = fcdp__delta_bound(n), shift = random_below(seed, 9);
    guarded wire = guarded_create(bound, shift), out = guarded_create(n, 8 - shift);
    guarded portable = guarded_create(bound, 0);
    size_t used = fcdp__delta_encode(base, now, n, element_bytes, wire.bytes, bound);
    if (n && !used) fail_msg("%zu bytes take more than the bound, %zu", n, bound);
    fcdp__delta_portable = true;
    assert_int_equal(fcdp__delta_encode(base, now, n, element_bytes, portable.bytes, bound), used);
    if (memcmp(wire.bytes, portable.bytes, used) != 0)
        fail_msg("the processors' wires of %zu bytes differ", n);
    guarded exact = guarded_create(used, shift); /* to read behind the wire is found */
    memcpy(exact.bytes, wire.bytes, used);
    for (int k = 0; k < 4; k++) {
        fcdp__delta_portable = k & 1;
        const uint8_t *from = k < 2 ? base : out.bytes;
        memset(out.bytes, 0x77, n);
        if (k >= 2) memcpy(out.bytes, base, n);
        assert_ok(fcdp__delta_decode(from, out.bytes, n, element_bytes, exact.bytes, used));
        if (memcmp(out.bytes, now, n) != 0)
            fail_msg("%zu bytes of width %u are not what they were (way %d)", n, element_bytes, k);
    }
    fcdp__delta_portable = false;
    guarded_destroy(&exact);
    guarded_destroy(&portable);
    guarded_destroy(&out);
    guarded_destroy(&wire);
    return used;
}

/* ---- weights ---- */

static double uniform(test_random *seed) {
    return (double)(random_next(seed) >> 11) / 9007199254740992.0;
}

static double normal(test_random *seed) { /* about */
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += uniform(seed);
    return sum;
}

static void value_store(uint8_t *at, unsigned element_bytes, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    memcpy(at, element_bytes == 2 ? (void *)&half : (void *)&bits, element_bytes);
}

/* The n values of a step of AdamW with this rate, and of the next step (see tools/bench/codec/main.c). */
static void step_fill(uint8_t *base, uint8_t *now, size_t n, unsigned element_bytes, double lr,
                      test_random *seed) {
    for (size_t i = 0; i < n; i++) {
        double w = 0.02 * normal(seed), u = 0.23 * normal(seed);
        value_store(base + i * element_bytes, element_bytes, (float)w);
        value_store(now + i * element_bytes, element_bytes, (float)(w - lr * u));
    }
}

static void test_weights_are_small_on_the_wire(void **state) {
    (void)state;
    static const struct {
        unsigned element_bytes;
        double lr, most; /* of the array */
    } cases[] = {{2, 3e-4, 0.22}, {2, 1e-4, 0.14}, {2, 1e-5, 0.04}, {2, 1e-6, 0.01},
                 {4, 3e-4, 0.61}, {4, 1e-4, 0.56}, {4, 1e-5, 0.46}, {4, 1e-6, 0.35}};
    enum { N = 1 << 16 };
    test_random seed = {random_seed(__func__, 1)};
    uint8_t *base = malloc(4 * N), *now = malloc(4 * N);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n = (size_t)N * cases[i].element_bytes;
        step_fill(base, now, N, cases[i].element_bytes, cases[i].lr, &seed);
        double of = (double)round_trip(base, now, n, cases[i].element_bytes, &seed) / (double)n;
        print_message("%u bytes, lr %g: %.4f\n", cases[i].element_bytes, cases[i].lr, of);
        assert_true(of <= cases[i].most);
    }
    free(base);
    free(now);
}

/* Some values move by up to 2^spread units in the last place. */
static void walk(uint8_t *now, size_t n, unsigned element_bytes, double share, unsigned spread,
                 test_random *seed) {
    for (size_t i = 0; i + element_bytes <= n; i += element_bytes) {
        uint32_t value = 0, by = (uint32_t)(random_next(seed) >> 32) >> (31 - spread);
        if (uniform(seed) >= share) continue;
        memcpy(&value, now + i, element_bytes);
        value += random_below(seed, 2) ? by : -by;
        memcpy(now + i, &value, element_bytes);
    }
}

static void bytes_fill(uint8_t *bytes, size_t n, test_random *seed) {
    for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)random_next(seed);
}

/* Blocks of every density and every spread of differences, one beside the other. */
static void test_random_walks(void **state) {
    (void)state;
    enum { N = 3 * 4 * FCDP_DELTA_BLOCK + 333 };
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    uint8_t *base = malloc(N + 8), *now = malloc(N + 8);
    bytes_fill(base, N + 8, &seed);
    for (unsigned spread = 0; spread < 32; spread++)
        for (int k = 0; k < 12; k++) {
            unsigned width = k & 1 ? 4 : 2;
            size_t n = N - random_below(&seed, 4000), shift = random_below(&seed, 8);
            memcpy(now, base, N + 8);
            for (size_t at = 0; at < n; at += 2048) {
                double share = pow(2, -14.0 * uniform(&seed));
                size_t here = n - at < 2048 ? n - at : 2048;
                walk(now + shift + at, here, width, share, spread, &seed);
            }
            round_trip(base + shift, now + shift, n, width, &seed);
            memcpy(base, now, N + 8);
        }
    free(base);
    free(now);
}

/* ---- bytes that are no weights ---- */

static void test_every_length_width_and_start(void **state) {
    (void)state;
    enum { MOST = 2000 };
    static const unsigned widths[] = {2, 4, 1, 3, 8};
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    guarded base = guarded_create(MOST + 16, 0), now = guarded_create(MOST + 16, 0);
    bytes_fill(base.bytes, base.n, &seed);
    for (size_t n = 0; n <= MOST; n++)
        for (size_t k = 0; k < sizeof widths / sizeof *widths; k++) {
            size_t a = random_below(&seed, 16), b = random_below(&seed, 16);
            if (k >= 2 && n % 7) continue;
            memcpy(now.bytes + b, base.bytes + a, n);
            walk(now.bytes + b, n, 2, uniform(&seed), random_below(&seed, 16), &seed);
            if (n) now.bytes[b + n - 1] ^= (uint8_t)random_next(&seed); /* the odd one at the end, too */
            round_trip(base.bytes + a, now.bytes + b, n, widths[k], &seed);
        }
    guarded_destroy(&base);
    guarded_destroy(&now);
}

/* All of one special value to all of another: zeroes of both signs, the largest, infinities, NaNs and their
 * payloads, denormals. And one beside the others. */
static void test_special_values(void **state) {
    (void)state;
    static const uint16_t special[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x807f,
                                       0x0080, 0x3f80, 0xbf80, 0x7f7f, 0xff7f, 0x7f80,
                                       0xff80, 0x7fc0, 0xffc0, 0x7fff, 0xffff, 0x7f81};
    enum { N_SPECIAL = sizeof special / sizeof *special, N = FCDP_DELTA_BLOCK + 70 };
    static uint8_t base[4 * N], now[4 * N];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    for (unsigned width = 2; width <= 4; width += 2)
        for (int a = 0; a < N_SPECIAL; a++)
            for (int b = 0; b <= N_SPECIAL; b++) { /* the last: each of them, in turn */
                for (size_t i = 0; i < N; i++) {
                    uint16_t from = special[a], to = special[b < N_SPECIAL ? b : (int)(i % N_SPECIAL)];
                    uint32_t low = width == 4 && i % 3 == 0 ? 0xffff : 0;
                    uint32_t wide_from = (uint32_t)from << 16 | low, wide_to = (uint32_t)to << 16;
                    memcpy(base + i * width, width == 2 ? (void *)&from : (void *)&wide_from, width);
                    memcpy(now + i * width, width == 2 ? (void *)&to : (void *)&wide_to, width);
                }
                round_trip(base, now, N * width, width, &seed);
            }
}

/* Each difference that 16 bits can have, from some values. */
static void test_every_difference(void **state) {
    (void)state;
    enum { N = 1 << 16 };
    static uint16_t base[N], now[N];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    for (int k = 0; k < 4; k++) {
        uint16_t from = k ? (uint16_t)random_next(&seed) : 0;
        for (int i = 0; i < N; i++) {
            base[i] = from;
            now[i] = (uint16_t)i;
        }
        round_trip((uint8_t *)base, (uint8_t *)now, sizeof base, 2, &seed);
    }
}

static void test_equal_arrays_are_next_to_nothing(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    uint8_t *base = malloc(N), *now = malloc(N);
    bytes_fill(base, N, &seed);
    memcpy(now, base, N);
    for (unsigned width = 1; width <= 8; width *= 2)
        assert_true(round_trip(base, now, N, width, &seed) <= N / 2000);
    /* and one value in all of them little more */
    now[N / 2] ^= 1;
    assert_true(round_trip(base, now, N, 2, &seed) <= N / 2000 + 8);
    free(base);
    free(now);
}

static void test_arrays_that_have_nothing_in_common(void **state) {
    (void)state;
    enum { N = 100003 };
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    uint8_t *base = malloc(N), *now = malloc(N);
    bytes_fill(base, N, &seed);
    bytes_fill(now, N, &seed);
    for (unsigned width = 1; width <= 8; width++)
        assert_true(round_trip(base, now, N, width, &seed) <= fcdp__delta_bound(N));
    assert_true(fcdp__delta_bound(N) <= N + N / 1000);
    free(base);
    free(now);
}

/* ---- room ---- */

/* With less room than the wire takes: 0, and nothing beyond the room is written. With as much: the wire. */
static void test_no_more_than_its_room_is_written(void **state) {
    (void)state;
    enum { N = 2 * FCDP_DELTA_BLOCK * 2 + 200 };
    static uint8_t base[N], now[N], wire[N + 100];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    bytes_fill(base, N, &seed);
    memcpy(now, base, N);
    walk(now, N, 2, 0.2, 3, &seed);
    bytes_fill(now + 4096, 1000, &seed); /* its block goes as it is */
    size_t used = fcdp__delta_encode(base, now, N, 2, wire, sizeof wire);
    assert_true(used > 0 && used < N);
    for (size_t room = 0; room < used + 40; room += room + 100 < used && room > 20 ? 7 : 1) {
        guarded small = guarded_create(room, 0);
        size_t got = fcdp__delta_encode(base, now, N, 2, small.bytes, room);
        assert_int_equal(got, room < used ? 0 : used);
        if (got) assert_memory_equal(small.bytes, wire, used);
        guarded_destroy(&small);
    }
}

/* ---- wires that are none ---- */

/* Of exactly so many bytes, into an array of exactly so many. */
static fcdp_status decode_guarded(const uint8_t *base, size_t n, unsigned element_bytes, const uint8_t *wire,
                                  size_t wire_bytes) {
    guarded from = guarded_create(n, 0), out = guarded_create(n, 0), exact = guarded_create(wire_bytes, 0);
    memcpy(from.bytes, base, n);
    if (wire_bytes) memcpy(exact.bytes, wire, wire_bytes);
    fcdp_status status = fcdp__delta_decode(from.bytes, out.bytes, n, element_bytes, exact.bytes, wire_bytes);
    if (status) {
        assert_int_equal(status, FCDP_ERR_INVALID);
        assert_true(strlen(fcdp_error_text()) > 20);
    }
    guarded_destroy(&exact);
    guarded_destroy(&out);
    guarded_destroy(&from);
    return status;
}

typedef struct sample {
    unsigned element_bytes, spread;
    double share;
    size_t n;
} sample;
/* With k = 0, trees, planes and bytes as they are, escapes; shorter blocks, and one behind a whole one. */
static const sample SAMPLES[] = {{2, 1, 0.5, 600},   {2, 2, 0.02, 4096 + 900}, {2, 6, 1, 700},
                                 {2, 15, 0.05, 900}, {4, 12, 1, 900},          {4, 20, 0.3, 1200},
                                 {2, 12, 1, 1500},   {4, 31, 0.01, 8192 + 60}, {1, 3, 0.001, 9000}};
enum { N_SAMPLES = sizeof SAMPLES / sizeof *SAMPLES, SAMPLE_BYTES = 10000 };

static size_t sample_make(const sample *s, uint8_t *base, uint8_t *now, uint8_t *wire, test_random *seed) {
    bytes_fill(base, s->n, seed);
    memcpy(now, base, s->n);
    walk(now, s->n, s->element_bytes, s->share, s->spread, seed);
    size_t used = fcdp__delta_encode(base, now, s->n, s->element_bytes, wire, SAMPLE_BYTES);
    assert_true(used > 0);
    return used;
}

static void test_a_cut_or_longer_wire_is_refused(void **state) {
    (void)state;
    static uint8_t base[SAMPLE_BYTES], now[SAMPLE_BYTES], wire[SAMPLE_BYTES + 64];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    for (int k = 0; k < 2 * N_SAMPLES; k++) {
        const sample *s = &SAMPLES[k / 2];
        fcdp__delta_portable = k & 1;
        size_t used = sample_make(s, base, now, wire, &seed);
        for (size_t n = 0; n < used + 20; n++) {
            fcdp_status status = decode_guarded(base, s->n, s->element_bytes, wire, n);
            if ((status == FCDP_OK) != (n == used))
                fail_msg("%zu of %zu bytes of wire: status %d (sample %d)", n, used, status, k / 2);
        }
        uint16_t payload; /* of the first block, which a byte more or less fits no more */
        memcpy(&payload, wire, sizeof payload);
        if (payload == 0 || payload > s->n - 2) continue;
        for (int more = -1; more <= 1; more += 2) {
            uint16_t other = (uint16_t)(payload + more);
            memcpy(wire, &other, sizeof other);
            assert_int_equal(decode_guarded(base, s->n, s->element_bytes, wire, used + (size_t)more),
                             FCDP_ERR_INVALID);
        }
    }
    fcdp__delta_portable = false;
}

/* Another version's ranks, and another processor's, must make and read the same wires. */
static void test_known_wires(void **state) {
    (void)state;
    static uint8_t base[SAMPLE_BYTES], now[SAMPLE_BYTES], wire[SAMPLE_BYTES];
    static const uint64_t known[N_SAMPLES] = {0x1432b5433aa496ac, 0xf56f79416bd347e6, 0x9873d079e441dae9,
                                              0x36b6708c81da2c31, 0xaed59be3b28a0c6b, 0xf67446ab2a9e80b1,
                                              0x28e105c8717628b1, 0xfcd45dd6c6cfe4bf, 0x79e04b09d6a27cb8};
    test_random seed = {1};
    for (int k = 0; k < N_SAMPLES; k++) {
        size_t used = sample_make(&SAMPLES[k], base, now, wire, &seed);
        uint64_t is = fcdp__fingerprint_by_host(wire, used, 0);
        if (is != known[k]) fail_msg("sample %d: %zu bytes, 0x%016llx", k, used, (unsigned long long)is);
    }
}

/* Such a wire may decode to other values, or is refused. */
static void test_a_flipped_wire_harms_nothing(void **state) {
    (void)state;
    static uint8_t base[SAMPLE_BYTES], now[SAMPLE_BYTES], wire[SAMPLE_BYTES];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    size_t n_refused = 0, n_flips = 0;
    for (int k = 0; k < 2 * N_SAMPLES; k++) {
        const sample *s = &SAMPLES[k / 2];
        fcdp__delta_portable = k & 1;
        size_t used = sample_make(s, base, now, wire, &seed);
        for (size_t i = 0; i < used; i++)
            for (int flip = 0; flip < (i < 16 ? 9 : 2); flip++) {
                uint8_t was = wire[i];
                wire[i] ^= (uint8_t)(i < 16 && flip < 8 ? 1u << flip : 1 + random_below(&seed, 255));
                n_refused += decode_guarded(base, s->n, s->element_bytes, wire, used) != FCDP_OK;
                n_flips++;
                wire[i] = was;
            }
        for (int i = 0; i < 200; i++) { /* bytes that never were one, behind a table that could be */
            memset(wire, 0, sizeof wire);
            uint16_t payload = (uint16_t)random_below(&seed, (uint32_t)s->n);
            memcpy(wire, &payload, sizeof payload);
            size_t table = fcdp__delta_bound(s->n) - s->n; /* of blocks of 2 bytes a value */
            bytes_fill(wire + table, sizeof wire - table, &seed);
            (void)!decode_guarded(base, s->n, s->element_bytes, wire, table + payload);
        }
    }
    fcdp__delta_portable = false;
    print_message("%zu of %zu flips are refused\n", n_refused, n_flips);
    assert_true(n_refused > 0 && n_refused < n_flips);
}

/* Each header, over payloads of many lengths. */
static void test_every_header(void **state) {
    (void)state;
    static uint8_t base[1000], wire[1000];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    bytes_fill(base, sizeof base, &seed);
    for (unsigned header = 0; header < 1 << 16; header += 1 + random_below(&seed, 8)) {
        unsigned width = random_below(&seed, 2) ? 4 : 2;
        uint16_t words[] = {(uint16_t)random_below(&seed, 900), (uint16_t)header};
        memcpy(wire, words, sizeof words);
        bytes_fill(wire + 4, sizeof wire - 4, &seed);
        fcdp__delta_portable = random_below(&seed, 2);
        fcdp_status status = decode_guarded(base, sizeof base - random_below(&seed, 90), width, wire,
                                            2u + words[0]);
        unsigned k = header & 31, top = header >> 5 & 31, depth = header >> 11;
        if (words[0] && (k > top || top >= 8 * width || depth > 11))
            assert_int_equal(status, FCDP_ERR_INVALID);
    }
    fcdp__delta_portable = false;
}

/* ---- ranges ---- */

enum { MOST_RANGES = 12, RANGES_BYTES = 7 * 4 * FCDP_DELTA_BLOCK };

typedef struct range {
    size_t begin, end;
} range;

/* An array's blocks in ranges at random, empty ones among them, in random order; returns how many. */
static size_t ranges_cut(size_t n, unsigned element_bytes, range *ranges, test_random *seed) {
    const size_t block_bytes = FCDP_DELTA_BLOCK * (element_bytes == 4 ? 4 : 2), n_whole = n / block_bytes;
    size_t n_ranges = 1 + random_below(seed, MOST_RANGES), cuts[MOST_RANGES + 1] = {0};
    for (size_t i = 1; i < n_ranges; i++) { /* each in its place */
        size_t cut = block_bytes * random_below(seed, (uint32_t)n_whole + 1), at = i;
        for (; cuts[at - 1] > cut; at--) cuts[at] = cuts[at - 1];
        cuts[at] = cut;
    }
    cuts[n_ranges] = n;
    for (size_t i = 0; i < n_ranges; i++) {
        size_t at = random_below(seed, (uint32_t)i + 1);
        ranges[i] = ranges[at];
        ranges[at] = (range){cuts[i], cuts[i + 1]};
    }
    return n_ranges;
}

/* Decodes the wire, of exactly so many bytes, range by range, and as a whole: the one is as good as the
 * other. Nothing but its range is written by any, refused or not. `now`: what has to come of it; NULL: what
 * the whole gives. */
static fcdp_status ranges_decode(const uint8_t *base, const uint8_t *now, size_t n, unsigned element_bytes,
                                 const uint8_t *wire, size_t wire_bytes, test_random *seed) {
    static uint8_t expected[RANGES_BYTES];
    guarded exact = guarded_create(wire_bytes, 0), out = guarded_create(n, random_below(seed, 9));
    guarded whole = guarded_create(n, 0);
    range ranges[MOST_RANGES];
    size_t n_ranges = ranges_cut(n, element_bytes, ranges, seed);
    bool in_place = random_below(seed, 2), refused = false;
    if (wire_bytes) memcpy(exact.bytes, wire, wire_bytes);
    fcdp_status status = fcdp__delta_decode(base, whole.bytes, n, element_bytes, exact.bytes, wire_bytes);
    if (!now) now = whole.bytes;
    if (n && in_place)
        memcpy(out.bytes, base, n);
    else
        bytes_fill(out.bytes, n, seed);
    if (n) memcpy(expected, out.bytes, n);
    for (size_t i = 0; i < n_ranges; i++) {
        const range *r = &ranges[i];
        fcdp_status one = fcdp__delta_decode_range(in_place ? out.bytes : base, out.bytes, n, element_bytes,
                                                   exact.bytes, wire_bytes, r->begin, r->end);
        if (one) assert_int_equal(one, FCDP_ERR_INVALID);
        refused |= one != FCDP_OK;
        memcpy(expected + r->begin, (one || status ? out.bytes : now) + r->begin, r->end - r->begin);
        if (n && memcmp(out.bytes, expected, n) != 0)
            fail_msg("bytes %zu to %zu of %zu, of width %u (%zu of %zu ranges, %s): not what they should be",
                     r->begin, r->end, n, element_bytes, i, n_ranges, in_place ? "in place" : "elsewhere");
    }
    if (refused != (status != FCDP_OK))
        fail_msg("%zu bytes of width %u on a wire of %zu: the whole %d, but %s range is refused", n,
                 element_bytes, wire_bytes, status, refused ? "a" : "no");
    guarded_destroy(&whole);
    guarded_destroy(&out);
    guarded_destroy(&exact);
    return status;
}

/* An array of random changes, or none at all, or nothing in common in some of its blocks. Returns the wire's
 * bytes. */
static size_t ranges_sample(uint8_t *base, uint8_t *now, size_t n, unsigned element_bytes, uint8_t *wire,
                            size_t capacity, test_random *seed) {
    bytes_fill(base, n, seed);
    memcpy(now, base, n);
    for (size_t at = 0; at < n && random_below(seed, 6); at += 4096) {
        size_t here = n - at < 4096 ? n - at : 4096;
        uint32_t kind = random_below(seed, 4);
        double share = pow(2, -10.0 * uniform(seed));
        if (kind == 0) bytes_fill(now + at, here, seed);
        if (kind >= 2) walk(now + at, here, element_bytes == 4 ? 4 : 2, share, random_below(seed, 16), seed);
    }
    size_t used = fcdp__delta_encode(base, now, n, element_bytes, wire, capacity);
    assert_true(used > 0 || n == 0);
    return used;
}

static const unsigned RANGES_WIDTHS[] = {2, 4, 8, 3};

/* Up to 6 blocks, with a tail or without. */
static size_t ranges_bytes(unsigned element_bytes, test_random *seed) {
    const uint32_t block_bytes = FCDP_DELTA_BLOCK * (element_bytes == 4 ? 4 : 2);
    return (size_t)block_bytes * random_below(seed, 7) +
           (random_below(seed, 2) ? random_below(seed, random_below(seed, 2) ? 100 : block_bytes) : 0);
}

static void test_ranges_are_as_the_whole(void **state) {
    (void)state;
    static uint8_t base[RANGES_BYTES], now[RANGES_BYTES], wire[RANGES_BYTES + 64];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    for (int k = 0; k < 1500; k++) {
        unsigned width = RANGES_WIDTHS[k % 4];
        size_t n = ranges_bytes(width, &seed);
        size_t used = ranges_sample(base, now, n, width, wire, sizeof wire, &seed);
        fcdp__delta_portable = k / 4 % 2;
        assert_ok(ranges_decode(base, now, n, width, wire, used, &seed));
    }
    fcdp__delta_portable = false;
}

/* Cut, longer, and spoilt in the table or in the payloads. */
static void test_a_wire_that_is_none_is_refused_by_a_range(void **state) {
    (void)state;
    static uint8_t base[RANGES_BYTES], now[RANGES_BYTES], wire[RANGES_BYTES + 64];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    size_t n_refused = 0, n_spoilt = 0;
    for (int k = 0; k < 300; k++) {
        unsigned width = RANGES_WIDTHS[k % 4];
        size_t n = ranges_bytes(width, &seed);
        size_t used = ranges_sample(base, now, n, width, wire, sizeof wire - 64, &seed);
        uint32_t table = (uint32_t)(fcdp__delta_bound(n) - n); /* of blocks of 2 bytes a value */
        fcdp__delta_portable = k / 4 % 2;
        for (int i = 0; i < 12; i++) {
            uint32_t below = i < 6 || !table ? (uint32_t)used : table;
            size_t at = below ? random_below(&seed, below) : 0;
            uint8_t was = wire[at];
            wire[at] ^= (uint8_t)(1 + random_below(&seed, 255));
            n_refused += ranges_decode(base, NULL, n, width, wire, used, &seed) != FCDP_OK;
            n_spoilt++;
            wire[at] = was;
        }
        for (int i = 0; i < 6; i++) {
            size_t cut = i < 3 && used ? 1 + random_below(&seed, i ? (uint32_t)used : 1) : 0;
            size_t wire_bytes = i < 3 ? used - cut : used + 1 + random_below(&seed, 60);
            fcdp_status status = ranges_decode(base, NULL, n, width, wire, wire_bytes, &seed);
            assert_int_equal(status, wire_bytes == used ? FCDP_OK : FCDP_ERR_INVALID);
        }
    }
    fcdp__delta_portable = false;
    print_message("%zu of %zu spoilt wires are refused\n", n_refused, n_spoilt);
    assert_true(n_refused > 0 && n_refused < n_spoilt);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights_are_small_on_the_wire),
        cmocka_unit_test(test_random_walks),
        cmocka_unit_test(test_every_length_width_and_start),
        cmocka_unit_test(test_special_values),
        cmocka_unit_test(test_every_difference),
        cmocka_unit_test(test_equal_arrays_are_next_to_nothing),
        cmocka_unit_test(test_arrays_that_have_nothing_in_common),
        cmocka_unit_test(test_no_more_than_its_room_is_written),
        cmocka_unit_test(test_a_cut_or_longer_wire_is_refused),
        cmocka_unit_test(test_known_wires),
        cmocka_unit_test(test_a_flipped_wire_harms_nothing),
        cmocka_unit_test(test_every_header),
        cmocka_unit_test(test_ranges_are_as_the_whole),
        cmocka_unit_test(test_a_wire_that_is_none_is_refused_by_a_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
