/* test_search.c - the planner's search against exhaustive enumeration, and on as many regions as a job
 * has. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <math.h>

#include "tests/comm/random.h"
#include "tools/plan/choices.h"

enum { MOST = 7, CHOICES = 5, INSTANCES = 200, LAYERS = 100, ALL_STATES = 1 << 20, SOME_STATES = 1 << 11 };

typedef struct instance {
    plan_choice choices[MOST * CHOICES];
    size_t n;
    double device, host;
} instance;

/* Sizes that often are equal, so that there are ties; some choices are not to be had. */
static void instance_make(instance *x, test_random *random) {
    x->n = 1 + random_below(random, MOST);
    uint32_t sizes = 1 + random_below(random, 40);
    for (size_t i = 0; i < x->n * CHOICES; i++) {
        plan_choice *c = &x->choices[i];
        c->seconds = random_below(random, 12) ? (double)random_below(random, 1000) / 100 : INFINITY;
        c->device_bytes = random_below(random, 2) ? (double)(random_below(random, sizes) * 1000) : 0;
        c->host_bytes = random_below(random, 2) ? (double)(random_below(random, sizes) * 1000) : 0;
    }
    x->device = random_below(random, 6) ? (double)(random_below(random, sizes * (uint32_t)x->n) * 1000) : 0;
    x->host = random_below(random, 6) ? (double)(random_below(random, sizes * (uint32_t)x->n) * 1000) : 1e30;
}

static double enumerate(const instance *x, size_t i, double seconds, double device, double host) {
    if (device > x->device || host > x->host) return INFINITY;
    if (i == x->n) return seconds;
    double best = INFINITY;
    for (size_t c = 0; c < CHOICES; c++) {
        const plan_choice *choice = &x->choices[i * CHOICES + c];
        best = fmin(best, enumerate(x, i + 1, seconds + choice->seconds, device + choice->device_bytes,
                                    host + choice->host_bytes));
    }
    return best;
}

/* What was chosen is what is said of it, and within the budgets. */
static void check_sums(const instance *x, const uint8_t *chosen, const plan_found *found) {
    double seconds = 0, device = 0, host = 0;
    for (size_t i = 0; i < x->n; i++) {
        assert_true(chosen[i] < CHOICES);
        const plan_choice *choice = &x->choices[i * CHOICES + chosen[i]];
        seconds += choice->seconds;
        device += choice->device_bytes;
        host += choice->host_bytes;
    }
    assert_true(fabs(seconds - found->seconds) < 1e-9);
    assert_true(device == found->device_bytes && device <= x->device);
    assert_true(host == found->host_bytes && host <= x->host);
}

static void finds_what_enumeration_finds(void **state) {
    (void)state;
    test_random random = {random_seed("plan_search", (uint64_t)time(NULL))};
    int n_fit = 0;
    for (int k = 0; k < INSTANCES; k++) {
        instance x;
        uint8_t chosen[MOST];
        plan_found found;
        instance_make(&x, &random);
        double best = enumerate(&x, 0, 0, 0, 0);
        assert_true(
            plan_search(x.choices, x.n, CHOICES, x.device, x.host, INFINITY, ALL_STATES, chosen, &found));
        assert_int_equal(found.fits, isfinite(best));
        if (!found.fits) continue;
        n_fit++;
        assert_true(found.is_exact);
        assert_true(fabs(found.seconds - best) < 1e-9 && fabs(found.bound - best) < 1e-9);
        check_sums(&x, chosen, &found);
    }
    assert_true(n_fit > INSTANCES / 4);
}

/* A caller that has a solution is given a better one, or none; no prices give a bound above the best. */
static void only_better_solutions_are_found(void **state) {
    (void)state;
    test_random random = {random_seed("plan_search", (uint64_t)time(NULL))};
    for (int k = 0; k < INSTANCES; k++) {
        instance x;
        uint8_t chosen[MOST];
        plan_found found;
        instance_make(&x, &random);
        double best = enumerate(&x, 0, 0, 0, 0);
        double prices[] = {random_below(&random, 100) / 1e5, random_below(&random, 2) / 1e4};
        assert_true(plan_search_bound(x.choices, x.n, CHOICES, x.device, x.host, prices) <= best + 1e-9);
        if (isinf(best)) continue;
        assert_true(plan_search(x.choices, x.n, CHOICES, x.device, x.host, best, ALL_STATES, chosen, &found));
        assert_true(!found.fits && fabs(found.bound - best) < 1e-9);
        double known = best + 1;
        assert_true(
            plan_search(x.choices, x.n, CHOICES, x.device, x.host, known, ALL_STATES, chosen, &found));
        assert_true(found.fits && fabs(found.seconds - best) < 1e-9);
        check_sums(&x, chosen, &found);
    }
}

