/* The n-th driver call fails, or the n-th collective, or it stalls, or a rank stops before its n-th call, for
 * every n of a short schedule of gathers, restores and releases.
 *
 * Each run ends in right bytes or in clean errors on every rank; what peers wait for ends by itself, long
 * before FCDP_TIMEOUT if a rank can know of the failure, and otherwise by it, with the names of those that
 * did not come; nothing is leaked and nothing was unordered. Of many n every k-th is taken, from a random one
 * on: TEST_STRIDE=k (1: all), TEST_ONLY=n one; TEST_COARSER=k widens the default strides, by 3
 * without it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "comm/delta_exchange.h"
#include "sim/gpu/simgpu.h"
#include "tests/comm/program.h"

enum {
    PAGE_BYTES = 2 << 20,
    CUDA_UNKNOWN = 999,
    CUDA_OUT_OF_MEMORY = 2,
    N_STEPS = 2,
    NOBODY = -1,
    MUCH_LATER_S = 20
};
/* in an agreement no rank knows which collective is late */
static const double LONG_S = 60, SHORT_S = 0.5, AGREEMENT_S = 3;

static int n_steps = N_STEPS;
static long spoil_at; /* in the exchange of that number a byte changes on its way; 0: in none */

typedef struct fault { /* n 0: none */
    long n;
    bool of_driver;
    int code;  /* of the driver's call, or hub_fault */
    int stops; /* the rank that makes no n-th call, NOBODY */
} fault;

typedef struct outcome {
    unsigned long n_driver_calls;
    long n_collectives, n_exchanges;
    uint64_t n_crossed_whole; /* gathers that asked for differences */
    int n_beside;             /* last gathers of groups, whose shards came beside the turn */
    int n_actions, n_failed;
    double took_s;
    rank_end ends[CLUSTER_MAX_RANKS];
} outcome;

/* Ranks that keep beside ranks that release, and one group that changes in part. */
static cluster_config small_cluster(uint32_t node_size, fcdp_restore_mode restore,
                                    fcdp_mapping_mode mapping) {
    return (cluster_config){
        .n_nodes = 2,
        .node_size = node_size,
        .n_groups = 2,
        .groups = {{2, {{70000, 1}, {300, 0}}}, {2, {{66000, 1}, {900, 1}}}},
        .restore = restore,
        .mapping = mapping,
        .prefetch = 1,
        .tau = {0, 1, 1, 0},
        .device_budget_bytes = 2 * (size_t)PAGE_BYTES,
        .timeout_s = LONG_S,
    };
}

/* Both groups cross together. */
static cluster_config together(cluster_config config) {
    config.coalesce_bytes = 1 << 20;
    return config;
}

/* Shards are fingerprinted on the device. */
static cluster_config looking(cluster_config config) {
    config.fingerprints = true;
    return config;
}

static void fault_arm(cluster *c, const fault *f) {
    c->hub.silent = f->stops != NOBODY || (!f->of_driver && f->code == HUB_STALLS);
    if (f->n <= 0 || f->stops != NOBODY) return;
    if (f->of_driver) {
        simgpu_fail_nth(NULL, (unsigned long)f->n, f->code);
    } else {
        atomic_store(&c->hub.fault, f->code);
        atomic_store(&c->hub.fail_at, f->n);
    }
}

/* Every failure has a text, and the ranks that succeeded launched what all launched. */
static void ends_check(const program *p, const fault *f) {
    const cluster *c = p->cluster;
    if (p->wrong[0]) fail_msg("fault at call %ld: %s", f->n, p->wrong);
    for (uint32_t r = 0; r < c->n_ranks; r++)
        if (p->ends[r].status && (p->ends[r].status > 0 || strlen(p->ends[r].text) < 30))
            fail_msg("fault at call %ld: rank %u ended with %d, '%s'", f->n, r, p->ends[r].status,
                     p->ends[r].text);
    cluster_check_launches(c, p->n_failed == 0 && p->stops == NOBODY);
}

