/* The n-th driver call fails, or the n-th collective, for every n of a short schedule of gathers, stores,
 * restores and evictions.
 *
 * Each run ends in right bytes or in clean errors; the step after the fault succeeds; nothing is leaked.
 * FCDP_TEST_STRIDE is not an option of the library: TEST_STRIDE=k takes every k-th n (the default is 1 for
 * one rank per node, more for larger clusters, where the same calls are made by more ranks), TEST_ONLY=n one.
 * TEST_COARSER=k widens the default, for builds that are slow.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/comm/program.h"
#include "tools/simgpu/simgpu.h"

enum { PAGE_BYTES = 2 << 20, CUDA_UNKNOWN = 999, CUDA_OUT_OF_MEMORY = 2, N_STEPS = 2 };

static cluster_config small_cluster(uint32_t node_size, fcdp_restore_mode restore) {
    cluster_config config = {
        .n_nodes = 2,
        .node_size = node_size,
        .n_groups = 2,
        .groups = {{2, {{70000, 1}, {300, 0}}}, {2, {{66000, 1}, {900, 1}}}},
        .restore = restore,
        .tau = {0, 1, 1, 0}, /* ranks that keep beside ranks that release */
        .device_budget_bytes = 2 * (size_t)PAGE_BYTES,
        .timeout_s = 10,
    };
    return config;
}

typedef struct outcome {
    unsigned long n_driver_calls;
    long n_transport_calls;
    int n_errors;
} outcome;

/* One program under one fault: `n` 0: none. */
static outcome run_with(const cluster_config *config, long n, int driver_code, hub_fault fault,
                        bool by_transport) {
    cluster *c = cluster_create(config);
    program p = {
        .cluster = c, .seed = 5, .n_steps = N_STEPS, .evict_chance = 40, .plain = true, .faults = n > 0};
    unsigned long before = simgpu_calls(NULL);
    if (by_transport) {
        c->fault = fault;
        c->fail_at = n;
    } else if (n > 0) {
        simgpu_fail_nth(NULL, (unsigned long)n, driver_code);
    }
    program_run(&p);
    simgpu_fail_nth(NULL, 0, 0);
    if (p.wrong[0]) fail_msg("fault at call %ld: %s; first error: %s", n, p.wrong, p.first_error);
    outcome result = {simgpu_calls(NULL) - before, c->n_calls, p.n_errors};
    cluster_destroy(c);
    assert_nothing_lives();
    return result;
}

static long from_environment(const char *name, long fallback) {
    const char *given = getenv(name);
    return given ? atol(given) : fallback;
}

static void every_driver_call(uint32_t node_size, fcdp_restore_mode restore, int code, long stride) {
    cluster_config config = small_cluster(node_size, restore);
    long n_calls = (long)run_with(&config, 0, 0, 0, false).n_driver_calls, n_failed = 0;
    long only = from_environment("TEST_ONLY", 0);
    stride = from_environment("TEST_STRIDE", stride * from_environment("TEST_COARSER", 1));
    for (long n = only ? only : 1; n <= (only ? only : n_calls); n += stride)
        n_failed += run_with(&config, n, code, 0, false).n_errors > 0;
    print_message(
        "%u ranks per node, restore %s: %ld driver calls, each %ld failed with %d: %ld runs saw an error\n",
        node_size, restore ? "whole" : "slice", n_calls, stride, code, n_failed);
    if (!only) assert_true(n_failed > 0);
}

static void test_every_driver_call_alone_on_a_node(void **state) {
    (void)state;
    every_driver_call(1, FCDP_RESTORE_SLICE, CUDA_UNKNOWN, 1);
    every_driver_call(1, FCDP_RESTORE_SLICE, CUDA_OUT_OF_MEMORY, 7);
}

static void test_every_driver_call_restore_by_slice(void **state) {
    (void)state;
    every_driver_call(2, FCDP_RESTORE_SLICE, CUDA_UNKNOWN, 5);
}

static void test_every_driver_call_restore_whole(void **state) {
    (void)state;
    every_driver_call(2, FCDP_RESTORE_WHOLE, CUDA_UNKNOWN, 5);
}

static void every_collective(uint32_t node_size, fcdp_restore_mode restore, hub_fault fault) {
    cluster_config config = small_cluster(node_size, restore);
    long n_calls = run_with(&config, 0, 0, 0, true).n_transport_calls;
    long only = from_environment("TEST_ONLY", 0);
    for (long n = only ? only : 1; n <= (only ? only : n_calls); n++)
        assert_true(run_with(&config, n, 0, fault, true).n_errors > 0);
    print_message("%u ranks per node: %ld collectives, each failed once\n", node_size, n_calls);
}

static void test_every_collective_fails(void **state) {
    (void)state;
    for (uint32_t node_size = 1; node_size <= 2; node_size++)
        every_collective(node_size, FCDP_RESTORE_SLICE, HUB_FAULT_ABSENT);
}

static void test_every_collective_succeeds_for_the_others_only(void **state) {
    (void)state;
    for (uint32_t node_size = 1; node_size <= 2; node_size++)
        every_collective(node_size, FCDP_RESTORE_SLICE, HUB_FAULT_LOST);
    every_collective(2, FCDP_RESTORE_WHOLE, HUB_FAULT_LOST);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_collective_fails),
        cmocka_unit_test(test_every_collective_succeeds_for_the_others_only),
        cmocka_unit_test(test_every_driver_call_alone_on_a_node),
        cmocka_unit_test(test_every_driver_call_restore_by_slice),
        cmocka_unit_test(test_every_driver_call_restore_whole),
    };
    fcdp_log_set_level(FCDP_LOG_QUIET); /* leftovers that a fault causes are told, and expected */
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
