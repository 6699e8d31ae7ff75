/* The fingerprint: its definition, what it sees; batches on the simulated device: their
 * order, their calls, their failures. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/fingerprint.h"
#include "sim/gpu/simgpu.h"
#include "tests/assert_ok.h"
#include "tests/comm/host_fingerprint.h"
#include "tests/comm/random.h"

enum { PAGE_BYTES = 2 << 20, CUDA_UNKNOWN = 999 };

/* ---- the definition, once more, word by word from bytes, with 128-bit products ---- */

static uint64_t times(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 wide;
    return (uint64_t)((wide)a * b);
}

static uint64_t mix_plain(uint64_t x) {
    for (int round = 0; round < 2; round++) x = times(x ^ (x >> 32), 0xd6e8feb86659fd93);
    return x ^ (x >> 32);
}

static uint64_t fingerprint_plain(const uint8_t *bytes, size_t n) {
    uint64_t sum = 0;
    for (size_t i = 0; i < (n + 7) / 8; i++) {
        uint64_t word = 0;
        for (size_t b = 0; b < 8 && 8 * i + b < n; b++) word |= (uint64_t)bytes[8 * i + b] << 8 * b;
        sum += mix_plain(word + times(i + 1, 0x9e3779b97f4a7c15));
    }
    return mix_plain(sum + n);
}

static void bytes_fill(uint8_t *bytes, size_t n, test_random *seed) {
    for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)random_next(seed);
}

static void test_it_is_as_defined_for_every_length_and_start(void **state) {
    (void)state;
    uint8_t bytes[300];
    test_random seed = {1};
    bytes_fill(bytes, sizeof bytes, &seed);
    for (size_t start = 0; start < 17; start++)
        for (size_t n = 0; start + n <= sizeof bytes; n++)
            assert_true(host_fingerprint(bytes + start, n) == fingerprint_plain(bytes + start, n));
}

/* What is defined may never change in secret: the kernel of another version would then disagree. */
static void test_known_values(void **state) {
    (void)state;
    assert_true(host_fingerprint("", 0) == 0);
    assert_true(host_fingerprint("FCDP", 4) == 0x42d701cb3b931eb6);
}

/* ---- what it sees ---- */

static void test_a_flipped_bit_is_seen_wherever_it_is(void **state) {
    (void)state;
    enum { N = 1 << 20, N_FLIPS = 10000 };
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    uint8_t *bytes = malloc(N);
    for (int kind = 0; kind < 3; kind++) { /* random; all zero; like bf16 weights, of few values */
        bytes_fill(bytes, N, &seed);
        for (size_t i = 0; i < N; i++)
            bytes[i] = kind == 0 ? bytes[i] : kind == 1 ? 0 : i % 2 ? 0x3c : bytes[i] & 7;
        for (int k = 0; k < N_FLIPS / 3 + 1; k++) {
            size_t n = 1 + random_below(&seed, k % 50 ? 4096 : N), at = random_below(&seed, (uint32_t)n);
            uint64_t was = host_fingerprint(bytes, n);
            uint8_t bit = (uint8_t)(1u << random_below(&seed, 8));
            bytes[at] ^= bit;
            if (host_fingerprint(bytes, n) == was) fail_msg("a flip in byte %zu of %zu is not seen", at, n);
            bytes[at] ^= bit;
            assert_true(host_fingerprint(bytes, n) == was);
        }
    }
    free(bytes);
}

static void swap(uint8_t *a, uint8_t *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint8_t was = a[i];
        a[i] = b[i];
        b[i] = was;
    }
}

/* Words, halves, quarters, and whole rows. */
static void test_what_changes_places_is_seen(void **state) {
    (void)state;
    enum { N = 8192 };
    static const size_t sizes[] = {1, 2, 4, 8, 16, 512};
    uint8_t bytes[N];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    for (int k = 0; k < 10000; k++) {
        size_t size = sizes[k % 6];
        if (k % 100 == 0) bytes_fill(bytes, N, &seed);
        uint8_t *a = bytes + size * random_below(&seed, (uint32_t)(N / size)),
                *b = bytes + size * random_below(&seed, (uint32_t)(N / size));
        uint64_t was = host_fingerprint(bytes, N);
        bool same = memcmp(a, b, size) == 0;
        swap(a, b, size);
        if ((host_fingerprint(bytes, N) == was) != same)
            fail_msg("%zu bytes at %td and %td changed places", size, a - bytes, b - bytes);
    }
}

