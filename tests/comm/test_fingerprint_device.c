/* That a device's fingerprints are the CPU's, on any driver: FCDP_DRIVER=cuda runs the
 * PTX. With an argument: GB/s of both. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "comm/fingerprint.h"
#include "tests/assert_ok.h"
#include "tests/comm/host_fingerprint.h"
#include "tests/comm/random.h"

enum { MIB = 1 << 20, TASK = FCDP_FINGERPRINT_TASK_BYTES };
extern char **environ;

typedef struct world {
    fcdp_driver *drv;
    fcdp_dptr base; /* n_bytes of device memory, which hold `truth` */
    fcdp_phys block;
    uint8_t *truth;
    size_t n_bytes;
    fcdp_stream stream;
    fcdp_fingerprints *fingerprints;
} world;

static world world_create(size_t n_bytes, test_random *random) {
    fcdp_options options;
    world w = {0};
    assert_ok(fcdp_options_load(environ, &options));
    assert_ok(fcdp__driver_open(options.driver, 0, NULL, &w.drv));
    w.n_bytes = fcdp__round_up(n_bytes, fcdp__driver_page_bytes(w.drv));
    w.truth = malloc(w.n_bytes);
    for (size_t i = 0; i < w.n_bytes / sizeof(uint64_t); i++)
        ((uint64_t *)(void *)w.truth)[i] = random_next(random);
    assert_ok(fcdp__driver_range_reserve(w.drv, w.n_bytes, &w.base));
    assert_ok(fcdp__driver_phys_create(w.drv, w.n_bytes, &w.block));
    assert_ok(fcdp__driver_map(w.drv, w.base, w.n_bytes, w.block));
    assert_ok(fcdp__driver_set_access(w.drv, w.base, w.n_bytes));
    assert_ok(fcdp__driver_stream_create(w.drv, &w.stream));
    assert_ok(fcdp__driver_copy_h2d(w.drv, w.base, w.truth, w.n_bytes, w.stream));
    assert_ok(fcdp__fingerprints_create(w.drv, &w.fingerprints));
    return w;
}

static void world_destroy(world *w) {
    fcdp__fingerprints_destroy(w->fingerprints);
    assert_ok(fcdp__driver_stream_sync(w->drv, w->stream));
    fcdp__driver_stream_destroy(w->drv, w->stream);
    assert_ok(fcdp__driver_unmap(w->drv, w->base, w->n_bytes));
    assert_ok(fcdp__driver_phys_release(w->drv, w->block));
    assert_ok(fcdp__driver_range_free(w->drv, w->base, w->n_bytes));
    fcdp__driver_close(w->drv);
    free(w->truth);
}

/* Lengths around the ends of words, pairs of words, rounds of all threads and tasks; starts of every
 * alignment; more arrays than a simulated operation has accesses. */
static void test_the_device_says_what_the_cpu_says(void **state) {
    (void)state;
    enum { N = 100, MAX_BYTES = 3 * TASK + 100 };
    static const size_t edges[] = {0,    1,     7,        8,    9,        15,       16,       17,
                                   4096, 16384, TASK - 1, TASK, TASK + 1, TASK + 8, 2 * TASK, 3 * TASK + 99};
    uint64_t arrays[N], said[N];
    size_t bytes[N], at[N];
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    world w = world_create(4 * MIB, &seed);
    for (int round = 0; round < 6; round++) {
        size_t n = round ? random_below(&seed, N + 1) : N;
        for (size_t i = 0; i < n; i++) {
            bytes[i] = i % 2 ? edges[random_below(&seed, sizeof edges / sizeof *edges)]
                             : random_below(&seed, 70000);
            at[i] = random_below(&seed, (uint32_t)(w.n_bytes - MAX_BYTES)) &
                    (i % 3 ? ~(uint32_t)15 : ~(uint32_t)0);
            arrays[i] = w.base.addr + at[i];
        }
        assert_ok(fcdp__fingerprints_begin(w.fingerprints, arrays, bytes, n, w.stream));
        assert_ok(fcdp__fingerprints_end(w.fingerprints, said));
        for (size_t i = 0; i < n; i++)
            if (said[i] != host_fingerprint(w.truth + at[i], bytes[i]))
                fail_msg("array %zu, %zu bytes at %zu", i, bytes[i], at[i]);
    }
    world_destroy(&w);
}

/* Bits of one array of many tasks, written by copies, each seen and each seen to be gone. */
static void test_the_device_sees_a_flipped_bit(void **state) {
    (void)state;
    test_random seed = {random_seed(__func__, fcdp__now_ns())};
    world w = world_create(4 * MIB, &seed);
    uint64_t was, is;
    assert_ok(fcdp__fingerprints_begin(w.fingerprints, &w.base.addr, &w.n_bytes, 1, w.stream));
    assert_ok(fcdp__fingerprints_end(w.fingerprints, &was));
    for (int k = 0; k < 20; k++) {
        size_t at = random_below(&seed, (uint32_t)w.n_bytes);
        for (int back = 0; back < 2; back++) {
            w.truth[at] ^= (uint8_t)(1u << k % 8);
            assert_ok(fcdp__driver_copy_h2d(w.drv, fcdp__dptr_add(w.base, at), w.truth + at, 1, w.stream));
            assert_ok(fcdp__fingerprints_begin(w.fingerprints, &w.base.addr, &w.n_bytes, 1, w.stream));
            assert_ok(fcdp__fingerprints_end(w.fingerprints, &is));
            assert_true((is == was) == back);
        }
    }
    world_destroy(&w);
}

/* ---- how fast ---- */

static double seconds_since(uint64_t start_ns) {
    return (double)(fcdp__now_ns() - start_ns) / 1e9;
}

/* The best of ten, of so many arrays of so many bytes each: a block's extents, or adapters. */
static void print_rate(size_t n, size_t each) {
    enum { MAX_ARRAYS = 1024 };
    uint64_t arrays[MAX_ARRAYS], said[MAX_ARRAYS];
    size_t bytes[MAX_ARRAYS];
    test_random seed = {1};
    double device_s = 1e9, cpu_s = 1e9;
    world w = world_create(n * each, &seed);
    for (size_t i = 0; i < n; i++) {
        arrays[i] = w.base.addr + i * each;
        bytes[i] = each;
    }
    for (int k = 0; k < 10; k++) {
        uint64_t start_ns = fcdp__now_ns();
        assert_ok(fcdp__fingerprints_begin(w.fingerprints, arrays, bytes, n, w.stream));
        assert_ok(fcdp__fingerprints_end(w.fingerprints, said));
        if (seconds_since(start_ns) < device_s) device_s = seconds_since(start_ns);
        start_ns = fcdp__now_ns();
        (void)host_fingerprint(w.truth, n * each);
        if (k < 3 && seconds_since(start_ns) < cpu_s) cpu_s = seconds_since(start_ns);
    }
    printf("%4zu arrays of %9zu bytes: %s %.1f GB/s (%.0f us with the wait), the CPU %.1f GB/s\n", n, each,
           fcdp__driver_is_sim(w.drv) ? "the simulated device" : "the device",
           (double)(n * each) / device_s / 1e9, device_s * 1e6, (double)(n * each) / cpu_s / 1e9);
    world_destroy(&w);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_device_says_what_the_cpu_says),
        cmocka_unit_test(test_the_device_sees_a_flipped_bit),
    };
    if (argc > 1) {
        size_t most = strtoull(argv[1], NULL, 0) * MIB;
        print_rate(1, most);
        print_rate(16, most / 16);
        print_rate(448, 64 << 10);
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