/* One program under one fault. */
static outcome run_with(const cluster_config *config, const fault *f) {
    simgpu_reset();
    simgpu_set_races(1);
    cluster *c = cluster_create(config);
    program p = {
        .cluster = c, .seed = 5, .n_steps = n_steps, .plain = true, .stops = f->stops, .stops_at = (int)f->n};
    unsigned long before = simgpu_calls(NULL);
    uint64_t start_ns = fcdp__now_ns();
    c->council.timeout_s = AGREEMENT_S > config->timeout_s ? AGREEMENT_S : config->timeout_s;
    atomic_store(&c->hub.spoil_at, spoil_at);
    fault_arm(c, f);
    program_run(&p);
    simgpu_fail_nth(NULL, 0, 0);
    outcome result = {.n_driver_calls = simgpu_calls(NULL) - before,
                      .n_collectives = c->hub.n_calls,
                      .n_exchanges = c->hub.n_exchanges,
                      .n_actions = p.n_actions,
                      .n_failed = p.n_failed,
                      .took_s = (double)(fcdp__now_ns() - start_ns) / 1e9};
    memcpy(result.ends, p.ends, sizeof result.ends);
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        fcdp_engine_stats stats;
        fcdp_engine_stats_get(c->members[r].engine, &stats);
        result.n_crossed_whole += stats.n_delta_whole;
        for (uint32_t g = 0; g < config->n_groups; g++) {
            const fcdp_delta *last = c->members[r].groups[g] ? c->members[r].groups[g]->delta.last : NULL;
            result.n_beside += last && last->fetches_beside;
        }
    }
    ends_check(&p, f);
    cluster_destroy(c);
    assert_nothing_lives_after("fault at call", f->n);
    return result;
}

/* The node's host memory has a copy for each of two NUMA nodes. */
static cluster_config copied(cluster_config config) {
    config.host_copies = true;
    return config;
}

static cluster_config packed(cluster_config config) {
    config.packed_half_bytes = 30000; /* several chunks */
    config.device_budget_bytes += PAGE_BYTES;
    return config;
}

/* They cross the nodes as differences. */
static cluster_config differing(cluster_config config) {
    config.host_computes = config.deltas = config.alike = true;
    return config;
}

static cluster_config on_device(cluster_config config) {
    config.host_computes = false;
    return config;
}

static cluster_config rounding(cluster_config config) {
    config.host_computes = config.rounds = config.alike = true;
    return config;
}

static cluster_config spilled(cluster_config config) {
    config.spill_dir = "/tmp";
    for (uint32_t g = 0; g < config.n_groups; g++) config.spilled[g] = g != 1;
    return config;
}

/* ---- every n ---- */

static long from_environment(const char *name, long fallback) {
    const char *given = getenv(name);
    return given ? atol(given) : fallback;
}

typedef struct range {
    long first, last, stride;
} range;

static range range_of(long n, long stride) {
    long only = from_environment("TEST_ONLY", 0);
    /* odd: calls come in turns of even length */
    stride = from_environment("TEST_STRIDE", stride * (from_environment("TEST_COARSER", 3) | 1));
    long first = 1 + (long)(fcdp__now_ns() / 1000 % (uint64_t)stride); /* many runs come to every n */
    return only ? (range){only, only, 1} : (range){first < n ? first : n, n, stride};
}

static const char *mapping_name(fcdp_mapping_mode mapping) {
    return mapping == FCDP_MAPPING_EXACT ? "exact" : "slots";
}

static void every_driver_call(cluster_config config, int code, long stride) {
    fault f = {.of_driver = true, .code = code, .stops = NOBODY};
    long n_calls = (long)run_with(&config, &f).n_driver_calls, n_failed = 0;
    range of = range_of(n_calls, stride);
    for (f.n = of.first; f.n <= of.last; f.n += of.stride) {
        outcome out = run_with(&config, &f);
        n_failed += out.n_failed > 0;
        for (uint32_t r = 0; r < 2 * config.node_size && out.took_s > MUCH_LATER_S; r++)
            print_message("rank %u: %s\n", r, out.ends[r].text);
        if (out.took_s > MUCH_LATER_S) fail_msg("call %ld: the ranks ended after %.1f s", f.n, out.took_s);
    }
    print_message("2 x %u, restore %s, %s: %ld driver calls, each %ld. from %ld on failed with %d: %ld runs "
                  "ended in errors\n",
                  config.node_size, config.restore ? "whole" : "slice", mapping_name(config.mapping), n_calls,
                  of.stride, of.first, code, n_failed);
    /* of fewer, all may be calls that are tried again */
    if ((of.last - of.first) / of.stride >= 25) assert_true(n_failed > 0);
}