/* In a sum of products, the highest bits of two words cancel: the signs of two values. */
static void test_two_bits_do_not_cancel(void **state) {
    (void)state;
    uint64_t words[64];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    for (int bit = 0; bit < 64; bit++) {
        for (int i = 0; i < 64; i++) words[i] = random_next(&seed);
        uint64_t was = host_fingerprint(words, sizeof words);
        for (int a = 0; a < 64; a++)
            for (int b = 0; b < a; b++) {
                words[a] ^= UINT64_C(1) << bit;
                words[b] ^= UINT64_C(1) << bit;
                assert_true(host_fingerprint(words, sizeof words) != was);
                words[a] ^= UINT64_C(1) << bit;
                words[b] ^= UINT64_C(1) << bit;
            }
    }
}

static void test_zeroes_more_or_less_are_seen(void **state) {
    (void)state;
    uint8_t bytes[600] = {0};
    for (int filled = 0; filled < 2; filled++) {
        if (filled) memset(bytes, 0xff, 5);
        for (size_t n = 5; n < sizeof bytes; n++)
            for (size_t m = 5; m < n; m += 7)
                assert_true(host_fingerprint(bytes, n) != host_fingerprint(bytes, m));
    }
}

/* ---- on a device ---- */

typedef struct world {
    fcdp_driver *drv;
    fcdp_phys block;
    uint8_t *bytes; /* n_bytes of the device's memory */
    size_t n_bytes;
    fcdp_stream stream, other;
    fcdp_fingerprints *fingerprints;
} world;

static world world_create(void) {
    enum { N_PAGES = 2 };
    world w = {.n_bytes = N_PAGES * (size_t)PAGE_BYTES};
    simgpu_reset();
    simgpu_set_races(1);
    assert_ok(fcdp__driver_open(FCDP_DRIVER_SIM, 0, NULL, &w.drv));
    fcdp_dptr base;
    assert_ok(fcdp__driver_range_reserve(w.drv, w.n_bytes, &base));
    assert_ok(fcdp__driver_phys_create(w.drv, w.n_bytes, &w.block));
    assert_ok(fcdp__driver_map(w.drv, base, w.n_bytes, w.block));
    assert_ok(fcdp__driver_set_access(w.drv, base, w.n_bytes));
    assert_ok(fcdp__driver_stream_create(w.drv, &w.stream));
    assert_ok(fcdp__driver_stream_create(w.drv, &w.other));
    assert_ok(fcdp__fingerprints_create(w.drv, &w.fingerprints));
    w.bytes = (uint8_t *)(uintptr_t)base.addr;
    return w;
}

static void assert_nothing_lives(void) {
    struct simgpu_live live, nothing = {0};
    simgpu_live(&live);
    assert_memory_equal(&live, &nothing, sizeof live);
}

static void world_destroy(world *w) {
    fcdp__fingerprints_destroy(w->fingerprints);
    fcdp_dptr base = {(uintptr_t)w->bytes};
    fcdp__driver_stream_destroy(w->drv, w->stream);
    fcdp__driver_stream_destroy(w->drv, w->other);
    assert_ok(fcdp__driver_unmap(w->drv, base, w->n_bytes));
    assert_ok(fcdp__driver_phys_release(w->drv, w->block));
    assert_ok(fcdp__driver_range_free(w->drv, base, w->n_bytes));
    fcdp__driver_close(w->drv);
    assert_nothing_lives();
}

static void assert_ordered(void) {
    struct simgpu_unordered unordered;
    simgpu_unordered(&unordered);
    if (unordered.text[0]) fail_msg("%s", unordered.text);
}

/* Nothing created, pinned or loaded again: an address, a launch, an event; then a query, and a wait where the
 * device is not through. */