/* With room for few states what is found may be worse, but says by how much at most. */
static void few_states_leave_a_true_bound(void **state) {
    (void)state;
    test_random random = {random_seed("plan_search", (uint64_t)time(NULL))};
    for (int k = 0; k < INSTANCES; k++) {
        instance x;
        uint8_t chosen[MOST];
        plan_found found;
        instance_make(&x, &random);
        double best = enumerate(&x, 0, 0, 0, 0);
        assert_true(plan_search(x.choices, x.n, CHOICES, x.device, x.host, INFINITY, 2, chosen, &found));
        assert_true(found.bound <= best + 1e-9);
        if (!found.fits) continue;
        check_sums(&x, chosen, &found);
        assert_true(found.seconds >= best - 1e-9);
        if (found.is_exact) assert_true(fabs(found.seconds - best) < 1e-9);
    }
}

/* 100 layers, all of another size, where both budgets bind: too many states for an exact answer, a close
 * one all the same. The seconds are printed and not asserted: others compute here too. */
static void a_job_s_layers_take_seconds(void **state) {
    (void)state;
    test_random random = {random_seed("plan_search", (uint64_t)time(NULL))};
    plan_choice *choices = calloc(LAYERS * PLAN_N_TIERS, sizeof *choices);
    uint8_t chosen[LAYERS];
    plan_found found;
    assert_non_null(choices);
    double all = 0;
    for (size_t i = 0; i < LAYERS; i++) {
        double bytes = 1e8 + random_below(&random, 900000000), compute = bytes / 2e10;
        double rates[PLAN_N_TIERS] = {1e30, 5e10, 2e10, 3e9, 1e9};
        for (int t = 0; t < PLAN_N_TIERS; t++) {
            plan_choice *c = &choices[i * PLAN_N_TIERS + (size_t)t];
            c->seconds = fmax(compute, bytes / rates[t]);
            c->device_bytes = t == PLAN_ON_DEVICE ? bytes : 0;
            c->host_bytes = t == PLAN_BY_SLICE || t == PLAN_WHOLE ? bytes : 0;
        }
        all += bytes;
    }
    clock_t begin = clock();
    assert_true(
        plan_search(choices, LAYERS, PLAN_N_TIERS, all / 3, all / 3, INFINITY, SOME_STATES, chosen, &found));
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    printf("%d regions: %.2f s of a CPU, %.6g s, bound %.6g s\n", LAYERS, seconds, found.seconds,
           found.bound);
    assert_true(found.fits && found.seconds <= found.bound * 1.02);
    free(choices);
}

/* Of `tiers`, how many of the first n regions of one kind are on the device. */
static size_t kept_of(const plan_region *regions, const uint8_t *tiers, size_t n, double trainable) {
    size_t n_kept = 0;
    for (size_t i = 0; i < n; i++) n_kept += regions[i].trainable == trainable && tiers[i] == PLAN_ON_DEVICE;
    return n_kept;
}

/* Regions of three kinds, mixed: each kind has as many in each tier as before, and in front of each region as
 * large a share of its kind is kept as in all, but for one. */
static void kept_regions_are_spaced_evenly(void **state) {
    (void)state;
    test_random random = {random_seed("plan_spread", (uint64_t)time(NULL))};
    for (int round = 0; round < INSTANCES; round++) {
        plan_region regions[LAYERS] = {0};
        uint8_t tiers[LAYERS];
        size_t n = 1 + random_below(&random, LAYERS), before[3][PLAN_N_TIERS] = {{0}}, of_kind[3] = {0};
        for (size_t i = 0; i < n; i++) {
            size_t kind = random_below(&random, 3);
            regions[i].trainable = (double)kind;
            tiers[i] = (uint8_t)random_below(&random, PLAN_N_TIERS);
            before[kind][tiers[i]]++;
        }
        plan_job job = {.n_regions = n, .regions = regions};
        plan_tiers_spread(&job, NULL, tiers);
        for (size_t i = 0; i < n; i++) {
            size_t kind = (size_t)regions[i].trainable, total = 0;
            of_kind[kind]++;
            for (int t = 0; t < PLAN_N_TIERS; t++) total += before[kind][t];
            double share = (double)before[kind][PLAN_ON_DEVICE] / (double)total;
            double kept = (double)kept_of(regions, tiers, i + 1, regions[i].trainable);
            assert_true(fabs(kept - share * (double)of_kind[kind]) < 1);
        }
        for (size_t i = 0; i < n; i++) assert_true(before[(size_t)regions[i].trainable][tiers[i]]-- > 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_what_enumeration_finds),   cmocka_unit_test(only_better_solutions_are_found),
        cmocka_unit_test(few_states_leave_a_true_bound),  cmocka_unit_test(a_job_s_layers_take_seconds),
        cmocka_unit_test(kept_regions_are_spaced_evenly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