static void test_every_driver_call_alone_on_a_node(void **state) {
    (void)state;
    every_driver_call(small_cluster(1, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS), CUDA_UNKNOWN, 7);
    every_driver_call(small_cluster(1, FCDP_RESTORE_SLICE, FCDP_MAPPING_EXACT), CUDA_UNKNOWN, 13);
    every_driver_call(small_cluster(1, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS), CUDA_OUT_OF_MEMORY, 29);
}

static void test_every_driver_call_with_fingerprints(void **state) {
    (void)state;
    every_driver_call(looking(small_cluster(1, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS)), CUDA_UNKNOWN, 11);
    every_driver_call(looking(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS)), CUDA_OUT_OF_MEMORY,
                      61);
}

static void test_every_driver_call_groups_together(void **state) {
    (void)state;
    every_driver_call(together(small_cluster(1, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)), CUDA_UNKNOWN, 11);
    every_driver_call(together(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_EXACT)), CUDA_UNKNOWN, 61);
    every_driver_call(together(small_cluster(1, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)), CUDA_OUT_OF_MEMORY,
                      37);
}

static void test_every_driver_call_restore_by_slice(void **state) {
    (void)state;
    every_driver_call(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS), CUDA_UNKNOWN, 31);
    every_driver_call(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_EXACT), CUDA_UNKNOWN, 61);
}

static void test_every_driver_call_packed(void **state) {
    (void)state;
    every_driver_call(packed(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS)), CUDA_UNKNOWN, 61);
    every_driver_call(packed(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_EXACT)), CUDA_OUT_OF_MEMORY,
                      61);
    every_driver_call(packed(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)), CUDA_UNKNOWN, 61);
}

static void test_every_driver_call_restore_whole(void **state) {
    (void)state;
    every_driver_call(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS), CUDA_UNKNOWN, 31);
    every_driver_call(copied(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_EXACT)), CUDA_UNKNOWN, 61);
}

static void test_every_driver_call_in_files(void **state) {
    (void)state;
    every_driver_call(spilled(small_cluster(1, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS)), CUDA_UNKNOWN, 11);
    every_driver_call(spilled(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_EXACT)), CUDA_UNKNOWN, 41);
    every_driver_call(spilled(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS)), CUDA_OUT_OF_MEMORY,
                      61);
}

static void test_every_driver_call_differences(void **state) {
    (void)state;
    every_driver_call(differing(small_cluster(1, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)), CUDA_UNKNOWN, 11);
    every_driver_call(differing(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_EXACT)), CUDA_UNKNOWN, 61);
    every_driver_call(together(differing(small_cluster(1, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS))),
                      CUDA_UNKNOWN, 13);
    every_driver_call(together(differing(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS))),
                      CUDA_UNKNOWN, 61);
}

static void test_every_driver_call_differences_on_a_device(void **state) {
    (void)state;
    every_driver_call(on_device(differing(small_cluster(1, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS))),
                      CUDA_UNKNOWN, 11);
    every_driver_call(on_device(differing(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_EXACT))),
                      CUDA_UNKNOWN, 61);
    every_driver_call(
        together(on_device(differing(small_cluster(1, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)))),
        CUDA_UNKNOWN, 13);
    every_driver_call(on_device(differing(small_cluster(1, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS))),
                      CUDA_OUT_OF_MEMORY, 31);
}

static void test_every_driver_call_differences_by_slice(void **state) {
    (void)state;
    every_driver_call(on_device(differing(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS))),
                      CUDA_UNKNOWN, 61);
    every_driver_call(
        together(on_device(differing(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_EXACT)))),
        CUDA_UNKNOWN, 61);
}

/* From the third gather on a base has a name, so shards are fetched beside the turn, and what is decoded
 * comes to the device by parts. The last gather comes right, or wrong. */
static void test_every_driver_call_differences_of_named_bases(void **state) {
    (void)state;
    size_t part_bytes = fcdp__delta_part_bytes;
    fcdp__delta_part_bytes = 1;
    n_steps = 4;
    for (uint32_t way = 0; way < 2; way++) {
        fcdp_restore_mode restore = way ? FCDP_RESTORE_SLICE : FCDP_RESTORE_WHOLE;
        cluster_config config = on_device(differing(small_cluster(1 + way, restore, FCDP_MAPPING_SLOTS)));
        config.device_budget_bytes += 8 * (size_t)PAGE_BYTES; /* own bases need spare pages */
        fault none = {.stops = NOBODY};
        outcome right = run_with(&config, &none);
        assert_true(right.n_beside > 0);
        every_driver_call(config, CUDA_UNKNOWN, way ? 61 : 31);
        spoil_at = right.n_exchanges;
        assert_true(run_with(&config, &none).n_crossed_whole > right.n_crossed_whole);
        every_driver_call(config, CUDA_UNKNOWN, 61);
        spoil_at = 0;
    }
    fcdp__delta_part_bytes = part_bytes;
    n_steps = N_STEPS;
}