static void test_a_batch_is_five_driver_calls_at_most(void **state) {
    (void)state;
    enum { N = 50 };
    uint64_t arrays[N], said[N];
    size_t bytes[N];
    world w = world_create();
    for (int i = 0; i < N; i++) {
        arrays[i] = (uintptr_t)w.bytes + (size_t)i * 70000;
        bytes[i] = 60000;
    }
    for (int round = 0; round < 3; round++) {
        bool idle = round == 1;
        unsigned long before = fcdp__driver_calls(w.drv);
        assert_ok(fcdp__fingerprints_begin(w.fingerprints, arrays, bytes, N, w.stream));
        if (round) assert_int_equal(fcdp__driver_calls(w.drv) - before, 3);
        if (idle) assert_ok(fcdp__driver_stream_sync(w.drv, w.stream));
        before = fcdp__driver_calls(w.drv);
        assert_ok(fcdp__fingerprints_end(w.fingerprints, said));
        assert_in_range(fcdp__driver_calls(w.drv) - before, 1, idle ? 1 : 2);
    }
    assert_int_equal(simgpu_calls("cuLaunchKernel"), 3);
    world_destroy(&w);
}

static void test_no_arrays_and_one_batch_at_a_time(void **state) {
    (void)state;
    world w = world_create();
    uint64_t array = (uintptr_t)w.bytes, said = 77;
    size_t bytes = 100;
    assert_ok(fcdp__fingerprints_begin(w.fingerprints, NULL, NULL, 0, w.stream));
    assert_ok(fcdp__fingerprints_end(w.fingerprints, NULL));
    assert_ok(fcdp__fingerprints_begin(w.fingerprints, &array, &bytes, 1, w.stream));
    assert_int_equal(fcdp__fingerprints_begin(w.fingerprints, &array, &bytes, 1, w.stream), FCDP_ERR_INVALID);
    assert_ok(fcdp__fingerprints_end(w.fingerprints, &said));
    assert_true(said == host_fingerprint(w.bytes, bytes));
    world_destroy(&w);
}

static void fill_body(void *data) {
    memset(*(uint8_t **)data, 0x5a, 1000);
}

static void fill_on(const world *w, fcdp_stream stream, size_t at) {
    uint8_t *to = w->bytes + at;
    struct simgpu_kernel kernel = {.name = "step",
                                   .duration_ns = 3000000,
                                   .n_accesses = 1,
                                   .accesses = {{(uintptr_t)to, 1000, 1}},
                                   .body = fill_body,
                                   .data = &to,
                                   .data_bytes = sizeof to};
    assert_int_equal(simgpu_launch(stream, &kernel), 0);
}

/* Behind what the stream does: the optimizer's step. Of twenty arrays, the last one's. */
static void test_it_reads_what_its_stream_has_written(void **state) {
    (void)state;
    enum { N = 20 };
    uint64_t arrays[N], said[N];
    size_t bytes[N];
    uint8_t truth[1000];
    world w = world_create();
    for (int i = 0; i < N; i++) {
        arrays[i] = (uintptr_t)w.bytes + (size_t)i * 5000;
        bytes[i] = sizeof truth;
    }
    fill_on(&w, w.stream, (N - 1) * 5000);
    assert_ok(fcdp__fingerprints_begin(w.fingerprints, arrays, bytes, N, w.stream));
    assert_ok(fcdp__fingerprints_end(w.fingerprints, said));
    memset(truth, 0x5a, sizeof truth);
    assert_true(said[N - 1] == host_fingerprint(truth, sizeof truth));
    assert_ordered();
    world_destroy(&w);
}

/* Beside a write that nothing orders it with, in the last of the arrays: the
 * simulator knows what the kernel reads. */
static void test_a_write_beside_it_is_found(void **state) {
    (void)state;
    enum { N = 20 };
    uint64_t arrays[N], said[N];
    size_t bytes[N];
    struct simgpu_unordered unordered;
    world w = world_create();
    for (int i = 0; i < N; i++) {
        arrays[i] = (uintptr_t)w.bytes + (size_t)i * 5000;
        bytes[i] = 1000;
    }
    fill_on(&w, w.other, (N - 1) * 5000 + 999);
    /* The one of the two that comes second fails, and every call of the driver's from then on: which of ours
     * is the first of them is a matter of time. */
    fcdp_status first = fcdp__fingerprints_begin(w.fingerprints, arrays, bytes, N, w.stream);
    if (!first) first = fcdp__fingerprints_end(w.fingerprints, said);
    assert_int_equal(first ? first : fcdp__driver_sync(w.drv), FCDP_ERR_DRIVER);
    simgpu_unordered(&unordered);
    assert_int_equal(unordered.races, 1);
    assert_non_null(strstr(unordered.text, "fcdp_fingerprint"));
    fcdp__fingerprints_destroy(w.fingerprints);
    fcdp__driver_close(w.drv);
    simgpu_reset();
}

/* ---- failures ---- */