static void test_every_driver_call_rounded(void **state) {
    (void)state;
    every_driver_call(rounding(small_cluster(1, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)), CUDA_UNKNOWN, 17);
    every_driver_call(together(rounding(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS))),
                      CUDA_UNKNOWN, 61);
}

static void every_collective(cluster_config config, hub_fault code) {
    fault f = {.code = (int)code, .stops = NOBODY};
    long n_calls = run_with(&config, &f).n_collectives;
    range of = range_of(n_calls, config.node_size); /* as many ranks make the same ones */
    for (f.n = of.first; f.n <= of.last; f.n += of.stride) {
        outcome out = run_with(&config, &f);
        assert_true(out.n_failed > 0);
        if (out.took_s > MUCH_LATER_S)
            fail_msg("collective %ld: the ranks ended after %.1f s", f.n, out.took_s);
    }
    print_message("2 x %u, restore %s, %s: %ld collectives, each %ld. failed once\n", config.node_size,
                  config.restore ? "whole" : "slice", mapping_name(config.mapping), n_calls, of.stride);
}

static void every_collective_of_all(hub_fault code) {
    every_collective(small_cluster(1, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS), code);
    every_collective(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS), code);
    every_collective(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_EXACT), code);
    every_collective(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS), code);
    every_collective(together(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS)), code);
    every_collective(packed(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS)), code);
    every_collective(differing(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)), code);
    every_collective(together(differing(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS))), code);
    every_collective(on_device(differing(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS))), code);
    every_collective(on_device(differing(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_EXACT))), code);
    every_collective(rounding(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)), code);
}

static void test_every_collective_is_refused(void **state) {
    (void)state;
    every_collective_of_all(HUB_REFUSED);
}
static void test_every_collective_fails_on_one_rank(void **state) {
    (void)state;
    every_collective_of_all(HUB_FAILS_HERE);
}
static void test_every_collective_fails_on_all_ranks(void **state) {
    (void)state;
    every_collective_of_all(HUB_FAILS_EVERYWHERE);
}

/* ---- unreported failures ---- */

/* All ends within the timeout, and the monitor's period, from the last thing that was begun;
 * every failure names ranks or slices. */
static void late_ends_check(const cluster_config *config, const fault *f, const outcome *out, int *n_named) {
    uint32_t n_ranks = config->n_nodes * config->node_size;
    double bound_s = 4 * config->timeout_s + MUCH_LATER_S;
    if (out->took_s > bound_s) fail_msg("call %ld: the ranks ended after %.1f s", f->n, out->took_s);
    for (uint32_t r = 0; r < n_ranks; r++) {
        const rank_end *end = &out->ends[r];
        if (!end->status || !strstr(end->text, "did not come")) continue;
        if (!strstr(end->text, " rank "))
            fail_msg("call %ld: rank %u: no rank is named in '%s'", f->n, r, end->text);
        if (!strstr(end->text, "FCDP_TIMEOUT")) fail_msg("call %ld: rank %u: %s", f->n, r, end->text);
        ++*n_named;
    }
}

static void every_collective_stalls(cluster_config config, long stride) {
    fault f = {.code = HUB_STALLS, .stops = NOBODY};
    long n_calls = run_with(&config, &f).n_collectives, n_runs = 0;
    range of = range_of(n_calls, stride);
    config.timeout_s = SHORT_S;
    for (f.n = of.first; f.n <= of.last; f.n += of.stride, n_runs++) {
        int n_named = 0;
        outcome out = run_with(&config, &f);
        late_ends_check(&config, &f, &out, &n_named);
        if (!n_named) {
            for (uint32_t r = 0; r < 2 * config.node_size; r++)
                print_message("rank %u: %s\n", r, out.ends[r].text);
            fail_msg("collective %ld stalled, and no rank names the ranks that did not come", f.n);
        }
    }
    print_message("2 x %u, restore %s, %s: %ld collectives, %ld stalled\n", config.node_size,
                  config.restore ? "whole" : "slice", mapping_name(config.mapping), n_calls, n_runs);
}

static void test_every_collective_stalls(void **state) {
    (void)state;
    every_collective_stalls(small_cluster(1, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS), 1);
    every_collective_stalls(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS), 5);
    every_collective_stalls(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_EXACT), 7);
    every_collective_stalls(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS), 2);
    every_collective_stalls(differing(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)), 5);
    every_collective_stalls(on_device(differing(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS))),
                            5);
    every_collective_stalls(on_device(differing(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS))),
                            7);
}

/* The rank that stops waits for no rank that does not come, so it ends well. Where the machine is so busy
 * that a peer is later than the timeout, the same is tried with a timeout eight times as long, twice. */
static outcome stop_run(cluster_config *config, const fault *f) {
    for (int attempt = 0;; attempt++, config->timeout_s *= 8) {
        outcome out = run_with(config, f);
        if (out.ends[f->stops].status != FCDP_ERR_TIMEOUT || attempt == 2) return out;
        print_message("stop before call %ld, timeout %.1f s: '%s'\n", f->n, config->timeout_s,
                      out.ends[f->stops].text);
    }
}

/* Its streams go on with what they have; its peers wait for what it does not begin. */
static void every_stop(cluster_config config, long stride) {
    fault f = {.stops = NOBODY};
    int n_actions = run_with(&config, &f).n_actions, n_named = 0;
    range of = range_of(n_actions - 1, stride);
    for (f.n = of.first; f.n <= of.last; f.n += of.stride) {
        f.stops = (int)(f.n % (2 * config.node_size));
        config.timeout_s = SHORT_S;
        outcome out = stop_run(&config, &f);
        late_ends_check(&config, &f, &out, &n_named);
        if (out.ends[f.stops].status)
            fail_msg("rank %d, which stops, ended with '%s'", f.stops, out.ends[f.stops].text);
    }
    print_message(
        "2 x %u, restore %s: a rank stops before each %ld. of %d calls; %d ends name the missing ranks\n",
        config.node_size, config.restore ? "whole" : "slice", of.stride, n_actions, n_named);
}

static void test_a_rank_stops(void **state) {
    (void)state;
    every_stop(small_cluster(1, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS), 3);
    every_stop(small_cluster(2, FCDP_RESTORE_SLICE, FCDP_MAPPING_SLOTS), 7);
    every_stop(copied(small_cluster(2, FCDP_RESTORE_WHOLE, FCDP_MAPPING_SLOTS)), 7);
}

/* TEST_PART: collectives, most of whose time is waits, or driver_calls; both without it. */
int main(void) {
    const struct CMUnitTest collectives[] = {
        cmocka_unit_test(test_every_collective_is_refused),
        cmocka_unit_test(test_every_collective_fails_on_one_rank),
        cmocka_unit_test(test_every_collective_fails_on_all_ranks),
        cmocka_unit_test(test_every_collective_stalls),
        cmocka_unit_test(test_a_rank_stops),
    };
    const struct CMUnitTest driver_calls[] = {
        cmocka_unit_test(test_every_driver_call_alone_on_a_node),
        cmocka_unit_test(test_every_driver_call_with_fingerprints),
        cmocka_unit_test(test_every_driver_call_groups_together),
        cmocka_unit_test(test_every_driver_call_packed),
        cmocka_unit_test(test_every_driver_call_in_files),
        cmocka_unit_test(test_every_driver_call_differences),
        cmocka_unit_test(test_every_driver_call_differences_on_a_device),
        cmocka_unit_test(test_every_driver_call_differences_by_slice),
        cmocka_unit_test(test_every_driver_call_differences_of_named_bases),
        cmocka_unit_test(test_every_driver_call_rounded),
        cmocka_unit_test(test_every_driver_call_restore_by_slice),
        cmocka_unit_test(test_every_driver_call_restore_whole),
    };
    const char *part = getenv("TEST_PART");
    int n_failed = 0;
    fcdp_log_set_level(FCDP_LOG_QUIET); /* leftovers that a fault causes are told, and expected */
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    if (!part || strcmp(part, "driver_calls") != 0)
        n_failed += cmocka_run_group_tests(collectives, NULL, NULL);
    if (!part || strcmp(part, "collectives") != 0)
        n_failed += cmocka_run_group_tests(driver_calls, NULL, NULL);
    return n_failed;
}