static fcdp_status one_life(fcdp_driver *drv, fcdp_stream stream, const uint8_t *bytes, uint64_t *said_out) {
    const uint64_t arrays[2][3] = {{(uintptr_t)bytes, (uintptr_t)bytes + 5000, (uintptr_t)bytes + 9000},
                                   {(uintptr_t)bytes, (uintptr_t)bytes + 1, (uintptr_t)bytes + PAGE_BYTES}};
    /* the second needs more memory for its tasks */
    const size_t sizes[2][3] = {{100, 200, 300}, {PAGE_BYTES, PAGE_BYTES, PAGE_BYTES}};
    fcdp_fingerprints *f;
    fcdp_status status = fcdp__fingerprints_create(drv, &f);
    if (status) return status;
    for (int k = 0; k < 3 && !status; k++) {
        status = fcdp__fingerprints_begin(f, arrays[k == 1], sizes[k == 1], 3, stream);
        if (!status) status = fcdp__fingerprints_end(f, said_out);
    }
    fcdp__fingerprints_destroy(f);
    return status;
}

/* Each n-th driver call fails once: the status says so, with a text; what was
 * begun is over, and nothing is leaked. */
static void test_every_driver_call_fails(void **state) {
    (void)state;
    uint64_t said[3];
    world w = world_create();
    unsigned long before = simgpu_calls(NULL);
    assert_ok(one_life(w.drv, w.stream, w.bytes, said));
    unsigned long n_calls = simgpu_calls(NULL) - before, n_failed = 0;
    struct simgpu_live whole;
    simgpu_live(&whole);
    for (unsigned long n = 1; n <= n_calls; n++) {
        struct simgpu_live live;
        assert_int_equal(simgpu_fail_nth(NULL, n, CUDA_UNKNOWN), 0);
        memset(said, 0, sizeof said);
        fcdp_status status = one_life(w.drv, w.stream, w.bytes, said);
        (void)simgpu_fail_nth(NULL, 0, 0);
        n_failed += status != FCDP_OK;
        if (status && strlen(fcdp_error_text()) < 20) fail_msg("call %lu: '%s'", n, fcdp_error_text());
        if (!status) assert_true(said[2] == host_fingerprint(w.bytes + 9000, 300));
        simgpu_live(&live);
        if (live.registrations > whole.registrations + 1 || live.events > whole.events + 1 ||
            live.modules > whole.modules + 1)
            fail_msg("call %lu leaks", n); /* one thing, whose own destruction is what failed */
        whole = live;
    }
    print_message("%lu driver calls, %lu of them failed the batch\n", n_calls, n_failed);
    assert_true(n_failed >= 20);
    fcdp__fingerprints_destroy(w.fingerprints);
    simgpu_reset();
    fcdp__driver_close(w.drv);
}

static void test_a_driver_that_cannot_says_what_to_do(void **state) {
    (void)state;
    static const int codes[] = {209, 218, 221, 222, 223};
    world w = world_create();
    fcdp_fingerprints *f = NULL;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        assert_int_equal(simgpu_fail_nth("cuModuleLoadData", 1, codes[i]), 0);
        assert_int_equal(fcdp__fingerprints_create(w.drv, &f), FCDP_ERR_UNSUPPORTED);
        assert_non_null(strstr(fcdp_error_text(), "cuModuleLoadData(fcdp_fingerprint, device 0)"));
        assert_non_null(strstr(fcdp_error_text(), "libnvidia-ptxjitcompiler"));
    }
    assert_null(f);
    world_destroy(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_it_is_as_defined_for_every_length_and_start),
        cmocka_unit_test(test_known_values),
        cmocka_unit_test(test_a_flipped_bit_is_seen_wherever_it_is),
        cmocka_unit_test(test_what_changes_places_is_seen),
        cmocka_unit_test(test_two_bits_do_not_cancel),
        cmocka_unit_test(test_zeroes_more_or_less_are_seen),
        cmocka_unit_test(test_a_batch_is_five_driver_calls_at_most),
        cmocka_unit_test(test_no_arrays_and_one_batch_at_a_time),
        cmocka_unit_test(test_it_reads_what_its_stream_has_written),
        cmocka_unit_test(test_a_write_beside_it_is_found),
        cmocka_unit_test(test_every_driver_call_fails),
        cmocka_unit_test(test_a_driver_that_cannot_says_what_to_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
